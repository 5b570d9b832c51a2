//! Driving an agent without a thread, and waiting for an agent of either kind.

use std::os::fd::RawFd;
use std::time::Duration;

use slim_sys::cancel::uncancelled;

use super::{Agent, AgentPlace, Runs};
use crate::commands::done::Waiter;
use crate::driven::Driven;

impl Agent {
    pub(super) fn driven(&self) -> Option<&Driven> {
        match &self.own()?.runs {
            Runs::Driven(driven) => Some(driven),
            Runs::Alone(_) => None,
        }
    }

    /// Whether the agent has no thread, so that the program must [drive](Self::drive) it.
    pub fn is_driven(&self) -> bool {
        match &self.inner.place {
            AgentPlace::Here(own) => matches!(own.runs, Runs::Driven(_)),
            AgentPlace::Elsewhere(_) => false,
        }
    }

    /// For an agent without a thread: the descriptor that is readable when [`drive`](Self::drive) has something to do. Valid until the
    /// agent has ended.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.driven().map(Driven::descriptor)
    }

    /// For an agent without a thread: [drives](Self::drive) it if commands wait, or if nobody has done so for 10 ms. Costs a few
    /// nanoseconds otherwise.
    pub fn attend(&self) {
        if let Some(own) = self.own()
            && let Runs::Driven(driven) = &own.runs
        {
            match own.commands.is_awake() {
                true => driven.drive(),
                false => driven.drive_at_times(),
            }
        }
    }

    /// For an agent without a thread: does what there is to do. Does not sleep. Does nothing if another thread is doing that.
    ///
    /// The calling thread must not hold a lock that a [`FlowIo`](crate::FlowIo) takes. Its signals are blocked during the call.
    pub fn drive(&self) {
        if let Some(driven) = self.driven() {
            driven.drive();
        }
    }

    /// Waits until the descriptor has one of these events of poll(2), at most `limit`, and drives an agent without a thread meanwhile.
    /// May return earlier.
    pub fn wait_for(&self, fd: RawFd, events: i16, limit: Duration) {
        match self.driven() {
            Some(driven) => driven.wait_for(fd, events, limit),
            None => drop(slim_sys::poll(fd, events, Some(limit))),
        }
    }

    /// For an agent without a thread: drives it until `done` returns true, at most `limit`. Returns false if it has a thread.
    pub fn drive_until(&self, limit: Duration, done: impl FnMut() -> bool) -> bool {
        self.driven()
            .is_some_and(|driven| driven.drive_until(limit, done))
    }

    /// For an agent without a thread: has the threads in [`drive_until`](Self::drive_until) check their condition, which another thread has changed.
    pub fn wake_waiting(&self) {
        if let Some(driven) = self.driven() {
            driven.wake_sleepers();
        }
    }

    /// Waits at most `limit` until the agent has done something.
    pub(super) fn wait(&self, waiter: Waiter, limit: Duration) -> bool {
        self.drive_until(limit, || waiter.is_over());
        let left = match self.is_driven() {
            true => Duration::ZERO,
            false => limit,
        };
        uncancelled(|| waiter.wait(left))
    }
}
