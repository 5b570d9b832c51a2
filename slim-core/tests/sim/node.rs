//! One process: an endpoint and its driver.

use std::collections::BTreeMap;
use std::time::Duration;

use slim_core::endpoint::{Action, Endpoint, State, Tables};
use slim_core::event::{Event, LegacyReason, Trouble};
use slim_core::{Cause, ConnId, FlowToken, Time, wire};

use crate::event::Ev;
use crate::front::{Front, Pump};
use crate::kinds::FABRIC;
use crate::net::MAILBOX;
use crate::tcp::Read;
use crate::world::{MS, Mutation, World};

/// The owner of one side of a TCP connection.
#[derive(Clone, Copy, Debug)]
pub enum Owner {
    Nobody,
    Conn(ConnId),
    Flow(FlowToken),
}

/// A connection that is not a transport.
#[derive(Default)]
struct Link {
    tcp: Option<(usize, usize)>,
    buffer: Vec<u8>,
    messages: u32,
}

/// The clock of a process. No two clocks start at the same value, or run equally fast.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    pub offset: u64,
    /// How far it advances in 1000 units of the world's time.
    pub rate: u64,
}

impl Clock {
    fn at(self, world: u64) -> Time {
        Time(self.offset + world * self.rate / 1000)
    }

    /// The world's time at which the clock shows `time` or more.
    fn shows(self, time: Time) -> u64 {
        (time.0.saturating_sub(self.offset) * 1000).div_ceil(self.rate)
    }
}

pub struct Node {
    pub alive: bool,
    /// The process that had the flows has been killed. If `alive`, another one has its ports.
    pub crashed: bool,
    pub clock: Clock,
    pub endpoint: Endpoint,
    pub fronts: BTreeMap<FlowToken, Front>,
    links: BTreeMap<ConnId, Link>,
    accepted: u64,
    pub armed: Option<u64>,
    /// Flows that need no session any more. The driver drops them when the actions are carried out.
    over: Vec<FlowToken>,
}

impl Node {
    pub fn new(endpoint: Endpoint, clock: Clock) -> Node {
        Node {
            alive: true,
            crashed: false,
            clock,
            endpoint,
            fronts: BTreeMap::new(),
            links: BTreeMap::new(),
            accepted: 0,
            armed: None,
            over: Vec::new(),
        }
    }

    /// Another process takes the place of one that was killed, and knows nothing of its flows.
    pub fn replace(&mut self, endpoint: Endpoint) {
        self.alive = true;
        self.endpoint = endpoint;
        self.links.clear();
        self.armed = None;
        self.fronts.values_mut().for_each(|front| front.gone = true);
    }

    pub fn accept(&mut self, tcp: usize, side: usize) -> ConnId {
        self.accepted += 1;
        let conn = ConnId::incoming(self.accepted);
        self.links.entry(conn).or_default().tcp = Some((tcp, side));
        conn
    }

    /// Whether a connection that was asked for is still wanted.
    pub fn wants(&self, conn: ConnId) -> bool {
        self.links.get(&conn).is_some_and(|link| link.tcp.is_none())
    }

    pub fn connected(&mut self, conn: ConnId, tcp: usize, side: usize) {
        self.links.entry(conn).or_default().tcp = Some((tcp, side));
    }

    pub fn forget(&mut self, conn: ConnId) {
        self.links.remove(&conn);
    }

    /// Checks that the endpoint keeps nothing of flows when all are over and some minutes have passed.
    pub fn forgets(&mut self, now: Time, held: Duration) -> Result<(), String> {
        let endpoint = &mut self.endpoint;
        self.fronts.values_mut().for_each(|f| f.opened = None);
        self.fronts
            .keys()
            .for_each(|token| endpoint.gone(now, *token));
        let tables = endpoint.tables();
        if tables.flows > 0 || tables.names > 0 {
            return Err(format!("flows that are over are kept: {tables:?}"));
        }
        let mut late = now;
        for minute in 1..=5 {
            let end = now + held + Duration::from_secs(60 * minute);
            while let Some(at) = endpoint.poll_timeout().filter(|at| *at <= end) {
                late = late.max(at);
                endpoint.handle_timeout(late);
            }
            endpoint.tidy(end);
        }
        // Its last actions do not matter any more.
        while endpoint.poll_action().is_some() {}
        match endpoint.tables() {
            tables if tables == Tables::default() => Ok(()),
            tables => Err(format!("left of flows that are over: {tables:?}")),
        }
    }
}

