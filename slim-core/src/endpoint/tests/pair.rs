//! Two endpoints and a virtual clock. A test decides how the network behaves.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::config::Config;
use crate::endpoint::{Action, Endpoint, State};
use crate::event::Event;
use crate::ids::{ConnId, EndpointId, FlowToken, Role, Time, Verdict};
use crate::transport::{Locator, Path, TransportKind, Transports};
use crate::wire::{self, Kind, Message};

/// The connector is 0, the acceptor 1.
pub(super) const A: usize = 0;
pub(super) const B: usize = 1;
pub(super) const FLOW: FlowToken = FlowToken(7);
/// Port of the mailbox of every process that has one.
pub(super) const MAILBOX: u16 = 900;
/// A little more than the time for HELLO.
pub(super) const HELLO_TIME: Duration = Duration::from_millis(3100);
pub(super) const RESET: i32 = 104;
pub(super) const REFUSED: i32 = 111;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Net {
    Works,
    /// All packets are dropped.
    Silent,
    /// No socket has the port, and the host refuses.
    Refuses,
}

/// The byte counts of a front end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) received: u64,
    pub(super) sent: u64,
}

pub(super) struct Pair {
    pub(super) now: Time,
    pub(super) ends: [Endpoint; 2],
    /// The network for datagrams, by the side they go to.
    pub(super) udp: [Net; 2],
    /// The network for TCP connections, by the side they go to.
    pub(super) tcp: [Net; 2],
    /// Addresses to which all packets are dropped.
    pub(super) silent: BTreeSet<IpAddr>,
    /// The network for connections of other kinds, by the side they go to.
    pub(super) other: [Net; 2],
    /// Kinds besides TCP of which no connection can be made.
    pub(super) dead: Vec<TransportKind>,
    /// The firewall of a side: what becomes of connections to it, and of datagrams that answer none of its own.
    pub(super) guard: [Option<Net>; 2],
    /// Datagrams sent so far: sender, source, destination.
    pub(super) asked: BTreeSet<(usize, SocketAddr, SocketAddr)>,
    /// Number of datagrams that a side takes in a row, as its socket's receive buffer would.
    pub(super) room: usize,
    /// Number of datagrams that a side still takes in this row.
    left: [usize; 2],
    /// Whether front ends and drivers answer actions by themselves.
    pub(super) answers: bool,
    /// Replays are written at once.
    pub(super) replays: bool,
    /// The answer to `Verify`: whether the peer's kernel has ended the stream itself.
    pub(super) kernels_answer: bool,
    pub(super) counts: [Counts; 2],
    pub(super) done: [Vec<Action>; 2],
    pub(super) events: [Vec<Event>; 2],
    /// Messages that reached each side.
    pub(super) heard: [Vec<Vec<u8>>; 2],
    /// The id of each side's connection at the other side.
    pub(super) twin: BTreeMap<(usize, ConnId), ConnId>,
    /// Ends of connections of another kind than TCP.
    of_other: BTreeSet<(usize, ConnId)>,
    accepted: u64,
}

pub(super) fn id(n: usize) -> EndpointId {
    EndpointId {
        host: [n as u8 + 1; 16],
        pid: 1,
        incarnation: 10 + n as u64,
    }
}

/// The connector's and the acceptor's end of the connection.
pub(super) fn addrs() -> [SocketAddr; 2] {
    ["10.0.0.1:5000", "10.0.0.2:80"].map(|addr| addr.parse().unwrap())
}

pub(super) fn control(n: usize) -> SocketAddr {
    SocketAddr::new(addrs()[n].ip(), 701)
}

pub(super) fn endpoint(n: usize, config: Config) -> Endpoint {
    endpoint_at(id(n), vec![addrs()[n].ip()], config, n as u8)
}

/// An endpoint to replace that of a side: another process, or one with other addresses.
pub(super) fn endpoint_at(
    id: EndpointId,
    addrs: Vec<IpAddr>,
    config: Config,
    seed: u8,
) -> Endpoint {
    Endpoint::new(config, id, Transports::tcp(addrs, 700, 701), [seed; 32])
}

impl Pair {
    pub(super) fn with(configs: [Config; 2]) -> Pair {
        let [a, b] = configs;
        Pair {
            now: Time(1_000_000),
            ends: [endpoint(A, a), endpoint(B, b)],
            udp: [Net::Works; 2],
            tcp: [Net::Works; 2],
            silent: BTreeSet::new(),
            other: [Net::Works; 2],
            dead: Vec::new(),
            guard: [None; 2],
            asked: BTreeSet::new(),
            room: usize::MAX,
            left: [usize::MAX; 2],
            answers: true,
            replays: true,
            kernels_answer: false,
            counts: [Counts::default(); 2],
            done: Default::default(),
            events: Default::default(),
            heard: Default::default(),
            twin: BTreeMap::new(),
            of_other: BTreeSet::new(),
            accepted: 0,
        }
    }

