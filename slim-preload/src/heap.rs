//! The library's own heap: all memory of its Rust code comes from here, none from the program's `malloc`.
//!
//! A signal handler may call a hooked function after it has interrupted `malloc`, whose lock its thread then holds. So this
//! library never calls `malloc`. Small requests are served by dlmalloc's algorithm from segments that we map, under a lock
//! that is held with signals blocked. Large requests are mapped one by one, and go back to the system at once.
//!
//! # When memory runs out
//!
//! A request whose caller can handle a failure ([`slim_core::memory`]) is refused. For any other request Rust would abort
//! the process. These requests are few and small: they are served from a [reserve](prepare), and the agent is told, which
//! then makes every connection plain TCP.

use crate::sys;
use dlmalloc::{Allocator, Dlmalloc};
use slim_sys::lock::{Lock, block_signals};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ops::RangeInclusive;
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Requests of at least this many bytes have a mapping of their own.
const LARGE: usize = 16 << 10;
/// Small requests are served from segments of about this size. An empty segment goes back to the system.
const SEGMENT: usize = 64 << 10;
/// Empty segments are looked for after this many frees of more than a few bytes.
const LOOK: usize = 32;
/// Enough to end the session of some ten thousand connections.
const RESERVE: usize = 1 << 20;
/// How long to wait for the agent to free memory, before trying again.
const FREEING: Duration = Duration::from_millis(1);
const PAGE: usize = 4096;

struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

static SMALL: Lock<Dlmalloc<Segments>> = Lock::new(const { new(SEGMENT) });
/// Requests of the sizes `BRIEF_SIZES` have segments of their own. Objects that are allocated while a connection is made, and freed some
/// hundred milliseconds later (an OPEN, a candidate, a command, a datagram), have these sizes; hardly any long-lived object does. So
/// these segments become empty and go back to the system. Among the flows such objects would leave holes.
static BRIEF: Lock<Dlmalloc<Segments>> = Lock::new(const { new(BRIEF_SEGMENT) });
/// Small, because one segment is always kept.
const BRIEF_SEGMENT: usize = 32 << 10;
const BRIEF_SIZES: RangeInclusive<usize> = 48..=184;

const fn new(segment: usize) -> Dlmalloc<Segments> {
    let mut heap = Dlmalloc::new_with_allocator(Segments {
        urgent: Cell::new(false),
    });
    assert!(heap.set_granularity(segment));
    heap.set_max_release_check_rate(LOOK);
    heap
}

thread_local! {
    /// This thread is forking, and holds the locks.
    static FORKING: Cell<bool> = const { Cell::new(false) };
}

/// Address of the first byte that is left of the reserve.
static RESERVED: AtomicUsize = AtomicUsize::new(0);
/// Address of the end of the reserve.
static RESERVE_END: AtomicUsize = AtomicUsize::new(0);

/// Maps the reserve, unless a whole one is there. False when there is no memory for it.
pub fn prepare() -> bool {
    let begin = RESERVED.load(Ordering::Relaxed);
    if RESERVE_END.load(Ordering::Relaxed) - begin == RESERVE {
        return true;
    }
    let at = sys::map(RESERVE);
    if !at.is_null() {
        RESERVED.store(at.addr(), Ordering::Relaxed);
        RESERVE_END.store(at.expose_provenance() + RESERVE, Ordering::Relaxed);
    }
    !at.is_null()
}

fn from_reserve(len: usize) -> *mut u8 {
    let end = RESERVE_END.load(Ordering::Relaxed);
    let take = |at| (end - at >= len).then_some(at + len);
    match RESERVED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
        Ok(at) => ptr::with_exposed_provenance_mut(at),
        Err(_) => null_mut(),
    }
}

fn map(len: usize, urgent: bool) -> *mut u8 {
    let at = sys::map(len);
    if at.is_null() && urgent {
        return from_reserve(len);
    }
    at
}

const fn whole_pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= PAGE
}

fn is_brief(size: usize) -> bool {
    BRIEF_SIZES.contains(&size)
}

/// Runs `f` on the heap of small requests of this size.
fn with_small<R>(size: usize, f: impl FnOnce(&mut Dlmalloc<Segments>) -> R) -> R {
    let heap = if is_brief(size) { &BRIEF } else { &SMALL };
    let _signals = block_signals();
    if FORKING.get() {
        // SAFETY: `before_fork` has locked it for this thread.
        return f(unsafe { heap.get() });
    }
    if !heap.try_lock() {
        sys::keep_errno(|| heap.lock());
    }
    // SAFETY: locked above, unlocked after `f` has given its reference back.
    let r = f(unsafe { heap.get() });
    heap.unlock();
    r
}

