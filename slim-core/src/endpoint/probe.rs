//! Is the peer there again? `docs/PROTOCOL.md`, section "Attempts".
//!
//! A connection that was asked for while the network swallowed everything is made when the kernel
//! sends its SYN again, up to a second, and later several seconds, after the network is back. To ask
//! for a new one more often would be no help: each costs a descriptor and a place in a listener's
//! queue, and a path that is merely slow would never get one through.
//!
//! So as soon as a connection hangs, the peer process is asked by QUERY every 15 ms, once for all
//! flows that hang. It is the *first* answer that matters. If it answers not the first question but a
//! later one, those before it were lost, so the network was away and is back: all connections that
//! hang are made anew at once, to the address that has answered. If it answers the first one, the
//! network is well, and only connections that have been waited for far longer than that answer are
//! made anew: their SYN was lost, or the listener's queue was full.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::Endpoint;
use super::resume::{Conn, Stage};
use super::timer::{Timer, TimerOwner};
use crate::auth::Fresh;
use crate::ids::{EndpointId, FlowToken, Nonce, Time};
use crate::wire::{Message, Query};

/// From one question to the next. Every peer that is being asked makes it a little longer, so that a
/// process with many of them asks at most a thousand questions a second.
const EVERY: Duration = Duration::from_millis(15);
const PER_PEER: Duration = Duration::from_millis(1);
/// After so many questions, a minute and a half, they become rare.
const OFTEN: u32 = 6000;
const SELDOM: Duration = Duration::from_millis(250);
/// So many questions without an answer are a silence. One alone may get lost anywhere.
const SILENCE: u32 = 2;
/// While the network is well, a connection hangs if it takes as much longer than a round trip.
const SLOW: Duration = Duration::from_millis(400);
const SLOW_TRIPS: u32 = 4;

/// Peers that are being asked.
#[derive(Default)]
pub(super) struct Probes {
    open: BTreeMap<EndpointId, PeerProbe>,
}

impl Probes {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }
}

struct PeerProbe {
    /// The nonce of question `n` is this one with `n` added to it.
    base: Nonce,
    begun: Time,
    sent: u32,
    /// Where questions went.
    asked: BTreeSet<SocketAddr>,
    /// Flows that want to know.
    hung: BTreeSet<FlowToken>,
}

fn nth(base: Nonce, n: u32) -> Nonce {
    Nonce(
        u128::from_be_bytes(base.0)
            .wrapping_add(n.into())
            .to_be_bytes(),
    )
}

impl PeerProbe {
    /// Which question has this nonce.
    fn which(&self, nonce: Nonce) -> Option<u32> {
        let [nonce, base] = [nonce, self.base].map(|nonce| u128::from_be_bytes(nonce.0));
        let n = u32::try_from(nonce.wrapping_sub(base)).ok()?;
        (n < self.sent).then_some(n)
    }
}

impl Endpoint {
    /// The flow gets no connection: as soon as its peer answers, it wants to know.
    pub(super) fn probe(&mut self, now: Time, token: FlowToken) {
        let Some(peer) = self.flows[&token].peer_id() else {
            return;
        };
        if let Some(probe) = self.probes.open.get_mut(&peer) {
            probe.hung.insert(token);
            return;
        }
        let probe = PeerProbe {
            base: self.rng.nonce(),
            begun: now,
            sent: 0,
            asked: BTreeSet::new(),
            hung: BTreeSet::from([token]),
        };
        self.probes.open.insert(peer, probe);
        self.on_probe_timer(now, peer);
    }

    /// Asks again, if anybody still wants to know.
    pub(super) fn on_probe_timer(&mut self, now: Time, peer: EndpointId) {
        let peers = self.probes.open.len() as u32;
        let Some(mut probe) = self.probes.open.remove(&peer) else {
            return;
        };
        probe.hung.retain(|token| self.is_hung(*token));
        let Some(&token) = probe.hung.first() else {
            return;
        };
        let to = self.turn(token, probe.sent);
        let message = Message::Query(Query {
            flow: self.flows[&token].name(),
            nonce: nth(probe.base, probe.sent),
        });
        let data = self.seal(token, Fresh::None, &message);
        let from = self.own_end(token, to);
        self.out.datagram(to, from, data);
        probe.asked.insert(to);
        probe.sent += 1;
        let every = if probe.sent < OFTEN { EVERY } else { SELDOM };
        let every = every.max(PER_PEER * peers);
        // Processes that lost their peer together do not ask it together.
        let wait = every - Duration::from_micros(self.rng.up_to(every.as_micros() as u64 / 4));
        self.timers.set(TimerOwner::Probe(peer), now + wait);
        self.probes.open.insert(peer, probe);
    }

    /// Whether the flow has asked for a connection, or waits until it may again, and nothing comes. Where
    /// one stands the network is well; a process that is busy is not to be asked in addition.
    fn is_hung(&self, token: FlowToken) -> bool {
        let Some(flow) = self.flows.get(&token) else {
            return false;
        };
        match flow.change.outgoing {
            Some(conn) => matches!(
                self.conns.get(&conn),
                Some(Conn::Out {
                    stage: Stage::Connecting,
                    ..
                })
            ),
            None => self
                .timers
                .get(TimerOwner::Flow(token, Timer::Backoff))
                .is_some(),
        }
    }

    /// Somebody has answered, whom only the peer's answers get as far as this. True if it was one of
    /// our questions.
    pub(super) fn probe_answered(&mut self, now: Time, peer: EndpointId, nonce: Nonce) -> bool {
        let open = &self.probes.open;
        let Some(n) = open.get(&peer).and_then(|probe| probe.which(nonce)) else {
            return false;
        };
        self.probe_over(now, peer, n);
        true
    }

    /// A host says that nobody listens there. So it can be reached, and a connection will find out
    /// what that means.
    pub(super) fn probe_refused(&mut self, now: Time, to: SocketAddr) {
        let open = self.probes.open.iter();
        let asked = open.filter(|(_, probe)| probe.asked.contains(&to));
        let peers: Vec<_> = asked.map(|(peer, probe)| (*peer, probe.sent - 1)).collect();
        for (peer, n) in peers {
            self.probe_over(now, peer, n);
        }
    }

    /// Question `n` was the first that was answered.
    fn probe_over(&mut self, now: Time, peer: EndpointId, n: u32) {
        let Some(probe) = self.probes.open.remove(&peer) else {
            return;
        };
        self.timers.clear(TimerOwner::Probe(peer));
        let silence = n >= SILENCE;
        let trip = now.since(probe.begun);
        for token in probe.hung {
            if !self.is_hung(token) {
                continue;
            }
            let via = self.turn(token, n).ip();
            self.peer_heard(now, token, silence, trip, via);
        }
    }

    /// The peer of a flow that gets no connection has answered.
    fn peer_heard(
        &mut self,
        now: Time,
        token: FlowToken,
        silence: bool,
        trip: Duration,
        via: IpAddr,
    ) {
        if silence {
            return self.connect_anew(now, token, via);
        }
        if self.flows[&token].change.outgoing.is_none() {
            return;
        }
        let slow = SLOW + trip * SLOW_TRIPS;
        let age = self.connecting_for(now, token);
        if age >= slow {
            self.connect_anew(now, token, via);
        } else {
            let hung = TimerOwner::Flow(token, Timer::Hung);
            self.timers.set(hung, now + (slow - age));
        }
    }
}
