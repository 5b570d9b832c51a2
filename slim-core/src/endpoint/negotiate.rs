//! Negotiation: does the peer have SLIM? `docs/PROTOCOL.md`, section "Negotiation".
//!
//! The connector sends HELLO until an answer comes, the peer's host refuses it, or the time is up.
//! The acceptor waits for HELLO as long. Meanwhile the application sends and receives
//! freely; no call of it waits for the outcome.

use std::net::SocketAddr;
use std::time::Duration;

use super::flow::State;
use super::outage::Outage;
use super::pending::Request;
use super::record::{Asking, Bar, FlowRecord, Peer};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::auth::{FlowKey, Fresh, KeyInputs, seal_with_job, verify_with_job};
use crate::config::Policy;
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, FinHow, FlowId, FlowToken, Role, Time, take};
use crate::wire::{
    AddrList, Hello, HelloAck, HelloDone, HelloNak, HelloWait, Message, NakReason, Parsed,
};

/// First wait before HELLO is sent again; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// Longest wait before HELLO is sent again.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How long an acceptor waits for HELLO after its connection has failed. A peer with SLIM sends HELLO before the first byte,
/// but on a busy host the process, or its agent, may not have run since the connection was established. If the peer's host
/// has no SLIM, this delays the application's error, but only once: after that the host is known to be silent, and
/// [`STRAY_HELLO`] applies. For a host that has sent HELLO lately, [`LATE_ANSWER`] applies.
pub(super) const LATE_HELLO: Duration = Duration::from_millis(250);
/// The same if connections from that host have come without HELLO lately: long enough for a HELLO that the network has delayed.
const STRAY_HELLO: Duration = Duration::from_millis(20);
/// How long a connector waits for the answer to HELLO once the connection has failed.
pub(super) const LATE_ANSWER: Duration = Duration::from_millis(500);
/// How long a connector repeats HELLO while the peer's application has not accepted the connection.
pub(super) const WAIT_LIFE: Duration = Duration::from_secs(300);
/// A peer that has answered another HELLO lately has SLIM, so a missing answer is late or lost. The endpoint waits this many
/// times as long for it. The same holds for a HELLO from a host that has sent one lately.
pub(super) const KNOWN: u32 = 4;
/// All addresses are compared in this form; otherwise the two ends of a flow would not match.
pub(super) use crate::addr::canonical as plain;

impl Endpoint {
    /// Connector: the process that the OPEN was for does not have the connection, so HELLO is sent.
    pub(super) fn negotiate_by_hello(&mut self, now: Time, token: FlowToken) {
        self.start_negotiation(now, token);
        let flow = &self.flows[&token];
        if flow.state() == State::Negotiating && flow.outage.is_some() {
            let most = self.config.hello_timeout.min(LATE_ANSWER);
            let deadline = TimerOwner::Flow(token, Timer::HelloDeadline);
            self.timers.set(deadline, now + most);
        }
    }

    pub(super) fn start_negotiation(&mut self, now: Time, token: FlowToken) {
        if self.config.policy == Policy::Off {
            return self.become_legacy(now, token, LegacyReason::Policy);
        }
        let Some(flow) = self.flows.get(&token) else {
            return;
        };
        let (role, (local, remote)) = (flow.role, flow.ends.both());
        if !self.may_know(remote.ip()) {
            return self.become_legacy(now, token, LegacyReason::NotAPeer);
        }
        if role == Role::Connector && self.refusals.refuses(now, remote) {
            return self.become_legacy(now, token, LegacyReason::NoControlSocket);
        }
        let limit = now + self.config.hello_timeout;
        self.timers
            .set(TimerOwner::Flow(token, Timer::HelloDeadline), limit);
        match role {
            Role::Connector => {
                let id = FlowId::new(self.rng.half(), self.flows[&token].again);
                let hello = Hello {
                    flow: id,
                    connector: local,
                    acceptor: remote,
                    endpoint: self.id,
                    random_c: self.rng.block(),
                    features: self.features,
                    resume_port: self.own.resume_port,
                    control_port: self.own.control_port,
                    addrs: AddrList::new(self.own.addrs.iter().copied()),
                };
                let flow = self.flow(token);
                flow.id = Some(id);
                flow.hello = Some(Box::new(Asking {
                    hello,
                    sent: 0,
                    at: now,
                    waiting: false,
                }));
                self.by_id.insert((id, Role::Connector), token);
                if self.hellos.enter(remote, token, role) {
                    self.send_hello(now, token);
                }
            }
            Role::Acceptor => {
                let age = self.config.hello_timeout;
                self.askers.note_connection(now, remote.ip(), age);
                let mut later = Vec::new();
                while let Some(waiting) = self.pending.take(now, (local, remote)) {
                    let decided = self.flow(token).state() != State::Negotiating;
                    match waiting.request {
                        // An OPEN has made the flow live. A HELLO that its connector also sent must not be answered, or the
                        // two ends would have the flow under different ids.
                        Request::Hello(_) if decided => {}
                        // This OPEN is for a later connection with the same addresses.
                        Request::Open(_) if decided => {
                            later.push(waiting);
                        }
                        Request::Hello(hello) => {
                            self.accept_hello(now, token, &hello, waiting.from, waiting.local);
                        }
                        Request::Open(arrival) => self.accept_open(now, token, *arrival),
                    }
                }
                for waiting in later {
                    self.pending.put(now, (local, remote), waiting);
                }
            }
        }
    }

