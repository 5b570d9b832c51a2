//! Probes: is the peer reachable again? `docs/PROTOCOL.md`, section "Attempts".
//!
//! If a connection was begun while the network dropped everything, it is established only when the kernel
//! repeats its SYN: up to a second, and later several seconds, after the network is back. Connecting
//! anew more often would not help: each connection costs a descriptor and a place in the listener's
//! queue, and on a path that is merely slow no connection would ever be established.
//!
//! So as soon as a connection hangs, QUERY is sent to the peer process every 15 ms, once for all
//! flows that hang. The *first* answer counts. If it answers not the first QUERY but a
//! later one, the earlier ones were lost, so the network was down and is back: all connections that
//! hang are made anew at once, to the address that has answered. If it answers the first QUERY, the
//! network works, and only connections that have waited far longer than that answer took are
//! made anew: their SYN was lost, or the listener's queue was full. A connection of another kind than TCP has its own path, which may
//! be the one that has failed, so TCP takes over after a short time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::Endpoint;
use super::resume::{Conn, Stage};
use super::timer::{Timer, TimerOwner};
use crate::auth::Fresh;
use crate::ids::{EndpointId, FlowToken, Nonce, Time};
use crate::transport::TransportKind;
use crate::wire::{Message, Query};

/// Interval between two QUERYs. It is at least [`PER_PEER`] times the number of probed peers, so that a
/// process with many of them sends at most a thousand QUERYs a second.
const EVERY: Duration = Duration::from_millis(15);
const PER_PEER: Duration = Duration::from_millis(1);
/// After this many QUERYs, about a minute and a half, the interval becomes [`SELDOM`].
const OFTEN: u32 = 6000;
const SELDOM: Duration = Duration::from_millis(250);
/// This many QUERYs without an answer mean that the network was down. A single one may get lost at any time.
const SILENCE: u32 = 2;
/// While the network works, a connection is replaced if it takes longer than this plus [`SLOW_TRIPS`] round trips.
const SLOW: Duration = Duration::from_millis(400);
/// The same for a kind that TCP can stand in for, since the peer has answered over IP; or the round trips, if they take longer. The flow comes
/// back when that kind works again.
const SLOW_OTHER: Duration = Duration::from_millis(30);
const SLOW_TRIPS: u32 = 4;

/// Peers that are being probed.
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
    /// The nonce of QUERY `n` is `base + n`.
    base: Nonce,
    begun: Time,
    sent: u32,
    /// Addresses that QUERYs were sent to.
    asked: BTreeSet<SocketAddr>,
    /// Flows that wait for the answer.
    hung: BTreeSet<FlowToken>,
}

impl PeerProbe {
    /// The number of the QUERY with this nonce.
    fn which(&self, nonce: Nonce) -> Option<u32> {
        nonce.after(self.base).filter(|n| *n < self.sent)
    }
}

impl Endpoint {
    /// The flow's connection hangs: probes the peer, for this flow as well.
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

    /// Sends the next QUERY, if a flow still waits for the answer.
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
            nonce: probe.base.plus(probe.sent),
        });
        let data = self.seal(token, Fresh::None, &message);
        let from = self.own_end(token, to);
        self.out.datagram(to, from, data);
        probe.asked.insert(to);
        probe.sent += 1;
        let every = if probe.sent < OFTEN { EVERY } else { SELDOM };
        let every = every.max(PER_PEER * peers);
        // A random interval, so that processes that lost the same peer together do not send QUERY together.
        let wait = every - Duration::from_micros(self.rng.up_to(every.as_micros() as u64 / 4));
        self.timers.set(TimerOwner::Probe(peer), now + wait);
        self.probes.open.insert(peer, probe);
    }

    /// Whether the flow's connection is not established yet, or the flow pauses before the next one. If a
    /// connection is established, the network works, and a process that is only busy must not be probed in addition.
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

    /// The peer has sent an answer, which the caller has verified. True if it answers a probe.
    pub(super) fn probe_answered(&mut self, now: Time, peer: EndpointId, nonce: Nonce) -> bool {
        let open = &self.probes.open;
        let Some(n) = open.get(&peer).and_then(|probe| probe.which(nonce)) else {
            return false;
        };
        self.probe_over(now, peer, n);
        true
    }

    /// A host has refused a QUERY. So the host can be reached, and a new connection will show
    /// whether the process is gone.
    pub(super) fn probe_refused(&mut self, now: Time, to: SocketAddr) {
        let open = self.probes.open.iter();
        let asked = open.filter(|(_, probe)| probe.asked.contains(&to));
        let peers: Vec<_> = asked.map(|(peer, probe)| (*peer, probe.sent - 1)).collect();
        for (peer, n) in peers {
            self.probe_over(now, peer, n);
        }
    }

    /// QUERY `n` was the first to be answered.
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

    /// The peer of a flow whose connection hangs has answered.
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
        let flow = &self.flows[&token];
        if flow.change.outgoing.is_none() {
            return;
        }
        let by_ip = matches!(
            flow.connects_by(),
            None | Some(TransportKind::TCP | TransportKind::RELAY)
        );
        let trips = trip * SLOW_TRIPS;
        let slow = if by_ip {
            SLOW + trips
        } else {
            SLOW_OTHER.max(trips)
        };
        let age = self.connecting_for(now, token);
        if age >= slow {
            self.connect_anew(now, token, via);
        } else {
            let hung = TimerOwner::Flow(token, Timer::Hung);
            self.timers.set(hung, now + (slow - age));
        }
    }
}
