//! `membarrier(2)`: one thread makes a full memory fence in every thread of the process.

use crate::Errno;
use libc::c_int;
use std::sync::atomic::{AtomicBool, Ordering, fence as own_fence};
use std::time::Duration;

/// As in `linux/membarrier.h`.
const EXPEDITED: c_int = 1 << 3;
const REGISTER_EXPEDITED: c_int = 1 << 4;

/// The kernel has the call, and this process is registered for it.
static REGISTERED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: c_int) -> Result<(), Errno> {
    // Miri lacks this call. Tests run with Miri's emulation of store buffers off, so all threads see the same memory.
    if cfg!(miri) {
        return Ok(());
    }
    // SAFETY: no memory is passed.
    unsafe { call!(libc::SYS_membarrier, command, 0, 0) }.map(drop)
}

/// Registers this process for such fences. Call it with the first flow, before the agent's thread is started: most processes
/// then have one thread only. With more threads registration takes milliseconds.
pub fn register_fence() {
    REGISTERED.store(membarrier(REGISTER_EXPEDITED).is_ok(), Ordering::Relaxed);
}

/// Whether [`fence`] is available.
pub fn can_fence() -> bool {
    REGISTERED.load(Ordering::Relaxed)
}

/// Returns when every thread of the process has passed a full memory fence.
pub fn fence() {
    // A forked child may have to register again.
    let again = || {
        register_fence();
        membarrier(EXPEDITED)
    };
    if membarrier(EXPEDITED).or_else(|_| again()).is_err() {
        // The call has been forbidden since (seccomp). No processor keeps a write in its store buffer for 1 ms.
        REGISTERED.store(false, Ordering::Relaxed);
        own_fence(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
    }
}