    pub(super) fn new() -> Pair {
        Pair::with([Config::default(), Config::default()])
    }

    /// A pair with a flow that is live at both ends; the recorded actions, events and messages are cleared.
    pub(super) fn live() -> Pair {
        Pair::live_with(Config::default())
    }

    pub(super) fn live_with(config: Config) -> Pair {
        let mut pair = Pair::with([config.clone(), config]);
        pair.open(A);
        pair.open(B);
        pair.run();
        assert_eq!(pair.states(), [State::Live; 2]);
        pair.forget();
        pair
    }

    /// Both ends are open, and all messages of the acceptor are lost. The flow is plain TCP at the connector, because the time
    /// for HELLO is up.
    pub(super) fn given_up_by_connector() -> Pair {
        let mut pair = Pair::new();
        pair.udp[A] = Net::Silent;
        pair.open(A);
        pair.open(B);
        pair.wait(HELLO_TIME);
        assert_eq!(pair.states(), [State::Legacy, State::Negotiating]);
        pair
    }

    /// The acceptor has waited for a HELLO until its time was up.
    pub(super) fn given_up_by_acceptor() -> Pair {
        let mut pair = Pair::new();
        pair.open(B);
        pair.wait(HELLO_TIME);
        assert_eq!(pair.state(B), Some(State::Legacy));
        pair
    }

    pub(super) fn forget(&mut self) {
        self.done = Default::default();
        self.events = Default::default();
        self.heard = Default::default();
    }

    pub(super) fn open(&mut self, n: usize) {
        let role = [Role::Connector, Role::Acceptor][n];
        let (local, remote) = (addrs()[n], addrs()[1 - n]);
        self.ends[n].open(self.now, FLOW, role, local, remote);
    }

    /// Opens many flows at once, at one end.
    pub(super) fn open_many(&mut self, n: usize, flows: u64) {
        let role = [Role::Connector, Role::Acceptor][n];
        for flow in 0..flows {
            let mut ends = addrs();
            ends[A].set_port(10_000 + flow as u16);
            let (local, remote) = (ends[n], ends[1 - n]);
            let token = FlowToken(1000 + flow);
            self.ends[n].open(self.now, token, role, local, remote);
        }
    }

    /// Number of these flows that are in this state.
    pub(super) fn many(&self, n: usize, flows: u64, state: State) -> usize {
        let tokens = (0..flows).map(|flow| FlowToken(1000 + flow));
        tokens
            .filter(|token| self.ends[n].state(*token) == Some(state))
            .count()
    }

    pub(super) fn state(&self, n: usize) -> Option<State> {
        self.ends[n].state(FLOW)
    }

    pub(super) fn states(&self) -> [State; 2] {
        [0, 1].map(|n| self.state(n).unwrap())
    }

    /// Carries out all actions that are due now.
    pub(super) fn run(&mut self) {
        loop {
            let mut idle = true;
            self.left = [self.room; 2];
            for n in 0..2 {
                while let Some(action) = self.ends[n].poll_action() {
                    idle = false;
                    self.done[n].push(action.clone());
                    self.act(n, action);
                }
                while let Some((_, _, event)) = self.ends[n].poll_event() {
                    self.events[n].push(event);
                }
            }
            if idle {
                return;
            }
        }
    }

