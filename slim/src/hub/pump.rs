//! Flows whose posts are not completed: which there are, and when the kernel is asked next.

use std::collections::HashMap;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Member;
use slim_sys::OwnFd;

/// First and longest interval of asking the kernel for acknowledgements of posts: the kernel does not report them by itself.
const PAUSE_FIRST: Duration = Duration::from_micros(200);
const PAUSE_LAST: Duration = Duration::from_millis(20);

/// Flows with posts that are not completed, and an alarm for them.
pub(super) struct PostPump {
    /// There are such flows. Written under the lock.
    any: AtomicBool,
    state: Mutex<Pumped>,
    /// A timerfd.
    alarm: OwnFd,
}

struct Pumped {
    /// Kept here until their posts are completed, even if the program drops its handles.
    flows: HashMap<u64, Arc<dyn Member>>,
    /// The next interval of the alarm.
    pause: Duration,
    /// The alarm is set.
    armed: bool,
    /// The session is closed: no flow is added.
    closed: bool,
}

impl PostPump {
    pub(super) fn new(alarm: OwnFd) -> Self {
        Self {
            any: AtomicBool::new(false),
            state: Mutex::new(Pumped {
                flows: HashMap::new(),
                pause: PAUSE_FIRST,
                armed: false,
                closed: false,
            }),
            alarm,
        }
    }

    fn state(&self) -> MutexGuard<'_, Pumped> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The timerfd, for the poll set.
    pub(super) fn alarm(&self) -> &OwnFd {
        &self.alarm
    }

    /// The alarm has expired.
    pub(super) fn expired(&self) {
        slim_sys::reset_eventfd(self.alarm.raw());
        self.state().armed = false;
    }

    /// Adds a flow, unless the session is closed.
    pub(super) fn add(&self, flow: Arc<dyn Member>) {
        let mut state = self.state();
        if state.closed {
            return;
        }
        let before = state.flows.insert(flow.id(), flow);
        self.any.store(true, Ordering::Release);
        state.pause = PAUSE_FIRST;
        self.set_alarm(&mut state);
        drop(state);
        // This may be the last reference to the flow, so it is dropped after the lock.
        drop(before);
    }

    /// Sets the alarm, after which the kernel is asked for acknowledgements: it does not report them by itself.
    fn set_alarm(&self, state: &mut Pumped) {
        if !mem::replace(&mut state.armed, true) {
            slim_sys::set_timerfd(self.alarm.raw(), Some(state.pause));
            state.pause = (state.pause * 2).min(PAUSE_LAST);
        }
    }

    /// Resets the alarm's interval after completed posts: the next ones may follow soon.
    pub(super) fn completes(&self) {
        self.state().pause = PAUSE_FIRST;
    }

    /// Whether there is a flow with posts.
    #[inline]
    pub(super) fn has_flows(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Pumps all flows with posts. Returns whether posts are left.
    pub(super) fn pump(&self) -> bool {
        let flows: Vec<_> = self.state().flows.values().cloned().collect();
        let mut done = Vec::new();
        for flow in flows {
            if !flow.clone().pump() {
                done.push(flow);
            }
        }
        let mut state = self.state();
        for flow in &done {
            // The program may have posted more in the meantime.
            if !flow.is_posting() {
                state.flows.remove(&flow.id());
            }
        }
        let any = !state.flows.is_empty();
        self.any.store(any, Ordering::Release);
        if any {
            self.set_alarm(&mut state);
        }
        drop(state);
        any
    }

    fn is_queued(&self) -> bool {
        let flows: Vec<_> = self.state().flows.values().cloned().collect();
        flows.iter().any(|flow| flow.is_queued())
    }

    /// Waits until the kernel has taken all posts, at most `limit`; `nap` sleeps meanwhile. Then releases all flows with posts, and takes no
    /// more. Returns whether all were taken.
    pub(super) fn finish(&self, limit: Duration, nap: impl Fn(Duration)) -> bool {
        let begun = Instant::now();
        while self.pump() && self.is_queued() && begun.elapsed() < limit {
            nap(PAUSE_FIRST);
        }
        let mut state = self.state();
        state.closed = true;
        let rest = mem::take(&mut state.flows);
        self.any.store(false, Ordering::Release);
        drop(state);
        !rest.values().any(|flow| flow.is_queued())
    }
}
