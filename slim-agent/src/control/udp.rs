//! Datagrams, with what the kernel reports about them: their destination, and refusals.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::RawFd;

use libc::{c_int, c_void, cmsghdr, msghdr};
use socket2::SockAddr;

/// Receive buffer of a control socket, if the system allows as much. Thousands of flows may be opened, or break, at
/// once, and each sends questions. Memory is used only while datagrams wait.
pub(crate) const RECEIVE_BUFFER: i32 = 4 * 1024 * 1024;

/// Room for the control data that we request: the destination address, or an error with its sender.
const CONTROL_LEN: usize = 256;

/// Aligned as `cmsghdr` requires.
#[repr(C, align(8))]
struct ControlBuffer([u8; CONTROL_LEN]);

/// A datagram that came in.
pub(crate) struct Datagram {
    pub(crate) len: usize,
    pub(crate) from: SocketAddr,
    /// Own address that it was sent to, with port 0, if the kernel reported it.
    pub(crate) to: Option<SocketAddr>,
}

/// Receives a datagram and the address it was sent to, without blocking.
pub(crate) fn recv_datagram(fd: RawFd, buf: &mut [u8]) -> io::Result<Datagram> {
    let mut control = ControlBuffer([0; CONTROL_LEN]);
    let (len, from, header) = recvmsg(fd, buf, &mut control, 0)?;
    let mut to = None;
    // SAFETY: `header` and `control` were filled by the kernel just now.
    unsafe {
        each_cmsg(&header, |level, kind, data| match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                if let Some(info) = read::<libc::in_pktinfo>(data) {
                    let ip = IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes());
                    to = Some(SocketAddr::new(ip, 0));
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                if let Some(info) = read::<libc::in6_pktinfo>(data) {
                    let ip = Ipv6Addr::from(info.ipi6_addr.s6_addr);
                    // An address that is valid on one link only belongs to the receiving interface.
                    to = Some(SocketAddrV6::new(ip, 0, 0, info.ipi6_ifindex).into());
                }
            }
            _ => {}
        });
    }
    let from = from.ok_or(io::ErrorKind::InvalidData)?;
    Ok(Datagram { len, from, to })
}

/// Receives a datagram, and its source, without blocking.
pub(crate) fn recv_from(fd: RawFd, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
    let mut len = -1;
    // SAFETY: `storage` is valid for writes of `room` bytes, and `buf` for writes of its length.
    let (_, from) = unsafe {
        SockAddr::try_init(|storage, room| {
            let at = buf.as_mut_ptr().cast();
            let flags = libc::MSG_DONTWAIT;
            len = libc::recvfrom(fd, at, buf.len(), flags, storage.cast(), room);
            (len >= 0)
                .then_some(())
                .ok_or_else(io::Error::last_os_error)
        })
    }?;
    let from = from.as_socket().ok_or(io::ErrorKind::InvalidData)?;
    Ok((usize::try_from(len).unwrap_or(0), from))
}

/// Takes one error from the socket's error queue. If it is an ICMP message that nothing listens at the destination,
/// returns the destination of the datagram that caused it, and how much of that datagram is quoted in `buf`. `Ok(None)`
/// for any other error.
pub(crate) fn recv_refusal(fd: RawFd, buf: &mut [u8]) -> io::Result<Option<(SocketAddr, usize)>> {
    let mut control = ControlBuffer([0; CONTROL_LEN]);
    let (len, to, header) = recvmsg(fd, buf, &mut control, libc::MSG_ERRQUEUE)?;
    let mut refused = false;
    // SAFETY: as in `recv_datagram`.
    unsafe {
        each_cmsg(&header, |level, kind, data| {
            let is_error = (level, kind) == (libc::IPPROTO_IP, libc::IP_RECVERR)
                || (level, kind) == (libc::IPPROTO_IPV6, libc::IPV6_RECVERR);
            if let Some(error) = is_error
                .then(|| read::<libc::sock_extended_err>(data))
                .flatten()
            {
                let icmp = matches!(
                    error.ee_origin,
                    libc::SO_EE_ORIGIN_ICMP | libc::SO_EE_ORIGIN_ICMP6
                );
                refused |= icmp && error.ee_errno == libc::ECONNREFUSED as u32;
            }
        });
    }
    Ok(to.filter(|_| refused).map(|to| (to, len)))
}

