//! Safe wrappers of the agent's system calls, besides those of [`slim_sys`]. None of them goes through libc, so no hook
//! sees them.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{OwnedFd, RawFd};

use libc::c_int;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    self, AddressFamily, Protocol, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType,
};
use slim_sys::reserve::{self, For};
use slim_sys::{OwnFd, at};

/// The flags of all our sockets.
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn netlink(kind: SocketType, flags: SocketFlags, protocol: Option<Protocol>) -> io::Result<OwnFd> {
    OwnFd::make(|| {
        let made = net::socket_with(AddressFamily::NETLINK, kind, flags, protocol);
        Ok(made?)
    })
}

/// A socket for questions to the kernel about links and addresses. The answer is there before sending the question
/// returns.
pub(crate) fn route_socket() -> io::Result<OwnFd> {
    netlink(SocketType::RAW, FLAGS, None)
}

/// A socket that reports changes of links and addresses.
pub(crate) fn rtnetlink_watch() -> io::Result<OwnFd> {
    let fd = route_socket()?;
    let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
    net::bind(&fd, &SocketAddrNetlink::new(0, groups as u32))?;
    Ok(fd)
}

/// A socket for questions to the kernel about other sockets. The answer is there before sending the question returns.
pub(crate) fn sock_diag() -> io::Result<OwnFd> {
    netlink(
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )
}

/// Reads without blocking.
pub(crate) fn recv(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    let (n, _) = net::recv(at(fd), buf, RecvFlags::DONTWAIT)?;
    Ok(n)
}

/// Writes without blocking and without SIGPIPE.
pub(crate) fn send(fd: RawFd, buf: &[u8]) -> io::Result<usize> {
    Ok(net::send(
        at(fd),
        buf,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )?)
}

/// A file, read from the position of its descriptor on.
pub(crate) struct Reading<'a>(pub(crate) &'a OwnFd);

impl io::Read for Reading<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, buf)?)
    }
}

/// One `write`, for files and terminals. A line that went out in part counts as written.
pub(crate) fn write_line(fd: RawFd, line: &[u8]) -> io::Result<()> {
    rustix::io::write(at(fd), line)?;
    Ok(())
}

/// Accepts a connection, non-blocking and close-on-exec.
pub(crate) fn accept(fd: RawFd) -> io::Result<(OwnFd, SocketAddr)> {
    accept_by(fd, |accept| OwnFd::make(accept))
}

/// As [`accept`], with the reserved descriptor, when the application has left none.
pub(crate) fn accept_in_need(fd: RawFd) -> io::Result<(OwnFd, SocketAddr)> {
    accept_by(fd, |accept| {
        OwnFd::make(|| reserve::in_need(For::Accepting, accept))
    })
}

fn accept_by(
    fd: RawFd,
    own: impl FnOnce(&dyn Fn() -> io::Result<OwnedFd>) -> io::Result<OwnFd>,
) -> io::Result<(OwnFd, SocketAddr)> {
    let from = std::cell::Cell::new(None);
    let new = own(&|| {
        let (new, addr) = net::acceptfrom_with(at(fd), FLAGS)?;
        from.set(addr);
        Ok(new)
    })?;
    let from = from.into_inner().and_then(|addr| addr.try_into().ok());
    Ok((new, from.ok_or(io::ErrorKind::InvalidData)?))
}

/// Accepts a connection of a process of this host, non-blocking and close-on-exec.
pub(crate) fn accept_local(fd: RawFd) -> io::Result<OwnFd> {
    OwnFd::make(|| Ok(net::accept_with(at(fd), FLAGS)?))
}

/// The address a socket is bound to.
pub(crate) fn local_addr(fd: RawFd) -> io::Result<SocketAddr> {
    let addr = net::getsockname(at(fd))?;
    addr.try_into()
        .map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The address a socket is connected to.
pub(crate) fn peer_addr(fd: RawFd) -> io::Result<SocketAddr> {
    let addr = net::getpeername(at(fd))?;
    let addr = addr.and_then(|addr| addr.try_into().ok());
    addr.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Makes a socket unusable for peers: connections end, listeners refuse, and a UDP socket is connected to a port that
/// nothing is sent from, so it receives nothing. Does nothing to other descriptors.
pub(crate) fn shut(fd: RawFd) {
    let nowhere: SocketAddr = match local_addr(fd) {
        Ok(local) if local.is_ipv6() => (Ipv6Addr::LOCALHOST, 9).into(),
        _ => (Ipv4Addr::LOCALHOST, 9).into(),
    };
    let _ = match net::sockopt::socket_type(at(fd)) {
        Ok(SocketType::DGRAM) => net::connect(at(fd), &nowhere),
        _ => net::shutdown(at(fd), Shutdown::Both),
    };
}

/// Ends our direction of a connection.
pub(crate) fn shutdown_write(fd: RawFd) {
    let _ = net::shutdown(at(fd), Shutdown::Write);
}

/// Whether this is an IPv6 socket.
pub(crate) fn is_v6(fd: RawFd) -> bool {
    net::sockopt::socket_domain(at(fd)) == Ok(AddressFamily::INET6)
}

/// Converts an IPv6 socket with an IPv4 connection to an IPv4 socket. If the kernel does not convert it, it stays as it
/// is.
pub(crate) fn unmap(fd: RawFd) {
    let _ = set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM, libc::AF_INET);
}

/// Acknowledges at once the bytes that have arrived on a connection.
pub(crate) fn acknowledge(fd: RawFd) {
    // A connection that has broken meanwhile has nothing to acknowledge.
    let _ = net::sockopt::set_tcp_quickack(at(fd), true);
}

/// Sets an integer option.
pub(crate) fn set_option(fd: RawFd, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    slim_sys::try_set_option(fd, level, name, &value).map_err(io::Error::from_raw_os_error)
}

/// Reads an integer option.
pub(crate) fn option(fd: RawFd, level: c_int, name: c_int) -> io::Result<c_int> {
    slim_sys::try_option(fd, level, name).map_err(io::Error::from_raw_os_error)
}

/// The user of the process at the other end of a local connection, at the time of connecting.
pub(crate) fn peer_user(fd: RawFd) -> Option<libc::uid_t> {
    let peer: Option<libc::ucred> = slim_sys::option(fd, libc::SOL_SOCKET, libc::SO_PEERCRED);
    peer.map(|peer| peer.uid)
}

/// Number of the network namespace, which distinguishes hosts that share a kernel.
pub(crate) fn network_namespace() -> u64 {
    rustix::fs::stat(c"/proc/self/ns/net").map_or(0, |about| about.st_ino)
}

/// The host's name.
pub(crate) fn host_name() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// An error with the step that failed. The cause is its [`source`](std::error::Error::source).
#[derive(Debug)]
struct FailedStep {
    what: String,
    cause: io::Error,
}

impl fmt::Display for FailedStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.what, self.cause)
    }
}

impl std::error::Error for FailedStep {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}

/// Adds to an error the step that failed.
pub(crate) fn during(what: &str) -> impl Fn(io::Error) -> io::Error + '_ {
    move |cause| {
        let what = what.to_owned();
        io::Error::new(cause.kind(), FailedStep { what, cause })
    }
}
