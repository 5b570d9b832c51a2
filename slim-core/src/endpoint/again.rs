//! Connections with the addresses and ports of an earlier one: `docs/PROTOCOL.md`, section "Addresses used again".
//!
//! Until a flow is agreed on, its connection is identified only by its addresses and ports. So a message for one connection can
//! be taken for a message for the next one with the same addresses.

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

/// An accepted connection whose addresses a later connection may have by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Earlier {
    /// Its flow, if that has not met a HELLO yet. `None`: the connection has ended without a HELLO.
    pub flow: Option<FlowToken>,
    /// Local and remote address.
    pub ends: (SocketAddr, SocketAddr),
    /// The kernel's number of the connection, if it was [reported](Endpoint::set_connection_number).
    pub connection: Option<u64>,
    /// The flow id in HELLO says that its addresses were in use before.
    pub reused_addresses: bool,
    /// The connection has no flow any more, and the application did not close it in good order: there is no end to report.
    pub not_closed: bool,
}

/// A connection for which a HELLO was sent, and whose addresses a later connection may have by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acknowledged {
    /// Its flow. `None`: the flow is over.
    pub flow: Option<FlowToken>,
    /// Local and remote address.
    pub ends: (SocketAddr, SocketAddr),
    /// The kernel's number of the connection.
    pub connection: u64,
}

/// How long before its connection is established at the acceptor HELLO may arrive: a connector that does not wait for the
/// connection sends SYN and HELLO at the same time. If HELLO comes still earlier, the SYN was lost, and HELLO is repeated.
const EARLY: Duration = Duration::from_millis(500);

impl Endpoint {
    /// The application is about to make a connection with these addresses, so every earlier one is over. To be called before
    /// the peer can see any packet of the new connection.
    pub fn about_to_connect(&mut self, now: Time, local: SocketAddr, remote: SocketAddr) {
        let (local, remote) = (plain(local), plain(remote));
        if !local.ip().is_unspecified() {
            return self.supersede(now, &Ends::new(local, remote));
        }
        // The kernel has not chosen the local address yet.
        let fits = |ends: &&Ends| ends.remote() == remote && ends.local().port() == local.port();
        let mut all: Vec<Ends> = self.dialling.keys().filter(fits).cloned().collect();
        all.extend(self.late.asked_ends().filter(fits).cloned());
        for ends in all {
            self.supersede(now, &ends);
        }
    }

    /// Adds a connector's flow. An earlier flow with the same addresses is over.
    pub(super) fn add_connector(&mut self, now: Time, token: FlowToken, ends: Ends) {
        let again = self.is_again(now, &ends);
        self.supersede(now, &ends);
        self.dialling.insert(ends.clone(), token);
        let mut flow = FlowRecord::new(now, token, Role::Connector, ends);
        flow.again = again;
        self.flows.insert(token, Box::new(flow));
    }

    /// Connector: whether the acceptor may still hold an earlier connection with these addresses without knowing its flow.
    fn is_again(&self, now: Time, ends: &Ends) -> bool {
        self.dialling.contains_key(ends) || self.late.was_unmet(now, ends)
    }

    /// Connector: a connection with these addresses is made, so every earlier one is over. An acceptor that answers the
    /// HELLO of an earlier one now may take it for the new connection, so it must get no message under the earlier flow's key.
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
            // The candidate has got OPEN, which is for this connection and no other.
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

    /// Acceptor: the connection that is known at the addresses that a HELLO names, if the HELLO may be for a later connection
    /// with these addresses. If the driver finds that it is, it calls [`release_addresses`](Self::release_addresses).
    pub fn may_be_of_later(&self, now: Time, from: SocketAddr, data: &[u8]) -> Option<Earlier> {
        let parsed = wire::parse(data).ok()?;
        let (flow, acceptor, connector) = match &parsed.message {
            Message::Hello(hello) | Message::HelloDone(HelloDone(hello)) => {
                (hello.flow, hello.acceptor, hello.connector)
            }
            _ => return None,
        };
        let ends = Ends::new(on_link_of(acceptor, from), on_link_of(connector, from));
        let token = self.would_answer(&ends);
        let connection = match token {
            Some(token) => self.numbers.get(&token).copied(),
            None if self.by_ends.contains_key(&ends) => return None,
            None => self.ended_unasked(now, &ends)?,
        };
        Some(Earlier {
            flow: token,
            ends: ends.both(),
            connection,
            reused_addresses: flow.is_again(),
            not_closed: token.is_none() && self.was_thrown_away(now, &ends),
        })
    }

