//! How a new transport is looked for: `docs/PROTOCOL.md`, section "Attempts".
//!
//! An attempt is a window of time, by default 3, 12 and 45 seconds. Inside it connections are made
//! one after the other: one that fails at once is followed, after a random pause that grows, by the
//! next, and one that hangs is replaced, because its packets may have been lost just before the
//! network healed and the kernel would wait long before it sends them again.
//!
//! Each attempt starts on another path. Every second connection goes to the address that the
//! application itself had connected, though: an endpoint announces all addresses it has, among them
//! some that lead nowhere from here, and a window must not be spent on one of those alone.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::flow::State;
use super::record::{Bar, ECONNREFUSED, ECONNRESET, Flow, Outage, Proof, Why};
use super::resume::{Conn, Stage};
use super::timer::{Owner, Timer};
use super::{Action, Endpoint};
use crate::addr::at_port;
use crate::event::{EscalateReason, Event, Failure};
use crate::ids::{Cause, ConnId, FlowToken, Role, Time, Verdict};

const BACKOFF: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// A connection that has not got on for this long is replaced, in the first window; twice as long
/// in the second, and so on.
const STUCK: Duration = Duration::from_secs(1);
const STUCK_DOUBLINGS: u32 = 2;
/// After this long the peer is asked whether it is there (`probe.rs`); for twice as long after each
/// connection that was replaced because it had answered.
const HUNG: Duration = Duration::from_millis(25);
const HUNG_DOUBLINGS: u32 = 5;
/// When a connection is reset, both ends mostly know it at once. The side that had accepted it leaves the other one
/// so much time to make the new one: two that are made at the same time cost twice the work, and one of them is
/// thrown away.
pub(super) const HEAD_START: Duration = Duration::from_millis(5);
/// A peer that began to resume and said nothing more for this long is not waited for.
pub(super) const PEER_SILENT: Duration = Duration::from_secs(2);
/// A flow whose own connection has not failed is not given up before the kernel would give up a
/// connection that does not move (`tcp_retries2` with its default value).
const PATIENCE: Duration = Duration::from_secs(924);

/// Where we are in looking for a new transport.
pub(super) struct Attempts {
    /// Window, counted from 0.
    n: u32,
    /// Attempts begun so far, which is more than `n` if the last window is repeated.
    pub(super) begun: u32,
    /// Connections made in this window.
    turn: u32,
    /// Failures in a row in this window.
    failures: u32,
    /// What the window still had when it was stopped, because a transport was being installed.
    left: Option<Duration>,
    last: Failure,
    /// The connection under way, or the one that waits for its turn.
    path: Path,
    asked: Time,
    /// Connections replaced in this window because the peer had answered.
    replaced: u32,
    /// Where it has answered: the next connection goes there.
    heard_at: Option<IpAddr>,
}

/// Where a connection comes from, if not from where the kernel chooses, and where it goes.
type Path = (Option<IpAddr>, SocketAddr);

/// Every (local, remote) pair to try, the one the application used first. `own` are the addresses
/// of this host.
fn paths(flow: &Flow, host: &[u8; 16], own: &[IpAddr]) -> Vec<Path> {
    let Some(peer) = &flow.peer else {
        return Vec::new();
    };
    let first = flow.ends.remote().ip();
    let loopback = first.is_loopback();
    let usable =
        |ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast() && ip.is_loopback() == loopback;
    let mut paths = vec![(None, first)];
    // An address that both hosts have, such as that of a bridge for containers, leads to ourselves.
    let elsewhere = |ip: &IpAddr| peer.process.id.host == *host || !own.contains(ip);
    for ip in peer
        .process
        .addrs
        .iter()
        .copied()
        .filter(usable)
        .filter(elsewhere)
    {
        if !paths.iter().any(|(_, known)| *known == ip) {
            paths.push((None, ip));
        }
    }
    // The kernel chooses the local address by its routes; another one may lead out of another port.
    // The one of the flow's own connection may not be its choice.
    if !loopback {
        let local = flow.ends.local().ip();
        let others = own
            .iter()
            .copied()
            .filter(usable)
            .filter(|ip| *ip != local && ip.is_ipv4() == first.is_ipv4());
        let own_end = own.contains(&local).then_some(local);
        paths.extend(
            own_end
                .into_iter()
                .chain(others)
                .map(|ip| (Some(ip), first)),
        );
    }
    let port = peer.process.resume_port;
    let remote = |ip| match ip {
        ip if ip == first => at_port(flow.ends.remote(), port),
        ip => SocketAddr::new(ip, port),
    };
    paths
        .into_iter()
        .map(|(local, ip)| (local, remote(ip)))
        .collect()
}