impl World {
    /// The time on the clock of the process `node`.
    pub fn clock(&self, node: usize) -> Time {
        self.nodes[node].clock.at(self.now)
    }

    /// Carries out what the endpoint of a process asks for, until it asks for nothing more.
    pub fn drive(&mut self, node: usize) -> Result<(), String> {
        if !self.nodes[node].alive {
            return Ok(());
        }
        loop {
            while let Some(action) = self.nodes[node].endpoint.poll_action() {
                if self.trace {
                    self.tell_action(node, &action);
                }
                self.act(node, action)?;
            }
            let Some(token) = self.nodes[node].over.pop() else {
                break;
            };
            let now = self.clock(node);
            self.nodes[node].endpoint.gone(now, token);
        }
        while let Some((token, _, event)) = self.nodes[node].endpoint.poll_event() {
            if self.trace {
                println!("{:>10} {node}    {event:?}", self.now);
            }
            match event {
                Event::Resume { .. } => {
                    self.stats.resumes += 1;
                    self.front(node, token).trying = false;
                }
                Event::Suspend {
                    cause: Trouble::Move,
                } => self.stats.moves += 1,
                Event::Escalate { .. } => self.stats.escalations += 1,
                Event::Hold => {
                    self.stats.held += 1;
                    self.front(node, token).trying = false;
                }
                Event::Reinstate => self.stats.reinstated += 1,
                Event::Legacy { reason } => {
                    self.stats.legacy += 1;
                    // A flow need not be agreed on if a stream ends first.
                    let fronts = self.nodes.iter().map(|node| &node.fronts[&token]);
                    let ended = fronts
                        .into_iter()
                        .any(|f| f.barred || f.over || f.fin.is_some());
                    let front = self.front(node, token);
                    front.legacy = true;
                    front.made_plain = !ended;
                    if front.live && reason == LegacyReason::NoAnswer {
                        self.believed(node, token)?;
                    }
                }
                _ => {}
            }
        }
        let next = self.nodes[node].endpoint.poll_timeout();
        if let Some(at) = next.map(|time| self.nodes[node].clock.shows(time))
            && self.nodes[node].armed.is_none_or(|armed| at < armed)
        {
            self.nodes[node].armed = Some(at);
            self.at(at, Ev::Timer { node });
        }
        Ok(())
    }

    fn tell_action(&self, node: usize, action: &Action) {
        let now = self.now;
        match action {
            Action::Send { conn, data } => {
                let kind = wire::parse(data).map(|parsed| parsed.message.kind());
                println!("{now:>10} {node} -> {conn:?} {kind:?}");
            }
            Action::Datagram { data, .. } => {
                let kind = wire::parse(data).map(|parsed| parsed.message.kind());
                println!("{now:>10} {node} -> {kind:?}");
            }
            other => println!("{now:>10} {node} -> {other:?}"),
        }
    }

