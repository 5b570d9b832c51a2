//! One UDP control socket.
//!
//! It differs from a plain bound socket in two ways. Datagrams leave from the address that the question was sent to
//! (`IP_PKTINFO`), because the peer takes answers from no other address. ICMP refusals are read from the error queue
//! (`IP_RECVERR`), which names the destination; otherwise the error of one peer would be reported on the next send to
//! another.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;

use slim_core::{canonical, wire};
use slim_sys::OwnFd;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::control::udp::{self, RECEIVE_BUFFER};
use crate::host::ports::on_quiet_port;
use crate::kernel::readiness;
use crate::kernel::sys;

/// Most datagrams taken from each socket before the endpoint handles a timeout.
pub(crate) const MOST_WAITING: usize = 256;

/// One UDP socket.
pub(crate) struct ControlSocket {
    pub(crate) fd: AsyncFd<Arc<OwnFd>>,
    pub(crate) bound: SocketAddr,
}

/// The control socket that goes with the listener `fd` on `addr`.
pub(crate) fn bind_for_listener(fd: BorrowedFd<'_>, addr: SocketAddr) -> io::Result<OwnFd> {
    let only_v6 = addr.is_ipv4()
        || sys::option(fd.as_raw_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY).unwrap_or(0) != 0;
    bind(addr, only_v6)
}

/// A control socket on exactly this address: one of the process's own, or one for a connection whose listener belongs
/// to another process, or was inherited.
pub(crate) fn bind_alone(addr: SocketAddr) -> io::Result<OwnFd> {
    bind(addr, true)
}

fn bind(addr: SocketAddr, only_v6: bool) -> io::Result<OwnFd> {
    let kind = Type::DGRAM.nonblocking().cloexec();
    let own = OwnFd::make(|| Socket::new_raw(Domain::for_address(addr), kind, None))?;
    let (fd, socket) = (own.raw(), SockRef::from(&own));
    if addr.is_ipv6() {
        socket.set_only_v6(only_v6)?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
        sys::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
    } else {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    }
    if addr.is_ipv4() || !only_v6 {
        sys::set_option(fd, libc::IPPROTO_IP, libc::IP_RECVERR, 1)?;
    }
    // With the privilege, beyond the limit of the system; without it, up to that limit.
    if sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER).is_err() {
        sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER)?;
    }
    socket.bind(&addr.into())?;
    Ok(own)
}

/// A socket for [`Control::send_aside`](crate::control::Control::send_aside), on a port that no listener gets by
/// chance.
pub(crate) fn aside(from: SocketAddr) -> io::Result<Rc<ControlSocket>> {
    on_quiet_port(from.ip(), |addr| {
        let fd = bind(addr, true)?;
        ControlSocket::new(fd, addr).map(Rc::new)
    })
}

/// The address among `bound` that can answer from `from`. A program may listen on the same port for IPv4, and for IPv6
/// only; so an IPv6 address answers for an IPv4 address only if there is nothing better.
pub(crate) fn answering(
    bound: impl Iterator<Item = SocketAddr>,
    from: SocketAddr,
) -> Option<SocketAddr> {
    let fitting = bound.filter(|bound| {
        let family = bound.is_ipv6() || from.is_ipv4();
        let ip = bound.ip().is_unspecified() || canonical(*bound) == from;
        bound.port() == from.port() && ip && family
    });
    fitting.min_by_key(|bound| bound.is_ipv4() != from.is_ipv4())
}

impl ControlSocket {
    pub(crate) fn new(fd: OwnFd, bound: SocketAddr) -> io::Result<Self> {
        let fd = readiness::watch(Arc::new(fd), Interest::READABLE | Interest::ERROR)?;
        Ok(ControlSocket { fd, bound })
    }

    /// Takes the next datagram: its source, its destination, and its data.
    pub(crate) fn take<'a>(
        &self,
        buf: &'a mut [u8],
    ) -> io::Result<(SocketAddr, SocketAddr, &'a [u8])> {
        let datagram = udp::recv_datagram(self.fd.get_ref().raw(), buf)?;
        let from = canonical(datagram.from);
        let mut to = datagram.to.unwrap_or(self.bound);
        to.set_port(self.bound.port());
        let data = buf.get(..datagram.len).unwrap_or_default();
        Ok((from, canonical(to), data))
    }

    /// Takes the next entry of the error queue. For a refusal: the destination that refused, and the length of the
    /// quoted data in `buf`. An error when the queue is empty.
    pub(crate) fn take_refusal(&self, buf: &mut [u8]) -> io::Result<Option<(SocketAddr, usize)>> {
        udp::recv_refusal(self.fd.get_ref().raw(), buf)
    }

    /// Passes the datagrams that have arrived to `each`, but not all of a flood.
    pub(crate) fn take_waiting(&self, mut each: impl FnMut(SocketAddr, SocketAddr, &[u8])) {
        let mut buf = BUFFER;
        for _ in 0..MOST_WAITING {
            match self.take(&mut buf) {
                Ok((from, to, data)) => each(from, to, data),
                // A refusal that is reported here, too, does not end the loop.
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(_) => break,
            }
        }
    }

    /// Sends a message, from the address `source` if given.
    pub(crate) fn send(
        &self,
        to: SocketAddr,
        source: Option<SocketAddr>,
        data: &[u8],
    ) -> io::Result<()> {
        let of_family = |addr: SocketAddr| match addr {
            SocketAddr::V4(v4) if self.bound.is_ipv6() => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            addr => addr,
        };
        let (to, source) = (of_family(to), source.map(of_family));
        let fd = self.fd.get_ref().raw();
        let send = |source| match udp::send_datagram(fd, data, to, source) {
            // The refusal of an earlier datagram, reported here although it stays in the error queue.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                udp::send_datagram(fd, data, to, source)
            }
            other => other,
        };
        match (send(source), source) {
            // This host has lost the address; a message from another address may still be of use.
            (Err(e), Some(_)) if e.kind() != io::ErrorKind::WouldBlock => send(None),
            (sent, _) => sent,
        }
    }
}

/// A buffer for one datagram. It is longer than any message, so that a datagram that is too long does not look right
/// after truncation.
pub(crate) const BUFFER: [u8; wire::MAX_LEN + 1] = [0; wire::MAX_LEN + 1];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_socket_has_a_larger_receive_buffer_than_usual() {
        let room = |fd| sys::option(fd, libc::SOL_SOCKET, libc::SO_RCVBUF).unwrap();
        let ours = bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
        let usual = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(room(ours.raw()) > room(usual.as_raw_fd()));
    }

    #[test]
    fn each_family_answers_from_its_own_socket() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (v4, v6, one) = (addr("0.0.0.0:7"), addr("[::]:7"), addr("10.0.0.1:7"));
        let choose = |bound: &[SocketAddr], from| answering(bound.iter().copied(), addr(from));
        // The order of the sockets does not matter.
        for both in [[v4, v6], [v6, v4]] {
            assert_eq!(choose(&both, "10.0.0.1:7"), Some(v4));
            assert_eq!(choose(&both, "[fd00::1]:7"), Some(v6));
        }
        assert_eq!(choose(&[v6], "10.0.0.1:7"), Some(v6));
        assert_eq!(choose(&[v4], "[fd00::1]:7"), None);
        assert_eq!(choose(&[one], "10.0.0.2:7"), None);
        assert_eq!(choose(&[v4], "10.0.0.1:8"), None);
    }
}
