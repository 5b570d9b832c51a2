//! A switch is reset, and a whole cluster resumes at once.
//!
//! ```sh
//! cargo run --release -p slim-core --example storm -- --flows 1000000 --endpoints 100000 storm.csv storm.svg
//! ```
//!
//! The endpoints are real: every flow is negotiated and resumed by `slim_core::endpoint::Endpoint`,
//! with its messages, proofs and timers. What is a model is everything around them: a network with one
//! latency and no loss but the hole; agents that do one thing after the other, each of which takes
//! some microseconds (see [`cost`]); listeners with a backlog, and kernels that send a dropped SYN
//! again after 1, 3 and 7 s; applications that notice at random within `--notice` milliseconds.
//!
//! Endpoint 0 is a server: `--hot` others have one flow with it. All other flows are between
//! endpoints chosen at random. With `--hole 0` all connections are reset at once, and both ends
//! notice; otherwise the network swallows everything for as many milliseconds and every flow is
//! found to be stalled by one of its ends.
//!
//! The first file gets what happened in each 10 ms, the second a picture of it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use std::{env, fs, process};

use slim_core::config::Config;
use slim_core::endpoint::{Action, Endpoint};
use slim_core::wire::{self, Kind};
use slim_core::{Cause, ConnId, EndpointId, FlowToken, Role, Time};

const LATENCY: Duration = Duration::from_micros(25);
const BACKLOG: usize = 4096;
const SYN_AGAIN: [u64; 3] = [1, 2, 4];
const CONTROL: u16 = 701;
const RESUME: u16 = 700;
const SERVICE: u16 = 80;
const ECONNRESET: i32 = 104;
/// Width of a column of the table.
const STEP: u64 = 10_000;
/// Nothing that takes longer is of interest.
const END: Time = Time(180_000_000);

/// What an agent needs for something, in microseconds.
mod cost {
    pub const DATAGRAM: u64 = 8;
    pub const CONNECT: u64 = 30;
    pub const ACCEPT: u64 = 25;
    pub const MESSAGE: u64 = 10;
    pub const SWAP: u64 = 40;
    pub const FAULT: u64 = 10;
    pub const OTHER: u64 = 1;
}

struct Options {
    flows: usize,
    endpoints: usize,
    hot: usize,
    hole: u64,
    notice: u64,
    files: Vec<String>,
}

