//! TCP sockets of resume connections, and of the listeners for them.

use std::io;
use std::net::{IpAddr, SocketAddr};

use slim_sys::OwnFd;
use socket2::{Domain, SockRef, Socket, Type};

use crate::kernel::sys;

/// Backlog of a resume listener. As many as the kernel allows: all connections of a process may break at once.
const BACKLOG: i32 = 4096;

fn stream(addr: SocketAddr) -> io::Result<OwnFd> {
    new_stream(Domain::for_address(addr))
}

/// An IPv6 socket that can carry IPv4.
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

/// The address in the form that IPv6 sockets use.
pub(crate) fn mapped(addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(ip) => (ip.to_ipv6_mapped(), addr.port()).into(),
        IpAddr::V6(_) => addr,
    }
}

pub(crate) fn set_nodelay(fd: &OwnFd) -> io::Result<()> {
    sys::set_option(fd.raw(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)
}

/// Listens for resume connections at one address. With `mapped`, an IPv6 socket listens at an IPv4 address.
pub(crate) fn listen(addr: SocketAddr, mapped: bool) -> io::Result<OwnFd> {
    let fd = if mapped {
        bind_mapped(addr)
    } else {
        bind(addr)
    }?;
    let socket = SockRef::from(&fd);
    socket.listen(BACKLOG)?;
    if mapped {
        // The connections that it accepts must not have this option.
        socket.set_reuse_address(false)?;
    }
    Ok(fd)
}

/// A bound socket that is to become a listener.
pub(crate) fn bind(addr: SocketAddr) -> io::Result<OwnFd> {
    let fd = stream(addr)?;
    // Accepted connections inherit this from the listener.
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
    // It is bound beside the listener that it replaces.
    socket.set_reuse_address(true)?;
    socket.bind(&mapped(addr).into())?;
    Ok(fd)
}

/// Replaces a listener by one at the same address whose connections are IPv6 sockets. `None` if that is not possible,
/// and the old listener goes on.
pub(crate) fn listen_mapped_instead(old: &OwnFd, addr: SocketAddr) -> Option<OwnFd> {
    let socket = SockRef::from(old);
    // The old socket stays bound, and can listen again.
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
