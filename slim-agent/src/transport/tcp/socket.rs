//! TCP sockets of connections, and of the listeners for them.

use std::io;
use std::net::{IpAddr, SocketAddr};

use slim_sys::OwnFd;
use socket2::{Domain, SockRef, Socket, Type};

use crate::kernel::sys;

/// As many as the kernel allows: all connections of a process may break at once.
const BACKLOG: i32 = 4096;

fn stream(addr: SocketAddr) -> io::Result<OwnFd> {
    new_stream(Domain::for_address(addr))
}

/// An IPv6 socket for IPv4.
fn mapping_stream() -> io::Result<OwnFd> {
    let fd = new_stream(Domain::IPV6)?;
    SockRef::from(&fd).set_only_v6(false)?;
    Ok(fd)
}

pub(crate) fn new_stream(domain: Domain) -> io::Result<OwnFd> {
    OwnFd::make(|| Socket::new_raw(domain, stream_kind(), None))
}

pub(crate) fn stream_kind() -> Type {
    Type::STREAM.nonblocking().cloexec()
}

/// The address as IPv6 sockets have it.
pub(crate) fn mapped(addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), addr.port()).into(),
        IpAddr::V6(_) => addr,
    }
}

pub(crate) fn set_nodelay(fd: &OwnFd) -> io::Result<()> {
    sys::set_option(fd.raw(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
}

/// Listens for resumes at one address; with `mapped`, at an IPv4 address by an IPv6 socket.
pub(crate) fn listen(addr: SocketAddr, mapped: bool) -> io::Result<OwnFd> {
    let fd = if mapped {
        bind_mapped(addr)
    } else {
        bind(addr)
    }?;
    let socket = SockRef::from(&fd);
    socket.listen(BACKLOG)?;
    if mapped {
        // It is not for the connections that come.
        socket.set_reuse_address(false)?;
    }
    Ok(fd)
}

/// What is to become a listener.
pub(crate) fn bind(addr: SocketAddr) -> io::Result<OwnFd> {
    let fd = stream(addr)?;
    // What it accepts has it from the listener.
    set_nodelay(&fd)?;
    let socket = SockRef::from(&fd);
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    Ok(fd)
}

fn bind_mapped(addr: SocketAddr) -> io::Result<OwnFd> {
    let fd = mapping_stream()?;
    set_nodelay(&fd)?;
    let socket = SockRef::from(&fd);
    // Beside the listener whose place it takes.
    socket.set_reuse_address(true)?;
    socket.bind(&mapped(addr).into())?;
    Ok(fd)
}

/// A listener at the same place whose connections are IPv6 sockets; `None` if there can be none, and the old one goes on.
pub(crate) fn listen_mapped_instead(old: &OwnFd, addr: SocketAddr) -> Option<OwnFd> {
    let socket = SockRef::from(old);
    // It stays bound, and can listen again.
    sys::shut(old.raw());
    let made = socket
        .set_reuse_address(true)
        .and_then(|()| listen(addr, true));
    if made.is_err() {
        let _ = socket.set_reuse_address(false);
        let _ = socket.listen(BACKLOG);
    }
    made.ok()
}
