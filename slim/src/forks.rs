//! Forks of the program. A forked child has only the thread that forked, so it must not inherit a lock that another thread of its parent
//! held: it could never start an agent. So a fork waits while another thread starts or ends an agent, or makes a descriptor. That takes
//! about a millisecond.

use std::sync::atomic::{AtomicBool, Ordering};

use slim_sys::lock::Lock;
use slim_sys::numbers;

static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Held by a thread that forks, and by one that starts or ends an agent thread: the runtime and the agent take locks meanwhile.
static CHANGES: Lock<()> = Lock::new(());

extern "C" fn prepare() {
    CHANGES.lock();
    numbers::before_fork();
}

extern "C" fn parent() {
    numbers::after_fork(false);
    CHANGES.unlock();
}

extern "C" fn child() {
    numbers::after_fork(true);
    CHANGES.unlock();
}

/// Registers the handlers with libc, once for a process and its children.
pub(crate) fn register() {
    if !REGISTERED.swap(true, Ordering::AcqRel) {
        // SAFETY: the handlers only use atomics and futexes, and libc forgets them if this library is unloaded.
        // If libc has no memory for them, forks do not wait.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    }
}

/// Runs `f`, which starts or ends an agent thread, while no thread forks. Signals are blocked: a handler that forks would wait for itself.
pub(crate) fn keep_out<R>(f: impl FnOnce() -> R) -> R {
    CHANGES.with(|()| f())
}
