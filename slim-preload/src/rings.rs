//! io_uring: what a program does through it passes no hook.
//!
//! Programs (libuv) register descriptors with epoll instances that way, which [`crate::epoll`] finds out from the kernel.
//! A flow whose number is registered with a ring is used through it, and becomes plain TCP.

use crate::ops::descriptors;
use crate::sys;
use crate::table::{self, Entry};
use libc::{c_int, c_long, c_uint};
use slim_sys::numbers::{apart, take};
use std::sync::atomic::{AtomicBool, Ordering};

/// Of linux/io_uring.h.
const REGISTER_FILES: c_uint = 2;
const REGISTER_FILES_UPDATE: c_uint = 6;
const REGISTER_FILES2: c_uint = 13;
const REGISTER_FILES_UPDATE2: c_uint = 14;

/// The process has, or had, a ring.
static USED: AtomicBool = AtomicBool::new(false);

/// A ring is about to be made.
pub fn set_up() {
    USED.store(true, Ordering::SeqCst);
}

/// Whether there may be rings.
pub fn any() -> bool {
    USED.load(Ordering::SeqCst)
}

/// The program hands requests to a ring: not while something else comes under a number, for a request about its
/// registration would then meet none.
pub fn enter(requests: c_int, real: impl FnOnce() -> c_long) -> c_long {
    if requests > 0 { take(real) } else { real() }
}

/// Puts something else under a number.
pub fn swapping<R>(swap: impl FnOnce() -> R) -> R {
    if any() { apart(swap) } else { swap() }
}

/// `io_uring_register`: the calls on these descriptors that are still to come, no hook will see.
pub fn register(what: c_uint, args: usize, count: usize) {
    if !table::any() {
        return;
    }
    let (list, count) = match what {
        REGISTER_FILES => (args, count),
        REGISTER_FILES_UPDATE => (word::<u64>(args, 8) as usize, count),
        REGISTER_FILES2 => (
            word::<u64>(args, 16) as usize,
            word::<u32>(args, 0) as usize,
        ),
        REGISTER_FILES_UPDATE2 => (
            word::<u64>(args, 8) as usize,
            word::<u32>(args, 24) as usize,
        ),
        _ => return,
    };
    // The kernel takes no more (IORING_MAX_FIXED_FILES).
    const MOST: usize = 1 << 20;
    for i in 0..count.min(MOST) {
        let Some(fd) = read::<c_int>(list.wrapping_add(i * size_of::<c_int>())) else {
            return;
        };
        if let Entry::Flow(flow) = table::entry(fd) {
            sys::keep_errno(|| descriptors::hand_over(flow, fd));
        }
    }
}

fn word<T: Copy + Default>(at: usize, offset: usize) -> T {
    read(at.wrapping_add(offset)).unwrap_or_default()
}

/// A plain number where the application says that one is.
fn read<T: Copy>(at: usize) -> Option<T> {
    let bytes = sys::memory(at as *const u8, size_of::<T>())?;
    // SAFETY: as many bytes as the type has; all of those used here are integers.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}
