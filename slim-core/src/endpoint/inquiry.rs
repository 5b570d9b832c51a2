//! QUERY to a peer process: what is the status of a flow, and does the process exist? `docs/PROTOCOL.md`,
//! section "End of a flow, and questions about it".
//!
//! The ICMP messages of its host show that a process is gone, but hosts send few of them: Linux
//! sends about six in a row to one host and then one a second. All flows of a process break when
//! it dies. If each of them sent QUERY, most would get no ICMP message. Therefore a process that
//! has not answered is asked about one flow only, and its other flows wait. If it answers, it is asked
//! about the others, too. If its host refuses QUERY, the process is gone for all of them.

use std::net::SocketAddr;
use std::time::Duration;

use super::Endpoint;
use super::close::EndSource;
use super::flow::State;
use super::inquiries::{CONFIRM_DEATH, Inquiry};
use super::outage::Proof;
use super::record::{Asked, Leaving, QueryPurpose};
use super::timer::{Timer, TimerOwner};
use crate::addr::at_port;
use crate::auth::{Fresh, verify_with_job};
use crate::event::{EscalateReason, LegacyReason};
use crate::ids::{EndpointId, FinHow, FlowToken, Role, Time};
use crate::wire::{Demote, FlowStatus, Message, Parsed, Query, Status, Unknown};

/// First wait for the answer to a QUERY; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// Number of QUERYs without an answer before the endpoint goes on without one.
const QUERIES: u32 = 5;
/// Number of QUERYs, and the wait between them, after the peer's kernel has confirmed the end of the stream.
const QUERIES_SURE: u32 = 8;
const RETRY_SURE: Duration = Duration::from_millis(25);
/// The peer's kernel is probed ([`Action::Verify`](super::Action::Verify)) after this many QUERYs without an answer.
const VERIFIED_AFTER: u32 = 2;
impl Endpoint {
    /// Asks the peer for the status of the flow, or waits for the outcome of an open inquiry. With
    /// [`QueryPurpose::Death`], the peer's resume port has just been found closed, or owned by another process.
    pub(super) fn ask(&mut self, now: Time, token: FlowToken, purpose: QueryPurpose) {
        let flow = &self.flows[&token];
        let (Some(to), Some(peer)) = (flow.control(), flow.peer_id()) else {
            return;
        };
        let confirmed = purpose == QueryPurpose::Death && self.refused_long_ago(now, peer);
        if confirmed || self.inquiries.is_gone(now, peer) {
            return self.process_gone(now, peer);
        }
        match &mut self.flow(token).query {
            Some(query) if query.purpose == QueryPurpose::HeadStart => {
                query.purpose = purpose;
                return;
            }
            // The flow was to become plain TCP, but has lost its transport: the new question comes first.
            Some(query) if query.purpose == QueryPurpose::Plain => self.drop_query(token),
            Some(_) => return,
            None => {}
        }
        let nonce = self.rng.nonce();
        if purpose == QueryPurpose::Eof && self.is_shut_off(now, token) {
            self.set_proof(token, Proof::Given);
        }
        self.flow(token).query = Some(Box::new(Asked {
            purpose,
            nonce,
            sent: 0,
            to,
        }));
        if let Some(inquiry) = self.inquiries.open.get(&peer) {
            let waits = self.flows.get(&inquiry.token);
            if inquiry.refused.is_some() || waits.is_some_and(|flow| flow.query.is_some()) {
                return;
            }
            // The flow of the open inquiry has ended meanwhile, so its answer would be dropped: start a new inquiry.
        }
        self.close_inquiry(peer);
        let inquiry = Inquiry::new(now, token, to);
        self.inquiries.open.insert(peer, inquiry);
        self.ask_in_turn(now, peer);
    }

    /// The flow that the inquiry asks about. If no flow waits for an answer any more, the inquiry is over.
    pub(super) fn inquirer(&mut self, peer: EndpointId) -> Option<FlowToken> {
        let waiting = self.waiting(peer);
        let inquiry = self.inquiries.open.get_mut(&peer)?;
        if !waiting.contains(&inquiry.token) {
            let Some(&token) = waiting.first() else {
                self.close_inquiry(peer);
                return None;
            };
            inquiry.token = token;
        }
        Some(inquiry.token)
    }

