//! The calling thread's errno, which a hook leaves as it was.

use libc::c_int;

/// An errno value.
pub type Errno = c_int;

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

/// A failed call's errno, of which rustix has a type of its own.
pub(crate) fn number(errno: rustix::io::Errno) -> Errno {
    errno.raw_os_error()
}
