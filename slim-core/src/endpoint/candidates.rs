//! Who may be at the other end of a connection: `docs/PROTOCOL.md`, sections "Negotiation" and "Pairs".
//!
//! A HELLO proves nothing: its source address can be forged, and it names only what can be guessed.
//! So each HELLO for a connection makes a *candidate*, which gets its own HELLO_ACK and has its own
//! key. The flow belongs to the candidate that says something under its key, because only the
//! receiver of HELLO_ACK can compute that. Until then the flow negotiates.
//!
//! A connector that has said OPEN has a candidate, too: the process that it knows at that address. If that turns out not
//! to have the connection, the connector says HELLO.

use std::net::SocketAddr;
use std::time::Duration;

use super::flow::State;
use super::record::Peer;
use super::timer::{Timer, TimerOwner};
use super::{Endpoint, plain};
use crate::addr::at_port;
use crate::auth::Fresh;
use crate::event::LegacyReason;
use crate::ids::{Counted, FinHow, FlowId, FlowToken, Nonce, Role, Time, take};
use crate::wire::{Message, Parsed, Query, Unknown};

/// Candidates of one connection. A further one takes the place of the oldest; if that asks again,
/// it gets the same key as before.
pub(super) const CANDIDATES: usize = 4;
/// First wait for a word under the key; doubles each time. A round trip is usually shorter.
const PATIENCE: Duration = Duration::from_millis(200);
/// The same once the connection has failed.
const HURRY: Duration = Duration::from_millis(50);
/// Longest wait.
const PATIENCE_MAX: Duration = Duration::from_secs(1);
/// After as many QUERYs of a connector it says HELLO, too: the acceptor waits for that if it knows nothing of the OPEN.
const QUERIES_OF_CONNECTOR: u32 = 2;
/// QUERYs to one candidate, and as many once the connection has failed.
const QUERIES: u32 = 5;

/// Somebody who has said HELLO for a connection.
pub(super) struct Candidate {
    pub(super) id: FlowId,
    pub(super) peer: Peer,
    nonce: Nonce,
    asked: u32,
}

impl Candidate {
    /// Where control messages for it go, if it has the address `remote` is at.
    fn control(&self, remote: SocketAddr) -> SocketAddr {
        at_port(remote, self.peer.process.control_port)
    }
}

/// The candidates of one flow, oldest first.
#[derive(Default)]
struct Few {
    known: Vec<Candidate>,
    /// There were more, and one of those may be the peer.
    forgotten: bool,
}

/// The candidates of all flows that have any.
#[derive(Default)]
pub(super) struct Candidates {
    of: Counted<FlowToken, Few>,
}

impl Candidates {
    pub(super) fn any(&self, token: FlowToken) -> bool {
        self.of.contains_key(&token)
    }

    pub(super) fn named(&self, token: FlowToken, id: FlowId) -> Option<&Candidate> {
        let few = self.of.get(&token)?;
        few.known.iter().find(|known| known.id == id)
    }

    /// A flow that is not known may be one whose HELLO was pushed out by others.
    pub(super) fn may_have_been(&self) -> bool {
        self.of.values().any(|few| few.forgotten)
    }

    /// Whether this flow had more of them.
    pub(super) fn were_more(&self, token: FlowToken) -> bool {
        self.of.get(&token).is_some_and(|few| few.forgotten)
    }

    /// None is known any more of this flow; those that were.
    fn remove(&mut self, token: FlowToken) -> Option<Few> {
        take(&mut self.of, token)
    }

    /// How many flows have any.
    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    #[cfg(test)]
    pub(super) fn count(&self, token: FlowToken) -> usize {
        self.of.get(&token).map_or(0, |few| few.known.len())
    }
}

