//! The world: two processes, the networks between them, and everything that can go wrong.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Action, Endpoint, State};
use slim_core::transport::Transports;
use slim_core::{EndpointId, FlowToken, Role};

use crate::dice::{Dice, mix};
use crate::event::Ev;
use crate::front::{Front, Plan};
use crate::kinds::Kinds;
use crate::net::{CONTROL, IcmpLimit, MAILBOX, addr};
use crate::node::{Clock, Node, Owner};
use crate::outage::LongOutage;
use crate::stats::Stats;
use crate::tcp::{self, Tcp};

pub const MS: u64 = 1000;
pub const SECOND: u64 = 1_000_000;

/// A rule that is broken on purpose, to check that the simulator notices it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The driver drains the old transport and closes it when the flow is suspended, not when told to.
    DrainEarly,
    /// The driver goes on trimming while the flow is suspended.
    TrimSuspended,
    /// The driver answers `Flush` without reading the connection.
    DropAwaiting,
    /// The driver believes what the witness's kernel acknowledges on a relayed transport.
    TrimRelayed,
    /// The driver believes what the adapters acknowledge on a queue pair.
    TrimArrived,
    /// The driver closes an old transport that is well without reading it.
    CloseWell,
    /// The driver keeps the rules, but the attacker is on the path and reads the traffic.
    ReadsAlong,
}

pub struct World {
    pub now: u64,
    pub seed: u64,
    pub config: Config,
    pub kinds: Kinds,
    pub dice: Dice,
    pub mutation: Option<Mutation>,
    pub queue: BinaryHeap<Reverse<(u64, u64)>>,
    pub events: BTreeMap<u64, Ev>,
    pub count: u64,
    pub tcps: Vec<Tcp>,
    pub owners: Vec<[Owner; 2]>,
    /// How long a process may take to look at a connection.
    pub lazy: Vec<[u64; 2]>,
    pub nodes: [Node; 2],
    /// Time before which nothing passes, per path and direction.
    pub cut: [[u64; 2]; 3],
    pub latency: u64,
    pub udp_loss: u64,
    pub udp_twice: u64,
    /// What a host without a process may still send to the other host at an address, if it limits ICMP messages.
    pub icmp: Option<[IcmpLimit; 2]>,
    pub user_timeout: u64,
    pub mss: u64,
    pub flows: usize,
    /// How often, in percent, a driver that looks at a flow takes it for quiet.
    pub taken_for_quiet: u64,
    /// Whether some readers of new connections pause for long.
    pub readers_pause: bool,
    /// Most bytes that an application writes at once.
    pub chunk: u64,
    /// Connections that may still be broken during a resume.
    pub snipes: u64,
    /// When the last harm is over.
    pub healthy: u64,
    /// How long after `healthy` every flow must have come to its end.
    pub patience: u64,
    /// At which place each host is, and where both were when each connection was made.
    pub places: [u8; 2],
    pub made_at: Vec<[u8; 2]>,
    /// An outage of hours.
    pub long: Option<LongOutage>,
    pub stats: Stats,
    /// Nothing goes wrong except forgeries.
    pub quiet: bool,
    /// The last datagram that was sent to a listener.
    pub read_along: Vec<u8>,
    /// Print everything on standard output.
    pub trace: bool,
}

/// The endpoint of the `life`th process on host `n`.
pub fn endpoint(config: Config, own: Transports, seed: u64, n: usize, life: u64) -> Endpoint {
    let id = EndpointId {
        host: [n as u8 + 1; 16],
        pid: 100 + n as u32,
        incarnation: mix((seed + n as u64) ^ life << 32),
    };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&mix((seed * 2 + n as u64) ^ life << 32).to_be_bytes());
    Endpoint::new(config, id, own, bytes)
}

impl World {
    pub fn new(seed: u64, mutation: Option<Mutation>, kinds: Kinds) -> World {
        let mut world = World::empty(seed, mutation, kinds);
        world.start();
        world
    }

