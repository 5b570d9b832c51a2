//! The kernel, asked directly.
//!
//! The preload's own calls must never reach its own hooks, and must work before the constructor, in a
//! vforked child and in signal context; so they are raw system calls, no cancellation points, and give
//! `Err(errno)` instead of touching the caller's `errno` for good (see [`keep_errno`]).

use crate::lock::Lock;
use libc::{c_int, c_long, c_void};
use slim_agent::numbers;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

/// An errno value.
pub type Errno = c_int;

macro_rules! call {
    ($nr:expr $(, $arg:expr)*) => {{
        // SAFETY: every caller passes arguments that are valid for this system call; pointers refer to
        // live locals or to memory its own contract vouches for.
        let r = unsafe { libc::syscall($nr $(, $arg)*) };
        if r < 0 { Err(errno()) } else { Ok(r) }
    }};
}

pub mod direct;
mod fence;
mod tcp;
pub use fence::{can_fence, fence};
pub use tcp::*;

/// The calling thread's errno.
pub fn errno() -> Errno {
    // SAFETY: always a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
pub fn set_errno(e: Errno) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = e }
}

/// Runs `f` and puts errno back as it was.
pub fn keep_errno<R>(f: impl FnOnce() -> R) -> R {
    let e = errno();
    let r = f();
    set_errno(e);
    r
}

/// Process id, from the kernel (a vforked child shares our memory, not our pid).
pub fn pid() -> c_int {
    call!(libc::SYS_getpid).unwrap_or(0) as c_int
}

/// Closes a descriptor of ours.
pub fn close(fd: c_int) {
    slim_agent::fds::release(fd);
    let _ = call!(libc::SYS_close, fd);
}

/// `shutdown(2)`.
pub fn shutdown(fd: c_int, how: c_int) {
    let _ = try_shutdown(fd, how);
}

/// `shutdown(2)`; `ENOTCONN` when the kernel has given the connection up.
pub fn try_shutdown(fd: c_int, how: c_int) -> Result<(), Errno> {
    call!(libc::SYS_shutdown, fd, how).map(drop)
}

/// A duplicate of our own of `fd`: close-on-exec, far above the numbers that the application expects next, if
/// possible above its limit, so that it costs the application none; and not the application's to close.
pub fn dup_high(fd: c_int) -> Result<c_int, Errno> {
    let dup =
        |floor: c_int| call!(libc::SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, floor).map(|n| n as c_int);
    let beyond = above_limit(dup).unwrap_or(Err(libc::EMFILE));
    beyond
        .or_else(|_| dup(slim_agent::fds::floor()))
        .or_else(|_| dup(3))
        .map(own)
}

/// Numbers from here on are not worth the trouble: there is room enough below.
const AMPLE: u64 = 32 << 10;

/// Runs `f(limit)` while the soft limit on open files is raised beyond `limit`, the one that the application has:
/// the kernel looks at it only when a number is given out.
fn above_limit<R>(f: impl FnOnce(c_int) -> R) -> Option<R> {
    static TURN: Lock<()> = Lock::new(());
    TURN.with(|()| {
        let mut own = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        call!(
            libc::SYS_prlimit64,
            0,
            libc::RLIMIT_NOFILE,
            0usize,
            &raw mut own
        )
        .ok()?;
        let raised = libc::rlimit {
            rlim_cur: own.rlim_max.min(2 * AMPLE),
            ..own
        };
        if own.rlim_cur > AMPLE || raised.rlim_cur <= own.rlim_cur {
            return None;
        }
        call!(
            libc::SYS_prlimit64,
            0,
            libc::RLIMIT_NOFILE,
            &raw const raised,
            0usize
        )
        .ok()?;
        let r = f(own.rlim_cur as c_int);
        let _ = call!(
            libc::SYS_prlimit64,
            0,
            libc::RLIMIT_NOFILE,
            &raw const own,
            0usize
        );
        Some(r)
    })
}

/// Registers a descriptor as ours.
fn own(fd: c_int) -> c_int {
    // SAFETY: every caller has just got this descriptor from the kernel; nobody else has it.
    slim_agent::fds::adopt(unsafe { OwnedFd::from_raw_fd(fd) }).into_raw_fd()
}

/// Makes `to` refer to what `from` refers to; `to` keeps its close-on-exec flag.
pub fn replace(from: c_int, to: c_int) -> Result<(), Errno> {
    let cloexec =
        call!(libc::SYS_fcntl, to, libc::F_GETFD).unwrap_or(0) as c_int & libc::FD_CLOEXEC != 0;
    call!(
        libc::SYS_dup3,
        from,
        to,
        if cloexec { libc::O_CLOEXEC } else { 0 }
    )
    .map(drop)
}

/// File status flags (`F_GETFL`).
pub fn status(fd: c_int) -> c_int {
    call!(libc::SYS_fcntl, fd, libc::F_GETFL).unwrap_or(0) as c_int
}

