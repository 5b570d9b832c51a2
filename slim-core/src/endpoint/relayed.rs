//! Flows whose transport goes through the witness: `docs/PROTOCOL.md`, section "The witness".
//!
//! Only a resume tells what the peer has received, so a relayed flow with unacknowledged bytes looks stalled, and each such stall is a resume.
//! Mostly it goes through the witness again. Now and then the direct paths come first: so the flow comes back when the network is well again.

use std::time::Duration;

use super::Endpoint;
use super::flow::State;
use super::outage::Outage;
use super::paths::RelayTurns;
use crate::ids::{Cause, FlowToken, Time};
use crate::transport::TransportKind;

/// How often a relayed flow tries the direct paths first.
const COME_BACK: Duration = Duration::from_secs(5);

impl Endpoint {
    /// The front end keeps so many bytes of a relayed flow that a resume must tell how many of them the peer has.
    pub fn handle_full(&mut self, now: Time, token: FlowToken) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        if flow.state() != State::Live || !self.relayed.contains_key(&token) {
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
            (Some(tried), Cause::Stall) if now.since(*tried) >= COME_BACK => {
                *tried = now;
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
        match (self.relayed.contains_key(&token), first) {
            (_, true) => RelayTurns::First,
            (true, false) => RelayTurns::Third,
            (false, false) => RelayTurns::Late,
        }
    }
}
