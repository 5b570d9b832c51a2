//! Processes and threads, by number.

use crate::Errno;
use libc::{c_int, c_long};

/// Process id, from the kernel (a vforked child shares our memory, not our pid).
pub fn pid() -> c_int {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// The calling thread.
pub fn tid() -> c_int {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Our effective user.
pub fn user() -> libc::uid_t {
    rustix::process::geteuid().as_raw()
}

/// Whether the program, or a library of its, has something of this name.
pub fn has_symbol(name: &std::ffi::CStr) -> bool {
    // SAFETY: a valid name.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
}

/// Which kind of namespace a descriptor is (`CLONE_NEW...`); 0 if it is none.
pub fn namespace_kind(fd: c_int) -> c_int {
    // As in linux/nsfs.h.
    const NS_GET_NSTYPE: c_int = 0xb703;
    // SAFETY: no memory is passed.
    unsafe { call!(libc::SYS_ioctl, fd, NS_GET_NSTYPE, 0) }.unwrap_or(0) as c_int
}

/// Sends a thread of this process a signal; 0 for none.
fn signal_thread(tid: c_int, signal: c_int) -> Result<(), Errno> {
    let [pid, tid, signal] = [pid(), tid, signal].map(c_long::from);
    // SAFETY: no memory is passed. What a signal of its own does to a process is as if the kernel had sent it.
    unsafe { call!(libc::SYS_tgkill, pid, tid, signal) }.map(drop)
}

/// Whether a thread of this process still exists.
pub fn thread_lives(tid: c_int) -> bool {
    signal_thread(tid, 0) != Err(libc::ESRCH)
}

/// Sends the calling thread the SIGPIPE that the kernel would have sent it.
pub fn raise_sigpipe() {
    let _ = signal_thread(tid(), libc::SIGPIPE);
}
