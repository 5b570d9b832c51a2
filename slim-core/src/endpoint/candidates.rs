//! Candidates: the processes that may be the peer of a connection. `docs/PROTOCOL.md`, sections "Negotiation" and "Pairs".
//!
//! A HELLO proves nothing: its source address can be forged, and its content can be guessed.
//! So each HELLO for a connection makes a *candidate*, which gets its own HELLO_ACK and has its own
//! key. The flow belongs to the candidate that sends a message under its key, because only the
//! receiver of HELLO_ACK can compute that key. Until then the flow negotiates.
//!
//! A connector that has sent OPEN has a candidate, too: the process that it knows at that address. If that process turns out
//! not to have the connection, the connector sends HELLO.

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

/// Maximum number of candidates of one connection. A further one displaces the oldest that came by HELLO; if that sends HELLO
/// again, it gets the same key as before. One that came by OPEN does not come again, and HELLO can be forged: it is displaced only if all
/// came by OPEN.
pub(super) const CANDIDATES: usize = 4;
/// First wait for a message under the key; doubles each time. A round trip is usually shorter.
const PATIENCE: Duration = Duration::from_millis(200);
/// The same once the connection has failed.
const HURRY: Duration = Duration::from_millis(50);
/// Longest wait.
const PATIENCE_MAX: Duration = Duration::from_secs(1);
/// After this many QUERYs, a connector sends HELLO, too: an acceptor that has not got the OPEN waits for HELLO.
const QUERIES_OF_CONNECTOR: u32 = 2;
/// Number of QUERYs to one candidate. When the connection fails, the count starts anew.
const QUERIES: u32 = 5;

/// A process that may be the peer of a connection.
pub(super) struct Candidate {
    pub(super) id: FlowId,
    pub(super) peer: Peer,
    nonce: Nonce,
    asked: u32,
}

impl Candidate {
    /// Whether it came by OPEN. Only a process that has shown the pair key before can send that.
    fn is_by_open(&self) -> bool {
        self.peer.random_s == [0; 32]
    }

    /// The candidate's control address, at the address of `remote`.
    fn control(&self, remote: SocketAddr) -> SocketAddr {
        at_port(remote, self.peer.process.control_port)
    }
}

/// The candidates of one flow, oldest first.
#[derive(Default)]
struct Few {
    known: Vec<Candidate>,
    /// Other candidates were displaced, and one of them may be the peer.
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

    /// Whether a candidate of any flow was displaced: an unknown flow id may belong to such a candidate.
    pub(super) fn may_have_been(&self) -> bool {
        self.of.values().any(|few| few.forgotten)
    }

    /// Whether a candidate of this flow was displaced.
    pub(super) fn were_more(&self, token: FlowToken) -> bool {
        self.of.get(&token).is_some_and(|few| few.forgotten)
    }

    /// Removes and returns the candidates of a flow.
    fn remove(&mut self, token: FlowToken) -> Option<Few> {
        take(&mut self.of, token)
    }

    /// Number of flows with candidates.
    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    #[cfg(test)]
    pub(super) fn count(&self, token: FlowToken) -> usize {
        self.of.get(&token).map_or(0, |few| few.known.len())
    }
}

