//! Flows move to the kind of transport that they prefer: `docs/PROTOCOL.md`, section "Kinds of transport".
//!
//! A flow begins on TCP, or has gone to TCP because the path of another kind had failed. While it is live there, and both processes
//! have a kind that its connector prefers, the connector *tries* that kind from time to time: it makes a connection beside the transport.
//! If CHALLENGE comes on it, the flow moves, as after a stall. Until then nothing happens to the flow. A trial that fails is no fault:
//! nobody is asked or accused, and no event is logged. What is known of a locator is shared by all flows: `outlooks.rs`.
//!
//! Only the connector tries. If the two processes prefer different kinds, the flow does not go back and forth.

use std::collections::BTreeMap;
use std::time::Duration;

use super::flow::State;
use super::outage::{Attempts, Outage};
use super::outlooks::PeerLocator;
use super::record::{Bar, Change};
use super::resume::{Conn, Stage};
use super::rng::Rng;
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::auth::verify_with_job;
use crate::event::{Event, Failure};
use crate::ids::{Cause, ConnId, EndpointId, FlowToken, Role, Time};
use crate::transport::{Locator, Path, TransportKind};
use crate::wire::{Challenge, Parsed};

/// A flow is live for so long before its first trial, so that short connections cost nothing.
const BEGIN: Duration = Duration::from_millis(20);
/// How long a trial waits for CHALLENGE.
const PATIENCE: Duration = Duration::from_secs(3);
const SPREAD: u32 = 8;

/// What a connector keeps of a flow that has a kind to prefer, or whose transport is of another kind than TCP.
pub(super) struct Failback {
    /// The kind of the present transport, or of the last one.
    kind: TransportKind,
    /// Where the present transport leads, if the flow has come to a better kind by it.
    at: Option<Locator>,
    /// A trial of this locator has succeeded, and the flow is moving to it.
    moves: Option<Locator>,
    /// Locators for which the flow waits in [`Outlooks`](super::outlooks::Outlooks).
    waits: Vec<Locator>,
    trial: Option<Trial>,
}

/// A trial under way.
struct Trial {
    path: Path,
    /// `None` while it waits for a slot.
    conn: Option<ConnId>,
    asked: Time,
}

impl Default for Failback {
    fn default() -> Self {
        Failback {
            kind: TransportKind::TCP,
            at: None,
            moves: None,
            waits: Vec::new(),
            trial: None,
        }
    }
}

/// Up to this part of a time is added at random, so that flows that fell back together do not try together.
fn spread(rng: &mut Rng, time: Duration) -> Duration {
    Duration::from_micros(rng.up_to((time / SPREAD).as_micros() as u64))
}

/// By flow.
pub(super) type Failbacks = BTreeMap<FlowToken, Failback>;

/// How far back a kind is in the order of preference. What goes through the witness comes last.
fn rank(order: impl Iterator<Item = TransportKind>, kind: TransportKind) -> usize {
    let mut order = order.filter(|kind| *kind != TransportKind::RELAY);
    order.position(|other| other == kind).unwrap_or(usize::MAX)
}

impl Endpoint {
    /// The kind of the flow's transport, or of its last one, as far as its connector knows: the first one counts as TCP.
    pub(super) fn kind_of(&self, token: FlowToken) -> TransportKind {
        let failback = self.failbacks.get(&token);
        failback.map_or(TransportKind::TCP, |failback| failback.kind)
    }

    /// The paths of the kinds that the flow prefers to the present one, and that both processes have.
    fn preferred_paths(&self, token: FlowToken) -> Vec<Path> {
        let now = self.kind_of(token);
        if now == TransportKind::TCP && self.locators(token).is_empty() {
            return Vec::new();
        }
        let rank_now = rank(self.own.order(), now);
        let ours = |kind| {
            let mut own = self.own.locators.iter();
            kind == TransportKind::TCP || own.any(|locator| locator.kind() == kind)
        };
        let is_better = |kind| rank(self.own.order(), kind) < rank_now && ours(kind);
        self.paths(token).of_kinds(is_better)
    }

