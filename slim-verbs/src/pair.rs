//! A queue pair that several threads use, and what has to be noticed about it.
//!
//! The adapter reports one completion of a queue pair that is *armed*, to whoever takes the reports of the port. That is the port's task on the agent's
//! thread ([`crate::port`]). It looks at the queue pair then, and tells those who wait: tasks by their wakers, threads and poll sets by an event counter, which
//! stays *signalled* until it is reset. What keeps anybody from waiting for ever:
//!
//! - A queue pair that is not armed is signalled, or the port's task looks at it again within [`tell_after`](crate::VerbsSettings::tell_after) and arms it. It is
//!   left unarmed only while it is *polled*: signalled, with messages coming all the time, so that some call takes them and nobody sleeps. Then the
//!   task looks at it less and less often.
//! - Arming is followed by a look at the completions: one that came before is not reported.
//! - A completion that another call takes was reported all the same, if the queue pair was armed. So it does not matter who takes it: the port's task looks at what
//!   there is, not at what it has taken.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use slim_rdma::{AdapterEvent, Break, QueuePair, Verbs};
use slim_sys::OwnFd;

use crate::paths::PairPath;

/// Reports in a row, within one turn of the port's timer, that were of no interest to anybody and after which a queue pair is armed again at once. After more it
/// is signalled for no reason, so that a stream in one direction does not wake the port's task by each message of the other direction.
const MOST_QUIET: u8 = 4;

/// Longest pause between two looks at a queue pair that is polled, in times of [`tell_after`](crate::VerbsSettings::tell_after).
const LONGEST_PAUSE: u32 = 8;

/// Who waits for what.
struct PairWaits {
    /// The adapter reports the next completion, or has reported one that the port's task has not taken yet.
    armed: bool,
    /// The event counter is readable.
    signalled: bool,
    /// Somebody has found no room.
    wants_room: bool,
    quiet: u8,
    /// At the last report or look: the number of messages that had come, and of bytes that the peer knew to be recorded.
    heard: u64,
    told: u64,
    /// The pause until the next look, in times of `tell_after`.
    pause: u32,
    /// Those who wait know that it is broken.
    end_is_told: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl PairWaits {
    /// Nobody waits.
    fn new() -> Self {
        PairWaits {
            armed: false,
            signalled: false,
            wants_room: false,
            quiet: 0,
            heard: 0,
            told: 0,
            pause: 1,
            end_is_told: false,
            reader: None,
            writer: None,
        }
    }
}

struct HeldPair<V> {
    /// `None` only while it is dropped.
    pair: Option<QueuePair>,
    verbs: V,
    watch: PairWaits,
}

/// A queue pair, with the handle of its port that has made it. Dropping it gives everything back.
pub(crate) struct SharedPair<V: Verbs> {
    held: Mutex<HeldPair<V>>,
    event: OnceLock<OwnFd>,
    path: Arc<PairPath>,
}

/// A queue pair under its lock.
pub(crate) struct InUse<'a, V> {
    pub(crate) pair: &'a mut QueuePair,
    pub(crate) verbs: &'a mut V,
    watch: &'a mut PairWaits,
    event: Option<&'a OwnFd>,
}

impl<V: Verbs> SharedPair<V> {
    pub(crate) fn new(pair: QueuePair, verbs: V, path: Arc<PairPath>) -> Self {
        SharedPair {
            held: Mutex::new(HeldPair {
                pair: Some(pair),
                verbs,
                watch: PairWaits::new(),
            }),
            event: OnceLock::new(),
            path,
        }
    }