    /// Sends QUERY for the inquiry that all flows of `peer` wait for.
    pub(super) fn inquire(&mut self, now: Time, peer: EndpointId) {
        let Some(token) = self.inquirer(peer) else {
            return;
        };
        let Some(inquiry) = self.inquiries.open.get(&peer) else {
            return;
        };
        let sent = inquiry.sent;
        let to = match (inquiry.refused, &inquiry.knocks) {
            (None, None) => self.turn(token, sent),
            // Ask the address that has refused.
            _ => inquiry.to,
        };
        let wait = match self.proof(token) {
            Proof::Given => RETRY_SURE,
            _ => RETRY * (1 << sent.min(8)),
        };
        self.send_query(token, to);
        if let Some(inquiry) = self.inquiries.open.get_mut(&peer) {
            inquiry.to = to;
            inquiry.sent += 1;
            inquiry.last = now;
        }
        self.timers.set(TimerOwner::Peer(peer), now + wait);
        if sent >= VERIFIED_AFTER {
            for token in self.waiting(peer) {
                self.verify(token);
            }
        }
    }

    /// The destination of the next QUERY about a flow, after `sent` QUERYs without an answer. The peer's addresses take
    /// turns, because another one may be reachable. An address that this host has, too, is left out: it leads to ourselves.
    pub(super) fn turn(&self, token: FlowToken, sent: u32) -> SocketAddr {
        let all = self.addresses_of_peer(token);
        all[sent as usize % all.len()]
    }

    /// The control port of the flow's peer at each of its addresses, and first at the one that the application had connected to.
    pub(super) fn addresses_of_peer(&self, token: FlowToken) -> Vec<SocketAddr> {
        let flow = &self.flows[&token];
        let first = flow.ends.remote().ip();
        let mut ips = vec![first];
        let mut port = flow.ends.remote().port();
        if let Some(peer) = &flow.peer {
            port = peer.process.control_port;
            let others = peer.process.addrs.iter().copied();
            ips.extend(others.filter(|ip| *ip != first && !self.own.addrs.contains(ip)));
        }
        ips.into_iter().map(|ip| flow.peer_at(ip, port)).collect()
    }

    /// The source of messages to the peer's address `to`: our control port at the local address of the flow's
    /// own connection. Rules for routes and firewalls may allow no other, and HELLO is believed from no other.
    pub(super) fn own_end(&self, token: FlowToken, to: SocketAddr) -> Option<SocketAddr> {
        let (local, remote) = self.flows[&token].ends.both();
        (to.ip() == remote.ip()).then(|| at_port(local, self.own.control_port))
    }

    /// Tells the peer by DEMOTE that the flow becomes plain TCP, and repeats DEMOTE and QUERY until STATUS confirms it. False if
    /// the peer cannot be asked.
    pub(super) fn ask_for_plain(&mut self, now: Time, token: FlowToken) -> bool {
        let flow = self.flow(token);
        let Some(to) = flow.control().filter(|_| flow.query.is_none()) else {
            return false;
        };
        let nonce = self.rng.nonce();
        self.flow(token).query = Some(Box::new(Asked {
            purpose: QueryPurpose::Plain,
            nonce,
            sent: 0,
            to,
        }));
        self.query_about(now, token, 0);
        true
    }

    fn send_query(&mut self, token: FlowToken, to: SocketAddr) {
        let plain = |query: &Asked| query.purpose == QueryPurpose::Plain;
        if self.flow(token).query.as_deref().is_some_and(plain) {
            // DEMOTE takes the same way as QUERY, so that it arrives first.
            let message = Message::Demote(Demote {
                flow: self.flow(token).name(),
            });
            let data = self.seal(token, Fresh::None, &message);
            let from = self.own_end(token, to);
            self.out.datagram(to, from, data);
        }
        let flow = self.flow(token);
        let name = flow.name();
        let Some(query) = &mut flow.query else {
            return;
        };
        query.sent += 1;
        query.to = to;
        let (nonce, again) = (query.nonce, query.sent > 1);
        let message = Message::Query(Query { flow: name, nonce });
        let data = self.seal(token, Fresh::None, &message);
        let from = self.own_end(token, to);
        self.out.datagram(to, from, data);
        if again {
            self.report(token);
        }
    }

