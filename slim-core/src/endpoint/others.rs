//! A process that accuses another one at the witness may itself be the one that has lost its network. The witness sees that if this
//! process accuses all others at the same time, even if it has used only one of its flows. So before the first accusation, while the last
//! attempt of the broken flow lasts, the other processes are tested: one flow to each gets a new transport beside the old one. Those of which
//! nothing answers are accused together with the first one. `docs/PROTOCOL.md`, section "The witness".

use std::collections::BTreeSet;

use super::Endpoint;
use super::accusations::Judge;
use super::flow::State;
use super::record::FlowRecord;
use crate::ids::{Cause, EndpointId, FlowToken, Time};

impl Endpoint {
    /// The last attempt to resume this flow begins, and a witness decides after it: tests one flow to each other process.
    pub(super) fn test_others(&mut self, now: Time, token: FlowToken) {
        if self.judge_of_flow(token) != Some(Judge::Witness) {
            return;
        }
        let broken = self.flows.values().filter(|flow| flow.outage.is_some());
        let mut known: BTreeSet<EndpointId> = broken.filter_map(|flow| flow.peer_id()).collect();
        known.insert(self.id);
        let idle = self.flows.values().filter(|flow| {
            let in_reach = |peer| self.processes.was_reached(peer) && known.insert(peer);
            flow.state() == State::Live && flow.peer_id().is_some_and(in_reach)
        });
        let idle: Vec<FlowToken> = idle.map(|flow| flow.token).collect();
        for token in idle {
            if self.judge_of_flow(token) == Some(Judge::Witness) {
                self.fault(now, token, Cause::Stall);
            }
        }
    }

    /// A process has been accused: the flows to others that have not answered since their outage began. They are accused with it.
    pub(super) fn silent_others(&self, now: Time) -> Vec<FlowToken> {
        let tested = self.config.attempt_timeout(0);
        let silent = |flow: &FlowRecord| {
            let outage = flow.outage.as_ref();
            outage.is_some_and(|o| !o.accused && !o.answered && now.since(o.suspected) >= tested)
        };
        let reached = |peer| self.processes.was_reached(peer);
        let all = self.flows.values().filter(|flow| silent(flow));
        all.filter(|flow| flow.state().carries() && flow.peer_id().is_some_and(reached))
            .map(|flow| flow.token)
            .filter(|token| self.judge_of_flow(*token) == Some(Judge::Witness))
            .collect()
    }
}