impl Endpoint {
    /// Adds a candidate for the connection of a flow.
    pub(super) fn add_candidate(&mut self, now: Time, token: FlowToken, id: FlowId, peer: Peer) {
        let nonce = self.rng.nonce();
        let role = self.flow(token).role;
        let few = self.candidates.of.entry(token).or_default();
        if few.known.len() >= CANDIDATES {
            let by_hello = few.known.iter().position(|known| !known.is_by_open());
            let oldest = few.known.remove(by_hello.unwrap_or(0));
            few.forgotten = true;
            self.by_id.remove(&(oldest.id, role));
        }
        // Most flows have only one candidate, so reserve no more.
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

    /// The connection has failed: all candidates are asked at once, and their QUERYs are counted anew.
    pub(super) fn hurry_candidates(&mut self, now: Time, token: FlowToken) {
        if let Some(few) = self.candidates.of.get_mut(&token) {
            few.known.iter_mut().for_each(|known| known.asked = 0);
            self.ask_candidates(now, token);
        }
    }

    /// Sends QUERY to each candidate, so that it shows its key: HELLO_ACK, or the answer to it, may be lost, or
    /// there is no time to wait. The first QUERY is preceded by HELLO_ACK: without HELLO_ACK the candidate cannot verify QUERY,
    /// and if it has closed the connection since, it does not send HELLO again.
    pub(super) fn ask_candidates(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        let (role, (local, remote)) = (flow.role, flow.ends.both());
        let failed = flow.outage.is_some();
        let all = self.candidates.of.get(&token).map(|few| &few.known[..]);
        // A process that has sent OPEN has the key already.
        let by_hello = |c: &&Candidate| role == Role::Acceptor && !c.is_by_open();
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
            self.negotiate_by_hello(now, token);
        }
    }

    /// The flows that have a candidate with this flow id, and our role in each. Both ends may be in this process.
    fn candidate_of(&self, id: FlowId) -> impl Iterator<Item = (FlowToken, Role)> {
        [Role::Connector, Role::Acceptor]
            .into_iter()
            .filter_map(move |role| {
                let token = *self.by_id.get(&(id, role))?;
                self.candidates.named(token, id)?;
                Some((token, role))
            })
    }

    /// As [`prove`](Self::prove), for a QUERY. A connector asks about its OPEN before it has decided: if HELLO_ACK comes first, the
    /// flow gets the id of that HELLO. So if there are other candidates, a QUERY under the key of an OPEN does not count; its sender is
    /// asked in return, and its STATUS counts.
    pub(super) fn prove_by_query(&mut self, now: Time, id: FlowId, parsed: &Parsed<'_>) {
        let undecided = self.candidate_of(id).find(|(token, role)| {
            let few = &self.candidates.of[token];
            *role == Role::Acceptor
                && (few.known.len() > 1 || few.forgotten)
                && few.known.iter().any(|known| {
                    let key = &known.peer.key;
                    known.id == id
                        && known.is_by_open()
                        && key.verify(role.other(), Fresh::None, parsed)
                })
        });
        match undecided {
            Some((token, _)) => self.hurry_candidates(now, token),
            None => self.prove(now, id, (Fresh::None, parsed), None),
        }
    }

    /// If the message verifies under the key of a candidate, that candidate is the peer and the flow becomes live. `end`: the
    /// end of its stream, if the message says it.
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
            // The peer is known by OPEN, so HELLO needs no answer any more.
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

    /// Whether a STATUS with this nonce answers the QUERY to a candidate.
    pub(super) fn answers_candidate(&self, id: FlowId, nonce: Nonce) -> bool {
        let mut known = self.candidate_of(id);
        known.any(|(token, _)| {
            let known = self.candidates.named(token, id);
            known.is_some_and(|known| known.asked > 0 && known.nonce == nonce)
        })
    }

    /// Handles UNKNOWN if it answers the QUERY to a candidate; false if not.
    pub(super) fn candidate_unknown(&mut self, now: Time, unknown: &Unknown) -> bool {
        let mut known = self.candidate_of(unknown.flow);
        // Which endpoint has answered does not matter: the candidate's control address belongs to a process that does not know
        // the flow.
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

    /// The host at `to` refused a message about the flow `id`: if `to` is the control address of a candidate, it is dropped.
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

    /// The candidate does not exist any more. A flow whose connection has failed does not wait for it.
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
                    self.negotiate_by_hello(now, token);
                } else if flow.state() == State::Negotiating && flow.outage.is_some() {
                    self.become_legacy(now, token, LegacyReason::NoAnswer);
                }
            }
        }
    }

    /// Removes and returns the candidates of a flow that is over, plain TCP, or live.
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

    /// Sends a message to all candidates, or to `only` that one; `message` gets the candidate's flow id.
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
