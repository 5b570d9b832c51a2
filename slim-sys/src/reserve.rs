//! Reserved descriptor numbers, for a process whose application has opened as many files as its limit allows.
//!
//! A resume needs a second descriptor until the new connection takes the number of the old one. If the soft limit is below the
//! hard limit, this descriptor is made above the soft limit, and takes no number from the application. Else two numbers are
//! reserved while the application still has others: one for connections that we make, one for connections that we accept. With
//! one number only, two processes at their limit that resume towards each other would wait for each other. Each number serves
//! one flow at a time.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use libc::c_int;

use crate::fds::{self, Mark};
use crate::limit;
use crate::numbers;
use crate::{as_agent, at};

/// The use that a number is reserved for.
#[derive(Clone, Copy)]
pub enum For {
    /// A connection that a peer makes to us.
    Accepting,
    /// A connection that we make.
    Connecting,
}

/// If the soft limit is lower than this the application needs every number, and none is reserved.
const WORTH: u64 = 128;
const NONE: RawFd = -1;

/// The reserved numbers, in the order of [`For`].
static KEPT: [AtomicI32; 2] = [const { AtomicI32::new(NONE) }; 2];
/// A descriptor of ours, the one that wakes the agent thread. Copies of it occupy the reserved numbers.
static SOURCE: AtomicI32 = AtomicI32::new(NONE);

/// Begins to reserve numbers; `source` is marked with [`Mark::WAKE`].
pub fn begin(source: RawFd) {
    SOURCE.store(source, Ordering::SeqCst);
    fill();
}

/// Gives all reserved numbers up, when the agent ends.
pub fn end() {
    SOURCE.store(NONE, Ordering::SeqCst);
    for kept in &KEPT {
        taken(kept);
    }
}

/// Forgets the reserved numbers in a forked child, where all our descriptors are closed.
pub fn forget() {
    SOURCE.store(NONE, Ordering::SeqCst);
    for kept in &KEPT {
        kept.store(NONE, Ordering::SeqCst);
    }
}

/// The descriptor to copy; `None` if the application has closed it unseen.
fn source() -> Option<RawFd> {
    let source = SOURCE.load(Ordering::SeqCst);
    (source != NONE && Mark::WAKE.is_on(source)).then_some(source)
}

fn first_wanting() -> Option<&'static AtomicI32> {
    KEPT.iter()
        .find(|kept| kept.load(Ordering::Relaxed) == NONE)
}

/// Whether a reserved number is missing.
pub fn is_wanting() -> bool {
    SOURCE.load(Ordering::Relaxed) != NONE && first_wanting().is_some()
}

/// Reserves the missing numbers, as far as the application leaves any.
pub fn fill() {
    while let Some(kept) = first_wanting() {
        let Some(source) = source() else { return };
        let copy = |least| {
            let made = rustix::io::fcntl_dupfd_cloexec(at(source), least);
            made.map(IntoRawFd::into_raw_fd).ok()
        };
        let made = numbers::make(|| {
            let made = limit::above(copy).flatten();
            let made =
                made.or_else(|| (fds::soft_limit() >= WORTH).then(|| copy(fds::floor()))?)?;
            fds::claim(made);
            put(kept, made);
            Some(())
        });
        if made.is_none() {
            return;
        }
    }
}

fn put(kept: &AtomicI32, fd: RawFd) {
    let put = kept.compare_exchange(NONE, fd, Ordering::SeqCst, Ordering::SeqCst);
    if put.is_err() {
        close(fd);
    }
}

/// Closes a reserved number, unless another file has come under it.
fn close(fd: RawFd) {
    numbers::whole(|| {
        fds::release(fd);
        if Mark::WAKE.is_on(fd) {
            // SAFETY: a copy that only this module uses.
            as_agent(|| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    });
}

/// Gives a reserved number up. Returns whether there was one.
fn taken(kept: &AtomicI32) -> bool {
    let fd = kept.swap(NONE, Ordering::SeqCst);
    if fd != NONE {
        close(fd);
    }
    fd != NONE
}

/// Runs `create`, which makes a descriptor of ours that does not fit below the limit. Call it inside [`numbers::make`].
///
/// # Errors
/// The error of `create`; `EMFILE` if the reserved number is in use.
pub fn in_need<T>(what: For, create: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let full = || io::Error::from_raw_os_error(libc::EMFILE);
    match limit::above(|_| create()) {
        Some(Err(e)) if e.raw_os_error() == Some(libc::EMFILE) => {}
        Some(made) => return made,
        None => {}
    }
    let kept = KEPT.get(what as usize).ok_or_else(full)?;
    if taken(kept) { create() } else { Err(full()) }
}

/// Closes a descriptor of ours. If a reserved number is missing, this number is reserved instead; the application cannot get it
/// in between.
pub fn close_or_keep(fd: OwnedFd) {
    let number = fd.as_raw_fd();
    let wanting = if is_wanting() { first_wanting() } else { None };
    if let Some((kept, source)) = wanting.zip(source()) {
        // SAFETY: no memory is passed; the number is ours.
        let copied: c_int = as_agent(|| unsafe { libc::dup3(source, number, libc::O_CLOEXEC) });
        if copied == number {
            // The number now belongs to the reserve.
            std::mem::forget(fd);
            fds::claim(number);
            return put(kept, number);
        }
    }
    // Released before the close, because the application may get a free number at once.
    numbers::whole(|| {
        fds::release(number);
        as_agent(|| drop(fd));
    });
}