    pub(super) fn send_hello(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let to = flow.ends.remote();
        let failed = flow.outage.is_some();
        let Some(asking) = &mut flow.hello else {
            return;
        };
        // Once the connection has failed, the endpoint must find out soon whether the peer process has ended.
        let wait = if asking.waiting && !failed {
            RETRY_MAX
        } else {
            RETRY_MAX.min(RETRY * (1 << asking.sent.min(8)))
        };
        asking.sent += 1;
        asking.at = now;
        let wait = self.spread(wait);
        let flow = &self.flows[&token];
        let Some(asking) = &flow.hello else {
            return;
        };
        let message = Message::Hello(asking.hello);
        let data = seal_with_job(self.config.job_key.as_ref(), &message);
        let from = self.own_end(token, to);
        self.out.datagram(to, from, data);
        self.timers
            .set(TimerOwner::Flow(token, Timer::Hello), now + wait);
    }

    /// Adds up to half of `wait` at random, so that messages that were lost together are not repeated together.
    fn spread(&mut self, wait: Duration) -> Duration {
        wait + Duration::from_micros(self.rng.up_to(wait.as_micros() as u64 / 2))
    }

    /// Repeats HELLO: it has not been answered, or only by HELLO_WAIT.
    pub(super) fn hello_again(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        if flow.hello.as_ref().is_some_and(|asking| !asking.waiting) {
            let to = flow.ends.remote();
            self.hellos.lost(now, to);
        }
        self.send_hello(now, token);
    }

    /// The flow sends no HELLO any more, or not soon: it gives its slot to other flows (`pace.rs`).
    pub(super) fn hello_over(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        if flow.role == Role::Acceptor {
            return;
        }
        let to = flow.ends.remote();
        self.hellos.leave(to, token);
        while let Some(next) = self.hellos.next(to) {
            self.send_hello(now, next);
        }
    }

    pub(super) fn on_hello_deadline(&mut self, now: Time, token: FlowToken) {
        let age = self.config.hello_timeout;
        let flow = &self.flows[&token];
        let known = match flow.role {
            Role::Connector => self.hellos.heard_within(now, flow.ends.remote(), age),
            Role::Acceptor => self.askers.within(now, flow.ends.remote().ip(), age),
        };
        // Other candidates may have displaced the peer, which then sends HELLO again.
        let (known, least) = match self.candidates.any(token) {
            true => (true, 2 * RETRY_MAX),
            false => (known, Duration::ZERO),
        };
        let most = least.max(age * (KNOWN - 1));
        if known && flow.outage.is_none() && now.since(flow.opened) < most {
            let deadline = TimerOwner::Flow(token, Timer::HelloDeadline);
            return self.timers.set(deadline, now + age);
        }
        if flow.role == Role::Acceptor && !known {
            self.askers.note_silent(now, flow.ends.remote().ip());
        }
        self.become_legacy(now, token, LegacyReason::NoAnswer);
    }

    pub(super) fn on_hello_wait(&mut self, now: Time, parsed: &Parsed<'_>, wait: &HelloWait) {
        if !verify_with_job(self.config.job_key.as_ref(), parsed) {
            return self.drop_one();
        }
        let Some(token) = self.negotiating(wait.flow) else {
            return self.drop_one();
        };
        let resumable = self.config.resumable_for();
        let flow = self.flow(token);
        // The peer's application may accept late, or never. A flow that has lost its connection
        // waits for that as long as for a new transport.
        let limit = match &flow.outage {
            None => now + WAIT_LIFE,
            Some(outage) => outage.since + resumable,
        };
        let Some(asking) = &mut flow.hello else {
            return;
        };
        let first = !std::mem::replace(&mut asking.waiting, true);
        let to = flow.ends.remote();
        if first {
            let deadline = TimerOwner::Flow(token, Timer::HelloDeadline);
            self.timers.set(deadline, limit);
        }
        let wait = self.spread(RETRY_MAX);
        self.timers
            .set(TimerOwner::Flow(token, Timer::Hello), now + wait);
        self.hellos.answered(now, to, None);
        self.hello_over(now, token);
    }