    fn act(&mut self, node: usize, action: Action) -> Result<(), String> {
        let now = self.clock(node);
        match action {
            Action::Mailbox { ip } => self.nodes[node].endpoint.set_mailbox(ip, MAILBOX),
            Action::Datagram { to, from, data } => self.send_datagram(node, from, to, data),
            Action::Connect {
                conn, token, path, ..
            } => {
                self.front(node, token).trying = true;
                self.nodes[node].links.insert(conn, Link::default());
                self.send_syn(node, conn, path.to);
            }
            Action::Send { conn, data } => self.send(node, conn, &data),
            Action::Flush { conn } => {
                if self.mutation != Some(Mutation::DropAwaiting) {
                    let before = self.nodes[node].links.get(&conn).map(|link| link.messages);
                    self.read_message(node, conn);
                    let after = self.nodes[node].links.get(&conn).map(|link| link.messages);
                    self.stats.confirms_flushed += u64::from(before != after && after.is_some());
                }
                self.nodes[node].endpoint.handle_flushed(now, conn);
            }
            Action::Close { conn } => {
                let link = self.nodes[node].links.remove(&conn);
                if let Some((tcp, side)) = link.and_then(|link| link.tcp) {
                    self.close_tcp(tcp, side);
                }
            }
            Action::Live { token } => self.front(node, token).live = true,
            Action::Legacy { token, .. } => {
                self.front(node, token).legacy = true;
                self.nodes[node].over.push(token);
            }
            Action::Suspend { token } => {
                let front = self.front(node, token);
                front.barred = true;
                front.pump = None;
                self.later(0, 3 * MS, Ev::Suspended { node, token });
            }
            Action::Verify { token } => {
                let (from, to) = (900 * MS, 1300 * MS);
                self.later(from, to, Ev::Verified { node, token });
            }
            Action::Drain { token } => {
                self.front(node, token).pump = None;
                self.later(0, 2 * MS, Ev::Drain { node, token });
            }
            Action::Install {
                token,
                conn,
                peer_received,
                peer_sent,
                peer_final,
            } => {
                self.install(node, token, conn, (peer_received, peer_sent, peer_final))?;
            }
            Action::Reinstate { token } => {
                let legacy = self.nodes[node].endpoint.state(token) == Some(State::Legacy);
                let front = self.front(node, token);
                front.barred = false;
                front.legacy = legacy;
                let drained = front.tcp.is_none();
                if legacy {
                    self.nodes[node].over.push(token);
                }
                if drained {
                    return Err(format!(
                        "side {node}: {token:?} reinstated, but it was drained"
                    ));
                }
            }
            Action::Look { token } => self.look_at_held(node, token),
            // There is no witness here: see `verdicts.rs`.
            Action::Fence { reason, .. } => {
                return Err(format!("side {node} is fenced: {reason:?}"));
            }
            Action::PeerFinal { token, seq } => self.front(node, token).peer_final = Some(seq),
            Action::Escalate { token, verdict } => {
                self.nodes[node].over.push(token);
                // The bytes that the old transport still holds also go to the application.
                self.drain_to_stash(node, token);
                let front = self.front(node, token);
                front.verdict = Some(verdict);
                front.barred = false;
                front.pump = None;
                if let Some((tcp, side)) = front.tcp.take() {
                    self.close_tcp(tcp, side);
                }
            }
        }
        Ok(())
    }

    pub fn front(&mut self, node: usize, token: FlowToken) -> &mut Front {
        self.nodes[node]
            .fronts
            .get_mut(&token)
            .expect("both sides know every flow")
    }

    fn send(&mut self, node: usize, conn: ConnId, data: &[u8]) {
        let Some((tcp, side)) = self.nodes[node].links.get(&conn).and_then(|link| link.tcp) else {
            return;
        };
        // A control message always fits into a fresh connection. A dead connection is noticed by reading.
        let _ = self.tcps[tcp].write(side, data);
        self.transmit(tcp, side);
        self.snipe(tcp);
    }

    /// A process looks at one of its connections.
    pub fn look(&mut self, conn: usize, side: usize) -> Result<(), String> {
        if !self.nodes[side].alive {
            return Ok(());
        }
        match self.owners[conn][side] {
            Owner::Nobody => {}
            Owner::Conn(name) => self.read_message(side, name),
            Owner::Flow(token) => {
                self.pump(side, token)?;
                // A call that sleeps in the kernel is woken by an error.
                let open = self.nodes[side].endpoint.state(token).is_some();
                let barred = self.front(side, token).barred;
                if open && !barred && self.tcps[conn].sides[side].dead.is_some() {
                    self.read(side, token)?;
                }
            }
        }
        Ok(())
    }

