//! Held flows: `docs/PROTOCOL.md`, section "Held flows".
//!
//! All attempts to resume a flow have failed, the peer process is not known to be gone, and the user wants to hold on (`SLIM_HOLD`). The flow
//! then *rests*: nothing happens until the peer is heard. All resting flows share one timer, which fires once a minute at most (more often in a
//! hold of less than four minutes). Each time, one round of QUERYs goes to all known addresses of the peers, about one flow of each. A second
//! after the last round of a flow it fires once more, and the flow is given up. An answer starts the attempts anew, for all flows with that
//! process. So do a QUERY or RESUME of the peer. A round is also sent when the own addresses have changed.
//!
//! If both hosts have changed all their addresses, neither QUERY arrives. So each round also tells a meeting point (`SLIM_MEET`) where this
//! process is, and asks where the peers are (`meet.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::flow::State;
use super::outage::HoldState;
use super::record::{Bar, QueryPurpose};
use super::timer::TimerOwner;
use super::{Action, Endpoint};
use crate::auth::Fresh;
use crate::event::{EscalateReason, Event};
use crate::ids::{Cause, EndpointId, FlowToken, Nonce, Time};
use crate::wire::{Message, Query};

/// Shortest time between two expiries of the timer, unless the hold is so short that fewer than [`FEWEST_ROUNDS`] would fit in.
pub const HOLD_ROUNDS: Duration = Duration::from_secs(60);
/// A hold has at least so many parts, each of which ends in a round.
const FEWEST_ROUNDS: u32 = 4;
/// The timer does not fire more often than this in the shortest hold, either.
const SHORTEST_ROUND: Duration = Duration::from_secs(1);
/// Up to this part of the time is added at random, so that processes that lost the same peer together do not ask together.
const SPREAD: u32 = 20;
/// The peer may take so long to answer the last round.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// An address that has just come may not be usable yet: the next round comes this long after it, if that many seconds have passed since the
/// timer last fired.
const SETTLING: Duration = Duration::from_secs(3);

/// What is kept for all held flows together.
#[derive(Default)]
pub(super) struct Holds {
    /// When the timer last fired for a round.
    fired: Option<Time>,
    /// The last round of QUERYs.
    asked: BTreeMap<EndpointId, HoldRound>,
    /// When a QUERY of a process last started attempts.
    woken: BTreeMap<EndpointId, Time>,
    /// How often the own addresses have changed.
    pub(super) moves: u32,
    /// Serial number of the own place that the meeting point has confirmed.
    pub(super) told: u64,
    /// The newest place that the meeting point has told of each process.
    pub(super) places: BTreeMap<EndpointId, u64>,
}

/// The QUERYs of a round to one process. The nonce of the one to address `n` is `base + n`.
struct HoldRound {
    at: Time,
    token: FlowToken,
    base: Nonce,
    to: Vec<SocketAddr>,
}

impl Holds {
    pub(super) fn len(&self) -> usize {
        self.asked.len() + self.woken.len() + self.places.len()
    }
}

impl Endpoint {
    /// Whether the flow rests: nothing is done for it until the peer is heard, or the timer fires.
    pub fn is_held(&self, token: FlowToken) -> bool {
        let outage = self.flows.get(&token).and_then(|flow| flow.outage.as_ref());
        outage.is_some_and(|outage| outage.rests())
    }

    /// When the timer of the held flows fires, if there is one.
    pub fn hold_timer(&self) -> Option<Time> {
        self.timers.get(TimerOwner::Hold)
    }

    /// The bytes of a held flow have moved on its old transport, which had only stalled: the flow is not held any more.
    pub fn moves_on(&mut self, now: Time, token: FlowToken) {
        if self.is_held(token) && self.state(token) == Some(State::Live) {
            self.end_stall(now, token);
        }
    }

    /// Forgets what no held flow needs.
    pub(super) fn forget_holds(&mut self) {
        if self.holds.len() == 0 && self.hold_timer().is_none() {
            return;
        }
        if self.held().is_empty() && !self.is_to_be_told() {
            self.timers.clear(TimerOwner::Hold);
            self.holds.asked.clear();
            self.holds.woken.clear();
        }
        let peers = self.flows.values().filter_map(|flow| flow.peer_id());
        let peers: BTreeSet<EndpointId> = peers.collect();
        self.holds.places.retain(|peer, _| peers.contains(peer));
    }

    pub(super) fn held(&self) -> Vec<FlowToken> {
        let held = self.flows.iter().filter(|(_, flow)| {
            let outage = flow.outage.as_ref();
            outage.is_some_and(|outage| outage.rests())
        });
        held.map(|(token, _)| *token).collect()
    }

