//! System calls for sockets.

use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;

use libc::c_int;
use rustix::event::epoll;
use rustix::io::Errno as Raw;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags,
    SocketFlags, SocketType, sockopt,
};
use slim_sys::{Errno, OwnFd, at};

/// Not less than the kernel's default limit (`net.core.somaxconn`), so that the kernel's limit applies.
const BACKLOG: c_int = 4096;

fn errno(e: Raw) -> Errno {
    e.raw_os_error()
}

fn flags() -> SocketFlags {
    SocketFlags::CLOEXEC | SocketFlags::NONBLOCK
}

fn stream(addr: SocketAddr) -> Result<OwnFd, Errno> {
    let family = match addr {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let make = || Ok(net::socket_with(family, SocketType::STREAM, flags(), None)?);
    OwnFd::make(make).map_err(|e| e.raw_os_error().unwrap_or(libc::EMFILE))
}

/// A listener.
pub(crate) fn listen(addr: SocketAddr) -> Result<OwnFd, (&'static str, Errno)> {
    let fd = stream(addr).map_err(|e| ("socket", e))?;
    let reuse = sockopt::set_socket_reuseaddr(&fd, true);
    reuse.map_err(|e| ("setsockopt", errno(e)))?;
    slim_sys::bind(fd.raw(), addr).map_err(|e| ("bind", e))?;
    slim_sys::listen(fd.raw(), BACKLOG).map_err(|e| ("listen", e))?;
    Ok(fd)
}

/// Accepts a waiting connection; also returns the peer's address, which `getpeername` does not know any more if the connection has been
/// reset meanwhile.
pub(crate) fn accept(listener: &OwnFd) -> Result<(OwnFd, Option<SocketAddr>), Errno> {
    let mut peer = None;
    let accept = || {
        let (fd, addr) = net::acceptfrom_with(listener, flags())?;
        peer = addr;
        Ok(fd)
    };
    let fd = OwnFd::make(accept).map_err(|e| e.raw_os_error().unwrap_or(libc::EMFILE))?;
    set_nodelay(&fd);
    Ok((fd, peer.and_then(|addr| addr.try_into().ok())))
}

/// Begins to connect. Returns whether the connection is established already.
pub(crate) fn connect(addr: SocketAddr) -> Result<(OwnFd, bool), Errno> {
    let fd = stream(addr)?;
    set_nodelay(&fd);
    match slim_sys::connect(fd.raw(), addr) {
        Ok(()) => Ok((fd, true)),
        Err(libc::EINPROGRESS | libc::EINTR) => Ok((fd, false)),
        Err(e) => Err(e),
    }
}

/// Sends bytes without delay, like the connections that the agent makes.
fn set_nodelay(fd: &OwnFd) {
    let on: c_int = 1;
    slim_sys::set_option(fd.raw(), libc::IPPROTO_TCP, libc::TCP_NODELAY, &on);
}

/// Limits the bytes that the kernel takes and has not sent yet.
pub(crate) fn limit_unsent(fd: &OwnFd, bytes: u32) {
    slim_sys::set_option(fd.raw(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, &bytes);
}

/// A new epoll set.
pub(crate) fn poll_set() -> Result<OwnFd, Errno> {
    let make = || Ok(epoll::create(epoll::CreateFlags::CLOEXEC)?);
    OwnFd::make(make).map_err(|e| e.raw_os_error().unwrap_or(libc::EMFILE))
}

/// Adds `fd` to the set, level-triggered for input.
pub(crate) fn watch(set: &OwnFd, fd: &OwnFd) -> Result<(), Errno> {
    let data = epoll::EventData::new_u64(0);
    epoll::add(set, fd, data, epoll::EventFlags::IN).map_err(errno)
}

/// Changes the events for which the set watches `fd`.
pub(crate) fn rewatch(set: &OwnFd, fd: &OwnFd, flags: epoll::EventFlags) {
    let _ = epoll::modify(set, fd, epoll::EventData::new_u64(0), flags);
}

/// Removes `fd` from the set.
pub(crate) fn unwatch(set: &OwnFd, fd: &OwnFd) {
    let _ = epoll::delete(set, fd);
}

/// Both addresses of a connection, the local one first.
pub(crate) fn ends(fd: &OwnFd) -> Option<(SocketAddr, SocketAddr)> {
    Some((local(fd)?, net::getpeername(fd).ok()??.try_into().ok()?))
}

/// The local address.
pub(crate) fn local(fd: &OwnFd) -> Option<SocketAddr> {
    net::getsockname(fd).ok()?.try_into().ok()
}

/// Takes the pending error of the socket, if it has one.
pub(crate) fn error(fd: RawFd) -> Option<Errno> {
    slim_sys::option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_ERROR).filter(|e| *e != 0)
}

/// Sends the bytes that the kernel takes at once.
pub(crate) fn send(fd: RawFd, data: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        let sent = match data {
            // The kernel need not read a list of pieces.
            [one] => net::send(at(fd), one, flags),
            all => net::sendmsg(at(fd), all, &mut SendAncillaryBuffer::default(), flags),
        };
        match sent {
            Err(Raw::INTR) => {}
            other => return other.map_err(errno),
        }
    }
}

/// Receives the bytes that are available.
pub(crate) fn recv(fd: RawFd, into: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
    let mut no_control = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT;
    loop {
        let got = match &mut *into {
            [one] => net::recv(at(fd), &mut **one, flags).map(|(n, _)| n),
            all => net::recvmsg(at(fd), all, &mut no_control, flags).map(|got| got.bytes),
        };
        match got {
            Err(Raw::INTR) => {}
            other => return other.map_err(errno),
        }
    }
}

/// Whether the error means that the connection is dead.
pub(crate) fn is_end(errno: Errno) -> bool {
    ![
        libc::EAGAIN,
        libc::EINTR,
        libc::ENOBUFS,
        libc::ENOMEM,
        libc::EFAULT,
        libc::EINVAL,
        libc::EMSGSIZE,
        libc::EBADF,
    ]
    .contains(&errno)
}
