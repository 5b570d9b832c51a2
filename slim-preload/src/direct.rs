//! The data path's system calls without libc around them.
//!
//! libc makes each of these calls a cancellation point, which in a process with several threads costs as much as all
//! that SLIM does besides, and one of the threads is ours. So calls go past libc, but not where that could be noticed:
//! * from the first `pthread_cancel` on none does. A call of ours that does not wait is made while something is held,
//!   and comes back: it is a cancellation point before that ([`cancellation_point`]);
//! * a call that waits, and so would have to be interrupted, goes through libc as soon as the application has made
//!   a thread, for only another thread interrupts it. (Those of libc's own making, which call back for a
//!   `SIGEV_THREAD`, are not seen.)

use libc::{c_int, c_void, iovec, msghdr, pollfd, size_t, sockaddr, socklen_t};
use slim_sys::cancel;
use slim_sys::raw::{Word, padded, syscall};
use slim_sys::{Errno, errno};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// It is not known that libc's functions are what the application would call.
const UNAGAINST: u8 = 1 << 0;
/// The application has made a thread.
const THREADS: u8 = 1 << 1;
/// It has cancelled one.
const CANCELS: u8 = 1 << 2;
/// A child that shares our memory has put something else under a number of a flow's.
const DIFFERS: u8 = 1 << 3;

/// What speaks against going past libc.
static AGAINST: AtomicU8 = AtomicU8::new(UNAGAINST);

/// From now on calls go past libc, unless another library takes its calls too: that one is not to be left out.
pub fn allow() {
    let names = [
        c"epoll_wait",
        c"poll",
        c"read",
        c"readv",
        c"recv",
        c"recvfrom",
        c"recvmsg",
        c"send",
        c"sendmsg",
        c"sendto",
        c"write",
        c"writev",
    ];
    let libc = library_of(c"gnu_get_libc_version");
    let own = cfg!(target_arch = "x86_64") && libc.is_some();
    if own && names.iter().all(|name| library_of(name) == libc) {
        AGAINST.fetch_and(!UNAGAINST, Ordering::SeqCst);
    }
}

/// The application makes a thread: what waits can be interrupted from now on.
pub fn threads() {
    AGAINST.fetch_or(THREADS, Ordering::SeqCst);
}

/// Whether the application has made one.
pub fn has_threads() -> bool {
    AGAINST.load(Ordering::SeqCst) & THREADS != 0
}

/// A vforked child gives a number of a flow's to something else. From now on every call asks who makes it.
pub fn numbers_differ() {
    AGAINST.fetch_or(DIFFERS, Ordering::SeqCst);
}

/// Whether there was such a child.
#[inline]
pub fn do_numbers_differ() -> bool {
    AGAINST.load(Ordering::Relaxed) & DIFFERS != 0
}

/// A thread is to be cancelled: every call is a cancellation point from now on.
pub fn cancels() {
    AGAINST.fetch_or(CANCELS, Ordering::SeqCst);
}

/// Where the library that the next function of this name is in has been loaded.
fn library_of(name: &CStr) -> Option<usize> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a valid name; `dladdr` fills the structure or says that it has not.
    unsafe {
        let at = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        let found = !at.is_null() && libc::dladdr(at, info.as_mut_ptr()) != 0;
        found.then(|| info.assume_init().dli_fbase as usize)
    }
}

/// Whether a call that does not wait may go past libc.
#[inline(always)]
pub fn is_allowed() -> bool {
    AGAINST.load(Ordering::Relaxed) & !THREADS == 0
}

/// Whether a call may go past libc; asks whether it never waits only if that matters.
#[inline(always)]
pub fn is_allowed_if(never_waits: impl FnOnce() -> bool) -> bool {
    match AGAINST.load(Ordering::Relaxed) {
        0 => true,
        THREADS => never_waits(),
        _ => false,
    }
}

/// Where a call of the application begins that libc has as a cancellation point. It holds nothing yet.
pub fn cancellation_point() {
    if AGAINST.load(Ordering::Relaxed) & CANCELS != 0 {
        cancel::point();
    }
}

/// Makes a call that does not wait through libc, and comes back. The answer is the kernel's.
pub fn surely(real: impl FnOnce() -> isize) -> isize {
    answer(cancel::uncancelled(real))
}

/// Makes a call on a descriptor that is none of our business, of which nobody knows whether it waits: past libc with
/// `direct`, else with `real`, libc's own function. The answer is libc's.
#[inline(always)]
pub fn plainly(direct: impl FnOnce() -> isize, real: impl FnOnce() -> isize) -> isize {
    if AGAINST.load(Ordering::Relaxed) != 0 {
        return real();
    }
    as_libc(direct())
}

/// What the kernel answered, as libc's function gives it.
#[inline(always)]
pub fn as_libc(answer: isize) -> isize {
    match answer {
        n if n < 0 => crate::sys::fail(errno_in(n)),
        n => n,
    }
}

/// What libc's function gave, as the kernel says it.
#[inline]
pub fn answer(n: isize) -> isize {
    if n < 0 { -(errno() as isize) } else { n }
}

/// The errno in an answer of the kernel's.
#[inline]
pub fn errno_in(answer: isize) -> Errno {
    -answer as Errno
}

/// The system call of this name, where the processor has it.
macro_rules! number {
    ($name:ident) => {{
        #[cfg(target_arch = "x86_64")]
        let nr = libc::$name;
        #[cfg(not(target_arch = "x86_64"))]
        let nr = 0;
        nr
    }};
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $nr:ident($($arg:ident: $kind:ty),*);)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments are the application's own for this call, as its manual page asks.
        #[inline(always)]
        pub unsafe fn $name($($arg: $kind),*) -> isize {
            // SAFETY: the caller's contract; arguments beyond those of the call are not looked at.
            unsafe { syscall(number!($nr), padded([$($arg.word()),*])) }
        }
    )*};
}

calls! {
    /// `epoll_wait(2)`
    epoll_wait = SYS_epoll_wait(fd: c_int, events: *mut libc::epoll_event, max: c_int, timeout: c_int);
    /// `poll(2)`
    poll = SYS_poll(fds: *mut pollfd, count: usize, timeout: c_int);
    /// `read(2)`
    read = SYS_read(fd: c_int, buf: *mut c_void, len: size_t);
    /// `readv(2)`
    readv = SYS_readv(fd: c_int, list: *const iovec, count: c_int);
    /// `recvfrom(2)`
    recvfrom = SYS_recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t);
    /// `recvmsg(2)`
    recvmsg = SYS_recvmsg(fd: c_int, message: *mut msghdr, flags: c_int);
    /// `sendmsg(2)`
    sendmsg = SYS_sendmsg(fd: c_int, message: *const msghdr, flags: c_int);
    /// `sendto(2)`
    sendto = SYS_sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t);
    /// `write(2)`
    write = SYS_write(fd: c_int, buf: *const c_void, len: size_t);
    /// `writev(2)`
    writev = SYS_writev(fd: c_int, list: *const iovec, count: c_int);
}
