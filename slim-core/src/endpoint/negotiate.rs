//! Does the peer have SLIM? `docs/PROTOCOL.md`, section "Negotiation".
//!
//! The connector asks until it has an answer, the host says that nobody is there, or time is up.
//! The acceptor waits for the question as long. Meanwhile the application sends and receives as it
//! likes; nothing it does waits for the outcome.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::ends::Ends;
use super::flow::State;
use super::pending::{PendingHello, Waiting};
use super::processes::Process;
use super::record::{Asking, Bar, Leaving, Outage, Peer};
use super::timer::{Owner, Timer};
use super::{Action, Endpoint};
use crate::addr::on_link_of;
use crate::auth::{FlowKey, Fresh, KeyInputs, answer_random, seal_with_job, verify_with_job};
use crate::config::Policy;
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, FinHow, FlowId, FlowToken, Role, Time};
use crate::wire::{
    AddrList, Demote, Hello, HelloAck, HelloDone, HelloNak, HelloWait, Message, NakReason, Parsed,
};

/// First wait before HELLO is sent again; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// Longest wait before HELLO is sent again.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How long a HELLO may come behind the error that ended its connection: a peer with SLIM sends it
/// before the first byte. Without one the application has the error as soon as without SLIM. A host that has asked
/// lately has SLIM: its HELLO is late, and is waited for as long as an answer.
const LATE_HELLO: Duration = Duration::from_millis(20);
/// How long the answer to HELLO is waited for once the connection has failed.
const LATE_ANSWER: Duration = Duration::from_millis(500);
/// How long a connector asks whether its connection has been accepted.
const WAIT_LIFE: Duration = Duration::from_secs(300);
/// Somebody who has answered others lately has SLIM: an answer, or a question, that does not come is
/// late or lost, and is waited for as many times as long.
pub(super) const KNOWN: u32 = 4;
/// Hosts remembered for having asked.
const ASKERS: usize = 1024;
/// Addresses have one spelling here, or the two ends would not find each other.
pub(super) use crate::addr::canonical as plain;

/// When a host asked last whether we have SLIM: so it has.
#[derive(Default)]
pub(super) struct Askers {
    heard: HashMap<IpAddr, Time>,
}

impl Askers {
    fn note(&mut self, now: Time, ip: IpAddr, age: Duration) {
        if self.heard.len() >= ASKERS && !self.heard.contains_key(&ip) {
            self.heard.retain(|_, at| now.since(*at) < age);
        }
        if self.heard.len() < ASKERS || self.heard.contains_key(&ip) {
            self.heard.insert(ip, now);
        }
    }

    pub(super) fn expire(&mut self, now: Time, age: Duration) {
        self.heard.retain(|_, at| now.since(*at) < age);
        self.heard.shrink_to_fit();
    }

    pub(super) fn len(&self) -> usize {
        self.heard.len()
    }

    fn within(&self, now: Time, ip: IpAddr, age: Duration) -> bool {
        self.heard.get(&ip).is_some_and(|at| now.since(*at) < age)
    }
}

impl Endpoint {
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
            .set(Owner::Flow(token, Timer::HelloDeadline), limit);
        match role {
            Role::Connector => {
                let id = FlowId(self.rng.half());
                let hello = Hello {
                    flow: id,
                    connector: local,
                    acceptor: remote,
                    endpoint: self.id,
                    random_c: self.rng.block(),
                    features: 0,
                    resume_port: self.resume_port,
                    control_port: self.control_port,
                    addrs: AddrList::new(self.addrs.iter().copied()),
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
                while let Some(waiting) = self.pending.take(now, (local, remote)) {
                    self.accept_hello(now, token, &waiting.hello, waiting.from, waiting.local);
                }
            }
        }
    }

