//! What is known of the locators that flows would rather use: `failback.rs`.
//!
//! Many flows may prefer the same locator of a process. If it has failed, or nothing is known of it yet, one of them, its *probe*, tries it, and the others wait
//! for what the probe finds. So a locator that stays bad costs one connection and one expiry of the timer in each pause, however many flows
//! wait for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::ids::{EndpointId, FlowToken, Time};
use crate::transport::Locator;

/// First pause after a failure; doubles with each that follows.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(60);
/// If a locator has worked for so long, its failures before that count no more.
const PROVEN: Duration = Duration::from_secs(60);
/// How long the outlook of a locator is kept that no flow waits for.
const KEPT: Duration = Duration::from_secs(180);

/// A process, and a locator that it has told. Other processes, on hosts with addresses of their own, may tell the same locator.
pub(super) type PeerLocator = (EndpointId, Locator);

#[derive(Default)]
pub(super) struct Outlooks {
    all: BTreeMap<PeerLocator, Outlook>,
    /// When those for which flows wait can be probed.
    times: BTreeSet<(Time, PeerLocator)>,
}

struct Outlook {
    finding: Finding,
    /// The last pause; zero if there was no failure.
    pause: Duration,
    probe: Option<FlowToken>,
    /// The last flow that was taken out of `waiting` for a probe. Flows take turns: one that always fails does not keep the others waiting.
    last: Option<FlowToken>,
    waiting: BTreeSet<FlowToken>,
    changed: Time,
    /// Its time in [`Outlooks::times`].
    listed: Option<Time>,
}

#[derive(Clone, Copy)]
enum Finding {
    Unknown,
    Works { since: Time },
    Fails { until: Time },
}

impl Outlook {
    /// Whether a probe may try it now.
    fn is_due(&self, now: Time) -> bool {
        let due = match self.finding {
            Finding::Unknown => true,
            Finding::Works { .. } => false,
            Finding::Fails { until } => until <= now,
        };
        due && self.probe.is_none()
    }

    /// When a flow that waits can probe it, if that depends on nothing but time.
    fn time(&self) -> Option<Time> {
        if self.probe.is_some() || self.waiting.is_empty() {
            return None;
        }
        match self.finding {
            Finding::Unknown => Some(Time(0)),
            Finding::Works { .. } => None,
            Finding::Fails { until } => Some(until),
        }
    }

    fn take_waiting(&mut self) -> Option<FlowToken> {
        let after = |last: &FlowToken| {
            self.waiting
                .range(FlowToken(last.0.saturating_add(1))..)
                .next()
        };
        let next = self.last.as_ref().and_then(after).or(self.waiting.first());
        let next = *next?;
        self.waiting.remove(&next);
        self.last = Some(next);
        Some(next)
    }
}

impl Outlooks {
    /// Changes an outlook, which is made if there is none.
    fn change<T>(&mut self, now: Time, to: PeerLocator, f: impl FnOnce(&mut Outlook) -> T) -> T {
        self.of(now, to);
        self.change_known(to, f).expect("it was made above")
    }

    fn change_known<T>(&mut self, to: PeerLocator, f: impl FnOnce(&mut Outlook) -> T) -> Option<T> {
        let outlook = self.all.get_mut(&to)?;
        let answer = f(outlook);
        let (before, after) = (outlook.listed, outlook.time());
        if before != after {
            outlook.listed = after;
            before.map(|at| self.times.remove(&(at, to)));
            after.map(|at| self.times.insert((at, to)));
        }
        Some(answer)
    }

    fn of(&mut self, now: Time, to: PeerLocator) -> &mut Outlook {
        self.all.entry(to).or_insert_with(|| Outlook {
            finding: Finding::Unknown,
            pause: Duration::ZERO,
            probe: None,
            last: None,
            waiting: BTreeSet::new(),
            changed: now,
            listed: None,
        })
    }

