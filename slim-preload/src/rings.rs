//! io_uring: what a program does through it passes no hook.
//!
//! Programs (libuv) register descriptors with epoll instances that way, which [`crate::epoll`] finds out from the kernel.
//! A flow whose number is registered with a ring is used through it, and becomes plain TCP.

use libc::{c_int, c_long};
use slim_sys::numbers::{apart, take_and_wait};
use std::sync::atomic::{AtomicBool, Ordering};

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
    if requests > 0 {
        take_and_wait(real)
    } else {
        real()
    }
}

/// Puts something else under a number.
pub fn swapping<R>(swap: impl FnOnce() -> R) -> R {
    if any() { apart(swap) } else { swap() }
}
