//! Timed checks: which flows to check again, and when.
//!
//! * *dirty*: bytes are unacknowledged. About once a second all dirty flows are probed, which also trims their replay
//!   buffers. When none is left, the process is not woken any more. Flows that a probe finds still dirty are *slow*:
//!   only their progress is recorded. The agent measures time alone; whether a transport looks stuck is decided by the
//!   front end, which knows its kind ([`Probe`](slim_stream::Probe)).
//! * *busy*: a data call is still inside a suspended flow. The answer to `Suspend`, or the action `Drain` or
//!   `Escalate`, waits until the call has returned. All other flows go on meanwhile.
//! * *verifying*: the stream has ended, and the peer's kernel is asked whether it has sent that end.
//! * *lingering*: closed by the application, not delivered yet ([`linger`](super::linger)).
//! * *unlistened*: control sockets whose listener is gone, but which are still needed.
//! * *exiting*: threads that wait for lingering flows before the process ends. The survivor has them: a panic must not make them wait
//!   for their time limit.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::net::SocketAddr;
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Action, State};
use slim_core::{Cause, FinHow, FlowToken, Time, Verdict};
use slim_sys::RunnableThreads;

use super::glance::Glance;
use super::linger::Linger;
use super::{Driver, Notice};
use crate::FlowIo;
use crate::events;

const SWEEP: Duration = Duration::from_secs(1);
/// Interval between discarding old records, while something happens.
const TIDY: Duration = Duration::from_secs(60);
/// First and longest interval between checks of a control socket that outlives its listener.
const UNLISTENED_FIRST: Duration = Duration::from_millis(50);
const UNLISTENED_LAST: Duration = Duration::from_secs(60);
/// Shortest time between two sweeps, however short a stall is to be noticed.
const SHORTEST_SWEEP: Duration = Duration::from_millis(50);
/// First and longest interval between checks whether a data call has returned.
const BUSY_POLL: Duration = Duration::from_micros(100);
const BUSY_POLL_LAST: Duration = Duration::from_millis(5);
const BUSY_WARN: Duration = Duration::from_secs(2);
const BUSY_GIVE_UP: Duration = Duration::from_secs(10);
/// Most time that counts between two checks: the process may have been stopped in between.
const BUSY_STEP: Duration = Duration::from_millis(100);
/// Limit for a call whose thread the kernel may not have let run, and how often that is looked at.
const BUSY_AT_LAST: Duration = Duration::from_secs(120);
const BUSY_STARVED: Duration = Duration::from_secs(1);
/// Interval between checks whether the peer's kernel has answered, and how long to wait for its answer. It is asked a
/// second after it was last heard.
const VERIFY_POLL: Duration = Duration::from_millis(100);
const VERIFY_LIMIT: Duration = Duration::from_millis(1400);

/// Table of timed checks; see the module.
pub(crate) struct Watch {
    /// Flows reported since the last sweep. Some may be reported twice, and some may be over by now.
    dirty: Vec<FlowToken>,
    slow: BTreeMap<FlowToken, AckProgress>,
    busy: HashMap<FlowToken, Busy>,
    starvation: Starvation,
    /// Flows that are verified, and since when.
    verifying: HashMap<FlowToken, Time>,
    pub(crate) linger: Linger,
    /// Checks of single flows. Entries may be stale; the flow's table is authoritative.
    agenda: BTreeSet<(Time, FlowToken, Look)>,
    sweep_at: Option<Time>,
    tidy_at: Option<Time>,
    /// Control sockets that outlive their listeners: time of the next check, and the interval before it.
    unlistened: HashMap<SocketAddr, (Time, Duration)>,
    stall: Duration,
    pub(super) glance: Glance,
    /// Held flows whose transport has only stalled: how much was acknowledged.
    pub(super) held: HashMap<FlowToken, u64>,
}

/// Progress of a slow flow.
#[derive(Default)]
struct AckProgress {
    acked: u64,
    /// Since when `acked` has not moved; `None` before the first probe.
    since: Option<Time>,
    /// The flow may soon keep too many bytes.
    relayed: bool,
}

/// The purpose of a check of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Look {
    Busy,
    Linger,
    Verify,
}