    /// Reads one message, if all of it has arrived.
    pub fn read_message(&mut self, node: usize, conn: ConnId) {
        let now = self.clock(node);
        let Some(link) = self.nodes[node].links.get_mut(&conn) else {
            return;
        };
        let Some((tcp, side)) = link.tcp.filter(|_| link.messages < 2) else {
            return;
        };
        loop {
            let whole = match link.buffer.first_chunk() {
                None => wire::HEADER_LEN,
                Some(header) => wire::message_len(header).expect("no garbage is injected here"),
            };
            if link.buffer.len() == whole && whole > wire::HEADER_LEN {
                link.messages += 1;
                let message = std::mem::take(&mut link.buffer);
                self.nodes[node]
                    .endpoint
                    .handle_message(now, conn, &message);
                return self.poke(tcp, side);
            }
            let errno = match self.tcps[tcp].read(side, whole - link.buffer.len()) {
                Read::Bytes(bytes) => {
                    link.buffer.extend_from_slice(&bytes);
                    continue;
                }
                Read::Nothing => return,
                Read::End => 0,
                Read::Error(errno) => errno,
            };
            self.nodes[node].links.remove(&conn);
            self.close_tcp(tcp, side);
            return self.nodes[node].endpoint.handle_conn_lost(now, conn, errno);
        }
    }

    pub fn suspended(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        if self.nodes[node].crashed {
            return Ok(());
        }
        // A call that was inside when the flow was suspended returns first.
        if self.dice.chance(50) && !self.front(node, token).over {
            self.read(node, token)?;
        }
        self.drain_early(node, token);
        let now = self.clock(node);
        self.nodes[node].endpoint.handle_suspended(now, token);
        Ok(())
    }

    /// See [`Mutation::DrainEarly`].
    fn drain_early(&mut self, node: usize, token: FlowToken) {
        if self.mutation == Some(Mutation::DrainEarly) {
            self.drain_to_stash(node, token);
            let tcp = self.front(node, token).tcp.take();
            self.later(0, 300, Ev::Drained { node, token, tcp });
        }
    }

    /// See [`Mutation::CloseWell`].
    fn is_closed_unread(&self, node: usize, token: FlowToken) -> bool {
        let tcp = self.nodes[node].fronts[&token].tcp;
        let well = |(tcp, side): (usize, usize)| self.tcps[tcp].sides[side].dead.is_none();
        self.mutation == Some(Mutation::CloseWell) && tcp.is_some_and(well)
    }

    pub fn drain_to_stash(&mut self, node: usize, token: FlowToken) {
        let front = self.nodes[node].fronts.get_mut(&token).expect("known");
        let Some((tcp, side)) = front.tcp else {
            return;
        };
        while let Read::Bytes(bytes) = self.tcps[tcp].read(side, usize::MAX) {
            front.received += bytes.len() as u64;
            front.stash.push(bytes).unwrap();
        }
    }

    /// Checks an end of stream that was believed without an answer from the process that is said to have ended it.
    fn believed(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        self.stats.believed += 1;
        let received = self.front(node, token).received;
        let other = &self.nodes[1 - node];
        let (sent, fin) = (other.fronts[&token].sent, other.fronts[&token].fin);
        if !other.crashed && (fin.is_none() || sent != received) {
            return Err(format!(
                "side {node}: {token:?} is believed to end, and ends at {received}; the peer has sent {sent} and {fin:?}"
            ));
        }
        Ok(())
    }

    /// Handles the answer of the kernel at the other end of the connection.
    pub fn verified(&mut self, node: usize, token: FlowToken) {
        let Some((tcp, side)) = self.front(node, token).tcp else {
            return;
        };
        let path = self.tcps[tcp].path;
        let passes = self.passes(path, node) && self.passes(path, 1 - node);
        let passes = passes && self.leads_there(tcp);
        // Only a TCP transport can be asked, as the contract of `Verify` says.
        let ended = passes && path != FABRIC && self.tcps[tcp].looks_ended(side);
        let now = self.clock(node);
        self.nodes[node].endpoint.handle_verified(now, token, ended);
    }

