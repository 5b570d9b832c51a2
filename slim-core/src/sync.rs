//! The atomics of this crate, in one place so that loom can replace them in its tests.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The cheap side of an asymmetric pair of fences. It only restrains the compiler, because the other side
/// (`membarrier(2)`) executes a full fence in every thread. loom has no such call; under loom this is a full fence.
#[inline(always)]
pub(crate) fn light_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
}
