//! The processes, their witness, and the network.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use slim_core::auth::JobKey;
use slim_core::config::{Config, WhenLost};
use slim_core::endpoint::{Action, Agreed, Endpoint, State};
use slim_core::event::{EscalateReason, Event};
use slim_core::transport::{Locator, OtherLocator, TransportKind, Transports};
use slim_core::witness::Witness;
use slim_core::{Cause, ConnId, EndpointId, FlowId, FlowToken, Role, Time, wire};

use crate::dice::Dice;

pub const MS: u64 = 1000;
pub const S: u64 = 1000 * MS;
const RESUME: u16 = 700;
const CONTROL: u16 = 701;
/// An outage that is shorter than this ends before the attempts, which take 3 s, are used up.
const SHORT: u64 = 2 * S;
/// Nothing happens any more after this time, but what follows from it.
const CALM: u64 = 20 * S;
const END: u64 = 90 * S;

/// A change of the rules that must be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// The processes have no witness.
    NoWitness,
    /// They have no witness, and none of them stands in for it.
    NoTieBreak,
    /// A lost process is not told, and goes on.
    LostGoesOn,
    /// The witness is started anew with each datagram.
    WitnessForgets,
    /// The witness passes nothing on.
    NoRelay,
}

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub resumes: u64,
    pub fenced: u64,
    pub cut_off: u64,
    /// Runs without a witness in which a process was fenced.
    pub ties: u64,
    pub peer_lost: u64,
    /// Runs in which no outage was longer than the attempts.
    pub healed: u64,
    pub crashes: u64,
    /// How often one end of a flow moved to a transport through the witness, and how often it came back from there.
    pub relayed: u64,
    pub came_back: u64,
}

impl Stats {
    pub fn add(&mut self, other: &Stats) {
        self.resumes += other.resumes;
        self.fenced += other.fenced;
        self.cut_off += other.cut_off;
        self.ties += other.ties;
        self.peer_lost += other.peer_lost;
        self.healed += other.healed;
        self.crashes += other.crashes;
        self.relayed += other.relayed;
        self.came_back += other.came_back;
    }
}

enum Ev {
    Datagram {
        to: usize,
        from: SocketAddr,
        data: Vec<u8>,
    },
    /// A connection from `node` arrives at `to`.
    Syn {
        node: usize,
        conn: ConnId,
        to: usize,
    },
    Message {
        node: usize,
        conn: ConnId,
        data: Vec<u8>,
    },
    ConnLost {
        node: usize,
        conn: ConnId,
        errno: i32,
    },
    Suspended(usize, FlowToken),
    Drained(usize, FlowToken),
    Installed(usize, FlowToken),
    Timer(usize),
    /// The transport of the flow between the two fails, as `node` sees it, unless it has been replaced since.
    Fault {
        node: usize,
        peer: usize,
        transport: u64,
        cause: Cause,
    },
    Kill(usize, usize),
    Cut(usize, usize),
    Heal(usize, usize),
    Crash(usize),
    Stop(usize),
    Continue(usize),
}

/// One process, or the witness, which is the last one and has no endpoint.
struct Node {
    endpoint: Option<Endpoint>,
    alive: bool,
    fenced: Option<EscalateReason>,
    when_lost: Option<WhenLost>,
    /// Events that come while the process stands still wait.
    stopped: Option<u64>,
    waiting: Vec<Ev>,
    offset: u64,
    rate: u64,
    /// When its next timer event comes.
    armed: Option<u64>,
    accepted: u64,
    /// The other end of each connection that is not a transport, and whether it goes through the witness.
    conns: BTreeMap<ConnId, (usize, ConnId, bool)>,
    /// By peer: whether the flow has been given up because of the network.
    gave_up: BTreeMap<usize, EscalateReason>,
    /// By peer: the number of the flow's present transport.
    transports: BTreeMap<usize, u64>,
    /// The peers to which the flow goes through the witness.
    relayed: BTreeSet<usize>,
}

