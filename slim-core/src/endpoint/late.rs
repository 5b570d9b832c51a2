//! Negotiations that came to nothing, remembered for peers who are late: `docs/PROTOCOL.md`, section "Negotiation".
//!
//! A flow without a session is forgotten as soon as it has become plain TCP. What can still come is the answer to its
//! HELLO, from a peer who counts on us then, or the peer's HELLO, which must not be kept for a connection to come.

use std::net::SocketAddr;
use std::time::Duration;

use super::Endpoint;
use super::aged::Aged;
use super::close::Tomb;
use super::ends::Ends;
use super::negotiate::KNOWN;
use super::record::{FlowRecord, Peer};
use crate::addr::on_link_of;
use crate::auth::{FlowKey, Fresh, KeyInputs};
use crate::config::{Config, Policy};
use crate::ids::{FlowId, Role, Time, take};
use crate::wire::{self, FlowStatus, HelloAck, Message, Parsed};

/// Negotiations remembered, of each role.
const MOST: usize = 4096;
/// How long an answer to HELLO may be under way: a HELLO is kept half as long for its connection to be accepted.
const ANSWER_AGE: Duration = Duration::from_secs(120);

/// For how long a HELLO may be overtaken by the end of its connection.
pub(super) const OVERTAKEN: Duration = Duration::from_secs(1);

/// How long an accepted connection may take to become known here.
const ACCEPTING: Duration = Duration::from_millis(300);

/// The connection, our end first, and the flow of a HELLO.
fn waiting_for(from: SocketAddr, data: &[u8]) -> Option<((SocketAddr, SocketAddr), FlowId)> {
    let Message::Hello(hello) = wire::parse(data).ok()?.message else {
        return None;
    };
    let (acceptor, connector) = (
        on_link_of(hello.acceptor, from),
        on_link_of(hello.connector, from),
    );
    Some(((acceptor, connector), hello.flow))
}

/// See the module.
pub(super) struct Late {
    /// Of connectors: HELLO has had no answer.
    asked: Aged<FlowId, Unanswered, MOST>,
    /// Of acceptors: no HELLO has come.
    unasked: Aged<Ends, Unasked, MOST>,
    /// Of connectors: what the last flow with these addresses was called for which there was no answer.
    unmet: Aged<Ends, FlowId, MOST>,
}

/// What the answer to a HELLO is checked with.
struct Unanswered {
    random_c: [u8; 32],
    ends: Ends,
    status: FlowStatus,
}

struct Unasked {
    /// The first HELLO that has come since.
    first: Option<FlowId>,
    status: FlowStatus,
    since: Time,
    /// The kernel's number of the connection.
    connection: Option<u64>,
}

impl Late {
    pub(super) fn new(config: &Config) -> Self {
        Late {
            asked: Aged::new(ANSWER_AGE),
            // No connector with our settings asks longer.
            unasked: Aged::new(config.hello_timeout * KNOWN),
            unmet: Aged::new(ANSWER_AGE),
        }
    }

    pub(super) fn expire(&mut self, now: Time) {
        self.asked.expire(now);
        self.unasked.expire(now);
        self.unmet.expire(now);
    }

    /// Whether a flow with these addresses ended without an answer.
    pub(super) fn was_unmet(&self, now: Time, ends: &Ends) -> bool {
        self.unmet.get(now, ends).is_some()
    }

    /// The addresses of connectors' flows that HELLO has had no answer for.
    pub(super) fn asked_ends(&self) -> impl Iterator<Item = &Ends> {
        self.unmet.keys()
    }

    /// A connection with these addresses stands: nobody is to be told of the one before it.
    pub(super) fn supersede(&mut self, now: Time, ends: &Ends) {
        if let Some(id) = self.unmet.get(now, ends) {
            self.asked.remove(id);
        }
    }

    /// What is needed to answer HELLO_ACK for a flow that is forgotten, if no later connection with its addresses is known.
    /// There may have been one if the table of addresses has forgotten the flow.
    fn unanswered(&self, now: Time, flow: FlowId) -> Option<&Unanswered> {
        let unanswered = self.asked.get(now, &flow)?;
        let last = self.unmet.get(now, &unanswered.ends);
        (last == Some(&flow)).then_some(unanswered)
    }

    pub(super) fn len(&self) -> usize {
        self.asked.len() + self.unasked.len() + self.unmet.len()
    }
}

impl Endpoint {
    /// Remembers a flow whose peer was never known; `asked`: by what name it was asked for last.
    pub(super) fn never_met(
        &mut self,
        now: Time,
        flow: &FlowRecord,
        status: FlowStatus,
        asked: Option<FlowId>,
    ) {
        if self.config.policy == Policy::Off {
            return;
        }
        if flow.role == Role::Connector {
            let id = flow.id.unwrap_or(FlowId([0; 16]));
            self.late.unmet.put(now, flow.ends.clone(), id);
        }
        match (flow.role, &flow.hello) {
            (Role::Acceptor, _) => {
                let unasked = Unasked {
                    first: asked,
                    status,
                    since: now,
                    connection: take(&mut self.numbers, flow.token),
                };
                self.late.unasked.put(now, flow.ends.clone(), unasked);
            }
            (Role::Connector, Some(asking)) if asking.sent > 0 => {
                let unanswered = Unanswered {
                    random_c: asking.hello.random_c,
                    ends: flow.ends.clone(),
                    status,
                };
                let id = asking.hello.flow;
                self.late.asked.put(now, id, unanswered);
            }
            (Role::Connector, _) => {}
        }
    }