    /// A world without flows.
    pub fn empty(seed: u64, mutation: Option<Mutation>, kinds: Kinds) -> World {
        let mut dice = Dice::new(mix(seed ^ 0x51_1a));
        let mut config = Config {
            hello_timeout: Duration::from_millis(dice.pick(300, 3000)),
            ..Config::default()
        };
        if kinds.relay {
            // The witness comes after the first attempt.
            config.attempt_timeouts[0] = Duration::from_millis(200);
        }
        let nodes = [0, 1].map(|n: usize| {
            let clock = Clock {
                offset: dice.spread(1, 1 << 50),
                rate: dice.pick(900, 1100),
            };
            let own = kinds.transports(n);
            Node::new(endpoint(config.clone(), own, seed, n, 1), clock)
        });
        World {
            now: 0,
            seed,
            config,
            mutation,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            count: 0,
            tcps: Vec::new(),
            owners: Vec::new(),
            lazy: Vec::new(),
            nodes,
            cut: [[0; 2]; 3],
            kinds,
            latency: dice.spread(20, 20 * MS),
            udp_loss: if dice.chance(50) { 0 } else { dice.pick(1, 40) },
            udp_twice: dice.pick(0, 20),
            // Not drawn from the dice, so that the other seeds keep their schedules.
            icmp: mix(seed ^ 0x1c3b).is_multiple_of(3).then(Default::default),
            user_timeout: dice.spread(300 * MS, 6 * SECOND),
            mss: dice.spread(8, 400),
            flows: 1 + usize::from(dice.chance(15)),
            taken_for_quiet: 30,
            readers_pause: true,
            chunk: 500,
            snipes: dice.pick(0, 6),
            healthy: 0,
            patience: 200 * SECOND,
            places: [0; 2],
            made_at: Vec::new(),
            long: None,
            stats: Stats::default(),
            quiet: false,
            read_along: Vec::new(),
            trace: false,
            dice,
        }
    }

    fn start(&mut self) {
        if self.mutation.is_none() && self.dice.chance(30) {
            self.acquaint();
        }
        for flow in 0..self.flows {
            let (agreed, network) = self.first_network();
            let conn = self.new_tcp(network);
            let token = FlowToken(flow as u64 + 1);
            let size = self
                .dice
                .spread(1, if self.kinds.relay { 60_000 } else { 3000 });
            for (node, role) in [(0, Role::Connector), (1, Role::Acceptor)] {
                let plan = match self.dice.pick(0, 9) {
                    0 => Plan::Rude,
                    1 => Plan::Idle,
                    _ => Plan::Orderly,
                };
                let to_write = if self.dice.chance(15) {
                    0
                } else {
                    self.dice.spread(1, size)
                };
                let front = Front::new((conn, node), network, plan, to_write);
                self.nodes[node].fronts.insert(token, front);
                self.owners[conn][node] = Owner::Flow(token);
                if agreed {
                    continue;
                }
                if role == Role::Connector {
                    self.connect(node, flow, token);
                    self.later(0, 5 * MS, Ev::Tick { node, token });
                } else {
                    let wait = if self.dice.chance(80) {
                        5 * MS
                    } else {
                        500 * MS
                    };
                    self.later(0, wait, Ev::Accept { flow });
                }
            }
            if agreed {
                self.agree(flow, token);
            }
        }
        if self.kinds.shared() {
            self.some_blackouts();
        }
        let attacked = self.dice.chance(30) || self.mutation == Some(Mutation::ReadsAlong);
        if attacked {
            self.some_forgery();
        }
        // Most harm comes early, while there are connections.
        let harms = self.dice.pick(0, 10);
        self.quiet = self.udp_loss == 0 && harms == 0;
        for _ in 0..harms {
            let at = self.dice.spread(MS, 4 * SECOND);
            let harm = self.some_harm(at);
            self.healthy = self.healthy.max(at);
            self.at(at, Ev::Fault(harm));
        }
    }

    /// Gives the processes earlier flows, so that they know each other.
    fn acquaint(&mut self) {
        for flow in 1000..1003 {
            let token = FlowToken(flow as u64 + 1);
            let (local, remote) = self.names(flow);
            let now = [0, 1].map(|node| self.clock(node));
            let [a, b] = &mut self.nodes;
            a.endpoint
                .open(now[0], token, Role::Connector, local, remote);
            b.endpoint
                .open(now[1], token, Role::Acceptor, remote, local);
            let mut quiet = false;
            while !quiet {
                quiet = true;
                for node in 0..2 {
                    while let Some(action) = self.nodes[node].endpoint.poll_action() {
                        quiet = false;
                        let from = SocketAddr::new(addr(node, 0), CONTROL);
                        let other = &mut self.nodes[1 - node].endpoint;
                        match action {
                            Action::Datagram { to, data, .. } => {
                                other.handle_datagram(now[1 - node], from, to, &data);
                            }
                            Action::Mailbox { ip } => {
                                self.nodes[node].endpoint.set_mailbox(ip, MAILBOX);
                            }
                            _ => {}
                        }
                    }
                }
            }
            for (node, now) in self.nodes.iter_mut().zip(now) {
                node.endpoint.gone(now, token);
                while node.endpoint.poll_event().is_some() {}
            }
        }
    }