/// A suspended flow with a data call inside.
struct Busy {
    looked: Time,
    waited: Duration,
    warned: bool,
    /// `Suspend` has no answer yet.
    suspending: bool,
    /// `Drain` or `Escalate`, to be carried out once the call has returned.
    then: Option<Action>,
    /// When [`BUSY_GIVE_UP`] was over.
    late: Option<Time>,
}

/// Whether the kernel lets the threads of the process run. One look serves all busy flows: it takes some microseconds for each thread.
#[derive(Default)]
struct Starvation {
    /// The threads that could run at this time.
    runnable: Option<(Time, RunnableThreads)>,
    /// Whether one of them had not been let run by the end of the last such time, and when that began.
    starved: Option<(Time, bool)>,
}

impl Starvation {
    /// Whether a thread was not let run in the last [`BUSY_STARVED`]. Not known if that began before `since`.
    fn any(&mut self, now: Time, since: Time) -> Option<bool> {
        let is_over = |(at, _): &(Time, _)| now.since(*at) >= BUSY_STARVED;
        if self.runnable.as_ref().is_none_or(is_over) {
            let before = self.runnable.replace((now, RunnableThreads::now()));
            self.starved = before.map(|(at, threads)| (at, threads.are_starved()));
        }
        let known = self.starved.filter(|(at, _)| *at >= since);
        known.map(|(_, starved)| starved)
    }
}

impl Busy {
    /// Whether the call has had the time to return. Its thread may not have been let run, although this one was: while a thread of the process
    /// is not, the call gets more time.
    fn has_had_time(&mut self, starvation: &mut Starvation) -> bool {
        if self.waited < BUSY_GIVE_UP {
            return false;
        }
        let late = *self.late.get_or_insert(self.looked);
        self.waited >= BUSY_AT_LAST || starvation.any(self.looked, late) == Some(false)
    }

    /// The time of the next check.
    fn next(&self) -> Time {
        self.looked + (self.waited / 4).clamp(BUSY_POLL, BUSY_POLL_LAST)
    }
}

impl Watch {
    pub(crate) fn new(config: &Config) -> Self {
        Watch {
            dirty: Vec::new(),
            slow: BTreeMap::new(),
            busy: HashMap::new(),
            starvation: Starvation::default(),
            verifying: HashMap::new(),
            linger: Linger::new(config),
            agenda: BTreeSet::new(),
            sweep_at: None,
            tidy_at: None,
            unlistened: HashMap::new(),
            stall: config.stall,
            glance: Glance::default(),
            held: HashMap::new(),
        }
    }

    /// When to call [`Driver::on_time`]. While flows are held, old entries are discarded when those are looked at, so that the thread does not
    /// wake more often.
    pub(crate) fn next(&self, holds: bool) -> Option<Time> {
        let tidy_at = self.tidy_at.filter(|_| !holds);
        let look = self.agenda.first().map(|(at, ..)| *at);
        let unlistened = self.unlistened.values().map(|(at, _)| *at).min();
        [look, unlistened, self.sweep_at, tidy_at, self.glance.next()]
            .into_iter()
            .flatten()
            .min()
    }

    pub(crate) fn dirty(&mut self, now: Time, token: FlowToken) {
        self.dirty.push(token);
        self.sweep_at.get_or_insert(now + self.interval());
        if self.finds_silence() {
            self.glance.soon(now);
        }
    }

    /// Whether flows get new connections because their path is silent.
    pub(super) fn finds_silence(&self) -> bool {
        !self.stall.is_zero()
    }

    /// Something has been recorded that will be discarded later.
    pub(crate) fn tidy_later(&mut self, now: Time) {
        self.tidy_at.get_or_insert(now + TIDY);
    }

    fn busy(&mut self, now: Time, token: FlowToken) -> &mut Busy {
        self.busy.entry(token).or_insert_with(|| {
            let busy = Busy {
                looked: now,
                waited: Duration::ZERO,
                warned: false,
                suspending: false,
                then: None,
                late: None,
            };
            self.agenda.insert((busy.next(), token, Look::Busy));
            busy
        })
    }

    /// A data call is inside the flow: `Suspend` is answered when the call has returned.
    pub(crate) fn suspend_later(&mut self, now: Time, token: FlowToken) {
        self.busy(now, token).suspending = true;
    }

