//! Connections with the addresses and ports of an earlier one: `docs/PROTOCOL.md`, section "Addresses used again".
//!
//! Until a flow is agreed on, a connection has no name but its addresses, so what is said for one can be taken for what
//! is said for the next.

use std::net::SocketAddr;

use super::candidates::Candidate;
use super::close::Tomb;
use super::ends::Ends;
use super::flow::State;
use super::pairs::Arrival;
use super::pending::{Request, Waiting};
use super::record::{Flow, Peer};
use super::{Endpoint, plain};
use crate::addr::on_link_of;
use crate::event::{Event, LegacyReason};
use crate::ids::{FlowToken, Role, Time};
use crate::wire::{self, FlowStatus, HelloDone, Message};

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
        let mut flow = Flow::new(now, token, Role::Connector, ends);
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

    /// Acceptor: the flow that negotiates at the addresses which this message names, if the message is of a connection that may
    /// be a later one with these addresses: see [`leave_addresses`](Self::leave_addresses).
    pub fn may_be_of_later(&self, from: SocketAddr, data: &[u8]) -> Option<FlowToken> {
        let parsed = wire::parse(data).ok()?;
        let (flow, acceptor, connector) = match &parsed.message {
            Message::Hello(hello) | Message::HelloDone(HelloDone(hello)) => {
                (hello.flow, hello.acceptor, hello.connector)
            }
            _ => return None,
        };
        flow.is_again()
            .then(|| {
                self.negotiates_with(&Ends::new(
                    on_link_of(acceptor, from),
                    on_link_of(connector, from),
                ))
            })
            .flatten()
    }

    fn negotiates_with(&self, ends: &Ends) -> Option<FlowToken> {
        let token = *self.by_ends.get(ends)?;
        (self.flows[&token].state() == State::Negotiating).then_some(token)
    }

    /// Acceptor: whether HELLO waits for the connection with these addresses that is about to be opened, or for a later one.
    pub fn is_awaited_again(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.pending.has_again((plain(local), plain(remote)))
    }

    /// The kernel has given the flow's connection up, so a later one may have its addresses. What is said for these from now
    /// on is not for this flow.
    pub fn leave_addresses(&mut self, token: FlowToken) {
        if let Some(flow) = self.flows.get(&token)
            && self.by_ends.get(&flow.ends) == Some(&token)
        {
            self.by_ends.remove(&flow.ends);
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
        let flow = Flow::new(now, token, Role::Acceptor, ends);
        self.flows.insert(token, Box::new(flow));
        self.become_legacy(now, token, LegacyReason::NoAnswer);
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
            let peer = Peer::of_open(arrival);
            let tomb = Tomb { peer, status };
            self.tell_how_it_ended(name, &tomb, connector.ip());
            return self.tombs.put(now, name, tomb);
        }
        let waiting = Waiting {
            request: Request::Open(Box::new(arrival)),
            from: connector,
            local: acceptor,
        };
        self.pending.put(now, (acceptor, connector), waiting);
    }
}
