//! The reachability test: can the peer process be reached at its own ports? `docs/PROTOCOL.md`, section "End of a flow, and
//! questions about it".
//!
//! A typical host firewall lets in only answers to packets of its own host. The peer's host may have sent HELLO to our
//! control port, so for some time the firewall lets in packets from that port, and an answer to such a packet proves nothing
//! about later. Therefore this QUERY is sent from a port that the peer has never sent to. If it passes the firewall, later
//! QUERYs and resume connections will, too. If the process answers none of these QUERYs, a connection to its resume port is
//! made. If that one is refused or dropped as well, the process is *shut*.
//!
//! Each process is tested once, when a flow to it has been live for a second, so short connections cost nothing. Processes of
//! the same host are not tested.
//!
//! A process that is shut is not gone. It only means that an end of its stream is believed without waiting for an
//! answer (`shut_off.rs`). A process that has answered, in this test or otherwise, is never shut.

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

/// How long a flow is live before its peer is tested.
const AFTER: Duration = Duration::from_secs(1);
/// Number of QUERYs, since one may get lost.
const QUERIES: u32 = 3;
/// First wait for the answer; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// How long the test waits for the connection: the kernel repeats its SYN after a second.
const CONNECTING: Duration = Duration::from_millis(1300);
/// Number of flows remembered for a process that is to be tested.
const FLOWS: usize = 4;
/// Maximum number of test connections at a time, since each takes a descriptor.
const MOST: usize = 16;

/// Processes that are being tested, or will be.
#[derive(Default)]
pub(super) struct Reaches {
    open: BTreeMap<EndpointId, Reach>,
}

struct Reach {
    /// The newest flows of the process, about which QUERY can ask.
    flows: VecDeque<FlowToken>,
    nonce: Nonce,
    /// Number of QUERYs sent.
    sent: u32,
    conn: Option<ConnId>,
}

/// Error numbers of Linux that are due to the path or the peer, not to a lack of resources here: ENETUNREACH, ECONNRESET,
/// ETIMEDOUT, ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH.
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
    /// A flow has become live: its peer is tested later, if it must be.
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

    /// A flow is over: its peer is not tested by it any more.
    pub(super) fn reach_remove_flow(&mut self, token: FlowToken, peer: EndpointId) {
        if let Some(reach) = self.reaches.open.get_mut(&peer) {
            reach.flows.retain(|flow| *flow != token);
            if reach.flows.is_empty() {
                self.reach_over(peer);
            }
        }
    }

    /// A fault of the network may have made the peer look shut: that verdict is dropped.
    pub(super) fn reach_in_doubt(&mut self, token: FlowToken) {
        if let Some(peer) = self.flows[&token].peer_id() {
            self.processes.not_shut(peer);
        }
    }

    /// Whether answers may come to [ports of their own](Action::Datagram), from which QUERYs of a reachability test were sent.
    pub fn is_reaching(&self) -> bool {
        self.reaches.open.values().any(|reach| reach.sent > 0)
    }

    /// Takes the next step of the test, or ends it.
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

    /// Sends QUERY from a port that the peer does not know.
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

    /// Makes a test connection to the peer's resume port.
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
        self.out.push(Action::Connect {
            conn,
            token,
            path,
            small_segments: false,
        });
    }

    fn reach_over(&mut self, peer: EndpointId) {
        self.timers.clear(TimerOwner::Reach(peer));
        let reach = self.reaches.open.remove(&peer);
        if let Some(conn) = reach.and_then(|reach| reach.conn) {
            self.close_conn(conn);
        }
    }

    /// The process has sent an answer. True if it answers the test.
    pub(super) fn reach_answered(&mut self, peer: EndpointId, nonce: Nonce) -> bool {
        let reach = self.reaches.open.get(&peer);
        let ours = reach.is_some_and(|reach| reach.sent > 0 && reach.nonce == nonce);
        if ours {
            self.processes.reached(peer);
            self.reach_over(peer);
        }
        ours
    }

    /// CHALLENGE has come on a test connection.
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

    /// The test connection could not be made, or has failed. `errno` 0: the peer ended it, or sent no valid message.
    pub(super) fn aside_lost(&mut self, peer: EndpointId, errno: i32) {
        if OF_PATH.contains(&errno) {
            self.processes.shut(peer);
        }
        self.reach_over(peer);
    }
}