    /// `peer` has not answered the QUERY of its inquiry.
    pub(super) fn on_peer_timer(&mut self, now: Time, peer: EndpointId) {
        match self.inquiries.open.get(&peer) {
            None => return,
            Some(inquiry) if inquiry.knocks.is_some() => return self.on_knocks_timer(now, peer),
            Some(inquiry) if inquiry.sent < self.most(inquiry.token) => {
                if inquiry.refused.is_some() && !self.processes.is_shut(peer) {
                    // The host may send no second ICMP message in time.
                    self.knock(peer);
                }
                return self.inquire(now, peer);
            }
            Some(_) => {}
        }
        let waiting = self.waiting(peer);
        self.close_inquiry(peer);
        for token in waiting {
            self.unanswered(now, token);
        }
    }

    /// The peer has not answered QUERY about this flow, though it had answered about another flow.
    pub(super) fn on_query_timer(&mut self, now: Time, token: FlowToken) {
        let Some(sent) = self.flow(token).query.as_ref().map(|query| query.sent) else {
            return;
        };
        if sent >= QUERIES {
            return self.unanswered(now, token);
        }
        self.query_about(now, token, sent);
    }

    /// Sends QUERY about this flow alone, outside the inquiry of its process.
    fn query_about(&mut self, now: Time, token: FlowToken, sent: u32) {
        let to = self.turn(token, sent);
        self.send_query(token, to);
        let wait = RETRY * (1 << sent.min(8));
        self.timers
            .set(TimerOwner::Flow(token, Timer::Query), now + wait);
    }

    /// All QUERYs about a flow have remained without an answer.
    fn unanswered(&mut self, now: Time, token: FlowToken) {
        let purpose = self.flow(token).query.as_ref().map(|query| query.purpose);
        self.drop_query(token);
        match purpose {
            Some(QueryPurpose::Eof) => {}
            Some(QueryPurpose::Plain) => return self.leave(now, token, Leaving::Ours),
            Some(QueryPurpose::Death | QueryPurpose::HeadStart) | None => return,
        }
        self.verify(token);
        match self.proof(token) {
            // The kernel's answer alone does not rule out a forged end that took the place of bytes on their way. So an attempt
            // comes first, unless the host is known to be shut off.
            Proof::Given if self.ended_intact(token) && self.is_shut_off(now, token) => {
                self.believe_eof(now, token);
            }
            Proof::Awaited => self.set_proof(token, Proof::AwaitedAlone),
            // The end of stream may be a fault of the network. It is remembered all the same, because
            // the peer may still confirm it.
            _ => self.start_attempts(now, token),
        }
    }

    /// Starts the QUERYs anew, at short intervals, if the inquiry of the peer is about this flow.
    pub(super) fn ask_at_once(&mut self, now: Time, token: FlowToken) {
        let Some(peer) = self.flows[&token].peer_id() else {
            return;
        };
        let asked = self.inquiries.open.get_mut(&peer);
        let plain = |i: &&mut Inquiry| i.refused.is_none() && i.knocks.is_none();
        if let Some(inquiry) = asked.filter(|i| i.token == token).filter(plain) {
            inquiry.sent = 0;
            self.inquire(now, peer);
        }
    }

    /// Number of QUERYs about a flow before it counts as unanswered.
    fn most(&self, token: FlowToken) -> u32 {
        match self.proof(token) {
            Proof::Given => QUERIES_SURE,
            _ => QUERIES,
        }
    }

    pub(super) fn drop_query(&mut self, token: FlowToken) {
        self.flow(token).query = None;
        self.timers.clear(TimerOwner::Flow(token, Timer::Query));
    }

    /// The flows of `peer` that wait for the outcome of its inquiry.
    fn waiting(&self, peer: EndpointId) -> Vec<FlowToken> {
        let asked = self.inquiries.open.get(&peer).map(|inquiry| inquiry.token);
        let waits = |token: FlowToken, query: &Asked| query.sent == 0 || asked == Some(token);
        self.flows
            .values()
            .filter(|flow| flow.peer_id() == Some(peer))
            .filter(|flow| {
                flow.query
                    .as_ref()
                    .is_some_and(|query| waits(flow.token, query))
            })
            .map(|flow| flow.token)
            .collect()
    }

