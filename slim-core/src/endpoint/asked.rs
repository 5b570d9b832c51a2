//! The acceptor's side of negotiation: answers to HELLO, and HELLOs that wait until the application accepts their connection.
//! `docs/PROTOCOL.md`, section "Negotiation".

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::close::Tomb;
use super::ends::Ends;
use super::flow::State;
use super::negotiate::{LATE_ANSWER, LATE_HELLO};
use super::pending::{PendingHello, Request, WaitingRequest};
use super::processes::PeerProcess;
use super::record::Peer;
use super::timer::{Timer, TimerOwner};
use super::{Endpoint, plain};
use crate::addr::on_link_of;
use crate::auth::{FlowKey, Fresh, KeyInputs, answer_random, seal_with_job, verify_with_job};
use crate::ids::{Cause, FlowId, FlowToken, Role, Time};
use crate::wire::{
    AddrList, FlowStatus, Hello, HelloAck, HelloDone, HelloNak, HelloWait, Message, NakReason,
    Parsed, feature,
};

/// Maximum number of hosts in each table of [`Askers`].
const HOSTS: usize = 1024;
/// How long a host is remembered as one that sends no HELLO.
const SILENT_AGE: Duration = Duration::from_secs(60);

/// Hosts that have connected to us, by whether they send HELLO.
#[derive(Default)]
pub(super) struct Askers {
    /// When a host last sent HELLO: it has SLIM.
    heard: Hosts,
    /// When the first connection came from a host that has sent no HELLO since.
    unheard: Hosts,
    /// When a host last sent no HELLO in time: it probably has no SLIM.
    silent: Hosts,
}

impl Askers {
    /// A HELLO or an OPEN has come from the host.
    pub(super) fn note(&mut self, now: Time, ip: IpAddr, age: Duration) {
        self.silent.0.remove(&ip);
        self.unheard.0.remove(&ip);
        self.heard.note(now, ip, age);
    }

    /// A connection has come from the host, without a HELLO so far.
    pub(super) fn note_connection(&mut self, now: Time, ip: IpAddr, age: Duration) {
        match self.unheard.0.get(&ip) {
            _ if self.heard.within(now, ip, age) => {}
            Some(first) if now.since(*first) < LATE_HELLO => {}
            Some(first) if now.since(*first) < SILENT_AGE => self.note_silent(now, ip),
            _ => self.unheard.note(now, ip, SILENT_AGE),
        }
    }

    /// No HELLO has come in time for a connection from the host.
    pub(super) fn note_silent(&mut self, now: Time, ip: IpAddr) {
        self.silent.note(now, ip, SILENT_AGE);
    }

    pub(super) fn expire(&mut self, now: Time, age: Duration) {
        self.heard.expire(now, age);
        self.unheard.expire(now, SILENT_AGE);
        self.silent.expire(now, SILENT_AGE);
    }

    pub(super) fn len(&self) -> usize {
        self.heard.0.len() + self.unheard.0.len() + self.silent.0.len()
    }

    pub(super) fn within(&self, now: Time, ip: IpAddr, age: Duration) -> bool {
        self.heard.within(now, ip, age)
    }

    /// Whether the host is remembered as one that sends no HELLO. If that table is full, every host counts as silent.
    pub(super) fn is_silent(&self, now: Time, ip: IpAddr) -> bool {
        self.silent.within(now, ip, SILENT_AGE) || self.silent.0.len() >= HOSTS
    }
}

/// The time of an event for each host.
#[derive(Default)]
struct Hosts(HashMap<IpAddr, Time>);

impl Hosts {
    fn note(&mut self, now: Time, ip: IpAddr, age: Duration) {
        if self.0.len() >= HOSTS && !self.0.contains_key(&ip) {
            self.0.retain(|_, at| now.since(*at) < age);
        }
        if self.0.len() < HOSTS || self.0.contains_key(&ip) {
            self.0.insert(ip, now);
        }
    }

    fn expire(&mut self, now: Time, age: Duration) {
        self.0.retain(|_, at| now.since(*at) < age);
        self.0.shrink_to_fit();
    }

    fn within(&self, now: Time, ip: IpAddr, age: Duration) -> bool {
        self.0.get(&ip).is_some_and(|at| now.since(*at) < age)
    }
}