    /// A data call is inside the flow: `action` is carried out when the call has returned.
    pub(crate) fn act_later(&mut self, now: Time, token: FlowToken, action: Action) {
        self.busy(now, token).then = Some(action);
    }

    /// Checks a lingering flow at this time.
    pub(crate) fn look_at_lingering(&mut self, at: Time, token: FlowToken) {
        self.look(at, token, Look::Linger);
    }

    fn look(&mut self, at: Time, token: FlowToken, look: Look) {
        self.agenda.insert((at, token, look));
    }

    pub(crate) fn is_busy(&self, token: FlowToken) -> bool {
        self.busy.contains_key(&token)
    }

    /// It does not matter any more whether a call is inside.
    pub(crate) fn forget_busy(&mut self, token: FlowToken) {
        self.busy.remove(&token);
    }

    /// A listener is gone, but its control socket is still needed. The interval to the next check doubles each time.
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
        self.glance.forget(token);
        self.held.remove(&token);
        self.busy.remove(&token);
        self.verifying.remove(&token);
        self.linger.forget(token);
    }

    /// The flows of the next glance. Some may come twice.
    pub(super) fn glanced_at(&mut self) -> Vec<FlowToken> {
        let window = self.glance.window(self.dirty.len() + self.slow.len());
        let all = self.dirty.iter().chain(self.slow.keys());
        all.skip(window.start).take(window.len()).copied().collect()
    }

    fn interval(&self) -> Duration {
        if self.slow.values().any(|progress| progress.relayed) {
            return SHORTEST_SWEEP;
        }
        let stall = if self.stall.is_zero() {
            SWEEP
        } else {
            self.stall
        };
        stall.clamp(SHORTEST_SWEEP, SWEEP)
    }
}