    /// Whether the process is gone if QUERY is refused again. A flow that has not tried a connection yet is no reason.
    fn refusals_suffice(&self, peer: EndpointId) -> bool {
        let waiting = self.waiting(peer).into_iter();
        let mut asked = waiting.filter_map(|token| self.flows[&token].query.as_ref());
        asked.any(|query| query.purpose != QueryPurpose::HeadStart)
    }

    fn close_inquiry(&mut self, peer: EndpointId) {
        let inquiry = self.inquiries.open.remove(&peer);
        self.timers.clear(TimerOwner::Peer(peer));
        if let Some(conn) = inquiry.and_then(|inquiry| inquiry.knock) {
            self.close_conn(conn);
        }
    }

    /// The process has answered, or has sent another message that cannot be a replay. So it
    /// exists, and can be asked about all its flows.
    pub(super) fn peer_answered(&mut self, now: Time, peer: EndpointId) {
        self.inquiries.mark_alive(peer);
        if !self.inquiries.open.contains_key(&peer) {
            return;
        }
        let waiting = self.waiting(peer);
        self.close_inquiry(peer);
        for token in waiting {
            match self.flow(token).query.as_ref().map(|query| query.purpose) {
                Some(QueryPurpose::Eof) => self.query_about(now, token, 0),
                Some(QueryPurpose::Death | QueryPurpose::HeadStart) => self.drop_query(token),
                // Sent outside the inquiry.
                Some(QueryPurpose::Plain) | None => {}
            }
        }
        self.ask_neighbours(now, peer.host);
    }

    /// The host at `to` refused a QUERY: no socket has that port.
    pub(super) fn query_refused(&mut self, now: Time, to: SocketAddr) {
        // QUERYs that were sent because the process had answered: it was alive a moment ago. They become inquiries.
        let late: Vec<(FlowToken, EndpointId)> = self
            .flows
            .values()
            .filter(|flow| {
                flow.query
                    .as_ref()
                    .is_some_and(|q| q.sent > 0 && q.to == to)
            })
            .filter_map(|flow| Some((flow.token, flow.peer_id()?)))
            .collect();
        for (token, peer) in late {
            let new = Inquiry::new(now, token, to);
            let asked = self.inquiries.open.entry(peer).or_insert(new);
            if asked.token != token {
                self.timers.clear(TimerOwner::Flow(token, Timer::Query));
                if let Some(query) = &mut self.flow(token).query {
                    query.sent = 0;
                }
            }
        }
        let asked: Vec<EndpointId> = self
            .inquiries
            .open
            .iter()
            .filter(|(_, inquiry)| inquiry.to == to)
            .map(|(peer, _)| *peer)
            .collect();
        for peer in asked {
            let believed_after = self.believed_after(peer);
            let suffices = self.refusals_suffice(peer);
            self.inquiries.note_refusal(now, peer.host, to.ip());
            let Some(inquiry) = self.inquiries.open.get_mut(&peer) else {
                continue;
            };
            match inquiry.refused {
                // Another knock will confirm it.
                None if inquiry.knocks.is_some() => inquiry.refused = Some(now),
                None => {
                    inquiry.refused = Some(now);
                    inquiry.sent = QUERIES - 2;
                    let token = inquiry.token;
                    self.timers.clear(TimerOwner::Flow(token, Timer::Query));
                    self.timers.set(
                        TimerOwner::Peer(peer),
                        now + believed_after.unwrap_or(CONFIRM_DEATH),
                    );
                }
                Some(first)
                    if suffices && believed_after.is_some_and(|wait| now.since(first) >= wait) =>
                {
                    self.process_gone(now, peer);
                }
                // A duplicate, or the refusal of an earlier QUERY.
                Some(_) => {}
            }
            self.knock_at_neighbours(now, peer.host, to.ip());
        }
    }

    /// A process does not exist any more: this ends all its flows that have no transport.
    pub(super) fn process_gone(&mut self, now: Time, peer: EndpointId) {
        self.close_inquiry(peer);
        self.inquiries.mark_gone(now, peer);
        let flows: Vec<FlowToken> = self
            .flows
            .values()
            .filter(|flow| flow.peer_id() == Some(peer))
            .filter(|flow| match flow.state() {
                State::Suspended | State::Resuming => flow.change.pump.is_none(),
                // Only a stall is suspected; the attempts for it end.
                State::Live => flow.outage.is_some(),
                _ => false,
            })
            .map(|flow| flow.token)
            .collect();
        for token in flows {
            self.peer_gone(now, token, EscalateReason::PeerGone);
        }
    }

