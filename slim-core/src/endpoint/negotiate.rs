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
use crate::auth::{FlowKey, Fresh, KeyInputs, seal_with_job, verify_with_job};
use crate::config::Policy;
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, FlowId, FlowToken, Role, Time};
use crate::wire::{AddrList, Hello, HelloAck, HelloNak, HelloWait, Message, NakReason, Parsed};

/// First wait before HELLO is sent again; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// Longest wait before HELLO is sent again.
const RETRY_MAX: Duration = Duration::from_secs(1);
/// How long a HELLO may come behind the error that ended its connection: a peer with SLIM sends it
/// before the first byte. Without one the application has the error as soon as without SLIM.
const LATE_HELLO: Duration = Duration::from_millis(20);
/// How long the answer to HELLO is waited for once the connection has failed.
const LATE_ANSWER: Duration = Duration::from_millis(500);
/// Somebody who has answered others lately has SLIM: an answer, or a question, that does not come is
/// late or lost, and is waited for as many times as long.
const KNOWN: u32 = 4;
/// Hosts remembered for having asked.
const ASKERS: usize = 1024;
/// IPv4 addresses have one spelling here, or the two ends would not find each other.
pub(super) fn plain(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

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
                if let Some(waiting) = self.pending.take(now, (local, remote)) {
                    self.accept_hello(now, token, &waiting.hello, waiting.from, waiting.local);
                }
            }
        }
    }

    /// Takes the HELLO that waits for the connection from `remote` to `local` to be accepted. For
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
        self.out.datagram(to, None, data);
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
        if known && flow.outage.is_none() && now.since(flow.opened) < age * (KNOWN - 1) {
            let deadline = Owner::Flow(token, Timer::HelloDeadline);
            return self.timers.set(deadline, now + age);
        }
        self.become_legacy(now, token, LegacyReason::NoAnswer);
    }

    /// Acceptor: the peer's HELLO and our flow have met.
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
        let random_s = self.rng.block();
        let peer = Peer {
            process: self.processes.share(Process {
                id: hello.endpoint,
                addrs: hello.addrs[..].into(),
                resume_port: hello.resume_port,
                control_port: hello.control_port,
            }),
            key: self.key_of(hello, random_s),
            random_s,
        };
        let flow = self.flow(token);
        flow.id = Some(hello.flow);
        flow.peer = Some(peer.clone());
        self.by_id.insert((hello.flow, Role::Acceptor), token);
        self.send_ack(hello.flow, &peer, from, local);
        self.become_live(now, token);
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
            let same = flow.peer.as_ref().filter(|peer| {
                flow.ends.remote() == hello.connector && self.began_with(peer, hello)
            });
            return match same.cloned() {
                Some(peer) => {
                    self.send_ack(hello.flow, &peer, from, local);
                    // Sent before the peer could read it, perhaps.
                    self.announce_fin(token);
                }
                None => self.drop_one(),
            };
        }
        if let Some(tomb) = self.tombs.get(now, hello.flow, Role::Acceptor)
            && self.began_with(&tomb.peer, hello)
        {
            let peer = tomb.peer.clone();
            return self.send_ack(hello.flow, &peer, from, local);
        }
        let tuple = (hello.acceptor, hello.connector);
        let Some(&token) = self.by_ends.get(&Ends::new(tuple.0, tuple.1)) else {
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
            // The connection has a name already.
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
        asking.waiting = true;
        let to = flow.ends.remote();
        // The application at the other end accepts when it likes. A flow that has lost its
        // connection cannot wait for ever, though.
        if !faulted {
            self.timers.clear(Owner::Flow(token, Timer::HelloDeadline));
        }
        let wait = self.spread(RETRY_MAX);
        self.timers
            .set(Owner::Flow(token, Timer::Hello), now + wait);
        self.hellos.answered(now, to, None);
        self.hello_over(now, token);
    }

    pub(super) fn on_hello_ack(&mut self, now: Time, parsed: &Parsed<'_>, ack: &HelloAck) {
        let Some(&token) = self.by_id.get(&(ack.flow, Role::Connector)) else {
            return self.drop_one();
        };
        let job = self.config.job_key.clone();
        let flow = self.flow(token);
        let Some(asking) = flow.hello.as_ref().filter(|_| flow.peer.is_none()) else {
            return; // a second copy
        };
        let inputs = KeyInputs {
            flow: ack.flow,
            random_c: asking.hello.random_c,
            random_s: ack.random_s,
            connector: asking.hello.endpoint,
            acceptor: ack.endpoint,
        };
        let key = FlowKey::derive(job.as_ref(), &inputs);
        if !key.verify(Role::Acceptor, Fresh::None, parsed) {
            return self.drop_one();
        }
        let peer = Peer {
            process: self.processes.share(Process {
                id: ack.endpoint,
                addrs: ack.addrs[..].into(),
                resume_port: ack.resume_port,
                control_port: ack.control_port,
            }),
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
            State::Negotiating => self.become_live(now, token),
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

    /// The host at `to` says that nobody listens there, or did not when the HELLO of the flow `refused` came. That goes
    /// for all that were sent before it, too, for of many in a row few are answered. What was sent after it may have
    /// come later than somebody who listens.
    pub(super) fn hello_refused(&mut self, now: Time, to: SocketAddr, refused: Option<FlowId>) {
        let sent = |id| {
            let token = self.by_id.get(&(id, Role::Connector))?;
            Some(self.flows.get(token)?.hello.as_ref()?.at)
        };
        let until = refused.map_or(Some(now), sent);
        let asked: Vec<FlowToken> = self
            .flows
            .values()
            .filter(|flow| {
                flow.state() == State::Negotiating
                    && flow.ends.remote() == to
                    && flow.hello.as_ref().is_some_and(|a| Some(a.at) <= until)
            })
            .map(|flow| flow.token)
            .collect();
        if refused.is_some() || !asked.is_empty() {
            self.refusals.note(now, to);
        }
        for token in asked {
            self.become_legacy(now, token, LegacyReason::NoControlSocket);
        }
    }

    /// A flow lost its transport before anybody knew whether it can be resumed.
    pub(super) fn fault_negotiating(&mut self, now: Time, token: FlowToken, cause: Cause) {
        match cause {
            Cause::Errno(_) => {
                let most = self.config.hello_timeout;
                let flow = self.flow(token);
                if flow.outage.is_some() {
                    return;
                }
                flow.bar = Bar::Shut;
                flow.outage = Some(Box::new(Outage::new(now, cause)));
                let wait = match &flow.hello {
                    None => most.min(LATE_HELLO),
                    Some(_) => most.min(LATE_ANSWER),
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
            }
            // Nobody can be asked whether it is genuine, and to withhold it until somebody can
            // would delay every short connection to a peer without SLIM.
            Cause::Eof { .. } => {
                let reason = LegacyReason::NoAnswer;
                self.timers.clear_flow(token);
                self.flow(token).go(State::Legacy);
                self.hello_over(now, token);
                self.emit(token, Event::Legacy { reason });
                self.reinstate_legacy(token);
            }
            Cause::Stall | Cause::PeerAsked => {}
        }
    }

    fn become_live(&mut self, now: Time, token: FlowToken) {
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let flow = self.flow(token);
        flow.hello = None;
        flow.go(State::Live);
        let outage = flow.outage.take();
        self.out.push(Action::Live { token });
        self.emit(token, Event::Live);
        self.announce_fin(token);
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
        self.emit(token, Event::Legacy { reason });
        match fault {
            Some(outage) => self.escalate_quietly(now, token, outage.verdict()),
            None => self.out.push(Action::Legacy {
                token,
                required_refused: required,
            }),
        }
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
                match fault {
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
