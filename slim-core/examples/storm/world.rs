//! The endpoints, and the model of everything around them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Action, Endpoint};
use slim_core::transport::Transports;
use slim_core::wire::{self, Kind};
use slim_core::{Cause, ConnId, EndpointId, FlowToken, Role, Time};

const LATENCY: Duration = Duration::from_micros(25);
const BACKLOG: usize = 4096;
const SYN_AGAIN: [u64; 3] = [1, 2, 4];
const CONTROL: u16 = 701;
const RESUME: u16 = 700;
const SERVICE: u16 = 80;
/// Width of a column of the table, in microseconds.
pub const STEP: u64 = 10_000;
/// When the simulation stops.
const END: Time = Time(180_000_000);

/// Time that an agent needs for each kind of work, in microseconds.
mod cost {
    pub const DATAGRAM: u64 = 8;
    pub const CONNECT: u64 = 30;
    pub const ACCEPT: u64 = 25;
    pub const MESSAGE: u64 = 10;
    pub const SWAP: u64 = 40;
    pub const FAULT: u64 = 10;
    pub const OTHER: u64 = 1;
}

/// Work for an agent.
pub enum Work {
    Datagram {
        from: SocketAddr,
        to: SocketAddr,
        data: Vec<u8>,
    },
    Accept {
        from: usize,
        conn: ConnId,
    },
    Connected(ConnId),
    Message(ConnId, Vec<u8>),
    Lost(ConnId),
    Flushed(ConnId),
    Fault(FlowToken, Cause),
    Timer,
}

pub enum Event {
    Arrive(usize, Work),
    Syn {
        from: usize,
        conn: ConnId,
        to: usize,
        tries: usize,
    },
    Timer(usize),
    Work(usize),
}

struct Node {
    endpoint: Endpoint,
    inbox: VecDeque<Work>,
    working: bool,
    free_at: Time,
    alarm: Option<Time>,
    backlog: usize,
    accepted: u64,
    /// For each connection, the other end's number and the connection's name there.
    twins: HashMap<ConnId, (usize, ConnId)>,
}

/// What happened in one step of time.
#[derive(Clone, Copy, Default)]
pub struct Step {
    pub resumed: u64,
    pub datagrams: u64,
    pub syns: u64,
    pub dropped: u64,
    pub messages: u64,
}

pub struct World {
    now: Time,
    nodes: Vec<Node>,
    events: BinaryHeap<Reverse<(Time, u64)>>,
    what: HashMap<u64, Event>,
    number: u64,
    pub steps: Vec<Step>,
    pub kinds: HashMap<Kind, u64>,
    pub back_at: Time,
    pub given_up: u64,
    /// Ends that have a new connection. A fault that an application notices later has no effect there.
    pub resumed: HashSet<(usize, FlowToken)>,
    pub last: Time,
    pub longest_backlog: usize,
}

fn address(n: usize) -> IpAddr {
    Ipv4Addr::from(0x0a00_0000 + n as u32 + 1).into()
}

fn number(ip: IpAddr) -> usize {
    match ip {
        IpAddr::V4(ip) => u32::from(ip) as usize - 0x0a00_0001,
        IpAddr::V6(_) => unreachable!("there is none here"),
    }
}

impl World {
    pub fn new(endpoints: usize, back_at: Time) -> Self {
        let node = |n: usize| {
            let mut host = [0; 16];
            host[..8].copy_from_slice(&(n as u64).to_be_bytes());
            let id = EndpointId {
                host,
                pid: 1,
                incarnation: n as u64,
            };
            let mut seed = [7; 32];
            seed[..8].copy_from_slice(&(n as u64).to_be_bytes());
            let config = Config::default();
            let own = Transports::tcp(vec![address(n)], RESUME, CONTROL);
            Node {
                endpoint: Endpoint::new(config, id, own, seed),
                inbox: VecDeque::new(),
                working: false,
                free_at: Time(0),
                alarm: None,
                backlog: 0,
                accepted: 0,
                twins: HashMap::new(),
            }
        };
        World {
            now: Time(0),
            nodes: (0..endpoints).map(node).collect(),
            events: BinaryHeap::new(),
            what: HashMap::new(),
            number: 0,
            steps: Vec::new(),
            kinds: HashMap::new(),
            back_at,
            given_up: 0,
            resumed: HashSet::new(),
            last: Time(0),
            longest_backlog: 0,
        }
    }

