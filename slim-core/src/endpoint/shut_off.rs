//! Peers whose ports cannot be reached from here, though they reach ours: `docs/PROTOCOL.md`, section "End of a flow,
//! and questions about it".
//!
//! A typical host firewall lets in only packets of connections that the host has begun. So a client behind it
//! has a session, but answers no QUERY and takes no resume connection. When its process dies, its kernel ends the
//! stream without a FIN message, and no process answers QUERY. A forged end of stream during a network failure looks
//! the same. Three facts together tell the two cases apart:
//!
//! * The peer's kernel still answers on the connection itself, with segments behind the end of the stream. So the
//!   network works, and that kernel has ended the stream too, or has sent more that is still on its way.
//! * QUERYs sent after that are not answered, either.
//! * An attempt fails. By then, bytes on their way have arrived, and a process that was stopped for a while answers again.
//!
//! The kernel probe and the attempt are skipped if the process has never answered at its control port or its resume port, and
//! either it was found to be out of reach while the network worked (`reach.rs`), or its host is remembered here.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use super::outage::Proof;
use super::record::QueryPurpose;
use super::{Action, Endpoint};
use crate::event::LegacyReason;
use crate::ids::{FlowToken, Time};

/// How long a host is remembered.
const AGE: Duration = Duration::from_secs(600);
/// Maximum number of hosts remembered.
const MOST: usize = 1024;

/// Hosts from which an end of stream had to be believed without an answer.
#[derive(Default)]
pub(super) struct ShutOff {
    since: HashMap<IpAddr, Time>,
}

impl ShutOff {
    fn note(&mut self, now: Time, host: IpAddr) {
        if self.since.len() >= MOST {
            self.since.retain(|_, since| now.since(*since) < AGE);
        }
        if self.since.len() < MOST || self.since.contains_key(&host) {
            self.since.insert(host, now);
        }
    }

    fn knows(&self, now: Time, host: IpAddr) -> bool {
        let since = self.since.get(&host);
        since.is_some_and(|since| now.since(*since) < AGE)
    }
}

impl Endpoint {
    /// The result of [`Action::Verify`]: whether the peer's kernel has ended the stream.
    pub fn handle_verified(&mut self, now: Time, token: FlowToken, ended: bool) {
        let proof = self.proof(token);
        if !matches!(proof, Proof::Awaited | Proof::AwaitedAlone) {
            return;
        }
        // The transport may have reported an error after the end of stream.
        let ended = ended && self.ended_intact(token);
        self.set_proof(token, if ended { Proof::Given } else { Proof::Denied });
        match (ended, proof) {
            (true, Proof::AwaitedAlone) => self.ask(now, token, QueryPurpose::Eof),
            (true, _) => self.ask_at_once(now, token),
            (false, Proof::AwaitedAlone) => self.look_for_transport(now, token),
            // The answer to QUERY may still come.
            (false, _) => {}
        }
    }

    /// Requests [`Action::Verify`] for an end of stream.
    pub(super) fn verify(&mut self, token: FlowToken) {
        let asks = |query: &super::record::Asked| query.purpose == QueryPurpose::Eof;
        let flow = &self.flows[&token];
        let about_eof = flow.outage.as_ref().is_some_and(|o| o.eof.is_some())
            && flow.query.as_deref().is_none_or(asks);
        if about_eof && self.proof(token) == Proof::Unasked {
            self.set_proof(token, Proof::Awaited);
            self.out.push(Action::Verify { token });
        }
    }

    /// Takes the end of the stream for genuine. The flow becomes plain TCP on the old transport.
    pub(super) fn believe_eof(&mut self, now: Time, token: FlowToken) {
        let host = self.flows[&token].ends.remote().ip();
        self.shut_off.note(now, host);
        self.announce_demote(token);
        self.fall_back(now, token, LegacyReason::NoAnswer);
    }

    /// Whether QUERY to the peer is useless: the peer has never answered, and it was found to be out of
    /// reach (`reach.rs`), or another process of its host did not answer when its stream ended.
    pub(super) fn is_shut_off(&self, now: Time, token: FlowToken) -> bool {
        let flow = &self.flows[&token];
        let shut = flow
            .peer_id()
            .is_some_and(|peer| self.processes.is_shut(peer));
        (shut || self.shut_off.knows(now, flow.ends.remote().ip())) && !self.was_reached(token)
    }

    /// The peer has just asked about a flow. So its process lives, though it may be out of reach. If the end of stream was
    /// forged for both sides, the peer will resume the flow. So the end is not believed without an attempt.
    pub(super) fn peer_asks(&mut self, token: FlowToken) {
        if self.proof(token) == Proof::Given {
            self.set_proof(token, Proof::Denied);
        }
    }

    pub(super) fn was_reached(&self, token: FlowToken) -> bool {
        let peer = self.flows[&token].peer_id();
        peer.is_some_and(|peer| self.processes.was_reached(peer))
    }

    pub(super) fn proof(&self, token: FlowToken) -> Proof {
        let outage = self.flows.get(&token).and_then(|flow| flow.outage.as_ref());
        outage.map_or(Proof::Unasked, |outage| outage.proof)
    }

    pub(super) fn set_proof(&mut self, token: FlowToken, proof: Proof) {
        if let Some(outage) = &mut self.flow(token).outage {
            outage.proof = proof;
        }
    }
}