fn allocate(layout: Layout, urgent: bool) -> *mut u8 {
    if is_large(layout) {
        return map(whole_pages(layout.size()), urgent);
    }
    with_small(layout.size(), |small| {
        small.allocator().urgent.set(urgent);
        // SAFETY: the size and alignment of a layout are valid.
        unsafe { small.malloc(layout.size(), layout.align()) }
    })
}

/// Out of memory. Gives null only if the caller can handle that.
#[cold]
fn refused(layout: Layout) -> *mut u8 {
    if slim_core::memory::may_fail(layout.size()) {
        return null_mut();
    }
    slim_agent::memory_is_out();
    loop {
        let at = allocate(layout, true);
        if !at.is_null() {
            return at;
        }
        // The agent is about to free memory. Giving up here would end the program.
        sys::nap(FREEING);
    }
}

// SAFETY: `allocate` gives memory of that size and alignment (whole pages, or dlmalloc's guarantee) that nothing else uses until
// `dealloc`. `dealloc` gives it back to the allocator that it came from: the layout alone decides which one. Nothing here unwinds.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let at = allocate(layout, false);
        if at.is_null() { refused(layout) } else { at }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        let at = unsafe { self.alloc(layout) };
        if !at.is_null() && !is_large(layout) {
            // SAFETY: just allocated. (Mapped memory is zero. So is the reserve, of which no byte is given out twice.)
            unsafe { at.write_bytes(0, layout.size()) };
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if is_large(layout) {
            // SAFETY: mapped for this block alone, which is not used any more.
            unsafe { sys::unmap(at, whole_pages(layout.size())) };
        } else {
            // SAFETY: the block comes from this heap, with this layout.
            with_small(layout.size(), |small| unsafe {
                small.free(at, layout.size(), layout.align());
            });
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's contract.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let moved = match (is_large(layout), is_large(new)) {
            // SAFETY: mapped for this block alone, which is the caller's at its new place only.
            (true, true) => unsafe {
                sys::remap(at, whole_pages(layout.size()), whole_pages(size))
            },
            (false, false) if is_brief(layout.size()) == is_brief(size) => {
                // SAFETY: the block comes from this heap, with this layout.
                with_small(size, |small| unsafe {
                    small.allocator().urgent.set(false);
                    small.realloc(at, layout.size(), layout.align(), size)
                })
            }
            _ => null_mut(),
        };
        if !moved.is_null() {
            return moved;
        }
        // SAFETY: the caller's contract; both blocks have room for what is copied.
        unsafe {
            let moved = self.alloc(new);
            if !moved.is_null() {
                ptr::copy_nonoverlapping(at, moved, layout.size().min(size));
                self.dealloc(at, layout);
            }
            moved
        }
    }
}

/// Maps segments for small requests. An unused page keeps two segments apart, so that each can go back to the system
/// alone.
struct Segments {
    /// The request that is being served may use the reserve.
    urgent: Cell<bool>,
}

// SAFETY: a mapping is private, has at least the stated size, and is unmapped only when it is given back.
unsafe impl Allocator for Segments {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let size = whole_pages(size);
        (map(size + PAGE, self.urgent.get()), size, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        null_mut()
    }

    fn free_part(&self, at: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: the end of a segment, of which the allocator needs no more.
        unsafe { sys::unmap(at.wrapping_add(new + PAGE), old - new) }
    }

    fn free(&self, at: *mut u8, size: usize) -> bool {
        // SAFETY: a whole segment, which the allocator needs no more.
        unsafe { sys::unmap(at, size + PAGE) }
    }

    fn can_release_part(&self, _: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        false
    }

    fn page_size(&self) -> usize {
        PAGE
    }
}

/// Before a fork: takes the locks, so that the child inherits a consistent heap and can use it at once.
pub fn before_fork() {
    SMALL.lock();
    BRIEF.lock();
    FORKING.set(true);
}

/// After a fork, on either side.
pub fn after_fork() {
    FORKING.set(false);
    BRIEF.unlock();
    SMALL.unlock();
}