pub struct World {
    pub trace: bool,
    pub stats: Stats,
    mutation: Option<Mutation>,
    /// There is no witness, and only connections are cut: messages pass.
    ties: bool,
    /// The witness passes on the bytes of processes that cannot reach each other.
    relays: bool,
    dice: Dice,
    now: u64,
    serial: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Ev>,
    nodes: Vec<Node>,
    witness: Witness,
    /// Pairs that cannot reach each other, and since when.
    cut: BTreeMap<(usize, usize), u64>,
    /// A process could not be reached for longer than [`SHORT`].
    long_outage: bool,
    /// A process could not reach the witness, or stood still.
    witness_cut: bool,
    next_transport: u64,
    /// Percentage of datagrams that are lost.
    loss: u64,
}

fn ip(node: usize) -> IpAddr {
    [10, 0, 0, node as u8 + 1].into()
}

fn node_at(ip: IpAddr) -> usize {
    match ip {
        IpAddr::V4(v4) => usize::from(v4.octets()[3]) - 1,
        IpAddr::V6(_) => panic!("no such address"),
    }
}

fn key() -> JobKey {
    JobKey::new(b"the key of the simulated job").expect("not empty")
}

/// The flow between `node` and `peer`, as `node` names it.
fn token(peer: usize) -> FlowToken {
    FlowToken(peer as u64)
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl World {
    pub fn new(seed: u64, mutation: Option<Mutation>) -> World {
        let mut dice = Dice::new(seed);
        let count = match dice.chance(50) {
            true => 2,
            false => dice.pick(3, 5) as usize,
        };
        let ties = dice.chance(25) && mutation.is_none() || mutation == Some(Mutation::NoTieBreak);
        let relays = match mutation {
            None => !ties && dice.chance(50),
            mutation => mutation == Some(Mutation::NoRelay),
        };
        let mut nodes = Vec::new();
        for n in 0..=count {
            let config = Config {
                attempt_timeouts: [500, 1000, 1500].map(Duration::from_millis).to_vec(),
                job_key: Some(key()),
                witness: match mutation {
                    Some(Mutation::NoWitness) => Vec::new(),
                    _ if ties => Vec::new(),
                    _ => vec![SocketAddr::new(ip(count), CONTROL)],
                },
                when_lost: match dice.chance(50) {
                    _ if mutation == Some(Mutation::NoTieBreak) => None,
                    true => Some(WhenLost::Error),
                    false => Some(WhenLost::Exit),
                },
                ..Config::default()
            };
            let when_lost = config.when_lost;
            let id = EndpointId {
                host: [n as u8; 16],
                pid: 1,
                incarnation: 7,
            };
            let mut own = Transports::tcp(vec![ip(n)], RESUME, CONTROL);
            if relays {
                own.kinds = vec![TransportKind::RELAY];
                own.locators
                    .extend(OtherLocator::new(TransportKind::RELAY, &[n as u8]));
            }
            let mut block = [n as u8; 32];
            block[..8].copy_from_slice(&dice.next().to_le_bytes());
            nodes.push(Node {
                endpoint: (n < count).then(|| Endpoint::new(config, id, own, block)),
                alive: true,
                fenced: None,
                when_lost,
                stopped: None,
                waiting: Vec::new(),
                offset: dice.pick(0, 1000 * S),
                rate: dice.pick(990, 1010),
                armed: None,
                accepted: 0,
                conns: BTreeMap::new(),
                gave_up: BTreeMap::new(),
                transports: BTreeMap::new(),
                relayed: BTreeSet::new(),
            });
        }
        let loss = match dice.chance(50) {
            true => 0,
            false => dice.pick(1, 30),
        };
        World {
            trace: false,
            stats: Stats::default(),
            mutation,
            ties,
            relays,
            dice,
            now: 0,
            serial: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            nodes,
            witness: Witness::new(key(), [9; 32]),
            cut: BTreeMap::new(),
            long_outage: false,
            witness_cut: false,
            next_transport: 1,
            loss,
        }
    }

    fn witness_at(&self) -> usize {
        self.nodes.len() - 1
    }

    fn at(&mut self, time: u64, event: Ev) {
        self.serial += 1;
        self.queue.push(Reverse((time, self.serial)));
        self.events.insert(self.serial, event);
    }

    fn later(&mut self, from: u64, to: u64, event: Ev) {
        let after = self.dice.pick(from, to);
        self.at(self.now + after, event);
    }

    fn clock(&self, node: usize) -> Time {
        let node = &self.nodes[node];
        Time(node.offset + self.now * node.rate / 1000)
    }

    fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cut.contains_key(&pair(a, b))
    }

    /// Whether nothing passes on a connection between the two.
    fn is_blocked(&self, a: usize, b: usize, relayed: bool) -> bool {
        let witness = self.witness_at();
        match relayed {
            true => self.is_cut(a, witness) || self.is_cut(b, witness),
            false => self.is_cut(a, b),
        }
    }

    fn is_relayed(&self, node: usize, peer: usize) -> bool {
        self.nodes[node].relayed.contains(&peer)
    }

    pub fn run(&mut self) -> Result<(), String> {
        self.open_flows();
        self.plan();
        while let Some(Reverse((time, serial))) = self.queue.pop() {
            let event = self.events.remove(&serial).expect("queued with it");
            if time > END {
                break;
            }
            self.now = time;
            self.happen(event);
        }
        self.judge()
    }

    fn open_flows(&mut self) {
        let count = self.witness_at();
        let announced: Vec<_> = self.nodes[..count]
            .iter()
            .filter_map(|node| Some(node.endpoint.as_ref()?.announcement()))
            .collect();
        for a in 0..count {
            for (b, other) in announced.iter().enumerate().filter(|(b, _)| *b != a) {
                let mut flow = [0; 16];
                (flow[0], flow[1]) = (a.min(b) as u8, a.max(b) as u8);
                let agreed = Agreed {
                    flow: FlowId(flow),
                    secrets: [[1; 32], [2; 32]],
                    peer: other.clone(),
                };
                let role = match a < b {
                    true => Role::Connector,
                    false => Role::Acceptor,
                };
                let ends = (SocketAddr::new(ip(a), 5000), SocketAddr::new(ip(b), 5000));
                let now = self.clock(a);
                if let Some(endpoint) = &mut self.nodes[a].endpoint {
                    endpoint.open_agreed(now, token(b), role, ends, &agreed);
                }
                self.nodes[a].transports.insert(b, 0);
            }
            self.drive(a);
        }
    }

    /// Draws what happens to the network and the processes.
    fn plan(&mut self) {
        let count = self.witness_at();
        let mild = self.dice.chance(30);
        for _ in 0..self.dice.pick(1, 6) {
            let at = self.dice.pick(S, CALM);
            let (a, b) = (
                self.dice.pick(0, count as u64 - 1) as usize,
                self.dice.pick(0, count as u64) as usize,
            );
            let most = if mild { 6 } else { 9 };
            match self.dice.pick(0, most) {
                0..=4 if a != b => {
                    self.at(at, Ev::Cut(a, b));
                    let end = match self.dice.pick(0, 2) {
                        _ if mild => at + self.dice.spread(10 * MS, 3 * S / 2),
                        0 => at + self.dice.spread(10 * MS, 3 * S),
                        1 => at + self.dice.spread(3 * S, 30 * S),
                        _ => END,
                    };
                    if end < CALM + 30 * S {
                        self.at(end, Ev::Heal(a, b));
                    }
                }
                5 | 6 if a != b && b < count => self.at(at, Ev::Kill(a, b)),
                7 => self.at(at, Ev::Crash(a)),
                8 if self.ties => {}
                8 => {
                    self.at(at, Ev::Stop(a));
                    let end = at + self.dice.spread(10 * MS, 30 * S);
                    self.at(end, Ev::Continue(a));
                }
                // A host is cut off from everybody.
                _ => {
                    for other in (0..=count).filter(|other| *other != a) {
                        self.at(at, Ev::Cut(a, other));
                    }
                }
            }
        }
    }

    fn happen(&mut self, event: Ev) {
        let node = match &event {
            Ev::Datagram { to, .. } | Ev::Syn { to, .. } => Some(*to),
            Ev::Message { node, .. } | Ev::ConnLost { node, .. } | Ev::Fault { node, .. } => {
                Some(*node)
            }
            Ev::Suspended(node, _) | Ev::Drained(node, _) | Ev::Installed(node, _) => Some(*node),
            Ev::Timer(node) => Some(*node),
            _ => None,
        };
        if let Some(node) = node {
            // A SYN to a process that stands still is answered by its kernel, and then nothing comes.
            if !self.nodes[node].alive {
                return self.refuse(node, event);
            }
            if self.nodes[node].stopped.is_some() {
                if let Ev::Syn {
                    node: from, conn, ..
                } = event
                {
                    self.establish(from, conn);
                }
                return self.nodes[node].waiting.push(event);
            }
        }
        match event {
            Ev::Cut(a, b) => self.do_cut(a, b),
            Ev::Heal(a, b) => self.do_heal(a, b),
            Ev::Kill(a, b) => self.do_kill(a, b),
            Ev::Crash(a) => {
                self.stats.crashes += u64::from(self.nodes[a].alive);
                self.nodes[a].alive = false;
                for peer in (0..self.witness_at()).filter(|peer| *peer != a) {
                    self.do_kill(a, peer);
                }
            }
            Ev::Stop(a) => {
                self.nodes[a].stopped.get_or_insert(self.now);
            }
            Ev::Continue(a) => {
                let since = self.nodes[a].stopped.take().unwrap_or(self.now);
                self.long_outage |= self.now - since >= SHORT;
                self.witness_cut = true;
                for event in std::mem::take(&mut self.nodes[a].waiting) {
                    self.happen(event);
                }
            }
            event => {
                if let Some(node) = node {
                    self.at_node(node, event);
                    self.drive(node);
                }
            }
        }
    }

    fn do_cut(&mut self, a: usize, b: usize) {
        self.say(format!("{a} and {b} cannot reach each other"));
        self.cut.entry(pair(a, b)).or_insert(self.now);
        self.witness_cut |= a.max(b) == self.witness_at();
        let (process, other) = pair(a, b);
        let hit: Vec<_> = match other == self.witness_at() {
            false if self.is_relayed(a, b) => Vec::new(),
            false => vec![other],
            true => self.nodes[process].relayed.iter().copied().collect(),
        };
        // Both ends use the flow, and notice: with an error, or by the silence.
        for (node, peer) in hit
            .into_iter()
            .flat_map(|other| [(process, other), (other, process)])
        {
            let cause = match self.ties || self.dice.chance(50) {
                true => Cause::Errno(110),
                false => Cause::Stall,
            };
            self.notice(node, peer, cause, 2 * S);
        }
    }

    fn do_heal(&mut self, a: usize, b: usize) {
        if let Some(since) = self.cut.remove(&pair(a, b)) {
            self.say(format!("{a} and {b} can reach each other"));
            self.long_outage |= self.now - since >= SHORT;
        }
    }

    /// The kernel of a process that has ended answers for it.
    fn refuse(&mut self, node: usize, event: Ev) {
        match event {
            Ev::Syn {
                node: from, conn, ..
            } => self.lose(from, conn, 111),
            Ev::Datagram { from, data, .. } => {
                let sender = node_at(from.ip());
                let now = self.clock(sender);
                let reached = self.nodes[sender].alive && self.nodes[sender].stopped.is_none();
                if reached
                    && (self.ties || !self.is_cut(node, sender))
                    && let Some(endpoint) = &mut self.nodes[sender].endpoint
                {
                    endpoint.handle_refused(now, SocketAddr::new(ip(node), CONTROL), &data);
                    self.drive(sender);
                }
            }
            _ => {}
        }
    }

    fn do_kill(&mut self, a: usize, b: usize) {
        for (node, peer) in [(a, b), (b, a)] {
            self.notice(node, peer, Cause::Errno(104), 20 * MS);
        }
    }

    fn notice(&mut self, node: usize, peer: usize, cause: Cause, within: u64) {
        let transport = self.nodes[node].transports[&peer];
        let event = Ev::Fault {
            node,
            peer,
            transport,
            cause,
        };
        self.later(0, within, event);
    }

    fn at_node(&mut self, node: usize, event: Ev) {
        let now = self.clock(node);
        if node == self.witness_at() {
            return self.at_witness(now, event);
        }
        let Some(endpoint) = &mut self.nodes[node].endpoint else {
            return;
        };
        match event {
            Ev::Datagram { from, data, .. } => {
                let local = SocketAddr::new(ip(node), CONTROL);
                endpoint.handle_datagram(now, from, local, &data);
            }
            Ev::Syn {
                node: from, conn, ..
            } => self.accept(node, from, conn),
            Ev::Message { conn, data, .. } => endpoint.handle_message(now, conn, &data),
            Ev::ConnLost { conn, errno, .. } => {
                // An end that both have caused is of no more interest.
                let known = self.nodes[node].conns.remove(&conn).is_some();
                let endpoint = self.nodes[node]
                    .endpoint
                    .as_mut()
                    .filter(|_| known || errno != 0);
                if let Some(endpoint) = endpoint {
                    endpoint.handle_conn_lost(now, conn, errno);
                }
            }
            Ev::Suspended(_, flow) => endpoint.handle_suspended(now, flow),
            Ev::Drained(_, flow) => endpoint.handle_drained(now, flow, 0, 0),
            Ev::Installed(_, flow) => endpoint.handle_installed(now, flow, 0),
            Ev::Timer(_) => endpoint.handle_timeout(now),
            Ev::Fault {
                peer,
                transport,
                cause,
                ..
            } => {
                let stands = self.nodes[node].transports[&peer] == transport;
                // A stall is over when the network is back, but on a relayed flow only a resume ends it.
                let relayed = self.is_relayed(node, peer);
                let gone = cause == Cause::Stall && !self.is_cut(node, peer) && !relayed;
                if stands && !gone {
                    self.say(format!("{node}: fault to {peer}: {cause}"));
                    let endpoint = self.nodes[node].endpoint.as_mut();
                    endpoint
                        .expect("not the witness")
                        .fault(now, token(peer), cause);
                }
                if stands && cause == Cause::Stall && !gone {
                    // The front end reports a stall again and again.
                    let again = Ev::Fault {
                        node,
                        peer,
                        transport,
                        cause,
                    };
                    self.later(S, 2 * S, again);
                }
            }
            _ => {}
        }
    }

    fn at_witness(&mut self, now: Time, event: Ev) {
        if self.mutation == Some(Mutation::WitnessForgets) {
            self.witness = Witness::new(key(), [9; 32]);
        }
        match event {
            Ev::Datagram { from, data, .. } => self.witness.handle_datagram(now, from, &data),
            Ev::Timer(_) => self.witness.handle_timeout(now),
            _ => {}
        }
    }

    fn accept(&mut self, node: usize, from: usize, conn: ConnId) {
        self.nodes[node].accepted += 1;
        let incoming = ConnId::incoming(self.nodes[node].accepted);
        // Given up meanwhile.
        if !self.nodes[from].conns.contains_key(&conn) {
            return;
        }
        let relayed = self.nodes[from].conns[&conn].2;
        self.nodes[from]
            .conns
            .insert(conn, (node, incoming, relayed));
        self.nodes[node]
            .conns
            .insert(incoming, (from, conn, relayed));
        let now = self.clock(node);
        if let Some(endpoint) = &mut self.nodes[node].endpoint {
            let at = match relayed {
                true => OtherLocator::new(TransportKind::RELAY, &[9]).map(Locator::from),
                false => Some(SocketAddr::new(ip(from), 9).into()),
            };
            endpoint.handle_incoming(now, incoming, at.expect("a locator"));
        }
        self.establish(from, conn);
    }

    /// The kernel of the other end has answered the SYN.
    fn establish(&mut self, node: usize, conn: ConnId) {
        let now = self.clock(node);
        let wanted = self.nodes[node].conns.contains_key(&conn);
        let runs = self.nodes[node].alive && self.nodes[node].stopped.is_none();
        if wanted
            && runs
            && let Some(endpoint) = &mut self.nodes[node].endpoint
        {
            endpoint.handle_connected(now, conn);
            self.drive(node);
        }
    }

    fn lose(&mut self, node: usize, conn: ConnId, errno: i32) {
        self.later(MS / 10, 2 * MS, Ev::ConnLost { node, conn, errno });
    }

    fn say(&self, text: String) {
        if self.trace {
            println!("{:>10} {text}", self.now);
        }
    }

    /// Carries out what a process asks for.
    fn drive(&mut self, node: usize) {
        if !self.nodes[node].alive || self.nodes[node].stopped.is_some() {
            return;
        }
        if node == self.witness_at() {
            let from = SocketAddr::new(ip(node), CONTROL);
            while let Some((to, data)) = self.witness.poll_datagram() {
                self.send(node, from, to, &data);
            }
        } else {
            while let Some(action) = self.poll(node) {
                self.act(node, action);
            }
            while let Some((flow, event)) = self.poll_event(node) {
                self.say(format!("{node}: {flow:?} {event:?}"));
                self.count(node, flow.0 as usize, &event);
            }
        }
        let next = match &self.nodes[node].endpoint {
            Some(endpoint) => endpoint.poll_timeout(),
            None => self.witness.poll_timeout(),
        };
        if let Some(time) = next {
            let clock = &self.nodes[node];
            let due = (time.0.saturating_sub(clock.offset) * 1000).div_ceil(clock.rate);
            let due = due.max(self.now + 1);
            let armed = self.nodes[node].armed.filter(|armed| *armed > self.now);
            if armed.is_none_or(|armed| due < armed) {
                self.nodes[node].armed = Some(due);
                self.at(due, Ev::Timer(node));
            }
        }
    }

    fn poll(&mut self, node: usize) -> Option<Action> {
        self.nodes[node].endpoint.as_mut()?.poll_action()
    }

    fn poll_event(&mut self, node: usize) -> Option<(FlowToken, Event)> {
        let (flow, _, event) = self.nodes[node].endpoint.as_mut()?.poll_event()?;
        Some((flow, event))
    }

    fn count(&mut self, node: usize, peer: usize, event: &Event) {
        match event {
            Event::Resume { .. } => self.stats.resumes += 1,
            Event::Escalate { reason, .. } => {
                self.stats.peer_lost += u64::from(*reason == EscalateReason::PeerLost);
                self.nodes[node].gave_up.insert(peer, *reason);
            }
            _ => {}
        }
    }

    fn send(&mut self, node: usize, from: SocketAddr, to: SocketAddr, data: &[u8]) {
        let peer = node_at(to.ip());
        if let Ok(parsed) = wire::parse(data) {
            self.say(format!("{node} -> {peer}: {:?}", parsed.message.kind()));
        }
        let copies = 1 + u64::from(self.dice.chance(self.loss / 4));
        for _ in 0..copies {
            if self.is_cut(node, peer) && !self.ties || self.dice.chance(self.loss) {
                continue;
            }
            let event = Ev::Datagram {
                to: peer,
                from,
                data: data.to_vec(),
            };
            self.later(MS / 10, 5 * MS, event);
        }
    }

    fn act(&mut self, node: usize, action: Action) {
        match action {
            Action::Datagram { to, from, data } => {
                let port = from.map_or(CONTROL, |from| from.port());
                let from = SocketAddr::new(ip(node), port.max(1));
                self.send(node, from, to, &data);
            }
            Action::Connect { conn, path, .. } => {
                let (to, relayed) = match path.to {
                    Locator::Tcp(to) => (node_at(to.ip()), false),
                    Locator::Other(other) => (usize::from(other.bytes()[0]), true),
                };
                self.nodes[node].conns.insert(conn, (to, conn, relayed));
                // Otherwise the SYN is lost: the endpoint replaces the connection.
                let fails = relayed && self.mutation == Some(Mutation::NoRelay);
                if !self.is_blocked(node, to, relayed) && !fails {
                    self.later(MS / 10, 3 * MS, Ev::Syn { node, conn, to });
                }
            }
            Action::Send { conn, data } => self.send_on(node, conn, data),
            Action::Flush { conn } => {
                let now = self.clock(node);
                if let Some(endpoint) = &mut self.nodes[node].endpoint {
                    endpoint.handle_flushed(now, conn);
                }
            }
            Action::Close { conn } => {
                if let Some((peer, other, relayed)) = self.nodes[node].conns.remove(&conn)
                    && other != conn
                    && !self.is_blocked(node, peer, relayed)
                {
                    // After all messages.
                    let (from, to) = (2 * MS + 1, 4 * MS);
                    let event = Ev::ConnLost {
                        node: peer,
                        conn: other,
                        errno: 0,
                    };
                    self.later(from, to, event);
                }
            }
            Action::Suspend { token } => self.later(0, 2 * MS, Ev::Suspended(node, token)),
            Action::Drain { token } => self.later(0, 2 * MS, Ev::Drained(node, token)),
            Action::Install { token, conn, .. } => {
                let known = self.nodes[node].conns.remove(&conn);
                let relayed = known.is_some_and(|(_, _, relayed)| relayed);
                self.next_transport += 1;
                let peer = token.0 as usize;
                let transport = self.next_transport;
                self.nodes[node].transports.insert(peer, transport);
                self.later(0, 2 * MS, Ev::Installed(node, token));
                let was = match relayed {
                    true => !self.nodes[node].relayed.insert(peer),
                    false => self.nodes[node].relayed.remove(&peer),
                };
                self.stats.relayed += u64::from(relayed && !was);
                self.stats.came_back += u64::from(!relayed && was);
                if self.is_blocked(node, peer, relayed) {
                    self.notice(node, peer, Cause::Errno(110), 2 * S);
                } else if relayed && self.dice.chance(50) {
                    // Bytes that nobody acknowledges.
                    self.notice(node, peer, Cause::Stall, 2 * S);
                }
            }
            Action::Fence { reason, tell } => {
                if self.mutation == Some(Mutation::LostGoesOn) {
                    return;
                }
                self.say(format!("{node} is fenced: {reason:?}"));
                self.stats.fenced += 1;
                self.stats.cut_off += u64::from(reason == EscalateReason::NoWitness);
                self.nodes[node].fenced = Some(reason);
                if let Some((to, data)) = tell {
                    let from = SocketAddr::new(ip(node), CONTROL);
                    self.send(node, from, to, &data);
                }
                self.nodes[node].alive = self.nodes[node].when_lost == Some(WhenLost::Error);
            }
            _ => {}
        }
    }

    fn send_on(&mut self, node: usize, conn: ConnId, data: Vec<u8>) {
        let Some((peer, other, relayed)) = self.nodes[node].conns.get(&conn).copied() else {
            return;
        };
        if self.is_blocked(node, peer, relayed) {
            return;
        }
        let event = Ev::Message {
            node: peer,
            conn: other,
            data,
        };
        // In order: each message comes before any later one.
        self.at(self.now + 2 * MS, event);
    }

    fn judge(&mut self) -> Result<(), String> {
        let count = self.witness_at();
        let goes_on = |node: &Node| node.alive && node.fenced.is_none();
        for a in 0..count {
            for b in (0..count).filter(|b| *b != a) {
                let (one, other) = (&self.nodes[a], &self.nodes[b]);
                if !(goes_on(one) && goes_on(other)) {
                    continue;
                }
                if let Some(reason) = one.gave_up.get(&b) {
                    return Err(format!("{a} has given {b} up ({reason:?}), and both go on"));
                }
                if self.is_blocked(a, b, self.is_relayed(a, b)) {
                    return Err(format!(
                        "{a} and {b} cannot reach each other, and both go on"
                    ));
                }
                let endpoint = one.endpoint.as_ref().expect("not the witness");
                if endpoint.state(token(b)) != Some(State::Live) {
                    let state = endpoint.state(token(b));
                    return Err(format!("{a} and {b} go on, but their flow is {state:?}"));
                }
            }
        }
        self.judge_need()
    }

    /// Whether a process was fenced that need not have been.
    fn judge_need(&mut self) -> Result<(), String> {
        let short = !self.long_outage && self.cut.is_empty();
        self.stats.healed += u64::from(short && self.stats.resumes > 0);
        let fenced = self.nodes.iter().filter(|node| node.fenced.is_some());
        let fenced = fenced.count();
        self.stats.ties += u64::from(self.ties && fenced > 0);
        if short && fenced > 0 {
            return Err("a process is fenced, and all outages were short".to_owned());
        }
        if self.relays && !self.witness_cut && self.stats.crashes == 0 && fenced > 0 {
            return Err("all processes reach the witness, and one is fenced".to_owned());
        }
        if fenced == 2 && self.nodes.len() == 3 && !self.witness_cut && self.stats.crashes == 0 {
            return Err("two processes reach the witness, and both are fenced".to_owned());
        }
        Ok(())
    }
}
