//! What goes wrong, and when.

use slim_core::endpoint::State;
use std::net::SocketAddr;

use slim_core::auth::seal_with_job;
use slim_core::wire::{self, AddrList, Hello, Message, Query};
use slim_core::{Cause, EndpointId, FlowId, FlowToken, Nonce};

use crate::event::{Ev, Harm};
use crate::kinds::FABRIC;
use crate::net::CONTROL;
use crate::tcp;
use crate::world::{MS, Mutation, SECOND, World, endpoint};

impl World {
    pub fn some_harm(&mut self, at: u64) -> Harm {
        let side = self.dice.pick(0, 1) as usize;
        let newest = if self.dice.chance(80) {
            0
        } else {
            self.dice.pick(1, 2)
        };
        // These mutations show where live connections are given up, so most harm is a stall then:
        // the search ends sooner.
        let stalls = matches!(
            self.mutation,
            Some(Mutation::DrainEarly | Mutation::TrimSuspended)
        );
        let kind = match self.dice.pick(0, 99) {
            kind if stalls && kind % 5 > 0 => 70,
            kind => kind,
        };
        match kind {
            0..=49 => Harm::Kill {
                newest,
                side,
                reset: self.dice.chance(70),
            },
            50..=57 => Harm::End { newest, side },
            58..=69 => {
                let until = at + self.dice.spread(MS, 2 * SECOND);
                self.healthy = self.healthy.max(until);
                let path = match self.kinds.shared() && self.dice.chance(40) {
                    true => FABRIC,
                    false => usize::from(self.dice.chance(30)),
                };
                Harm::Cut {
                    path,
                    ways: self.dice.pick(1, 3) as usize,
                    until,
                }
            }
            70..=95 => Harm::Stall {
                node: side,
                flow: self.dice.next() as usize,
            },
            _ => Harm::Crash { node: side },
        }
    }

    pub fn harm(&mut self, harm: Harm) {
        match harm {
            Harm::Kill {
                newest,
                side,
                reset,
            } => {
                let Some(conn) = self.recent(newest) else {
                    return;
                };
                self.tcps[conn].die(side, tcp::ECONNABORTED);
                if reset {
                    self.reset(conn, 1 - side);
                }
                self.poke(conn, side);
            }
            Harm::Snipe { conn, side, reset } => {
                self.tcps[conn].die(side, tcp::ECONNABORTED);
                if reset {
                    self.reset(conn, 1 - side);
                }
                self.poke(conn, side);
            }
            Harm::End { newest, side } => {
                // A process that is asked for the first time while all networks of its ports fail looks out of reach, and then a forged end
                // of its stream is believed: `docs/PROTOCOL.md`, section "Security considerations".
                let silent = self.cut[..FABRIC].iter().flatten().all(|u| *u > self.now);
                let Some(conn) = self.recent(newest).filter(|_| !silent) else {
                    return;
                };
                let acked = self.tcps[conn].inject_end(side);
                let reaches = self.passes(self.tcps[conn].path, side);
                if let Some(upto) = acked.filter(|_| reaches) {
                    let (ack, side) = (self.latency, 1 - side);
                    self.later(ack, ack * 3 / 2, Ev::Ack { conn, side, upto });
                }
                self.poke(conn, side);
            }
            Harm::Cut { path, ways, until } => {
                for way in 0..2 {
                    if ways & (1 << way) != 0 {
                        self.cut[path][way] = self.cut[path][way].max(until);
                    }
                }
            }
            Harm::Dark { until } => self.cut = [[until; 2]; 3],
            Harm::Die { node } => {
                self.die(node);
                self.close_all(node);
            }
            Harm::Blackout { fabric, until } => self.blackout(fabric, until),
            Harm::Stall { node, flow } => {
                let token = FlowToken((flow % self.flows) as u64 + 1);
                let live = self.nodes[node].endpoint.state(token) == Some(State::Live);
                if self.nodes[node].alive && live && !self.nodes[node].fronts[&token].barred {
                    let now = self.clock(node);
                    self.nodes[node].endpoint.fault(now, token, Cause::Stall);
                }
            }
            Harm::Crash { node } => {
                self.die(node);
                match self.dice.pick(0, 3) {
                    0 => {}
                    1..=2 => {
                        let at = self.now + self.dice.spread(MS, SECOND);
                        self.at(at, Ev::Fault(Harm::Restart { node }));
                    }
                    _ => self.vanish(),
                }
                self.close_all(node);
            }
            Harm::ForgeHello { flow } => self.forge_hello(flow),
            Harm::ForgeRefusal { node, flow } => self.forge_refusal(node, flow),
            Harm::Restart { node } => {
                self.stats.restarts += 1;
                let life = 1 + self.stats.restarts;
                let config = self.config.clone();
                let own = self.kinds.transports(node);
                let endpoint = endpoint(config, own, self.seed, node, life);
                self.nodes[node].replace(endpoint);
            }
        }
    }