    /// The attempts have failed. True if the flow rests from now on instead of being given up.
    pub(super) fn hold(&mut self, now: Time, token: FlowToken) -> bool {
        let Some(limit) = self.config.hold else {
            return false;
        };
        let flow = &self.flows[&token];
        let stranger = flow.peer_id().is_none_or(|peer| peer == self.id);
        if stranger || self.is_fenced() || flow.change.pump.is_some() {
            return false;
        }
        let Some(outage) = &flow.outage else {
            return false;
        };
        let until = outage.hold.map_or(now + limit, |hold| hold.until);
        if until <= now {
            return false;
        }
        self.report(token);
        self.drop_outgoing(now, token);
        self.drop_query(token);
        if let Some(conn) = self.flow(token).change.accepted.take() {
            self.close_conn(conn);
        }
        self.timers.clear_flow(token);
        if let Some(outage) = &mut self.flow(token).outage {
            outage.attempts = None;
            outage.via = None;
            let last = outage.hold.is_some_and(|hold| hold.last);
            outage.hold = Some(HoldState {
                until,
                rests: true,
                last,
            });
        }
        self.update_state(token);
        self.emit(token, Event::Hold);
        self.arm_hold(now);
        true
    }

    /// The earliest `until` of the flows that rest: of those that have had their last round (`last`), or of the others.
    fn first_until(&self, last: bool) -> Option<Time> {
        let untils = self.flows.values().filter_map(|flow| {
            let hold = flow.outage.as_ref()?.hold?;
            (hold.rests && hold.last == last).then_some(hold.until)
        });
        untils.min()
    }

    /// Sets the timer, unless it is set for an earlier time.
    fn arm_hold(&mut self, now: Time) {
        // A flow that has had its last round does not wait for the next one.
        if let Some(at) = self.first_until(true)
            && self.hold_timer().is_none_or(|set| at < set)
        {
            return self.timers.set(TimerOwner::Hold, at);
        }
        if self.hold_timer().is_some() {
            return;
        }
        let first = self.first_until(false);
        if first.is_none() && !self.is_to_be_told() {
            return;
        }
        // A process that only tells where it is has time.
        let rounds = match first {
            Some(_) => self.hold_rounds(),
            None => HOLD_ROUNDS,
        };
        let spread = Duration::from_micros(self.rng.up_to((rounds / SPREAD).as_micros() as u64));
        let round = now + rounds + spread;
        let at = first.map_or(round, |first| round.min(first));
        let at = at.max(self.fires_from(now));
        self.timers.set(TimerOwner::Hold, at);
    }

    /// The earliest time at which the timer may fire again.
    fn fires_from(&self, now: Time) -> Time {
        self.holds
            .fired
            .map_or(now, |fired| (fired + self.hold_rounds()).max(now))
    }

    /// Shortest time between two expiries of the timer.
    fn hold_rounds(&self) -> Duration {
        let short = self
            .config
            .hold
            .map_or(HOLD_ROUNDS, |hold| hold / FEWEST_ROUNDS);
        short.clamp(SHORTEST_ROUND, HOLD_ROUNDS)
    }

    pub(super) fn on_hold_timer(&mut self, now: Time) {
        // If no round is due, the timer has fired only for flows that have had their last one.
        let round = self.fires_from(now) == now;
        for token in self.held() {
            let flow = self.flow(token);
            let hold = flow.outage.as_mut().and_then(|o| o.hold.as_mut());
            let Some(hold) = hold.filter(|hold| hold.until <= now) else {
                continue;
            };
            if hold.last {
                self.hold_over(now, token);
            } else if round {
                hold.last = true;
                hold.until = now + LAST_ANSWER;
            }
        }
        if round {
            self.holds.fired = Some(now);
            self.hold_round(now);
        }
        self.arm_hold(now);
    }

    /// The flow has been held for as long as the user wants.
    fn hold_over(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        if let Some(hold) = flow.outage.as_mut().and_then(|o| o.hold.as_mut()) {
            hold.rests = false;
        }
        match flow.state() {
            // The kernel has reported no fault: the old transport is still in use.
            State::Live => self.end_stall(now, token),
            _ => self.give_up(now, token, EscalateReason::Attempts),
        }
    }

    /// The own addresses have changed: the peers may be in reach again, and must learn where this process is.
    pub(super) fn addresses_moved(&mut self, now: Time) {
        self.holds.moves += 1;
        if self.held().is_empty() && !self.is_to_be_told() {
            return;
        }
        self.hold_round(now);
        let at = (now + SETTLING).max(self.fires_from(now));
        if self.hold_timer().is_none_or(|set| at < set) {
            self.timers.set(TimerOwner::Hold, at);
        }
    }

