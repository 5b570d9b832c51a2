//! Locks that survive what an application's threads go through: cancellation and signals.
//!
//! A signal's handler may call what we hook, and so come upon a lock that the thread has which it interrupts. So
//! whoever takes a lock for itself, and not over a call of the application's, is not interrupted meanwhile.
//!
//! The send lock is held over the application's own (cancellable) system call. `pthread_cancel` unwinds
//! through our frames without running destructors, so there must be none; hence lock and unlock by hand. A
//! thread that was cancelled while it waited in the kernel has left the lock behind; whoever waits for it finds
//! that out ([`Lock::may_die`]).

use crate::{SignalsBlocked, futex_wait, futex_wake, is_agent_thread, thread_lives, tid};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
/// How often a waiter looks whether the holder still lives.
const LOOK: Duration = Duration::from_millis(50);

thread_local! {
    static QUIET: Depth = const {
        Depth { count: Cell::new(0), blocked: Cell::new(None) }
    };
}

/// How many [`Quiet`] the thread has, and what the first one has blocked. Without a destructor: it is used in
/// handlers, and until the thread's last moment.
struct Depth {
    count: Cell<usize>,
    blocked: Cell<Option<ManuallyDrop<SignalsBlocked>>>,
}

/// No signals come to the calling thread while it has one or more of these, in whatever order they go.
pub struct Quiet(PhantomData<*const ()>);

/// Keeps signals from the calling thread. The agent's has none.
pub fn undisturbed() -> Option<Quiet> {
    (!is_agent_thread()).then(Quiet::new)
}

impl Quiet {
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

impl Drop for Quiet {
    fn drop(&mut self) {
        QUIET.with(|depth| {
            depth.count.set(depth.count.get() - 1);
            if depth.count.get() == 0 {
                // Taken out first: a handler that comes as soon as it goes finds nothing.
                drop(depth.blocked.take().map(ManuallyDrop::into_inner));
            }
        });
    }
}

/// A mutex whose holder is not interrupted by signals.
pub struct Undisturbed<T>(Mutex<T>);

/// Its value. What is first here goes first.
pub struct Guard<'a, T> {
    value: MutexGuard<'a, T>,
    _signals: Option<Quiet>,
}

impl<T: Default> Default for Undisturbed<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Undisturbed<T> {
    /// A free one.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Takes it.
    pub fn lock(&self) -> Guard<'_, T> {
        let signals = undisturbed();
        Guard {
            value: self.0.lock().unwrap_or_else(PoisonError::into_inner),
            _signals: signals,
        }
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
    /// The thread that holds the lock in a call in which it may be cancelled, or 0.
    mortal: AtomicI32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through `get`, whose contract is that the caller holds the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T: Default> Lock<T> {
    /// After a fork, on either side: frees the lock that was taken before it. A child begins with an empty value. The
    /// parent's is forgotten, not dropped: freeing would use the allocator in a forked child.
    ///
    /// # Safety
    /// The calling thread took the lock before the fork.
    pub unsafe fn unlock_after_fork(&self, child: bool) {
        if child {
            // SAFETY: the lock is held, says the caller.
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

    /// Whether nobody has the lock.
    #[inline]
    pub fn is_free(&self) -> bool {
        self.word.load(Ordering::Acquire) == FREE
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
            let waited = futex_wait(&self.word, CONTENDED, Some(LOOK));
            let holder = self.mortal.load(Ordering::Acquire);
            let gone = || !thread_lives(holder);
            if waited == Err(libc::ETIMEDOUT) && holder != 0 && gone() {
                // One waiter becomes the dead thread's heir and frees the lock in its place.
                let heir =
                    self.mortal
                        .compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
                if heir.is_ok() {
                    self.unlock();
                }
            }
        }
    }

    /// The holder says that it is about to wait in a call that may be its last, or has come back.
    pub fn may_die(&self, may: bool) {
        self.mortal
            .store(if may { tid() } else { 0 }, Ordering::Release);
    }

    /// Whether the calling thread has the lock, and has said so: then this is a signal's handler, in the middle of that call.
    pub fn is_mortal_here(&self) -> bool {
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
    /// The caller holds the lock, and lets go of the reference before it unlocks.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self) -> &mut T {
        // SAFETY: the lock makes the caller the only one with a reference.
        unsafe { &mut *self.value.get() }
    }

    /// Runs `f` with the lock held.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _signals = undisturbed();
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

    fn blocked() -> bool {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the set is valid for writes, and filled in by the call before it is read.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
            libc::sigismember(set.as_ptr(), libc::SIGUSR1) == 1
        }
    }

    #[test]
    fn it_is_quiet_until_the_last_one_goes() {
        let lock = Undisturbed::new(0);
        assert!(!blocked());
        let first = undisturbed();
        let guard = lock.lock();
        drop(first);
        assert!(blocked(), "the lock is still held");
        drop(guard);
        assert!(!blocked());
    }

    #[test]
    fn a_dead_holder_leaves_no_lock_behind() {
        static LOCK: Lock<u64> = Lock::new(0);
        let holder = std::thread::spawn(|| {
            LOCK.lock();
            LOCK.may_die(true);
        });
        holder.join().unwrap();
        LOCK.with(|v| *v += 1);
        assert!(LOCK.try_lock());
    }
}
