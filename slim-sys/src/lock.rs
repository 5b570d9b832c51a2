//! Locks that tolerate cancellation and signals in the application's threads.
//!
//! A signal handler may call a hooked function and then need a lock that the interrupted thread holds. So a thread blocks its
//! signals while it holds a lock, unless it holds the lock during a call of the application.
//!
//! The send lock is held during the application's own (cancellable) system call. `pthread_cancel` unwinds
//! through our frames without running destructors. So no guard may be alive there, and the lock is taken and released by
//! hand. A thread that was cancelled while it waited in the kernel never releases the lock; the waiters detect that
//! ([`Lock::may_be_cancelled`]).

use crate::{
    SignalsBlocked, futex_wait, futex_wake, is_agent_thread, keep_errno, thread_lives, tid,
};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
/// How often a waiter checks whether the holder still lives.
const LOOK: Duration = Duration::from_millis(50);

thread_local! {
    static QUIET: Depth = const {
        Depth { count: Cell::new(0), blocked: Cell::new(None) }
    };
}

/// Number of [`SignalGuard`] guards of the thread, and the signals that the first one has blocked. Without a destructor, because it
/// is used in signal handlers and until the very end of the thread.
struct Depth {
    count: Cell<usize>,
    blocked: Cell<Option<ManuallyDrop<SignalsBlocked>>>,
}

/// Signals are blocked in the calling thread while it has at least one of these. They may be dropped in any order.
pub struct SignalGuard(PhantomData<*const ()>);

/// Blocks signals in the calling thread. `None` in the agent's thread, which has all signals blocked anyway.
pub fn block_signals() -> Option<SignalGuard> {
    (!is_agent_thread()).then(SignalGuard::new)
}

impl SignalGuard {
    fn new() -> Self {
        QUIET.with(|depth| {
            if depth.count.get() == 0 {
                depth
                    .blocked
                    .set(Some(ManuallyDrop::new(SignalsBlocked::new())));
            }
            depth.count.set(depth.count.get() + 1);
        });
        Self(PhantomData)
    }
}

impl Drop for SignalGuard {
    fn drop(&mut self) {
        QUIET.with(|depth| {
            depth.count.set(depth.count.get() - 1);
            if depth.count.get() == 0 {
                // Taken out of the cell before signals unblock: a handler that runs at once finds the cell empty.
                drop(depth.blocked.take().map(ManuallyDrop::into_inner));
            }
        });
    }
}

/// A mutex whose holder has its signals blocked.
pub struct SignalSafeMutex<T>(Mutex<T>);

/// Access to the value of a locked [`SignalSafeMutex`]. Field order matters: the mutex unlocks before signals unblock.
pub struct Guard<'a, T> {
    value: MutexGuard<'a, T>,
    _signals: Option<SignalGuard>,
}

