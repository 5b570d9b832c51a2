//! Flows whose transport goes through the witness: `docs/PROTOCOL.md`, section "The witness".
//!
//! Only a resume tells what the peer has received, so a relayed flow with unacknowledged bytes looks stalled, and each such stall is a resume.
//! Mostly it goes through the witness again. Now and then the direct paths come first: so the flow comes back when the network is well again.

use std::time::Duration;

use super::Endpoint;
use super::flow::State;
use super::outage::Outage;
use super::paths::RelayTurns;
use crate::event::EscalateReason;
use crate::ids::{Cause, FinHow, FlowToken, Time, Verdict};
use crate::transport::TransportKind;

/// How often a relayed flow tries the direct paths first.
const COME_BACK: Duration = Duration::from_secs(5);

/// What is known of such a flow.
pub(super) struct Relayed {
    /// When the direct paths were left, or came first in attempts.
    tried: Time,
    /// The peer's application has closed the flow, as the peer has said in a resume: nobody there waits for more.
    pub(super) peer_closed: bool,
}

impl Relayed {
    pub(super) fn new(now: Time) -> Self {
        Relayed {
            tried: now,
            peer_closed: false,
        }
    }
}

impl Endpoint {
    /// Whether the flow goes through the witness.
    pub fn is_relayed(&self, token: FlowToken) -> bool {
        self.relayed.contains_key(&token)
    }

    /// Whether the peer's application has closed such a flow.
    pub(super) fn has_peer_closed(&self, token: FlowToken) -> bool {
        let relayed = self.relayed.get(&token);
        relayed.is_some_and(|relayed| relayed.peer_closed)
    }

    /// Whether both applications have closed such a flow. What is left to do is to tell the peer that everything has arrived.
    pub(super) fn have_both_closed(&self, token: FlowToken) -> bool {
        let ours = self.flows[&token].fin;
        self.has_peer_closed(token) && matches!(ours, Some((_, FinHow::Close)))
    }

    /// Ends a flow that both applications have closed, because the peer cannot be told that everything has arrived: most likely it knows,
    /// and is gone. False for all other flows.
    pub(super) fn end_untold(&mut self, now: Time, token: FlowToken) -> bool {
        let both = self.have_both_closed(token);
        if both {
            self.flow(token).complete = true;
            self.escalate(now, token, EscalateReason::PeerClosed, Verdict::Eof);
        }
        both
    }

    /// The front end keeps so many bytes of a relayed flow that a resume must tell how many of them the peer has.
    pub fn handle_full(&mut self, now: Time, token: FlowToken) {
        let waits = self.is_relayed(token) && !self.has_peer_closed(token);
        let Some(flow) = self.flows.get_mut(&token).filter(|_| waits) else {
            return;
        };
        if flow.state() != State::Live {
            return;
        }
        let direct = flow.connects_by() != Some(TransportKind::RELAY);
        match &mut flow.outage {
            None => self.begin_outage(now, token, Outage::new(now, Cause::Stall)),
            // The direct paths have had their time.
            Some(outage) if direct && !outage.relay_first => {
                outage.relay_first = true;
                self.connect_by_relay(now, token);
            }
            Some(_) => {}
        }
    }

    /// Whether the attempts of a new outage begin with the witness. After an error they do: the witness was the only way until now.
    pub(super) fn relay_first(&mut self, now: Time, token: FlowToken, cause: Cause) -> bool {
        match (self.relayed.get_mut(&token), cause) {
            (None, _) => false,
            (Some(relayed), Cause::Stall) if now.since(relayed.tried) >= COME_BACK => {
                relayed.tried = now;
                false
            }
            (Some(_), _) => true,
        }
    }

    /// From when on connections go through the witness.
    pub(super) fn relay_turns(&self, token: FlowToken) -> RelayTurns {
        let flow = &self.flows[&token];
        let first = flow
            .outage
            .as_ref()
            .is_some_and(|outage| outage.relay_first);
        match (self.is_relayed(token), first) {
            (_, true) => RelayTurns::First,
            (true, false) => RelayTurns::Third,
            (false, false) => RelayTurns::Late,
        }
    }
}
