//! The attempts to get a new transport: `docs/PROTOCOL.md`, section "Attempts".
//!
//! An attempt is a window of time, by default 3, 12 and 45 seconds. Inside it connections are made
//! one after the other. After a connection that fails at once, the next one follows after a random pause that grows. A
//! connection that hangs is replaced: its packets may have been lost just before the
//! network recovered, and the kernel would wait long before it sends them again.
//!
//! Each attempt starts on another path, and the kinds of transport take turns, the preferred one first. Every second
//! connection goes by TCP to the address that the application had connected to. An endpoint announces all its
//! addresses, and some may be unreachable from here; a window must not be spent on one of those alone.

use std::time::Duration;

use super::accusations::Judge;
use super::errno::{ECONNRESET, EPIPE};
use super::flow::State;
use super::outage::{Attempts, Outage, Proof};
use super::paths::Paths;
use super::record::{Bar, DrainState, QueryPurpose};
use super::resume::{Conn, Stage};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::event::{EscalateReason, Event, Failure};
use crate::ids::{Cause, FlowToken, Role, Time, Verdict};
use crate::transport::Path;
use crate::wire::feature;

/// When a connection is reset, both ends mostly notice at the same time. The acceptor waits this long before it connects, so
/// that the connector can make the new connection first. Two connections at the same time would cost twice the work, and one
/// of them would be dropped.
pub(super) const HEAD_START: Duration = Duration::from_millis(5);
/// A resume that the peer has begun is not waited for if the peer sends nothing for this long.
pub(super) const PEER_SILENT: Duration = Duration::from_secs(2);
/// A flow whose connection has not failed is not given up before the kernel would give up a
/// stalled connection (`tcp_retries2` with its default value).
const PATIENCE: Duration = Duration::from_secs(924);

/// The first turn of a window that takes the second path instead of the first (see [`Paths::choose`]).
const SECOND_PATH: u32 = 2;

impl Endpoint {
    /// The flow's transport has failed or is suspected: starts the outage, and what its cause requires.
    pub(super) fn begin_outage(&mut self, now: Time, token: FlowToken, mut outage: Outage) {
        // The end lies within the peer's replay: the peer died while writing it, or the end was forged.
        if outage.eof.is_some_and(|at| at < self.flow(token).promised) {
            (outage.eof, outage.errno) = (None, Some(ECONNRESET));
        }
        self.end_trial(now, token);
        let (cause, ended) = (outage.cause, outage.eof.is_some());
        if !ended {
            self.reach_in_doubt(token);
        }
        outage.relay_first = self.relay_first(now, token, cause);
        outage.confirmed = self.has_peer_closed(token) && !self.have_both_closed(token);
        let flow = self.flow(token);
        flow.outage = Some(Box::new(outage));
        self.emit_later(
            token,
            Event::Suspend {
                cause: cause.into(),
            },
        );
        let flow = self.flow(token);
        match cause {
            // Make before break: the old transport stays in use until the peer has answered.
            Cause::Stall => {
                self.report(token);
                return self.start_attempts(now, token);
            }
            Cause::Errno(_) | Cause::Eof { .. } => flow.bar = Bar::Shut,
            Cause::PeerAsked => self.report(token),
        }
        self.suspend(now, token);
        match cause {
            Cause::Eof { .. } if ended => self.check_eof(now, token),
            Cause::PeerAsked => {}
            Cause::Errno(_) => self.check_error(now, token),
            Cause::Eof { .. } | Cause::Stall => self.start_attempts(now, token),
        }
    }

    /// Moves to `Suspended`, and asks the front end to suspend the flow unless it has done so by itself.
    pub(super) fn suspend(&mut self, now: Time, token: FlowToken) {
        let deadline = self.config.deadline;
        let flow = self.flow(token);
        if flow.state() == State::Live {
            flow.go(State::Suspended);
            if let Some(outage) = &mut flow.outage
                && outage.cause == Cause::Stall
            {
                // The stall was suspected before, but the flow stands still only from now on.
                outage.since = now;
            }
        }
        flow.change.pump = None;
        if flow.bar == Bar::Open {
            flow.bar = Bar::Asked;
            self.out.push(Action::Suspend { token });
        }
        let owner = TimerOwner::Flow(token, Timer::Deadline);
        if let Some(deadline) = deadline
            && self.timers.get(owner).is_none()
        {
            self.timers.set(owner, now + deadline);
        }
    }