    /// Whether the flow may move now: it is well, and nobody wants to end it.
    pub(super) fn may_move(&self, token: FlowToken) -> bool {
        let Some(flow) = self.flows.get(&token) else {
            return false;
        };
        let well = flow.state() == State::Live && flow.outage.is_none() && flow.bar == Bar::Open;
        let stays = flow.fin.is_none() && flow.peer_fin.is_none() && flow.leaving.is_none();
        well && stays
            && flow.role == Role::Connector
            && flow.query.is_none()
            && *flow.change == Change::NONE
            && !self.is_relayed(token)
            && !self.is_fenced()
            && flow.peer_id().is_some_and(|peer| !self.is_lost(peer))
    }

    /// The flow is well, or there are new locators: if it prefers another kind, it is tried soon.
    pub(super) fn prefer_later(&mut self, now: Time, token: FlowToken) {
        if !self.own.has_others() || !self.may_move(token) {
            return;
        }
        let timer = TimerOwner::Failback(token);
        if self.preferred_paths(token).is_empty() {
            let known = self.failbacks.get(&token);
            if known.is_some_and(|failback| failback.trial.is_none()) {
                self.timers.clear(timer);
                self.leave_outlooks(now, token);
            }
            return;
        }
        let failback = self.failbacks.entry(token).or_default();
        if failback.trial.is_some() || self.timers.get(timer).is_some() {
            return;
        }
        let spread = spread(&mut self.rng, BEGIN);
        self.timers.set(timer, now + BEGIN + spread);
    }

    /// The flow has been live for a moment, or the trial under way takes too long.
    pub(super) fn on_failback_timer(&mut self, now: Time, token: FlowToken) {
        let Some(failback) = self.failbacks.get(&token) else {
            return;
        };
        if failback.trial.is_some() {
            return self.trial_failed(now, token);
        }
        if !self.may_move(token) {
            // `prefer_later` is called when the flow is well again.
            return;
        }
        for path in self.preferred_paths(token) {
            let Some(there) = self.at_peer(token, path.to) else {
                continue;
            };
            if self.outlooks.may_try(now, there, token) {
                self.begin_trial(now, token, path);
                break;
            }
            if let Some(failback) = self.failbacks.get_mut(&token)
                && !failback.waits.contains(&path.to)
            {
                failback.waits.push(path.to);
            }
        }
        self.await_outlooks(now);
    }

    /// Locators that failed may be tried again: for each, one of the flows that wait for it does so.
    pub(super) fn on_outlooks_timer(&mut self, now: Time) {
        while let Some((there, token)) = self.outlooks.due(now) {
            let (_, to) = there;
            let Some(failback) = self.failbacks.get_mut(&token) else {
                continue;
            };
            failback.waits.retain(|other| *other != to);
            // Otherwise the flow asks anew when its trial is over, or when it is well.
            if failback.trial.is_none()
                && let Some(path) = self.usable_path(token, to)
                && self.outlooks.may_try(now, there, token)
            {
                self.begin_trial(now, token, path);
            }
        }
        self.await_outlooks(now);
    }

    fn await_outlooks(&mut self, now: Time) {
        match self.outlooks.next(now) {
            Some(at) => self.timers.set(TimerOwner::Outlooks, at),
            None => self.timers.clear(TimerOwner::Outlooks),
        }
    }

    fn leave_outlooks(&mut self, now: Time, token: FlowToken) {
        let failback = self.failbacks.get_mut(&token);
        let waits = failback.map(|failback| std::mem::take(&mut failback.waits));
        for to in waits.unwrap_or_default() {
            self.leave_outlook(token, to);
        }
        self.await_outlooks(now);
    }

    fn leave_outlook(&mut self, token: FlowToken, to: Locator) {
        if let Some(there) = self.at_peer(token, to) {
            self.outlooks.leave(there, token);
        }
    }

    /// The flow is gone.
    pub(super) fn forget_failback(&mut self, now: Time, token: FlowToken) {
        if self.failbacks.contains_key(&token) {
            self.leave_outlooks(now, token);
            self.failbacks.remove(&token);
            self.timers.clear(TimerOwner::Failback(token));
        }
    }

    /// This locator of the flow's peer, in [`Outlooks`](super::outlooks::Outlooks).
    fn at_peer(&self, token: FlowToken, to: Locator) -> Option<PeerLocator> {
        Some((self.flows.get(&token)?.peer_id()?, to))
    }

