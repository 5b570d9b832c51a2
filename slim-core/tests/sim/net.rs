//! Datagrams and segments in flight.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use slim_core::ConnId;
use slim_core::transport::Locator;

use crate::event::Ev;
use crate::kinds::{FABRIC, network};
use crate::node::Owner;
use crate::outage::MEETING;
use crate::tcp::{self, Arrival, Tcp};
use crate::world::{MS, SECOND, World};

/// First address of a host on a path.
pub fn addr(node: usize, path: usize) -> IpAddr {
    addr_at(node, path, 0)
}

/// Address of a host on a path, when the host is at its `place`th place.
pub fn addr_at(node: usize, path: usize, place: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, path as u8, place, 1 + node as u8))
}

/// Host and path of an address, which may be an earlier one of that host.
pub fn host_of(addr: &SocketAddr) -> Option<(usize, usize)> {
    let IpAddr::V4(v4) = addr.ip() else {
        return None;
    };
    let [_, path, _, host] = v4.octets();
    (path < 2 && (1..=2).contains(&host)).then(|| (host as usize - 1, path as usize))
}

fn place_of(addr: &SocketAddr) -> Option<u8> {
    match addr.ip() {
        IpAddr::V4(v4) => Some(v4.octets()[2]),
        IpAddr::V6(_) => None,
    }
}

/// Ports of every process.
pub const CONTROL: u16 = 701;
pub const RESUME: u16 = 700;
pub const MAILBOX: u16 = 702;

/// Linux sends this many ICMP messages in a row to an address, and then one a second (`icmp_ratelimit`).
const ICMP_BURST: u64 = 6;

/// ICMP messages sent to an address.
#[derive(Clone, Copy, Debug, Default)]
pub struct IcmpLimit {
    /// What was used of the burst, in microseconds, at this time.
    used: u64,
    at: u64,
}

impl World {
    /// Host and path of an address that a host has now.
    pub fn host_at(&self, addr: &SocketAddr) -> Option<(usize, usize)> {
        let here = |(node, _): &(usize, usize)| place_of(addr) == Some(self.places[*node]);
        host_of(addr).filter(here)
    }

    /// The address of a host on a path now.
    pub fn addr_now(&self, node: usize, path: usize) -> IpAddr {
        addr_at(node, path, self.places[node])
    }

    /// Whether both hosts of a connection are where they were when it was made.
    pub fn leads_there(&self, conn: usize) -> bool {
        self.made_at[conn] == self.places
    }

    /// Whether a host may send a refusal to the address of the other host on this path.
    pub fn may_refuse(&mut self, path: usize) -> bool {
        let now = self.now;
        let Some(limit) = &mut self.icmp else {
            return true;
        };
        let limit = &mut limit[path];
        let used = limit.used.saturating_sub(now - limit.at);
        let allowed = used + SECOND <= ICMP_BURST * SECOND;
        *limit = IcmpLimit {
            used: used + if allowed { SECOND } else { 0 },
            at: now,
        };
        self.stats.unrefused += u64::from(!allowed);
        allowed
    }

    pub fn passes(&self, path: usize, from: usize) -> bool {
        self.cut[path][from] <= self.now
    }

    pub fn send_datagram(
        &mut self,
        node: usize,
        from: Option<SocketAddr>,
        to: SocketAddr,
        data: Vec<u8>,
    ) {
        if to == MEETING {
            return self.send_to_meeting(node, data);
        }
        let Some((other, path)) = self.host_at(&to) else {
            return;
        };
        let own = SocketAddr::new(self.addr_now(node, path), CONTROL);
        let has = |from: &SocketAddr| self.host_at(from).is_some();
        let from = from.filter(has).unwrap_or(own);
        if ![CONTROL, MAILBOX].contains(&to.port()) {
            self.read_along.clone_from(&data);
        }
        let copies = 1 + u64::from(self.dice.chance(self.udp_twice));
        for _ in 0..copies {
            if !self.passes(path, node) || self.dice.chance(self.udp_loss) {
                continue;
            }
            let event = Ev::Datagram {
                node: other,
                from,
                to,
                data: data.clone(),
            };
            let late = if self.dice.chance(5) {
                50 * MS
            } else {
                self.latency
            };
            self.later(self.latency, self.latency + late, event);
        }
    }

    pub fn send_syn(&mut self, node: usize, conn: ConnId, to: Locator) {
        let Some(path) = network(to).filter(|path| *path != FABRIC || !self.kinds.deaf) else {
            return;
        };
        if to.tcp().is_some_and(|to| self.host_at(&to).is_none()) {
            return;
        }
        self.later(self.latency, self.latency * 2, Ev::Syn { node, conn, path });
    }

    pub fn syn(&mut self, node: usize, conn: ConnId, path: usize) {
        if !self.nodes[node].wants(conn) {
            return;
        }
        if !self.passes(path, node) || !self.passes(path, 1 - node) {
            // The kernel tries again.
            return self.later(SECOND, SECOND, Ev::Syn { node, conn, path });
        }
        let tcp = self.nodes[1 - node].alive.then(|| self.new_tcp(path));
        if let Some(tcp) = tcp {
            let other = 1 - node;
            let accepted = self.nodes[other].accept(tcp, other);
            self.owners[tcp][other] = Owner::Conn(accepted);
            let from = match self.kinds.origin(node, path) {
                Locator::Tcp(from) => Locator::Tcp((self.addr_now(node, path), from.port()).into()),
                other => other,
            };
            let now = self.clock(other);
            self.nodes[other]
                .endpoint
                .handle_incoming(now, accepted, from);
        }
        self.later(
            self.latency,
            self.latency * 2,
            Ev::SynAnswer { node, conn, tcp },
        );
    }

