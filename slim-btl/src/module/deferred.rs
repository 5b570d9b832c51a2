//! Frames that wait for the next system call, and the thread that sends them if the program makes no progress.
//!
//! A send that follows another one at once shares its system call (see [`BtlEndpoint::send`]): the frames are sent at the latest when
//! the process makes progress, which every MPI call that waits does. A program that computes instead must not delay its messages: a
//! thread sends them within about two [`TICK`]s, also those that the kernel did not take at first, because the connection was
//! suspended for example. The thread sleeps while no frames wait.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::signal::SigSet;

use crate::endpoint::BtlEndpoint;
use crate::frag::FragRef;

/// Interval at which the thread looks for frames that progress has not sent.
const TICK: Duration = Duration::from_millis(1);
/// Number of intervals without a deferred send after which the thread sleeps.
const QUIET: u32 = 50;

/// Endpoints with frames that wait for a system call or for the kernel, and fragments that the thread has sent.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    endpoints: Mutex<Vec<Arc<BtlEndpoint>>>,
    /// There are such endpoints.
    any: AtomicBool,
    /// Endpoints with frames that the kernel has refused.
    blocked: Mutex<Vec<Arc<BtlEndpoint>>>,
    any_blocked: AtomicBool,
    /// Number of calls of progress.
    pub(super) rounds: AtomicU64,
    /// Number of times that progress has taken them.
    taken: AtomicU64,
    /// Held by the thread while it sends.
    sending: Mutex<()>,
    /// Fragments that the thread has sent: their callbacks must be called by a thread of the program.
    sent: Mutex<Vec<(Arc<BtlEndpoint>, FragRef)>>,
    any_sent: AtomicBool,
    /// The thread is not asleep.
    awake: AtomicBool,
    ends: AtomicBool,
}

/// The thread, started with the first deferred send.
#[derive(Debug, Default)]
pub(super) struct DeferredThread(Mutex<Option<JoinHandle<()>>>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deferred {
    /// Takes the endpoints with frames that wait.
    pub(super) fn take(&self) -> Vec<Arc<BtlEndpoint>> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut endpoints = locked(&self.endpoints);
        self.any.store(false, Ordering::Release);
        self.taken.fetch_add(1, Ordering::Relaxed);
        std::mem::take(&mut *endpoints)
    }

    /// Whether frames may wait for room.
    pub(super) fn has_blocked(&self) -> bool {
        self.any_blocked.load(Ordering::Acquire)
    }

    /// Takes the fragments that the thread has sent.
    pub(super) fn take_sent(&self) -> Vec<(Arc<BtlEndpoint>, FragRef)> {
        if !self.any_sent.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut sent = locked(&self.sent);
        self.any_sent.store(false, Ordering::Release);
        std::mem::take(&mut *sent)
    }

    /// From now on the thread sends nothing of this endpoint. What it has sent is in [`take_sent`](Self::take_sent).
    pub(super) fn forget(&self, endpoint: &Arc<BtlEndpoint>) {
        for list in [&self.endpoints, &self.blocked] {
            locked(list).retain(|known| !Arc::ptr_eq(known, endpoint));
        }
        // The thread may have taken the endpoint before.
        drop(locked(&self.sending));
    }

    fn run(&self) {
        while !self.ends.load(Ordering::Acquire) {
            let mut quiet = 0;
            while quiet < QUIET && !self.ends.load(Ordering::Acquire) {
                let taken = self.taken.load(Ordering::Relaxed);
                let rounds = self.rounds.load(Ordering::Relaxed);
                let waits = self.any.load(Ordering::Acquire);
                let blocked = self.any_blocked.load(Ordering::Acquire);
                thread::sleep(TICK);
                let progress = self.taken.load(Ordering::Relaxed) != taken;
                if waits && !progress {
                    self.flush();
                }
                if blocked {
                    // A program that makes progress hears from the session when there is room.
                    self.look_at_blocked(self.rounds.load(Ordering::Relaxed) == rounds);
                }
                let is_quiet = !waits && !progress && !blocked;
                quiet = if is_quiet { quiet + 1 } else { 0 };
            }
            self.awake.store(false, Ordering::SeqCst);
            let any = [&self.any, &self.any_blocked];
            if !any.iter().any(|any| any.load(Ordering::SeqCst)) {
                // A send that comes in between leaves the token that makes this return at once.
                thread::park();
            }
            self.awake.store(true, Ordering::SeqCst);
        }
    }

    fn flush(&self) {
        let _sending = locked(&self.sending);
        for endpoint in self.take() {
            self.send(&endpoint);
            if !endpoint.is_flushed() {
                self.watch(&endpoint);
            }
        }
    }

    /// Sends what the kernel takes of an endpoint's frames.
    fn send(&self, endpoint: &Arc<BtlEndpoint>) {
        let mut done = Vec::new();
        endpoint.flush(&mut done);
        if !done.is_empty() {
            let mut sent = locked(&self.sent);
            sent.extend(done.into_iter().map(|frag| (endpoint.clone(), frag)));
            self.any_sent.store(true, Ordering::Release);
        }
    }

    /// Adds an endpoint with frames that the kernel has refused, unless it is known. Returns whether it was added.
    fn watch(&self, endpoint: &Arc<BtlEndpoint>) -> bool {
        if endpoint.watch(true) {
            return false;
        }
        let mut blocked = locked(&self.blocked);
        blocked.push(endpoint.clone());
        self.any_blocked.store(true, Ordering::SeqCst);
        true
    }

    /// Forgets the endpoints whose frames are sent. With `send` it tries to send the frames before.
    fn look_at_blocked(&self, send: bool) {
        let _sending = locked(&self.sending);
        let endpoints = locked(&self.blocked).clone();
        for endpoint in &endpoints {
            if send {
                self.send(endpoint);
            }
            if endpoint.is_flushed() {
                locked(&self.blocked).retain(|known| !Arc::ptr_eq(known, endpoint));
                endpoint.watch(false);
                // Frames that were refused in between have found it watched.
                if !endpoint.is_flushed() {
                    self.watch(endpoint);
                }
            }
        }
        let blocked = locked(&self.blocked);
        self.any_blocked
            .store(!blocked.is_empty(), Ordering::SeqCst);
    }
}