    pub fn drain(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        if self.nodes[node].crashed {
            return Ok(());
        }
        if !self.is_closed_unread(node, token) {
            self.drain_to_stash(node, token);
        }
        let tcp = self.front(node, token).tcp.take();
        // Bytes may still arrive between the last read and the closing.
        self.later(0, 500, Ev::Drained { node, token, tcp });
        Ok(())
    }

    pub fn drained(&mut self, node: usize, token: FlowToken, tcp: Option<(usize, usize)>) {
        if self.nodes[node].crashed {
            return;
        }
        if let Some((tcp, side)) = tcp {
            self.close_tcp(tcp, side);
        }
        let front = self.front(node, token);
        let (received, sent) = (front.received, front.sent);
        let now = self.clock(node);
        self.nodes[node]
            .endpoint
            .handle_drained(now, token, received, sent);
    }

    fn install(
        &mut self,
        node: usize,
        token: FlowToken,
        conn: ConnId,
        (peer_received, peer_sent, peer_final): (u64, u64, Option<u64>),
    ) -> Result<(), String> {
        let link = self.nodes[node].links.remove(&conn);
        let Some(place) = link.and_then(|link| link.tcp) else {
            // The connection broke after CONFIRM had been read from it.
            return Err(format!("side {node}: {conn:?} is installed but gone"));
        };
        self.owners[place.0][place.1] = Owner::Flow(token);
        let written = self.tcps[place.0].written(place.1) as u64;
        self.moved(node, token, self.tcps[place.0].path);
        let front = self.front(node, token);
        if front.tcp.is_some() {
            return Err(format!(
                "side {node}: {token:?} has a transport that was not drained"
            ));
        }
        if peer_received > front.sent || peer_sent < front.received {
            return Err(format!("side {node}: out of step"));
        }
        if let Err(lost) = front.replay.chunk_at(peer_received) {
            return Err(format!("side {node}: the peer lacks bytes: {lost}"));
        }
        front.replay.trim(peer_received);
        front.tcp = Some(place);
        front.base = (peer_received, written);
        front.peer_final = peer_final.or(front.peer_final);
        front.pump = Some(Pump {
            at: peer_received,
            missing: peer_sent - front.received,
        });
        self.poke(place.0, place.1);
        Ok(())
    }

    /// Goes on with the replay in both directions, if one is under way.
    pub fn pump(&mut self, node: usize, token: FlowToken) -> Result<(), String> {
        let now = self.clock(node);
        let front = self.nodes[node].fronts.get_mut(&token).expect("known");
        let (Some(pump), Some((tcp, side))) = (&mut front.pump, front.tcp) else {
            return Ok(());
        };
        let mut failed = None;
        while pump.missing > 0 && failed.is_none() {
            match self.tcps[tcp].read(side, pump.missing as usize) {
                Read::Bytes(bytes) => {
                    pump.missing -= bytes.len() as u64;
                    front.received += bytes.len() as u64;
                    front.stash.push(bytes).unwrap();
                }
                Read::Nothing => break,
                Read::End => {
                    failed = Some(Cause::Eof {
                        received: front.received,
                    })
                }
                Read::Error(errno) => failed = Some(Cause::Errno(errno)),
            }
        }
        while failed.is_none() {
            let chunk = front
                .replay
                .chunk_at(pump.at)
                .map_err(|e| format!("{e:?}"))?;
            let Some(chunk) = chunk else { break };
            match self.tcps[tcp].write(side, chunk) {
                Ok(0) => break,
                Ok(n) => pump.at += n as u64,
                Err(errno) => failed = Some(Cause::Errno(errno)),
            }
        }
        let (done, replayed) = (pump.at == front.sent, pump.at - front.base.0);
        if let Some(cause) = failed {
            front.pump = None;
            self.nodes[node].endpoint.fault(now, token, cause);
            return Ok(());
        }
        self.transmit(tcp, side);
        if done {
            let front = self.front(node, token);
            front.pump = None;
            front.barred = false;
            if front.fin.is_some() {
                self.tcps[tcp].shutdown(side);
                self.transmit(tcp, side);
            }
            self.nodes[node]
                .endpoint
                .handle_installed(now, token, replayed);
        }
        Ok(())
    }
}
