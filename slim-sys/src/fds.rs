//! The agent's own descriptors, out of the application's way.
//!
//! Programs count on descriptor numbers: shells on 0 to 2, others on getting the lowest free one,
//! `select` on numbers below 1024. So every descriptor of ours is moved above a floor, and a
//! registry tells the front end which numbers it must not let the application close.
//!
//! The registry is a static bitmap: looking a number up is one load, in signal handlers and in
//! forked children too.

use std::cell::RefCell;
use std::collections::BTreeSet;

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use libc::c_int;

use crate::owner::{set_signal, signal_of};
use crate::{at, limit, numbers};

const WORDS: usize = 1024;
/// Numbers from here on are not registered; the floor keeps ours far below.
pub const LIMIT: usize = WORDS * 64;
const HIGHEST_FLOOR: u64 = 4096;
/// The limit is read again after as many uses of the floor.
const REREAD: u32 = 32;

static FLOOR: AtomicI32 = AtomicI32::new(-1);
/// The soft limit, when it was last read.
static LIMITED: AtomicU64 = AtomicU64::new(0);
static USES: AtomicU32 = AtomicU32::new(0);
/// With as many numbers behind the one just given it need not be tried out whether there are some.
const PLENTY: usize = 256;

static INTERNAL: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    /// What this thread watches, and owns. Without a destructor, for which libc would allocate: threads of the
    /// application come by here, too.
    static WATCHED: RefCell<ManuallyDrop<BTreeSet<RawFd>>> =
        const { RefCell::new(ManuallyDrop::new(BTreeSet::new())) };
}

/// Whether `fd` is one of the agent's own. Async-signal-safe.
#[inline]
pub fn is_internal(fd: RawFd) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// Moves a descriptor above the floor, closes the original and registers the copy. When there is
/// no room above the floor, the original is registered where it is.
///
/// Also for front ends whose hooks see the runtime create descriptors while
/// [`in_agent`](crate::in_agent) is true. Balance with [`release`].
pub fn adopt(fd: OwnedFd) -> OwnedFd {
    let fd = raise(fd);
    set(fd.as_raw_fd(), true);
    fd
}

/// Registers a number as it is.
pub fn claim(fd: RawFd) {
    set(fd, true);
}

/// Takes a number out of the registry: its descriptor is about to be closed or to become the
/// application's. Async-signal-safe.
pub fn release(fd: RawFd) {
    set(fd, false);
}

/// What tells a file of ours from another one that has come under its number: a program can close our descriptors where
/// no hook sees it. The kernel keeps the signal of `F_SETSIG` with the file; nobody gets it, for the file has no owner.
#[derive(Clone, Copy, Debug)]
pub struct Mark(c_int);

impl Mark {
    /// Of what OPEN and FIN are sent by.
    pub const OUTLET: Mark = Mark(60);
    /// Of a mailbox.
    pub const MAILBOX: Mark = Mark(61);
    /// Of what wakes a sleeping thread of the application.
    pub const ALARM: Mark = Mark(62);
    /// Of the timer that wakes the agent thread for what is not urgent.
    pub const SOON: Mark = Mark(63);
    /// Of what wakes the agent thread.
    pub const WAKE: Mark = Mark(64);

    /// Marks the file under `fd`.
    pub fn set(self, fd: RawFd) {
        set_signal(fd, self.0);
    }

    /// Whether the file under `fd` has this mark. Leaves errno alone. Async-signal-safe.
    pub fn is_on(self, fd: RawFd) -> bool {
        signal_of(fd) == Ok(self.0)
    }
}

/// The lowest number our descriptors use: out of the way, with a quarter of the soft limit left
/// for them. The limit is read again now and then, since the application may change it.
pub fn floor() -> RawFd {
    if !USES.fetch_add(1, Ordering::Relaxed).is_multiple_of(REREAD) {
        let known = FLOOR.load(Ordering::Relaxed);
        if known >= 0 {
            return known;
        }
    }
    read_floor()
}