    /// Starts the attempts, or continues them.
    pub(super) fn start_attempts(&mut self, now: Time, token: FlowToken) {
        self.timers
            .clear(TimerOwner::Flow(token, Timer::Explanation));
        let flow = self.flow(token);
        let Some(outage) = &mut flow.outage else {
            return;
        };
        if let Some(hold) = &mut outage.hold {
            hold.rests = false;
        }
        let Some(attempts) = &mut outage.attempts else {
            outage.attempts = Some(Attempts {
                n: 0,
                begun: 0,
                turn: 0,
                failures: 0,
                left: None,
                last: Failure::TimedOut,
                path: Path::to(flow.ends.remote()),
                asked: now,
                replaced: 0,
                heard_at: outage.via,
                bad: Vec::new(),
            });
            return self.begin_window(now, token, 0);
        };
        if let Some(left) = attempts.left.take() {
            self.timers
                .set(TimerOwner::Flow(token, Timer::Window), now + left);
        }
        self.connect(now, token);
    }

    fn begin_window(&mut self, now: Time, token: FlowToken, n: u32) {
        let ends = now + self.config.attempt_timeout(n);
        let mut bad = self.paths(token).locators();
        bad.retain(|to| self.is_bad(now, token, *to));
        let flow = self.flow(token);
        let Some(outage) = &mut flow.outage else {
            return;
        };
        let elsewhere = outage.elsewhere;
        let Some(attempts) = &mut outage.attempts else {
            return;
        };
        attempts.n = n;
        attempts.begun += 1;
        attempts.turn = if elsewhere { SECOND_PATH } else { 0 };
        attempts.failures = 0;
        attempts.replaced = 0;
        attempts.last = Failure::TimedOut;
        attempts.bad = bad;
        outage.heard = false;
        let begun = attempts.begun;
        let Some(path) = self.next_path(token) else {
            return;
        };
        self.emit_later(token, Event::Attempt { n: begun, path });
        self.timers
            .set(TimerOwner::Flow(token, Timer::Window), ends);
        let flow = self.flow(token);
        let failed = |outage: &&Outage| matches!(outage.cause, Cause::Errno(_));
        if begun == 1
            && flow.role == Role::Acceptor
            && let Some(outage) = flow.outage.as_deref().filter(failed)
        {
            let (start, ended) = (outage.since + HEAD_START, outage.ended_by_peer());
            if start > now {
                self.timers
                    .set(TimerOwner::Flow(token, Timer::Backoff), start);
                if ended && self.inquiries.recovers {
                    // The peer may have died, and the runtime reports that soon.
                    self.ask(now, token, QueryPurpose::HeadStart);
                }
                return;
            }
        }
        self.connect(now, token);
    }

    pub(super) fn paths(&self, token: FlowToken) -> Paths {
        let flow = &self.flows[&token];
        Paths::of(flow, self.locators(token), &self.id, &self.own)
    }

    /// Pauses the window and stops all timers of the outage while a replay is being written. If the replay fails, the attempts
    /// continue.
    pub(super) fn pause_attempts(&mut self, now: Time, token: FlowToken) {
        let window = TimerOwner::Flow(token, Timer::Window);
        let ends = self.timers.get(window);
        for timer in [
            Timer::Window,
            Timer::Hung,
            Timer::Stuck,
            Timer::Backoff,
            Timer::PeerSilent,
            Timer::Query,
            Timer::Explanation,
        ] {
            self.timers.clear(TimerOwner::Flow(token, timer));
        }
        let flow = self.flow(token);
        flow.query = None;
        // Without a running window timer, the window was paused before and has not continued since.
        if let Some(attempts) = flow.outage.as_mut().and_then(|o| o.attempts.as_mut())
            && let Some(ends) = ends
        {
            attempts.left = Some(ends.since(now));
        }
    }

    /// The peer has begun a resume, and has sent nothing since.
    pub(super) fn on_peer_silent(&mut self, now: Time, token: FlowToken) {
        // RESUME_OK was not sent on `accepted`, so it holds no stream bytes. `awaiting` stays: it
        // may hold stream bytes that the peer has trimmed.
        if let Some(conn) = self.flow(token).change.accepted.take() {
            self.close_conn(conn);
        }
        self.update_state(token);
        if self
            .timers
            .get(TimerOwner::Flow(token, Timer::Backoff))
            .is_none()
        {
            self.start_attempts(now, token);
        }
    }

    pub(super) fn on_window(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        let agreed = flow
            .change
            .outgoing
            .and_then(|conn| self.conns.get(&conn))
            .is_some_and(|conn| {
                matches!(
                    conn,
                    Conn::Out {
                        stage: Stage::Agreed { .. },
                        ..
                    }
                )
            });
        let heard = self
            .timers
            .get(TimerOwner::Flow(token, Timer::PeerSilent))
            .is_some();
        if agreed || heard {
            // A resume is under way right now: extend the window.
            let more = now + Duration::from_secs(1);
            return self
                .timers
                .set(TimerOwner::Flow(token, Timer::Window), more);
        }
        self.drop_outgoing(now, token);
        self.update_state(token);
        let Some(attempts) = self.attempts(token) else {
            return;
        };
        let (n, begun, last) = (attempts.n, attempts.begun, attempts.last);
        self.emit(
            token,
            Event::AttemptFailed {
                n: begun,
                reason: last,
            },
        );
        if self.end_untold(now, token) {
            return;
        }
        if self.proof(token) == Proof::Given && self.ended_intact(token) {
            return self.believe_eof(now, token);
        }
        if n + 1 < self.config.attempts && !self.is_overdue(now, token) {
            if n + 2 == self.config.attempts && self.config.hold.is_none() {
                self.test_others(now, token);
            }
            return self.begin_window(now, token, n + 1);
        }
        self.attempts_used_up(now, token, n);
    }

