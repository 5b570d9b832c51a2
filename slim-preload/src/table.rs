//! What each descriptor number means to SLIM: one atomic word for each number.
//!
//! The word is 0 for a descriptor that SLIM does not manage; most calls load nothing else. Flows and epoll
//! instances live in memory that is never freed ([`crate::flow`] says why), so a pointer read here can always
//! be dereferenced. The caller then reads the word again, to check that the number still means the same.

mod inside;

use crate::flow::Flow;
use crate::marks;
use crate::mirror::Instance;
use libc::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Numbers from here on are never managed. Linux's default hard limit (fs.nr_open) has the same value.
const SIZE: usize = 1 << 20;
const TAG: usize = 0b11;
const LISTENER: usize = 1;
const EPOLL: usize = 2;
const INHERITED: usize = 3;
/// A listener that belonged to the parent process, which has its control socket.
const INHERITED_LISTENER: usize = LISTENER | 1 << 2;
/// Whether there may be inherited listeners.
static INHERITED_LISTENERS: AtomicBool = AtomicBool::new(false);

static TABLE: [AtomicUsize; SIZE] = [const { AtomicUsize::new(0) }; SIZE];
/// One more than the highest number ever set, so that loops over the table stay short.
static HIGH: AtomicUsize = AtomicUsize::new(0);

/// What a number means.
pub enum Entry {
    /// A descriptor that SLIM does not manage.
    None,
    /// A flow.
    Flow(&'static Flow),
    /// A listening TCP socket.
    Listener,
    /// An epoll instance.
    Epoll(&'static Instance),
    /// A connection that the parent process has a flow for.
    Inherited,
}

#[inline]
fn word(fd: c_int) -> usize {
    // A negative number becomes a huge index, and is out of range like any other.
    TABLE
        .get(fd as u32 as usize)
        .map_or(0, |w| w.load(Ordering::Acquire))
}

/// The flow behind a number. Every hooked data call begins with this.
#[inline]
pub fn flow(fd: c_int) -> Option<&'static Flow> {
    let w = word(fd);
    if w & TAG != 0 {
        return tagged(fd, w);
    }
    // SAFETY: untagged words are only ever made from `&'static Flow` in `set_flow`.
    (w != 0).then(|| unsafe { &*(w as *const Flow) })
}

/// Whether a number that was this flow's still is.
#[inline]
pub fn is_still(fd: c_int, flow: &'static Flow) -> bool {
    debug_assert!((fd as u32 as usize) < SIZE);
    // The remainder saves a bounds check: it does not change a number within the table.
    TABLE[fd as u32 as usize % SIZE].load(Ordering::Acquire) == std::ptr::from_ref(flow) as usize
}

/// Whether a number is a flow's. Does nothing else.
#[inline]
pub fn is_flow(fd: c_int) -> bool {
    let w = word(fd);
    w != 0 && w & TAG == 0
}

/// Whether a number means anything to SLIM. Does nothing else.
#[inline]
pub fn is_known(fd: c_int) -> bool {
    word(fd) != 0
}

#[cold]
#[inline(never)]
fn tagged(fd: c_int, w: usize) -> Option<&'static Flow> {
    if w & TAG == INHERITED {
        // If the agent asks, it has just made a descriptor with this number: the connection was closed unseen.
        if !slim_sys::in_agent() {
            marks::tell_parent((w >> 2) as u32);
        }
        clear(fd);
    }
    None
}

/// Everything known about a number.
pub fn entry(fd: c_int) -> Entry {
    let w = word(fd);
    match w & TAG {
        _ if w == 0 => Entry::None,
        LISTENER => Entry::Listener,
        // SAFETY: words tagged EPOLL are only made from `&'static Instance` in `set_epoll`.
        EPOLL => Entry::Epoll(unsafe { &*((w & !TAG) as *const Instance) }),
        INHERITED => Entry::Inherited,
        // SAFETY: as in `flow`.
        _ => Entry::Flow(unsafe { &*(w as *const Flow) }),
    }
}

fn store(fd: c_int, w: usize) -> bool {
    match TABLE.get(fd as u32 as usize) {
        Some(slot) => {
            if w != 0 {
                HIGH.fetch_max(fd as usize + 1, Ordering::Relaxed);
            }
            slot.store(w, Ordering::SeqCst);
            true
        }
        None => false,
    }
}

/// Makes a number a flow's; false when it is beyond the table.
pub fn set_flow(fd: c_int, flow: &'static Flow) -> bool {
    store(fd, std::ptr::from_ref(flow) as usize)
}

/// Makes a number a listener's.
pub fn set_listener(fd: c_int) {
    store(fd, LISTENER);
}

/// Makes a number an epoll instance's.
pub fn set_epoll(fd: c_int, instance: &'static Instance) {
    store(fd, std::ptr::from_ref(instance) as usize | EPOLL);
}

/// Clears the entry of a number.
pub fn clear(fd: c_int) {
    store(fd, 0);
}

/// Clears the entry of a number, if it still is this flow's.
pub fn release(fd: c_int, flow: &Flow) {
    if let Some(slot) = TABLE.get(fd as u32 as usize) {
        let word = std::ptr::from_ref(flow) as usize;
        let _ = slot.compare_exchange(word, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// In a forked child: marks the entries of flows and listeners as the parent's.
pub fn inherit(slot_of: impl Fn(&'static Flow) -> u32) {
    for (fd, slot) in TABLE.iter().enumerate().take(HIGH.load(Ordering::Relaxed)) {
        let w = slot.load(Ordering::Relaxed);
        if w != 0 {
            match entry(fd as c_int) {
                // A number of SLIM's own: the child has closed it.
                Entry::Flow(_) if slim_sys::fds::is_internal(fd as c_int) => {
                    slot.store(0, Ordering::Relaxed);
                }
                Entry::Flow(f) => {
                    slot.store((slot_of(f) as usize) << 2 | INHERITED, Ordering::Relaxed)
                }
                Entry::Epoll(_) => slot.store(0, Ordering::Relaxed),
                Entry::Listener => {
                    slot.store(INHERITED_LISTENER, Ordering::Relaxed);
                    INHERITED_LISTENERS.store(true, Ordering::Relaxed);
                }
                _ => {}
            }
        }
    }
}

/// In a forked child: `to` is another number of the parent's connection `from`.
pub fn inherited_again(from: c_int, to: c_int) {
    store(to, word(from));
}

/// Whether [`is_inherited_listener`] can be true for any number.
#[inline]
pub fn any_inherited_listener() -> bool {
    INHERITED_LISTENERS.load(Ordering::Relaxed)
}

/// Whether a number is a listener that was the parent process's.
pub fn is_inherited_listener(fd: c_int) -> bool {
    word(fd) == INHERITED_LISTENER
}

/// Whether any number has ever had an entry.
pub fn any() -> bool {
    HIGH.load(Ordering::Relaxed) > 0
}

/// Calls `f` for every number that is a flow's.
pub fn for_each_flow(mut f: impl FnMut(c_int, &'static Flow)) {
    for_each(|fd, entry| {
        if let Entry::Flow(flow) = entry {
            f(fd, flow);
        }
    });
}

/// Calls `f` for every number that is a flow's or a listener's.
pub fn for_each_socket(mut f: impl FnMut(c_int)) {
    for_each(|fd, entry| {
        if matches!(entry, Entry::Flow(_) | Entry::Listener) {
            f(fd);
        }
    });
}

fn for_each(mut f: impl FnMut(c_int, Entry)) {
    for fd in 0..HIGH.load(Ordering::Relaxed) as c_int {
        f(fd, entry(fd));
    }
}
