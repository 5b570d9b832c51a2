//! Does the peer have SLIM? `docs/PROTOCOL.md`, section "Negotiation".
//!
//! The connector asks until it has an answer, the host says that nobody is there, or time is up.
//! The acceptor waits for the question as long. Meanwhile the application sends and receives as it
//! likes; nothing it does waits for the outcome.

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
/// How long a HELLO may come behind the error that ended its connection. A peer with SLIM sends it before the first byte,
/// but on a busy host the process, or its agent, may not have had a turn since the connection stands. This long an
/// application waits for its error whose peer has no SLIM, once; then it is known, and only a HELLO that the network has
/// delayed is waited for. A host that has asked lately has SLIM: its HELLO is waited for as long as an answer.
pub(super) const LATE_HELLO: Duration = Duration::from_millis(250);
/// The same where connections from that host have come without HELLO lately.
const STRAY_HELLO: Duration = Duration::from_millis(20);
/// How long the answer to HELLO is waited for once the connection has failed.
pub(super) const LATE_ANSWER: Duration = Duration::from_millis(500);
/// How long a connector asks whether its connection has been accepted.
const WAIT_LIFE: Duration = Duration::from_secs(300);
/// Somebody who has answered others lately has SLIM: an answer, or a question, that does not come is
/// late or lost, and is waited for as many times as long.
pub(super) const KNOWN: u32 = 4;
/// Addresses have one spelling here, or the two ends would not find each other.
pub(super) use crate::addr::canonical as plain;

impl Endpoint {
    /// Connector: the process that we took the peer for does not have the connection.
    pub(super) fn ask_after_all(&mut self, now: Time, token: FlowToken) {
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
                    let settled = self.flow(token).state() != State::Negotiating;
                    match waiting.request {
                        // An OPEN has settled it. The HELLO that its connector said beside it is not to be answered, or the
                        // two ends would have the flow under different names.
                        Request::Hello(_) if settled => {}
                        // A later connection with these addresses has this one.
                        Request::Open(_) if settled => {
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
        // Once the connection has failed, a process that has ended is to be found out soon.
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

    /// Up to half as long again: what was lost together does not come back together.
    fn spread(&mut self, wait: Duration) -> Duration {
        wait + Duration::from_micros(self.rng.up_to(wait.as_micros() as u64 / 2))
    }

    /// HELLO has had no answer yet, or only that the application has not accepted yet.
    pub(super) fn hello_again(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        if flow.hello.as_ref().is_some_and(|asking| !asking.waiting) {
            let to = flow.ends.remote();
            self.hellos.lost(now, to);
        }
        self.send_hello(now, token);
    }

    /// The flow need not be asked about any more, or not soon: others may.
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
        // Others may have taken the place of whoever is meant, who then asks again.
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
        // The application at the other end accepts when it likes, if it ever does. A flow that has lost its connection
        // waits for that as long as for a transport.
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
            return; // a second copy
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
                // The acceptor knows nothing of the OPEN, if one was sent.
                self.take_candidates(token);
                self.become_live(now, token, None);
                // The peer must know that this has arrived; all that is said under the key tells it.
                let flow = &self.flows[&token];
                if flow.fin.is_none() && flow.state() == State::Live {
                    self.tell(token, None, |_| Message::HelloDone(HelloDone(hello)));
                }
            }
            // We had stopped waiting: the peer must not rely on us.
            State::Legacy => self.announce_demote(token),
            _ => self.announce_fin(token),
        }
    }

    pub(super) fn on_hello_nak(&mut self, now: Time, nak: &HelloNak) {
        // Its code proves nothing if the job keys differ, so the name of the flow, which nobody
        // but the asked can know, has to do. Who can read it can also keep HELLO from arriving.
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

    /// The host at `to` says that nobody listened there when the HELLO of the flow `refused` came. That goes
    /// for all that were sent before it, too, for of many in a row few are answered. What was sent after it may have
    /// come later than somebody who listens.
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

    /// Whether we have accepted the connection, and no HELLO has come because it is late.
    pub(super) fn may_be_asked(&self, now: Time, flow: &FlowRecord) -> bool {
        let silent = self.askers.is_silent(now, flow.ends.remote().ip());
        let negotiates = flow.role == Role::Acceptor && flow.state() == State::Negotiating;
        negotiates && !silent && now.since(flow.opened) < LATE_HELLO
    }

    /// A flow lost its transport before anybody knew whether it can be resumed.
    pub(super) fn fault_negotiating(&mut self, now: Time, token: FlowToken, cause: Cause) {
        // An acceptor's front end withholds an end only if it has heard an OPEN for the connection. The endpoint may have denied
        // that in the same moment, and HELLO is on its way.
        let connected_to = self.flow(token).role == Role::Acceptor;
        match cause {
            // Nobody can be asked whether it is genuine, and to withhold it until somebody can
            // would delay every short connection to a peer without SLIM.
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
                let asked = self.candidates.any(token) || self.askers.within(now, asker, most);
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
                    _ if flow.hello.is_some() || asked => most.min(LATE_ANSWER),
                    true => most.min(STRAY_HELLO),
                    false => most.min(LATE_HELLO),
                };
                let deadline = TimerOwner::Flow(token, Timer::HelloDeadline);
                let limit = now + wait;
                if self.timers.get(deadline).is_none_or(|at| at > limit) {
                    self.timers.set(deadline, limit);
                }
                let to = self.flow(token).ends.remote();
                if is_queued {
                    // Perhaps nobody is there any more.
                    self.send_hello(now, token);
                } else if self.hellos.is_waiting(to, token) {
                    // There is no time to wait for its turn.
                    self.hellos.leave(to, token);
                    self.send_hello(now, token);
                }
                self.hurry_candidates(now, token);
            }
            Cause::Stall | Cause::PeerAsked => {}
        }
    }

    /// Name, key and peer of the flow are known, and nobody has to be asked. `end`: as with
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

    /// The peer has SLIM, and it is known who it is. `end`: what it has said about the end of its stream.
    pub(super) fn become_live(&mut self, now: Time, token: FlowToken, end: Option<(u64, FinHow)>) {
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let ends = self.flows[&token].ends.clone();
        self.not_dialling(&ends, token);
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
            // An acceptor has said it with HELLO_ACK, or when it came to it.
            self.announce_fin(token);
        }
        match end {
            Some((seq, how)) if how != FinHow::Reset => self.learn_final(token, seq, how),
            reset => self.flow(token).peer_fin = reset,
        }
        if let Some(outage) = outage {
            self.begin_outage(now, token, *outage);
        }
    }

    fn negotiating(&self, id: FlowId) -> Option<FlowToken> {
        let token = *self.by_id.get(&(id, Role::Connector))?;
        let flow = self.flows.get(&token)?;
        (flow.state() == State::Negotiating && flow.hello.is_some()).then_some(token)
    }
}
