//! Not everything at once: how many flows may be asking the same address, or connecting to it, at a
//! time. `docs/PROTOCOL.md`, section "Many flows at once".
//!
//! A process with ten thousand flows to one peer would else send ten thousand datagrams, or SYNs, in
//! one burst. The socket or the listener that they go to keeps some hundreds of them and drops the
//! others, which then come again, all together, when the time for that has come.
//!
//! So each address has a *lane*. As many flows as it allows are under way; the others wait for their
//! turn. Every fourth success allows one more if it is far, and what is lost halves it: who can take more gets
//! more, after some round trips.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use crate::ids::{FlowToken, Role, Time};

/// Flows under way to one address: at first, at least, and at most. The first is what a UDP socket
/// with the usual receive buffer certainly keeps.
const FIRST: usize = 128;
const LEAST: usize = 16;
const MOST: usize = 512;
/// Who answers as fast is so near that the first number of flows keeps both ends busy. More under way would only wait
/// longer; and what both sides of a flow make at the same time, one of them makes for nothing.
const NEAR: Duration = Duration::from_millis(5);
/// Successes that allow one more.
const PER_MORE: u32 = 4;
/// Losses within this time count as one.
const ONE_LOSS: Duration = Duration::from_millis(50);
/// How long what was learnt about an address that nobody uses any more is kept.
const IDLE_AGE: Duration = Duration::from_secs(60);
/// Addresses kept that nobody uses any more.
const IDLE: usize = 1024;

/// The lanes of all addresses, or locators.
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
    /// In the order in which they came. An entry that is not in `waiting` means nothing any more.
    queue: VecDeque<(FlowToken, Role)>,
    waiting: HashSet<FlowToken>,
    allowed: usize,
    /// Successes since it has last changed.
    successes: u32,
    /// When it was halved last.
    halved: Option<Time>,
    /// When somebody there answered last.
    heard: Option<Time>,
    /// Somebody has answered at once.
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
    /// Whether the flow may go now. If not, [`next`](Self::next) tells when it may. The two sides of
    /// many flows that break together start from opposite ends, so that they hardly meet: connectors
    /// take those that have waited longest, acceptors those that have come last.
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

    /// Whether the flow waits for its turn.
    pub(super) fn is_waiting(&self, to: To, token: FlowToken) -> bool {
        self.lanes
            .get(&to)
            .is_some_and(|lane| lane.waiting.contains(&token))
    }

    /// The flow is not under way any more, and does not wait. [`next`](Self::next) is to be called.
    pub(super) fn leave(&mut self, to: To, token: FlowToken) {
        if let Some(lane) = self.lanes.get_mut(&to) {
            lane.under_way.remove(&token);
            if lane.waiting.remove(&token) && lane.waiting.is_empty() {
                lane.queue.clear();
            }
        }
    }

    /// Who may go now; it is under way from here on.
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

    /// Somebody there has answered, and has taken as long for it, if that is known.
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

    /// Something that was sent there has had no answer.
    pub(super) fn lost(&mut self, now: Time, to: To) {
        if let Some(lane) = self.lanes.get_mut(&to)
            && lane.halved.is_none_or(|at| now.since(at) >= ONE_LOSS)
        {
            lane.halved = Some(now);
            lane.allowed = LEAST.max(lane.allowed / 2);
        }
    }

    /// Whether somebody there has answered within the last `age`.
    pub(super) fn heard_within(&self, now: Time, to: To, age: Duration) -> bool {
        let heard = self.lanes.get(&to).and_then(|lane| lane.heard);
        heard.is_some_and(|at| now.since(at) < age)
    }

    /// Forgets addresses that nobody has used for long.
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
    fn who_finds_the_lane_full_waits_for_who_is_under_way() {
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
    fn who_does_not_want_to_any_more_is_passed_over() {
        let mut pace = full(Role::Connector);
        pace.leave(to(), FlowToken(FIRST as u64));
        pace.leave(to(), FlowToken(0));
        assert_eq!(pace.next(to()), Some(FlowToken(FIRST as u64 + 1)));
    }

    #[test]
    fn answers_allow_more_and_losses_less_within_bounds() {
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
    fn who_is_near_keeps_the_first_number_and_gets_it_back() {
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
    fn addresses_that_nobody_uses_are_forgotten() {
        let mut pace = Pace::default();
        for n in 0..3 * IDLE as u64 {
            let to = SocketAddr::from(([10, 0, (n >> 8) as u8, n as u8], 80));
            pace.enter(to, FlowToken(n), Role::Connector);
            pace.leave(to, FlowToken(n));
        }
        assert!(pace.lanes.len() <= IDLE);
    }
}