    /// The flow that a HELLO for these addresses is taken to be for, and that the HELLO is not refused for.
    fn would_answer(&self, ends: &Ends) -> Option<FlowToken> {
        let token = *self.by_ends.get(ends)?;
        let flow = &self.flows[&token];
        let answers = match flow.state() {
            State::Negotiating => true,
            State::Legacy => flow.final_unasked() != FlowStatus::Legacy,
            _ => false,
        };
        answers.then_some(token)
    }

    /// Acceptor: whether HELLOs wait for the connection with these addresses that is about to be opened, and one of them may be
    /// for a later connection.
    pub fn is_awaited_again(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.pending.has_again((plain(local), plain(remote)))
    }

    /// Acceptor: whether a HELLO or an OPEN waits for the connection with these addresses.
    pub fn is_awaited(&self, local: SocketAddr, remote: SocketAddr) -> bool {
        self.pending.has((plain(local), plain(remote)))
    }

    /// Acceptor: the connection with these addresses, which is about to be opened or is claimed by another process, was
    /// established `age` ago. Forgets requests that came long before that: they were for an earlier connection.
    pub fn note_connection_age(
        &mut self,
        now: Time,
        (local, remote): (SocketAddr, SocketAddr),
        age: Duration,
    ) {
        let tuple = (plain(local), plain(remote));
        self.pending
            .forget_older(now, tuple, age.saturating_add(EARLY));
    }

    /// The kernel has closed the earlier connection, and a later one may have its addresses. From now on, messages for these
    /// addresses are not for the earlier connection.
    pub fn release_addresses(&mut self, earlier: &Earlier) {
        let ends = Ends::new(earlier.ends.0, earlier.ends.1);
        match earlier.flow {
            Some(token) if self.by_ends.get(&ends) == Some(&token) => {
                self.by_ends.remove(&ends);
            }
            Some(_) => {}
            None => self.forget_unasked(&ends),
        }
    }

    /// Connector: the connection that a HELLO_ACK is for, if its number was [reported](Self::set_connection_number) and the flow is not
    /// agreed on yet. If the driver finds that a later connection has the addresses, it calls [`superseded`](Self::superseded).
    pub fn acknowledged(&self, now: Time, data: &[u8]) -> Option<Acknowledged> {
        let Message::HelloAck(ack) = wire::parse(data).ok()?.message else {
            return None;
        };
        let Some(&token) = self.by_id.get(&(ack.flow, Role::Connector)) else {
            let (ends, connection) = self.late.asked_about(now, ack.flow)?;
            return Some(Acknowledged {
                flow: None,
                ends: ends.both(),
                connection,
            });
        };
        Some(Acknowledged {
            flow: Some(token),
            ends: self.flows[&token].ends.both(),
            connection: *self.numbers.get(&token)?,
        })
    }

    /// Connector: the kernel has a later connection, of any process of this host, with the addresses of a flow for which HELLO was sent.
    /// The acceptor may have taken that HELLO for one of the later connection, so HELLO_ACK is not answered.
    pub fn superseded(&mut self, now: Time, acknowledged: &Acknowledged) {
        let (local, remote) = acknowledged.ends;
        self.supersede(now, &Ends::new(local, remote));
    }

    /// Reports the kernel's number of a flow's connection, which is unique (`SO_COOKIE`).
    pub fn set_connection_number(&mut self, token: FlowToken, connection: u64) {
        if self.state(token) == Some(State::Negotiating) {
            self.numbers.insert(token, connection);
        }
    }

    /// As [`open`](Self::open), for an accepted connection that the kernel has closed already, if the HELLO that waits for its
    /// addresses [may be for a later connection](Self::is_awaited_again). The flow is plain TCP. `connection` is the kernel's number
    /// of it, if known.
    pub fn open_ended(
        &mut self,
        now: Time,
        token: FlowToken,
        (local, remote): (SocketAddr, SocketAddr),
        connection: Option<u64>,
    ) {
        if let Some(connection) = connection {
            self.numbers.insert(token, connection);
        }
        let ends = Ends::new(plain(local), plain(remote));
        let mut flow = FlowRecord::new(now, token, Role::Acceptor, ends);
        flow.go(State::Legacy);
        self.flows.insert(token, Box::new(flow));
        let reason = LegacyReason::NoAnswer;
        self.emit(token, Event::Legacy { reason });
        // The connection is over already, so there is nothing to refuse even if the policy requires SLIM.
        self.push_plain(token);
    }

    /// The flow does not negotiate any more: removes it from `dialling`.
    pub(super) fn clear_dialling(&mut self, ends: &Ends, token: FlowToken) {
        if self.dialling.get(ends) == Some(&token) {
            self.dialling.remove(ends);
        }
    }

    /// Acceptor: an OPEN has come whose connection is not accepted yet or has ended; the known connection with its addresses, if
    /// any, is an earlier one.
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
