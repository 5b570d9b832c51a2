//! System calls that neither the standard library nor socket2 has, made safe.

use std::io;
use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use libc::c_int;
use socket2::SockAddr;

use crate::fds::OwnFd;
use crate::reserve::{self, For};

mod threads;

pub use threads::SignalsBlocked;
pub(crate) use threads::{
    first_has_ended, is_real_time, is_thread, leave_real_time, stack_size, thread, threads,
    use_all_processors,
};

/// A non-blocking counter that readers can sleep on.
pub(crate) fn eventfd() -> io::Result<OwnFd> {
    // SAFETY: no memory is passed.
    own(|| unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes an eventfd readable. No cancellation point.
pub(crate) fn eventfd_wake(fd: RawFd) {
    let one: u64 = 1;
    // SAFETY: `one` is valid for reads of 8 bytes.
    unsafe { libc::syscall(libc::SYS_write, fd, &raw const one, 8usize) };
}

/// Sleeps while `*word == value`, for no longer than `limit`; may wake up for nothing. errno is not touched.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    futex(word, libc::FUTEX_WAIT, value, &raw const limit);
}

/// Wakes all that sleep on `word`. errno is not touched.
pub(crate) fn futex_wake_all(word: &AtomicU32) {
    futex(word, libc::FUTEX_WAKE, c_int::MAX as u32, std::ptr::null());
}

fn futex(word: &AtomicU32, op: c_int, value: u32, limit: *const libc::timespec) {
    let op = op | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: errno is always there; the word outlives the call, and so does the limit, if there is one.
    unsafe {
        let errno = *libc::__errno_location();
        libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, limit);
        *libc::__errno_location() = errno;
    }
}

/// Makes an eventfd or timerfd unreadable until the next time.
pub(crate) fn eventfd_clear(fd: RawFd) {
    let mut count: u64 = 0;
    // SAFETY: `count` is valid for writes of 8 bytes.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

/// Sleeps until a descriptor can be read.
pub(crate) fn wait_readable(fd: RawFd) {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&raw mut entry, 1, -1) };
}

/// A non-blocking alarm clock on `CLOCK_MONOTONIC`.
pub(crate) fn timerfd() -> io::Result<OwnFd> {
    // SAFETY: no memory is passed.
    own(|| unsafe {
        libc::timerfd_create(
            libc::CLOCK_MONOTONIC,
            libc::TFD_CLOEXEC | libc::TFD_NONBLOCK,
        )
    })
}

/// Sets the alarm to go off after `delay`, or never.
pub(crate) fn timerfd_set(fd: RawFd, delay: Option<Duration>) {
    let value = match delay {
        // All zero would mean never.
        Some(d) => {
            let d = d.max(Duration::from_nanos(1));
            libc::timespec {
                tv_sec: d.as_secs().min(i32::MAX as u64) as libc::time_t,
                tv_nsec: d.subsec_nanos().into(),
            }
        }
        None => libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
    };
    let spec = libc::itimerspec {
        it_interval: libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
        it_value: value,
    };
    // SAFETY: `spec` is valid for reads; the old value is not wanted.
    unsafe { libc::timerfd_settime(fd, 0, &spec, std::ptr::null_mut()) };
}

/// A socket on which the kernel can be asked of links and addresses. What it tells comes before the question has been sent.
pub(crate) fn route_socket() -> io::Result<OwnFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    own(|| unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) })
}

/// A socket that reports changes of links and addresses.
pub(crate) fn rtnetlink_watch() -> io::Result<OwnFd> {
    let fd = route_socket()?;
    // SAFETY: all bytes zero is a valid `sockaddr_nl`.
    let mut addr: libc::sockaddr_nl = unsafe { mem::zeroed() };
    addr.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    addr.nl_groups =
        (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;
    // SAFETY: `addr` is a valid address of the length given.
    let r = unsafe {
        libc::bind(
            fd.raw(),
            (&raw const addr).cast(),
            mem::size_of_val(&addr) as libc::socklen_t,
        )
    };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(fd)
    }
}

