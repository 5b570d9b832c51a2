//! Calls that wait in the kernel, inside the gate of a flow, and may never return: a signal handler leaves them by a jump, or
//! their thread is cancelled or ends in a handler.
//!
//! The thread gives back the locks that such a call holds ([`crate::ops::left`]): before it jumps, or when it ends. When a thread
//! ends its stack frames are gone, so the record of a call lies in thread-local memory.

use super::Flow;
use std::cell::Cell;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

/// The most calls of one thread that wait at a time: one, and others in handlers that have interrupted it.
const DEEPEST: usize = 8;

/// A call that waits.
#[derive(Clone, Copy)]
pub struct Waiting {
    /// The flow whose gate the call is inside, counted.
    pub flow: &'static Flow,
    /// The call holds the sending half, and does not use it while it waits.
    pub has_half: bool,
    /// Address of the call's stack frame.
    pub frame: usize,
}

struct Waits {
    of: [Cell<Option<Waiting>>; DEEPEST],
    count: Cell<usize>,
    /// The destructor of `KEY` is armed for this thread.
    armed: Cell<bool>,
}

thread_local! {
    // No destructor: the record is used until the thread's last moment.
    static WAITS: Waits = const {
        Waits { of: [const { Cell::new(None) }; DEEPEST], count: Cell::new(0), armed: Cell::new(false) }
    };
}

/// The pthread key whose destructor runs when a thread ends, plus 1; 0 if there is none.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Called once, when the library is loaded. `at_end` runs when a thread ends.
pub fn register(at_end: extern "C" fn(*mut libc::c_void)) {
    let mut key = 0;
    // SAFETY: valid for a write; the function stays as long as the library, which is never unloaded.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(at_end)) } == 0 {
        KEY.store(key + 1, Ordering::Relaxed);
    }
}

/// The innermost waiting call of the thread.
pub fn waiting() -> Option<Waiting> {
    WAITS.with(|w| w.of.get(w.count.get().checked_sub(1)?)?.get())
}

/// Forgets the innermost waiting call: its frame is abandoned.
pub fn forget_waiting() {
    WAITS.with(|w| w.count.set(w.count.get().saturating_sub(1)));
}

impl Flow {
    /// Runs `wait`, a call inside the gate, counted, that may never return.
    pub fn wait_inside<R>(&'static self, has_half: bool, wait: impl FnOnce() -> R) -> R {
        let here = 0u8;
        let this = Waiting {
            flow: self,
            has_half,
            frame: ptr::from_ref(&here).addr(),
        };
        let depth = WAITS.with(|w| {
            let depth = w.count.get();
            if let Some(place) = w.of.get(depth) {
                place.set(Some(this));
                w.count.set(depth + 1);
            }
            if !w.armed.replace(true)
                && let Some(key) = KEY.load(Ordering::Relaxed).checked_sub(1)
            {
                let some = NonNull::<libc::c_void>::dangling();
                // SAFETY: the key is ours; the stored pointer is never dereferenced.
                unsafe { libc::pthread_setspecific(key, some.as_ptr()) };
            }
            depth
        });
        let r = wait();
        WAITS.with(|w| w.count.set(depth));
        r
    }
}