    /// Whether this locator of the flow's peer has failed, and is not to be tried again yet.
    pub(super) fn is_bad(&self, now: Time, token: FlowToken, to: Locator) -> bool {
        let there = self.at_peer(token, to);
        there.is_some_and(|there| self.outlooks.is_bad(now, there))
    }

    /// The path by which the flow may move to this locator, if it may.
    fn usable_path(&self, token: FlowToken, to: Locator) -> Option<Path> {
        let mut paths = match self.may_move(token) {
            true => self.preferred_paths(token).into_iter(),
            false => Vec::new().into_iter(),
        };
        paths.find(|path| path.to == to)
    }

    /// The locator may be tried: waits for a slot.
    fn begin_trial(&mut self, now: Time, token: FlowToken, path: Path) {
        let Some(failback) = self.failbacks.get_mut(&token) else {
            return;
        };
        failback.waits.retain(|other| *other != path.to);
        failback.trial = Some(Trial {
            path,
            conn: None,
            asked: now,
        });
        self.timers.clear(TimerOwner::Failback(token));
        if self.trials.enter(path.to, token, Role::Connector) {
            self.connect_trial(now, token);
        }
    }

    /// The trial has a slot: asks the driver for the connection.
    fn connect_trial(&mut self, now: Time, token: FlowToken) {
        let failback = self.failbacks.get_mut(&token);
        let Some(trial) = failback.and_then(|failback| failback.trial.as_mut()) else {
            return;
        };
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        (trial.conn, trial.asked) = (Some(conn), now);
        let path = trial.path;
        self.conns.insert(conn, Conn::Trial { token });
        self.timers.set(TimerOwner::Failback(token), now + PATIENCE);
        self.out.push(Action::Connect {
            conn,
            token,
            path,
            small_segments: false,
        });
    }

    /// Ends the trial under way, if any, without counting it as failed.
    pub(super) fn end_trial(&mut self, now: Time, token: FlowToken) {
        let failback = self.failbacks.get_mut(&token);
        let Some(trial) = failback.and_then(|failback| failback.trial.take()) else {
            return;
        };
        self.timers.clear(TimerOwner::Failback(token));
        if let Some(conn) = trial.conn {
            self.close_conn(conn);
        }
        self.leave_outlook(token, trial.path.to);
        self.leave_trials(now, token, trial.path.to);
        self.await_outlooks(now);
    }

    /// The slot of a trial goes to the next flow.
    fn leave_trials(&mut self, now: Time, token: FlowToken, to: Locator) {
        self.trials.leave(to, token);
        // Thousands of waiting flows may have no use for a slot any more: this is a loop, and no recursion.
        while let Some(next) = self.trials.next(to) {
            let there = self.at_peer(next, to);
            let there = there.filter(|_| self.usable_path(next, to).is_some());
            if there.is_some_and(|there| !self.outlooks.is_bad(now, there)) {
                self.connect_trial(now, next);
                continue;
            }
            self.trials.leave(to, next);
            self.leave_outlook(next, to);
            if let Some(failback) = self.failbacks.get_mut(&next) {
                failback.trial = None;
            }
            self.prefer_later(now, next);
        }
    }

    /// The trial under way has failed.
    pub(super) fn trial_failed(&mut self, now: Time, token: FlowToken) {
        let failback = self.failbacks.get(&token);
        if let Some(trial) = failback.and_then(|failback| failback.trial.as_ref()) {
            let to = trial.path.to;
            self.locator_failed(now, token, to);
        }
        self.end_trial(now, token);
        self.prefer_later(now, token);
    }

    fn locator_failed(&mut self, now: Time, token: FlowToken, to: Locator) {
        if let Some(there) = self.at_peer(token, to) {
            let rng = &mut self.rng;
            self.outlooks.fails(now, there, |pause| spread(rng, pause));
        }
    }