fn read_floor() -> RawFd {
    let soft = soft_limit();
    let floor = floor_for(soft);
    LIMITED.store(soft, Ordering::Relaxed);
    FLOOR.store(floor, Ordering::Relaxed);
    floor
}

fn floor_for(soft: u64) -> RawFd {
    let floor = (soft - soft / 4).min(HIGHEST_FLOOR);
    RawFd::try_from(floor).unwrap_or(HIGHEST_FLOOR as RawFd)
}

/// The soft limit on open files.
pub fn soft_limit() -> u64 {
    limit::soft()
}

/// How many descriptors fit between the floor and the soft limit.
pub fn room() -> usize {
    room_above(soft_limit(), floor_for(soft_limit()))
}

fn room_above(soft: u64, floor: RawFd) -> usize {
    let floor = u64::try_from(floor).unwrap_or(0);
    usize::try_from(soft.saturating_sub(floor)).unwrap_or(usize::MAX)
}

/// Whether `count` more descriptors could be had right now, after `fd`, which was the last one. Tried
/// out with copies of it if the end is near.
pub fn are_left(fd: impl AsFd, count: usize) -> bool {
    let fd = fd.as_fd().as_raw_fd();
    let floor = floor();
    let room = room_above(LIMITED.load(Ordering::Relaxed), floor);
    // It has the lowest free number above the floor; the application's are below, or few.
    let used = usize::try_from(fd.saturating_sub(floor)).unwrap_or(usize::MAX);
    if fd >= floor && room.saturating_sub(used) > count + PLENTY {
        return true;
    }
    numbers::make(|| {
        let copies: Vec<_> = (0..count)
            .map_while(|_| copy_above(fd, floor).or_else(|| copy_above(fd, 0)))
            .collect();
        copies.len() == count
    })
}

/// A copy of `fd` above the floor, or `fd` itself when there is no room.
fn raise(fd: OwnedFd) -> OwnedFd {
    let floor = floor();
    if fd.as_raw_fd() >= floor {
        return fd;
    }
    copy_above(fd.as_raw_fd(), floor)
        .or_else(|| {
            // The limit may be lower than it was.
            let now = read_floor();
            (now != floor).then(|| copy_above(fd.as_raw_fd(), now))?
        })
        .unwrap_or(fd)
}

fn copy_above(fd: RawFd, floor: RawFd) -> Option<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(at(fd), floor).ok()
}

/// A socket that this thread owns and waits for.
pub fn watched(fd: RawFd) {
    WATCHED.with_borrow_mut(|all| all.insert(fd));
}

/// Calls `f` with all of them.
pub fn for_each_watched(f: impl FnMut(RawFd)) {
    // Borrowed for single calls elsewhere; none of them is where we come from.
    if let Ok(Ok(all)) = WATCHED.try_with(|all| all.try_borrow().map(|all| all.clone())) {
        all.iter().copied().for_each(f);
    }
}

pub(crate) fn unwatched(fd: RawFd) {
    // Not there any more while the thread ends.
    let _ = WATCHED.try_with(|all| all.borrow_mut().remove(&fd));
}

/// Closes every registered descriptor by the bare system call, for a forked child: it shares them
/// with the parent's agent, which goes on. Async-signal-safe.
pub fn close_all_in_child() {
    for (index, word) in INTERNAL.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = index * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // SAFETY: a bare close of a number that only the agent used; the agent's thread, which
            // owned it, does not exist in this process.
            unsafe { rustix::io::close(fd as RawFd) };
        }
    }
}

fn set(fd: RawFd, on: bool) {
    if let Some((word, bit)) = place(fd) {
        if on {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

#[inline]
fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let n = usize::try_from(fd).ok().filter(|n| *n < LIMIT)?;
    Some((INTERNAL.get(n / 64)?, 1 << (n % 64)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_cannot_be_registered_are_nobodys() {
        for fd in [-1, LIMIT as RawFd, RawFd::MAX] {
            set(fd, true);
            assert!(!is_internal(fd));
        }
    }
}