impl Endpoint {
    /// Somebody else has said HELLO for the connection.
    pub(super) fn add_candidate(&mut self, now: Time, token: FlowToken, id: FlowId, peer: Peer) {
        let nonce = self.rng.nonce();
        let role = self.flow(token).role;
        let few = self.candidates.of.entry(token).or_default();
        if few.known.len() >= CANDIDATES {
            let oldest = few.known.remove(0);
            few.forgotten = true;
            self.by_id.remove(&(oldest.id, role));
        }
        // There is hardly ever more than one.
        few.known.reserve_exact(1);
        few.known.push(Candidate {
            id,
            peer,
            nonce,
            asked: 0,
        });
        self.by_id.insert((id, role), token);
        let timer = TimerOwner::Flow(token, Timer::Hello);
        if self.timers.get(timer).is_none() {
            let failed = self.flow(token).outage.is_some();
            let wait = if failed { HURRY } else { PATIENCE };
            self.timers.set(timer, now + wait);
        }
    }

    /// The connection has failed: each candidate is asked at once, whether it was asked before or not.
    pub(super) fn hurry_candidates(&mut self, now: Time, token: FlowToken) {
        if let Some(few) = self.candidates.of.get_mut(&token) {
            few.known.iter_mut().for_each(|known| known.asked = 0);
            self.ask_candidates(now, token);
        }
    }

    /// Asks each candidate to say something: HELLO_ACK, or what was said to it, may be lost, or
    /// there is no time to wait. The first time it gets HELLO_ACK again: without that it cannot understand the question,
    /// and if it has closed the connection since, it does not say HELLO again.
    pub(super) fn ask_candidates(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        let (role, (local, remote)) = (flow.role, flow.ends.both());
        let failed = flow.outage.is_some();
        let all = self.candidates.of.get(&token).map(|few| &few.known[..]);
        // Whoever has said OPEN has the key already.
        let by_hello = |c: &&Candidate| role == Role::Acceptor && c.peer.random_s != [0; 32];
        let unasked = all.unwrap_or_default().iter().filter(|c| c.asked == 0);
        let unasked: Vec<_> = unasked
            .filter(by_hello)
            .map(|c| (c.id, c.peer.clone(), c.control(remote)))
            .collect();
        for (id, peer, to) in unasked {
            self.send_ack(id, &peer, to, local);
        }
        let from = self.own_end(token, remote);
        let Some(few) = self.candidates.of.get_mut(&token) else {
            return;
        };
        let hello = role == Role::Connector
            && few
                .known
                .iter()
                .all(|known| known.asked >= QUERIES_OF_CONNECTOR);
        let mut again = None;
        let asked = few.known.iter_mut();
        for candidate in asked.filter(|known| known.asked < QUERIES) {
            let message = Message::Query(Query {
                flow: candidate.id,
                nonce: candidate.nonce,
            });
            let key = &candidate.peer.key;
            let data = key.seal(role, Fresh::None, &message);
            self.out.datagram(candidate.control(remote), from, data);
            candidate.asked += 1;
            let first = if failed { HURRY } else { PATIENCE };
            let wait = PATIENCE_MAX.min(first * (1 << candidate.asked));
            again = Some(again.map_or(wait, |other: Duration| other.min(wait)));
        }
        if let Some(wait) = again {
            let timer = TimerOwner::Flow(token, Timer::Hello);
            self.timers.set(timer, now + wait);
        }
        if hello && self.flow(token).hello.is_none() {
            self.ask_after_all(now, token);
        }
    }

    /// The flow that has a candidate of this name, and our role in it. Both ends may be here.
    fn candidate_of(&self, id: FlowId) -> impl Iterator<Item = (FlowToken, Role)> {
        [Role::Connector, Role::Acceptor]
            .into_iter()
            .filter_map(move |role| {
                let token = *self.by_id.get(&(id, role))?;
                self.candidates.named(token, id)?;
                Some((token, role))
            })
    }