/// Something for an agent to do.
enum Work {
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

enum Event {
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
    /// The same connection at the other end.
    twins: HashMap<ConnId, (usize, ConnId)>,
}

/// What happened in one step of time.
#[derive(Clone, Copy, Default)]
struct Step {
    resumed: u64,
    datagrams: u64,
    syns: u64,
    dropped: u64,
    messages: u64,
}

/// One of the columns.
type Value = fn(&Step) -> u64;

struct World {
    now: Time,
    nodes: Vec<Node>,
    events: BinaryHeap<Reverse<(Time, u64)>>,
    what: HashMap<u64, Event>,
    number: u64,
    steps: Vec<Step>,
    kinds: HashMap<Kind, u64>,
    back_at: Time,
    given_up: u64,
    /// Ends that have a new connection: whoever notices late has nothing to notice.
    resumed: HashSet<(usize, FlowToken)>,
    last: Time,
    longest_backlog: usize,
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

/// Small, and good enough to choose peers and times with.
struct Dice(u64);

impl Dice {
    fn up_to(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most.max(1)
    }
}

impl World {
    fn new(endpoints: usize, back_at: Time) -> Self {
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
            Node {
                endpoint: Endpoint::new(config, id, vec![address(n)], RESUME, CONTROL, seed),
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

    /// A flow that is live at both ends.
    fn flow(&mut self, n: usize, a: usize, b: usize) {
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
        for (from, to) in [(a, b), (b, a)] {
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

    fn at(&mut self, time: Time, event: Event) {
        self.number += 1;
        self.events.push(Reverse((time, self.number)));
        self.what.insert(self.number, event);
    }

    fn is_hole(&self) -> bool {
        self.now < self.back_at
    }

    fn run(&mut self, wanted: u64) {
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

    /// A kernel has a SYN for another one.
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
                    // Given up meanwhile.
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
            Action::Connect { conn, remote, .. } => {
                let to = number(remote.ip());
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

    fn table(&self) -> String {
        let mut out = String::from("ms,ends_resumed,datagrams,messages,syns,syns_dropped\n");
        for (n, step) in self.steps.iter().enumerate() {
            let Step {
                resumed,
                datagrams,
                messages,
                syns,
                dropped,
            } = step;
            let ms = n as u64 * STEP / 1000;
            let _ = writeln!(
                out,
                "{ms},{resumed},{datagrams},{messages},{syns},{dropped}"
            );
        }
        out
    }

    /// How many ends were resumed, and what was sent for that, over time; each to its own scale.
    fn picture(&self) -> String {
        let (width, height, left, top) = (860.0, 320.0, 20.0, 40.0);
        let columns = self.steps.len().max(2) as f64 - 1.0;
        let series: [(&str, &str, Value); 4] = [
            ("ends resumed", "#1b7f3b", |s| s.resumed),
            ("datagrams", "#1f5fbf", |s| s.datagrams),
            ("SYNs", "#bf7a1f", |s| s.syns),
            ("SYNs dropped", "#c0282d", |s| s.dropped),
        ];
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 {}\" font-family=\"sans-serif\" \
             font-size=\"13\"><rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            top + height + 40.0
        );
        for (place, (name, color, value)) in series.into_iter().enumerate() {
            let most = self.steps.iter().map(value).max().unwrap_or(0);
            let x = left + 215.0 * place as f64;
            let _ = writeln!(
                out,
                "<text x=\"{x}\" y=\"22\" fill=\"{color}\">{name}, most {most} in 10 ms</text>"
            );
            let points = self.steps.iter().enumerate().map(|(n, step)| {
                let x = left + width * n as f64 / columns;
                let y = top + height * (1.0 - value(step) as f64 / most.max(1) as f64);
                format!("{x:.1},{y:.1} ")
            });
            let points: String = points.collect();
            let _ = writeln!(
                out,
                "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" points=\"{points}\"/>"
            );
        }
        let seconds = self.steps.len() as f64 * STEP as f64 / 1e6;
        let y = top + height + 22.0;
        let _ = writeln!(
            out,
            "<text x=\"{left}\" y=\"{y}\">0 s</text><text x=\"820\" y=\"{y}\">{seconds:.2} s</text></svg>"
        );
        out
    }
}

fn main() {
    let options = options();
    let back_at = Time(options.hole * 1000);
    let mut world = World::new(options.endpoints, back_at);
    let mut dice = Dice(0x5eed_5eed_5eed);
    let mut pairs = Vec::new();
    let others = options.endpoints as u64 - 1;
    for n in 0..options.flows {
        let (a, b) = if n < options.hot {
            (1 + n % others as usize, 0)
        } else {
            let a = 1 + dice.up_to(others);
            let b = 1 + (a - 1 + 1 + dice.up_to(others - 1)) % others;
            (a as usize, b as usize)
        };
        world.flow(n, a, b);
        pairs.push((a, b));
    }
    for (n, (a, b)) in pairs.into_iter().enumerate() {
        let token = FlowToken(n as u64);
        if options.hole == 0 {
            for end in [a, b] {
                let at = Time(dice.up_to(options.notice * 1000));
                let work = Work::Fault(token, Cause::Errno(ECONNRESET));
                world.at(at, Event::Arrive(end, work));
            }
        } else {
            let at = Time(1_000_000 + dice.up_to(options.notice * 1000));
            let end = if dice.up_to(2) == 0 { a } else { b };
            world.at(at, Event::Arrive(end, Work::Fault(token, Cause::Stall)));
        }
    }
    let ends = 2 * options.flows as u64;
    world.run(ends);
    world.report(&options);
}

impl World {
    fn report(&self, options: &Options) {
        let total = |value: Value| self.steps.iter().map(value).sum::<u64>();
        let most = |value: Value| self.steps.iter().map(value).max().unwrap_or(0);
        println!(
            "{} flows over {} endpoints, {} with one of them; hole {} ms, noticed within {} ms",
            options.flows, options.endpoints, options.hot, options.hole, options.notice
        );
        println!(
            "ends resumed {} of {}, given up {}; the last {:.3} s after the network was back",
            self.resumed.len(),
            2 * options.flows,
            self.given_up,
            (self.last.0 as f64 - self.back_at.0 as f64) / 1e6
        );
        for part in [50, 90, 99] {
            let mut so_far = 0;
            let wanted = self.resumed.len() as u64 * part / 100;
            let at = self.steps.iter().position(|step| {
                so_far += step.resumed;
                so_far >= wanted
            });
            let ms = at.unwrap_or(0) as f64 * STEP as f64 / 1000.0 - self.back_at.0 as f64 / 1000.0;
            println!("{part} % within {ms:.0} ms");
        }
        println!(
            "datagrams {} (most in 10 ms {}), messages on connections {}, SYNs {} (most in 10 ms {}), dropped {}",
            total(|s| s.datagrams),
            most(|s| s.datagrams),
            total(|s| s.messages),
            total(|s| s.syns),
            most(|s| s.syns),
            total(|s| s.dropped)
        );
        println!("longest queue of a listener {}", self.longest_backlog);
        let mut kinds: Vec<_> = self.kinds.iter().collect();
        kinds.sort_by_key(|(_, count)| Reverse(**count));
        println!("{kinds:?}");
        for (file, text) in options.files.iter().zip([self.table(), self.picture()]) {
            if let Err(e) = fs::write(file, text) {
                eprintln!("{file}: {e}");
                process::exit(1);
            }
        }
    }
}

fn options() -> Options {
    let mut options = Options {
        flows: 100_000,
        endpoints: 10_000,
        hot: 5000,
        hole: 0,
        notice: 10,
        files: Vec::new(),
    };
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if !argument.starts_with("--") {
            options.files.push(argument);
            continue;
        }
        let Some(value) = arguments
            .next()
            .and_then(|value| value.parse::<usize>().ok())
        else {
            usage();
        };
        match argument.as_str() {
            "--flows" => options.flows = value,
            "--endpoints" => options.endpoints = value.max(3),
            "--hot" => options.hot = value,
            "--hole" => options.hole = value as u64,
            "--notice" => options.notice = value as u64,
            _ => usage(),
        }
    }
    options.hot = options.hot.min(options.flows);
    options
}

fn usage() -> ! {
    eprintln!(
        "usage: storm [--flows N] [--endpoints N] [--hot N] [--hole MS] [--notice MS] [TABLE.csv [PICTURE.svg]]"
    );
    process::exit(2);
}