    /// Makes a flow that is live at both ends.
    pub fn flow(&mut self, n: usize, a: usize, b: usize) {
        let token = FlowToken(n as u64);
        let ends = [
            SocketAddr::new(address(a), 1024 + (n % 60_000) as u16),
            SocketAddr::new(address(b), SERVICE),
        ];
        let now = self.now;
        self.nodes[b]
            .endpoint
            .open(now, token, Role::Acceptor, ends[1], ends[0]);
        self.nodes[a]
            .endpoint
            .open(now, token, Role::Connector, ends[0], ends[1]);
        // HELLO, HELLO_ACK, HELLO_DONE.
        for (from, to) in [(a, b), (b, a), (a, b)] {
            let source = SocketAddr::new(address(from), CONTROL);
            while let Some(action) = self.nodes[from].endpoint.poll_action() {
                if let Action::Datagram {
                    to: local, data, ..
                } = action
                {
                    self.nodes[to]
                        .endpoint
                        .handle_datagram(now, source, local, &data);
                }
            }
        }
        for n in [a, b] {
            while self.nodes[n].endpoint.poll_action().is_some() {}
            while self.nodes[n].endpoint.poll_event().is_some() {}
        }
    }

    fn step(&mut self) -> &mut Step {
        let n = (self.now.0 / STEP) as usize;
        if self.steps.len() <= n {
            self.steps.resize(n + 1, Step::default());
        }
        &mut self.steps[n]
    }

    pub fn at(&mut self, time: Time, event: Event) {
        self.number += 1;
        self.events.push(Reverse((time, self.number)));
        self.what.insert(self.number, event);
    }

    fn is_hole(&self) -> bool {
        self.now < self.back_at
    }

    pub fn run(&mut self, wanted: u64) {
        while let Some(Reverse((time, number))) = self.events.pop() {
            self.now = time;
            if self.now > END || self.resumed.len() as u64 + self.given_up >= wanted {
                return;
            }
            match self.what.remove(&number) {
                Some(Event::Arrive(n, work)) => self.give(n, work),
                Some(Event::Syn {
                    from,
                    conn,
                    to,
                    tries,
                }) => self.syn(from, conn, to, tries),
                Some(Event::Timer(n)) if self.nodes[n].alarm == Some(time) => {
                    self.nodes[n].alarm = None;
                    self.give(n, Work::Timer);
                }
                Some(Event::Timer(_)) => {}
                Some(Event::Work(n)) => self.work(n),
                None => {}
            }
        }
    }

    fn give(&mut self, n: usize, work: Work) {
        let node = &mut self.nodes[n];
        node.inbox.push_back(work);
        if !node.working {
            node.working = true;
            let at = node.free_at.max(self.now);
            self.at(at, Event::Work(n));
        }
    }

    /// A kernel sends a SYN to another one.
    fn syn(&mut self, from: usize, conn: ConnId, to: usize, tries: usize) {
        if !self.nodes[from].twins.contains_key(&conn) {
            return;
        }
        self.step().syns += 1;
        let full = self.nodes[to].backlog >= BACKLOG;
        if self.is_hole() || full {
            self.step().dropped += 1;
            if let Some(wait) = SYN_AGAIN.get(tries) {
                let again = self.now + Duration::from_secs(*wait);
                self.at(
                    again,
                    Event::Syn {
                        from,
                        conn,
                        to,
                        tries: tries + 1,
                    },
                );
            }
            return;
        }
        self.nodes[to].backlog += 1;
        self.longest_backlog = self.longest_backlog.max(self.nodes[to].backlog);
        self.at(
            self.now + LATENCY,
            Event::Arrive(to, Work::Accept { from, conn }),
        );
        self.at(
            self.now + LATENCY * 2,
            Event::Arrive(from, Work::Connected(conn)),
        );
    }

