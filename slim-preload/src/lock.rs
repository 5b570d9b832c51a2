//! A lock without a guard.
//!
//! The send lock is held over the application's own (cancellable) system call. `pthread_cancel` unwinds
//! through our frames without running destructors, so there must be none; hence lock and unlock by hand.

use crate::sys;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;

/// A value under a futex lock.
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through `get`, whose contract is that the caller holds the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(FREE),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> bool {
        self.word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Takes the lock.
    #[inline]
    pub fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        while self.word.swap(CONTENDED, Ordering::Acquire) != FREE {
            let _ = sys::futex_wait(&self.word, CONTENDED, None);
        }
    }

    /// Frees the lock.
    #[inline]
    pub fn unlock(&self) {
        if self.word.swap(FREE, Ordering::Release) == CONTENDED {
            sys::futex_wake(&self.word, 1);
        }
    }

    /// The value.
    ///
    /// # Safety
    /// The caller holds the lock, and lets go of the reference before it unlocks.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self) -> &mut T {
        // SAFETY: the lock makes the caller the only one with a reference.
        unsafe { &mut *self.value.get() }
    }

    /// Runs `f` with the lock held.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        self.lock();
        // SAFETY: locked one line above, unlocked after `f` has given its reference back.
        let r = f(unsafe { self.get() });
        self.unlock();
        r
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes() {
        static LOCK: Lock<u64> = Lock::new(0);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    for _ in 0..50_000 {
                        LOCK.with(|v| *v += 1);
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().unwrap();
        }
        assert_eq!(LOCK.with(|v| *v), 200_000);
        assert!(LOCK.try_lock());
        assert!(!LOCK.try_lock());
        LOCK.unlock();
    }
}
