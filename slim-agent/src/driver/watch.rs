//! Flows to look at again, and when.
//!
//! * *dirty*: bytes are unacknowledged. About once a second all of them are probed, which also
//!   trims their replay buffers; none is left, and nobody wakes the process any more. Those that a
//!   look finds dirty still are *slow*: only of these it is remembered how they get on.
//! * *suspending*: a data call was still inside when the flow was suspended.
//! * *verifying*: the stream has ended, and the peer's kernel is asked whether it has done that.
//! * *lingering*: closed by the application, not yet delivered ([`linger`](super::linger)).
//! * *unlistened*: control sockets whose listener is gone, but which are still needed.
//! * *exiting*: threads that wait for the above before the process ends.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::net::SocketAddr;
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::State;
use slim_core::{Cause, FinHow, FlowToken, Time, Verdict};

use super::linger::Linger;
use super::{Driver, Notice};
use crate::done::Done;
use crate::events;

const SWEEP: Duration = Duration::from_secs(1);
/// How often what is too old is looked for, while something happens.
const TIDY: Duration = Duration::from_secs(60);
/// When a closed listener's control socket that is still needed is looked at again.
const UNLISTENED_FIRST: Duration = Duration::from_millis(50);
const UNLISTENED_LAST: Duration = Duration::from_secs(60);
/// Shortest time between two sweeps, however short a stall is to be noticed.
const SHORTEST_SWEEP: Duration = Duration::from_millis(50);
const IDLE_POLL: Duration = Duration::from_micros(200);
const IDLE_WARN: Duration = Duration::from_secs(2);
const IDLE_GIVE_UP: Duration = Duration::from_secs(10);
/// How often it is looked whether the peer's kernel has answered, which it is asked a second after it was last heard;
/// and for how long.
const VERIFY_POLL: Duration = Duration::from_millis(100);
const VERIFY_LIMIT: Duration = Duration::from_millis(1400);
/// A segment lost once is nothing: the kernel must have tried this often before it is a stall.
const STALL_RETRANSMITS: u32 = 2;

/// The table of them; see the module.
pub(crate) struct Watch {
    /// Reported since the last sweep; some perhaps twice, and some perhaps over by now.
    dirty: Vec<FlowToken>,
    slow: BTreeMap<FlowToken, Progress>,
    suspending: HashMap<FlowToken, Suspending>,
    /// Since when.
    verifying: HashMap<FlowToken, Time>,
    pub(crate) linger: Linger,
    /// Looks at single flows. An entry that its flow's table does not know of means nothing.
    agenda: BTreeSet<(Time, FlowToken)>,
    sweep_at: Option<Time>,
    tidy_at: Option<Time>,
    exiting: Vec<(Time, Done)>,
    /// Control sockets that outlive their listeners, and how long they had been let alone.
    unlistened: HashMap<SocketAddr, (Time, Duration)>,
    stall: Duration,
}

/// How a dirty flow gets on.
#[derive(Default)]
struct Progress {
    acked: u64,
    /// Since when `acked` has not moved; `None` before the first probe.
    since: Option<Time>,
}

struct Suspending {
    since: Time,
    warned: bool,
}

impl Watch {
    pub(crate) fn new(config: &Config) -> Self {
        Watch {
            dirty: Vec::new(),
            slow: BTreeMap::new(),
            suspending: HashMap::new(),
            verifying: HashMap::new(),
            linger: Linger::new(config),
            agenda: BTreeSet::new(),
            sweep_at: None,
            tidy_at: None,
            exiting: Vec::new(),
            unlistened: HashMap::new(),
            stall: config.stall,
        }
    }

    /// When to call [`Driver::on_time`].
    pub(crate) fn next(&self) -> Option<Time> {
        let look = self.agenda.first().map(|(at, _)| *at);
        let exit = self.exiting.iter().map(|(at, _)| *at).min();
        let unlistened = self.unlistened.values().map(|(at, _)| *at).min();
        [look, exit, unlistened, self.sweep_at, self.tidy_at]
            .into_iter()
            .flatten()
            .min()
    }