/// Sends a datagram without blocking, from the address `source` if one is given. On an IPv6 socket,
/// IPv4 addresses must be given mapped.
pub(crate) fn send_datagram(
    fd: RawFd,
    data: &[u8],
    to: SocketAddr,
    source: Option<SocketAddr>,
) -> io::Result<()> {
    let to = SockAddr::from(to);
    let mut control = ControlBuffer([0; CONTROL_LEN]);
    let mut iov = libc::iovec {
        iov_base: data.as_ptr().cast_mut().cast(),
        iov_len: data.len(),
    };
    // SAFETY: all bytes zero is a valid `msghdr`.
    let mut header: msghdr = unsafe { mem::zeroed() };
    header.msg_name = to.as_ptr().cast_mut().cast();
    header.msg_namelen = to.len();
    header.msg_iov = &mut iov;
    header.msg_iovlen = 1;
    match source {
        Some(SocketAddr::V4(source)) => {
            let ip = source.ip();
            let info = libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(ip.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            attach(
                &mut header,
                &mut control,
                libc::IPPROTO_IP,
                libc::IP_PKTINFO,
                &info,
            );
        }
        Some(SocketAddr::V6(source)) => {
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: source.ip().octets(),
                },
                ipi6_ifindex: source.scope_id(),
            };
            attach(
                &mut header,
                &mut control,
                libc::IPPROTO_IPV6,
                libc::IPV6_PKTINFO,
                &info,
            );
        }
        None => {}
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `header` points to an address, one buffer and control data that outlive the call.
    let n = unsafe { libc::sendmsg(fd, &header, flags) };
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn recvmsg(
    fd: RawFd,
    buf: &mut [u8],
    control: &mut ControlBuffer,
    flags: c_int,
) -> io::Result<(usize, Option<SocketAddr>, msghdr)> {
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: all bytes zero is a valid `msghdr`.
    let mut header: msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &mut iov;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_LEN as _;
    let mut n = -1;
    // SAFETY: `storage` is valid for writes of `len` bytes, and the header points to it, to one
    // buffer and to control space that outlive the call.
    let (_, from) = unsafe {
        SockAddr::try_init(|storage, len| {
            header.msg_name = storage.cast();
            header.msg_namelen = *len;
            n = libc::recvmsg(fd, &mut header, flags | libc::MSG_DONTWAIT);
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            *len = header.msg_namelen;
            Ok(())
        })
    }?;
    header.msg_name = std::ptr::null_mut();
    header.msg_iov = std::ptr::null_mut();
    Ok((usize::try_from(n).unwrap_or(0), from.as_socket(), header))
}

/// Calls `f` with level, type and data of each control message.
///
/// # Safety
/// `header` must come from a successful `recvmsg`, and its control buffer must still be there.
unsafe fn each_cmsg(header: &msghdr, mut f: impl FnMut(c_int, c_int, &[u8])) {
    // SAFETY: the caller's promise; the macros stay within `msg_controllen`.
    unsafe {
        let mut at: *const cmsghdr = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            let cmsg = &*at;
            let len = (cmsg.cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            let data = std::slice::from_raw_parts(libc::CMSG_DATA(at), len);
            f(cmsg.cmsg_level, cmsg.cmsg_type, data);
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
}

/// A plain C structure from the start of `data`, if it is all there.
///
/// # Safety
/// Any bytes must be a valid `T`.
unsafe fn read<T: Copy>(data: &[u8]) -> Option<T> {
    (data.len() >= mem::size_of::<T>())
        // SAFETY: enough bytes are there; unaligned is allowed; the caller promises validity.
        .then(|| unsafe { data.as_ptr().cast::<T>().read_unaligned() })
}

/// Makes `info` the one control message of `header`.
fn attach<T: Copy>(
    header: &mut msghdr,
    control: &mut ControlBuffer,
    level: c_int,
    kind: c_int,
    info: &T,
) {
    let size = mem::size_of::<T>();
    // SAFETY: pure arithmetic.
    let (len, space) = unsafe {
        (
            libc::CMSG_LEN(size as u32) as usize,
            libc::CMSG_SPACE(size as u32) as usize,
        )
    };
    debug_assert!(space <= CONTROL_LEN);
    header.msg_control = control.0.as_mut_ptr().cast::<c_void>();
    header.msg_controllen = space as _;
    // SAFETY: the buffer is aligned and holds `space` bytes, so the first header and its data are
    // inside it.
    unsafe {
        let cmsg = libc::CMSG_FIRSTHDR(header);
        (*cmsg).cmsg_level = level;
        (*cmsg).cmsg_type = kind;
        (*cmsg).cmsg_len = len as _;
        libc::CMSG_DATA(cmsg).cast::<T>().write_unaligned(*info);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::socket::bind_alone;
    use std::net::{Ipv4Addr, UdpSocket};

    #[test]
    fn a_refusal_tells_what_was_refused_and_where() {
        let ours = |ip: IpAddr| bind_alone(SocketAddr::new(ip, 0)).expect("a socket");
        let nobody = |ip: IpAddr| {
            let was = UdpSocket::bind((ip, 0)).expect("a socket");
            was.local_addr().expect("its address")
        };
        let v4 = IpAddr::from(Ipv4Addr::LOCALHOST);
        let v6 = IpAddr::from(Ipv6Addr::LOCALHOST);
        for ip in [v4, v6] {
            let (socket, to) = (ours(ip), nobody(ip));
            let fd = socket.raw();
            let data: Vec<u8> = (0..=255).collect();
            send_datagram(fd, &data, to, None).expect("sent");
            let mut buf = [0; 512];
            let refused = recv_refusal(fd, &mut buf).expect("the kernel answers at once");
            assert_eq!(refused, Some((to, data.len())));
            assert_eq!(buf[..data.len()], data);
        }
    }
}