    pub fn connected(&mut self, node: usize, conn: ConnId, tcp: Option<usize>) {
        let now = self.clock(node);
        let wanted = self.nodes[node].alive && self.nodes[node].wants(conn);
        match tcp {
            Some(tcp) if wanted => {
                self.owners[tcp][node] = Owner::Conn(conn);
                self.nodes[node].connected(conn, tcp, node);
                self.nodes[node].endpoint.handle_connected(now, conn);
                self.poke(tcp, node);
            }
            Some(tcp) => {
                self.close_tcp(tcp, node);
            }
            None if wanted => {
                self.nodes[node].forget(conn);
                let errno = tcp::ECONNREFUSED;
                self.nodes[node].endpoint.handle_conn_lost(now, conn, errno);
            }
            None => {}
        }
    }

    pub fn new_tcp(&mut self, path: usize) -> usize {
        let (send, receive) = (self.dice.spread(600, 4000), self.dice.spread(600, 4000));
        self.tcps
            .push(Tcp::new(path, send as usize, receive as usize));
        if let Some(tcp) = self.tcps.last_mut() {
            tcp.by_software = self.kinds.software && path == FABRIC;
        }
        self.owners.push([Owner::Nobody, Owner::Nobody]);
        self.made_at.push(self.places);
        let lazy = [0, 1].map(|_| match self.dice.pick(0, 9) {
            0..=1 if self.readers_pause => self.dice.spread(400, 3 * SECOND),
            _ => 400,
        });
        self.lazy.push(lazy);
        self.tcps.len() - 1
    }

    /// Schedules a segment if there is something to send.
    pub fn transmit(&mut self, conn: usize, side: usize) {
        if self.tcps[conn].pending(side) && !self.tcps[conn].dirs[side].armed {
            self.tcps[conn].dirs[side].armed = true;
            self.later(
                self.latency,
                self.latency * 3 / 2,
                Ev::Segment { conn, side },
            );
        }
    }

    pub fn segment(&mut self, conn: usize, side: usize) {
        self.tcps[conn].dirs[side].armed = false;
        if !self.tcps[conn].pending(side) {
            return;
        }
        let path = self.tcps[conn].path;
        if !self.passes(path, side) || !self.leads_there(conn) {
            return self.unanswered(conn, side);
        }
        let most = self.dice.pick(1, self.mss) as usize;
        match self.tcps[conn].arrive(side, most) {
            Arrival::Ack(upto) => {
                if self.passes(path, 1 - side) {
                    self.tcps[conn].dirs[side].silent_since = None;
                    self.later(
                        self.latency,
                        self.latency * 3 / 2,
                        Ev::Ack { conn, side, upto },
                    );
                }
                self.poke(conn, 1 - side);
                if self.tcps[conn].is_due(side) {
                    self.kill_now(conn);
                }
            }
            Arrival::Reset => self.reset(conn, side),
            Arrival::Nothing => return self.unanswered(conn, side),
        }
        if self.tcps[conn].pending(side) {
            self.tcps[conn].dirs[side].armed = true;
            let pause = if self.dice.chance(90) {
                self.latency.clamp(50, 400)
            } else {
                10 * MS
            };
            self.later(pause, pause * 2, Ev::Segment { conn, side });
        }
    }

    /// The kernel finds out by keepalive that the other kernel does not know the connection any more.
    pub fn keepalive(&mut self, conn: usize, side: usize) {
        let path = self.tcps[conn].path;
        let both = self.passes(path, side) && self.passes(path, 1 - side);
        let unknown = self.tcps[conn].sides[1 - side].dead.is_some() || !self.leads_there(conn);
        if both && self.now > self.healthy && unknown {
            self.tcps[conn].die(side, tcp::ETIMEDOUT);
        }
    }

    /// The kernel retransmits for a while, and then reports a timeout.
    pub fn unanswered(&mut self, conn: usize, side: usize) {
        let since = *self.tcps[conn].dirs[side]
            .silent_since
            .get_or_insert(self.now);
        if self.now - since > self.user_timeout {
            self.tcps[conn].die(side, tcp::ETIMEDOUT);
            return self.poke(conn, side);
        }
        self.tcps[conn].dirs[side].armed = true;
        // A kernel retransmits ever more rarely.
        let more = match self.is_dark() {
            true => ((self.now - since) / 4).min(120 * SECOND),
            false => 0,
        };
        let (low, high) = (100 * MS + more, 300 * MS + more);
        self.later(low, high, Ev::Segment { conn, side });
    }

    /// A reset is on its way to `side`.
    pub fn reset(&mut self, conn: usize, side: usize) {
        if self.passes(self.tcps[conn].path, 1 - side) && self.leads_there(conn) {
            self.later(self.latency, self.latency * 2, Ev::Reset { conn, side });
        }
    }

    pub fn close_tcp(&mut self, conn: usize, side: usize) {
        self.owners[conn][side] = Owner::Nobody;
        if self.tcps[conn].close(side) {
            self.reset(conn, 1 - side);
        }
        self.transmit(conn, side);
    }

    /// The process at `side` will soon look at a connection to which something happened.
    pub fn poke(&mut self, conn: usize, side: usize) {
        if self.nodes[side].alive && !matches!(self.owners[conn][side], Owner::Nobody) {
            let lazy = self.lazy[conn][side];
            self.later(lazy / 2, lazy, Ev::Poke { conn, side });
        }
    }
}