    fn connect(&mut self, node: usize, flow: usize, token: FlowToken) {
        let (local, remote) = self.names(flow);
        let now = self.clock(node);
        let endpoint = &mut self.nodes[node].endpoint;
        let Some(opened) = endpoint.pairs().dial(now, local, remote) else {
            return endpoint.open(now, token, Role::Connector, local, remote);
        };
        endpoint.open_known(now, token, local, &opened);
        self.stats.dialled += 1;
        self.front(node, token).opened = Some(opened.clone());
        self.send_datagram(node, None, opened.mailbox, opened.data);
    }

    /// The connection of a flow as its connector names it: (its end, the other end).
    pub fn names(&self, flow: usize) -> (SocketAddr, SocketAddr) {
        let local = SocketAddr::new(addr(0, 0), 5000 + flow as u16);
        (local, SocketAddr::new(addr(1, 0), 80))
    }

    // Events.

    pub fn at(&mut self, at: u64, event: Ev) {
        self.count += 1;
        self.queue.push(Reverse((at, self.count)));
        self.events.insert(self.count, event);
    }

    /// After a pause between `low` and `high`.
    pub fn later(&mut self, low: u64, high: u64, event: Ev) {
        let at = self.now + self.dice.pick(low, high);
        self.at(at, event);
    }

    /// Runs to the end.
    pub fn run(&mut self) -> Result<(), String> {
        self.go_on()?;
        self.check_end()?;
        for n in 0..2 {
            let now = self.clock(n);
            let node = &mut self.nodes[n];
            if node.alive {
                let held = self.config.hold.unwrap_or_default();
                node.forgets(now, held)
                    .map_err(|e| format!("side {n}: {e}"))?;
            }
        }
        Ok(())
    }

    /// Runs until all flows are over, or have had their time.
    pub fn go_on(&mut self) -> Result<(), String> {
        while let Some(&Reverse((at, number))) = self.queue.peek()
            && at <= self.healthy + self.patience
        {
            self.queue.pop();
            let Some(event) = self.events.remove(&number) else {
                continue;
            };
            self.now = self.now.max(at);
            self.stats.events += 1;
            if self.all_over() {
                break;
            }
            if self.trace {
                self.tell(&event);
            }
            self.handle(event)?;
            for node in 0..2 {
                self.drive(node)?;
            }
        }
        Ok(())
    }

    fn tell(&self, event: &Ev) {
        let now = self.now;
        match event {
            Ev::Tick { .. } | Ev::Segment { .. } | Ev::Ack { .. } | Ev::Poke { .. } => {}
            Ev::Timer { .. } => {}
            Ev::Datagram { node, data, .. } => {
                let kind = slim_core::wire::parse(data).map(|parsed| parsed.message.kind());
                println!("{now:>10} {node} <- {kind:?}");
            }
            other => println!("{now:>10} {other:?}"),
        }
    }

    fn all_over(&self) -> bool {
        self.now > self.healthy
            && self.nodes.iter().all(|node| {
                let vanished = self.stats.vanished > 0;
                let content = |front| vanished || self.content(front);
                let mut fronts = node.fronts.iter();
                !node.alive || fronts.all(|(t, f)| f.gone || !self.waits(node, *t) && content(f))
            })
    }

    /// Whether a flow waits for the endpoint.
    fn waits(&self, node: &Node, token: FlowToken) -> bool {
        match node.endpoint.state(token) {
            Some(State::Suspended | State::Resuming) => true,
            // A connector that has heard that the peer has SLIM goes on asking as long as the
            // connection reports no fault.
            Some(State::Negotiating) => self.stats.vanished == 0 || node.fronts[&token].barred,
            _ => false,
        }
    }

    /// Whether a flow that never ends has nothing more to do: all bytes are written and delivered.
    fn content(&self, front: &Front) -> bool {
        front.plan == Plan::Idle && !front.barred && front.to_write == 0 && {
            self.nodes.iter().all(|node| {
                node.fronts
                    .values()
                    .all(|f| f.plan == Plan::Idle && f.to_write == 0)
            }) && {
                let delivered: u64 = self.total(|f| f.delivered);
                delivered == self.total(|f| f.sent)
            }
        }
    }

    fn total(&self, of: impl Fn(&Front) -> u64) -> u64 {
        self.nodes
            .iter()
            .flat_map(|node| node.fronts.values())
            .map(of)
            .sum()
    }