/// Which path connection `turn` of window `n` takes.
fn choose(n: u32, turn: u32, paths: usize) -> usize {
    if turn % 2 == 1 {
        return 0;
    }
    (n as usize + turn as usize / 2) % paths.max(1)
}

/// How long a connection of window `n` may hang before it is replaced.
fn stuck_in(n: u32) -> Duration {
    STUCK * (1 << n.min(STUCK_DOUBLINGS))
}

impl Endpoint {
    /// The flow's transport is suspect or gone: find out what to do about it.
    pub(super) fn begin_outage(&mut self, now: Time, token: FlowToken, mut outage: Outage) {
        // The peer died while its replay was being written, or somebody ended the stream.
        if outage.eof.is_some_and(|at| at < self.flow(token).promised) {
            (outage.eof, outage.errno) = (None, Some(ECONNRESET));
        }
        let (cause, ended) = (outage.cause, outage.eof.is_some());
        if !ended {
            self.reach_in_doubt(token);
        }
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

    /// Moves to `Suspended`, and asks the front end for it if it has not done so by itself.
    pub(super) fn suspend(&mut self, now: Time, token: FlowToken) {
        let deadline = self.config.deadline;
        let flow = self.flow(token);
        if flow.state() == State::Live {
            flow.go(State::Suspended);
            if let Some(outage) = &mut flow.outage
                && outage.cause == Cause::Stall
            {
                // It was suspected long before; the flow stands still from now on.
                outage.since = now;
            }
        }
        flow.change.pump = None;
        if flow.bar == Bar::Open {
            flow.bar = Bar::Asked;
            self.out.push(Action::Suspend { token });
        }
        let owner = Owner::Flow(token, Timer::Deadline);
        if let Some(deadline) = deadline
            && self.timers.get(owner).is_none()
        {
            self.timers.set(owner, now + deadline);
        }
    }

    /// Begins to look for a transport, or goes on with it.
    pub(super) fn start_attempts(&mut self, now: Time, token: FlowToken) {
        self.timers.clear(Owner::Flow(token, Timer::Explanation));
        let flow = self.flow(token);
        let Some(outage) = &mut flow.outage else {
            return;
        };
        let Some(attempts) = &mut outage.attempts else {
            outage.attempts = Some(Attempts {
                n: 0,
                begun: 0,
                turn: 0,
                failures: 0,
                left: None,
                last: Failure::TimedOut,
                path: (None, flow.ends.remote()),
                asked: now,
                replaced: 0,
                heard_at: None,
            });
            return self.begin_window(now, token, 0);
        };
        if let Some(left) = attempts.left.take() {
            self.timers
                .set(Owner::Flow(token, Timer::Window), now + left);
        }
        self.connect(now, token);
    }

    fn begin_window(&mut self, now: Time, token: FlowToken, n: u32) {
        let ends = now + self.config.attempt_timeout(n);
        let flow = self.flow(token);
        let Some(attempts) = flow.outage.as_mut().and_then(|o| o.attempts.as_mut()) else {
            return;
        };
        attempts.n = n;
        attempts.begun += 1;
        attempts.turn = 0;
        attempts.failures = 0;
        attempts.replaced = 0;
        attempts.last = Failure::TimedOut;
        let begun = attempts.begun;
        let paths = self.paths(token);
        let Some(&(local, remote)) = paths.get(choose(n, 0, paths.len())) else {
            return;
        };
        self.emit_later(
            token,
            Event::Attempt {
                n: begun,
                local,
                remote,
            },
        );
        self.timers.set(Owner::Flow(token, Timer::Window), ends);
        let flow = self.flow(token);
        let failed = |outage: &&Outage| matches!(outage.cause, Cause::Errno(_));
        if begun == 1
            && flow.role == Role::Acceptor
            && let Some(outage) = flow.outage.as_deref().filter(failed)
        {
            let start = outage.since + HEAD_START;
            if start > now {
                return self.timers.set(Owner::Flow(token, Timer::Backoff), start);
            }
        }
        self.connect(now, token);
    }

    fn paths(&self, token: FlowToken) -> Vec<Path> {
        paths(&self.flows[&token], &self.id.host, &self.addrs)
    }

    /// Asks for a connection, unless one is under way in either direction.
    fn connect(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        if flow.change.has_connection() {
            return;
        }
        let local = flow.ends.local().ip();
        let paths = self.paths(token);
        let flow = self.flow(token);
        let Some(attempts) = flow.outage.as_mut().and_then(|o| o.attempts.as_mut()) else {
            return;
        };
        let known = attempts.heard_at.take();
        // What was answered was asked from the flow's own address. From the one that the kernel chooses, connections
        // may lead nowhere.
        let bound = (attempts.replaced % 2 == 0).then_some(local);
        let known = known.and_then(|ip| {
            let fits = |(own, to): &&Path| *own == bound && to.ip() == ip;
            let free = |(own, to): &&Path| own.is_none() && to.ip() == ip;
            paths.iter().find(fits).or_else(|| paths.iter().find(free))
        });
        let turn = || paths.get(choose(attempts.n, attempts.turn, paths.len()));
        let Some(&path) = known.or_else(turn) else {
            return;
        };
        attempts.turn += 1;
        attempts.path = path;
        attempts.asked = now;
        let stuck = stuck_in(attempts.n);
        self.leave_lane(now, token);
        let flow = self.flow(token);
        let role = flow.role;
        flow.change.lane = Some(path.1);
        self.timers.clear(Owner::Flow(token, Timer::Backoff));
        self.timers
            .set(Owner::Flow(token, Timer::Stuck), now + stuck);
        if self.connects.enter(path.1, token, role) {
            self.launch(now, token);
        }
    }

    /// It is this flow's turn to connect.
    fn launch(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let busy = flow.change.has_connection();
        let attempts = flow.outage.as_mut().and_then(|o| o.attempts.as_mut());
        let Some(attempts) = attempts.filter(|_| !busy) else {
            debug_assert!(false, "{token:?} waits for what it has");
            if let Some(to) = flow.change.lane.take() {
                self.connects.leave(to, token);
            }
            return;
        };
        attempts.asked = now;
        let (local, remote) = attempts.path;
        let stuck = stuck_in(attempts.n);
        let hung = HUNG * (1 << attempts.replaced.min(HUNG_DOUBLINGS));
        self.next_conn += 1;
        let conn = ConnId(self.next_conn);
        self.flow(token).change.outgoing = Some(conn);
        self.conns.insert(
            conn,
            Conn::Out {
                token,
                stage: Stage::Connecting,
            },
        );
        for (timer, wait) in [(Timer::Stuck, stuck), (Timer::Hung, hung)] {
            self.timers.set(Owner::Flow(token, timer), now + wait);
        }
        self.out.push(Action::Connect {
            conn,
            token,
            local,
            remote,
        });
    }

    /// The flow is not connecting any more, nor waiting for its turn: it is somebody else's.
    pub(super) fn leave_lane(&mut self, now: Time, token: FlowToken) {
        let Some(to) = self.flow(token).change.lane.take() else {
            return;
        };
        self.connects.leave(to, token);
        while let Some(next) = self.connects.next(to) {
            self.launch(now, next);
        }
    }

    /// How long the connection under way has been waited for.
    pub(super) fn connecting_for(&self, now: Time, token: FlowToken) -> Duration {
        let outage = self.flows[&token].outage.as_ref();
        let attempts = outage.and_then(|outage| outage.attempts.as_ref());
        attempts.map_or(Duration::ZERO, |attempts| now.since(attempts.asked))
    }

    pub(super) fn on_hung(&mut self, now: Time, token: FlowToken) {
        if self.flow(token).change.outgoing.is_some() {
            self.report(token);
            self.probe(now, token);
        }
    }

    /// The peer has answered at `via`: what was asked for before that is asked for again.
    pub(super) fn connect_anew(&mut self, now: Time, token: FlowToken, via: IpAddr) {
        let Some(attempts) = self.attempts(token) else {
            return;
        };
        attempts.replaced += 1;
        attempts.heard_at = Some(via);
        self.replace(now, token);
    }

    /// The connection under way is given up for another one.
    fn replace(&mut self, now: Time, token: FlowToken) {
        if let Some(conn) = self.flow(token).change.outgoing.take() {
            self.close_conn(conn);
            if let Some(to) = self.flow(token).change.lane {
                self.connects.lost(now, to);
            }
            if let Some(attempts) = self.attempts(token) {
                attempts.last = Failure::TimedOut;
            }
            self.settle(token);
        }
        self.connect(now, token);
    }

    /// The connection under way got a step further.
    pub(super) fn got_on(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let n = match flow.outage.as_ref().and_then(|o| o.attempts.as_ref()) {
            Some(attempts) => attempts.n,
            None => 0,
        };
        let stuck = stuck_in(n);
        self.timers
            .set(Owner::Flow(token, Timer::Stuck), now + stuck);
        self.timers.clear(Owner::Flow(token, Timer::Hung));
    }

    /// The connection under way came to nothing. The driver has closed it, or was told to.
    pub(super) fn conn_failed(&mut self, now: Time, token: FlowToken, why: Failure) {
        self.report(token);
        let flow = self.flow(token);
        flow.change.outgoing = None;
        let failures = match flow.outage.as_mut().and_then(|o| o.attempts.as_mut()) {
            Some(attempts) => {
                attempts.last = why;
                attempts.failures += 1;
                attempts.failures
            }
            None => 0,
        };
        self.stop_waiting(token);
        if why == Failure::Eof
            && let Some(to) = self.flow(token).change.lane
        {
            self.connects.lost(now, to);
        }
        self.leave_lane(now, token);
        self.settle(token);
        if failures == 0 {
            return;
        }
        let most = BACKOFF_MAX.min(BACKOFF * (1 << failures.saturating_sub(1).min(8)));
        // From next to nothing to all of it: those who failed together do not come back together.
        let pause = Duration::from_micros(1000 + self.rng.up_to(most.as_micros() as u64));
        self.timers
            .set(Owner::Flow(token, Timer::Backoff), now + pause);
        if why == Failure::Errno(ECONNREFUSED) {
            // Perhaps the process is gone; perhaps a firewall is in a bad mood.
            self.ask(now, token, Why::Death);
        } else if pause > HUNG {
            // The link may be down, and back before the pause is over.
            self.probe(now, token);
        }
    }

    /// What is to be waited for next is our own front end, or nothing.
    pub(super) fn stop_waiting(&mut self, token: FlowToken) {
        self.timers.clear(Owner::Flow(token, Timer::Stuck));
        self.timers.clear(Owner::Flow(token, Timer::Hung));
    }

    /// Closes the connection under way, if there is one, without counting it as failed.
    pub(super) fn drop_outgoing(&mut self, now: Time, token: FlowToken) {
        self.stop_waiting(token);
        self.timers.clear(Owner::Flow(token, Timer::Backoff));
        if let Some(conn) = self.flow(token).change.outgoing.take() {
            self.close_conn(conn);
        }
        self.leave_lane(now, token);
    }

    /// Stops the clock while the replay runs: what comes of it decides.
    pub(super) fn pause_attempts(&mut self, now: Time, token: FlowToken) {
        let window = Owner::Flow(token, Timer::Window);
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
            self.timers.clear(Owner::Flow(token, timer));
        }
        let flow = self.flow(token);
        flow.query = None;
        // Without a window under way it was stopped before, and has not gone on since.
        if let Some(attempts) = flow.outage.as_mut().and_then(|o| o.attempts.as_mut())
            && let Some(ends) = ends
        {
            attempts.left = Some(ends.since(now));
        }
    }