    pub(super) fn on_hello_ack(&mut self, now: Time, parsed: &Parsed<'_>, ack: &HelloAck) {
        let Some(&token) = self.by_id.get(&(ack.flow, Role::Connector)) else {
            return self.on_late_ack(now, parsed, ack);
        };
        let job = self.config.job_key.clone();
        let flow = self.flow(token);
        let Some(asking) = flow.hello.as_ref().filter(|_| flow.peer.is_none()) else {
            return; // a duplicate
        };
        let hello = asking.hello;
        let inputs = KeyInputs {
            flow: ack.flow,
            random_c: hello.random_c,
            random_s: ack.random_s,
            connector: hello.endpoint,
            acceptor: ack.endpoint,
        };
        let key = FlowKey::derive(job.as_ref(), &inputs);
        if !key.verify(Role::Acceptor, Fresh::None, parsed) {
            return self.drop_one();
        }
        let peer = Peer {
            process: self.processes.share(ack.into()),
            key,
            random_s: ack.random_s,
        };
        let flow = self.flow(token);
        flow.peer = Some(peer);
        let remote = flow.ends.remote();
        self.refusals.forget(remote);
        self.hellos.answered(now, remote, None);
        self.peer_answered(now, ack.endpoint);
        match self.flow(token).state() {
            State::Negotiating => {
                // The acceptor has answered HELLO, so it has not taken the OPEN, if one was sent.
                self.take_candidates(token);
                self.become_live(now, token, None);
                // The peer must learn that HELLO_ACK has arrived. Any message under the flow key shows it; FIN would do.
                let flow = &self.flows[&token];
                if flow.fin.is_none() && flow.state() == State::Live {
                    self.tell(token, None, |_| Message::HelloDone(HelloDone(hello)));
                }
            }
            // The flow is plain TCP already: the peer must not rely on a session.
            State::Legacy => self.announce_demote(token),
            _ => self.announce_fin(token),
        }
    }

    pub(super) fn on_hello_nak(&mut self, now: Time, nak: &HelloNak) {
        // If the job keys differ, the authentication code proves nothing. So the flow id must be enough: only the receiver of
        // HELLO knows it. An attacker that can read HELLO on its way could also keep it from arriving.
        let Some(token) = self.negotiating(nak.flow) else {
            return self.drop_one();
        };
        let reason = match nak.reason {
            NakReason::Version => LegacyReason::Version,
            NakReason::Policy => LegacyReason::Policy,
            NakReason::Unauthorized => LegacyReason::Unauthorized,
        };
        self.become_legacy(now, token, reason);
    }

    /// The host at `to` reports that no socket had that port when the HELLO of the flow `refused` came. This holds
    /// for all HELLOs that were sent there before, too, because a host sends few ICMP messages. A HELLO that was sent later may
    /// have found a socket that was bound meanwhile.
    pub(super) fn hello_refused(&mut self, now: Time, to: SocketAddr, refused: FlowId) {
        let known = self.by_id.get(&(refused, Role::Connector));
        let flow = known.and_then(|token| self.flows.get(token));
        let asking = flow.filter(|flow| flow.ends.remote() == to);
        let Some(until) = asking.and_then(|flow| Some(flow.hello.as_ref()?.at)) else {
            return self.drop_one();
        };
        let asked: Vec<FlowToken> = self
            .flows
            .values()
            .filter(|flow| {
                flow.state() == State::Negotiating
                    && flow.ends.remote() == to
                    && flow.hello.as_ref().is_some_and(|a| a.at <= until)
            })
            .map(|flow| flow.token)
            .collect();
        self.refusals.note(now, to);
        for token in asked {
            self.become_legacy(now, token, LegacyReason::NoControlSocket);
        }
    }

    /// Whether we have accepted the connection, and its HELLO may still be on its way.
    pub(super) fn may_be_asked(&self, now: Time, flow: &FlowRecord) -> bool {
        let silent = self.askers.is_silent(now, flow.ends.remote().ip());
        let negotiates = flow.role == Role::Acceptor && flow.state() == State::Negotiating;
        negotiates && !silent && now.since(flow.opened) < LATE_HELLO
    }

