//! The atomics of this crate, in one place so that loom can replace them in its tests.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// One side of an asymmetric pair of fences: orders what the compiler does, for whoever makes the other one
/// (`membarrier(2)`) makes this one full. loom has no such call: a full fence there.
#[inline(always)]
pub(crate) fn light_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}
