//! Tells the agent's own code from the application's.

use crate::cancel;
use crate::copies::{How, joined};
use crate::lock::block_signals;
use std::cell::Cell;

thread_local! {
    /// Constant and without a destructor, so that reading it never allocates.
    static IN_AGENT: Cell<bool> = const { Cell::new(false) };
    static IS_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is running the agent's own code. A front end must let its socket calls through
/// untouched.
#[inline]
pub fn in_agent() -> bool {
    IN_AGENT.get()
}

/// Runs `f` as the agent's own code: [`in_agent`] is true meanwhile. Cancellation is off and signals are blocked. A signal
/// handler is the application's code, and one that left by `siglongjmp` would leave [`in_agent`] true for good.
pub fn as_agent<R>(f: impl FnOnce() -> R) -> R {
    match joined() {
        Some(other) => other.run(How::AsAgent, || as_agent_here(f)),
        None => as_agent_here(f),
    }
}

fn as_agent_here<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_AGENT.set(self.0);
        }
    }
    // Dropped last.
    let _signals = block_signals();
    let _restore = Restore(IN_AGENT.replace(true));
    cancel::uncancelled(f)
}

/// Whether the calling thread is the agent's. It blocks all signals for good.
#[inline]
pub fn is_agent_thread() -> bool {
    IS_THREAD.get()
}

/// Declares the calling thread to be the agent's.
pub fn be_agent_thread() {
    IS_THREAD.set(true);
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use libc::c_int;
    use std::sync::atomic::{AtomicU32, Ordering};

    static INSIDE: AtomicU32 = AtomicU32::new(0);
    static RUNS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn look(_: c_int) {
        INSIDE.fetch_add(u32::from(in_agent()), Ordering::Relaxed);
        RUNS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_signal_handler_runs_after_the_agents_code() {
        let handler: extern "C" fn(c_int) = look;
        // SAFETY: the handler is async-signal-safe.
        unsafe { libc::signal(libc::SIGUSR1, handler as usize) };
        as_agent(|| {
            // SAFETY: no memory is passed.
            as_agent(|| unsafe { libc::raise(libc::SIGUSR1) });
            assert!(in_agent());
            assert_eq!(RUNS.load(Ordering::Relaxed), 0, "the signal is pending");
        });
        assert!(!in_agent());
        let counted = (RUNS.load(Ordering::Relaxed), INSIDE.load(Ordering::Relaxed));
        assert_eq!(counted, (1, 0));
    }
}