    pub(crate) fn dirty(&mut self, now: Time, token: FlowToken) {
        self.dirty.push(token);
        self.sweep_at.get_or_insert(now + self.interval());
    }

    /// Something has happened that is remembered for a while.
    pub(crate) fn tidy_later(&mut self, now: Time) {
        self.tidy_at.get_or_insert(now + TIDY);
    }

    pub(crate) fn suspending(&mut self, now: Time, token: FlowToken) {
        self.suspending.insert(
            token,
            Suspending {
                since: now,
                warned: false,
            },
        );
        self.agenda.insert((now + IDLE_POLL, token));
    }

    /// Looks at the flow at this time.
    pub(crate) fn look(&mut self, at: Time, token: FlowToken) {
        self.agenda.insert((at, token));
    }

    pub(crate) fn stop_suspending(&mut self, token: FlowToken) {
        self.suspending.remove(&token);
    }

    pub(crate) fn exiting(&mut self, until: Time, done: Done) {
        self.exiting.push((until, done));
    }

    /// A listener is gone, but its control socket is still needed. Each time for longer.
    pub(crate) fn unlistened(&mut self, now: Time, addr: SocketAddr) {
        let (at, wait) = self
            .unlistened
            .entry(addr)
            .or_insert((now, UNLISTENED_FIRST / 2));
        *wait = (*wait * 2).min(UNLISTENED_LAST);
        *at = now + *wait;
    }

    /// The control socket is closed, or its listener is back.
    pub(crate) fn unlistened_no_more(&mut self, addr: SocketAddr) {
        self.unlistened.remove(&addr);
    }

    pub(crate) fn forget(&mut self, token: FlowToken) {
        self.slow.remove(&token);
        self.suspending.remove(&token);
        self.verifying.remove(&token);
        self.linger.forget(token);
    }

    fn interval(&self) -> Duration {
        let stall = if self.stall.is_zero() {
            SWEEP
        } else {
            self.stall
        };
        stall.clamp(SHORTEST_SWEEP, SWEEP)
    }
}

impl Driver {
    /// Something's time has come.
    pub(crate) fn on_time(&mut self, now: Time) {
        if self.endpoint.poll_timeout().is_some_and(|at| at <= now) {
            self.endpoint.handle_timeout(now);
        }
        if self.watch.sweep_at.is_some_and(|at| at <= now) {
            self.sweep(now);
        }
        if self.watch.tidy_at.is_some_and(|at| at <= now) {
            let again = self.tidy(now);
            self.watch.tidy_at = again.then(|| now + TIDY);
        }
        let unlistened = self.watch.unlistened.iter();
        let due = unlistened.filter(|(_, (at, _))| *at <= now);
        for addr in due.map(|(addr, _)| *addr).collect::<Vec<_>>() {
            self.unlistened(now, addr);
        }
        while let Some(&(at, token)) = self.watch.agenda.first().filter(|(at, _)| *at <= now) {
            self.watch.agenda.remove(&(at, token));
            if self.watch.suspending.contains_key(&token) {
                self.poll_idle(now, token);
            } else if self.watch.verifying.contains_key(&token) {
                self.poll_verified(now, token);
            } else if self.watch.linger.is_due(at, token) {
                self.poll_linger(now, token);
            }
        }
    }

    /// Answers the threads that wait to exit, if nothing holds them up any more.
    pub(crate) fn release_exiting(&mut self) {
        if self.watch.exiting.is_empty() {
            return;
        }
        let now = self.now();
        let mut lingering = self.watch.linger.tokens();
        let undelivered = lingering.any(|token| self.endpoint.lacks_transport(token));
        self.watch.exiting.retain(|(until, done)| {
            let wait = undelivered && now < *until;
            if !wait {
                events::write_out();
                // The thread may have given up by itself.
                done.tell();
            }
            wait
        });
    }