    /// A flow has lost its transport before its negotiation was decided.
    pub(super) fn fault_negotiating(&mut self, now: Time, token: FlowToken, cause: Cause) {
        // An acceptor's front end withholds an end of stream only if an OPEN for the connection has arrived. The endpoint may
        // have answered UNKNOWN to that OPEN in the same moment; then HELLO is on its way.
        let connected_to = self.flow(token).role == Role::Acceptor;
        match cause {
            // There is no peer yet that could be asked whether the end is genuine. Withholding it until there is
            // one would delay every short connection to a peer without SLIM.
            Cause::Eof { .. } if !connected_to && !self.candidates.any(token) => {
                self.timers.clear_flow(token);
                self.flow(token).go(State::Legacy);
                self.hello_over(now, token);
                let reason = LegacyReason::NoAnswer;
                self.emit(token, Event::Legacy { reason });
                self.reinstate_legacy(token);
            }
            Cause::Errno(_) | Cause::Eof { .. } => {
                let most = self.config.hello_timeout;
                let resumable = self.config.resumable_for();
                let asker = self.flows[&token].ends.remote().ip();
                let candidates = self.candidates.any(token);
                let asked = candidates || self.askers.within(now, asker, most);
                // A candidate may take the flow for live already, and resume it. If its process has ended, its host refuses the QUERY.
                let may_resume = candidates && matches!(cause, Cause::Errno(_));
                let silent = self.askers.is_silent(now, asker);
                let flow = self.flow(token);
                if let Some(outage) = &mut flow.outage {
                    if let Cause::Errno(errno) = cause {
                        outage.errno.get_or_insert(errno);
                    }
                    return;
                }
                flow.bar = Bar::Shut;
                flow.outage = Some(Box::new(Outage::new(now, cause)));
                let asking = flow.hello.as_mut();
                let not_accepted = asking.filter(|asking| asking.waiting);
                let is_queued = not_accepted.is_some();
                if let Some(asking) = not_accepted {
                    asking.sent = 0;
                }
                let wait = match silent {
                    _ if is_queued => resumable,
                    _ if may_resume => most,
                    _ if flow.hello.is_some() || asked => most.min(LATE_ANSWER),
                    true => most.min(STRAY_HELLO),
                    false => most.min(LATE_HELLO),
                };
                let deadline = TimerOwner::Flow(token, Timer::HelloDeadline);
                let limit = now + wait;
                if may_resume || self.timers.get(deadline).is_none_or(|at| at > limit) {
                    self.timers.set(deadline, limit);
                }
                let to = self.flow(token).ends.remote();
                if is_queued {
                    // The peer process may have ended; its host would refuse HELLO then.
                    self.send_hello(now, token);
                } else if self.hellos.is_waiting(to, token) {
                    // The deadline is too close to wait for a slot.
                    self.hellos.leave(to, token);
                    self.send_hello(now, token);
                }
                self.hurry_candidates(now, token);
            }
            Cause::Stall | Cause::PeerAsked => {}
        }
    }

    /// Id, key and peer of the flow are known without a negotiation: the flow becomes live. `end`: as with
    /// [`become_live`](Self::become_live).
    pub(super) fn agree(
        &mut self,
        now: Time,
        token: FlowToken,
        id: FlowId,
        peer: Peer,
        end: Option<(u64, FinHow)>,
    ) {
        let flow = self.flow(token);
        let role = flow.role;
        flow.id = Some(id);
        flow.peer = Some(peer);
        self.by_id.insert((id, role), token);
        self.become_live(now, token, end);
    }

    /// The peer is known and has SLIM. `end`: the end of its stream, if it has announced one.
    pub(super) fn become_live(&mut self, now: Time, token: FlowToken, end: Option<(u64, FinHow)>) {
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let ends = self.flows[&token].ends.clone();
        self.clear_dialling(&ends, token);
        take(&mut self.numbers, token);
        let flow = self.flow(token);
        flow.hello = None;
        flow.go(State::Live);
        let outage = flow.outage.take();
        self.out.push(Action::Live { token });
        self.emit(token, Event::Live);
        self.reach_later(now, token);
        self.offer_later(now, token);
        if self.flows[&token].role == Role::Connector {
            // An acceptor has sent FIN to its candidates already.
            self.announce_fin(token);
        }
        match end {
            Some((seq, how)) if how != FinHow::Reset => self.learn_final(token, seq, how),
            reset => self.flow(token).peer_fin = reset,
        }
        self.prefer_later(now, token);
        if let Some(outage) = outage {
            self.begin_outage(now, token, *outage);
        }
        self.end_if_lost(now, token);
    }

    fn negotiating(&self, id: FlowId) -> Option<FlowToken> {
        let token = *self.by_id.get(&(id, Role::Connector))?;
        let flow = self.flows.get(&token)?;
        (flow.state() == State::Negotiating && flow.hello.is_some()).then_some(token)
    }
}
