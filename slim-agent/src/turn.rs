//! Processor time for the agent thread.
//!
//! An application thread with a real-time policy that polls in a loop never gives up its processor. If the agent thread
//! is bound to the same processor, it never runs, and what the application polls for never comes. So the agent thread
//! has its own scheduling policy ([`take_own`]). Where that is not permitted, the application thread sleeps briefly in
//! such a call while a flow is without a transport ([`yield_to_agent`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use slim_core::config::Priority;

/// A thread gives way if the agent has not run for `STARVED` nanoseconds, and then sleeps for `NAP`.
const STARVED: u64 = 1_000_000;
const NAP: Duration = Duration::from_micros(100);

/// By how much [`Priority::Raised`] lowers the nice value. With 15, a thread that wakes beside threads with the usual value runs at once in
/// nearly all cases. Threads of the kernel that have -20 still come first.
const RAISED_BY: i32 = 15;

/// A flow may be without a transport.
static WANTED: AtomicBool = AtomicBool::new(false);
/// Incremented in every turn of the agent.
static BEATS: AtomicU64 = AtomicU64::new(0);
/// `SEEN` is the last value of [`BEATS`] that a thread saw. `SINCE` is when that value was first seen, or when a thread
/// last gave way.
static SEEN: AtomicU64 = AtomicU64::new(0);
static SINCE: AtomicU64 = AtomicU64::new(0);

/// A flow has lost its transport: the agent is needed.
pub fn request() {
    WANTED.store(true, Ordering::SeqCst);
}

/// Whether [`yield_to_agent`] is worth calling.
#[inline]
pub fn is_requested() -> bool {
    WANTED.load(Ordering::Relaxed)
}

/// For an application call that returns at once without data: sleeps briefly if the calling thread may be keeping the
/// agent from running.
#[cold]
pub fn yield_to_agent() {
    let (beat, now) = (BEATS.load(Ordering::Relaxed), slim_sys::now());
    if SEEN.swap(beat, Ordering::Relaxed) != beat {
        SINCE.store(now, Ordering::Relaxed);
    } else if now.saturating_sub(SINCE.load(Ordering::Relaxed)) > STARVED {
        if slim_sys::is_real_time() {
            slim_sys::nap(NAP);
        }
        SINCE.store(slim_sys::now(), Ordering::Relaxed);
    }
}

/// A number that changes when the agent runs.
pub(crate) fn beats() -> u64 {
    BEATS.load(Ordering::Relaxed)
}

/// The agent is about to take the application's commands.
pub(crate) fn begin() {
    BEATS.fetch_add(1, Ordering::Relaxed);
    WANTED.store(false, Ordering::SeqCst);
}

/// Called by the agent thread, which inherits processors and policy from the thread that started it. Allows it all
/// processors of the process. Under a real-time policy, raises its priority or, without the privilege for that, sets
/// the normal policy. Otherwise sets the priority of the setting. The error is the kernel's if it refuses a real-time policy; the nice value
/// is lowered then.
pub(crate) fn take_own(priority: Priority) -> Result<(), i32> {
    slim_sys::use_all_processors();
    slim_sys::leave_real_time();
    if slim_sys::is_real_time() || priority == Priority::Normal {
        return Ok(());
    }
    let got = match priority {
        Priority::RealTime => slim_sys::be_real_time(),
        _ => Ok(()),
    };
    if priority == Priority::Raised || got.is_err() {
        // Most processes may not.
        let _ = slim_sys::lower_nice(RAISED_BY);
    }
    got
}