/// A socket on which the kernel tells of others. What it tells comes before the question has been sent.
pub(crate) fn sock_diag() -> io::Result<OwnFd> {
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    own(|| unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG) })
}

/// Reads without blocking.
pub(crate) fn recv(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `buf` is valid for writes of its length.
    let n = unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), libc::MSG_DONTWAIT) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// A file that is read from its descriptor's position on.
pub(crate) struct Reading<'a>(pub(crate) &'a OwnFd);

impl io::Read for Reading<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        // SAFETY: `buf` is valid for writes of its length.
        let n = unsafe { libc::read(self.0.raw(), buf.as_mut_ptr().cast(), buf.len()) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

/// Writes without blocking and without SIGPIPE.
pub(crate) fn send(fd: RawFd, buf: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `buf` is valid for reads of its length.
    let n = unsafe { libc::send(fd, buf.as_ptr().cast(), buf.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Whether a line can be written now without waiting for whoever reads it.
pub(crate) fn takes_a_line(fd: RawFd) -> bool {
    let mut entry = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut entry, 1, 0) > 0 }
}

/// One `write`, for files and terminals. A line that went out in part counts as written.
pub(crate) fn write_line(fd: RawFd, line: &[u8]) -> io::Result<()> {
    // SAFETY: `line` is valid for reads of its length.
    let n = unsafe { libc::write(fd, line.as_ptr().cast(), line.len()) };
    if n < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Accepts a connection, non-blocking and close-on-exec.
pub(crate) fn accept(fd: RawFd) -> io::Result<(OwnFd, SocketAddr)> {
    accept_by(fd, |accept| own(accept))
}

/// The same, when the application has left no descriptor.
pub(crate) fn accept_in_need(fd: RawFd) -> io::Result<(OwnFd, SocketAddr)> {
    accept_by(fd, |accept| reserve::make(For::Accepting, || made(accept)))
}

fn accept_by(
    fd: RawFd,
    own: impl FnOnce(&dyn Fn() -> c_int) -> io::Result<OwnFd>,
) -> io::Result<(OwnFd, SocketAddr)> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: `storage` is valid for writes of `len` bytes, at each call.
    let (new, from) = unsafe {
        SockAddr::try_init(|storage, len| own(&|| libc::accept4(fd, storage.cast(), len, flags)))
    }?;
    let from = from.as_socket().ok_or(io::ErrorKind::InvalidData)?;
    Ok((new, from))
}

/// Accepts a connection of a process of this host, non-blocking and close-on-exec.
pub(crate) fn accept_local(fd: RawFd) -> io::Result<OwnFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let nobody = std::ptr::null_mut();
    // SAFETY: no address is asked for.
    own(|| unsafe { libc::accept4(fd, nobody, std::ptr::null_mut(), flags) })
}

/// The address a socket is bound to.
pub(crate) fn local_addr(fd: RawFd) -> io::Result<SocketAddr> {
    // SAFETY: `storage` is valid for writes of `len` bytes.
    let (_, addr) = unsafe {
        SockAddr::try_init(|storage, len| {
            if libc::getsockname(fd, storage.cast(), len) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        })
    }?;
    addr.as_socket().ok_or(io::ErrorKind::InvalidData.into())
}

/// Makes a socket useless to whoever speaks to it: connections end, listeners refuse, and a UDP socket
/// takes nothing but what comes from a port that nobody sends from. Does nothing to other descriptors.
pub(crate) fn shut(fd: RawFd) {
    let nowhere: SocketAddr = match local_addr(fd) {
        Ok(local) if local.is_ipv6() => (Ipv6Addr::LOCALHOST, 9).into(),
        _ => (Ipv4Addr::LOCALHOST, 9).into(),
    };
    let nowhere = SockAddr::from(nowhere);
    if option(fd, libc::SOL_SOCKET, libc::SO_TYPE).is_ok_and(|kind| kind == libc::SOCK_DGRAM) {
        // SAFETY: an address of the length given.
        unsafe { libc::connect(fd, nowhere.as_ptr().cast(), nowhere.len()) };
    } else {
        // SAFETY: no memory is passed.
        unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
    }
}

/// Ends our direction of a connection.
pub(crate) fn shutdown_write(fd: RawFd) {
    // SAFETY: no memory is passed.
    unsafe { libc::shutdown(fd, libc::SHUT_WR) };
}

/// Whether this is an IPv6 socket.
pub(crate) fn is_v6(fd: RawFd) -> bool {
    option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN).is_ok_and(|domain| domain == libc::AF_INET6)
}

