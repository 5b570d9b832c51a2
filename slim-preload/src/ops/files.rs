//! Sending files on flows: `sendfile`; and `splice` and asynchronous I/O.
//!
//! A flow needs a copy of the bytes in flight, so `sendfile` passes the file's bytes through a buffer of ours.
//! `splice` and asynchronous I/O do not show us the bytes, so they make a flow plain TCP.

use super::buffers::Source;
use super::demoting;
use super::transmit::Transmit;
use crate::flow::Flow;
use crate::sys;
use crate::table;
use libc::{aiocb, c_int, off_t};
use slim_core::memory;

/// How much of a file is read at once.
const PIECE: usize = 128 << 10;

#[derive(Clone, Copy)]
struct Piece<'a>(&'a [u8]);

impl Source for Piece<'_> {
    fn copy(&self, from: usize, to: usize, mut f: impl FnMut(&[u8])) {
        f(&self.0[from..to]);
    }

    fn copy_all(&self, mut f: impl FnMut(&[u8])) {
        f(self.0);
    }

    fn offer(&self, from: usize, to: usize, mut f: impl FnMut(*const u8, usize) -> bool) {
        f(self.0[from..to].as_ptr(), to - from);
    }

    /// A piece is never split further.
    fn may_be_large(&self, _: &Flow) -> bool {
        false
    }

    fn announced(&self) -> Option<usize> {
        None
    }

    fn total(&self) -> usize {
        self.0.len()
    }
}

/// `sendfile` to a flow.
///
/// # Safety
/// `offset` is the application's, as `sendfile(2)` asks; it may be bad.
pub unsafe fn sendfile(
    out: c_int,
    file: c_int,
    offset: *mut off_t,
    count: usize,
    real: impl Fn() -> isize,
) -> isize {
    if table::flow(out).is_none_or(|flow| flow.own_at(out).is_none()) {
        return real();
    }
    let start = if offset.is_null() {
        sys::file_offset(file)
    } else {
        // SAFETY: the application's integer.
        unsafe { sys::copy_of(offset) }.ok_or(libc::EFAULT)
    };
    let Ok(start) = start else { return real() };
    let (mut large, mut small) = (Vec::new(), [0; 1 << 10]);
    let buffer = match memory::reserve(&mut large, PIECE.min(count)) {
        Ok(()) => {
            large.resize(PIECE.min(count), 0);
            &mut large[..]
        }
        Err(_) => &mut small[..],
    };
    let mut done = 0usize;
    while done < count {
        let want = buffer.len().min(count - done);
        let piece = match sys::pread(file, &mut buffer[..want], start + done as i64) {
            Ok(0) => break,
            Ok(n) => &buffer[..n],
            Err(_) if done > 0 => break,
            // Let the kernel report what is wrong with the file.
            Err(_) => return real(),
        };
        let send = |fd, flags| match sys::send(fd, piece, flags) {
            Ok(n) => n as isize,
            Err(e) => super::fail(e),
        };
        let quick = |fd, flags| sys::keep_errno(|| crate::direct::answer(send(fd, flags)));
        let n = Transmit {
            fd: out,
            source: Piece(piece),
            flags: 0,
        }
        .run(|| send(out, 0), quick, send);
        if n < 0 {
            if done == 0 {
                return n;
            }
            break;
        }
        done += n as usize;
        if (n as usize) < piece.len() {
            break;
        }
    }
    let end = start + done as i64;
    if offset.is_null() {
        sys::seek(file, end);
    } else if sys::is_writable(offset.cast(), size_of::<off_t>()) {
        // SAFETY: just found to be writable.
        unsafe { offset.write_unaligned(end) };
    } else {
        // Like the kernel, which reports this after the bytes are sent.
        return super::fail(libc::EFAULT);
    }
    done as isize
}

/// Before libc's threads do the read or write that `block` describes.
pub fn queued(block: *const aiocb) {
    // SAFETY: the application's structure, of integers and pointers.
    if let Some(block) = unsafe { copied(block) } {
        spliced(block.aio_fildes);
    }
}

/// The same for a list.
pub fn queued_all(list: *const *mut aiocb, count: c_int) {
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the application's list of pointers.
        match unsafe { copied(list.wrapping_add(i)) } {
            Some(block) => queued(block),
            None => return,
        }
    }
}

/// The beginning of `struct iocb`, for `io_submit(2)` (linux/aio_abi.h).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Submission {
    data: u64,
    key_and_flags: u64,
    operation: u16,
    priority: i16,
    fd: c_int,
}

/// Before the kernel runs requests of `io_submit`: they read and write, or keep the file for a poll.
pub fn submitted(count: usize, list: *const *const Submission) {
    // A process has no more requests at a time (fs.aio-max-nr). The kernel reports bad pointers.
    for i in 0..count.min(1 << 16) {
        // SAFETY: the application's list of pointers.
        let Some(at) = (unsafe { copied(list.wrapping_add(i)) }) else {
            return;
        };
        // SAFETY: the application's structure, of integers.
        let Some(submission) = (unsafe { copied(at) }) else {
            return;
        };
        spliced(submission.fd);
    }
}

/// A copy of the application's value at an address; `None` if it cannot be read, or SLIM manages no descriptor at all.
///
/// # Safety
/// As [`sys::copy_of`].
unsafe fn copied<T: Copy>(at: *const T) -> Option<T> {
    let there = !at.is_null() && table::any();
    // SAFETY: the caller's contract.
    sys::keep_errno(|| unsafe { sys::copy_of(at) }.filter(|_| there))
}

/// Before `splice` moves bytes from or to a descriptor: makes a flow plain TCP.
pub fn spliced(fd: c_int) {
    if let Some(flow) = table::flow(fd) {
        sys::keep_errno(|| demoting::hand_over(flow, fd));
    }
}