impl DeferredThread {
    /// Frames of this endpoint wait for the next system call.
    pub(super) fn defer(&self, deferred: &Arc<Deferred>, endpoint: &Arc<BtlEndpoint>) {
        let mut endpoints = locked(&deferred.endpoints);
        if !endpoints.iter().any(|known| Arc::ptr_eq(known, endpoint)) {
            endpoints.push(endpoint.clone());
        }
        drop(endpoints);
        deferred.any.store(true, Ordering::SeqCst);
        self.wake_up(deferred);
    }

    /// The kernel has refused frames of this endpoint. Progress sends them when there is room again; the thread does if the program makes
    /// no progress. A connection that was suspended for a moment would otherwise hold a finished send back for as long as the program
    /// computes, or for ever if it waits for the receiver outside of MPI.
    pub(super) fn watch(&self, deferred: &Arc<Deferred>, endpoint: &Arc<BtlEndpoint>) {
        if deferred.watch(endpoint) {
            self.wake_up(deferred);
        }
    }

    fn wake_up(&self, deferred: &Arc<Deferred>) {
        if !deferred.awake.swap(true, Ordering::SeqCst) {
            self.wake(deferred);
        }
    }

    fn wake(&self, deferred: &Arc<Deferred>) {
        let mut thread = locked(&self.0);
        if let Some(thread) = &*thread {
            return thread.thread().unpark();
        }
        let deferred = deferred.clone();
        let builder = thread::Builder::new().name("slim-btl".into());
        // The program's signal handlers must not run on the thread.
        let before = SigSet::thread_get_mask();
        let _ = SigSet::all().thread_block();
        // Without the thread, frames wait for progress.
        *thread = builder.spawn(move || deferred.run()).ok();
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
    }

    /// Ends the thread.
    pub(super) fn end(&self, deferred: &Deferred) {
        deferred.ends.store(true, Ordering::Release);
        if let Some(thread) = locked(&self.0).take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
