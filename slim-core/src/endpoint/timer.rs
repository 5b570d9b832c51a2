//! The timer table. `poll_timeout` returns its earliest entry.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};

use crate::ids::{ConnId, Counted, EndpointId, FlowToken, Time};

/// The timers of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Timer {
    /// Send HELLO again, or QUERY to the candidates.
    Hello,
    /// The time for negotiation is over.
    HelloDeadline,
    /// The window of the attempt is over.
    Window,
    /// The connection under way has made no progress for some milliseconds: probe the peer.
    Hung,
    /// The connection under way has made no progress for a second or more: replace it.
    Stuck,
    /// The pause after a failed connection is over: connect again.
    Backoff,
    /// The peer has begun a resume and has sent nothing since.
    PeerSilent,
    /// Send QUERY again, or go on without an answer.
    Query,
    /// The peer has not confirmed in time that it has closed the flow.
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

/// The owner of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum TimerOwner {
    Flow(FlowToken, Timer),
    /// An accepted connection on which RESUME must come.
    Conn(ConnId),
    /// A process that has not answered QUERY (`inquiry.rs`).
    Peer(EndpointId),
    /// A process that is probed because connections to it hang (`probe.rs`).
    Probe(EndpointId),
    /// A process whose reachability is being tested (`reach.rs`).
    Reach(EndpointId),
    /// A process that has not answered OFFER (`locators.rs`).
    Offer(EndpointId),
    /// A process that is accused at the witness (`accusations.rs`).
    Accusation(EndpointId),
    /// A flow that prefers another kind of transport (`failback.rs`).
    Failback(FlowToken),
    /// Locators that failed are tried again (`failback.rs`).
    Outlooks,
    /// Paths that are asked whether they are silent (`silence.rs`).
    Silences,
    /// The peers of held flows are asked (`hold.rs`).
    Hold,
}

/// All timers. In an outage each of thousands of flows sets a dozen timers, and hardly any of them ever fires. So setting a
/// timer must be cheap: if it is set anew or cleared, its old entry stays in the queue until it would have been due.
#[derive(Default)]
pub(super) struct Timers {
    /// The earliest entry first. Entries may be stale, `flows` and `others` are authoritative; the first entry is never stale.
    queue: BinaryHeap<Reverse<(Time, TimerOwner)>>,
    /// The timers of each flow that has any; the index is the position in [`Timer::ALL`].
    flows: Counted<FlowToken, [Option<Time>; Timer::ALL.len()]>,
    others: BTreeMap<TimerOwner, Time>,
    /// Number of timers that are set.
    set: usize,
}

/// A queue up to this length is not searched for stale entries.
const SHORT: usize = 64;

impl Timers {
    /// Arms a timer. An owner has one timer of a kind, so this replaces an earlier setting.
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

    /// Number of timers that are set.
    pub(super) fn len(&self) -> usize {
        self.set
    }

    /// The earliest time at which a timer is due.
    pub(super) fn next(&self) -> Option<Time> {
        self.queue.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes a timer that is due.
    pub(super) fn pop(&mut self, now: Time) -> Option<TimerOwner> {
        let Reverse((at, owner)) = *self.queue.peek()?;
        if at > now {
            return None;
        }
        self.clear(owner);
        Some(owner)
    }

    /// Removes stale entries: all at the front, and all others once they are the large majority.
    fn tidy(&mut self) {
        if self.set == 0 {
            // Give back the memory that an outage needed.
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
    fn the_earliest_timer_fires_first_and_not_before_it_is_due() {
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
    fn setting_a_timer_again_replaces_its_time() {
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
    fn clearing_a_flow_clears_all_its_timers_and_no_others() {
        let mut timers = Timers::default();
        for timer in Timer::ALL {
            timers.set(TimerOwner::Flow(FLOW, timer), Time(1));
        }
        timers.set(TimerOwner::Flow(FlowToken(2), Timer::Hello), Time(2));
        timers.clear_flow(FLOW);
        assert_eq!(timers.next(), Some(Time(2)));
    }

    #[test]
    fn each_timers_index_is_its_position_in_the_list() {
        for (n, timer) in Timer::ALL.into_iter().enumerate() {
            assert_eq!(timer as usize, n);
        }
    }

    #[test]
    fn replaced_and_cleared_settings_never_fire() {
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
    fn stale_queue_entries_do_not_pile_up() {
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