    /// Takes a HELLO that waits for the connection from `remote` to `local` to be accepted, until there is none. For
    /// drivers of processes that share a listener: another one has accepted it.
    pub fn take_pending(
        &mut self,
        now: Time,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<PendingHello> {
        let waiting = self.pending.take(now, (plain(local), plain(remote)))?;
        let message = Message::Hello(waiting.hello);
        Some(PendingHello {
            from: waiting.from,
            local: waiting.local,
            data: seal_with_job(self.config.job_key.as_ref(), &message),
        })
    }

    /// Nobody accepts connections any more at the addresses of ours for which `fits` holds: those that
    /// wait for it are told.
    pub fn refuse_pending(&mut self, fits: impl Fn(SocketAddr) -> bool) {
        for waiting in self.pending.take_all(fits) {
            let nak = Message::HelloNak(HelloNak {
                flow: waiting.hello.flow,
                reason: NakReason::Policy,
            });
            let data = seal_with_job(self.config.job_key.as_ref(), &nak);
            self.out.datagram(waiting.from, Some(waiting.local), data);
        }
    }

    pub(super) fn send_hello(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let to = flow.ends.remote();
        let Some(asking) = &mut flow.hello else {
            return;
        };
        let wait = if asking.waiting {
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
            .set(Owner::Flow(token, Timer::Hello), now + wait);
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
            let deadline = Owner::Flow(token, Timer::HelloDeadline);
            return self.timers.set(deadline, now + age);
        }
        self.become_legacy(now, token, LegacyReason::NoAnswer);
    }

    /// Acceptor: a HELLO and our flow have met. Whoever said it has to show that the answer has reached it.
    fn accept_hello(
        &mut self,
        now: Time,
        token: FlowToken,
        hello: &Hello,
        from: SocketAddr,
        local: SocketAddr,
    ) {
        // Of two connections with one name the first has it.
        if self.by_id.contains_key(&(hello.flow, Role::Acceptor)) {
            return self.drop_one();
        }
        let peer = self.asker(hello);
        self.send_ack(hello.flow, &peer, from, local);
        self.add_candidate(now, token, hello.flow, peer);
        self.announce_fin_to(token, Some(hello.flow));
        if self.flows[&token].outage.is_some() {
            let most = self.config.hello_timeout.min(LATE_ANSWER);
            let deadline = Owner::Flow(token, Timer::HelloDeadline);
            self.timers.set(deadline, now + most);
        }
    }

    /// Acceptor: what this HELLO says about the other side.
    fn asker(&mut self, hello: &Hello) -> Peer {
        let random_s = answer_random(&self.secret, hello);
        let key = self.key_of(hello, random_s);
        let process = self.processes.share(Process {
            id: hello.endpoint,
            addrs: hello.addrs[..].into(),
            resume_port: hello.resume_port,
            control_port: hello.control_port,
        });
        Peer {
            process,
            key,
            random_s,
        }
    }

    /// Acceptor: the key of the flow that this HELLO asks for.
    fn key_of(&self, hello: &Hello, random_s: [u8; 32]) -> FlowKey {
        let inputs = KeyInputs {
            flow: hello.flow,
            random_c: hello.random_c,
            random_s,
            connector: hello.endpoint,
            acceptor: self.id,
        };
        FlowKey::derive(self.config.job_key.as_ref(), &inputs)
    }

    /// Whether it is this HELLO, come late or twice, that the flow began with: no other makes its key.
    fn began_with(&self, peer: &Peer, hello: &Hello) -> bool {
        self.key_of(hello, peer.random_s) == peer.key
    }

    fn send_ack(&mut self, flow: FlowId, peer: &Peer, to: SocketAddr, from: SocketAddr) {
        let ack = Message::HelloAck(HelloAck {
            flow,
            endpoint: self.id,
            random_s: peer.random_s,
            features: 0,
            resume_port: self.resume_port,
            control_port: self.control_port,
            addrs: AddrList::new(self.addrs.iter().copied()),
        });
        let data = peer.key.seal(Role::Acceptor, Fresh::None, &ack);
        self.out.datagram(to, Some(from), data);
    }

    pub(super) fn on_hello(
        &mut self,
        now: Time,
        from: SocketAddr,
        local: SocketAddr,
        parsed: &Parsed<'_>,
        hello: &Hello,
    ) {
        // Nobody may name a connection of another host.
        if plain(from).ip() != hello.connector.ip() {
            return self.drop_one();
        }
        let hello = &Hello {
            connector: on_link_of(hello.connector, from),
            acceptor: on_link_of(hello.acceptor, from),
            ..*hello
        };
        let nak = |reason| {
            Message::HelloNak(HelloNak {
                flow: hello.flow,
                reason,
            })
        };
        let job = self.config.job_key.clone();
        if !verify_with_job(job.as_ref(), parsed) {
            let data = seal_with_job(job.as_ref(), &nak(NakReason::Unauthorized));
            return self.out.datagram(from, Some(local), data);
        }
        let age = self.config.hello_timeout;
        self.askers.note(now, hello.connector.ip(), age);
        if let Some(&token) = self.by_id.get(&(hello.flow, Role::Acceptor)) {
            let flow = &self.flows[&token];
            let candidate = self.candidates.named(token, hello.flow);
            let peer = flow.peer.as_ref().or(candidate.map(|known| &known.peer));
            let same = peer.filter(|peer| {
                flow.ends.remote() == hello.connector && self.began_with(peer, hello)
            });
            return match same.cloned() {
                Some(peer) => {
                    self.send_ack(hello.flow, &peer, from, local);
                    // Sent before the peer could read it, perhaps.
                    self.announce_fin_to(token, Some(hello.flow));
                }
                None => self.drop_one(),
            };
        }
        if let Some(tomb) = self.tombs.get(now, &(hello.flow, Role::Acceptor))
            && self.began_with(&tomb.peer, hello)
        {
            let peer = tomb.peer.clone();
            return self.send_ack(hello.flow, &peer, from, local);
        }
        let tuple = (hello.acceptor, hello.connector);
        let ends = Ends::new(tuple.0, tuple.1);
        let Some(&token) = self.by_ends.get(&ends) else {
            if self.is_too_late(now, &ends, hello.flow) {
                let data = seal_with_job(job.as_ref(), &nak(NakReason::Policy));
                return self.out.datagram(from, Some(local), data);
            }
            let waiting = Waiting {
                hello: *hello,
                from,
                local,
            };
            self.pending.put(now, tuple, waiting);
            let wait = Message::HelloWait(HelloWait { flow: hello.flow });
            let data = seal_with_job(job.as_ref(), &wait);
            return self.out.datagram(from, Some(local), data);
        };
        match self.flow(token).state() {
            State::Negotiating => self.accept_hello(now, token, hello, from, local),
            // Too late: bytes are not counted any more.
            State::Legacy => {
                let data = seal_with_job(job.as_ref(), &nak(NakReason::Policy));
                self.out.datagram(from, Some(local), data);
            }
            // The peer is known already.
            _ => self.drop_one(),
        }
    }

    pub(super) fn on_hello_wait(&mut self, now: Time, parsed: &Parsed<'_>, wait: &HelloWait) {
        if !verify_with_job(self.config.job_key.as_ref(), parsed) {
            return self.drop_one();
        }
        let Some(token) = self.negotiating(wait.flow) else {
            return self.drop_one();
        };
        let flow = self.flow(token);
        let faulted = flow.outage.is_some();
        let Some(asking) = &mut flow.hello else {
            return;
        };
        let first = !std::mem::replace(&mut asking.waiting, true);
        let to = flow.ends.remote();
        // The application at the other end accepts when it likes, if it ever does. A flow that has lost
        // its connection cannot wait as long.
        if first && !faulted {
            let deadline = Owner::Flow(token, Timer::HelloDeadline);
            self.timers.set(deadline, now + WAIT_LIFE);
        }
        let wait = self.spread(RETRY_MAX);
        self.timers
            .set(Owner::Flow(token, Timer::Hello), now + wait);
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

    pub(super) fn on_hello_done(
        &mut self,
        now: Time,
        from: SocketAddr,
        parsed: &Parsed<'_>,
        done: &HelloDone,
    ) {
        let HelloDone(hello) = done;
        self.prove(now, hello.flow, (Fresh::None, parsed), None);
        if self.genuine(hello.flow, parsed).is_some() {
            return;
        }
        // Others may have taken the place of this HELLO. It has all that is needed.
        let ends = Ends::new(
            on_link_of(hello.acceptor, from),
            on_link_of(hello.connector, from),
        );
        let token = self.by_ends.get(&ends).copied();
        let negotiating = token.filter(|token| {
            self.flows[token].state() == State::Negotiating
                && !self.by_id.contains_key(&(hello.flow, Role::Acceptor))
        });
        if let Some(token) = negotiating {
            let random_s = answer_random(&self.secret, hello);
            let key = self.key_of(hello, random_s);
            if key.verify(Role::Connector, Fresh::None, parsed) {
                let peer = self.asker(hello);
                self.add_candidate(now, token, hello.flow, peer);
                return self.prove(now, hello.flow, (Fresh::None, parsed), None);
            }
        }
        self.drop_one();
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

    /// A flow lost its transport before anybody knew whether it can be resumed.
    pub(super) fn fault_negotiating(&mut self, now: Time, token: FlowToken, cause: Cause) {
        match cause {
            // Nobody can be asked whether it is genuine, and to withhold it until somebody can
            // would delay every short connection to a peer without SLIM.
            Cause::Eof { .. } if !self.candidates.any(token) => {
                self.timers.clear_flow(token);
                self.flow(token).go(State::Legacy);
                self.hello_over(now, token);
                let reason = LegacyReason::NoAnswer;
                self.emit(token, Event::Legacy { reason });
                self.reinstate_legacy(token);
            }
            Cause::Errno(_) | Cause::Eof { .. } => {
                let most = self.config.hello_timeout;
                let asker = self.flows[&token].ends.remote().ip();
                let asked = self.candidates.any(token) || self.askers.within(now, asker, most);
                let flow = self.flow(token);
                if let Some(outage) = &mut flow.outage {
                    if let Cause::Errno(errno) = cause {
                        outage.errno.get_or_insert(errno);
                    }
                    return;
                }
                flow.bar = Bar::Shut;
                flow.outage = Some(Box::new(Outage::new(now, cause)));
                let wait = if flow.hello.is_some() || asked {
                    most.min(LATE_ANSWER)
                } else {
                    most.min(LATE_HELLO)
                };
                let deadline = Owner::Flow(token, Timer::HelloDeadline);
                let limit = now + wait;
                if self.timers.get(deadline).is_none_or(|at| at > limit) {
                    self.timers.set(deadline, limit);
                }
                let to = self.flow(token).ends.remote();
                if self.hellos.is_waiting(to, token) {
                    // There is no time to wait for its turn.
                    self.hellos.leave(to, token);
                    self.send_hello(now, token);
                }
                self.hurry_candidates(now, token);
            }
            Cause::Stall | Cause::PeerAsked => {}
        }
    }

    /// The peer has SLIM, and it is known who it is. `end`: what it has said about the end of its stream.
    pub(super) fn become_live(&mut self, now: Time, token: FlowToken, end: Option<(u64, FinHow)>) {
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let flow = self.flow(token);
        flow.hello = None;
        flow.go(State::Live);
        let outage = flow.outage.take();
        self.out.push(Action::Live { token });
        self.emit(token, Event::Live);
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

    /// Ends negotiation without a session. The application of a flow that has already lost its
    /// transport gets its error.
    pub(super) fn become_legacy(&mut self, now: Time, token: FlowToken, reason: LegacyReason) {
        let required = self.config.policy == Policy::Required;
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let flow = self.flow(token);
        let fault = flow.outage.take();
        flow.go(State::Legacy);
        self.dismiss(token);
        self.emit(token, Event::Legacy { reason });
        match fault {
            Some(outage) if outage.errno.is_none() => self.reinstate_legacy(token),
            Some(outage) => self.escalate_quietly(now, token, outage.verdict()),
            None => self.out.push(Action::Legacy {
                token,
                required_refused: required,
            }),
        }
    }

    /// Whoever has said HELLO for the flow must not rely on us.
    fn dismiss(&mut self, token: FlowToken) {
        self.tell_candidates(token, None, |flow| Message::Demote(Demote { flow }));
        self.take_candidates(token);
    }

    /// Our front end cannot keep its side of a session any longer.
    pub(super) fn leave(&mut self, now: Time, token: FlowToken, leaving: Leaving) {
        let flow = self.flow(token);
        match flow.state() {
            State::Negotiating | State::Live => {
                self.abandon_connections(now, token);
                self.timers.clear_flow(token);
                self.hello_over(now, token);
                let flow = self.flow(token);
                let fault = flow.outage.take().filter(|_| flow.bar == Bar::Shut);
                flow.query = None;
                flow.go(State::Legacy);
                self.emit_leaving(token, leaving);
                self.take_candidates(token);
                match fault {
                    Some(outage) if outage.errno.is_none() => self.reinstate_legacy(token),
                    Some(outage) => self.escalate_quietly(now, token, outage.verdict()),
                    None => self.push_legacy(token, leaving),
                }
            }
            // The peer had a transport when it left, and we have not.
            State::Suspended if leaving == Leaving::Theirs => {
                self.fall_back(now, token, LegacyReason::PeerDemoted);
            }
            State::Suspended | State::Resuming => flow.leaving = Some(leaving),
            State::Legacy | State::Escalated | State::Closed => {}
        }
    }

    /// Puts the old transport back as plain TCP. The flow is `Legacy` already.
    pub(super) fn reinstate_legacy(&mut self, token: FlowToken) {
        self.out.push(Action::Reinstate { token });
        if self.config.policy == Policy::Required {
            self.out.push(Action::Legacy {
                token,
                required_refused: true,
            });
        }
    }

    fn emit_leaving(&mut self, token: FlowToken, leaving: Leaving) {
        match leaving {
            Leaving::Ours => {
                self.announce_demote(token);
                self.emit(token, Event::Demoted);
            }
            Leaving::Theirs => {
                let reason = LegacyReason::PeerDemoted;
                self.emit(token, Event::Legacy { reason });
            }
        }
    }

    fn push_legacy(&mut self, token: FlowToken, leaving: Leaving) {
        self.out.push(Action::Legacy {
            token,
            required_refused: leaving == Leaving::Theirs && self.config.policy == Policy::Required,
        });
    }

    fn negotiating(&self, id: FlowId) -> Option<FlowToken> {
        let token = *self.by_id.get(&(id, Role::Connector))?;
        (self.flows.get(&token)?.state() == State::Negotiating).then_some(token)
    }
}