/// Makes an IPv6 socket with an IPv4 connection an IPv4 socket. One that the kernel does not convert stays as it is.
pub(crate) fn unmap(fd: RawFd) {
    let _ = set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM, libc::AF_INET);
}

/// Acknowledges at once what has come on a connection.
pub(crate) fn acknowledge(fd: RawFd) {
    // A connection that has broken meanwhile has nothing to acknowledge.
    let _ = set_option(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
}

/// Sets an integer option.
pub(crate) fn set_option(fd: RawFd, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: `value` is valid for reads of its size.
    let r = unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            (&raw const value).cast(),
            mem::size_of::<c_int>() as libc::socklen_t,
        )
    };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Reads an integer option.
pub(crate) fn option(fd: RawFd, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = mem::size_of::<c_int>() as libc::socklen_t;
    // SAFETY: `value` is valid for writes of `len` bytes.
    let r = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &mut len) };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(value)
    }
}

/// Waits until there is something to read, at most `limit`.
pub(crate) fn readable_within(fd: RawFd, limit: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let millis = libc::c_int::try_from(limit.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut poll, 1, millis) > 0 }
}

/// Our effective user.
pub(crate) fn user() -> libc::uid_t {
    // SAFETY: always succeeds.
    unsafe { libc::geteuid() }
}

/// The user of the process at the other end of a local connection, when it was made.
pub(crate) fn peer_user(fd: RawFd) -> Option<libc::uid_t> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = mem::size_of_val(&peer) as libc::socklen_t;
    // SAFETY: `peer` is valid for writes of `len` bytes.
    let r = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut len,
        )
    };
    (r == 0).then_some(peer.uid)
}

/// Nanoseconds of the monotonic clock.
pub(crate) fn now() -> u64 {
    // SAFETY: all bytes zero is valid, and it is valid for a write.
    let now = unsafe {
        let mut now: libc::timespec = mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        now
    };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps. errno is not touched, and no signal's handler makes it longer.
pub(crate) fn nap(time: Duration) {
    futex_wait(&AtomicU32::new(0), 0, time);
}

/// Number of the network namespace, which makes hosts differ that share a kernel.
pub(crate) fn network_namespace() -> u64 {
    // SAFETY: all bytes zero is a valid `stat`.
    let mut stat: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: a valid C string and a buffer for the answer.
    let r = unsafe { libc::stat(c"/proc/self/ns/net".as_ptr(), &mut stat) };
    if r < 0 { 0 } else { stat.st_ino }
}

/// The host's name.
pub(crate) fn host_name() -> String {
    let mut buf = [0u8; 256];
    // SAFETY: `buf` is valid for writes of its length.
    unsafe { libc::gethostname(buf.as_mut_ptr().cast(), buf.len()) };
    let name = buf.split(|b| *b == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

/// What the system call `create` has made.
fn own(create: impl FnOnce() -> c_int) -> io::Result<OwnFd> {
    OwnFd::make(|| made(create))
}

fn made(create: impl FnOnce() -> c_int) -> io::Result<OwnedFd> {
    match create() {
        // SAFETY: the system call has just created this descriptor.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_goes_off_once_and_can_be_stopped() {
        let fd = timerfd().unwrap();
        let mut poll = libc::pollfd {
            fd: fd.raw(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one valid entry.
        let mut ready = |ms| unsafe { libc::poll(&mut poll, 1, ms) };
        assert_eq!(ready(0), 0);
        timerfd_set(fd.raw(), Some(Duration::ZERO));
        assert_eq!(ready(1000), 1);
        eventfd_clear(fd.raw());
        timerfd_set(fd.raw(), Some(Duration::from_millis(20)));
        timerfd_set(fd.raw(), None);
        assert_eq!(ready(50), 0);
    }
}
