//! What happened: datagrams, refusals and timers, each handed to the part of the endpoint that it concerns.

use std::net::SocketAddr;

use super::Endpoint;
use super::negotiate::plain;
use super::timer::{Timer, TimerOwner};
use crate::ids::{FlowId, FlowToken, Role, Time};
use crate::wire::{self, Kind, Message};

/// Reports of the driver.
impl Endpoint {
    /// A datagram came from `from` to the socket bound to `local`.
    pub fn handle_datagram(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        // Other hosts get no answer at all, so they do not learn that SLIM is here. The witness, which shows that it has the job key, may be
        // on any host.
        let from_witness = matches!(
            wire::kind_of(data),
            Some(Kind::Lost | Kind::Fenced | Kind::Here)
        );
        if !from_witness && !self.may_know(from.ip()) {
            return self.drop_one();
        }
        let Ok(parsed) = wire::parse(data) else {
            return self.drop_one();
        };
        match &parsed.message {
            Message::Hello(hello) => self.on_hello(now, from, local, &parsed, hello),
            Message::HelloWait(wait) => self.on_hello_wait(now, &parsed, wait),
            Message::HelloAck(ack) => self.on_hello_ack(now, &parsed, ack),
            Message::HelloNak(nak) => self.on_hello_nak(now, nak),
            Message::Fin(fin) => self.on_fin(now, &parsed, fin),
            Message::Query(query) => self.on_query(now, from, local, &parsed, query),
            Message::Status(status) => self.on_status(now, &parsed, status),
            Message::Unknown(unknown) => self.on_unknown(now, &parsed, unknown),
            Message::Demote(demote) => self.on_demote(now, &parsed, demote),
            Message::Pair(pair) => self.on_pair(now, &parsed, pair),
            Message::Open(_) => self.on_open(now, from, local, data),
            Message::Seen(seen) => self.on_seen(now, &parsed, seen),
            Message::Offer(offer) => self.on_offer(now, from, local, &parsed, offer),
            Message::HelloDone(done) => self.on_hello_done(now, from, &parsed, done),
            Message::Fenced(fenced) => self.on_fenced(now, &parsed, fenced),
            Message::Lost(lost) => self.on_lost(now, from, &parsed, lost),
            Message::Accuse(accuse) => self.on_accuse(now, from, &parsed, accuse),
            Message::Here(here) => self.on_here(now, &parsed, here),
            Message::Challenge(_)
            | Message::Resume(_)
            | Message::ResumeOk(_)
            | Message::Confirm(_)
            | Message::Refuse(_)
            | Message::Relay(_)
            | Message::Where(_) => self.drop_one(),
        }
    }

    /// The host at `to` refused a datagram: no socket has that port (ICMP port unreachable). `quoted` is the part of the
    /// datagram that the ICMP message quotes: all of it, its beginning, or nothing. Anybody can send such a message, so it is
    /// believed only if it quotes the id of a flow about which a message went to `to`.
    pub fn handle_refused(&mut self, now: Time, to: SocketAddr, quoted: &[u8]) {
        let to = plain(to);
        match wire::quoted(quoted) {
            Some((Kind::Hello, id)) => self.hello_refused(now, to, id),
            Some((Kind::Open, id)) => self.open_refused(now, to, id),
            Some((_, id)) if self.was_told(to, id) => {
                self.query_refused(now, to);
                self.probe_refused(now, to);
                self.hold_refused(now, to);
            }
            Some((_, id)) => self.candidate_refused(now, to, id),
            None => self.drop_one(),
        }
    }

    /// Whether `to` is the control address of the peer of a flow with this id.
    fn was_told(&self, to: SocketAddr, id: FlowId) -> bool {
        let is_peer = |token: &FlowToken| {
            let flow = &self.flows[token];
            flow.peer.as_ref().is_some_and(|peer| {
                // The address of a process that has moved may be another host's by now.
                let first = !peer.process.moved && flow.ends.remote().ip() == to.ip();
                let ip = first || peer.process.addrs.contains(&to.ip());
                ip && peer.process.control_port == to.port()
            })
        };
        let roles = [Role::Connector, Role::Acceptor];
        let tokens = roles.iter().filter_map(|role| self.by_id.get(&(id, *role)));
        tokens.into_iter().any(is_peer)
    }

    /// The time that [`poll_timeout`](Endpoint::poll_timeout) returned has come.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(owner) = self.timers.pop(now) {
            match owner {
                TimerOwner::Conn(conn) => self.on_conn_timer(conn),
                TimerOwner::Peer(peer) => self.on_peer_timer(now, peer),
                TimerOwner::Probe(peer) => self.on_probe_timer(now, peer),
                TimerOwner::Reach(peer) => self.on_reach_timer(now, peer),
                TimerOwner::Offer(peer) => self.on_offer_timer(now, peer),
                TimerOwner::Failback(token) => self.on_failback_timer(now, token),
                TimerOwner::Outlooks => self.on_outlooks_timer(now),
                TimerOwner::Hold => self.on_hold_timer(now),
                TimerOwner::Silences => self.on_silences_timer(now),
                TimerOwner::Accusation(accused) => self.on_accusation_timer(now, accused),
                TimerOwner::Flow(token, timer) => self.on_timer(now, token, timer),
            }
        }
    }

    fn on_timer(&mut self, now: Time, token: FlowToken, timer: Timer) {
        if !self.flows.contains_key(&token) {
            return;
        }
        match timer {
            Timer::Hello if self.candidates.any(token) => {
                let hello = self.flows[&token].hello.is_some();
                self.ask_candidates(now, token);
                if hello {
                    self.hello_again(now, token);
                }
            }
            Timer::Hello => self.hello_again(now, token),
            Timer::HelloDeadline => self.on_hello_deadline(now, token),
            Timer::Window => self.on_window(now, token),
            Timer::Hung => self.on_hung(now, token),
            Timer::Stuck => self.on_stuck(now, token),
            Timer::Backoff => self.on_backoff(now, token),
            Timer::PeerSilent => self.on_peer_silent(now, token),
            Timer::Query => self.on_query_timer(now, token),
            Timer::Explanation => self.on_unexplained(now, token),
            Timer::Deadline => self.on_deadline(now, token),
        }
    }
}
