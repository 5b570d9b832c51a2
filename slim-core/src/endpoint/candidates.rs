//! Who may be at the other end of an accepted connection: `docs/PROTOCOL.md`, section "Negotiation".
//!
//! A HELLO proves nothing: its source address can be forged, and it names only what can be guessed.
//! So each HELLO for a connection makes a *candidate*, which gets its own HELLO_ACK and has its own
//! key. The flow belongs to the candidate that says something under its key, because only the
//! receiver of HELLO_ACK can compute that. Until then the flow negotiates.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::flow::State;
use super::record::Peer;
use super::timer::{Owner, Timer};
use super::{Endpoint, plain};
use crate::addr::at_port;
use crate::auth::Fresh;
use crate::event::LegacyReason;
use crate::ids::{FinHow, FlowId, FlowToken, Nonce, Role, Time};
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
    of: BTreeMap<FlowToken, Few>,
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
        let few = self.candidates.of.entry(token).or_default();
        if few.known.len() >= CANDIDATES {
            let oldest = few.known.remove(0);
            few.forgotten = true;
            self.by_id.remove(&(oldest.id, Role::Acceptor));
        }
        few.known.push(Candidate {
            id,
            peer,
            nonce,
            asked: 0,
        });
        self.by_id.insert((id, Role::Acceptor), token);
        let timer = Owner::Flow(token, Timer::Hello);
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
    /// there is no time to wait.
    pub(super) fn ask_candidates(&mut self, now: Time, token: FlowToken) {
        let (remote, failed) = {
            let flow = &self.flows[&token];
            (flow.ends.remote(), flow.outage.is_some())
        };
        let from = self.own_end(token, remote);
        let Some(few) = self.candidates.of.get_mut(&token) else {
            return;
        };
        let mut again = None;
        let asked = few.known.iter_mut();
        for candidate in asked.filter(|known| known.asked < QUERIES) {
            let message = Message::Query(Query {
                flow: candidate.id,
                nonce: candidate.nonce,
            });
            let key = &candidate.peer.key;
            let data = key.seal(Role::Acceptor, Fresh::None, &message);
            self.out.datagram(candidate.control(remote), from, data);
            candidate.asked += 1;
            let first = if failed { HURRY } else { PATIENCE };
            let wait = PATIENCE_MAX.min(first * (1 << candidate.asked));
            again = Some(again.map_or(wait, |other: Duration| other.min(wait)));
        }
        if let Some(wait) = again {
            let timer = Owner::Flow(token, Timer::Hello);
            self.timers.set(timer, now + wait);
        }
    }

    /// Acceptor: if this was said under the key of a candidate, the flow is its. `end`: what it says
    /// about the end of its stream.
    pub(super) fn prove(
        &mut self,
        now: Time,
        id: FlowId,
        (fresh, parsed): (Fresh, &Parsed<'_>),
        end: Option<(u64, FinHow)>,
    ) {
        let Some(&token) = self.by_id.get(&(id, Role::Acceptor)) else {
            return;
        };
        let Some(candidate) = self.candidates.named(token, id) else {
            return;
        };
        if !candidate.peer.key.verify(Role::Connector, fresh, parsed) {
            return;
        }
        let few = self.candidates.of.remove(&token).unwrap_or_default();
        for candidate in few.known {
            if candidate.id == id {
                let flow = self.flow(token);
                flow.id = Some(id);
                flow.peer = Some(candidate.peer);
            } else {
                self.by_id.remove(&(candidate.id, Role::Acceptor));
            }
        }
        if self.flow(token).state() == State::Negotiating {
            self.become_live(now, token, end);
        }
    }

    /// Whether STATUS answers the question that its flow's candidate was asked.
    pub(super) fn answers_candidate(&self, id: FlowId, nonce: Nonce) -> bool {
        let token = self.by_id.get(&(id, Role::Acceptor));
        let known = token.and_then(|token| self.candidates.named(*token, id));
        known.is_some_and(|known| known.asked > 0 && known.nonce == nonce)
    }

    /// UNKNOWN from a host that was asked about a candidate. True if it was.
    pub(super) fn candidate_unknown(&mut self, now: Time, unknown: &Unknown) -> bool {
        let Some(&token) = self.by_id.get(&(unknown.flow, Role::Acceptor)) else {
            return false;
        };
        let Some(known) = self.candidates.named(token, unknown.flow) else {
            return false;
        };
        // Who else it is does not matter: nobody would be heard who can be asked there.
        if known.nonce != unknown.nonce {
            return false;
        }
        self.drop_candidate(now, token, unknown.flow);
        true
    }

    /// The host at `to` says that nobody listens where the message about the flow `id` was sent.
    pub(super) fn candidate_refused(&mut self, now: Time, to: SocketAddr, id: FlowId) {
        let Some(&token) = self.by_id.get(&(id, Role::Acceptor)) else {
            return;
        };
        let remote = self.flows[&token].ends.remote();
        let known = self.candidates.named(token, id);
        if known.is_some_and(|known| plain(known.control(remote)) == to) {
            self.drop_candidate(now, token, id);
        }
    }

    /// Nobody is behind this candidate any more. A connection that has failed need not wait for it.
    fn drop_candidate(&mut self, now: Time, token: FlowToken, id: FlowId) {
        self.by_id.remove(&(id, Role::Acceptor));
        if let Some(few) = self.candidates.of.get_mut(&token) {
            few.known.retain(|known| known.id != id);
            if few.known.is_empty() {
                self.candidates.of.remove(&token);
                self.timers.clear(Owner::Flow(token, Timer::Hello));
                let flow = &self.flows[&token];
                if flow.state() == State::Negotiating && flow.outage.is_some() {
                    self.become_legacy(now, token, LegacyReason::NoAnswer);
                }
            }
        }
    }

    /// The flow is over, or plain TCP: its candidates are forgotten.
    pub(super) fn take_candidates(&mut self, token: FlowToken) -> Vec<Candidate> {
        let few = self.candidates.of.remove(&token).unwrap_or_default();
        for candidate in &few.known {
            self.by_id.remove(&(candidate.id, Role::Acceptor));
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
        let remote = self.flows[&token].ends.remote();
        let from = self.own_end(token, remote);
        let all = self.candidates.of.get(&token).map(|few| &few.known[..]);
        let all = all.unwrap_or_default().iter();
        for candidate in all.filter(|known| only.is_none_or(|id| known.id == id)) {
            let key = &candidate.peer.key;
            let data = key.seal(Role::Acceptor, Fresh::None, &message(candidate.id));
            self.out.datagram(candidate.control(remote), from, data);
        }
    }
}
