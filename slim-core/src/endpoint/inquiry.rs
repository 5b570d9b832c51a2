//! Questions to a peer process: how does a flow stand, and do you exist? `docs/PROTOCOL.md`,
//! section "End of a flow, and questions about it".
//!
//! A process that is gone is known by its host's ICMP messages, of which hosts send few: Linux
//! sends about six in a row to one host and then one a second. All flows of a process break when
//! it dies, so if each of them asked, hardly one would have an answer. Therefore a process that
//! has not been heard is asked about one flow, and the others wait. If it answers, it is asked
//! about them, too. If its host says that it is gone, it is gone for all of them.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::Endpoint;
use super::close::EndSource;
use super::flow::State;
use super::outage::Proof;
use super::record::{Asked, Leaving, Why};
use super::timer::{Timer, TimerOwner};
use crate::addr::at_port;
use crate::auth::{Fresh, verify_with_job};
use crate::event::{EscalateReason, LegacyReason};
use crate::ids::{EndpointId, FinHow, FlowToken, Role, Time};
use crate::wire::{Demote, FlowStatus, Message, Parsed, Query, Status, Unknown};

/// First wait for the answer to a QUERY; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// QUERYs without any answer before something else is tried.
const QUERIES: u32 = 5;
/// So often, and after so long, QUERY is sent again where the peer's kernel has confirmed the end of the stream.
const QUERIES_SURE: u32 = 8;
const RETRY_SURE: Duration = Duration::from_millis(25);
/// The peer's kernel is asked when so many QUERYs were not answered.
const VERIFIED_AFTER: u32 = 2;
/// A host that refused a QUERY is asked once more after this, because a firewall that is just
/// being changed may have refused it.
const CONFIRM_DEATH: Duration = Duration::from_millis(150);
/// Flows that notice a little later that their process is gone need not ask again. What is gone
/// does not come back, but whoever was wrong about it should not be wrong for ever.
const GONE_AGE: Duration = Duration::from_secs(5);
/// Processes remembered as gone.
const GONE: usize = 256;

/// What is being asked.
#[derive(Default)]
pub(super) struct Inquiries {
    /// Processes that have not answered yet.
    open: BTreeMap<EndpointId, Inquiry>,
    /// Oldest first.
    gone: VecDeque<(Time, EndpointId)>,
}

/// The question that all flows of a process wait for.
struct Inquiry {
    /// The flow that is asked about.
    token: FlowToken,
    to: SocketAddr,
    sent: u32,
    /// When the host refused it first.
    refused: Option<Time>,
}

impl Inquiries {
    fn bury(&mut self, now: Time, peer: EndpointId) {
        if self.is_gone(now, peer) {
            return;
        }
        while self.gone.len() >= GONE {
            self.gone.pop_front();
        }
        self.gone.push_back((now, peer));
    }

    /// Forgets those that have been gone for long.
    pub(super) fn expire(&mut self, now: Time) {
        while self
            .gone
            .front()
            .is_some_and(|(at, _)| now.since(*at) >= GONE_AGE)
        {
            self.gone.pop_front();
        }
    }

    /// How many questions have no answer, and how many processes are remembered as gone.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.open.len(), self.gone.len())
    }

    /// It has just spoken.
    fn revive(&mut self, peer: EndpointId) {
        self.gone.retain(|(_, gone)| *gone != peer);
    }

    fn is_gone(&mut self, now: Time, peer: EndpointId) -> bool {
        self.expire(now);
        self.gone.iter().any(|(_, gone)| *gone == peer)
    }

    /// The host has said for some time that nobody is there.
    fn refused_long_ago(&self, now: Time, peer: EndpointId) -> bool {
        let first = self.open.get(&peer).and_then(|inquiry| inquiry.refused);
        first.is_some_and(|first| now.since(first) >= CONFIRM_DEATH)
    }
}