impl Driver {
    /// Carries out what is due.
    pub(crate) fn on_time(&mut self, now: Time) {
        let holds = self.endpoint.hold_timer();
        if self.endpoint.poll_timeout().is_some_and(|at| at <= now) {
            self.endpoint.handle_timeout(now);
        }
        if holds.is_some_and(|at| at <= now) {
            self.look_at_held_lingering(now);
        }
        if self.watch.sweep_at.is_some_and(|at| at <= now) {
            self.sweep(now);
        }
        if self.watch.glance.next().is_some_and(|at| at <= now) {
            self.glance(now);
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
        let due = |&(at, ..): &(Time, FlowToken, Look)| at <= now;
        while let Some((at, token, look)) = self.watch.agenda.first().copied().filter(due) {
            self.watch.agenda.remove(&(at, token, look));
            match look {
                Look::Busy => self.poll_busy(now, token),
                Look::Verify => self.poll_verified(now, token),
                Look::Linger if self.watch.linger.is_due(at, token) => self.poll_linger(now, token),
                Look::Linger => {}
            }
        }
    }

    /// Answers the threads that wait to exit, unless an undelivered flow needs the process, and their time is not over.
    pub(crate) fn release_exiting(&mut self) {
        if self.survivor.next_exit().is_none() {
            return;
        }
        let now = self.now();
        let mut lingering = self.watch.linger.tokens().collect::<Vec<_>>().into_iter();
        let undelivered = lingering.any(|token| self.needs_process(now, token));
        let is_over = |until| !undelivered || until <= now;
        if self.survivor.next_exit().is_some_and(is_over) {
            events::write_out();
        }
        self.survivor.release_exiting(is_over);
    }

    fn poll_busy(&mut self, now: Time, token: FlowToken) {
        if !self.watch.is_busy(token) {
            return;
        }
        match self.survivor.io(token).filter(|io| !io.idle()) {
            Some(io) => self.still_busy(now, token, &*io),
            None => self.busy_no_more(token),
        }
    }

    /// No call is inside any more, or the flow is gone: does what has waited for that.
    fn busy_no_more(&mut self, token: FlowToken) {
        let Some(busy) = self.watch.busy.remove(&token) else {
            return;
        };
        if busy.suspending {
            self.notices.push_back(Notice::Suspended(token));
        }
        match busy.then {
            Some(action @ Action::Drain { .. }) => self.drain(token, action),
            Some(action @ Action::Escalate { .. }) => self.escalate(token, action),
            _ => {}
        }
    }

    fn still_busy(&mut self, now: Time, token: FlowToken, io: &dyn FlowIo) {
        let watch = &mut self.watch;
        let Some(busy) = watch.busy.get_mut(&token) else {
            return;
        };
        busy.waited += now.since(busy.looked).min(BUSY_STEP);
        busy.looked = now;
        let (next, waited) = (busy.next(), busy.waited);
        let has_had_time = busy.has_had_time(&mut watch.starvation);
        let warn = waited >= BUSY_WARN && !mem::replace(&mut busy.warned, waited >= BUSY_WARN);
        let addrs = self.endpoint.addrs(token);
        let peer = || addrs.map_or_else(|| "?".to_owned(), |(_, peer)| peer.to_string());
        if !has_had_time {
            if warn {
                self.log
                    .warn(|| format!("flow to {}: waiting for a data call to return", peer()));
            }
            return self.watch.look(next, token, Look::Busy);
        }
        self.log.error(|| {
            let peer = peer();
            format!("flow to {peer}: a data call does not return; the flow is given up")
        });
        let then = self.watch.busy.remove(&token).and_then(|busy| busy.then);
        let verdict = match then {
            Some(Action::Escalate { verdict, .. }) => verdict,
            _ => {
                // The old transport cannot be drained, so nothing can be agreed with the peer. No peer needs to know
                // how much was sent before a reset, and the call may hold the sending half: the position is 0.
                let reset = Notice::Finish(token, 0, FinHow::Reset);
                self.notices.push_back(reset);
                Verdict::Errno(libc::ETIMEDOUT)
            }
        };
        io.escalate(verdict);
        self.survivor.set_away(token, false);
        self.release(token);
    }

    /// Carries out `Verify`.
    pub(crate) fn verify(&mut self, token: FlowToken) {
        let now = self.now();
        if let Some(io) = self.survivor.io(token) {
            io.ask_kernel(true);
            self.watch.verifying.insert(token, now);
            self.watch.look(now + VERIFY_POLL, token, Look::Verify);
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
            self.watch.look(now + VERIFY_POLL, token, Look::Verify);
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
            let mut progress = AckProgress::default();
            if self.is_dirty(now, token, &mut progress) {
                slow.insert(token, progress);
            }
        }
        let again = !slow.is_empty();
        self.watch.slow = slow;
        self.watch.sweep_at = again.then(|| now + self.watch.interval());
    }

    /// Probes a dirty flow; returns whether it is still dirty.
    fn is_dirty(&mut self, now: Time, token: FlowToken, progress: &mut AckProgress) -> bool {
        let Some(io) = self.survivor.io(token) else {
            return false;
        };
        if self.endpoint.is_held(token) {
            // Going live marks it dirty again.
            return false;
        }
        let state = self.endpoint.state(token);
        match state {
            Some(State::Live | State::Negotiating) => {}
            // Its replay buffer must not be trimmed now; going live marks the flow dirty again.
            Some(State::Suspended | State::Resuming) => return true,
            _ => return false,
        }
        if self.carriers.contains_key(&token) || self.watch.is_busy(token) {
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
        progress.relayed = probe.relayed;
        if probe.full && state == Some(State::Live) {
            self.notices.push_back(Notice::Full(token));
            return true;
        }
        let stall = self.watch.stall;
        let stalled = !stall.is_zero()
            && state == Some(State::Live)
            && probe.stuck
            && now.since(since) >= stall;
        if stalled {
            // If this does not help, it is reported again after the same time.
            progress.since = Some(now);
            self.notices.push_back(Notice::Fault(token, Cause::Stall));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
    use std::thread;

    use super::*;

    fn busy(waited: Duration) -> Busy {
        Busy {
            looked: Time(0),
            waited,
            warned: false,
            suspending: true,
            then: None,
            late: None,
        }
    }

    /// Two threads spin on one processor. The second one has a policy with which it gets hardly any of its time. Does not run the test where the first
    /// one has a low priority, too, and may not raise it.
    fn beside_a_starved_thread(test: impl FnOnce()) {
        let (done, spinning) = (AtomicBool::new(false), AtomicU32::new(0));
        let nice = AtomicI32::new(0);
        // SAFETY: no memory is passed.
        let processor = unsafe { libc::sched_getcpu() } as usize;
        thread::scope(|scope| {
            for policy in [libc::SCHED_OTHER, libc::SCHED_IDLE] {
                let (done, spinning, nice) = (&done, &spinning, &nice);
                scope.spawn(move || {
                    let mut set = [0u64; 16];
                    set[processor / 64] |= 1 << (processor % 64);
                    let none = 0;
                    // SAFETY: the kernel reads the set, and one integer.
                    unsafe {
                        libc::syscall(libc::SYS_sched_setaffinity, 0, 128, set.as_ptr());
                        libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const none);
                    }
                    if policy == libc::SCHED_OTHER {
                        // SAFETY: no memory is passed. The calls concern this thread.
                        let is = unsafe {
                            libc::setpriority(libc::PRIO_PROCESS, 0, 0);
                            match libc::sched_getscheduler(0) {
                                libc::SCHED_OTHER => libc::getpriority(libc::PRIO_PROCESS, 0),
                                _ => 20,
                            }
                        };
                        nice.store(is, Ordering::SeqCst);
                    }
                    spinning.fetch_add(1, Ordering::SeqCst);
                    while !done.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            while spinning.load(Ordering::SeqCst) < 2 {
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(10));
            // With 4, a thread has 423 parts of the time beside 3 of the other one.
            match nice.load(Ordering::SeqCst) {
                ..=4 => test(),
                nice => println!("not tested: the nice value is {nice}"),
            }
            done.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_call_whose_thread_is_not_let_run_gets_more_time() {
        let mut starvation = Starvation::default();
        let mut early = busy(BUSY_GIVE_UP - Duration::from_micros(1));
        assert!(!early.has_had_time(&mut starvation));
        assert!(busy(BUSY_AT_LAST).has_had_time(&mut starvation));
        assert!(starvation.runnable.is_none());
        let mut call = busy(BUSY_GIVE_UP);
        beside_a_starved_thread(|| {
            let mut found = Vec::new();
            for _ in 0..3 {
                found.push(call.has_had_time(&mut starvation));
                thread::sleep(BUSY_STARVED);
                call.looked = call.looked + BUSY_STARVED;
            }
            call.waited = BUSY_AT_LAST;
            found.push(call.has_had_time(&mut starvation));
            assert_eq!(found, [false, false, false, true]);
        });
    }

    #[test]
    fn one_look_at_the_threads_serves_all_calls() {
        let mut starvation = Starvation::default();
        let mut calls = [0, 1, 2].map(|_| busy(BUSY_GIVE_UP));
        // What is found at this time, and whether the threads were looked at. Those of the other tests are no part of this one.
        let mut look = |calls: &mut [Busy], at: u64, starved| {
            let at = Time(0) + Duration::from_millis(at);
            let before = starvation.runnable.as_ref().map(|(at, _)| *at);
            starvation.any(at, at);
            starvation.starved = starvation.starved.map(|(at, _)| (at, starved));
            let found: Vec<_> = calls
                .iter_mut()
                .map(|call| {
                    call.looked = at;
                    call.has_had_time(&mut starvation)
                })
                .collect();
            let after = starvation.runnable.as_ref().map(|(at, _)| *at);
            (found, before != after)
        };
        assert_eq!(look(&mut calls, 0, false), (vec![false; 3], true));
        assert_eq!(look(&mut calls, 900, false), (vec![false; 3], false));
        assert_eq!(look(&mut calls, 1000, true), (vec![false; 3], true));
        assert_eq!(look(&mut calls, 1900, true), (vec![false; 3], false));
        assert_eq!(look(&mut calls, 2000, false), (vec![true; 3], true));
        // A call that comes later needs a second of its own.
        let mut late = [busy(BUSY_GIVE_UP)];
        assert_eq!(look(&mut late, 2500, false), (vec![false], false));
        assert_eq!(look(&mut late, 3000, false), (vec![false], true));
        assert_eq!(look(&mut late, 4000, false), (vec![true], true));
    }
}
