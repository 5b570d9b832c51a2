//! Which code is ours.

use crate::cancel;
use std::cell::Cell;

thread_local! {
    /// Constant and without destructor, so that reading it never allocates.
    static IN_AGENT: Cell<bool> = const { Cell::new(false) };
    static IS_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is running the agent's own code, whose socket calls a front end must let through
/// untouched.
#[inline]
pub fn in_agent() -> bool {
    IN_AGENT.get()
}

/// Runs `f` as the agent's own code: [`in_agent`] is true meanwhile, and the thread is not cancelled.
pub fn as_agent<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_AGENT.set(self.0);
        }
    }
    let _restore = Restore(IN_AGENT.replace(true));
    cancel::uncancelled(f)
}

/// Whether the calling thread is the agent's. It blocks all signals for good.
#[inline]
pub fn is_agent_thread() -> bool {
    IS_THREAD.get()
}

/// The calling thread is the agent's.
pub fn be_agent_thread() {
    IS_THREAD.set(true);
}
