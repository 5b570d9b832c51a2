//! When what is to happen: one table, whose earliest entry is what `poll_timeout` tells.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{ConnId, EndpointId, FlowToken, Time};

/// What a flow can be waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Timer {
    /// Send HELLO again.
    Hello,
    /// Negotiation has lasted long enough.
    HelloDeadline,
    /// The attempt's window is over.
    Window,
    /// The connection under way has not got on for a moment: is the peer there at all?
    Hung,
    /// The connection under way does not get on.
    Stuck,
    /// Connect again.
    Backoff,
    /// The peer began to resume and then said nothing more.
    PeerSilent,
    /// Send QUERY again, or do without an answer.
    Query,
    /// The user's limit for a whole resume.
    Deadline,
}

impl Timer {
    const ALL: [Timer; 9] = [
        Timer::Hello,
        Timer::HelloDeadline,
        Timer::Window,
        Timer::Hung,
        Timer::Stuck,
        Timer::Backoff,
        Timer::PeerSilent,
        Timer::Query,
        Timer::Deadline,
    ];
}

/// Whose timer it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Owner {
    Flow(FlowToken, Timer),
    /// A connection that has to say who it is.
    Conn(ConnId),
    /// A process that has to say whether it exists.
    Peer(EndpointId),
    /// A process to which connections hang.
    Probe(EndpointId),
}

#[derive(Default)]
pub(super) struct Timers {
    due: BTreeSet<(Time, Owner)>,
    at: BTreeMap<Owner, Time>,
}

impl Timers {
    /// Arms a timer; one of a kind, so an earlier setting is forgotten.
    pub(super) fn set(&mut self, owner: Owner, at: Time) {
        self.clear(owner);
        self.at.insert(owner, at);
        self.due.insert((at, owner));
    }

    pub(super) fn clear(&mut self, owner: Owner) {
        if let Some(at) = self.at.remove(&owner) {
            self.due.remove(&(at, owner));
        }
    }

    pub(super) fn get(&self, owner: Owner) -> Option<Time> {
        self.at.get(&owner).copied()
    }

    pub(super) fn clear_flow(&mut self, token: FlowToken) {
        for timer in Timer::ALL {
            self.clear(Owner::Flow(token, timer));
        }
    }

    /// The earliest.
    pub(super) fn next(&self) -> Option<Time> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Takes one that is due.
    pub(super) fn pop(&mut self, now: Time) -> Option<Owner> {
        let (at, owner) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.clear(owner);
        Some(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOW: FlowToken = FlowToken(1);

    #[test]
    fn the_earliest_comes_first_and_only_when_due() {
        let mut timers = Timers::default();
        let (hello, query) = (
            Owner::Flow(FLOW, Timer::Hello),
            Owner::Flow(FLOW, Timer::Query),
        );
        timers.set(hello, Time(20));
        timers.set(query, Time(10));
        assert_eq!(timers.next(), Some(Time(10)));
        assert_eq!(timers.pop(Time(9)), None);
        assert_eq!(timers.pop(Time(20)), Some(query));
        assert_eq!(timers.pop(Time(20)), Some(hello));
        assert_eq!(timers.pop(Time(20)), None);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn setting_again_moves_it() {
        let mut timers = Timers::default();
        let owner = Owner::Conn(ConnId(1));
        timers.set(owner, Time(10));
        timers.set(owner, Time(30));
        assert_eq!(timers.get(owner), Some(Time(30)));
        assert_eq!(timers.pop(Time(20)), None);
        timers.clear(owner);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_flow_takes_all_its_timers_with_it() {
        let mut timers = Timers::default();
        for timer in Timer::ALL {
            timers.set(Owner::Flow(FLOW, timer), Time(1));
        }
        timers.set(Owner::Flow(FlowToken(2), Timer::Hello), Time(2));
        timers.clear_flow(FLOW);
        assert_eq!(timers.next(), Some(Time(2)));
    }
}
