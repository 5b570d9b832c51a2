//! System calls about processes and threads.

use crate::Errno;
use libc::{c_int, c_long};

/// The process id, from the kernel and not cached: a vforked child shares our memory, but not our pid.
pub fn pid() -> c_int {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// The id of the calling thread.
pub fn tid() -> c_int {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Our effective user id.
pub fn user() -> libc::uid_t {
    rustix::process::geteuid().as_raw()
}

/// Whether the program, or one of its libraries, exports a symbol of this name.
pub fn has_symbol(name: &std::ffi::CStr) -> bool {
    // SAFETY: the name is a valid C string.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
}

/// The kind of namespace that a descriptor refers to (`CLONE_NEW...`); 0 if it refers to none.
pub fn namespace_kind(fd: c_int) -> c_int {
    // As in linux/nsfs.h.
    const NS_GET_NSTYPE: c_int = 0xb703;
    // SAFETY: no memory is passed.
    unsafe { call!(libc::SYS_ioctl, fd, NS_GET_NSTYPE, 0) }.unwrap_or(0) as c_int
}

/// Sends a signal to a thread of this process. Signal 0 only checks that the thread exists.
fn signal_thread(tid: c_int, signal: c_int) -> Result<(), Errno> {
    let [pid, tid, signal] = [pid(), tid, signal].map(c_long::from);
    // SAFETY: no memory is passed. The signal has the same effect as one from the kernel.
    unsafe { call!(libc::SYS_tgkill, pid, tid, signal) }.map(drop)
}

/// Whether a thread of this process still exists.
pub fn thread_lives(tid: c_int) -> bool {
    signal_thread(tid, 0) != Err(libc::ESRCH)
}

/// Sends the calling thread a SIGPIPE, as the kernel would have done.
pub fn raise_sigpipe() {
    let _ = signal_thread(tid(), libc::SIGPIPE);
}

/// Ends this process at once, as a kill from outside does: no handler runs, and nothing is written.
pub fn end_self() {
    // SAFETY: `kill` takes two integers.
    let _ = unsafe { call!(libc::SYS_kill, pid(), libc::SIGKILL) };
}
