//! A one-shot completion: one thread waits until another has done something.
//!
//! The standard library's channels are not used: each waiting thread gets a thread-local value with a destructor, for
//! which libc allocates. That must not happen in a signal handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PENDING: u32 = 0;
const TOLD: u32 = 1;
const DROPPED: u32 = 2;

/// The end of the thread that does the work.
pub(crate) struct Done(Arc<AtomicU32>);

/// The end of the thread that waits.
pub(crate) struct Waiter(Arc<AtomicU32>);

/// Creates both ends.
pub(crate) fn done() -> (Done, Waiter) {
    let state = Arc::new(AtomicU32::new(PENDING));
    (Done(state.clone()), Waiter(state))
}

impl Done {
    /// Reports that the work is done.
    pub(crate) fn tell(&self) {
        self.set(TOLD);
    }

    fn set(&self, to: u32) {
        let set = self
            .0
            .compare_exchange(PENDING, to, Ordering::AcqRel, Ordering::Relaxed);
        if set.is_ok() {
            slim_sys::futex_wake_all(&self.0);
        }
    }
}

impl Drop for Done {
    /// Reports that the work will never be done.
    fn drop(&mut self) {
        self.set(DROPPED);
    }
}

impl Waiter {
    /// Whether the wait would return at once.
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire) != PENDING
    }

    /// Waits at most `limit`; returns whether the work is done.
    pub(crate) fn wait(self, limit: Duration) -> bool {
        let begun = Instant::now();
        loop {
            let state = self.0.load(Ordering::Acquire);
            let left = limit.saturating_sub(begun.elapsed());
            if state != PENDING || left.is_zero() {
                return state == TOLD;
            }
            let _ = slim_sys::futex_wait(&self.0, PENDING, Some(left));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_returns_whether_the_work_is_done() {
        let long = Duration::from_secs(60);
        let (done, waiter) = done();
        let waiting = thread::spawn(move || waiter.wait(long));
        done.tell();
        assert!(waiting.join().unwrap());
        let (done, waiter) = super::done();
        let waiting = thread::spawn(move || waiter.wait(long));
        drop(done);
        assert!(!waiting.join().unwrap());
        let (_done, waiter) = super::done();
        assert!(!waiter.wait(Duration::from_millis(1)));
    }
}
