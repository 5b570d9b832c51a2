//! Numbers in reserve, for a process whose application has opened all that its limit allows.
//!
//! A broken connection needs a second descriptor until the new one takes its number. Where the soft limit is below the
//! hard one, it is made above the soft limit, and costs the application nothing. Elsewhere two numbers are kept from the
//! application while it has others: one for the connections that we make, one for those that come. Two processes at their limit
//! that resume towards each other would else wait for each other. Each serves one flow after the other.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use libc::c_int;

use crate::fds::{self, Mark};
use crate::limit;
use crate::numbers;
use crate::{as_agent, at};

/// What a number is kept for.
#[derive(Clone, Copy)]
pub enum For {
    /// A connection that a peer makes.
    Accepting,
    /// One that we make.
    Connecting,
}

/// Where the limit is lower the application needs every number.
const WORTH: u64 = 128;
const NONE: RawFd = -1;

/// The numbers, in the order of [`For`].
static KEPT: [AtomicI32; 2] = [const { AtomicI32::new(NONE) }; 2];
/// A descriptor of ours whose copies are under the numbers: what wakes the agent thread.
static SOURCE: AtomicI32 = AtomicI32::new(NONE);

/// Begins to keep numbers; `source` is marked with [`Mark::WAKE`].
pub fn begin(source: RawFd) {
    SOURCE.store(source, Ordering::SeqCst);
    fill();
}

/// The agent ends.
pub fn end() {
    SOURCE.store(NONE, Ordering::SeqCst);
    for kept in &KEPT {
        taken(kept);
    }
}

/// In a forked child, where all our descriptors are closed.
pub fn forget() {
    SOURCE.store(NONE, Ordering::SeqCst);
    for kept in &KEPT {
        kept.store(NONE, Ordering::SeqCst);
    }
}

/// What is copied, unless the application has closed it unseen.
fn source() -> Option<RawFd> {
    let source = SOURCE.load(Ordering::SeqCst);
    (source != NONE && Mark::WAKE.is_on(source)).then_some(source)
}

fn first_wanting() -> Option<&'static AtomicI32> {
    KEPT.iter()
        .find(|kept| kept.load(Ordering::Relaxed) == NONE)
}

/// Whether a number is wanting.
pub fn is_wanting() -> bool {
    SOURCE.load(Ordering::Relaxed) != NONE && first_wanting().is_some()
}

/// Takes numbers, if some are wanting and the application leaves any.
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

/// Closes what is under a number of the reserve, unless somebody else has it by now.
fn close(fd: RawFd) {
    numbers::whole(|| {
        fds::release(fd);
        if Mark::WAKE.is_on(fd) {
            // SAFETY: a copy that only this module knows.
            as_agent(|| drop(unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    });
}

/// Gives a number up; whether there was one.
fn taken(kept: &AtomicI32) -> bool {
    let fd = kept.swap(NONE, Ordering::SeqCst);
    if fd != NONE {
        close(fd);
    }
    fd != NONE
}

/// Runs `create`, which makes a descriptor of ours for which the limit leaves no room. To be called in [`numbers::make`].
///
/// # Errors
/// That of `create`; `EMFILE` when the reserve is in use.
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

/// Closes a descriptor of ours. If the reserve lacks a number it keeps this one, which the application cannot get in between.
pub fn close_or_keep(fd: OwnedFd) {
    let number = fd.as_raw_fd();
    let wanting = if is_wanting() { first_wanting() } else { None };
    if let Some((kept, source)) = wanting.zip(source()) {
        // SAFETY: no memory is passed; the number is ours.
        let copied: c_int = as_agent(|| unsafe { libc::dup3(source, number, libc::O_CLOEXEC) });
        if copied == number {
            // It is the reserve's.
            std::mem::forget(fd);
            fds::claim(number);
            return put(kept, number);
        }
    }
    // Before the close: a number that is free again may be the application's at once.
    numbers::whole(|| {
        fds::release(number);
        as_agent(|| drop(fd));
    });
}
