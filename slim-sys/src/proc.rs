//! Reads files below /proc (proc(5)), also when the program changes its root directory after its first connection.

use crate::descriptors::{at, close_unregistered, own};
use crate::numbers;
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags};
use rustix::io::{self, Errno};
use std::ffi::CStr;
use std::fmt::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// A descriptor of /proc, or -1. It is not the directory of this process, because forked children have another one.
static PROC: AtomicI32 = AtomicI32::new(-1);

/// Opens /proc and keeps it open.
pub fn hold() {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let held = numbers::make(|| fs::openat(CWD, c"/proc", flags, Mode::empty()).map(own));
    PROC.store(held.unwrap_or(-1), Ordering::Release);
}

/// Closes the kept descriptor of /proc.
pub fn release() {
    let held = PROC.swap(-1, Ordering::AcqRel);
    if held >= 0 {
        crate::close(held);
    }
}

/// Forgets the descriptor in a forked child, where all our descriptors are closed.
pub fn forget() {
    PROC.store(-1, Ordering::Release);
}

/// The name of a file below /proc.
struct ProcPath {
    text: [u8; 64],
    len: usize,
}

impl ProcPath {
    fn new(below: fmt::Arguments<'_>) -> Self {
        let mut path = ProcPath {
            text: [0; 64],
            len: 0,
        };
        let _ = write!(path, "/proc/{below}");
        path
    }

    /// The directory and the name below it, for the `*at` calls.
    fn place(&self) -> (BorrowedFd<'static>, &CStr) {
        let (at, text) = match PROC.load(Ordering::Acquire) {
            -1 => (CWD, &self.text[..]),
            // The name without the "/proc/" that `new` has put in front.
            held => (at(held), &self.text["/proc/".len()..]),
        };
        (at, CStr::from_bytes_until_nul(text).unwrap_or_default())
    }
}

impl Write for ProcPath {
    /// Leaves one zero byte at the end. All names used here are short enough.
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let end = self.len + s.len();
        let room = self.text.len() - 1;
        let place = self.text[..room].get_mut(self.len..end).ok_or(fmt::Error)?;
        place.copy_from_slice(s.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// Opens a file below /proc. The descriptor is not registered as ours: call this inside [`numbers::make`], and close the
/// descriptor there with [`close_unregistered`].
pub(crate) fn open(below: fmt::Arguments<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    let path = ProcPath::new(below);
    let (at, name) = path.place();
    fs::openat(at, name, flags | OFlags::CLOEXEC, Mode::empty())
}

/// Reads a whole file below /proc.
pub fn read(below: fmt::Arguments<'_>) -> Option<Vec<u8>> {
    numbers::make(|| {
        let file = open(below, OFlags::RDONLY).ok()?;
        let mut all = Vec::new();
        let mut piece = [0u8; 4096];
        let whole = loop {
            match io::read(&file, &mut piece) {
                Ok(0) => break true,
                Ok(n) => all.extend_from_slice(&piece[..n]),
                Err(Errno::INTR) => {}
                Err(_) => break false,
            }
        };
        close_unregistered(file);
        whole.then_some(all)
    })
}

/// Whether a symbolic link below /proc has this text.
pub fn links_to(below: fmt::Arguments<'_>, text: &CStr) -> bool {
    let path = ProcPath::new(below);
    let (at, name) = path.place();
    let mut space = [MaybeUninit::uninit(); 64];
    let found = fs::readlinkat_raw(at, name, &mut space);
    found.is_ok_and(|(found, _)| found == text.to_bytes())
}

/// Device and inode number of the file that a symbolic link below /proc points to.
pub fn file(below: fmt::Arguments<'_>) -> Option<(u64, u64)> {
    let path = ProcPath::new(below);
    let (at, name) = path.place();
    let about = fs::statat(at, name, AtFlags::empty()).ok()?;
    Some((about.st_dev, about.st_ino))
}

/// When a process has begun, in ticks of the kernel's clock. Like [`open`], to be called inside [`numbers::make`]. Uses no heap.
pub(crate) fn begun(pid: libc::c_int) -> Option<u64> {
    let file = open(format_args!("{pid}/stat"), OFlags::RDONLY).ok()?;
    // The name is at most 64 bytes long, and the fields before the time are at most 20 numbers.
    let mut line = [0u8; 600];
    let read = io::read(&file, &mut line);
    close_unregistered(file);
    // The name, in parentheses, may hold spaces and parentheses. The time is the 20th field after it.
    let line = std::str::from_utf8(&line[..read.ok()?]).ok();
    line?.rsplit_once(')')?.1.split(' ').nth(20)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_the_same_with_and_without_the_kept_descriptor() {
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
            // Another test may have got the number by now.
            assert_ne!(file(format_args!("self/fd/{a}")), before);
        }
        release();
    }
}