    /// Whether the flow may try the locator now. If not, it waits: [`works`](Self::works) or [`due`](Self::due) gives it back.
    pub(super) fn may_try(&mut self, now: Time, to: PeerLocator, token: FlowToken) -> bool {
        self.change(now, to, |outlook| {
            let probes = outlook.is_due(now);
            if probes {
                outlook.probe = Some(token);
            }
            let may = probes || matches!(outlook.finding, Finding::Works { .. });
            match may {
                true => outlook.waiting.remove(&token),
                false => outlook.waiting.insert(token),
            };
            may
        })
    }

    /// The locator has answered. Returns the flows that have waited for that.
    pub(super) fn works(&mut self, now: Time, to: PeerLocator) -> BTreeSet<FlowToken> {
        let released = self.change_known(to, |outlook| {
            if !matches!(outlook.finding, Finding::Works { .. }) {
                outlook.finding = Finding::Works { since: now };
                outlook.changed = now;
            }
            std::mem::take(&mut outlook.waiting)
        });
        released.unwrap_or_default()
    }

    /// A trial has failed, or a transport to the locator. What fails during a pause does not count again: many flows may fail together.
    /// `spread` gives what is added to a pause.
    pub(super) fn fails(
        &mut self,
        now: Time,
        to: PeerLocator,
        spread: impl FnOnce(Duration) -> Duration,
    ) {
        self.change(now, to, |outlook| {
            match outlook.finding {
                Finding::Fails { until } if until > now => return,
                Finding::Works { since } if now.since(since) >= PROVEN => {
                    outlook.pause = Duration::ZERO;
                }
                _ => {}
            }
            outlook.pause = (outlook.pause * 2).clamp(AGAIN, LONGEST);
            outlook.finding = Finding::Fails {
                until: now + outlook.pause + spread(outlook.pause),
            };
            outlook.changed = now;
        });
    }

    /// An attempt may have tried the locator a moment ago, so it is not tried at once. This does not count as a failure. It does not make a pause
    /// longer: a flow that breaks all the time would keep the others waiting for ever.
    pub(super) fn postpone(&mut self, now: Time, to: PeerLocator) {
        self.change(now, to, |outlook| {
            match outlook.finding {
                Finding::Fails { until } if until > now => {}
                _ => outlook.finding = Finding::Fails { until: now + AGAIN },
            }
            outlook.changed = now;
        });
    }

    /// Whether the locator has failed a moment ago.
    pub(super) fn is_bad(&self, now: Time, to: PeerLocator) -> bool {
        let finding = self.all.get(&to).map(|outlook| outlook.finding);
        matches!(finding, Some(Finding::Fails { until }) if until > now)
    }

    /// The flow neither waits for the locator nor probes it any more.
    pub(super) fn leave(&mut self, to: PeerLocator, token: FlowToken) {
        self.change_known(to, |outlook| {
            outlook.waiting.remove(&token);
            outlook.probe.take_if(|probe| *probe == token);
        });
    }

    /// A locator that can be probed now, and a flow that has waited for it and waits no more.
    pub(super) fn due(&mut self, now: Time) -> Option<(PeerLocator, FlowToken)> {
        let (at, to) = *self.times.first()?;
        if at > now {
            return None;
        }
        let token = self.change_known(to, Outlook::take_waiting).flatten()?;
        Some((to, token))
    }

    /// When [`due`](Self::due) has something next.
    pub(super) fn next(&self, now: Time) -> Option<Time> {
        let (at, _) = *self.times.first()?;
        Some(at.max(now))
    }

