//! When what is to happen: one table, whose earliest entry is what `poll_timeout` tells.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};

use crate::ids::{ConnId, Counted, EndpointId, FlowToken, Time};

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
    /// The peer has not said that it has closed the flow.
    Explanation,
    /// The user's limit for a whole resume.
    Deadline,
}

impl Timer {
    const ALL: [Timer; 10] = [
        Timer::Hello,
        Timer::HelloDeadline,
        Timer::Window,
        Timer::Hung,
        Timer::Stuck,
        Timer::Backoff,
        Timer::PeerSilent,
        Timer::Query,
        Timer::Explanation,
        Timer::Deadline,
    ];
}

/// Whose timer it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum TimerOwner {
    Flow(FlowToken, Timer),
    /// A connection that has to say who it is.
    Conn(ConnId),
    /// A process that has to say whether it exists.
    Peer(EndpointId),
    /// A process to which connections hang.
    Probe(EndpointId),
    /// A process of which it is not known whether it can be reached.
    Reach(EndpointId),
    /// A process that has to say how it is reached by other kinds of transport.
    Offer(EndpointId),
}

/// All timers. In an outage each of thousands of flows sets a dozen of them, of which hardly any ever goes off. So
/// setting one is cheap, and what is set anew or cleared stays in the queue until its turn would have come.
#[derive(Default)]
pub(super) struct Timers {
    /// The earliest first. Who means something is what `flows` and `others` say; the first one always does.
    queue: BinaryHeap<Reverse<(Time, TimerOwner)>>,
    /// Of each flow that has any; the places are in the order of [`Timer::ALL`].
    flows: Counted<FlowToken, [Option<Time>; Timer::ALL.len()]>,
    others: BTreeMap<TimerOwner, Time>,
    /// How many are set.
    set: usize,
}

/// A queue as long is not looked through for what means nothing.
const SHORT: usize = 64;

impl Timers {
    /// Arms a timer; one of a kind, so an earlier setting is forgotten.
    pub(super) fn set(&mut self, owner: TimerOwner, at: Time) {
        let before = match owner {
            TimerOwner::Flow(token, timer) => {
                self.flows.entry(token).or_default()[timer as usize].replace(at)
            }
            other => self.others.insert(other, at),
        };
        self.set += usize::from(before.is_none());
        if before != Some(at) {
            self.queue.push(Reverse((at, owner)));
            self.tidy();
        }
    }

    pub(super) fn clear(&mut self, owner: TimerOwner) {
        let before = match owner {
            TimerOwner::Flow(token, timer) => {
                let Entry::Occupied(mut all) = self.flows.entry(token) else {
                    return;
                };
                let before = all.get_mut()[timer as usize].take();
                if all.get().iter().all(Option::is_none) {
                    all.remove();
                }
                before
            }
            other => self.others.remove(&other),
        };
        if before.is_some() {
            self.set -= 1;
            self.tidy();
        }
    }

    pub(super) fn get(&self, owner: TimerOwner) -> Option<Time> {
        match owner {
            TimerOwner::Flow(token, timer) => self.flows.get(&token)?[timer as usize],
            other => self.others.get(&other).copied(),
        }
    }

    pub(super) fn clear_flow(&mut self, token: FlowToken) {
        if let Some(all) = self.flows.remove(&token) {
            self.set -= all.iter().flatten().count();
            self.tidy();
        }
    }

    /// How many are set.
    pub(super) fn len(&self) -> usize {
        self.set
    }

    /// The earliest.
    pub(super) fn next(&self) -> Option<Time> {
        self.queue.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes one that is due.
    pub(super) fn pop(&mut self, now: Time) -> Option<TimerOwner> {
        let Reverse((at, owner)) = *self.queue.peek()?;
        if at > now {
            return None;
        }
        self.clear(owner);
        Some(owner)
    }

    /// The first one means something again, and those that mean nothing are not many more than those that do.
    fn tidy(&mut self) {
        if self.set == 0 {
            // A process that had an outage once does not keep the room for it.
            return *self = Timers::default();
        }
        if self.queue.len() > SHORT.max(4 * self.set) {
            let mut queue = std::mem::take(&mut self.queue);
            queue.retain(|Reverse((at, owner))| self.get(*owner) == Some(*at));
            queue.shrink_to_fit();
            self.queue = queue;
        }
        while let Some(&Reverse((at, owner))) = self.queue.peek()
            && self.get(owner) != Some(at)
        {
            self.queue.pop();
        }
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
            TimerOwner::Flow(FLOW, Timer::Hello),
            TimerOwner::Flow(FLOW, Timer::Query),
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
        let owner = TimerOwner::Conn(ConnId(1));
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
            timers.set(TimerOwner::Flow(FLOW, timer), Time(1));
        }
        timers.set(TimerOwner::Flow(FlowToken(2), Timer::Hello), Time(2));
        timers.clear_flow(FLOW);
        assert_eq!(timers.next(), Some(Time(2)));
    }

    #[test]
    fn places_are_in_the_order_of_the_list() {
        for (n, timer) in Timer::ALL.into_iter().enumerate() {
            assert_eq!(timer as usize, n);
        }
    }

    #[test]
    fn what_was_set_anew_or_cleared_is_never_due() {
        let mut timers = Timers::default();
        let owner = |n| TimerOwner::Flow(FlowToken(n), Timer::Stuck);
        for n in 0..10 {
            for at in (0..100).rev() {
                timers.set(owner(n), Time(10 + at + n));
            }
            timers.set(owner(n), Time(50 + n));
        }
        timers.clear(owner(3));
        timers.set(owner(4), Time(5));
        assert_eq!(timers.next(), Some(Time(5)));
        let due = std::iter::from_fn(|| timers.pop(Time(1000)));
        let in_turn = [4, 0, 1, 2, 5, 6, 7, 8, 9].map(owner);
        assert_eq!(due.collect::<Vec<_>>(), in_turn);
        assert!(timers.queue.is_empty() && timers.flows.is_empty());
    }

    #[test]
    fn settings_that_mean_nothing_do_not_pile_up() {
        let mut timers = Timers::default();
        timers.set(TimerOwner::Flow(FLOW, Timer::Window), Time(1));
        for n in 2..10_000 {
            timers.set(TimerOwner::Flow(FLOW, Timer::Stuck), Time(n));
            assert!(timers.queue.len() <= SHORT);
        }
        timers.clear(TimerOwner::Flow(FLOW, Timer::Window));
        assert_eq!(timers.next(), Some(Time(9_999)));
    }
}