/// Sets file status flags (`F_SETFL`).
pub fn set_status(fd: c_int, flags: c_int) {
    let _ = call!(libc::SYS_fcntl, fd, libc::F_SETFL, flags);
}

/// Whether the description is in non-blocking mode.
pub fn is_nonblocking(fd: c_int) -> bool {
    status(fd) & libc::O_NONBLOCK != 0
}

/// Whether the number is an open descriptor.
pub fn is_open(fd: c_int) -> bool {
    call!(libc::SYS_fcntl, fd, libc::F_GETFD).is_ok()
}

/// Whether the descriptor survives an exec.
pub fn survives_exec(fd: c_int) -> bool {
    call!(libc::SYS_fcntl, fd, libc::F_GETFD).is_ok_and(|f| f as c_int & libc::FD_CLOEXEC == 0)
}

/// An ioctl that fills one int.
pub fn ioctl_int(fd: c_int, request: libc::c_ulong) -> Result<c_int, Errno> {
    let mut v: c_int = 0;
    call!(libc::SYS_ioctl, fd, request, &raw mut v)?;
    Ok(v)
}

/// Bytes ready to be read.
pub fn readable(fd: c_int) -> u64 {
    ioctl_int(fd, libc::FIONREAD).map_or(0, |v| v.max(0) as u64)
}

/// A socket option of a plain type.
pub fn option<T: Copy>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    let mut v = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    call!(
        libc::SYS_getsockopt,
        fd,
        level,
        name,
        v.as_mut_ptr(),
        &raw mut len
    )
    .ok()?;
    // SAFETY: zeroed first, and every T used here (integers, timeval, linger, tcp_info) is valid for any bits.
    Some(unsafe { v.assume_init() })
}

