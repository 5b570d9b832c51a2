//! One thread waits until another has done something.
//!
//! The standard library's channels give each thread that waits something that is taken down when the thread ends, for
//! which libc allocates: not to be done in a signal's handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PENDING: u32 = 0;
const TOLD: u32 = 1;
const DROPPED: u32 = 2;

/// For the thread that does it.
pub(crate) struct Done(Arc<AtomicU32>);

/// For the thread that waits.
pub(crate) struct Waiter(Arc<AtomicU32>);

/// Both ends.
pub(crate) fn done() -> (Done, Waiter) {
    let state = Arc::new(AtomicU32::new(PENDING));
    (Done(state.clone()), Waiter(state))
}

impl Done {
    /// It is done.
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
    /// It never will be.
    fn drop(&mut self) {
        self.set(DROPPED);
    }
}

impl Waiter {
    /// Waits at most `limit`: whether it is done.
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
    fn the_end_of_a_wait_says_whether_it_is_done() {
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