    pub(super) fn on_status(&mut self, now: Time, parsed: &Parsed<'_>, status: &Status) {
        let first = self.answers_candidate(status.flow, status.nonce);
        let end = match status.state {
            FlowStatus::HalfClosed(end) => Some((end, FinHow::HalfClose)),
            FlowStatus::Closed(end) => Some((end, FinHow::Close)),
            FlowStatus::Reset => Some((0, FinHow::Reset)),
            FlowStatus::Open | FlowStatus::Legacy => None,
        };
        self.prove(
            now,
            status.flow,
            (Fresh::None, parsed),
            end.filter(|_| first),
        );
        let Some(token) = self.genuine(status.flow, parsed) else {
            return self.drop_one();
        };
        let peer = self.flow(token).peer_id();
        if let Some(peer) = peer
            && (self.probe_answered(now, peer, status.nonce)
                || self.path_answered(now, peer, status.nonce)
                || self.hold_answered(now, peer, status.nonce)
                || self.reach_answered(peer, status.nonce))
        {
            self.processes.reached(peer);
            return self.peer_answered(now, peer);
        }
        let flow = self.flow(token);
        let purpose = match &flow.query {
            Some(query) if query.nonce == status.nonce => query.purpose,
            // `prove` has handled the end of the stream.
            _ if first && status.state != FlowStatus::Legacy => return,
            _ if first => QueryPurpose::Death,
            _ => return self.drop_one(),
        };
        self.drop_query(token);
        if let Some(peer) = peer {
            self.processes.reached(peer);
            self.peer_answered(now, peer);
        }
        match status.state {
            FlowStatus::Open if purpose == QueryPurpose::Eof => self.eof_is_fault(now, token),
            // DEMOTE was lost, or the peer has no transport: DEMOTE is sent again.
            FlowStatus::Open if purpose == QueryPurpose::Plain => {
                self.leave(now, token, Leaving::Ours);
            }
            FlowStatus::Legacy if purpose == QueryPurpose::Plain => {
                self.leave(now, token, Leaving::MailboxState);
            }
            FlowStatus::Open => {}
            FlowStatus::HalfClosed(end) => {
                self.peer_finished(now, token, end, FinHow::HalfClose, EndSource::Asked);
            }
            FlowStatus::Closed(end) => {
                self.peer_finished(now, token, end, FinHow::Close, EndSource::Asked);
            }
            FlowStatus::Reset => self.peer_finished(now, token, 0, FinHow::Reset, EndSource::Asked),
            FlowStatus::Legacy => self.fall_back(now, token, LegacyReason::PeerDemoted),
        }
    }

    pub(super) fn on_unknown(&mut self, now: Time, parsed: &Parsed<'_>, unknown: &Unknown) {
        if !verify_with_job(self.config.job_key.as_ref(), parsed) {
            return self.drop_one();
        }
        if self.candidate_unknown(now, unknown) {
            return;
        }
        for role in [Role::Connector, Role::Acceptor] {
            let Some(&token) = self.by_id.get(&(unknown.flow, role)) else {
                continue;
            };
            let peer = self.flows[&token].peer_id();
            if let Some(peer) = peer
                && (self.probe_answered(now, peer, unknown.nonce)
                    || self.path_answered(now, peer, unknown.nonce)
                    || (unknown.endpoint.host == peer.host
                        && self.hold_answered(now, peer, unknown.nonce))
                    || (unknown.endpoint == peer && self.reach_answered(peer, unknown.nonce)))
            {
                // A resume connection will get the same answer.
                return;
            }
            let flow = &self.flows[&token];
            let (Some(query), Some(peer)) = (&flow.query, &flow.peer) else {
                continue;
            };
            if query.nonce != unknown.nonce {
                continue;
            }
            let peer = peer.process.id;
            if unknown.endpoint == peer {
                self.drop_query(token);
                self.processes.reached(peer);
                self.peer_answered(now, peer);
                return self.peer_gone(now, token, EscalateReason::PeerForgot);
            }
            if unknown.endpoint.host == peer.host {
                return self.process_gone(now, peer);
            }
            // Another host has the address now. That says nothing about the peer.
            return self.drop_one();
        }
        self.drop_one();
    }
}