impl Endpoint {
    /// Asks the peer how the flow stands, or waits for the outcome of a question under way. With
    /// [`Why::Death`], the peer's resume port has just been found to be closed, or somebody else's.
    pub(super) fn ask(&mut self, now: Time, token: FlowToken, why: Why) {
        let flow = &self.flows[&token];
        let (Some(to), Some(peer)) = (flow.control(), flow.peer_id()) else {
            return;
        };
        let confirmed = why == Why::Death && self.inquiries.refused_long_ago(now, peer);
        if confirmed || self.inquiries.is_gone(now, peer) {
            return self.process_gone(now, peer);
        }
        match &self.flow(token).query {
            // Its transport is away: what was to be plain TCP is looked into like any other.
            Some(query) if query.why == Why::Plain => self.drop_query(token),
            Some(_) => return,
            None => {}
        }
        let nonce = self.rng.nonce();
        if why == Why::Eof && self.is_shut_off(now, token) {
            self.set_proof(token, Proof::Given);
        }
        self.flow(token).query = Some(Box::new(Asked {
            why,
            nonce,
            sent: 0,
            to,
        }));
        if let Some(inquiry) = self.inquiries.open.get(&peer) {
            let waits = self.flows.get(&inquiry.token);
            if inquiry.refused.is_some() || waits.is_some_and(|flow| flow.query.is_some()) {
                return;
            }
            // The flow that was asked about has ended meanwhile, and so nobody takes the answer.
        }
        let inquiry = Inquiry {
            token,
            to,
            sent: 0,
            refused: None,
        };
        self.inquiries.open.insert(peer, inquiry);
        self.inquire(now, peer);
    }

    /// Sends the question that all flows of `peer` wait for.
    fn inquire(&mut self, now: Time, peer: EndpointId) {
        let waiting = self.waiting(peer);
        let Some(inquiry) = self.inquiries.open.get_mut(&peer) else {
            return;
        };
        if !waiting.contains(&inquiry.token) {
            // What that flow was to know, it knows.
            let Some(&token) = waiting.first() else {
                return self.close_inquiry(peer);
            };
            inquiry.token = token;
        }
        let (token, sent, refused) = (inquiry.token, inquiry.sent, inquiry.refused);
        let to = match refused {
            // Who has refused is asked again.
            Some(_) => inquiry.to,
            None => self.turn(token, sent),
        };
        let wait = match self.proof(token) {
            Proof::Given => RETRY_SURE,
            _ => RETRY * (1 << sent.min(8)),
        };
        self.send_query(token, to);
        if let Some(inquiry) = self.inquiries.open.get_mut(&peer) {
            inquiry.to = to;
            inquiry.sent += 1;
        }
        self.timers.set(TimerOwner::Peer(peer), now + wait);
        if sent >= VERIFIED_AFTER {
            for token in waiting {
                self.verify(token);
            }
        }
    }

    /// Where the next question about a flow goes if `sent` had no answer: perhaps another address
    /// of the peer can be reached. An address that we have, too, leads to ourselves.
    pub(super) fn turn(&self, token: FlowToken, sent: u32) -> SocketAddr {
        let flow = &self.flows[&token];
        let first = flow.ends.remote().ip();
        let mut ips = vec![first];
        let mut port = flow.ends.remote().port();
        if let Some(peer) = &flow.peer {
            port = peer.process.control_port;
            let others = peer.process.addrs.iter().copied();
            ips.extend(others.filter(|ip| *ip != first && !self.own.addrs.contains(ip)));
        }
        match ips[sent as usize % ips.len()] {
            ip if ip == first => at_port(flow.ends.remote(), port),
            ip => SocketAddr::new(ip, port),
        }
    }

    /// Where messages of ours to the peer's address `to` come from: our control port at the address of the flow's
    /// own connection. Rules for routes and firewalls may know no other, and HELLO is believed from no other.
    pub(super) fn own_end(&self, token: FlowToken, to: SocketAddr) -> Option<SocketAddr> {
        let (local, remote) = self.flows[&token].ends.both();
        (to.ip() == remote.ip()).then(|| at_port(local, self.own.control_port))
    }

