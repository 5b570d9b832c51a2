//! Events for the program: kept until it takes them, or passed to its callback.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::event::SessionEvent;

/// Limit of events that are kept for the program. Beyond it the oldest are dropped.
const EVENTS: usize = 4096;

/// The program's callback for events.
pub(crate) type Callback = Arc<dyn Fn(&SessionEvent) + Send + Sync>;

/// The events of a session that the program has not taken yet, oldest first.
#[derive(Default)]
pub(super) struct EventQueue {
    /// There are a callback and an event for it. Written under the lock.
    due: AtomicBool,
    state: Mutex<EventsKept>,
}

#[derive(Default)]
struct EventsKept {
    kept: VecDeque<SessionEvent>,
    lost: u64,
    callback: Option<Callback>,
    /// A thread passes events to the callback. Others leave their events to it, so that the callback gets the events in order.
    calling: bool,
}

impl EventQueue {
    fn state(&self) -> MutexGuard<'_, EventsKept> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_due(&self, state: &EventsKept) {
        let due = state.callback.is_some() && !state.kept.is_empty();
        self.due.store(due, Ordering::Release);
    }

    /// Adds an event. Returns whether there is a callback for it.
    pub(super) fn push(&self, event: SessionEvent) -> bool {
        let mut state = self.state();
        if state.kept.len() == EVENTS {
            state.kept.pop_front();
            state.lost += 1;
        }
        state.kept.push_back(event);
        self.update_due(&state);
        state.callback.is_some()
    }

    pub(super) fn set_callback(&self, callback: Option<Callback>) {
        let mut state = self.state();
        let before = mem::replace(&mut state.callback, callback);
        self.update_due(&state);
        drop(state);
        // The callback is the program's, and its destructor may call the library, so it is dropped after the lock.
        drop(before);
    }

    /// Takes the oldest events, at most `limit`.
    pub(super) fn take(&self, limit: usize) -> Vec<SessionEvent> {
        let mut state = self.state();
        let count = state.kept.len().min(limit);
        let taken = state.kept.drain(..count).collect();
        self.update_due(&state);
        taken
    }

    /// Number of events that were dropped.
    pub(super) fn lost(&self) -> u64 {
        self.state().lost
    }

    /// Whether there are a callback and an event for it.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.due.load(Ordering::Acquire)
    }

    /// Passes all events to the callback, one by one and in order, without a lock held. If another thread does so already, or this thread
    /// is in the callback, the call returns at once. If the callback panics, the panic reaches the caller, and later events stay.
    pub(super) fn call_back(&self) {
        let mut state = self.state();
        if mem::replace(&mut state.calling, true) {
            return;
        }
        loop {
            let next = state.callback.clone();
            let next = next.and_then(|callback| Some((callback, state.kept.pop_front()?)));
            self.update_due(&state);
            let Some((callback, event)) = next else {
                // Under the same lock as the check for events: an event that comes later finds no caller.
                state.calling = false;
                return;
            };
            drop(state);
            let unwinding = CallEnds(self);
            callback(&event);
            // May be the last reference, if the program has set another callback meanwhile.
            drop(callback);
            mem::forget(unwinding);
            state = self.state();
        }
    }
}

/// Lets other threads call the callback after it has panicked.
struct CallEnds<'a>(&'a EventQueue);

impl Drop for CallEnds<'_> {
    fn drop(&mut self) {
        self.0.state().calling = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::FlowChange;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread;

    fn event(flow: u64) -> SessionEvent {
        let change = FlowChange::Connected;
        SessionEvent { flow, change }
    }

    #[test]
    fn without_a_callback_the_newest_events_are_kept() {
        let queue = EventQueue::default();
        for n in 0..EVENTS as u64 + 3 {
            assert!(!queue.push(event(n)));
        }
        queue.call_back();
        assert_eq!(queue.lost(), 3);
        let taken = queue.take(usize::MAX);
        assert_eq!((taken.len(), taken[0].flow), (EVENTS, 3));
        assert!(queue.take(usize::MAX).is_empty());
    }

    #[test]
    fn a_callback_that_panics_loses_one_event_only() {
        let queue = EventQueue::default();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = heard.clone();
        queue.set_callback(Some(Arc::new(move |event| {
            assert!(event.flow != 1, "on purpose");
            hears.lock().unwrap().push(event.flow);
        })));
        (0..4).for_each(|n| assert!(queue.push(event(n))));
        assert!(catch_unwind(AssertUnwindSafe(|| queue.call_back())).is_err());
        queue.call_back();
        assert_eq!(*heard.lock().unwrap(), [0, 2, 3]);
    }

    #[test]
    fn a_callback_may_use_the_queue_and_be_replaced_in_a_call() {
        let queue = Arc::new(EventQueue::default());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (inner, hears) = (Arc::downgrade(&queue), heard.clone());
        queue.set_callback(Some(Arc::new(move |event| {
            hears.lock().unwrap().push(event.flow);
            let queue = inner.upgrade().unwrap();
            if event.flow < 3 {
                queue.push(self::event(event.flow + 1));
                queue.call_back();
            } else {
                queue.set_callback(None);
            }
        })));
        queue.push(event(0));
        queue.push(event(9));
        queue.call_back();
        assert_eq!(*heard.lock().unwrap(), [0, 9]);
        assert_eq!(queue.take(usize::MAX), [event(1)]);
    }

    #[test]
    fn events_reach_the_callback_in_order_from_whatever_thread() {
        // All events fit into the queue: the thread that calls may be preempted for long.
        const EACH: usize = EVENTS / 4;
        let queue = EventQueue::default();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hears = heard.clone();
        queue.set_callback(Some(Arc::new(move |event| {
            hears.lock().unwrap().push(event.flow);
        })));
        let next = Mutex::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        let mut next = next.lock().unwrap();
                        queue.push(event(*next));
                        *next += 1;
                        drop(next);
                        queue.call_back();
                    }
                });
            }
        });
        // Nothing is left behind by a thread that found another one calling.
        assert!(queue.take(usize::MAX).is_empty());
        assert!(heard.lock().unwrap().iter().copied().eq(0..EVENTS as u64));
    }
}
