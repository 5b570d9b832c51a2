//! Flows that the application has closed before the peer has acknowledged all bytes.
//!
//! Each holds a descriptor (the transport) and a copy of its unacknowledged bytes. A kernel discards a closed
//! connection (an *orphan*) when there are too many of them, when they take too much memory, or when the peer has
//! acknowledged nothing for a few minutes. The agent does the same, and earlier: it leaves the connection to the
//! kernel, and the connection ends as it would without SLIM. Only a flow that has no transport at that moment loses its
//! unacknowledged bytes; without SLIM it would have lost them when the transport died.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use slim_core::config::Config;
use slim_core::event::LingerLimit;
use slim_core::{FlowToken, Time};

use super::{Driver, Notice};
use slim_stream::Undelivered;
use slim_sys::fds;

/// First and longest interval between two checks of a closed flow.
const FIRST: Duration = Duration::from_millis(10);
const LAST: Duration = Duration::from_secs(1);
/// First interval if the process waits for it.
const FIRST_AT_END: Duration = Duration::from_micros(250);
/// A process that ends waits for acknowledgements that are not overdue for so long.
const PATIENCE: Duration = Duration::from_secs(1);

/// How many times as many relayed flows may be kept.
const RELAYED: usize = 6;

/// Most closed flows, most bytes kept for them, and longest time without progress.
#[derive(Clone, Copy, Debug)]
struct Limits {
    flows: usize,
    bytes: usize,
    still: Duration,
}

/// Table of lingering flows.
pub(crate) struct Linger {
    flows: HashMap<FlowToken, Lingering>,
    /// The same flows in the order in which they were closed.
    order: BTreeSet<(Time, FlowToken)>,
    /// Bytes kept for all of them.
    bytes: usize,
    limits: Limits,
    /// Since when the process waits for these flows, to end then.
    ending: Option<Time>,
}

struct Lingering {
    closed: Time,
    /// Time of the next check, and the interval to the one after it.
    at: Time,
    wait: Duration,
    kept: usize,
    acked: u64,
    /// Since when no further byte has been acknowledged although there was a transport.
    since: Time,
}

impl Linger {
    pub(crate) fn new(config: &Config) -> Self {
        Linger {
            flows: HashMap::new(),
            order: BTreeSet::new(),
            bytes: 0,
            limits: Limits {
                // The application's descriptors count against the same limit.
                flows: (fds::room() / 8).clamp(16, 1024),
                bytes: config.linger_memory,
                still: config.linger,
            },
            ending: None,
        }
    }

    /// The process is about to end. It waits for all closed flows, has their copies already, and needs no descriptors for anything else.
    pub(crate) fn process_ends(&mut self, now: Time) {
        self.ending.get_or_insert(now);
        self.limits = Limits {
            flows: usize::MAX / RELAYED,
            bytes: usize::MAX / RELAYED,
            ..self.limits
        };
    }

    /// Whether the flow is in the table.
    pub(crate) fn has(&self, token: FlowToken) -> bool {
        self.flows.contains_key(&token)
    }

    fn add(&mut self, now: Time, token: FlowToken) {
        let lingering = Lingering {
            closed: now,
            at: now,
            wait: self.first_interval(),
            kept: 0,
            acked: 0,
            since: now,
        };
        if self.flows.insert(token, lingering).is_none() {
            self.order.insert((now, token));
        }
    }

    fn first_interval(&self) -> Duration {
        match self.ending {
            Some(_) => FIRST_AT_END,
            None => FIRST,
        }
    }

    pub(crate) fn forget(&mut self, token: FlowToken) {
        if let Some(lingering) = self.flows.remove(&token) {
            self.order.remove(&(lingering.closed, token));
            self.bytes -= lingering.kept;
        }
        if self.flows.is_empty() {
            self.flows.shrink_to_fit();
        }
    }

    pub(crate) fn tokens(&self) -> impl Iterator<Item = FlowToken> {
        self.flows.keys().copied()
    }