    /// Tells the peer that the flow is plain TCP, and asks until it has heard that. False if it cannot be asked.
    pub(super) fn ask_for_plain(&mut self, now: Time, token: FlowToken) -> bool {
        let flow = self.flow(token);
        let Some(to) = flow.control().filter(|_| flow.query.is_none()) else {
            return false;
        };
        let nonce = self.rng.nonce();
        self.flow(token).query = Some(Box::new(Asked {
            why: Why::Plain,
            nonce,
            sent: 0,
            to,
        }));
        self.query_about(now, token, 0);
        true
    }

    fn send_query(&mut self, token: FlowToken, to: SocketAddr) {
        let plain = |query: &Asked| query.why == Why::Plain;
        if self.flow(token).query.as_deref().is_some_and(plain) {
            // The same way, so that it comes first.
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

    /// Nobody has answered the question for `peer`.
    pub(super) fn on_peer_timer(&mut self, now: Time, peer: EndpointId) {
        match self.inquiries.open.get(&peer) {
            None => return,
            Some(inquiry) if inquiry.sent < self.most(inquiry.token) => {
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

    /// Nobody has answered the question about a flow, though the process had answered others.
    pub(super) fn on_query_timer(&mut self, now: Time, token: FlowToken) {
        let Some(sent) = self.flow(token).query.as_ref().map(|query| query.sent) else {
            return;
        };
        if sent >= QUERIES {
            return self.unanswered(now, token);
        }
        self.query_about(now, token, sent);
    }

    /// Asks about this flow without regard to others.
    fn query_about(&mut self, now: Time, token: FlowToken, sent: u32) {
        let to = self.turn(token, sent);
        self.send_query(token, to);
        let wait = RETRY * (1 << sent.min(8));
        self.timers
            .set(TimerOwner::Flow(token, Timer::Query), now + wait);
    }

    fn unanswered(&mut self, now: Time, token: FlowToken) {
        let why = self.flow(token).query.as_ref().map(|query| query.why);
        self.drop_query(token);
        match why {
            Some(Why::Eof) => {}
            Some(Why::Plain) => return self.leave(now, token, Leaving::Ours),
            Some(Why::Death) | None => return,
        }
        self.verify(token);
        match self.proof(token) {
            // The kernel's answer alone does not rule out a stranger's end in the place of bytes on their way. So an attempt
            // comes first, except where the host is known to be shut off.
            Proof::Given if self.ended_intact(token) && self.is_shut_off(now, token) => {
                self.believe_eof(now, token);
            }
            Proof::Awaited => self.set_proof(token, Proof::AwaitedAlone),
            // The network may be to blame for the end of stream, too. It is not forgotten, for
            // the peer may still say that it was genuine.
            _ => self.start_attempts(now, token),
        }
    }

    /// Asks once more, soon and often, if the peer is being asked about this flow.
    pub(super) fn ask_at_once(&mut self, now: Time, token: FlowToken) {
        let Some(peer) = self.flows[&token].peer_id() else {
            return;
        };
        let asked = self.inquiries.open.get_mut(&peer);
        if let Some(inquiry) = asked.filter(|i| i.token == token && i.refused.is_none()) {
            inquiry.sent = 0;
            self.inquire(now, peer);
        }
    }

    /// How often the question about a flow is asked before it is taken for unanswered.
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

    /// Flows of `peer` that wait for the outcome of its inquiry.
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

    fn close_inquiry(&mut self, peer: EndpointId) {
        self.inquiries.open.remove(&peer);
        self.timers.clear(TimerOwner::Peer(peer));
    }

    /// The process has answered, or has said something else that nobody can have recorded. So it
    /// exists, and can be asked about everything.
    pub(super) fn peer_answered(&mut self, now: Time, peer: EndpointId) {
        self.inquiries.revive(peer);
        if !self.inquiries.open.contains_key(&peer) {
            return;
        }
        let waiting = self.waiting(peer);
        self.close_inquiry(peer);
        for token in waiting {
            match self.flow(token).query.as_ref().map(|query| query.why) {
                Some(Why::Eof) => self.query_about(now, token, 0),
                Some(Why::Death) => self.drop_query(token),
                // Asked by itself.
                Some(Why::Plain) | None => {}
            }
        }
    }

    /// The host at `to` says that nobody listens there.
    pub(super) fn query_refused(&mut self, now: Time, to: SocketAddr) {
        // Questions that went out because the process had answered: it was alive a moment ago.
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
            let asked = self.inquiries.open.entry(peer).or_insert(Inquiry {
                token,
                to,
                sent: 0,
                refused: None,
            });
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
            let Some(inquiry) = self.inquiries.open.get_mut(&peer) else {
                continue;
            };
            match inquiry.refused {
                None => {
                    inquiry.refused = Some(now);
                    inquiry.sent = QUERIES - 2;
                    let token = inquiry.token;
                    self.timers.clear(TimerOwner::Flow(token, Timer::Query));
                    self.timers.set(TimerOwner::Peer(peer), now + CONFIRM_DEATH);
                }
                Some(first) if now.since(first) >= CONFIRM_DEATH => self.process_gone(now, peer),
                // The refusal of a copy.
                Some(_) => {}
            }
        }
    }

    /// A process does not exist any more: that ends all its flows that have no connection.
    pub(super) fn process_gone(&mut self, now: Time, peer: EndpointId) {
        self.close_inquiry(peer);
        self.inquiries.bury(now, peer);
        let flows: Vec<FlowToken> = self
            .flows
            .values()
            .filter(|flow| flow.peer_id() == Some(peer))
            .filter(|flow| match flow.state() {
                State::Suspended | State::Resuming => flow.change.pump.is_none(),
                // A stall is being looked into.
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
                || self.reach_answered(peer, status.nonce))
        {
            self.processes.reached(peer);
            return self.peer_answered(now, peer);
        }
        let flow = self.flow(token);
        let why = match &flow.query {
            Some(query) if query.nonce == status.nonce => query.why,
            // What it says of the end of the stream was taken with it.
            _ if first && status.state != FlowStatus::Legacy => return,
            _ if first => Why::Death,
            _ => return self.drop_one(),
        };
        self.drop_query(token);
        if let Some(peer) = peer {
            self.processes.reached(peer);
            self.peer_answered(now, peer);
        }
        match status.state {
            FlowStatus::Open if why == Why::Eof => self.eof_is_fault(now, token),
            // DEMOTE was lost, or the peer has no transport: it is told again.
            FlowStatus::Open if why == Why::Plain => self.leave(now, token, Leaving::Ours),
            FlowStatus::Legacy if why == Why::Plain => self.leave(now, token, Leaving::Heard),
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
                    || (unknown.endpoint == peer && self.reach_answered(peer, unknown.nonce)))
            {
                // A new connection will hear the same.
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
            // Another host has the address now. That says nothing about the one we mean.
            return self.drop_one();
        }
        self.drop_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_gone_for_ever() {
        let peer = EndpointId {
            host: [1; 16],
            pid: 1,
            incarnation: 1,
        };
        let at = |secs: u64| Time(secs * 1_000_000);
        let mut inquiries = Inquiries::default();
        // Whoever asks meanwhile hears the same, and that is no new evidence.
        for secs in [0, 2, 4] {
            inquiries.bury(at(secs), peer);
            assert!(inquiries.is_gone(at(secs), peer));
        }
        assert_eq!(inquiries.gone.len(), 1);
        assert!(!inquiries.is_gone(at(5), peer));
        inquiries.bury(at(6), peer);
        inquiries.revive(peer);
        assert!(!inquiries.is_gone(at(6), peer));
    }
}
