//! The front end's allocator reports to the agent that memory has run out.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use slim_sys::fds::Mark;

static IS_OUT: AtomicBool = AtomicBool::new(false);
/// The descriptor that wakes the agent thread.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// Reports that the system gives the process no more memory. The memory that is left is enough only to end the session:
/// the agent does so at its next step, as it does after a panic. May be called from any place, the agent's own code
/// included; allocates nothing, takes no lock.
pub fn memory_is_out() {
    if !IS_OUT.swap(true, Ordering::SeqCst) {
        let wake = WAKE.load(Ordering::SeqCst);
        if Mark::WAKE.is_on(wake) {
            slim_sys::signal_eventfd(wake);
        }
    }
}

/// Whether that has been reported.
pub(crate) fn is_out() -> bool {
    IS_OUT.load(Ordering::Relaxed)
}

/// An agent starts; `wake` is the descriptor that wakes its thread.
pub(crate) fn begin(wake: RawFd) {
    WAKE.store(wake, Ordering::SeqCst);
    IS_OUT.store(false, Ordering::SeqCst);
}