    /// Whether the check at this time is the flow's next one, and not a stale entry.
    pub(crate) fn is_due(&self, at: Time, token: FlowToken) -> bool {
        self.flows.get(&token).is_some_and(|l| l.at == at)
    }

    /// Records a flow's unacknowledged bytes; true if there has been no progress for too long.
    fn note(&mut self, now: Time, token: FlowToken, owed: Undelivered, carried: bool) -> bool {
        let Some(lingering) = self.flows.get_mut(&token) else {
            return false;
        };
        self.bytes = self.bytes - lingering.kept + owed.kept;
        lingering.kept = owed.kept;
        if !carried || lingering.acked != owed.acked {
            lingering.acked = owed.acked;
            lingering.since = now;
        }
        now.since(lingering.since) >= self.limits.still
    }

    /// Sets and returns the time of the flow's next check. Flows with the same interval are checked together.
    fn again(&mut self, now: Time, token: FlowToken) -> Option<Time> {
        let lingering = self.flows.get_mut(&token)?;
        let step = lingering.wait.as_micros() as u64;
        lingering.at = Time((now.0 / step + 1) * step);
        lingering.wait = (lingering.wait * 2).min(LAST);
        Some(lingering.at)
    }

    /// The limit, `times` as high as set, that all flows together exceed, if any.
    fn exceeded(&self, times: usize) -> Option<LingerLimit> {
        if self.flows.len() > self.limits.flows * times {
            Some(LingerLimit::Flows)
        } else {
            (self.bytes > self.limits.bytes * times).then_some(LingerLimit::Memory)
        }
    }
}

impl Driver {
    /// The application has closed the flow: it stays until its bytes are delivered.
    pub(crate) fn linger(&mut self, now: Time, token: FlowToken) {
        if self.survivor.has(token) {
            self.watch.linger.add(now, token);
            self.poll_linger(now, token);
        }
    }

    /// The flow has changed: if it lingers, it is checked at once, because it may soon be delivered. Only a resume tells that of a relayed
    /// flow, and the bytes need some time to arrive before it.
    pub(crate) fn linger_again(&mut self, now: Time, token: FlowToken) {
        let relayed = self.endpoint.is_relayed(token);
        let first = self.watch.linger.first_interval();
        if let Some(lingering) = self.watch.linger.flows.get_mut(&token) {
            (lingering.at, lingering.wait) = match relayed {
                true => (now + lingering.wait, lingering.wait),
                false => (now, first),
            };
            let at = lingering.at;
            self.watch.look_at_lingering(at, token);
        }
    }

    /// The process is about to end: checks all lingering flows, to find transports that have died unnoticed.
    pub(crate) fn look_at_lingering(&mut self, now: Time) {
        let all: Vec<FlowToken> = self.watch.linger.tokens().collect();
        for token in all {
            self.poll_linger(now, token);
        }
    }

    /// Whether a process that ends has to wait for the flow: its kernel alone would not deliver the last bytes, or may not. A peer that takes
    /// nothing, because its application does not read, is not waited for.
    pub(crate) fn needs_process(&mut self, now: Time, token: FlowToken) -> bool {
        // No kernel delivers the end of a relayed flow.
        let away = self.endpoint.lacks_transport(token) || self.endpoint.is_held(token);
        if away || self.endpoint.is_relayed(token) {
            return true;
        }
        let ending = self.watch.linger.ending;
        let Some(ending) = ending.filter(|_| self.watch.finds_silence()) else {
            return false;
        };
        // An overdue acknowledgement leads to a new connection.
        let overdue = self.overdue(now, token);
        overdue.is_some_and(|time| !time.is_zero() || now.since(ending) < PATIENCE)
    }

    pub(crate) fn poll_linger(&mut self, now: Time, token: FlowToken) {
        let Some(io) = self.survivor.io(token) else {
            return self.watch.linger.forget(token);
        };
        let Some(owed) = io.undelivered() else {
            return self.notices.push_back(Notice::Gone(token));
        };
        let carried = !self.endpoint.lacks_transport(token);
        if self.watch.linger.note(now, token, owed, carried) {
            self.orphan(now, token, LingerLimit::Time);
        } else if self.endpoint.is_held(token) {
            // It is looked at again when the timer of the held flows fires, or when it is live again.
        } else if let Some(at) = self.watch.linger.again(now, token) {
            self.watch.look_at_lingering(at, token);
        }
        while let Some((limit, token)) = self.too_many_linger() {
            self.orphan(now, token, limit);
        }
    }

