//! Can the peer process be reached from here at its own ports? `docs/PROTOCOL.md`, section "End of a flow, and questions
//! about it".
//!
//! The usual host firewall lets in only what belongs to something that the host has asked for. What it has asked for
//! lately includes our control port, since its HELLO has come there; so as long as the firewall remembers that, an
//! answer from there proves nothing about later. Therefore QUERY leaves from a port that the peer has never heard of:
//! what comes through then will come through later, too, and so will a resume connection. A process that answers none of
//! them is asked for a resume connection; who refuses, or swallows, that one as well is *shut*.
//!
//! Each process is asked once, when a flow to it has lived a while, so short connections pay nothing. Processes of the
//! same host are not asked.
//!
//! That a process is shut does not mean that it has gone: it only means that silence is no reason to wait for it when its
//! stream ends (`shut_off.rs`). A process that is found to be reachable, by this or by any answer, is never shut.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::flow::State;
use super::resume::Conn;
use super::timer::TimerOwner;
use super::{Action, Endpoint};
use crate::addr::at_port;
use crate::auth::{Fresh, verify_with_job};
use crate::ids::{ConnId, EndpointId, FlowToken, Nonce, Time};
use crate::transport::Path;
use crate::wire::{Challenge, Message, Parsed, Query};

/// How long a flow lives before its peer is asked.
const AFTER: Duration = Duration::from_secs(1);
/// QUERYs, any of which may get lost.
const QUERIES: u32 = 3;
/// First wait for the answer; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// How long a connection is waited for: the kernel sends its SYN again after a second.
const CONNECTING: Duration = Duration::from_millis(1300);
/// Flows remembered for a process that is to be asked.
const FLOWS: usize = 4;
/// Connections for this at a time: each takes a descriptor.
const MOST: usize = 16;

/// Processes that are being asked, or will be.
#[derive(Default)]
pub(super) struct Reaches {
    open: BTreeMap<EndpointId, Reach>,
}

struct Reach {
    /// Flows that can be asked about, the newest of them.
    flows: VecDeque<FlowToken>,
    nonce: Nonce,
    /// QUERYs so far.
    sent: u32,
    conn: Option<ConnId>,
}

/// Error numbers of Linux that say something of the path, and not of our own shortages.
const OF_PATH: [i32; 6] = [101, 104, 110, 111, 112, 113];

impl Reaches {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    fn connecting(&self) -> usize {
        let open = self.open.values();
        open.filter(|reach| reach.conn.is_some()).count()
    }
}

impl Endpoint {
    /// A flow has become live.
    pub(super) fn reach_later(&mut self, now: Time, token: FlowToken) {
        let Some(peer) = self.flows[&token].peer_id() else {
            return;
        };
        if let Some(reach) = self.reaches.open.get_mut(&peer) {
            reach.flows.truncate(FLOWS - 1);
            return reach.flows.push_front(token);
        }
        let known = self.processes.was_reached(peer) || self.processes.is_shut(peer);
        if known || peer.host == self.id.host {
            return;
        }
        let reach = Reach {
            flows: VecDeque::from([token]),
            nonce: self.rng.nonce(),
            sent: 0,
            conn: None,
        };
        self.reaches.open.insert(peer, reach);
        self.timers.set(TimerOwner::Reach(peer), now + AFTER);
    }

    /// A flow is over.
    pub(super) fn reach_without(&mut self, token: FlowToken, peer: EndpointId) {
        if let Some(reach) = self.reaches.open.get_mut(&peer) {
            reach.flows.retain(|flow| *flow != token);
            if reach.flows.is_empty() {
                self.reach_over(peer);
            }
        }
    }

    /// The network is, or was, not well: what was found out meanwhile may be due to that.
    pub(super) fn reach_in_doubt(&mut self, token: FlowToken) {
        if let Some(peer) = self.flows[&token].peer_id() {
            self.processes.not_shut(peer);
        }
    }

