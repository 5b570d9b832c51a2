//! The agent's turn on the processor.
//!
//! A thread that the application runs with a real-time policy, and that asks again and again for what is not there,
//! leaves its processor to nobody. If the agent is bound to the same one it never runs, and what the thread asks for
//! never comes. So the agent's thread has a policy of its own ([`take_own`]); and where that may not be, the thread naps a
//! little in such a call while a flow is without a transport ([`give_way`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How long the agent may have done nothing before a thread gives way, in nanoseconds, and for how long.
const STARVED: u64 = 1_000_000;
const NAP: Duration = Duration::from_micros(100);

/// A flow may be without a transport.
static WANTED: AtomicBool = AtomicBool::new(false);
/// Grows whenever the agent does something.
static BEATS: AtomicU64 = AtomicU64::new(0);
/// The last beat that a thread saw, and since when there has been no other one, or since when nobody has given way.
static SEEN: AtomicU64 = AtomicU64::new(0);
static SINCE: AtomicU64 = AtomicU64::new(0);

/// A flow has lost its transport: the agent is needed.
pub fn want() {
    WANTED.store(true, Ordering::SeqCst);
}

/// Whether [`give_way`] is worth calling.
#[inline]
pub fn is_wanted() -> bool {
    WANTED.load(Ordering::Relaxed)
}

/// For a call of the application that comes back with nothing, and at once: naps if the calling thread may be what keeps
/// the agent from running.
#[cold]
pub fn give_way() {
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

/// The agent is about to look at what the application has asked for.
pub(crate) fn begin() {
    BEATS.fetch_add(1, Ordering::Relaxed);
    WANTED.store(false, Ordering::SeqCst);
}

/// By the agent's thread, which begins with what the thread has that started it: all processors of the process, and with a
/// real-time policy a higher priority, or for want of the right to it the usual policy.
pub(crate) fn take_own() {
    slim_sys::use_all_processors();
    slim_sys::leave_real_time();
}
