//! The kernel, asked directly: [`slim_sys`], and the data path's own calls.

pub use slim_sys::*;

/// Sets errno and gives -1.
#[cold]
pub fn fail(errno: libc::c_int) -> isize {
    set_errno(errno);
    -1
}