    fn check_end(&self) -> Result<(), String> {
        let crashed = self.nodes.iter().any(|node| node.crashed);
        for (n, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
            for (token, front) in &node.fronts {
                let state = node.endpoint.state(*token);
                if self.nobody_is_to_be_found(1 - n, *token) {
                    continue;
                }
                if self.waits(node, *token) && !front.gone {
                    return Err(format!("side {n}: {token:?} hangs, {state:?}"));
                }
                let other = &self.nodes[1 - n].fronts[token];
                if self.quiet && front.made_plain {
                    return Err(format!("side {n}: {token:?} was made plain TCP"));
                }
                if crashed || front.legacy || other.legacy {
                    continue;
                }
                if self.gives_up() {
                    continue;
                }
                let idle = front.plan == Plan::Idle && other.plan == Plan::Idle;
                if !front.gone && !idle {
                    return Err(format!(
                        "side {n}: {token:?} does not end, {state:?}: {}",
                        front.tell()
                    ));
                }
                let polite = front.plan != Plan::Rude && other.plan != Plan::Rude;
                if polite
                    && front
                        .verdict
                        .is_some_and(|v| matches!(v, slim_core::Verdict::Errno(_)))
                {
                    return Err(format!(
                        "side {n}: {token:?} was given up: {:?}",
                        front.verdict
                    ));
                }
                if polite && front.delivered != other.sent {
                    return Err(format!(
                        "side {n}: {token:?} got {} of {} bytes",
                        front.delivered, other.sent
                    ));
                }
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: Ev) -> Result<(), String> {
        match event {
            Ev::Segment { conn, side } => self.segment(conn, side),
            Ev::Ack { conn, side, upto } => {
                self.tcps[conn].acknowledge(side, upto);
                self.transmit(conn, side);
                self.poke(conn, side);
            }
            Ev::Reset { conn, side } => {
                self.tcps[conn].die(side, tcp::ECONNRESET);
                self.poke(conn, side);
            }
            Ev::Syn { node, conn, path } => self.syn(node, conn, path),
            Ev::SynAnswer { node, conn, tcp } => self.connected(node, conn, tcp),
            Ev::Poke { conn, side } => self.look(conn, side)?,
            Ev::Datagram {
                node,
                from,
                to,
                data,
            } if self.nodes[node].alive => {
                let now = self.clock(node);
                let endpoint = &mut self.nodes[node].endpoint;
                if to.port() == MAILBOX {
                    endpoint.pairs().receive(now, from, to, &data);
                    endpoint.take_arrivals(now);
                    endpoint.send_seen(now);
                } else {
                    endpoint.handle_datagram(now, from, to, &data);
                }
            }
            Ev::Datagram {
                node,
                from,
                to,
                data,
            } => {
                // There is no process: the host sends a refusal, unless it has just sent too many.
                if let Some((asker, path)) = self.host_at(&from)
                    && self.passes(path, node)
                    && self.may_refuse(path)
                {
                    self.later(
                        self.latency,
                        self.latency * 2,
                        Ev::Refused {
                            node: asker,
                            to,
                            data,
                        },
                    );
                }
            }
            Ev::Refused { node, to, data } => {
                let now = self.clock(node);
                self.nodes[node].endpoint.handle_refused(now, to, &data);
            }
            Ev::Timer { node } => {
                self.nodes[node].armed = None;
                self.expires(node)?;
                let now = self.clock(node);
                self.nodes[node].endpoint.handle_timeout(now);
            }
            Ev::Suspended { node, token } => self.suspended(node, token)?,
            Ev::Verified { node, token } => self.verified(node, token),
            Ev::Drain { node, token } => self.drain(node, token)?,
            Ev::Drained { node, token, tcp } => self.drained(node, token, tcp),
            Ev::Accept { flow } => {
                let token = FlowToken(flow as u64 + 1);
                let (remote, local) = self.names(flow);
                let now = self.clock(1);
                if !self.nodes[1].crashed {
                    self.nodes[1]
                        .endpoint
                        .open(now, token, Role::Acceptor, local, remote);
                    self.later(0, 5 * MS, Ev::Tick { node: 1, token });
                }
            }
            Ev::Tick { node, token } => self.tick(node, token)?,
            Ev::Meeting { from, data } => self.meet(from, &data),
            Ev::Move { node, place } => self.move_host(node, place),
            Ev::Fault(harm) => self.harm(harm),
        }
        Ok(())
    }
}
