//! Registry of the agent's own descriptors, and how they are kept out of the application's way.
//!
//! Programs rely on descriptor numbers: shells on 0 to 2, others on getting the lowest free one,
//! `select` on numbers below 1024. So every descriptor of ours is moved above a floor, and a
//! registry tells the front end which numbers it must not let the application close.
//!
//! The registry is a static bitmap. A look-up is one load, and works in signal handlers and in
//! forked children.

use std::cell::RefCell;
use std::collections::BTreeSet;

use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use libc::c_int;

use crate::copies::joined;
use crate::sigio::{set_signal, signal_of};
use crate::{at, limit, numbers};

const WORDS: usize = 1024;
/// Numbers from here on cannot be registered. The floor is far below, and our descriptors get the next free numbers above it.
pub const LIMIT: usize = WORDS * 64;
const HIGHEST_FLOOR: u64 = 4096;
/// The limit is read again each time that the floor has been used this often.
const REREAD: u32 = 32;

static FLOOR: AtomicI32 = AtomicI32::new(-1);
/// The soft limit, when it was last read.
static LIMITED: AtomicU64 = AtomicU64::new(0);
static USES: AtomicU32 = AtomicU32::new(0);
/// If at least this many numbers are left above the last one, [`are_left`] need not test.
const PLENTY: usize = 256;

static INTERNAL: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

thread_local! {
    /// Sockets that this thread owns and waits for. `ManuallyDrop`, because libc allocates to register a destructor, and
    /// threads of the application use this variable, too.
    static WATCHED: RefCell<ManuallyDrop<BTreeSet<RawFd>>> =
        const { RefCell::new(ManuallyDrop::new(BTreeSet::new())) };
}

/// Whether `fd` is one of the agent's own. Async-signal-safe.
#[inline]
pub fn is_internal(fd: RawFd) -> bool {
    place(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
        || joined().is_some_and(|other| other.is_registered(fd))
}

/// Moves a descriptor above the floor, closes the original and registers the copy. When there is
/// no room above the floor, the original is registered where it is.
///
/// Front ends call this, too, when their hooks see the runtime create a descriptor while
/// [`in_agent`](crate::in_agent) is true. Undo with [`release`].
pub fn adopt(fd: OwnedFd) -> OwnedFd {
    let fd = raise(fd);
    set(fd.as_raw_fd(), true);
    fd
}

/// Registers a number without moving the descriptor.
pub fn claim(fd: RawFd) {
    set(fd, true);
}

/// Removes a number from the registry, before its descriptor is closed or given to the
/// application. Async-signal-safe.
pub fn release(fd: RawFd) {
    set(fd, false);
}

/// Marks a file of ours. A program can close our descriptors without a hook, and open another file under the same number; the
/// mark tells the two apart. It is stored as the signal of `F_SETSIG`, which the kernel keeps with the file. The signal is
/// never sent, because the file has no owner (`F_SETOWN`).
#[derive(Clone, Copy, Debug)]
pub struct Mark(c_int);

impl Mark {
    /// The socket that tells a program of an escalation.
    pub const NEWS: Mark = Mark(59);
    /// The socket that sends OPEN and FIN.
    pub const OUTLET: Mark = Mark(60);
    /// A mailbox.
    pub const MAILBOX: Mark = Mark(61);
    /// The descriptor that wakes a sleeping thread of the application.
    pub const ALARM: Mark = Mark(62);
    /// The timer that wakes the agent thread for work that is not urgent.
    pub const SOON: Mark = Mark(63);
    /// The descriptor that wakes the agent thread.
    pub const WAKE: Mark = Mark(64);

    /// Marks the file under `fd`.
    pub fn set(self, fd: RawFd) {
        set_signal(fd, self.0);
    }

    /// Whether the file under `fd` has this mark. Preserves errno. Async-signal-safe.
    pub fn is_on(self, fd: RawFd) -> bool {
        signal_of(fd) == Ok(self.0)
    }
}

/// The lowest number for our descriptors: three quarters of the soft limit, but 4096 at most. The limit is read again now
/// and then, since the application may change it.
pub fn floor() -> RawFd {
    if !USES.fetch_add(1, Ordering::Relaxed).is_multiple_of(REREAD) {
        let known = FLOOR.load(Ordering::Relaxed);
        if known >= 0 {
            return known;
        }
    }
    read_floor()
}

/// The floor by the limit of this moment.
pub(crate) fn present_floor() -> RawFd {
    floor_for(soft_limit())
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

/// Whether `count` more descriptors can be made now. `fd` is the one made last. If few numbers are left, this is tested by
/// making `count` copies of `fd`.
pub fn are_left(fd: impl AsFd, count: usize) -> bool {
    let fd = fd.as_fd().as_raw_fd();
    let floor = floor();
    let room = room_above(LIMITED.load(Ordering::Relaxed), floor);
    // `fd` has the lowest free number above the floor. The application's descriptors are below the floor, or few.
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

/// Records a socket that this thread owns and waits for.
pub fn watched(fd: RawFd) {
    WATCHED.with_borrow_mut(|all| all.insert(fd));
}

/// Calls `f` with each socket recorded by [`watched`] in this thread.
pub fn for_each_watched(f: impl FnMut(RawFd)) {
    // The other borrows last for one call each, and none of those calls this function.
    let copy = |all: &RefCell<ManuallyDrop<BTreeSet<RawFd>>>| {
        let all = all.try_borrow().ok()?;
        Some(BTreeSet::clone(&all))
    };
    if let Ok(Some(all)) = WATCHED.try_with(copy) {
        all.iter().copied().for_each(f);
    }
}

/// Exchanges the sockets recorded by [`watched`] in this thread for others: another thread owned those until now, or will own these.
pub fn swap_watched(all: &mut BTreeSet<RawFd>) {
    WATCHED.with_borrow_mut(|watched| mem::swap(&mut **watched, all));
}

/// Forgets the sockets recorded in this thread, which is about to end: nothing else frees the memory of the record.
pub fn forget_watched() {
    drop(WATCHED.with_borrow_mut(|all| std::mem::take(&mut **all)));
}

/// The thread owns the socket no more, or does not wait for it any more.
pub fn unwatched(fd: RawFd) {
    // The variable may be gone while the thread ends.
    let _ = WATCHED.try_with(|all| all.borrow_mut().remove(&fd));
}

/// Closes every registered descriptor by the bare system call, in a forked child: the child has copies of the descriptors of
/// the parent's agent, which goes on using them. Async-signal-safe. If this copy has [joined](crate::copies) the preload library's, that
/// one has closed them at the fork.
pub fn close_all_in_child() {
    for (index, word) in INTERNAL.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = index * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // SAFETY: only the agent used this number, and the agent's thread, which owned it, does not exist in this
            // process.
            unsafe { rustix::io::close(fd as RawFd) };
        }
    }
}

fn set(fd: RawFd, on: bool) {
    if let Some(other) = joined() {
        return other.register(fd, on);
    }
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
    fn numbers_out_of_range_are_never_internal() {
        for fd in [-1, LIMIT as RawFd, RawFd::MAX] {
            set(fd, true);
            assert!(!is_internal(fd));
        }
    }
}
