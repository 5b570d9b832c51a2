//! The connections of an attempt. One is under way at a time; it is replaced if it hangs, and followed by another if it fails.

use std::net::IpAddr;
use std::time::Duration;

use super::errno::ECONNREFUSED;
use super::record::QueryPurpose;
use super::resume::{Conn, Stage};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::event::Failure;
use crate::ids::{ConnId, FlowToken, Time};
use crate::transport::{Path, TransportKind};

const BACKOFF: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// A connection without progress for this long is replaced in the first window. The time doubles with each
/// window, up to [`STUCK_DOUBLINGS`] times.
const STUCK: Duration = Duration::from_secs(1);
const STUCK_DOUBLINGS: u32 = 2;
/// After this long without progress, the peer is probed (`probe.rs`). The time doubles with each
/// connection that was replaced because the peer had answered a probe.
const HUNG: Duration = Duration::from_millis(25);
const HUNG_DOUBLINGS: u32 = 5;

/// How long a connection of window `n` may hang before it is replaced.
fn stuck_in(n: u32) -> Duration {
    STUCK * (1 << n.min(STUCK_DOUBLINGS))
}

impl Endpoint {
    /// Makes a connection, unless one is under way in either direction.
    pub(super) fn connect(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        let lost = flow.peer_id().is_some_and(|peer| self.is_lost(peer));
        if lost || flow.change.has_connection() {
            return;
        }
        let Some(path) = self.next_path(token) else {
            return;
        };
        let Some(attempts) = self.attempts(token) else {
            return;
        };
        attempts.heard_at = None;
        attempts.turn += 1;
        attempts.path = path;
        attempts.asked = now;
        let stuck = stuck_in(attempts.n);
        self.leave_lane(now, token);
        let flow = self.flow(token);
        let role = flow.role;
        flow.change.lane = Some(path.to);
        self.timers.clear(TimerOwner::Flow(token, Timer::Backoff));
        self.timers
            .set(TimerOwner::Flow(token, Timer::Stuck), now + stuck);
        if self.connects.enter(path.to, token, role) {
            self.launch(now, token);
        }
    }

    /// The path of the next connection: to the address where the peer has been heard, if there is one.
    pub(super) fn next_path(&self, token: FlowToken) -> Option<Path> {
        let flow = &self.flows[&token];
        let attempts = flow.outage.as_ref()?.attempts.as_ref()?;
        let mut paths = self.paths(token);
        paths.put_back(|to| attempts.bad.contains(&to));
        // The answered QUERY was sent from the flow's own address. Connections from an address that the kernel chooses
        // may not arrive.
        let bound = (attempts.replaced % 2 == 0).then(|| flow.ends.local().ip());
        // An answer over IP says nothing about other kinds of transport, so those keep their turns.
        let heard_at = attempts.heard_at;
        let known = heard_at.filter(|_| attempts.replaced % 2 == 1 || !paths.has_others());
        let known =
            known.and_then(|ip| paths.between(bound, ip).or_else(|| paths.between(None, ip)));
        known.or_else(|| paths.choose(attempts.n, attempts.turn, self.relay_turns(token)))
    }

    /// The flow has a slot: asks the driver for the connection.
    fn launch(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let busy = flow.change.has_connection();
        let attempts = flow.outage.as_mut().and_then(|o| o.attempts.as_mut());
        let Some(attempts) = attempts.filter(|_| !busy) else {
            debug_assert!(false, "{token:?} waits for a connection it already has");
            if let Some(to) = flow.change.lane.take() {
                self.connects.leave(to, token);
            }
            return;
        };
        attempts.asked = now;
        let path = attempts.path;
        let stuck = stuck_in(attempts.n);
        let hung = HUNG * (1 << attempts.replaced.min(HUNG_DOUBLINGS));
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        self.flow(token).change.outgoing = Some(conn);
        self.conns.insert(
            conn,
            Conn::Out {
                token,
                stage: Stage::Connecting,
            },
        );
        for (timer, wait) in [(Timer::Stuck, stuck), (Timer::Hung, hung)] {
            self.timers.set(TimerOwner::Flow(token, timer), now + wait);
        }
        let outage = self.flow(token).outage.as_ref();
        let small_segments = outage.is_some_and(|outage| outage.small_segments);
        self.out.push(Action::Connect {
            conn,
            token,
            path,
            small_segments,
        });
    }

    /// The flow neither connects nor waits for a slot any more: the slot goes to the next flow.
    pub(super) fn leave_lane(&mut self, now: Time, token: FlowToken) {
        let Some(to) = self.flow(token).change.lane.take() else {
            return;
        };
        self.connects.leave(to, token);
        while let Some(next) = self.connects.next(to) {
            self.launch(now, next);
        }
    }

    /// How long the connection under way has been waiting.
    pub(super) fn connecting_for(&self, now: Time, token: FlowToken) -> Duration {
        let outage = self.flows[&token].outage.as_ref();
        let attempts = outage.and_then(|outage| outage.attempts.as_ref());
        attempts.map_or(Duration::ZERO, |attempts| now.since(attempts.asked))
    }