    /// A process is killed.
    fn die(&mut self, node: usize) {
        self.stats.crashes += 1;
        self.nodes[node].alive = false;
        self.nodes[node].crashed = true;
    }

    /// The kernel closes the connections of a process that has ended.
    fn close_all(&mut self, node: usize) {
        for conn in 0..self.tcps.len() {
            if !self.tcps[conn].sides[node].closed {
                self.close_tcp(conn, node);
            }
        }
    }

    /// A host loses power: it answers nothing any more, and sends no refusals.
    fn vanish(&mut self) {
        self.stats.vanished += 1;
        self.cut = [[u64::MAX; 2]; 3];
        // After this time all attempts have been made. But a side that was only asked to resume,
        // and has seen no error, waits as long as a kernel does.
        self.healthy = self.healthy.max(self.now + 100 * SECOND);
        self.patience = 1100 * SECOND;
    }

    /// A message was sent on a connection that is to become a transport. Sometimes the connection breaks now.
    pub fn snipe(&mut self, conn: usize) {
        let likely = match self.mutation {
            Some(Mutation::DropAwaiting) => 60,
            _ => 25,
        };
        if self.snipes == 0 || !self.dice.chance(likely) {
            return;
        }
        self.snipes -= 1;
        let side = self.dice.pick(0, 1) as usize;
        if self.dice.chance(60) {
            // The other side is busy, and notices late.
            self.lazy[conn][1 - side] = self.dice.spread(20 * MS, 2 * SECOND);
        }
        let at = self.now + self.dice.spread(20, 60 * MS);
        self.healthy = self.healthy.max(at);
        let reset = self.dice.chance(70);
        self.at(at, Ev::Fault(Harm::Snipe { conn, side, reset }));
    }

    /// Forgeries while connections are made. The attacker knows both ends of each connection, and when it is made.
    pub fn some_forgery(&mut self) {
        for _ in 0..self.dice.pick(1, 12) {
            let at = self.dice.spread(20, 700 * MS);
            let flow = self.dice.pick(0, self.flows as u64 - 1) as usize;
            let harm = if self.dice.chance(70) {
                Harm::ForgeHello { flow }
            } else {
                let node = self.dice.pick(0, 1) as usize;
                Harm::ForgeRefusal { node, flow }
            };
            self.at(at, Ev::Fault(harm));
        }
    }

    fn random16(&mut self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.dice.next().to_be_bytes());
        bytes
    }

    fn forge_hello(&mut self, flow: usize) {
        self.stats.forged += 1;
        let (connector, acceptor) = self.names(flow);
        let hello = Hello {
            flow: FlowId(self.random16()),
            connector,
            acceptor,
            endpoint: EndpointId {
                host: self.random16(),
                pid: 1,
                incarnation: self.dice.next(),
            },
            random_c: [7; 32],
            features: 0,
            resume_port: 9,
            control_port: CONTROL,
            addrs: AddrList::new([connector.ip()]),
        };
        let data = seal_with_job(None, &Message::Hello(hello));
        let from = (connector.ip(), CONTROL).into();
        self.forgery(1, from, acceptor, data);
    }

    fn forgery(&mut self, node: usize, from: SocketAddr, to: SocketAddr, data: Vec<u8>) {
        let event = Ev::Datagram {
            node,
            from,
            to,
            data,
        };
        self.later(0, self.latency, event);
    }

    /// Forges an ICMP refusal, which quotes a message: a guessed one, or the real one if the attacker reads the traffic.
    fn forge_refusal(&mut self, node: usize, flow: usize) {
        self.stats.forged += 1;
        let (connector, acceptor) = self.names(flow);
        let mut quoted = Vec::new();
        if self.mutation == Some(Mutation::ReadsAlong) {
            quoted.clone_from(&self.read_along);
        } else if self.dice.chance(80) {
            let flow = FlowId(self.random16());
            let nonce = Nonce(self.random16());
            quoted = seal_with_job(None, &Message::Query(Query { flow, nonce }));
            quoted[wire::layout::header::KIND] = self.dice.pick(1, 10) as u8;
        }
        let other = if node == 0 { acceptor } else { connector };
        let to = if self.dice.chance(50) {
            other
        } else {
            (other.ip(), CONTROL).into()
        };
        let event = Ev::Refused {
            node,
            to,
            data: quoted,
        };
        self.later(0, self.latency, event);
    }

    pub fn recent(&self, newest: u64) -> Option<usize> {
        self.tcps.len().checked_sub(1 + newest as usize)
    }
}
