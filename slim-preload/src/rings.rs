//! io_uring: requests that a program makes through a ring pass no hook.
//!
//! Programs (libuv) register descriptors with epoll instances that way; [`crate::epoll`] finds this out from the kernel.
//! A flow whose number is registered with a ring becomes plain TCP, because the program will use it through the ring.

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

/// The program submits requests to a ring. Never at the same time as a swap: a request that changes an epoll registration would
/// then find none.
pub fn enter(requests: c_int, real: impl FnOnce() -> c_long) -> c_long {
    if requests > 0 {
        take_and_wait(real)
    } else {
        real()
    }
}

/// Runs a swap, so that no requests are submitted to a ring meanwhile.
pub fn swapping<R>(swap: impl FnOnce() -> R) -> R {
    if any() { apart(swap) } else { swap() }
}
