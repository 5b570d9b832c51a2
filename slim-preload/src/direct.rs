//! The data path's system calls, made without libc.
//!
//! libc makes each of these calls a cancellation point. In a process with several threads that costs as much as all of
//! SLIM's own work, and the agent's thread is always a second one. So calls go past libc, except where a program could notice:
//! * after the first `pthread_cancel` no call goes past libc. A non-blocking call of ours is made while locks are held, and
//!   must return; so the cancellation point comes before it ([`cancellation_point`]);
//! * after the application has made a thread, a call that may block goes through libc: only another thread can cancel it.
//!   (Threads that libc itself makes, to call back for a `SIGEV_THREAD`, are not seen.)

use libc::{c_int, c_void, iovec, msghdr, pollfd, size_t, sockaddr, socklen_t};
use slim_sys::cancel;
use slim_sys::raw::{Word, padded, syscall};
use slim_sys::{Errno, errno};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU8, Ordering};

/// [`allow`] has not found yet that the application's calls would reach libc's functions.
const UNVERIFIED: u8 = 1 << 0;
/// The application has made a thread.
const THREADS: u8 = 1 << 1;
/// The application has cancelled a thread.
const CANCELS: u8 = 1 << 2;
/// A child that shares our memory has put another file under a flow's number.
const DIFFERS: u8 = 1 << 3;

/// The reasons against going past libc.
static AGAINST: AtomicU8 = AtomicU8::new(UNVERIFIED);

/// Lets calls go past libc from now on, unless another library hooks libc's functions, too: that library must not be bypassed.
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
        AGAINST.fetch_and(!UNVERIFIED, Ordering::SeqCst);
    }
}

/// The application makes a thread, which may cancel blocking calls from now on.
pub fn threads() {
    AGAINST.fetch_or(THREADS, Ordering::SeqCst);
}

/// Whether the application has made a thread.
pub fn has_threads() -> bool {
    AGAINST.load(Ordering::SeqCst) & THREADS != 0
}

/// A vforked child puts another file under a flow's number. From now on every call checks which process makes it.
pub fn numbers_differ() {
    AGAINST.fetch_or(DIFFERS, Ordering::SeqCst);
}

/// Whether a vforked child has ever done that.
#[inline]
pub fn do_numbers_differ() -> bool {
    AGAINST.load(Ordering::Relaxed) & DIFFERS != 0
}

/// A thread is about to be cancelled: every call is a cancellation point from now on.
pub fn cancels() {
    AGAINST.fetch_or(CANCELS, Ordering::SeqCst);
}

/// Load address of the library in which the next function of this name is.
fn library_of(name: &CStr) -> Option<usize> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a valid name; `dladdr` fills the structure or says that it has not.
    unsafe {
        let at = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        let found = !at.is_null() && libc::dladdr(at, info.as_mut_ptr()) != 0;
        found.then(|| info.assume_init().dli_fbase as usize)
    }
}

/// Whether a non-blocking call may go past libc.
#[inline(always)]
pub fn is_allowed() -> bool {
    AGAINST.load(Ordering::Relaxed) & !THREADS == 0
}

/// Whether a call may go past libc. Evaluates `never_waits` only if it matters.
#[inline(always)]
pub fn is_allowed_if(never_waits: impl FnOnce() -> bool) -> bool {
    match AGAINST.load(Ordering::Relaxed) {
        0 => true,
        THREADS => never_waits(),
        _ => false,
    }
}

/// A cancellation point, at the start of an application's call that is one in libc. The call holds no locks yet.
pub fn cancellation_point() {
    if AGAINST.load(Ordering::Relaxed) & CANCELS != 0 {
        cancel::point();
    }
}

/// Makes a non-blocking call through libc, without a cancellation point. The answer has the kernel's form.
pub fn surely(real: impl FnOnce() -> isize) -> isize {
    answer(cancel::uncancelled(real))
}

/// Makes a call on a descriptor that SLIM does not manage, so that it is unknown whether the call blocks: past libc with
/// `direct` if that is allowed, otherwise with `real`, libc's own function. The answer has libc's form.
#[inline(always)]
pub fn plainly(direct: impl FnOnce() -> isize, real: impl FnOnce() -> isize) -> isize {
    if AGAINST.load(Ordering::Relaxed) != 0 {
        return real();
    }
    as_libc(direct())
}

/// Converts the kernel's form of an answer to libc's.
#[inline(always)]
pub fn as_libc(answer: isize) -> isize {
    match answer {
        n if n < 0 => crate::sys::fail(errno_in(n)),
        n => n,
    }
}

/// Converts libc's form of an answer to the kernel's.
#[inline]
pub fn answer(n: isize) -> isize {
    if n < 0 { -(errno() as isize) } else { n }
}

/// The errno in an answer that has the kernel's form.
#[inline]
pub fn errno_in(answer: isize) -> Errno {
    -answer as Errno
}

/// The number of the system call of this name, on processors that have it.
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
            // SAFETY: the caller's contract; the kernel ignores arguments beyond those of the call.
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
