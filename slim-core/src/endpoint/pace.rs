//! Pacing: limits the number of flows that send HELLO to the same address, or connect to it, at a
//! time. `docs/PROTOCOL.md`, section "Many flows at once".
//!
//! Without a limit, a process with ten thousand flows to one peer would send ten thousand datagrams, or SYNs, in
//! one burst. The receiving socket or listener queues some hundreds of them and drops the
//! others, which would then be repeated all at the same time.
//!
//! So each address has a *lane* with a number of slots. A flow under way takes a slot; the other flows wait for
//! one. Every fourth success adds a slot, up to a limit that is lower for a near address, and a loss halves their number. So
//! an address that can take more gets more after some round trips.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use crate::ids::{FlowToken, Role, Time};

/// Slots of an address: initial, minimum and maximum number. A UDP socket
/// with the usual receive buffer can certainly queue the initial number of datagrams.
const FIRST: usize = 128;
const LEAST: usize = 16;
const MOST: usize = 512;
/// An address that answers faster is so near that the initial number of slots keeps both ends busy. More flows under way would
/// only wait longer. They would also make it more likely that both ends of a flow connect at the same time; one of the two
/// connections is wasted.
const NEAR: Duration = Duration::from_millis(5);
/// Successes that add a slot.
const PER_MORE: u32 = 4;
/// Losses within this time count as one.
const ONE_LOSS: Duration = Duration::from_millis(50);
/// How long the lane of an unused address is kept.
const IDLE_AGE: Duration = Duration::from_secs(60);
/// Number of lanes from which on a new lane displaces all unused ones.
const IDLE: usize = 1024;

/// The lanes of all addresses or locators.
pub(super) struct Pace<To> {
    lanes: HashMap<To, Lane>,
}

impl<To> Default for Pace<To> {
    fn default() -> Self {
        Pace {
            lanes: HashMap::new(),
        }
    }
}

struct Lane {
    under_way: BTreeSet<FlowToken>,
    /// Waiting flows in the order of their arrival. Entries that are not in `waiting` are stale.
    queue: VecDeque<(FlowToken, Role)>,
    waiting: HashSet<FlowToken>,
    /// Number of slots.
    allowed: usize,
    /// Successes since the last slot was added.
    successes: u32,
    /// When `allowed` was halved last.
    halved: Option<Time>,
    /// When the address answered last.
    heard: Option<Time>,
    /// The address has answered faster than [`NEAR`].
    near: bool,
}

impl Default for Lane {
    fn default() -> Self {
        Lane {
            under_way: BTreeSet::new(),
            queue: VecDeque::new(),
            waiting: HashSet::new(),
            allowed: FIRST,
            successes: 0,
            halved: None,
            heard: None,
            near: false,
        }
    }
}

impl<To: Copy + Eq + Hash> Pace<To> {
    /// Gives the flow a slot, if one is free. If not, false: the flow waits, and [`next`](Self::next) returns it later. If
    /// many flows break together, their two sides take the flows from opposite ends, so that they rarely resume the same
    /// flow at the same time: connectors take the flow that has waited longest, acceptors the one that came last.
    pub(super) fn enter(&mut self, to: To, token: FlowToken, role: Role) -> bool {
        if !self.lanes.contains_key(&to) {
            self.make_room();
        }
        let lane = self.lanes.entry(to).or_default();
        if lane.under_way.len() < lane.allowed || lane.under_way.contains(&token) {
            lane.waiting.remove(&token);
            lane.under_way.insert(token);
            return true;
        }
        if lane.waiting.insert(token) {
            lane.queue.push_back((token, role));
        }
        false
    }

    /// Whether the flow waits for a slot.
    pub(super) fn is_waiting(&self, to: To, token: FlowToken) -> bool {
        self.lanes
            .get(&to)
            .is_some_and(|lane| lane.waiting.contains(&token))
    }

    /// The flow needs no slot any more. The caller then calls [`next`](Self::next).
    pub(super) fn leave(&mut self, to: To, token: FlowToken) {
        if let Some(lane) = self.lanes.get_mut(&to) {
            lane.under_way.remove(&token);
            if lane.waiting.remove(&token) && lane.waiting.is_empty() {
                lane.queue.clear();
            }
        }
    }

    /// The next waiting flow, if a slot is free; it has the slot from now on.
    pub(super) fn next(&mut self, to: To) -> Option<FlowToken> {
        let lane = self.lanes.get_mut(&to)?;
        while lane.under_way.len() < lane.allowed {
            let acceptor = matches!(lane.queue.back(), Some((_, Role::Acceptor)));
            let (token, _) = if acceptor {
                lane.queue.pop_back()?
            } else {
                lane.queue.pop_front()?
            };
            if lane.waiting.remove(&token) {
                lane.under_way.insert(token);
                return Some(token);
            }
        }
        None
    }

    /// The address has answered; `took`: how long that took, if known.
    pub(super) fn answered(&mut self, now: Time, to: To, took: Option<Duration>) {
        if let Some(lane) = self.lanes.get_mut(&to) {
            lane.heard = Some(now);
            lane.near |= took.is_some_and(|took| took < NEAR);
            lane.successes += 1;
            if lane.successes == PER_MORE {
                lane.successes = 0;
                let most = if lane.near { FIRST } else { MOST };
                lane.allowed = lane.allowed.max(most.min(lane.allowed + 1));
            }
        }
    }