    fn poll_idle(&mut self, now: Time, token: FlowToken) {
        let io = self.survivor.io(token).filter(|io| !io.idle());
        let Some(io) = io else {
            self.watch.stop_suspending(token);
            self.notices.push_back(Notice::Suspended(token));
            return;
        };
        let addrs = self.endpoint.addrs(token);
        let peer = || addrs.map_or_else(|| "?".to_owned(), |(_, peer)| peer.to_string());
        let Some(wait) = self.watch.suspending.get_mut(&token) else {
            return;
        };
        let waited = now.since(wait.since);
        if waited >= IDLE_GIVE_UP {
            // Its old transport cannot be drained, so nothing can be agreed with the peer.
            self.log.error(|| {
                format!(
                    "flow to {}: a data call does not return; the flow is given up",
                    peer()
                )
            });
            let sent = io.sent();
            self.watch.stop_suspending(token);
            self.notices
                .push_back(Notice::Finish(token, sent, FinHow::Reset));
            io.escalate(Verdict::Errno(libc::ETIMEDOUT));
            self.let_go(token);
            return;
        }
        if waited >= IDLE_WARN && !wait.warned {
            wait.warned = true;
            self.log
                .warn(|| format!("flow to {}: waiting for a data call to return", peer()));
        }
        self.watch.agenda.insert((now + IDLE_POLL, token));
    }

    /// Carries out `Verify`.
    pub(crate) fn verify(&mut self, token: FlowToken) {
        let now = self.now();
        if let Some(io) = self.survivor.io(token) {
            io.ask_kernel(true);
            self.watch.verifying.insert(token, now);
            self.watch.agenda.insert((now + VERIFY_POLL, token));
        }
    }

    fn poll_verified(&mut self, now: Time, token: FlowToken) {
        let begun = self.watch.verifying.get(&token).copied();
        let (Some(begun), Some(io)) = (begun, self.survivor.io(token)) else {
            self.watch.verifying.remove(&token);
            return;
        };
        let since = now.since(begun);
        let ended = io.kernel_answered(since);
        let away = matches!(
            self.endpoint.state(token),
            Some(State::Suspended | State::Resuming)
        );
        if away && !ended && since < VERIFY_LIMIT {
            self.watch.agenda.insert((now + VERIFY_POLL, token));
            return;
        }
        self.watch.verifying.remove(&token);
        io.ask_kernel(false);
        self.notices.push_back(Notice::Verified(token, ended));
    }

    /// Probes all dirty flows.
    fn sweep(&mut self, now: Time) {
        let mut slow = mem::take(&mut self.watch.slow);
        slow.retain(|token, progress| self.is_dirty(now, *token, progress));
        let mut fresh = mem::take(&mut self.watch.dirty);
        fresh.sort_unstable();
        fresh.dedup();
        fresh.retain(|token| !slow.contains_key(token));
        for token in fresh {
            let mut progress = Progress::default();
            if self.is_dirty(now, token, &mut progress) {
                slow.insert(token, progress);
            }
        }
        let again = !slow.is_empty();
        self.watch.slow = slow;
        self.watch.sweep_at = again.then(|| now + self.watch.interval());
    }

    /// Probes a flow that was dirty: whether it is so still.
    fn is_dirty(&mut self, now: Time, token: FlowToken, progress: &mut Progress) -> bool {
        let Some(io) = self.survivor.io(token) else {
            return false;
        };
        let state = self.endpoint.state(token);
        match state {
            Some(State::Live | State::Negotiating) => {}
            // Its buffers are not to be trimmed now; going live marks it again.
            Some(State::Suspended | State::Resuming) => return true,
            _ => return false,
        }
        if self.carriers.contains_key(&token) || self.watch.suspending.contains_key(&token) {
            return true;
        }
        let probe = io.probe();
        if probe.unacked == 0 {
            return false;
        }
        let moved = progress.acked != probe.acked;
        let since = *progress.since.insert(match progress.since {
            Some(since) if !moved => since,
            _ => now,
        });
        progress.acked = probe.acked;
        let stall = self.watch.stall;
        let stalled = !stall.is_zero()
            && state == Some(State::Live)
            && probe.established
            && probe.retransmits >= STALL_RETRANSMITS
            && now.since(since) >= stall;
        if stalled {
            // Told again after as long again, should it not have helped.
            progress.since = Some(now);
            self.notices.push_back(Notice::Fault(token, Cause::Stall));
        }
        true
    }
}
