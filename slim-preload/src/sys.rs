//! The kernel, asked directly.
//!
//! The preload's own calls must never reach its own hooks, and must work before the constructor, in a
//! vforked child and in signal context; so they are raw system calls, no cancellation points, and give
//! `Err(errno)` instead of touching the caller's `errno`.

use libc::{c_int, c_long, c_void};
use slim_agent::limit::above as above_limit;
use slim_agent::numbers;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

/// An errno value.
pub type Errno = c_int;

macro_rules! call {
    ($nr:expr $(, $arg:expr)*) => {{
        // SAFETY: every caller passes arguments that are valid for this system call; pointers refer to
        // live locals or to memory its own contract vouches for.
        unsafe { $crate::sys::raw::result($crate::sys::raw::syscall(
            $nr,
            $crate::sys::raw::padded([$($crate::sys::raw::Word::word($arg)),*]),
        )) }
    }};
}

pub mod direct;
mod fence;
mod identity;
mod memory;
mod owner;
pub mod proc;
pub mod raw;
mod tcp;
pub use fence::{can_fence, fence, register_fence};
pub use identity::{identity, identity_of};
pub use memory::{copy_of, is_readable, is_writable, memory, read_memory};
pub use owner::{copy_owner, tell_owner};
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

/// Whether the program, or a library of its, has something of this name.
pub fn has_symbol(name: &std::ffi::CStr) -> bool {
    // SAFETY: a valid name.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
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

/// An ioctl that takes nothing, and gives a number.
pub fn ioctl(fd: c_int, request: libc::c_ulong) -> Result<c_int, Errno> {
    call!(libc::SYS_ioctl, fd, request, 0usize).map(|n| n as c_int)
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

/// `write`; what cannot be written is lost.
pub fn write(fd: c_int, bytes: &[u8]) {
    let _ = call!(libc::SYS_write, fd, bytes.as_ptr(), bytes.len());
}

/// `pread` into a buffer of ours.
pub fn pread(fd: c_int, buf: &mut [u8], offset: i64) -> Result<usize, Errno> {
    call!(libc::SYS_pread64, fd, buf.as_mut_ptr(), buf.len(), offset).map(|n| n as usize)
}

/// The current file offset; an error where the descriptor has none.
pub fn file_offset(fd: c_int) -> Result<i64, Errno> {
    call!(libc::SYS_lseek, fd, 0, libc::SEEK_CUR)
}

/// Memory from the system: whole pages of zeros, or null. errno is not touched.
pub fn map(len: usize) -> *mut u8 {
    let (kind, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    let mapped = keep_errno(|| call!(libc::SYS_mmap, 0usize, len, kind, flags, -1, 0usize));
    std::ptr::with_exposed_provenance_mut(mapped.unwrap_or(0) as usize)
}

/// Gives such memory back, or as much of it as the system takes back. errno is not touched.
pub fn unmap(at: *mut u8, len: usize) -> bool {
    keep_errno(|| {
        let done = call!(libc::SYS_munmap, at, len).is_ok();
        if !done {
            // The process has as many mappings as it may: only the address space stays.
            let _ = call!(libc::SYS_madvise, at, len, libc::MADV_DONTNEED);
        }
        done
    })
}

/// Makes such memory larger or smaller; it may move. Null if that cannot be. errno is not touched.
pub fn remap(at: *mut u8, old: usize, new: usize) -> *mut u8 {
    let flags = libc::MREMAP_MAYMOVE;
    let mapped = keep_errno(|| call!(libc::SYS_mremap, at, old, new, flags));
    std::ptr::with_exposed_provenance_mut(mapped.unwrap_or(0) as usize)
}

/// No number beyond is open, unless the limit was higher before.
fn numbers_at_most() -> c_int {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let none = std::ptr::null::<libc::rlimit>();
    let asked = call!(
        libc::SYS_prlimit64,
        0,
        libc::RLIMIT_NOFILE,
        none,
        &raw mut limit
    );
    // As many as the kernel has by default (fs.nr_open).
    let most = 1 << 20;
    asked.map_or(most, |_| limit.rlim_cur.min(most as u64) as c_int)
}

/// Calls `f` with the numbers that are open, but for the one that it takes to find out. Uses no heap.
pub fn for_each_open(mut f: impl FnMut(c_int)) {
    numbers::make(|| {
        let Ok(dir) = proc::open(format_args!("self/fd"), libc::O_RDONLY | libc::O_DIRECTORY)
        else {
            // There is no /proc, after a chroot for example: every number is tried.
            return (0..numbers_at_most())
                .filter(|fd| is_open(*fd))
                .for_each(&mut f);
        };
        // As in linux/dirent.h: where in an entry its length is, and its name.
        const LENGTH: usize = 16;
        const NAME: usize = 19;
        let mut entries = [0u8; 2048];
        while let Ok(filled @ 1..) = call!(
            libc::SYS_getdents64,
            dir,
            entries.as_mut_ptr(),
            entries.len()
        ) {
            let mut rest = &entries[..filled as usize];
            while rest.len() > NAME {
                let length = u16::from_ne_bytes([rest[LENGTH], rest[LENGTH + 1]]);
                let (entry, others) = rest.split_at(rest.len().min(length.max(1).into()));
                let name = entry.get(NAME..).unwrap_or_default();
                let name = name.split(|b| *b == 0).next().unwrap_or_default();
                let number = std::str::from_utf8(name).ok().and_then(|n| n.parse().ok());
                if let Some(number) = number.filter(|n| *n != dir) {
                    f(number);
                }
                rest = others;
            }
        }
        let _ = call!(libc::SYS_close, dir);
    });
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

/// Whether a TCP socket has failed, and has the error to report; it keeps it. One that has not may have a passing error, or
/// messages in its error queue.
pub fn has_error(fd: c_int) -> bool {
    state_bits(fd) & libc::POLLERR != 0 && tcp_state(fd) == Some(TCP_CLOSE)
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

/// Wakes up to `n` sleepers on `word`.
pub fn futex_wake(word: &std::sync::atomic::AtomicU32, n: c_int) {
    let _ = call!(
        libc::SYS_futex,
        word.as_ptr(),
        libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
        n
    );
}

/// Sleeps for a millisecond. No cancellation point; errno is not touched.
pub fn nap() {
    let nobody = std::sync::atomic::AtomicU32::new(0);
    let _ = keep_errno(|| futex_wait(&nobody, 0, Some(Duration::from_millis(1))));
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
