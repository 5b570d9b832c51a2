//! Failed negotiations, remembered for late messages of the peer: `docs/PROTOCOL.md`, section "Negotiation".
//!
//! A flow without a session is forgotten as soon as it has become plain TCP. Two messages may still come: the answer to our
//! HELLO, whose sender then relies on a session, and the peer's HELLO, which must not be taken for one of a later connection.

use std::net::SocketAddr;
use std::time::Duration;

use super::Endpoint;
use super::aged::Aged;
use super::close::Tomb;
use super::ends::Ends;
use super::negotiate::{KNOWN, WAIT_LIFE};
use super::record::{FlowRecord, Peer};
use crate::addr::on_link_of;
use crate::auth::{FlowKey, Fresh, KeyInputs};
use crate::config::{Config, Policy};
use crate::ids::{FlowId, Role, Time, take};
use crate::wire::{self, FlowStatus, HelloAck, Message, Parsed};

/// Maximum number of entries in each table.
const MOST: usize = 4096;
/// How long after HELLO its answer may come. An acceptor keeps a HELLO for an unaccepted connection half as long.
const ANSWER_AGE: Duration = Duration::from_secs(120);

/// How long after the end of its connection a HELLO may come.
pub(super) const OVERTAKEN: Duration = Duration::from_secs(1);

/// How long it may take until an accepted connection is reported to the endpoint.
const ACCEPTING: Duration = Duration::from_millis(300);

/// The connection that a HELLO names, local end first, and its flow id.
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

/// Failed negotiations.
pub(super) struct Late {
    /// Connector: flows whose HELLO was not answered.
    asked: Aged<FlowId, Unanswered, MOST>,
    /// Acceptor: flows for which no HELLO has come.
    unasked: Aged<Ends, Unasked, MOST>,
    /// Connector: by addresses, the id of the last flow that ended without an answer.
    unmet: Aged<Ends, FlowId, MOST>,
    /// Acceptor: flow ids of HELLOs whose connectors did not show the key before the flow became plain TCP. A connector that was told to
    /// wait may repeat HELLO for that long.
    refused: Aged<FlowId, (), MOST>,
}

/// The data to verify and handle the late answer to a HELLO.
struct Unanswered {
    random_c: [u8; 32],
    ends: Ends,
    status: FlowStatus,
    /// The kernel's number of the connection.
    connection: Option<u64>,
}

/// An accepted connection that ended, or became plain TCP, before a HELLO came.
struct Unasked {
    /// Flow id of the first HELLO that has come since.
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
            // A connector with the same settings repeats HELLO no longer than this.
            unasked: Aged::new(config.hello_timeout * KNOWN),
            unmet: Aged::new(ANSWER_AGE),
            refused: Aged::new(WAIT_LIFE),
        }
    }

    pub(super) fn expire(&mut self, now: Time) {
        self.asked.expire(now);
        self.unasked.expire(now);
        self.unmet.expire(now);
        self.refused.expire(now);
    }

    /// Acceptor: the flow of the HELLO with this flow id is plain TCP from now on.
    pub(super) fn refuse(&mut self, now: Time, flow: FlowId) {
        self.refused.put(now, flow, ());
    }

    /// Acceptor: whether the flow of the HELLO with this flow id has become plain TCP.
    pub(super) fn refuses(&self, now: Time, flow: FlowId) -> bool {
        self.refused.get(now, &flow).is_some()
    }

    /// Whether a flow with these addresses ended without an answer.
    pub(super) fn was_unmet(&self, now: Time, ends: &Ends) -> bool {
        self.unmet.get(now, ends).is_some()
    }

    /// Connector: the addresses of flows that ended without an answer.
    pub(super) fn asked_ends(&self) -> impl Iterator<Item = &Ends> {
        self.unmet.keys()
    }

    /// A new connection with these addresses is made: a late HELLO_ACK for the earlier one must not be answered.
    pub(super) fn supersede(&mut self, now: Time, ends: &Ends) {
        if let Some(id) = self.unmet.get(now, ends) {
            self.asked.remove(id);
        }
    }

    /// The entry to answer a late HELLO_ACK with. `None` if there may have been a later connection with the same addresses: a
    /// later one is known, or the entry by addresses has expired.
    fn unanswered(&self, now: Time, flow: FlowId) -> Option<&Unanswered> {
        let unanswered = self.asked.get(now, &flow)?;
        let last = self.unmet.get(now, &unanswered.ends);
        (last == Some(&flow)).then_some(unanswered)
    }

    /// The connection for which the HELLO with this flow id was sent, if its late answer would be handled, and its number.
    pub(super) fn asked_about(&self, now: Time, flow: FlowId) -> Option<(&Ends, u64)> {
        let unanswered = self.unanswered(now, flow)?;
        Some((&unanswered.ends, unanswered.connection?))
    }

    pub(super) fn len(&self) -> usize {
        self.asked.len() + self.unasked.len() + self.unmet.len() + self.refused.len()
    }
}

impl Endpoint {
    /// Remembers a flow whose peer was never known. `asked`: the flow id of its last candidate.
    pub(super) fn note_unmet(
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
                    connection: take(&mut self.numbers, flow.token),
                };
                let id = asking.hello.flow;
                self.late.asked.put(now, id, unanswered);
            }
            (Role::Connector, _) => {}
        }
    }

    /// Forgets the earlier connection with these addresses: a later one has been accepted, or may exist.
    pub(super) fn forget_unasked(&mut self, ends: &Ends) {
        self.late.unasked.remove(ends);
    }

    /// If a connection with these addresses has ended without a HELLO: the kernel's number of it, if known.
    pub(super) fn ended_unasked(&self, now: Time, ends: &Ends) -> Option<Option<u64>> {
        Some(self.late.unasked.get(now, ends)?.connection)
    }

    /// Whether the application did not close that connection in good order, so that there is no end to report.
    pub(super) fn was_thrown_away(&self, now: Time, ends: &Ends) -> bool {
        let unasked = self.late.unasked.get(now, ends);
        unasked.is_some_and(|unasked| !matches!(unasked.status, FlowStatus::Closed(_)))
    }

    /// If this message is a HELLO that has waited at least 300 ms for its connection to be accepted: the local address that it
    /// names.
    pub fn is_waiting(&self, now: Time, from: SocketAddr, data: &[u8]) -> Option<SocketAddr> {
        let (tuple, flow) = waiting_for(from, data)?;
        let waits = self.pending.has_waited(now, tuple, flow, ACCEPTING);
        waits.then_some(tuple.0)
    }

    /// No connection has waited in the queue of the listener that this HELLO is for. So its connection was accepted where the
    /// front end does not see it, or is not to be a flow.
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

    /// The status of the forgotten flow that this HELLO is for; `None` if the HELLO is not known to be for a forgotten flow.
    pub(super) fn too_late(&mut self, now: Time, ends: &Ends, flow: FlowId) -> Option<FlowStatus> {
        let unasked = self.late.unasked.get_mut(now, ends)?;
        // The next connection with these addresses has another flow id, and may not be accepted yet. This cannot be the case if
        // the connection's number is known, because the driver has compared it, or if the driver has found that no connection
        // waits in the queue.
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

    /// As [`too_late`](Self::too_late), for an OPEN, which is not repeated and so comes soon or not at all.
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

    /// Whether this is a forgotten flow whose HELLO was not answered, so that its key is not known.
    pub(super) fn awaits_answer(&self, now: Time, flow: FlowId) -> bool {
        self.late.unanswered(now, flow).is_some()
    }

    /// HELLO_ACK for a forgotten flow: its sender relies on a session, so it is told that there is none, or how the flow ended.
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