    /// Lets time pass, and carries out all actions that become due.
    pub(super) fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        self.run();
        loop {
            let next = self.ends.iter().filter_map(Endpoint::poll_timeout).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            for end in &mut self.ends {
                end.handle_timeout(self.now);
            }
            self.run();
        }
        self.now = end;
    }

    /// What becomes of a datagram that `n` sends.
    fn way(&mut self, n: usize, from: Option<SocketAddr>, to: SocketAddr) -> Net {
        let (other, from) = (1 - n, from.unwrap_or(control(n)));
        self.asked.insert((n, from, to));
        if self.silent.contains(&to.ip()) {
            return Net::Silent;
        }
        let guard = self.guard[other].filter(|_| !self.asked.contains(&(other, to, from)));
        guard.unwrap_or(self.udp[other])
    }

    /// What becomes of a connection to `n`.
    fn net_of(&self, path: &Path, n: usize) -> Net {
        match path.kind() {
            TransportKind::TCP
                if path
                    .to
                    .tcp()
                    .is_some_and(|to| self.silent.contains(&to.ip())) =>
            {
                Net::Silent
            }
            TransportKind::TCP => self.guard[n].unwrap_or(self.tcp[n]),
            kind if self.dead.contains(&kind) => Net::Refuses,
            _ => self.other[n],
        }
    }

    pub(super) fn act(&mut self, n: usize, action: Action) {
        let (now, other) = (self.now, 1 - n);
        match action {
            Action::Datagram { to, from, data } => match self.way(n, from, to) {
                Net::Works if self.left[other] == 0 => {}
                Net::Works => {
                    self.left[other] -= 1;
                    self.heard[other].push(data.clone());
                    let from = from.unwrap_or(control(n));
                    let end = &mut self.ends[other];
                    if to.port() == MAILBOX {
                        end.pairs().receive(now, from, to, &data);
                        end.take_arrivals(now);
                        end.send_seen(now);
                    } else {
                        end.handle_datagram(now, from, to, &data);
                    }
                }
                Net::Silent => {}
                Net::Refuses => self.ends[n].handle_refused(now, to, &data),
            },
            Action::Mailbox { ip } => self.ends[n].set_mailbox(ip, MAILBOX),
            Action::Connect { conn, path, .. } => match self.net_of(&path, other) {
                Net::Works => {
                    self.accepted += 1;
                    let twin = ConnId::incoming(self.accepted);
                    self.twin.insert((n, conn), twin);
                    self.twin.insert((other, twin), conn);
                    let from = match path.to {
                        Locator::Tcp(_) => addrs()[n].into(),
                        locator => locator,
                    };
                    if path.kind() != TransportKind::TCP {
                        self.of_other.extend([(n, conn), (other, twin)]);
                    }
                    self.ends[other].handle_incoming(now, twin, from);
                    self.ends[n].handle_connected(now, conn);
                }
                Net::Silent => {}
                Net::Refuses => self.ends[n].handle_conn_lost(now, conn, REFUSED),
            },
            Action::Send { conn, data } => {
                let passes = self.tcp[other] != Net::Silent || self.of_other.contains(&(n, conn));
                if let Some(&twin) = self.twin.get(&(n, conn))
                    && passes
                {
                    self.heard[other].push(data.clone());
                    self.ends[other].handle_message(now, twin, &data);
                }
            }
            Action::Close { conn } => {
                if let Some(twin) = self.twin.remove(&(n, conn)) {
                    self.twin.remove(&(other, twin));
                    self.ends[other].handle_conn_lost(now, twin, 0);
                }
            }
            Action::Flush { conn } if self.answers => self.ends[n].handle_flushed(now, conn),
            Action::Suspend { token } if self.answers => self.ends[n].handle_suspended(now, token),
            Action::Verify { token } if self.answers => {
                self.ends[n].handle_verified(now, token, self.kernels_answer);
            }
            Action::Drain { token } if self.answers => {
                let Counts { received, sent } = self.counts[n];
                self.ends[n].handle_drained(now, token, received, sent);
            }
            Action::Install {
                token,
                peer_received,
                ..
            } if self.answers && self.replays => {
                let replayed = self.counts[n].sent - peer_received;
                self.ends[n].handle_installed(now, token, replayed);
            }
            _ => {}
        }
    }

    /// The kinds of the messages that reached a side.
    pub(super) fn kinds(&self, n: usize) -> Vec<Kind> {
        let kind = |data: &Vec<u8>| wire::parse(data).unwrap().message.kind();
        self.heard[n].iter().map(kind).collect()
    }

    pub(super) fn messages(&self, n: usize) -> Vec<Message> {
        let message = |data: &Vec<u8>| wire::parse(data).unwrap().message;
        self.heard[n].iter().map(message).collect()
    }

    pub(super) fn count(&self, n: usize, of: impl Fn(&Action) -> bool) -> usize {
        self.done[n].iter().filter(|action| of(action)).count()
    }

    pub(super) fn verdict(&self, n: usize) -> Option<Verdict> {
        self.done[n].iter().find_map(|action| match action {
            Action::Escalate { verdict, .. } => Some(*verdict),
            _ => None,
        })
    }

    pub(super) fn connects(&self, n: usize) -> Vec<SocketAddr> {
        let all = self.paths(n).into_iter();
        all.filter_map(|path| path.to.tcp()).collect()
    }

    /// The paths of all requested connections.
    pub(super) fn paths(&self, n: usize) -> Vec<Path> {
        let path = |action: &Action| match action {
            Action::Connect { path, .. } => Some(*path),
            _ => None,
        };
        self.done[n].iter().filter_map(path).collect()
    }
}

pub(super) const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}
