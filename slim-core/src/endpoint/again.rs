//! Connections with the addresses and ports of an earlier one: `docs/PROTOCOL.md`, section "Addresses used again".
//!
//! Until a flow is agreed on, a connection has no name but its addresses, so what is said for one can be taken for what
//! is said for the next.

use std::net::SocketAddr;
use std::time::Duration;

use super::candidates::Candidate;
use super::close::Tomb;
use super::ends::Ends;
use super::flow::State;
use super::pairs::Arrival;
use super::pending::{Request, WaitingRequest};
use super::record::FlowRecord;
use super::{Endpoint, plain};
use crate::addr::on_link_of;
use crate::event::{Event, LegacyReason};
use crate::ids::{FlowToken, Role, Time};
use crate::wire::{self, FlowStatus, HelloDone, Message};

/// A connection that was accepted, and whose addresses another one may have by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// Its flow, while that negotiates; if there is none, the connection has ended without a HELLO.
    pub flow: Option<FlowToken>,
    /// Our end, their end.
    pub ends: (SocketAddr, SocketAddr),
    /// The kernel's number of it, if that was [told](Endpoint::numbered).
    pub connection: Option<u64>,
    /// The HELLO is named as one of several connections with these addresses.
    pub named_again: bool,
    /// The connection has no flow any more, and was thrown away: there is nothing to be told of its end.
    pub thrown_away: bool,
}

/// For how long HELLO may be at the acceptor before its connection stands there: a connector that does not wait for the
/// connection sends both at once. One that is earlier still is repeated, for its SYN was lost.
const EARLY: Duration = Duration::from_millis(500);

impl Endpoint {
    /// A connection is about to be made that has these addresses, so every earlier one is over. To be called before the peer
    /// can see anything of it.
    pub fn about_to_connect(&mut self, now: Time, local: SocketAddr, remote: SocketAddr) {
        let (local, remote) = (plain(local), plain(remote));
        if !local.ip().is_unspecified() {
            return self.supersede(now, &Ends::new(local, remote));
        }
        // The kernel is still to choose the address.
        let fits = |ends: &&Ends| ends.remote() == remote && ends.local().port() == local.port();
        let mut all: Vec<Ends> = self.dialling.keys().filter(fits).cloned().collect();
        all.extend(self.late.asked_ends().filter(fits).cloned());
        for ends in all {
            self.supersede(now, &ends);
        }
    }

    /// A new connector's flow. An earlier one that had its addresses is over.
    pub(super) fn add_connector(&mut self, now: Time, token: FlowToken, ends: Ends) {
        let again = self.is_again(now, &ends);
        self.supersede(now, &ends);
        self.dialling.insert(ends.clone(), token);
        let mut flow = FlowRecord::new(now, token, Role::Connector, ends);
        flow.again = again;
        self.flows.insert(token, Box::new(flow));
    }

    /// Connector: whether the acceptor may still have an earlier connection with these addresses of which it knows nothing.
    fn is_again(&self, now: Time, ends: &Ends) -> bool {
        self.dialling.contains_key(ends) || self.late.was_unmet(now, ends)
    }

    /// Connector: a connection stands that has these addresses, so every earlier one is over. An acceptor that answers the
    /// HELLO of an earlier one now may have the new one in mind, and must not get a word under that key.
    pub(super) fn supersede(&mut self, now: Time, ends: &Ends) {
        self.late.supersede(now, ends);
        let Some(earlier) = self.dialling.remove(ends) else {
            return;
        };
        let Some(flow) = self.flows.get_mut(&earlier) else {
            return;
        };
        if flow.ends != *ends || flow.peer.is_some() {
            return;
        }
        if let Some(asking) = flow.hello.take() {
            self.by_id.remove(&(asking.hello.flow, Role::Connector));
        }
        if flow.state() != State::Negotiating {
            return;
        }
        self.timers.clear_flow(earlier);
        self.hello_over(now, earlier);
        let candidates = self.take_candidates(earlier);
        let flow = self.flow(earlier);
        let outage = flow.outage.take();
        let status = match (flow.status(), flow.fin) {
            (FlowStatus::Closed(end) | FlowStatus::HalfClosed(end), _) => FlowStatus::Closed(end),
            _ => FlowStatus::Legacy,
        };
        flow.go(State::Legacy);
        for Candidate { id, peer, .. } in candidates {
            // It was said OPEN to, which names this connection and no other.
            self.tombs
                .put(now, (id, Role::Connector), Tomb { peer, status });
        }
        let reason = LegacyReason::NoAnswer;
        self.emit(earlier, Event::Legacy { reason });
        match outage {
            Some(outage) if outage.errno.is_none() => self.reinstate_legacy(earlier),
            Some(outage) => self.escalate_quietly(now, earlier, outage.verdict()),
            None => self.push_plain(earlier),
        }
    }