    /// CHALLENGE has come on the connection of a trial: the flow moves to it.
    pub(super) fn on_trial_challenge(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        parsed: &Parsed<'_>,
        challenge: &Challenge,
    ) {
        let flow = self.flows.get(&token);
        let peer = flow.and_then(|flow| flow.peer_id());
        let genuine = verify_with_job(self.config.job_key.as_ref(), parsed);
        if !genuine || peer != Some(challenge.endpoint) {
            self.drop_one();
            return self.trial_failed(now, token);
        }
        if !self.may_move(token) {
            return self.end_trial(now, token);
        }
        let Some(failback) = self.failbacks.get_mut(&token) else {
            return;
        };
        let Some(trial) = failback.trial.take() else {
            return;
        };
        let to = trial.path.to;
        failback.moves = Some(to);
        self.timers.clear(TimerOwner::Failback(token));
        let took = now.since(trial.asked);
        self.trials.answered(now, to, Some(took));
        self.locator_works(now, token, to);
        self.leave_trials(now, token, to);
        let stage = Stage::Challenged {
            nonce_r: challenge.nonce_r,
        };
        self.conns.insert(conn, Conn::Out { token, stage });
        self.begin_move(now, token, conn, trial.path);
    }

    /// The flow's trial has shown it: the flows that have waited for this try the locator, too.
    fn locator_works(&mut self, now: Time, token: FlowToken, to: Locator) {
        let Some(there) = self.at_peer(token, to) else {
            return;
        };
        self.outlooks.leave(there, token);
        for next in self.outlooks.works(now, there) {
            if let Some(failback) = self.failbacks.get_mut(&next) {
                failback.waits.retain(|other| *other != to);
            }
            self.prefer_later(now, next);
        }
        self.await_outlooks(now);
    }

    /// As after a stall, when CHALLENGE has come: if this connection fails, the attempts go on with other paths.
    fn begin_move(&mut self, now: Time, token: FlowToken, conn: ConnId, path: Path) {
        let mut outage = Outage::new(now, Cause::Stall);
        outage.moves = true;
        let cause = outage.trouble();
        outage.attempts = Some(Attempts {
            n: 0,
            begun: 1,
            turn: 1,
            failures: 0,
            left: None,
            last: Failure::TimedOut,
            path,
            asked: now,
            replaced: 0,
            heard_at: None,
            bad: Vec::new(),
        });
        let flow = self.flow(token);
        flow.outage = Some(Box::new(outage));
        flow.change.outgoing = Some(conn);
        self.emit(token, Event::Suspend { cause });
        self.emit(token, Event::Attempt { n: 1, path });
        self.connection_answered(token);
        let ends = now + self.config.attempt_timeout(0);
        self.timers
            .set(TimerOwner::Flow(token, Timer::Window), ends);
        self.suspend(now, token);
        self.advance(now, token);
    }

    /// The flow has a new transport, of this kind. What it leaves for a kind that is worse has failed, and so has what it has tried to move to.
    pub(super) fn carried_by(&mut self, now: Time, token: FlowToken, kind: TransportKind) {
        let known = self.failbacks.contains_key(&token) || kind != TransportKind::TCP;
        if self.flows[&token].role != Role::Connector || !known {
            return;
        }
        let before = rank(self.own.order(), self.kind_of(token));
        let after = rank(self.own.order(), kind);
        let connected = self.flows[&token].connects_to();
        let connected = connected.filter(|to| to.kind() == kind);
        let failback = self.failbacks.entry(token).or_default();
        failback.kind = kind;
        let moved = failback.moves.take();
        let left = match after > before {
            true => failback.at.take(),
            false => None,
        };
        if after < before {
            failback.at = connected;
        }
        let missed = moved.filter(|to| to.kind() != kind);
        for to in [left, missed].into_iter().flatten() {
            self.locator_failed(now, token, to);
        }
        if after >= before {
            for path in self.preferred_paths(token) {
                if let Some(there) = self.at_peer(token, path.to) {
                    self.outlooks.postpone(now, there);
                }
            }
        }
        self.await_outlooks(now);
    }

    /// The process has told other locators: those of its flows that prefer one of them.
    pub(super) fn locators_told(&mut self, now: Time, peer: EndpointId) {
        let flows = self.flows.values();
        let of_peer = flows.filter(|flow| flow.peer_id() == Some(peer));
        let of_peer: Vec<FlowToken> = of_peer.map(|flow| flow.token).collect();
        for token in of_peer {
            self.prefer_later(now, token);
        }
    }
}