    /// If there are too many closed flows: the limit, and the flow to leave to the kernel. That is the one that was closed first, of those that
    /// lose nothing if there are any. No kernel delivers the end of a relayed flow, so such flows come last, and have higher limits.
    fn too_many_linger(&self) -> Option<(LingerLimit, FlowToken)> {
        let limit = self.watch.linger.exceeded(1)?;
        let order = self.watch.linger.order.iter().map(|(_, token)| *token);
        let relayed = |token| self.endpoint.is_relayed(token);
        let loss = |token: &FlowToken| match relayed(*token) {
            true => 2,
            false => i32::from(self.endpoint.lacks_transport(*token)),
        };
        let token = order.min_by_key(loss)?;
        match relayed(token) {
            true => Some((self.watch.linger.exceeded(RELAYED)?, token)),
            false => Some((limit, token)),
        }
    }

    /// Leaves a closed flow with unacknowledged bytes to the kernel.
    fn orphan(&mut self, now: Time, token: FlowToken, limit: LingerLimit) {
        let kept = self.watch.linger.flows.get(&token).map_or(0, |l| l.kept);
        self.watch.linger.forget(token);
        self.endpoint.orphan(now, token, kept as u64, limit);
        self.release(token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time(ms * 1000)
    }

    fn table(flows: usize, bytes: usize) -> Linger {
        Linger {
            limits: Limits {
                flows,
                bytes,
                still: Duration::from_secs(120),
            },
            ..Linger::new(&Config::default())
        }
    }

    fn undelivered(kept: usize, acked: u64) -> Undelivered {
        Undelivered { kept, acked }
    }

    #[test]
    fn flows_and_their_bytes_are_counted() {
        let mut linger = table(2, 100);
        for n in 1..=2 {
            linger.add(at(n), FlowToken(n));
            assert!(!linger.note(at(n), FlowToken(n), undelivered(50, 0), true));
        }
        assert_eq!(linger.exceeded(1), None);
        linger.note(at(9), FlowToken(1), undelivered(51, 0), true);
        assert_eq!(linger.exceeded(1), Some(LingerLimit::Memory));
        linger.forget(FlowToken(1));
        assert_eq!((linger.bytes, linger.exceeded(1)), (50, None));
        linger.add(at(3), FlowToken(3));
        linger.add(at(3), FlowToken(4));
        assert_eq!(linger.exceeded(1), Some(LingerLimit::Flows));
        for n in 2..=4 {
            linger.forget(FlowToken(n));
        }
        assert_eq!((linger.bytes, linger.order.len()), (0, 0));
    }

    #[test]
    fn time_without_progress_counts_while_there_is_a_transport() {
        let (mut linger, flow) = (table(9, 999), FlowToken(1));
        linger.add(at(0), flow);
        assert!(
            !linger.note(at(1000), flow, undelivered(9, 1), true),
            "progress"
        );
        assert!(!linger.note(at(120_999), flow, undelivered(9, 1), true));
        assert!(linger.note(at(121_000), flow, undelivered(9, 1), true));
        assert!(!linger.note(at(122_000), flow, undelivered(9, 1), false));
        assert!(!linger.note(at(241_999), flow, undelivered(9, 1), true));
        assert!(linger.note(at(242_000), flow, undelivered(9, 1), true));
    }

    #[test]
    fn flows_with_the_same_interval_are_checked_together() {
        let mut linger = table(9, 999);
        for n in 0..5 {
            linger.add(at(n * 100 + n), FlowToken(n));
            for _ in 0..10 {
                linger.again(at(n * 100 + n), FlowToken(n));
            }
            assert_eq!(linger.again(at(5300 + 7 * n), FlowToken(n)), Some(at(6000)));
        }
    }
}