    /// Whether messages may be under way that [leave from a port of their own](Action::Datagram).
    pub fn is_reaching(&self) -> bool {
        self.reaches.open.values().any(|reach| reach.sent > 0)
    }

    /// Asks, or has waited long enough for the answer.
    pub(super) fn on_reach_timer(&mut self, now: Time, peer: EndpointId) {
        let Some(reach) = self.reaches.open.get(&peer) else {
            return;
        };
        let (nonce, sent, conn) = (reach.nonce, reach.sent, reach.conn);
        let is_live = |token: &&FlowToken| {
            let flow = self.flows.get(token);
            flow.is_some_and(|flow| flow.state() == State::Live && flow.outage.is_none())
        };
        let token = reach.flows.iter().find(is_live).copied();
        let Some(token) = token.filter(|_| !self.processes.was_reached(peer)) else {
            return self.reach_over(peer);
        };
        if conn.is_some() {
            self.processes.shut(peer);
            return self.reach_over(peer);
        }
        let wait = if sent < QUERIES {
            self.query_aside(token, nonce);
            RETRY * (1 << sent)
        } else {
            if self.reaches.connecting() < MOST {
                self.connect_aside(token, peer);
            }
            CONNECTING
        };
        if let Some(reach) = self.reaches.open.get_mut(&peer) {
            reach.sent = QUERIES.min(sent + 1);
        }
        self.timers.set(TimerOwner::Reach(peer), now + wait);
    }

    fn query_aside(&mut self, token: FlowToken, nonce: Nonce) {
        let flow = &self.flows[&token];
        let (Some(to), (local, _)) = (flow.control(), flow.ends.both()) else {
            return;
        };
        let message = Message::Query(Query {
            flow: flow.name(),
            nonce,
        });
        let data = self.seal(token, Fresh::None, &message);
        self.out.datagram(to, Some(at_port(local, 0)), data);
    }

    fn connect_aside(&mut self, token: FlowToken, peer: EndpointId) {
        let flow = &self.flows[&token];
        let Some(port) = flow.peer.as_ref().map(|peer| peer.process.resume_port) else {
            return;
        };
        let (local, remote) = flow.ends.both();
        let local = self.own.addrs.contains(&local.ip()).then_some(local.ip());
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        self.conns.insert(conn, Conn::Aside { peer });
        if let Some(reach) = self.reaches.open.get_mut(&peer) {
            reach.conn = Some(conn);
        }
        let to = at_port(remote, port).into();
        let path = Path { local, to };
        self.out.push(Action::Connect { conn, token, path });
    }

    fn reach_over(&mut self, peer: EndpointId) {
        self.timers.clear(TimerOwner::Reach(peer));
        let reach = self.reaches.open.remove(&peer);
        if let Some(conn) = reach.and_then(|reach| reach.conn) {
            self.close_conn(conn);
        }
    }

    /// The process has answered something; true if it was this.
    pub(super) fn reach_answered(&mut self, peer: EndpointId, nonce: Nonce) -> bool {
        let reach = self.reaches.open.get(&peer);
        let ours = reach.is_some_and(|reach| reach.sent > 0 && reach.nonce == nonce);
        if ours {
            self.processes.reached(peer);
            self.reach_over(peer);
        }
        ours
    }

    /// Somebody answers at the peer's resume port.
    pub(super) fn on_challenge_aside(
        &mut self,
        peer: EndpointId,
        parsed: &Parsed<'_>,
        challenge: &Challenge,
    ) {
        if verify_with_job(self.config.job_key.as_ref(), parsed) && challenge.endpoint == peer {
            self.processes.reached(peer);
        }
        self.reach_over(peer);
    }

    /// The connection could not be made, or is of no use.
    pub(super) fn aside_lost(&mut self, peer: EndpointId, errno: i32) {
        if OF_PATH.contains(&errno) {
            self.processes.shut(peer);
        }
        self.reach_over(peer);
    }
}