    /// A message to the address, or a connection to it, was lost.
    pub(super) fn lost(&mut self, now: Time, to: To) {
        if let Some(lane) = self.lanes.get_mut(&to)
            && lane.halved.is_none_or(|at| now.since(at) >= ONE_LOSS)
        {
            lane.halved = Some(now);
            lane.allowed = LEAST.max(lane.allowed / 2);
        }
    }

    /// Whether the address has answered within the last `age`.
    pub(super) fn heard_within(&self, now: Time, to: To, age: Duration) -> bool {
        let heard = self.lanes.get(&to).and_then(|lane| lane.heard);
        heard.is_some_and(|at| now.since(at) < age)
    }

    /// Forgets addresses that are unused and have not answered for [`IDLE_AGE`].
    pub(super) fn expire(&mut self, now: Time) {
        let fresh = |lane: &Lane| lane.heard.is_some_and(|at| now.since(at) < IDLE_AGE);
        self.lanes.retain(|_, lane| {
            !lane.under_way.is_empty() || !lane.waiting.is_empty() || fresh(lane)
        });
        self.lanes.shrink_to_fit();
    }

    pub(super) fn len(&self) -> usize {
        self.lanes.len()
    }

    fn make_room(&mut self) {
        if self.lanes.len() >= IDLE {
            self.lanes
                .retain(|_, lane| !lane.under_way.is_empty() || !lane.waiting.is_empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    const AT: Time = Time(1_000_000);

    fn to() -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], 80))
    }

    fn full(role: Role) -> Pace<SocketAddr> {
        let mut pace = Pace::default();
        for n in 0..FIRST as u64 + 3 {
            let goes = pace.enter(to(), FlowToken(n), role);
            assert_eq!(goes, n < FIRST as u64);
        }
        pace
    }

    #[test]
    fn a_flow_waits_for_a_slot_while_the_lane_is_full() {
        let mut pace = full(Role::Connector);
        let first = FlowToken(FIRST as u64);
        assert!(pace.is_waiting(to(), first));
        assert_eq!(pace.next(to()), None);
        pace.leave(to(), FlowToken(5));
        assert_eq!(pace.next(to()), Some(first));
        assert_eq!(pace.next(to()), None);
        assert!(!pace.is_waiting(to(), first));
    }

    #[test]
    fn connectors_and_acceptors_start_from_opposite_ends() {
        for (role, next) in [(Role::Connector, 0), (Role::Acceptor, 2)] {
            let mut pace = full(role);
            pace.leave(to(), FlowToken(0));
            assert_eq!(pace.next(to()), Some(FlowToken(FIRST as u64 + next)));
        }
    }

    #[test]
    fn a_waiting_flow_that_leaves_is_passed_over() {
        let mut pace = full(Role::Connector);
        pace.leave(to(), FlowToken(FIRST as u64));
        pace.leave(to(), FlowToken(0));
        assert_eq!(pace.next(to()), Some(FlowToken(FIRST as u64 + 1)));
    }

    #[test]
    fn answers_add_slots_and_losses_halve_them_within_bounds() {
        let mut pace = full(Role::Connector);
        for _ in 0..PER_MORE {
            assert_eq!(pace.next(to()), None);
            pace.answered(AT, to(), None);
        }
        assert_eq!(pace.next(to()), Some(FlowToken(FIRST as u64)));
        for _ in 0..PER_MORE * MOST as u32 {
            pace.answered(AT, to(), None);
        }
        assert_eq!(pace.lanes[&to()].allowed, MOST);
        pace.lost(AT, to());
        pace.lost(AT, to());
        assert_eq!(pace.lanes[&to()].allowed, MOST / 2, "one loss");
        for n in 1..20 {
            pace.lost(AT + ONE_LOSS * n, to());
        }
        assert_eq!(pace.lanes[&to()].allowed, LEAST);
    }

    #[test]
    fn a_near_address_never_gets_more_than_the_initial_slots() {
        let mut pace = full(Role::Connector);
        let allowed = |pace: &Pace<SocketAddr>| pace.lanes[&to()].allowed;
        pace.answered(AT, to(), Some(Duration::ZERO));
        for _ in 0..PER_MORE * MOST as u32 {
            pace.answered(AT, to(), Some(2 * NEAR));
        }
        assert_eq!(allowed(&pace), FIRST);
        pace.lost(AT, to());
        assert_eq!(allowed(&pace), FIRST / 2);
        for _ in 0..PER_MORE * MOST as u32 {
            pace.answered(AT, to(), Some(2 * NEAR));
        }
        assert_eq!(allowed(&pace), FIRST);
    }

    #[test]
    fn unused_addresses_are_forgotten() {
        let mut pace = Pace::default();
        for n in 0..3 * IDLE as u64 {
            let to = SocketAddr::from(([10, 0, (n >> 8) as u8, n as u8], 80));
            pace.enter(to, FlowToken(n), Role::Connector);
            pace.leave(to, FlowToken(n));
        }
        assert!(pace.lanes.len() <= IDLE);
    }
}