    /// Asks all processes that held flows lead to, once at each of their addresses.
    fn hold_round(&mut self, now: Time) {
        self.holds.asked.clear();
        let mut asked: BTreeMap<EndpointId, FlowToken> = BTreeMap::new();
        for token in self.held() {
            // A transport that only stalls may have moved on.
            if self.state(token) == Some(State::Live) {
                self.out.push(Action::Look { token });
            }
            if let Some(peer) = self.flows[&token].peer_id() {
                asked.entry(peer).or_insert(token);
            }
        }
        self.holds
            .woken
            .retain(|_, woken| now.since(*woken) < HOLD_ROUNDS);
        for (peer, token) in asked {
            self.ask_held(now, peer, token);
            self.ask_where(peer);
        }
        if self.is_to_be_told() {
            self.ask_where(self.id);
        }
    }

    /// Sends QUERY about a held flow to all addresses of its peer.
    pub(super) fn ask_held(&mut self, now: Time, peer: EndpointId, token: FlowToken) {
        let base = self.rng.nonce();
        let to = self.addresses_of_peer(token);
        for (n, to) in to.iter().enumerate() {
            let message = Message::Query(Query {
                flow: self.flows[&token].name(),
                nonce: base.plus(n as u32),
            });
            let data = self.seal(token, Fresh::None, &message);
            let from = self.own_end(token, *to);
            self.out.datagram(*to, from, data);
        }
        let round = HoldRound {
            at: now,
            token,
            base,
            to,
        };
        self.holds.asked.insert(peer, round);
    }

    /// The peer has answered, which the caller has verified. True if that is an answer to a round.
    pub(super) fn hold_answered(&mut self, now: Time, peer: EndpointId, nonce: Nonce) -> bool {
        let Some(round) = self.holds.asked.get(&peer) else {
            return false;
        };
        let n = nonce.after(round.base);
        let Some(to) = n.and_then(|n| round.to.get(n as usize)) else {
            return false;
        };
        let via = to.ip();
        self.holds.asked.remove(&peer);
        self.wake_held(now, peer, Some(via));
        true
    }

    /// A host has refused a QUERY of a round: the process there may be gone.
    pub(super) fn hold_refused(&mut self, now: Time, to: SocketAddr) {
        let refused = self.holds.asked.iter().filter(|(_, r)| r.to.contains(&to));
        let refused: Vec<(EndpointId, FlowToken)> =
            refused.map(|(peer, round)| (*peer, round.token)).collect();
        for (peer, token) in refused {
            self.holds.asked.remove(&peer);
            if self.is_held(token) {
                self.ask(now, token, QueryPurpose::Death);
            }
        }
    }

    /// The process has sent a QUERY about this flow, from `from`. It may be a recorded one, so it counts once a minute.
    pub(super) fn held_asked(&mut self, now: Time, token: FlowToken, from: IpAddr) {
        let Some(peer) = self.flows[&token].peer_id() else {
            return;
        };
        let woken = self.holds.woken.get(&peer);
        if !self.is_held(token) || woken.is_some_and(|woken| now.since(*woken) < HOLD_ROUNDS) {
            return;
        }
        self.holds.woken.insert(peer, now);
        self.wake_held(now, peer, Some(from));
    }

    /// The process is there: attempts for all held flows to it.
    fn wake_held(&mut self, now: Time, peer: EndpointId, via: Option<IpAddr>) {
        for token in self.held() {
            let flow = self.flow(token);
            if flow.peer_id() != Some(peer) {
                continue;
            }
            if let Some(outage) = &mut flow.outage {
                outage.via = via;
            }
            self.start_attempts(now, token);
        }
    }

    /// The kernel has reported an error of a held flow's transport, which had only stalled: mostly because the network is away, which is why
    /// the flow is held. It stays held, and the peer is asked at once. False if something else is to be done.
    pub(super) fn stays_held(&mut self, now: Time, token: FlowToken, cause: Cause) -> bool {
        let Cause::Errno(errno) = cause else {
            return false;
        };
        let flow = self.flow(token);
        let (Some(peer), None) = (flow.peer_id(), flow.peer_fin) else {
            return false;
        };
        if !self.is_held(token) {
            return false;
        }
        let flow = self.flow(token);
        flow.bar = Bar::Shut;
        if let Some(outage) = &mut flow.outage {
            outage.cause = cause;
            outage.errno = Some(errno);
        }
        self.suspend(now, token);
        self.timers.clear_flow(token);
        // The kernel reports it of all flows to that process, one after the other.
        let asked = self.holds.asked.get(&peer);
        if asked.is_none_or(|round| now.since(round.at) >= SETTLING) {
            self.ask_held(now, peer, token);
        }
        true
    }

    /// The old transport is used further: it had only stalled.
    pub(super) fn end_stall(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        flow.outage = None;
        flow.query = None;
        self.timers.clear_flow(token);
        self.prefer_later(now, token);
    }
}
