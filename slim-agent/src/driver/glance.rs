//! Glances at flows in use: does one wait for an acknowledgement for longer than its round trips explain?
//!
//! A path that drops everything reports nothing. The sweep notices that after a second ([`watch`](super::watch)); a glance notices it
//! within some milliseconds, and the endpoint then asks the peer ([`Endpoint::quiet`](slim_core::endpoint::Endpoint::quiet)). A glance
//! costs a query to the kernel for each flow, so it looks at a limited number of flows, in turn, and only at those that have sent bytes
//! within the last second. It looks more often where another path exists.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use slim_core::{FlowToken, Time};

use super::Driver;

/// Interval between two glances where a flow could move to another path, and where it has only one.
const EVERY: Duration = Duration::from_millis(15);
const EVERY_ALONE: Duration = Duration::from_millis(50);
/// Most flows of a glance.
const MOST: usize = 32;
/// A flow is quiet if its acknowledgement is missing for so long, and for this many round trips.
const QUIET: Duration = Duration::from_millis(8);
const TRIPS: u32 = 2;

/// When to glance, and what the last glances saw.
#[derive(Default)]
pub(crate) struct Glance {
    at: Option<Time>,
    /// Where in the list of flows the next glance begins.
    from: usize,
    /// By how many paths the peers of the flows may be reached that have been looked at since the beginning of the list, at most.
    ways: usize,
    /// Flows that waited: how much was acknowledged, and since when it has not been more.
    waiting: HashMap<FlowToken, (u64, Time)>,
}

impl Glance {
    /// Time of the next glance.
    pub(crate) fn next(&self) -> Option<Time> {
        self.at
    }

    /// A flow has sent bytes.
    pub(crate) fn soon(&mut self, now: Time) {
        self.at.get_or_insert(now + EVERY);
    }

    /// Which of `all` flows to look at now.
    pub(crate) fn window(&mut self, all: usize) -> Range<usize> {
        // There may be fewer flows than at the last glance.
        let from = if self.from < all { self.from } else { 0 };
        let end = all.min(from + MOST);
        self.from = if end == all { 0 } else { end };
        from..end
    }

    /// When to look again, after a window whose flows' peers may be reached by so many paths, at most. `None` if that was 0 for the whole
    /// list.
    fn again(&mut self, ways: usize) -> Option<Duration> {
        let is_whole = self.from == 0;
        let ways = self.ways.max(ways);
        self.ways = if is_whole { 0 } else { ways };
        match ways {
            0 if is_whole => None,
            1 => Some(EVERY_ALONE),
            _ => Some(EVERY),
        }
    }

    pub(crate) fn forget(&mut self, token: FlowToken) {
        self.waiting.remove(&token);
    }
}

impl Driver {
    /// Looks at flows in use, and has the endpoint ask about those that wait.
    pub(super) fn glance(&mut self, now: Time) {
        let mut ways = 0;
        for token in self.watch.glanced_at() {
            let held = self.endpoint.is_held(token);
            if held || self.carriers.contains_key(&token) || self.watch.is_busy(token) {
                continue;
            }
            ways = ways.max(self.endpoint.in_use(now, token));
            if let Some(overdue) = self.overdue(now, token).filter(|time| !time.is_zero()) {
                self.endpoint.quiet(now, token, overdue);
            }
        }
        let again = self.watch.glance.again(ways);
        self.watch.glance.at = again.map(|time| now + time);
    }

    /// For how long the flow has waited for an acknowledgement, without the time that its round trips explain; zero if they explain
    /// all of it. `None` if it does not wait.
    pub(super) fn overdue(&mut self, now: Time, token: FlowToken) -> Option<Duration> {
        let io = self.survivor.io(token);
        let Some(wait) = io.and_then(|io| io.ack_wait()) else {
            self.watch.glance.forget(token);
            return None;
        };
        let waiting = &mut self.watch.glance.waiting;
        let (acked, since) = waiting.entry(token).or_insert((wait.acked, now));
        if *acked != wait.acked {
            (*acked, *since) = (wait.acked, now);
        }
        let waited = wait.waited.max(now.since(*since));
        let overdue = waited.saturating_sub(wait.round_trip * TRIPS);
        Some(match overdue >= QUIET {
            true => overdue,
            false => Duration::ZERO,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With an empty window, no flow would be looked at again.
    #[test]
    fn a_window_is_empty_only_if_there_are_no_flows() {
        let mut glance = Glance::default();
        assert_eq!(glance.window(MOST + 2), 0..MOST);
        assert_eq!(glance.window(1), 0..1);
        assert_eq!(glance.window(MOST + 2), 0..MOST);
        assert_eq!(glance.window(MOST + 2), MOST..MOST + 2);
        assert_eq!(glance.window(0), 0..0);
    }

    #[test]
    fn glances_go_on_until_no_flow_of_the_whole_list_is_in_use() {
        let mut glance = Glance::default();
        let mut again = |ways: [usize; 2]| {
            ways.map(|ways| {
                glance.window(MOST + 1);
                glance.again(ways)
            })
        };
        assert_eq!(again([0, 2]), [Some(EVERY); 2]);
        assert_eq!(again([2, 0]), [Some(EVERY); 2]);
        assert_eq!(again([0, 1]), [Some(EVERY), Some(EVERY_ALONE)]);
        assert_eq!(again([0, 0]), [Some(EVERY), None]);
    }
}