impl Endpoint {
    /// Takes a HELLO that waits for the connection from `remote` to `local`; `None` if there is none left. For
    /// drivers of processes that share a listener, when another process has accepted the connection.
    pub fn take_pending(
        &mut self,
        now: Time,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<PendingHello> {
        let tuple = (plain(local), plain(remote));
        while let Some(waiting) = self.pending.take(now, tuple) {
            // An OPEN is under a pair key of this process, so other processes cannot use it.
            if let Request::Hello(hello) = waiting.request {
                return Some(PendingHello {
                    flow: hello.flow,
                    from: waiting.from,
                    local: waiting.local,
                    data: seal_with_job(self.config.job_key.as_ref(), &Message::Hello(*hello)),
                });
            }
        }
        None
    }

    /// The listeners at local addresses for which `fits` holds are closed: answers the waiting HELLOs
    /// by HELLO_NAK.
    pub fn refuse_pending(&mut self, fits: impl Fn(SocketAddr) -> bool) {
        for waiting in self.pending.take_all(fits) {
            // OPEN is not answered. Its connector sends QUERY soon, and gets UNKNOWN.
            let Request::Hello(hello) = waiting.request else {
                continue;
            };
            let nak = Message::HelloNak(HelloNak {
                flow: hello.flow,
                reason: NakReason::Policy,
            });
            let data = seal_with_job(self.config.job_key.as_ref(), &nak);
            self.out.datagram(waiting.from, Some(waiting.local), data);
        }
    }

    /// Acceptor: a HELLO matches our flow. Its sender becomes a candidate, and must show that HELLO_ACK has reached it.
    pub(super) fn accept_hello(
        &mut self,
        now: Time,
        token: FlowToken,
        hello: &Hello,
        from: SocketAddr,
        local: SocketAddr,
    ) {
        // If two connections have the same flow id, the first one keeps it.
        if self.by_id.contains_key(&(hello.flow, Role::Acceptor)) {
            return self.drop_one();
        }
        let peer = self.asker(hello);
        self.send_ack(hello.flow, &peer, from, local);
        self.add_candidate(now, token, hello.flow, peer);
        self.announce_fin_to(token, Some(hello.flow));
        if let Some(outage) = &self.flows[&token].outage {
            let limit = match outage.cause {
                Cause::Eof { .. } => now + self.config.hello_timeout.min(LATE_ANSWER),
                // As in `fault_negotiating`.
                _ => outage.since + self.config.hello_timeout,
            };
            let deadline = TimerOwner::Flow(token, Timer::HelloDeadline);
            self.timers.set(deadline, limit);
        }
    }

    /// Acceptor: the peer as described by this HELLO, with the flow key.
    fn asker(&mut self, hello: &Hello) -> Peer {
        let random_s = answer_random(&self.secret, hello);
        let key = self.key_of(hello, random_s);
        let process = self.processes.share(PeerProcess {
            id: hello.endpoint,
            addrs: hello.addrs[..].into(),
            resume_port: hello.resume_port,
            control_port: hello.control_port,
            features: hello.features & feature::ALL,
            moved: false,
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

    /// Whether the flow began with this HELLO, which is late or repeated: no other HELLO gives the flow key.
    fn began_with(&self, peer: &Peer, hello: &Hello) -> bool {
        self.key_of(hello, peer.random_s) == peer.key
    }

    pub(super) fn send_ack(&mut self, flow: FlowId, peer: &Peer, to: SocketAddr, from: SocketAddr) {
        let ack = Message::HelloAck(HelloAck {
            flow,
            endpoint: self.id,
            random_s: peer.random_s,
            features: self.features,
            resume_port: self.own.resume_port,
            control_port: self.own.control_port,
            addrs: AddrList::new(self.own.addrs.iter().copied()),
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
        // A host may only name its own connections.
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
        if self.is_lost(hello.endpoint) {
            return self.tell_lost(hello.endpoint);
        }
        if self.is_fenced() {
            let data = seal_with_job(job.as_ref(), &nak(NakReason::Policy));
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
                    // An earlier FIN may have arrived before HELLO_ACK, when the peer could not verify it.
                    self.announce_fin_to(token, Some(hello.flow));
                }
                None => self.drop_one(),
            };
        }
        if let Some(tomb) = self.tombs.get(now, &(hello.flow, Role::Acceptor))
            && self.began_with(&tomb.peer, hello)
        {
            let tomb = tomb.clone();
            self.send_ack(hello.flow, &tomb.peer, from, local);
            let name = (hello.flow, Role::Acceptor);
            return self.announce_final_status(name, &tomb, hello.connector.ip());
        }
        if self.late.refuses(now, hello.flow) {
            let data = seal_with_job(job.as_ref(), &nak(NakReason::Policy));
            return self.out.datagram(from, Some(local), data);
        }
        let tuple = (hello.acceptor, hello.connector);
        let ends = Ends::new(tuple.0, tuple.1);
        let known = self.by_ends.get(&ends).copied();
        let ended = match known.map(|token| &self.flows[&token]) {
            None => self.too_late(now, &ends, hello.flow),
            Some(flow) if flow.state() == State::Legacy => Some(flow.final_unasked()),
            Some(_) => None,
        };
        match ended {
            None => {}
            Some(status @ FlowStatus::Closed(_)) => {
                let peer = self.asker(hello);
                self.send_ack(hello.flow, &peer, from, local);
                let (name, tomb) = ((hello.flow, Role::Acceptor), Tomb { peer, status });
                self.announce_final_status(name, &tomb, hello.connector.ip());
                return self.tombs.put(now, name, tomb);
            }
            // Too late: bytes are not counted any more.
            Some(_) => {
                let data = seal_with_job(job.as_ref(), &nak(NakReason::Policy));
                return self.out.datagram(from, Some(local), data);
            }
        }
        let Some(token) = known else {
            let waiting = WaitingRequest {
                at: now,
                request: Request::Hello(Box::new(*hello)),
                from,
                local,
            };
            self.pending.put(now, tuple, waiting);
            let wait = Message::HelloWait(HelloWait { flow: hello.flow });
            let data = seal_with_job(job.as_ref(), &wait);
            return self.out.datagram(from, Some(local), data);
        };
        let flow = self.flow(token);
        match flow.state() {
            State::Negotiating => self.accept_hello(now, token, hello, from, local),
            // Too late: the application has reset the flow, or was told that it is lost.
            _ if flow.peer.is_none() => {
                let data = seal_with_job(job.as_ref(), &nak(NakReason::Policy));
                self.out.datagram(from, Some(local), data);
            }
            // The peer is known already.
            _ => self.drop_one(),
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
        // Other candidates may have displaced this one. HELLO_DONE repeats HELLO, so the candidate can be made again.
        let ends = Ends::new(
            on_link_of(hello.acceptor, from),
            on_link_of(hello.connector, from),
        );
        let token = self.by_ends.get(&ends).copied();
        let negotiating = token.filter(|token| {
            self.flows[token].state() == State::Negotiating
                && self.candidates.were_more(*token)
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
}
