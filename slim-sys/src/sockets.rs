//! Sockets of any kind.

use crate::{Errno, TCP_CLOSE, limit, numbers, own, ready, tcp_state};
use libc::{c_int, c_long, c_void};

/// `shutdown(2)`.
pub fn shutdown(fd: c_int, how: c_int) {
    let _ = try_shutdown(fd, how);
}

/// `shutdown(2)`; `ENOTCONN` when the kernel has given the connection up.
pub fn try_shutdown(fd: c_int, how: c_int) -> Result<(), Errno> {
    call!(libc::SYS_shutdown, fd, how).map(drop)
}

/// A socket option of a plain type.
pub fn option<T: Copy>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    try_option(fd, level, name).ok()
}

/// Likewise, or why there is none.
pub fn try_option<T: Copy>(fd: c_int, level: c_int, name: c_int) -> Result<T, Errno> {
    let mut v = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    call!(
        libc::SYS_getsockopt,
        fd,
        level,
        name,
        v.as_mut_ptr(),
        &raw mut len
    )?;
    // SAFETY: zeroed first, and every T used here (integers, timeval, linger, tcp_info) is valid for any bits.
    Ok(unsafe { v.assume_init() })
}

/// Sets a socket option of a plain type.
pub fn set_option<T: Copy>(fd: c_int, level: c_int, name: c_int, value: &T) {
    let _ = try_set_option(fd, level, name, value);
}

/// Likewise, and says whether it is set.
pub fn try_set_option<T: Copy>(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: &T,
) -> Result<(), Errno> {
    call!(
        libc::SYS_setsockopt,
        fd,
        level,
        name,
        std::ptr::from_ref(value),
        size_of::<T>() as libc::socklen_t
    )
    .map(drop)
}

/// The number that the kernel has given a socket, and gives no other one.
pub fn cookie(fd: c_int) -> Option<u64> {
    option(fd, libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// The family of a socket.
pub fn domain(fd: c_int) -> Option<c_int> {
    option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)
}

/// Whether the descriptor is a UDP socket.
pub fn is_udp(fd: c_int) -> bool {
    option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_UDP)
}

/// A new socket, out of the application's way.
pub fn socket(family: c_int, kind: c_int) -> Result<c_int, Errno> {
    let make =
        || call!(libc::SYS_socket, family, kind | libc::SOCK_CLOEXEC, 0).map(|fd| fd as c_int);
    let made = || match make() {
        Err(libc::EMFILE) => limit::above(|_| make()).unwrap_or(Err(libc::EMFILE)),
        made => made,
    };
    numbers::make(|| made().map(own))
}

/// A connected pair of unix sockets.
pub fn socketpair(kind: c_int) -> Result<[c_int; 2], Errno> {
    let mut sv = [0; 2];
    let kind = kind | libc::SOCK_CLOEXEC;
    numbers::make(|| {
        call!(
            libc::SYS_socketpair,
            libc::AF_UNIX,
            kind,
            0,
            sv.as_mut_ptr()
        )?;
        Ok(sv.map(own))
    })
}

/// `bind` with a raw address.
pub fn bind(fd: c_int, addr: *const c_void, len: usize) -> Result<(), Errno> {
    call!(libc::SYS_bind, fd, addr, len as c_long).map(drop)
}

/// `connect` with a raw address.
pub fn connect(fd: c_int, addr: *const c_void, len: usize) -> Result<(), Errno> {
    call!(libc::SYS_connect, fd, addr, len as c_long).map(drop)
}

/// `listen`.
pub fn listen(fd: c_int, backlog: c_int) -> Result<(), Errno> {
    call!(libc::SYS_listen, fd, backlog).map(drop)
}

/// `accept4`, close-on-exec, without the address.
pub fn accept(fd: c_int) -> Result<c_int, Errno> {
    numbers::make(|| {
        call!(libc::SYS_accept4, fd, 0usize, 0usize, libc::SOCK_CLOEXEC).map(|fd| own(fd as c_int))
    })
}

/// `recv` into a buffer of ours.
pub fn recv(fd: c_int, buf: &mut [u8], flags: c_int) -> Result<usize, Errno> {
    call!(
        libc::SYS_recvfrom,
        fd,
        buf.as_mut_ptr(),
        buf.len(),
        flags,
        0usize,
        0usize
    )
    .map(|n| n as usize)
}

/// `send` from a buffer of ours, never with a signal.
pub fn send(fd: c_int, buf: &[u8], flags: c_int) -> Result<usize, Errno> {
    send_from(fd, buf.as_ptr(), buf.len(), flags)
}

/// Likewise, from memory that only the kernel looks at: `EFAULT` if it is bad.
pub fn send_from(fd: c_int, base: *const u8, len: usize, flags: c_int) -> Result<usize, Errno> {
    call!(
        libc::SYS_sendto,
        fd,
        base,
        len,
        flags | libc::MSG_NOSIGNAL,
        0usize,
        0usize
    )
    .map(|n| n as usize)
}

/// Whether a TCP socket has failed, and has the error to report; it keeps it. One that has not may have a passing error, or
/// messages in its error queue.
pub fn has_error(fd: c_int) -> bool {
    ready(fd, 0) & libc::POLLERR != 0 && tcp_state(fd) == Some(TCP_CLOSE)
}

/// Whether a socket has failed, or ended in both directions.
pub fn has_ended(fd: c_int) -> bool {
    ready(fd, 0) & (libc::POLLERR | libc::POLLHUP) != 0
}

/// `getsockname` and `getpeername`, by the number of the system call.
///
/// # Safety
/// `addr` is valid for writes of `len` bytes.
pub unsafe fn name_of(
    nr: c_long,
    fd: c_int,
    addr: *mut libc::sockaddr,
    len: &mut libc::socklen_t,
) -> Result<(), Errno> {
    call!(nr, fd, addr, std::ptr::from_mut(len)).map(drop)
}