    /// Where a witness decides, a process that can reach nobody must find that out within the time of all attempts, counted from the first
    /// suspicion, so that a stall that becomes an error does not start anew.
    fn is_overdue(&self, now: Time, token: FlowToken) -> bool {
        let outage = self.flows[&token].outage.as_ref();
        let since = outage.map_or(now, |outage| outage.suspected);
        let witnessed = self.features & feature::WITNESS != 0 && self.config.hold.is_none();
        witnessed && now.since(since) >= self.config.resumable_for()
    }

    fn attempts_used_up(&mut self, now: Time, token: FlowToken, n: u32) {
        let Some(outage) = &self.flows[&token].outage else {
            return;
        };
        // The kernel reports no fault. But nothing at the peer's host answers, and a witness decides. For a transport that has been drained
        // no kernel waits.
        let drained = self.flows[&token].change.drained != DrainState::No;
        let (patient, silent) = (outage.patient() && !drained, !outage.heard);
        let early = patient && now.since(outage.since) < PATIENCE;
        let witnessed = self.judge_of_flow(token) == Some(Judge::Witness);
        // If something answers at the peer's host, a transport in use may be better than any new one.
        if (silent || self.flows[&token].state() != State::Live) && self.hold(now, token) {
            return;
        }
        if patient && silent && witnessed && self.accuse(now, token) {
            return self.await_verdicts(now, token);
        }
        if self.flows[&token].state() == State::Live {
            // The cause was only a stall: the old transport is still in use.
            return self.end_stall(now, token);
        }
        if early {
            return self.begin_window(now, token, n);
        }
        self.give_up(now, token, EscalateReason::Attempts);
    }

    /// The peer is accused. The other processes that do not answer are accused, too.
    fn await_verdicts(&mut self, now: Time, token: FlowToken) {
        self.await_verdict(now, token);
        for other in self.silent_others(now) {
            if self.accuse(now, other) {
                self.await_verdict(now, other);
            }
        }
    }

    /// The peer is accused. As long as there is no verdict, the flow is suspended, and the last window is repeated.
    fn await_verdict(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let lost = flow.peer_id().is_some_and(|peer| self.is_lost(peer));
        if lost {
            return;
        }
        if self.flow(token).state() == State::Live {
            self.suspend(now, token);
        }
        let window = self.timers.get(TimerOwner::Flow(token, Timer::Window));
        if window.is_none()
            && let Some(attempts) = self.attempts(token)
        {
            let n = attempts.n;
            self.begin_window(now, token, n);
        }
    }

    pub(super) fn on_deadline(&mut self, now: Time, token: FlowToken) {
        self.give_up(now, token, EscalateReason::Deadline);
    }

    /// No new transport was found in time. If the old transport has only ended, and the peer process has never
    /// answered at a port of its own, the application gets the end of the stream. Otherwise it gets an error.
    pub(super) fn give_up(&mut self, now: Time, token: FlowToken, reason: EscalateReason) {
        if self.hold(now, token) {
            return;
        }
        if self.ended_intact(token) && !self.was_reached(token) {
            return self.believe_eof(now, token);
        }
        match self.accuse(now, token) {
            true => self.await_verdicts(now, token),
            false => self.escalate_with_cause(now, token, reason),
        }
    }

    /// Gives the flow up with the error that the kernel had reported.
    pub(super) fn escalate_with_cause(
        &mut self,
        now: Time,
        token: FlowToken,
        reason: EscalateReason,
    ) {
        let verdict = match reason {
            // EPIPE would say that the peer has closed the flow, and comes with a signal that ends most programs.
            EscalateReason::PeerLost | EscalateReason::Fenced | EscalateReason::NoWitness => {
                match self.verdict_of(token) {
                    Verdict::Errno(EPIPE) => Verdict::Errno(ECONNRESET),
                    other => other,
                }
            }
            _ => self.verdict_of(token),
        };
        self.escalate(now, token, reason, verdict);
    }

    /// The error that the kernel has reported.
    pub(super) fn verdict_of(&self, token: FlowToken) -> Verdict {
        let outage = self.flows[&token].outage.as_ref();
        Verdict::Errno(outage.map_or(ECONNRESET, |outage| outage.verdict()))
    }

    pub(super) fn attempts(&mut self, token: FlowToken) -> Option<&mut Attempts> {
        self.flow(token).outage.as_mut()?.attempts.as_mut()
    }
}
