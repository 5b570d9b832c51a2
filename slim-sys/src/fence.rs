//! `membarrier(2)`: a full fence in every thread of the process, made by one of them.

use crate::Errno;
use libc::c_int;
use std::sync::atomic::{AtomicBool, Ordering, fence as own_fence};
use std::time::Duration;

/// As in `linux/membarrier.h`.
const EXPEDITED: c_int = 1 << 3;
const REGISTER_EXPEDITED: c_int = 1 << 4;

/// The kernel has this call, and knows that we make it.
static REGISTERED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: c_int) -> Result<(), Errno> {
    // Miri knows no such call. With its emulation of store buffers switched off all threads see the same memory.
    if cfg!(miri) {
        return Ok(());
    }
    // SAFETY: no memory is passed.
    unsafe { call!(libc::SYS_membarrier, command, 0, 0) }.map(drop)
}

/// Tells the kernel that this process makes such fences. With its first flow, and before the agent's thread is there: that
/// is when a process most often has one thread only; with more it takes milliseconds.
pub fn register_fence() {
    REGISTERED.store(membarrier(REGISTER_EXPEDITED).is_ok(), Ordering::Relaxed);
}

/// Whether [`fence`] is to be had.
pub fn can_fence() -> bool {
    REGISTERED.load(Ordering::Relaxed)
}

/// Returns when every thread of the process has gone through a full memory fence.
pub fn fence() {
    // A forked child may have to say it again.
    let again = || {
        register_fence();
        membarrier(EXPEDITED)
    };
    if membarrier(EXPEDITED).or_else(|_| again()).is_err() {
        // Forbidden since (seccomp). No processor keeps a write to itself for so long.
        REGISTERED.store(false, Ordering::Relaxed);
        own_fence(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
    }
}