/// Sets a socket option of a plain type.
pub fn set_option<T: Copy>(fd: c_int, level: c_int, name: c_int, value: &T) {
    let _ = call!(
        libc::SYS_setsockopt,
        fd,
        level,
        name,
        std::ptr::from_ref(value),
        size_of::<T>() as libc::socklen_t
    );
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
        Err(libc::EMFILE) => above_limit(|_| make()).unwrap_or(Err(libc::EMFILE)),
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

/// `pread` into a buffer of ours.
pub fn pread(fd: c_int, buf: &mut [u8], offset: i64) -> Result<usize, Errno> {
    call!(libc::SYS_pread64, fd, buf.as_mut_ptr(), buf.len(), offset).map(|n| n as usize)
}

/// The current file offset; an error where the descriptor has none.
pub fn file_offset(fd: c_int) -> Result<i64, Errno> {
    call!(libc::SYS_lseek, fd, 0, libc::SEEK_CUR)
}

/// A copy of memory that an application points to; `None` where it points to nothing.
pub fn memory(at: *const u8, len: usize) -> Option<Vec<u8>> {
    let mut copy = vec![0; len];
    let to = libc::iovec {
        iov_base: copy.as_mut_ptr().cast(),
        iov_len: len,
    };
    let from = libc::iovec {
        iov_base: at.cast_mut().cast(),
        iov_len: len,
    };
    let n = call!(
        libc::SYS_process_vm_readv,
        pid(),
        &raw const to,
        1usize,
        &raw const from,
        1usize,
        0usize
    );
    (n == Ok(len as c_long)).then_some(copy)
}

/// Sets the file offset.
pub fn seek(fd: c_int, to: i64) {
    let _ = call!(libc::SYS_lseek, fd, to, libc::SEEK_SET);
}

/// A new event counter of our own, never blocking.
pub fn eventfd() -> Result<c_int, Errno> {
    let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;
    numbers::make(|| call!(libc::SYS_eventfd2, 0, flags).map(|fd| own(fd as c_int)))
}

/// Makes an event counter readable.
pub fn signal_eventfd(fd: c_int) {
    let one = 1u64;
    let _ = call!(libc::SYS_write, fd, &raw const one, size_of::<u64>());
}

/// Makes an event counter unreadable.
pub fn reset_eventfd(fd: c_int) {
    let mut count = 0u64;
    let _ = call!(libc::SYS_read, fd, &raw mut count, size_of::<u64>());
}

/// `epoll_ctl`.
pub fn epoll_ctl(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *mut libc::epoll_event,
) -> Result<(), Errno> {
    call!(libc::SYS_epoll_ctl, epfd, op, fd, event).map(drop)
}

/// Waits until one descriptor is ready, `timeout` milliseconds at most.
pub fn wait_ready(fd: c_int, events: i16, timeout: c_int) {
    let mut p = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    let ts = libc::timespec {
        tv_sec: (timeout / 1000).into(),
        tv_nsec: i64::from(timeout % 1000) * 1_000_000,
    };
    let _ = call!(libc::SYS_ppoll, &raw mut p, 1, &raw const ts, 0usize, 8);
}

/// Whether a socket has an error to report; it keeps it.
pub fn has_error(fd: c_int) -> bool {
    state_bits(fd) & libc::POLLERR != 0
}

/// Whether a socket has failed, or ended in both directions.
pub fn has_ended(fd: c_int) -> bool {
    state_bits(fd) & (libc::POLLERR | libc::POLLHUP) != 0
}

/// What `poll` reports without being asked for.
fn state_bits(fd: c_int) -> i16 {
    let mut p = libc::pollfd {
        fd,
        events: 0,
        revents: 0,
    };
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let n = call!(libc::SYS_ppoll, &raw mut p, 1, &raw const now, 0usize, 8);
    if n == Ok(1) { p.revents } else { 0 }
}

/// The kernel's table of descriptors has at least as many places.
pub const TABLE_MIN: c_int = 64;

/// Sleeps while `*word == value`. Without a time limit the kernel restarts or interrupts the wait for
/// signals just as it does a blocking `recv` (futex(2), signal(7)).
pub fn futex_wait(
    word: &std::sync::atomic::AtomicU32,
    value: u32,
    limit: Option<Duration>,
) -> Result<(), Errno> {
    let ts = limit.map(|d| libc::timespec {
        tv_sec: d.as_secs() as i64,
        tv_nsec: i64::from(d.subsec_nanos()),
    });
    let ts = ts.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    call!(libc::SYS_futex, word.as_ptr(), op, value, ts).map(drop)
}

/// Whether memory can be read, so that an application's bad pointer stays its `EFAULT` and is not our crash. Only aligned
/// memory can be asked about; else it is not.
pub fn is_readable(at: *const u8, len: usize) -> bool {
    const WORD: usize = 4;
    const PAGE: usize = 4096;
    if len < WORD || !at.addr().is_multiple_of(WORD) {
        return false;
    }
    let pages = (0..len).step_by(PAGE).chain([(len - WORD) & !(WORD - 1)]);
    // The kernel compares a word there with another one; whether they are the same, nobody is woken or moved.
    let (none, other) = (0usize, std::sync::atomic::AtomicU32::new(0));
    let op = libc::FUTEX_CMP_REQUEUE | libc::FUTEX_PRIVATE_FLAG;
    pages.map(|offset| at.wrapping_add(offset)).all(|word| {
        let compared = call!(libc::SYS_futex, word, op, 0, none, other.as_ptr(), 0);
        compared != Err(libc::EFAULT)
    })
}

/// Wakes up to `n` sleepers on `word`.
pub fn futex_wake(word: &std::sync::atomic::AtomicU32, n: c_int) {
    let _ = call!(
        libc::SYS_futex,
        word.as_ptr(),
        libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
        n
    );
}

/// Some random bytes, not for secrets: none where the kernel has no such call.
pub fn random() -> [u8; 8] {
    let mut bytes = [0; 8];
    let _ = call!(
        libc::SYS_getrandom,
        bytes.as_mut_ptr(),
        bytes.len(),
        libc::GRND_NONBLOCK
    );
    bytes
}

/// The calling thread.
pub fn tid() -> c_int {
    call!(libc::SYS_gettid).unwrap_or(0) as c_int
}

/// Whether a thread of this process still exists.
pub fn thread_lives(tid: c_int) -> bool {
    call!(libc::SYS_tgkill, c_long::from(pid()), c_long::from(tid), 0) != Err(libc::ESRCH)
}

/// Sends the calling thread the SIGPIPE that the kernel would have sent it.
pub fn raise_sigpipe() {
    if let Ok(tid) = call!(libc::SYS_gettid) {
        let _ = call!(
            libc::SYS_tgkill,
            c_long::from(pid()),
            tid,
            c_long::from(libc::SIGPIPE)
        );
    }
}

/// `getsockname` and `getpeername`, by the number of the system call. `addr` has room for `len` bytes.
pub fn name_of(
    nr: c_long,
    fd: c_int,
    addr: *mut libc::sockaddr,
    len: &mut libc::socklen_t,
) -> Result<(), Errno> {
    call!(nr, fd, addr, std::ptr::from_mut(len)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_not_readable() {
        let page = 4096;
        // SAFETY: a new mapping of two pages, of which the second is then made unreadable; neither is a reference's.
        let at = unsafe {
            let (rw, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 2 * page, rw, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at.byte_add(page), page, none), 0);
            at.cast::<u8>().cast_const()
        };
        let here = |from, len| is_readable(at.wrapping_add(from), len);
        assert!(here(0, page) && here(0, 16) && here(page - 16, 16));
        assert!(!here(page, 16), "behind the end");
        assert!(!here(page - 16, 32), "across the end");
        assert!(!here(0, 2 * page), "all of it");
        assert!(!is_readable(std::ptr::null(), 16));
        assert!(!here(1, 16), "cannot be asked about");
        let words = [0_u64; 1024];
        assert!(is_readable(words.as_ptr().cast(), size_of_val(&words)));
    }
}