    /// An agent does the next thing that waits for it.
    fn work(&mut self, n: usize) {
        let now = self.now;
        let node = &mut self.nodes[n];
        let Some(work) = node.inbox.pop_front() else {
            node.working = false;
            return;
        };
        let mut micros = match &work {
            Work::Datagram { .. } => cost::DATAGRAM,
            Work::Accept { .. } => cost::ACCEPT,
            Work::Message(..) => cost::MESSAGE,
            Work::Fault(..) => cost::FAULT,
            Work::Connected(_) | Work::Lost(_) | Work::Flushed(_) | Work::Timer => cost::OTHER,
        };
        let endpoint = &mut node.endpoint;
        match work {
            Work::Datagram { from, to, data } => endpoint.handle_datagram(now, from, to, &data),
            Work::Accept { from, conn } => {
                node.backlog -= 1;
                node.accepted += 1;
                let own = ConnId::incoming(node.accepted);
                node.twins.insert(own, (from, conn));
                endpoint.handle_incoming(now, own, SocketAddr::new(address(from), 1));
                match self.nodes[from].twins.get_mut(&conn) {
                    Some(twin) => *twin = (n, own),
                    // The initiator has given the connection up meanwhile.
                    None => self.at(now + LATENCY, Event::Arrive(n, Work::Lost(own))),
                }
            }
            Work::Connected(conn) => endpoint.handle_connected(now, conn),
            Work::Message(conn, data) if node.twins.contains_key(&conn) => {
                endpoint.handle_message(now, conn, &data);
            }
            Work::Lost(conn) if node.twins.remove(&conn).is_some() => {
                endpoint.handle_conn_lost(now, conn, 0);
            }
            Work::Message(..) | Work::Lost(_) => {}
            Work::Flushed(conn) => endpoint.handle_flushed(now, conn),
            Work::Fault(token, _) if self.resumed.contains(&(n, token)) => {}
            Work::Fault(token, cause) => endpoint.fault(now, token, cause),
            Work::Timer => endpoint.handle_timeout(now),
        }
        while let Some(action) = self.nodes[n].endpoint.poll_action() {
            micros += self.act(n, action);
        }
        while self.nodes[n].endpoint.poll_event().is_some() {}
        let next = self.nodes[n].endpoint.poll_timeout();
        if self.nodes[n].alarm != next {
            self.nodes[n].alarm = next;
            if let Some(at) = next {
                self.at(at.max(now), Event::Timer(n));
                self.nodes[n].alarm = Some(at.max(now));
            }
        }
        let node = &mut self.nodes[n];
        node.free_at = now + Duration::from_micros(micros);
        let at = node.free_at;
        self.at(at, Event::Work(n));
    }

    fn act(&mut self, n: usize, action: Action) -> u64 {
        let now = self.now;
        let arrival = now + LATENCY;
        match action {
            Action::Datagram { to, from, data } => {
                self.step().datagrams += 1;
                self.count(&data);
                if !self.is_hole() {
                    let from = from.unwrap_or(SocketAddr::new(address(n), CONTROL));
                    let work = Work::Datagram { from, to, data };
                    self.at(arrival, Event::Arrive(number(to.ip()), work));
                }
                cost::DATAGRAM
            }
            Action::Connect { conn, path, .. } => {
                let to = number(path.to.tcp().expect("there is no other kind").ip());
                self.nodes[n].twins.insert(conn, (to, ConnId(0)));
                self.at(
                    arrival,
                    Event::Syn {
                        from: n,
                        conn,
                        to,
                        tries: 0,
                    },
                );
                cost::CONNECT
            }
            Action::Send { conn, data } => {
                self.step().messages += 1;
                self.count(&data);
                if let Some(&(to, twin)) = self.nodes[n].twins.get(&conn)
                    && !self.is_hole()
                {
                    self.at(arrival, Event::Arrive(to, Work::Message(twin, data)));
                }
                cost::OTHER
            }
            Action::Close { conn } => {
                if let Some((to, twin)) = self.nodes[n].twins.remove(&conn) {
                    self.at(arrival, Event::Arrive(to, Work::Lost(twin)));
                }
                cost::OTHER
            }
            Action::Flush { conn } => {
                self.give(n, Work::Flushed(conn));
                cost::OTHER
            }
            Action::Suspend { token } => {
                self.nodes[n].endpoint.handle_suspended(now, token);
                cost::OTHER
            }
            Action::Verify { token } => {
                self.nodes[n].endpoint.handle_verified(now, token, false);
                cost::OTHER
            }
            Action::Drain { token } => {
                self.nodes[n].endpoint.handle_drained(now, token, 0, 0);
                cost::OTHER
            }
            Action::Install { token, conn, .. } => {
                self.nodes[n].twins.remove(&conn);
                self.nodes[n].endpoint.handle_installed(now, token, 0);
                if self.resumed.insert((n, token)) {
                    self.last = now;
                    self.step().resumed += 1;
                }
                cost::SWAP
            }
            Action::Escalate { .. } => {
                self.given_up += 1;
                cost::OTHER
            }
            _ => cost::OTHER,
        }
    }

    fn count(&mut self, data: &[u8]) {
        if let Ok(parsed) = wire::parse(data) {
            *self.kinds.entry(parsed.message.kind()).or_default() += 1;
        }
    }
}
