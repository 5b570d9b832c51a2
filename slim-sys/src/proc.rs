//! What the kernel tells of processes (proc(5)), also to a program that changes its root directory after its first
//! connection.

use crate::numbers;
use crate::{Errno, own};
use libc::{c_int, c_void};
use std::ffi::CStr;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicI32, Ordering};

/// A descriptor of /proc, or -1. Not of a directory of this process: forked children have others.
static PROC: AtomicI32 = AtomicI32::new(-1);

/// Keeps /proc open.
pub fn hold() {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let held = numbers::make(|| {
        let at = c"/proc".as_ptr();
        call!(libc::SYS_openat, libc::AT_FDCWD, at, flags).map(|fd| own(fd as c_int))
    });
    PROC.store(held.unwrap_or(-1), Ordering::Release);
}

/// Closes it, for good.
pub fn release() {
    let held = PROC.swap(-1, Ordering::AcqRel);
    if held >= 0 {
        crate::close(held);
    }
}

/// In a forked child, where our descriptors are closed.
pub fn forget() {
    PROC.store(-1, Ordering::Release);
}

/// The name of a file below /proc.
struct Path {
    text: [u8; 64],
    len: usize,
}

impl Path {
    fn new(below: fmt::Arguments<'_>) -> Self {
        let mut path = Path {
            text: [0; 64],
            len: 0,
        };
        let _ = write!(path, "/proc/{below}");
        path
    }

    /// With the directory that it is below.
    fn place(&self) -> (c_int, *const u8) {
        match PROC.load(Ordering::Acquire) {
            -1 => (libc::AT_FDCWD, self.text.as_ptr()),
            // Without what `write` has put before it.
            held => (held, self.text["/proc/".len()..].as_ptr()),
        }
    }
}

impl Write for Path {
    /// One zero is left at the end. All names used here are short.
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let end = self.len + s.len();
        let room = self.text.len() - 1;
        let place = self.text[..room].get_mut(self.len..end).ok_or(fmt::Error)?;
        place.copy_from_slice(s.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// Opens a file below /proc. The number is not ours yet: call in [`numbers::make`], and close it there.
pub(crate) fn open(below: fmt::Arguments<'_>, flags: c_int) -> Result<c_int, Errno> {
    let path = Path::new(below);
    let (at, name) = path.place();
    call!(libc::SYS_openat, at, name, flags | libc::O_CLOEXEC).map(|fd| fd as c_int)
}

/// The whole of a file below /proc.
pub fn read(below: fmt::Arguments<'_>) -> Option<Vec<u8>> {
    numbers::make(|| {
        let fd = open(below, libc::O_RDONLY).ok()?;
        let mut all = Vec::new();
        let mut piece = [0u8; 4096];
        let whole = loop {
            match call!(libc::SYS_read, fd, piece.as_mut_ptr(), piece.len()) {
                Ok(0) => break true,
                Ok(n) => all.extend_from_slice(&piece[..n as usize]),
                Err(libc::EINTR) => {}
                Err(_) => break false,
            }
        };
        let _ = call!(libc::SYS_close, fd);
        whole.then_some(all)
    })
}

/// Whether a link below /proc has this text.
pub fn links_to(below: fmt::Arguments<'_>, text: &CStr) -> bool {
    let path = Path::new(below);
    let (at, name) = path.place();
    let mut found = [0u8; 64];
    let n = call!(
        libc::SYS_readlinkat,
        at,
        name,
        found.as_mut_ptr(),
        found.len()
    );
    n.is_ok_and(|n| &found[..n as usize] == text.to_bytes())
}

/// Device and number of the file that a link below /proc leads to.
pub fn file(below: fmt::Arguments<'_>) -> Option<(u64, u64)> {
    let path = Path::new(below);
    let (at, name) = path.place();
    let mut about = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let into: *mut c_void = about.as_mut_ptr().cast();
    call!(libc::SYS_newfstatat, at, name, into, 0).ok()?;
    // SAFETY: zeroed first, and all bytes are valid for it.
    let about = unsafe { about.assume_init() };
    Some((about.st_dev, about.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_with_and_without_a_descriptor() {
        for held in [false, true] {
            if held {
                hold();
            }
            let status = read(format_args!("self/status")).unwrap();
            assert!(status.starts_with(b"Name:"));
            let [a, b] = crate::socketpair(libc::SOCK_STREAM).unwrap();
            let before = file(format_args!("self/fd/{a}"));
            assert!(before.is_some());
            assert!(!links_to(
                format_args!("self/fd/{a}"),
                c"anon_inode:[eventpoll]"
            ));
            [a, b].into_iter().for_each(crate::close);
            // Another test may have the number by now.
            assert_ne!(file(format_args!("self/fd/{a}")), before);
        }
        release();
    }
}