    pub(super) fn on_hung(&mut self, now: Time, token: FlowToken) {
        if self.flow(token).change.outgoing.is_some() {
            self.report(token);
            self.probe(now, token);
        }
    }

    /// The peer has answered a probe at `via`: replaces the connection that was asked for before that.
    pub(super) fn connect_anew(&mut self, now: Time, token: FlowToken, via: IpAddr) {
        let Some(attempts) = self.attempts(token) else {
            return;
        };
        attempts.replaced += 1;
        attempts.heard_at = Some(via);
        self.host_heard(token);
        self.replace(now, token);
    }

    /// The connection of an attempt was accepted or refused: by the peer's host, unless it was to the witness.
    pub(super) fn connection_answered(&mut self, token: FlowToken) {
        if self.flow(token).connects_by() != Some(TransportKind::RELAY) {
            self.host_heard(token);
        }
    }

    /// Something at the peer's host has answered an attempt.
    fn host_heard(&mut self, token: FlowToken) {
        if let Some(outage) = &mut self.flow(token).outage {
            (outage.heard, outage.answered) = (true, true);
        }
    }

    /// The next connection goes through the witness, now.
    pub(super) fn connect_by_relay(&mut self, now: Time, token: FlowToken) {
        if let Some(attempts) = self.attempts(token) {
            attempts.turn = 0;
            self.replace(now, token);
        }
    }

    /// Gives up the connection under way for another one.
    fn replace(&mut self, now: Time, token: FlowToken) {
        if let Some(conn) = self.flow(token).change.outgoing.take() {
            self.close_conn(conn);
            if let Some(to) = self.flow(token).change.lane {
                self.connects.lost(now, to);
            }
            if let Some(attempts) = self.attempts(token) {
                attempts.last = Failure::TimedOut;
            }
            self.update_state(token);
        }
        self.connect(now, token);
    }

    /// The connection under way has made progress: its time to hang starts anew.
    pub(super) fn conn_progressed(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let n = match flow.outage.as_ref().and_then(|o| o.attempts.as_ref()) {
            Some(attempts) => attempts.n,
            None => 0,
        };
        let stuck = stuck_in(n);
        self.timers
            .set(TimerOwner::Flow(token, Timer::Stuck), now + stuck);
        self.timers.clear(TimerOwner::Flow(token, Timer::Hung));
    }

    /// The connection under way has failed. The driver has closed it, or was told to.
    pub(super) fn conn_failed(&mut self, now: Time, token: FlowToken, why: Failure) {
        self.report(token);
        let flow = self.flow(token);
        flow.change.outgoing = None;
        let (failures, direct) = match flow.outage.as_mut().and_then(|o| o.attempts.as_mut()) {
            Some(attempts) => {
                attempts.last = why;
                attempts.failures += 1;
                let relayed = attempts.path.kind() == TransportKind::RELAY;
                (attempts.failures, !relayed)
            }
            None => (0, false),
        };
        self.stop_waiting(token);
        if why == Failure::Eof
            && let Some(to) = self.flow(token).change.lane
        {
            self.connects.lost(now, to);
        }
        self.leave_lane(now, token);
        self.update_state(token);
        // Whoever cannot be reached through the witness has most likely ended.
        let gone = !direct && matches!(why, Failure::Eof | Failure::Errno(_));
        let idle = !self.flow(token).change.has_connection();
        if failures == 0 || (gone && idle && self.end_untold(now, token)) {
            return;
        }
        let most = BACKOFF_MAX.min(BACKOFF * (1 << failures.saturating_sub(1).min(8)));
        // A random pause of 1 ms up to `most`, so that flows that failed together do not connect together.
        let pause = Duration::from_micros(1000 + self.rng.up_to(most.as_micros() as u64));
        self.timers
            .set(TimerOwner::Flow(token, Timer::Backoff), now + pause);
        if why == Failure::Errno(ECONNREFUSED) && direct {
            // The process may be gone, or a firewall may have refused the connection.
            self.ask(now, token, QueryPurpose::Death);
        } else if pause > HUNG {
            // The link may be down, and may come back before the pause is over.
            self.probe(now, token);
        }
    }

    /// The flow does not wait for the network any more, only for its own front end, if at all.
    pub(super) fn stop_waiting(&mut self, token: FlowToken) {
        self.timers.clear(TimerOwner::Flow(token, Timer::Stuck));
        self.timers.clear(TimerOwner::Flow(token, Timer::Hung));
    }

    /// Closes the connection under way, if any, without counting it as failed.
    pub(super) fn drop_outgoing(&mut self, now: Time, token: FlowToken) {
        self.stop_waiting(token);
        self.timers.clear(TimerOwner::Flow(token, Timer::Backoff));
        if let Some(conn) = self.flow(token).change.outgoing.take() {
            self.close_conn(conn);
        }
        self.leave_lane(now, token);
    }

    pub(super) fn on_stuck(&mut self, now: Time, token: FlowToken) {
        self.report(token);
        self.replace(now, token);
    }

    pub(super) fn on_backoff(&mut self, now: Time, token: FlowToken) {
        self.connect(now, token);
    }
}