    /// A connection has been accepted that has the addresses of an earlier one, perhaps.
    pub(super) fn met_again(&mut self, ends: &Ends) {
        self.late.unasked.remove(ends);
    }

    /// The kernel's number of a connection with these addresses that has ended without a HELLO, if such a one is known.
    pub(super) fn ended_unasked(&self, now: Time, ends: &Ends) -> Option<Option<u64>> {
        Some(self.late.unasked.get(now, ends)?.connection)
    }

    /// Whether that one was thrown away, and did not end in order.
    pub(super) fn was_thrown_away(&self, now: Time, ends: &Ends) -> bool {
        let unasked = self.late.unasked.get(now, ends);
        unasked.is_some_and(|unasked| !matches!(unasked.status, FlowStatus::Closed(_)))
    }

    /// The address of ours for which this message is a HELLO that has waited for some time for its connection to be accepted.
    pub fn is_waiting(&self, now: Time, from: SocketAddr, data: &[u8]) -> Option<SocketAddr> {
        let (tuple, flow) = waiting_for(from, data)?;
        let waits = self.pending.has_waited(now, tuple, flow, ACCEPTING);
        waits.then_some(tuple.0)
    }

    /// No connection is in the queue of the listener that this HELLO waits for: its own has been accepted where the front end
    /// did not see it, or is not to be a flow.
    pub fn is_not_queued(&mut self, now: Time, from: SocketAddr, data: &[u8]) {
        let Some((tuple, flow)) = waiting_for(from, data) else {
            return;
        };
        while self.pending.take(now, tuple).is_some() {}
        let unasked = Unasked {
            first: Some(flow),
            status: FlowStatus::Legacy,
            since: now,
            connection: None,
        };
        let ends = Ends::new(tuple.0, tuple.1);
        self.late.unasked.put(now, ends, unasked);
    }

    /// What has become of the flow that this HELLO, for which there is none, is for, if that is known.
    pub(super) fn too_late(&mut self, now: Time, ends: &Ends, flow: FlowId) -> Option<FlowStatus> {
        let unasked = self.late.unasked.get_mut(now, ends)?;
        // The next connection with these addresses has another name, and may not be accepted yet. Where its number is
        // known, the driver has looked; or it has found that this one is in no queue.
        let is_known = unasked.first == Some(flow);
        if flow.is_again() && unasked.connection.is_none() && !is_known {
            return None;
        }
        let is_its_own = *unasked.first.get_or_insert(flow) == flow;
        let soon = now.since(unasked.since) < OVERTAKEN;
        let status = match unasked.status {
            closed @ FlowStatus::Closed(_) if soon => closed,
            _ => FlowStatus::Legacy,
        };
        is_its_own.then_some(status)
    }

    /// The same of an OPEN, which comes soon or not at all.
    pub(super) fn ended_before(
        &mut self,
        now: Time,
        ends: &Ends,
        flow: FlowId,
    ) -> Option<FlowStatus> {
        let unasked = self.late.unasked.get_mut(now, ends)?;
        let soon = now.since(unasked.since) < OVERTAKEN;
        let is_its_own = soon && *unasked.first.get_or_insert(flow) == flow;
        is_its_own.then_some(unasked.status)
    }

    /// Whether HELLO of a flow that is forgotten has had no answer, so that there is no key for it.
    pub(super) fn awaits_answer(&self, now: Time, flow: FlowId) -> bool {
        self.late.unanswered(now, flow).is_some()
    }

    /// HELLO_ACK for a flow that is forgotten: its peer counts on a session, and is told that there is none, or how it ended.
    pub(super) fn on_late_ack(&mut self, now: Time, parsed: &Parsed<'_>, ack: &HelloAck) {
        let Some(unanswered) = self.late.unanswered(now, ack.flow) else {
            return self.drop_one();
        };
        let inputs = KeyInputs {
            flow: ack.flow,
            random_c: unanswered.random_c,
            random_s: ack.random_s,
            connector: self.id,
            acceptor: ack.endpoint,
        };
        let key = FlowKey::derive(self.config.job_key.as_ref(), &inputs);
        if !key.verify(Role::Acceptor, Fresh::None, parsed) {
            return self.drop_one();
        }
        let (ip, status) = (unanswered.ends.remote().ip(), unanswered.status);
        self.late.asked.remove(&ack.flow);
        let peer = Peer {
            process: self.processes.share(ack.into()),
            key,
            random_s: ack.random_s,
        };
        let name = (ack.flow, Role::Connector);
        let tomb = Tomb { peer, status };
        self.announce_final_status(name, &tomb, ip);
        self.tombs.put(now, name, tomb);
    }
}