    /// Acceptor: the connection that we know at the addresses which a HELLO names, if HELLO may be of a later one with these
    /// addresses. If it is: see [`leave_addresses`](Self::leave_addresses).
    pub fn may_be_of_later(&self, now: Time, from: SocketAddr, data: &[u8]) -> Option<Earlier> {
        let parsed = wire::parse(data).ok()?;
        let (flow, acceptor, connector) = match &parsed.message {
            Message::Hello(hello) | Message::HelloDone(HelloDone(hello)) => {
                (hello.flow, hello.acceptor, hello.connector)
            }
            _ => return None,
        };
        let ends = Ends::new(on_link_of(acceptor, from), on_link_of(connector, from));
        let token = self.negotiates_with(&ends);
        let connection = match token {
            Some(token) => self.numbers.get(&token).copied(),
            None if self.by_ends.contains_key(&ends) => return None,
            None => self.ended_unasked(now, &ends)?,
        };
        Some(Earlier {
            flow: token,
            ends: ends.both(),
            connection,
            named_again: flow.is_again(),
            thrown_away: token.is_none() && self.was_thrown_away(now, &ends),
        })
    }

    fn negotiates_with(&self, ends: &Ends) -> Option<FlowToken> {
        let token = *self.by_ends.get(ends)?;
        (self.flows[&token].state() == State::Negotiating).then_some(token)
    }

    /// Acceptor: whether HELLO waits for the connection with these addresses that is about to be opened, or for a later one.
    pub fn is_awaited_again(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.pending.has_again((plain(local), plain(remote)))
    }

    /// Acceptor: whether anything waits for the connection with these addresses.
    pub fn is_awaited(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.pending.has((plain(local), plain(remote)))
    }

    /// Acceptor: the connection with these addresses, which is about to be opened or is claimed by another process, has
    /// stood for `age`. What came long before it was of an earlier one.
    pub fn has_stood(
        &mut self,
        now: Time,
        (local, remote): (SocketAddr, SocketAddr),
        age: Duration,
    ) {
        let tuple = (plain(local), plain(remote));
        self.pending
            .forget_older(now, tuple, age.saturating_add(EARLY));
    }

    /// The kernel has given the connection up, and a later one may have its addresses. What is said for these from now
    /// on is not for it.
    pub fn leave_addresses(&mut self, earlier: &Earlier) {
        let ends = Ends::new(earlier.ends.0, earlier.ends.1);
        match earlier.flow {
            Some(token) if self.by_ends.get(&ends) == Some(&token) => {
                self.by_ends.remove(&ends);
            }
            Some(_) => {}
            None => self.met_again(&ends),
        }
    }

    /// The kernel's number of an accepted flow's connection, which no other connection gets.
    pub fn numbered(&mut self, token: FlowToken, connection: u64) {
        if self.state(token) == Some(State::Negotiating) {
            self.numbers.insert(token, connection);
        }
    }

    /// As [`open`](Self::open), of an accepted connection that the kernel has given up, where what waits for its addresses
    /// [may be for a later one](Self::is_awaited_again).
    pub fn open_over(
        &mut self,
        now: Time,
        token: FlowToken,
        local: SocketAddr,
        remote: SocketAddr,
    ) {
        let ends = Ends::new(plain(local), plain(remote));
        let mut flow = FlowRecord::new(now, token, Role::Acceptor, ends);
        flow.go(State::Legacy);
        self.flows.insert(token, Box::new(flow));
        let reason = LegacyReason::NoAnswer;
        self.emit(token, Event::Legacy { reason });
        // It is over: nothing is left that could be refused.
        self.push_plain(token);
    }

    /// The flow does not negotiate any more.
    pub(super) fn not_dialling(&mut self, ends: &Ends, token: FlowToken) {
        if self.dialling.get(ends) == Some(&token) {
            self.dialling.remove(ends);
        }
    }

    /// Acceptor: an OPEN has come for a connection that is not, or not any more, or is an earlier one with the same addresses.
    pub(super) fn keep_open(&mut self, now: Time, arrival: Arrival) {
        let (acceptor, connector) = arrival.ends.both();
        let known = self.by_ends.contains_key(&arrival.ends);
        let late = (!known).then(|| self.ended_before(now, &arrival.ends, arrival.flow));
        if let Some(status) = late.flatten() {
            let name = (arrival.flow, Role::Acceptor);
            let peer = arrival.into_peer();
            let tomb = Tomb { peer, status };
            self.announce_final_status(name, &tomb, connector.ip());
            return self.tombs.put(now, name, tomb);
        }
        let waiting = WaitingRequest {
            at: now,
            request: Request::Open(Box::new(arrival)),
            from: connector,
            local: acceptor,
        };
        self.pending.put(now, (acceptor, connector), waiting);
    }
}