    /// If this was said under the key of a candidate, the flow is its. `end`: what it says
    /// about the end of its stream.
    pub(super) fn prove(
        &mut self,
        now: Time,
        id: FlowId,
        (fresh, parsed): (Fresh, &Parsed<'_>),
        end: Option<(u64, FinHow)>,
    ) {
        let said = self.candidate_of(id).find(|(token, role)| {
            let known = self.candidates.named(*token, id);
            known.is_some_and(|known| known.peer.key.verify(role.other(), fresh, parsed))
        });
        let Some((token, role)) = said else {
            return;
        };
        if let Some(asking) = self.flow(token).hello.take() {
            // Nor is it to be asked any more.
            self.by_id.remove(&(asking.hello.flow, role));
        }
        let few = self.candidates.remove(token).unwrap_or_default();
        for candidate in few.known {
            if candidate.id == id {
                let flow = self.flow(token);
                flow.id = Some(id);
                flow.peer = Some(candidate.peer);
            } else {
                self.by_id.remove(&(candidate.id, role));
            }
        }
        if self.flow(token).state() == State::Negotiating {
            self.become_live(now, token, end);
            self.offer_pair(now, token);
        }
    }

    /// Whether STATUS answers the question that its flow's candidate was asked.
    pub(super) fn answers_candidate(&self, id: FlowId, nonce: Nonce) -> bool {
        let mut known = self.candidate_of(id);
        known.any(|(token, _)| {
            let known = self.candidates.named(token, id);
            known.is_some_and(|known| known.asked > 0 && known.nonce == nonce)
        })
    }

    /// UNKNOWN from a host that was asked about a candidate. True if it was.
    pub(super) fn candidate_unknown(&mut self, now: Time, unknown: &Unknown) -> bool {
        let mut known = self.candidate_of(unknown.flow);
        // Who else it is does not matter: nobody would be heard who can be asked there.
        let asked = known.find(|(token, _)| {
            let known = self.candidates.named(*token, unknown.flow);
            known.is_some_and(|known| known.nonce == unknown.nonce)
        });
        let Some((token, _)) = asked else {
            return false;
        };
        drop(known);
        self.drop_candidate(now, token, unknown.flow);
        true
    }

    /// The host at `to` says that nobody listens where the message about the flow `id` was sent.
    pub(super) fn candidate_refused(&mut self, now: Time, to: SocketAddr, id: FlowId) {
        let refused = self.candidate_of(id).find(|(token, _)| {
            let remote = self.flows[token].ends.remote();
            let known = self.candidates.named(*token, id);
            known.is_some_and(|known| plain(known.control(remote)) == to)
        });
        if let Some((token, _)) = refused {
            self.drop_candidate(now, token, id);
        }
    }

    /// Nobody is behind this candidate any more. A connection that has failed need not wait for it.
    fn drop_candidate(&mut self, now: Time, token: FlowToken, id: FlowId) {
        let role = self.flow(token).role;
        self.by_id.remove(&(id, role));
        if let Some(few) = self.candidates.of.get_mut(&token) {
            few.known.retain(|known| known.id != id);
            if few.known.is_empty() {
                self.candidates.remove(token);
                let flow = &self.flows[&token];
                if flow.hello.is_some() {
                    return;
                }
                self.timers.clear(TimerOwner::Flow(token, Timer::Hello));
                if flow.state() == State::Negotiating && role == Role::Connector {
                    self.ask_after_all(now, token);
                } else if flow.state() == State::Negotiating && flow.outage.is_some() {
                    self.become_legacy(now, token, LegacyReason::NoAnswer);
                }
            }
        }
    }

    /// The flow is over, or plain TCP: its candidates are forgotten.
    pub(super) fn take_candidates(&mut self, token: FlowToken) -> Vec<Candidate> {
        let Some(few) = self.candidates.remove(token) else {
            return Vec::new();
        };
        let role = self.flow(token).role;
        for candidate in &few.known {
            self.by_id.remove(&(candidate.id, role));
        }
        few.known
    }

    /// Says to every candidate, or to the one that is named, what `message` makes of its name.
    pub(super) fn tell_candidates(
        &mut self,
        token: FlowToken,
        only: Option<FlowId>,
        message: impl Fn(FlowId) -> Message,
    ) {
        let (role, remote) = {
            let flow = &self.flows[&token];
            (flow.role, flow.ends.remote())
        };
        let from = self.own_end(token, remote);
        let all = self.candidates.of.get(&token).map(|few| &few.known[..]);
        let all = all.unwrap_or_default().iter();
        for candidate in all.filter(|known| only.is_none_or(|id| known.id == id)) {
            let key = &candidate.peer.key;
            let data = key.seal(role, Fresh::None, &message(candidate.id));
            self.out.datagram(candidate.control(remote), from, data);
        }
    }
}
