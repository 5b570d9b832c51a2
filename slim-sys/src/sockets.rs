//! System calls on sockets of any kind.

use crate::descriptors::own;
use crate::errno::number;
use crate::{Errno, at, is_over, limit, numbers, ready};
use libc::{c_int, c_long};
use rustix::io;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType};
use std::net::SocketAddr;

/// `shutdown(2)`.
pub fn shutdown(fd: c_int, how: c_int) {
    let _ = try_shutdown(fd, how);
}

/// `shutdown(2)`; `ENOTCONN` when the kernel has given the connection up.
pub fn try_shutdown(fd: c_int, how: c_int) -> Result<(), Errno> {
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        _ => Shutdown::Both,
    };
    net::shutdown(at(fd), how).map_err(number)
}

/// A type for which any bytes are a valid value.
///
/// # Safety
/// Any bytes are a valid value, and the type has no padding.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($kind:ty: $why:literal;)*) => {$(
        // SAFETY: the reason stands beside the type.
        unsafe impl Plain for $kind {}
    )*};
}

plain! {
    u8: "an integer";
    c_int: "an integer";
    u32: "an integer";
    u64: "an integer";
    libc::linger: "two integers of the same size";
    libc::tcp_info: "integers, and bits in whole bytes, in the kernel's order";
    libc::timeval: "two integers of the same size";
    libc::ucred: "three integers of the same size";
}

// SAFETY: each element is plain, and arrays have no padding.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Reads a socket option of a plain type.
pub fn option<T: Plain>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    try_option(fd, level, name).ok()
}

/// [`option`], with the error.
pub fn try_option<T: Plain>(fd: c_int, level: c_int, name: c_int) -> Result<T, Errno> {
    option_with_len(fd, level, name).map(|(value, _)| value)
}

/// [`try_option`], with the number of bytes that the kernel has filled; the others are 0.
pub(crate) fn option_with_len<T: Plain>(
    fd: c_int,
    level: c_int,
    name: c_int,
) -> Result<(T, usize), Errno> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let (at, mut len) = (value.as_mut_ptr(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel writes up to `len` bytes to the value, and their number to `len`.
    unsafe { call!(libc::SYS_getsockopt, fd, level, name, at, &raw mut len) }?;
    // SAFETY: any bytes are a valid value; those that the kernel has not written are 0.
    Ok((unsafe { value.assume_init() }, len as usize))
}

/// Sets a socket option of a plain type.
pub fn set_option<T: Plain>(fd: c_int, level: c_int, name: c_int, value: &T) {
    let _ = try_set_option(fd, level, name, value);
}

/// [`set_option`], with the error.
pub fn try_set_option<T: Plain>(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: &T,
) -> Result<(), Errno> {
    let (at, len) = (std::ptr::from_ref(value), size_of::<T>());
    // SAFETY: the kernel reads `len` bytes of the value, all of which are initialised.
    unsafe { call!(libc::SYS_setsockopt, fd, level, name, at, len) }.map(drop)
}

/// The cookie of a socket: a number that the kernel gives to no other socket.
pub fn cookie(fd: c_int) -> Option<u64> {
    option(fd, libc::SOL_SOCKET, libc::SO_COOKIE)
}

/// The address family of a socket.
pub fn domain(fd: c_int) -> Option<c_int> {
    option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)
}

/// Whether the descriptor is a UDP socket.
pub fn is_udp(fd: c_int) -> bool {
    option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_UDP)
}

/// A new socket of ours, out of the application's way.
pub fn socket(family: c_int, kind: c_int) -> Result<c_int, Errno> {
    let family = AddressFamily::from_raw(family as u16);
    let kind = SocketType::from_raw(kind as u32);
    let make = || net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
    let made = || match make() {
        Err(io::Errno::MFILE) => limit::above(|_| make()).unwrap_or(Err(io::Errno::MFILE)),
        made => made,
    };
    numbers::make(|| made().map(own).map_err(number))
}

/// A connected pair of unix sockets.
pub fn socketpair(kind: c_int) -> Result<[c_int; 2], Errno> {
    let kind = SocketType::from_raw(kind as u32);
    numbers::make(|| {
        let made = net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        made.map(|(a, b)| [a, b].map(own)).map_err(number)
    })
}

/// `bind`.
pub fn bind(fd: c_int, addr: SocketAddr) -> Result<(), Errno> {
    net::bind(at(fd), &addr).map_err(number)
}

/// `connect`.
pub fn connect(fd: c_int, addr: SocketAddr) -> Result<(), Errno> {
    net::connect(at(fd), &addr).map_err(number)
}

/// `listen`.
pub fn listen(fd: c_int, backlog: c_int) -> Result<(), Errno> {
    net::listen(at(fd), backlog).map_err(number)
}

/// `accept4` with close-on-exec. The peer's address is not returned.
pub fn accept(fd: c_int) -> Result<c_int, Errno> {
    let accept = || net::accept_with(at(fd), SocketFlags::CLOEXEC);
    numbers::make(|| accept().map(own).map_err(number))
}

/// `recv` into a buffer of ours.
pub fn recv(fd: c_int, buf: &mut [u8], flags: c_int) -> Result<usize, Errno> {
    let flags = RecvFlags::from_bits_retain(flags as u32);
    net::recv(at(fd), buf, flags)
        .map(|(n, _)| n)
        .map_err(number)
}

/// `send` from a buffer of ours, with `MSG_NOSIGNAL`.
pub fn send(fd: c_int, buf: &[u8], flags: c_int) -> Result<usize, Errno> {
    let flags = SendFlags::from_bits_retain(flags as u32) | SendFlags::NOSIGNAL;
    net::send(at(fd), buf, flags).map_err(number)
}

/// [`send`] from memory that only the kernel reads: `EFAULT` if the memory is bad.
///
/// # Safety
/// The memory, if any, is the application's to send.
pub unsafe fn send_from(
    fd: c_int,
    base: *const u8,
    len: usize,
    flags: c_int,
) -> Result<usize, Errno> {
    let flags = flags | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel only reads the memory, and checks first whether it may; no socket address is passed.
    unsafe { call!(libc::SYS_sendto, fd, base, len, flags, 0, 0) }.map(|n| n as usize)
}

/// Whether a TCP socket has failed and has an error to report; the error stays with the socket. A socket that has not failed may
/// have a transient error, or messages in its error queue: then false.
pub fn has_error(fd: c_int) -> bool {
    ready(fd, 0) & libc::POLLERR != 0 && is_over(fd)
}

/// Whether the peer has ended its direction of a connection, or the connection has failed.
pub fn peer_has_ended(fd: c_int) -> bool {
    ready(fd, libc::POLLRDHUP) & (libc::POLLRDHUP | libc::POLLERR | libc::POLLHUP) != 0
}

/// Whether a socket has failed or has ended in both directions.
pub fn has_ended(fd: c_int) -> bool {
    ready(fd, 0) & (libc::POLLERR | libc::POLLHUP) != 0
}

/// `getsockname` or `getpeername`, chosen by the system call number `nr`.
///
/// # Safety
/// `addr` is valid for writes of `len` bytes.
pub unsafe fn name_of(
    nr: c_long,
    fd: c_int,
    addr: *mut libc::sockaddr,
    len: &mut libc::socklen_t,
) -> Result<(), Errno> {
    // SAFETY: the caller's contract; the kernel writes no more than `len` bytes, and the length of the address to `len`.
    unsafe { call!(nr, fd, addr, std::ptr::from_mut(len)) }.map(drop)
}