    fn held(&self) -> MutexGuard<'_, HeldPair<V>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` with the queue pair. Those who wait learn of a break that it has found.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut InUse<'_, V>) -> R) -> R {
        let HeldPair { pair, verbs, watch } = &mut *self.held();
        let mut used = InUse {
            pair: pair.as_mut().expect("it is not dropped"),
            verbs,
            watch,
            event: self.event.get(),
        };
        let r = f(&mut used);
        if let Some(why) = used.pair.broken()
            && !used.watch.end_is_told
        {
            used.watch.end_is_told = true;
            used.tell();
            // The event may come before the completion that says why. A peer that has ended its direction may have closed the queue pair.
            if let Break::Work(_) | Break::Event(AdapterEvent::PairFailed(_)) = why
                && !used.pair.peer_has_ended()
            {
                self.path.fails();
            }
        }
        r
    }

    /// Makes the event counter, for those who wait without a task. It is signalled at first.
    pub(crate) fn make_event(&self) -> io::Result<()> {
        if self.event.get().is_none() {
            let event = slim_sys::eventfd()?;
            let _ = self.event.set(event);
        }
        self.with(|used| used.tell());
        Ok(())
    }

    pub(crate) fn event(&self) -> Option<&OwnFd> {
        self.event.get()
    }

    /// The adapter has reported a completion. Returns whether the port is to look again in a moment.
    pub(crate) fn reported(&self) -> bool {
        let look = |used: &mut InUse<'_, V>| {
            used.watch.armed = false;
            used.look();
            used.note();
            used.needs_turn()
        };
        self.with(look)
    }

    /// Some time has passed: tells the peer what no message has told it meanwhile, and arms, unless the queue pair is polled. Returns after how many times of
    /// `tell_after` the port is to look again, if it is.
    pub(crate) fn turn(&self) -> Option<u32> {
        let turn = |used: &mut InUse<'_, V>| {
            used.watch.quiet = 0;
            let polled = used.is_polled();
            if !polled {
                used.arm();
            }
            let tells = used.pair.told() == used.watch.told && used.pair.can_tell_count();
            if tells {
                used.pair.tell_count(used.verbs);
            }
            used.note();
            if used.is_of_interest() {
                used.tell();
            }
            used.watch.pause = match polled && !tells {
                true => (used.watch.pause * 2).min(LONGEST_PAUSE),
                false => 1,
            };
            used.needs_turn().then_some(used.watch.pause)
        };
        self.with(turn)
    }

    /// Checks the path.
    pub(crate) fn ping(&self) {
        self.with(|used| used.pair.ping(used.verbs));
    }

    pub(crate) fn handle_event(&self, event: AdapterEvent) {
        self.with(|used| used.pair.handle_event(event));
    }

    /// The flow leaves it. If it works as far as this side knows, the peer has asked for that: the path may have failed for the peer.
    pub(crate) fn suspend(&self) {
        self.with(|used| {
            if used.pair.broken().is_none() && !used.pair.peer_has_ended() {
                self.path.fails();
            }
            used.pair.suspend(used.verbs);
            used.tell();
        });
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.with(|used| used.pair.broken().is_some())
    }
}

impl<V: Verbs> InUse<'_, V> {
    /// Has the adapter report the next completion, unless it does. What came before is taken.
    pub(crate) fn arm(&mut self) {
        if self.watch.armed {
            self.pair.progress(self.verbs);
        } else {
            // Something was found, or it is broken: either way it is armed now, or need not be.
            self.pair.arm(self.verbs);
            self.watch.armed = true;
        }
    }

    /// Takes what has come, and tells those whom it concerns. If it concerns nobody it is armed again.
    fn look(&mut self) {
        self.pair.progress(self.verbs);
        if !self.is_of_interest() && self.watch.quiet < MOST_QUIET {
            self.watch.quiet += 1;
            self.arm();
            if !self.is_of_interest() {
                return;
            }
        }
        self.tell();
    }

    /// Whether there is something that somebody may wait for.
    fn is_of_interest(&self) -> bool {
        self.is_readable() || self.watch.wants_room && self.pair.can_send()
    }

    /// Whether there are bytes, the end, or an error.
    pub(crate) fn is_readable(&self) -> bool {
        self.pair.unread() > 0 || self.pair.peer_has_ended() || self.pair.broken().is_some()
    }

    /// Whether messages came since the last look, and calls have taken them, although nobody is told of messages.
    fn is_polled(&self) -> bool {
        let taken = self.pair.heard() != self.watch.heard;
        taken && self.watch.signalled && !self.watch.armed
    }

    /// Remembers what there is at this look.
    fn note(&mut self) {
        (self.watch.heard, self.watch.told) = (self.pair.heard(), self.pair.told());
    }

    /// Whether the port has to look again although nothing may be reported.
    fn needs_turn(&self) -> bool {
        self.pair.broken().is_none() && (!self.watch.armed || self.pair.can_tell_count())
    }

    /// Tells all who wait.
    pub(crate) fn tell(&mut self) {
        let watch = &mut *self.watch;
        watch.wants_room = false;
        let wakers = [watch.reader.take(), watch.writer.take()];
        wakers.into_iter().flatten().for_each(Waker::wake);
        if let Some(event) = self.event
            && !watch.signalled
        {
            watch.signalled = true;
            slim_sys::signal_eventfd(event.raw());
        }
    }

    /// Makes the event counter unreadable until there is something to tell.
    pub(crate) fn reset(&mut self) {
        if let Some(event) = self.event {
            slim_sys::reset_eventfd(event.raw());
        }
        self.watch.signalled = false;
        self.arm();
    }

    /// Whether bytes can be sent. If not, somebody waits for that.
    pub(crate) fn has_room(&mut self) -> bool {
        if !self.pair.can_send() {
            self.pair.progress(self.verbs);
        }
        let room = self.pair.can_send();
        self.watch.wants_room |= !room;
        room
    }

    /// Wakes this task when there is something to read.
    pub(crate) fn wake_reader(&mut self, waker: &Waker) {
        self.watch.reader = Some(waker.clone());
    }

    /// Wakes this task when there is room.
    pub(crate) fn wake_writer(&mut self, waker: &Waker) {
        self.watch.writer = Some(waker.clone());
        self.watch.wants_room = true;
    }
}

impl<V: Verbs> Drop for SharedPair<V> {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = held.pair.take() {
            pair.release(&mut held.verbs);
        }
    }
}

#[cfg(test)]
mod tests;
