//! The calling thread's errno. A hook must preserve it.

use libc::c_int;

/// An errno value.
pub type Errno = c_int;

/// The calling thread's errno.
pub fn errno() -> Errno {
    // SAFETY: the function always returns a valid pointer to this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
pub fn set_errno(e: Errno) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = e }
}

/// Runs `f` and restores errno afterwards.
pub fn keep_errno<R>(f: impl FnOnce() -> R) -> R {
    let e = errno();
    let r = f();
    set_errno(e);
    r
}

/// Converts rustix's errno type.
pub(crate) fn number(errno: rustix::io::Errno) -> Errno {
    errno.raw_os_error()
}