    pub(super) fn on_stuck(&mut self, now: Time, token: FlowToken) {
        self.replace(now, token);
    }

    pub(super) fn on_backoff(&mut self, now: Time, token: FlowToken) {
        self.connect(now, token);
    }

    /// The peer began to resume, and then nothing came.
    pub(super) fn on_peer_silent(&mut self, now: Time, token: FlowToken) {
        // Nothing was answered on it, so the peer has put nothing into it. `awaiting` stays: it
        // may hold stream bytes that the peer has forgotten.
        if let Some(conn) = self.flow(token).change.accepted.take() {
            self.close_conn(conn);
        }
        self.settle(token);
        if self
            .timers
            .get(Owner::Flow(token, Timer::Backoff))
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
            .get(Owner::Flow(token, Timer::PeerSilent))
            .is_some();
        if agreed || heard {
            // Both sides are at it this very moment.
            let more = now + Duration::from_secs(1);
            return self.timers.set(Owner::Flow(token, Timer::Window), more);
        }
        self.drop_outgoing(now, token);
        self.settle(token);
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
        if self.proof(token) == Proof::Given && self.ended_intact(token) {
            return self.believe_eof(now, token);
        }
        if n + 1 < self.config.attempts {
            return self.begin_window(now, token, n + 1);
        }
        self.attempts_used_up(now, token, n);
    }

