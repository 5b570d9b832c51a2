//! Agents that several copies of SLIM in one process share: see [`offered`](crate::offered).

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use slim_core::FlowToken;
use slim_core::config::Config;

use super::{Agent, AgentPlace};
use crate::commands::command::{Command, FlowsEnd};
use crate::commands::done;
use crate::offered::guest::AgentGuest;

impl Agent {
    /// The agent that another copy of SLIM in this process [offers](crate::offered), if one does, and if these settings are those of that
    /// agent. The job key's file must have been read. The caller must [`leave`](Self::leave) it. Its methods are those that the front
    /// end of a program needs; the others do nothing.
    pub fn join(config: &Config) -> Option<Agent> {
        AgentGuest::join(config).map(|guest| Self::at(AgentPlace::Elsewhere(guest)))
    }

    /// For an agent that [another copy](Self::join) has: has it forget all flows that were opened with this handle, and waits at most
    /// `limit` until it refers to none of them. Returns whether that is so. Later commands are not carried out.
    pub fn leave(&self, limit: Duration) -> bool {
        self.guest().is_none_or(|guest| guest.leave(limit))
    }

    /// Whether [another copy](Self::join) has the agent.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self.inner.place, AgentPlace::Elsewhere(_))
    }

    /// Whether an agent of another copy has ended, or cannot be used any more for another reason.
    pub fn has_left(&self) -> bool {
        match &self.inner.place {
            AgentPlace::Here(_) => false,
            AgentPlace::Elsewhere(guest) => self.is_dead() || !guest.is_there(),
        }
    }

    /// Whether both handles are of one agent, and of one [use](Self::join) of it.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Ends the session of the flows with these tokens. Returns how many there were, without closed ones that are not delivered; `None`
    /// if the agent is gone, or has not answered within `limit`.
    pub(crate) fn end_flows(
        &self,
        tokens: RangeInclusive<FlowToken>,
        how: FlowsEnd,
        limit: Duration,
    ) -> Option<usize> {
        let answer = Arc::<AtomicUsize>::default();
        let (done, is_done) = done::done();
        let end = Command::EndFlows {
            tokens,
            how,
            answer: answer.clone(),
            done,
        };
        let ended = self.send(end) && self.wait(is_done, limit);
        ended.then(|| answer.load(Ordering::Acquire))
    }

    /// The use of another copy's agent.
    pub(super) fn guest(&self) -> Option<&AgentGuest> {
        match &self.inner.place {
            AgentPlace::Elsewhere(guest) if !self.is_dead() => Some(guest),
            _ => None,
        }
    }
}