    /// Forgets locators that no flow waits for, some time after the last change.
    pub(super) fn expire(&mut self, now: Time) {
        self.all.retain(|_, outlook| {
            let used = outlook.probe.is_some() || !outlook.waiting.is_empty();
            used || now.since(outlook.changed) < KEPT
        });
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::{OtherLocator, TransportKind};

    const AT: Time = Time(1_000_000);
    const FIRST: FlowToken = FlowToken(1);

    fn to() -> PeerLocator {
        let process = EndpointId {
            host: [1; 16],
            pid: 1,
            incarnation: 1,
        };
        let locator = OtherLocator::new(TransportKind::TEST, &[1]).unwrap();
        (process, locator.into())
    }

    fn exactly(_: Duration) -> Duration {
        Duration::ZERO
    }

    #[test]
    fn one_flow_probes_and_the_others_wait_until_it_works() {
        let mut all = Outlooks::default();
        assert!(all.may_try(AT, to(), FIRST));
        for n in 2..5 {
            assert!(!all.may_try(AT, to(), FlowToken(n)));
        }
        assert_eq!((all.next(AT), all.due(AT)), (None, None));
        let released = all.works(AT, to());
        assert_eq!(released, [2, 3, 4].map(FlowToken).into());
        assert!(all.may_try(AT, to(), FlowToken(2)));
    }

    #[test]
    fn pauses_grow_with_the_failures_of_probes_and_not_with_those_of_many_flows() {
        let mut all = Outlooks::default();
        let mut now = AT;
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(all.may_try(now, to(), FIRST));
            for _ in 0..10 {
                all.fails(now, to(), exactly);
            }
            all.leave(to(), FIRST);
            assert!(all.is_bad(now, to()));
            assert!(!all.may_try(now, to(), FIRST));
            now = now + Duration::from_secs(seconds);
            assert_eq!(all.next(AT), Some(now));
            assert_eq!(all.due(now), Some((to(), FIRST)));
        }
    }

    #[test]
    fn failures_count_no_more_when_it_has_worked_for_a_minute() {
        for (worked, next) in [(59, 4), (60, 1)] {
            let mut all = Outlooks::default();
            let mut now = AT;
            for seconds in [1, 2] {
                assert!(all.may_try(now, to(), FIRST));
                all.fails(now, to(), exactly);
                all.leave(to(), FIRST);
                now = now + Duration::from_secs(seconds);
            }
            assert!(all.may_try(now, to(), FIRST));
            all.works(now, to());
            all.leave(to(), FIRST);
            now = now + Duration::from_secs(worked / 2);
            // That it works for other flows, too, begins no new minute.
            all.works(now, to());
            now = now + Duration::from_secs(worked - worked / 2);
            all.fails(now, to(), exactly);
            assert!(!all.may_try(now, to(), FIRST));
            assert_eq!(all.next(now), Some(now + Duration::from_secs(next)));
        }
    }

    #[test]
    fn the_next_flow_probes_when_a_probe_leaves_without_a_result() {
        let mut all = Outlooks::default();
        assert!(all.may_try(AT, to(), FIRST));
        assert!(!all.may_try(AT, to(), FlowToken(2)));
        all.leave(to(), FIRST);
        assert_eq!(all.next(AT), Some(AT));
        assert_eq!(all.due(AT), Some((to(), FlowToken(2))));
        assert!(all.may_try(AT, to(), FlowToken(2)));
    }

    #[test]
    fn flows_take_turns() {
        let mut all = Outlooks::default();
        let mut now = AT;
        assert!(all.may_try(now, to(), FIRST));
        for n in 2..4 {
            assert!(!all.may_try(now, to(), FlowToken(n)));
        }
        let mut probes = Vec::new();
        for _ in 0..6 {
            all.fails(now, to(), exactly);
            let probe = probes.last().copied().unwrap_or(FIRST);
            all.leave(to(), probe);
            assert!(!all.may_try(now, to(), probe));
            now = now + LONGEST;
            let (_, probe) = all.due(now).unwrap();
            assert!(all.may_try(now, to(), probe));
            probes.push(probe);
        }
        assert_eq!(probes, [1, 2, 3, 1, 2, 3].map(FlowToken));
    }

    #[test]
    fn a_pause_is_not_made_longer_by_attempts() {
        let mut all = Outlooks::default();
        all.postpone(AT, to());
        all.postpone(AT + AGAIN / 2, to());
        assert!(!all.may_try(AT + AGAIN / 2, to(), FIRST));
        assert_eq!(all.next(AT), Some(AT + AGAIN));
    }

    #[test]
    fn locators_that_nobody_waits_for_are_forgotten() {
        let mut all = Outlooks::default();
        assert!(all.may_try(AT, to(), FIRST));
        all.expire(AT + KEPT * 2);
        assert_eq!(all.len(), 1);
        all.leave(to(), FIRST);
        all.expire(AT + KEPT);
        assert_eq!(all.len(), 0);
    }
}