    fn attempts_used_up(&mut self, now: Time, token: FlowToken, n: u32) {
        let flow = self.flow(token);
        if flow.state() == State::Live {
            // Only a stall that was looked into: the old transport is still in use.
            flow.outage = None;
            flow.query = None;
            return self.timers.clear_flow(token);
        }
        let patient = flow
            .outage
            .as_ref()
            .is_some_and(|outage| outage.patient() && now.since(outage.since) < PATIENCE);
        if patient {
            return self.begin_window(now, token, n);
        }
        self.give_up(now, token, EscalateReason::Attempts);
    }

    pub(super) fn on_deadline(&mut self, now: Time, token: FlowToken) {
        self.give_up(now, token, EscalateReason::Deadline);
    }

    /// No transport was found in time. Where the old one has done nothing but end, and its peer could never be
    /// reached by another, that end is what the application gets.
    fn give_up(&mut self, now: Time, token: FlowToken, reason: EscalateReason) {
        if self.ended_intact(token) && !self.was_reached(token) {
            return self.believe_eof(now, token);
        }
        self.escalate_with_cause(now, token, reason);
    }

    /// Gives the flow up with the error that the kernel had reported.
    pub(super) fn escalate_with_cause(
        &mut self,
        now: Time,
        token: FlowToken,
        reason: EscalateReason,
    ) {
        let errno = match &self.flow(token).outage {
            Some(outage) => outage.verdict(),
            None => ECONNRESET,
        };
        self.escalate(now, token, reason, Verdict::Errno(errno));
    }

    fn attempts(&mut self, token: FlowToken) -> Option<&mut Attempts> {
        self.flow(token).outage.as_mut()?.attempts.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_window_starts_elsewhere_and_comes_back_to_the_first_path() {
        let order = |n| (0..6).map(|turn| choose(n, turn, 3)).collect::<Vec<_>>();
        assert_eq!(order(0), [0, 0, 1, 0, 2, 0]);
        assert_eq!(order(1), [1, 0, 2, 0, 0, 0]);
        assert_eq!(order(2), [2, 0, 0, 0, 1, 0]);
        assert_eq!(choose(5, 4, 1), 0);
        assert_eq!(choose(5, 4, 0), 0, "no path is no reason to divide by it");
    }
}