impl<T: Default> Default for SignalSafeMutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> SignalSafeMutex<T> {
    /// A free mutex.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Takes the mutex. Errno stays as it is.
    pub fn lock(&self) -> Guard<'_, T> {
        let signals = block_signals();
        let value = match self.0.try_lock() {
            Ok(value) => value,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.wait(),
        };
        Guard {
            value,
            _signals: signals,
        }
    }

    /// Waits for the mutex. The waiting system call sets errno (EAGAIN when the mutex became free first), and the
    /// application's call that needs the mutex may be one that succeeds.
    #[cold]
    #[inline(never)]
    fn wait(&self) -> MutexGuard<'_, T> {
        keep_errno(|| self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// A value under a futex lock.
pub struct Lock<T> {
    word: AtomicU32,
    /// The id of the holder while it is in a call in which it may be cancelled; else 0.
    mortal: AtomicI32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through `get`, whose contract is that the caller holds the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T: Default> Lock<T> {
    /// Frees the lock after a fork, in the parent or in the child. The lock was taken before the fork. The child begins with an
    /// empty value. The inherited value is forgotten, not dropped: dropping would use the allocator in a forked child.
    ///
    /// # Safety
    /// The calling thread took the lock before the fork.
    pub unsafe fn unlock_after_fork(&self, child: bool) {
        if child {
            // SAFETY: the caller's contract: the lock is held.
            std::mem::forget(std::mem::take(unsafe { self.get() }));
        }
        self.unlock();
    }
}

impl<T> Lock<T> {
    /// A free lock.
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(FREE),
            mortal: AtomicI32::new(0),
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

    /// Whether the lock is free.
    #[inline]
    pub fn is_free(&self) -> bool {
        self.word.load(Ordering::Acquire) == FREE
    }

    /// Takes the lock. Errno stays as it is.
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
            let waited = futex_wait(&self.word, CONTENDED, Some(LOOK));
            let holder = self.mortal.load(Ordering::Acquire);
            let gone = || !thread_lives(holder);
            if waited == Err(libc::ETIMEDOUT) && holder != 0 && gone() {
                // One waiter wins the exchange and frees the lock in the dead thread's place.
                let heir =
                    self.mortal
                        .compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
                if heir.is_ok() {
                    self.unlock();
                }
            }
        }
    }

    /// The holder declares that it enters a call in which it may be cancelled (`true`), or that it has returned (`false`).
    pub fn may_be_cancelled(&self, may: bool) {
        self.mortal
            .store(if may { tid() } else { 0 }, Ordering::Release);
    }

    /// Whether the calling thread holds the lock and has called [`Lock::may_be_cancelled`]. The caller then runs in a signal handler
    /// that has interrupted the declared call.
    pub fn is_interrupted_here(&self) -> bool {
        let holder = self.mortal.load(Ordering::Acquire);
        holder != 0 && holder == tid()
    }

    /// Frees the lock.
    #[inline]
    pub fn unlock(&self) {
        if self.word.swap(FREE, Ordering::Release) == CONTENDED {
            self.wake();
        }
    }

    #[cold]
    #[inline(never)]
    fn wake(&self) {
        futex_wake(&self.word, 1);
    }

    /// The value.
    ///
    /// # Safety
    /// The caller holds the lock, and does not use the reference after it unlocks.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self) -> &mut T {
        // SAFETY: the caller holds the lock, so no other reference exists.
        unsafe { &mut *self.value.get() }
    }

    /// Runs `f` with the lock held.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _signals = block_signals();
        self.lock();
        // SAFETY: locked one line above, unlocked after `f` has returned its reference.
        let r = f(unsafe { self.get() });
        self.unlock();
        r
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time_has_the_lock() {
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

    fn blocked() -> bool {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the set is valid for writes, and filled in by the call before it is read.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
            libc::sigismember(set.as_ptr(), libc::SIGUSR1) == 1
        }
    }

    #[test]
    fn signals_stay_blocked_until_the_last_guard_is_dropped() {
        let lock = SignalSafeMutex::new(0);
        assert!(!blocked());
        let first = block_signals();
        let guard = lock.lock();
        drop(first);
        assert!(blocked(), "the lock is still held");
        drop(guard);
        assert!(!blocked());
    }

    /// Runs `take` in some threads at once, often. Gives the values of errno that the calls have left.
    fn errnos_left(take: impl Fn() + Sync) -> Vec<crate::Errno> {
        let left = Mutex::new(Vec::new());
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    crate::set_errno(libc::ENOTTY);
                    for _ in 0..50_000 {
                        take();
                        if crate::errno() != libc::ENOTTY {
                            left.lock().unwrap().push(crate::errno());
                            return;
                        }
                    }
                });
            }
        });
        left.into_inner().unwrap()
    }

    #[test]
    fn waiting_for_a_lock_leaves_errno() {
        let mutex = SignalSafeMutex::new(0);
        assert_eq!(errnos_left(|| *mutex.lock() += 1), []);
        let lock = Lock::new(0);
        assert_eq!(errnos_left(|| lock.with(|value| *value += 1)), []);
    }

    #[test]
    fn the_lock_of_a_dead_holder_is_freed() {
        static LOCK: Lock<u64> = Lock::new(0);
        let holder = std::thread::spawn(|| {
            LOCK.lock();
            LOCK.may_be_cancelled(true);
        });
        holder.join().unwrap();
        LOCK.with(|v| *v += 1);
        assert!(LOCK.try_lock());
    }
}
