//! Many processes of one host die in one moment. The host sends few ICMP messages, and all survivors share them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::SocketAddr;
use std::time::Duration;

use super::pair::{Net, REFUSED, RESET, ms};
use crate::config::Config;
use crate::endpoint::{Action, Endpoint, State};
use crate::event::{EscalateReason, Event};
use crate::ids::{Cause, ConnId, EndpointId, FlowToken, Role, Time};
use crate::transport::Transports;
use crate::wire::{Kind, kind_of};

mod random;

const SURVIVORS: u8 = 1;
const DYING: u8 = 2;
/// ICMP messages that Linux sends in a row to one host. After these it sends one a second.
const BURST: u32 = 6;
/// One way.
const TRIP: Duration = Duration::from_micros(50);
/// No verdict may take longer.
const SOON: Duration = Duration::from_millis(500);
/// Each survivor's port for answers to QUERYs that are sent from a port of their own.
const ASIDE: u16 = 3000;

enum Happens {
    Datagram {
        from: SocketAddr,
        to: SocketAddr,
        data: Vec<u8>,
    },
    Refused {
        survivor: usize,
        to: SocketAddr,
        data: Vec<u8>,
    },
    Connect {
        survivor: usize,
        conn: ConnId,
        to: SocketAddr,
    },
    Connected {
        survivor: usize,
        conn: ConnId,
    },
    ConnLost {
        survivor: usize,
        conn: ConnId,
    },
    Fault {
        survivor: usize,
        victim: usize,
        cause: Cause,
    },
}

/// A process of the dying host.
struct Victim {
    /// `None` once it is dead.
    endpoint: Option<Endpoint>,
    /// What becomes of datagrams and connections to it, while it lives.
    udp: Net,
    tcp: Net,
    /// It answers nothing before this.
    busy: Time,
}

/// Survivors on one host, and processes on another one, all connected with each other.
struct Hosts {
    now: Time,
    survivors: Vec<Endpoint>,
    victims: Vec<Victim>,
    happens: BTreeMap<(Time, u64), Happens>,
    serial: u64,
    /// ICMP messages that the dying host may still send to the survivors' host, in microseconds.
    credit: (u64, Time),
    burst: u32,
    /// When the survivor's flow with the victim broke.
    broke: BTreeMap<(usize, usize), Time>,
    /// When the survivor gave the flow up, and why.
    given_up: BTreeMap<(usize, usize), (Time, EscalateReason)>,
    queries: usize,
    knocks: usize,
}

fn at(host: u8, port: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host], port as u16))
}

fn endpoint(host: u8, n: usize) -> Endpoint {
    let id = EndpointId {
        host: [host; 16],
        pid: n as u32,
        incarnation: 7,
    };
    let own = Transports::tcp(vec![at(host, 0).ip()], 1000 + n as u16, 2000 + n as u16);
    let mut seed = [host; 32];
    seed[1] = n as u8;
    Endpoint::new(Config::default(), id, own, seed)
}

fn flow(survivor: usize, victim: usize) -> FlowToken {
    FlowToken((survivor * 1000 + victim) as u64)
}

impl Hosts {
    /// All flows are live, and every process has been found to be in reach.
    fn live(survivors: usize, victims: usize) -> Hosts {
        Hosts::live_with(survivors, victims, |_| {})
    }

    /// All flows are live. `before` happens before the survivors find out which processes are in reach.
    fn live_with(survivors: usize, victims: usize, before: impl Fn(&mut Hosts)) -> Hosts {
        let victim = |n| Victim {
            endpoint: Some(endpoint(DYING, n)),
            udp: Net::Works,
            tcp: Net::Works,
            busy: Time(0),
        };
        let mut hosts = Hosts {
            now: Time(1_000_000),
            survivors: (0..survivors).map(|n| endpoint(SURVIVORS, n)).collect(),
            victims: (0..victims).map(victim).collect(),
            happens: BTreeMap::new(),
            serial: 0,
            credit: (60_000_000, Time(0)),
            burst: BURST,
            broke: BTreeMap::new(),
            given_up: BTreeMap::new(),
            queries: 0,
            knocks: 0,
        };
        for s in 0..survivors {
            for v in 0..victims {
                let (near, far) = (at(SURVIVORS, 10_000 + s * 100 + v), at(DYING, 80 + v));
                let (now, token) = (hosts.now, flow(s, v));
                hosts.survivors[s].open(now, token, Role::Connector, near, far);
                let victim = hosts.victims[v].endpoint.as_mut().unwrap();
                victim.open(now, token, Role::Acceptor, far, near);
            }
        }
        hosts.wait(ms(500));
        before(&mut hosts);
        hosts.wait(ms(1500));
        for s in 0..survivors {
            for v in 0..victims {
                assert_eq!(hosts.survivors[s].state(flow(s, v)), Some(State::Live));
            }
        }
        (hosts.queries, hosts.knocks) = (0, 0);
        hosts
    }

    fn after(&mut self, wait: Duration, what: Happens) {
        self.serial += 1;
        self.happens.insert((self.now + wait, self.serial), what);
    }

    /// The processes die, one after another. `between`: the time from one death to the next.
    fn die(&mut self, victims: impl Iterator<Item = usize>, between: Duration) {
        for (n, v) in victims.enumerate() {
            self.victims[v].endpoint = None;
            for s in 0..self.survivors.len() {
                let cause = match (s + v) % 2 {
                    0 => Cause::Eof { received: 0 },
                    _ => Cause::Errno(RESET),
                };
                self.fault_after(between * n as u32 + TRIP * s as u32, s, v, cause);
            }
        }
    }

    fn fault_after(&mut self, wait: Duration, survivor: usize, victim: usize, cause: Cause) {
        self.broke.insert((survivor, victim), self.now + wait);
        self.after(
            wait,
            Happens::Fault {
                survivor,
                victim,
                cause,
            },
        );
    }

    /// Whether the dying host may send an ICMP message to the survivors' host now, as Linux counts them.
    fn icmp(&mut self) -> bool {
        const EVERY: u64 = 1_000_000;
        let (credit, last) = self.credit;
        let since = self.now.since(last).as_micros() as u64;
        let credit = (credit + since).min(u64::from(self.burst.max(1)) * EVERY);
        let allowed = self.burst > 0 && credit >= EVERY;
        self.credit = (credit - if allowed { EVERY } else { 0 }, self.now);
        allowed
    }

    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.act();
            let timers = self.survivors.iter().filter_map(Endpoint::poll_timeout);
            let victims = self.victims.iter().filter_map(|v| v.endpoint.as_ref());
            let timers = timers.chain(victims.filter_map(Endpoint::poll_timeout));
            let next = self.happens.keys().next().map(|(at, _)| *at);
            let mut due: BinaryHeap<_> = timers.chain(next).map(Reverse).collect();
            let Some(Reverse(next)) = due.pop().filter(|Reverse(next)| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            let (now, later) = (self.now, (self.now, u64::MAX));
            let rest = self.happens.split_off(&later);
            for (_, what) in std::mem::replace(&mut self.happens, rest) {
                self.happen(what);
            }
            let victims = self.victims.iter_mut().filter_map(|v| v.endpoint.as_mut());
            for endpoint in self.survivors.iter_mut().chain(victims) {
                endpoint.handle_timeout(now);
            }
        }
        self.now = end;
    }

    fn happen(&mut self, what: Happens) {
        let now = self.now;
        match what {
            Happens::Datagram { from, to, data } => self.arrive(from, to, data),
            Happens::Refused { survivor, to, data } => {
                self.survivors[survivor].handle_refused(now, to, &data);
            }
            Happens::Connect { survivor, conn, to } => {
                let v = usize::from(to.port()) - 1000;
                let answer = match (&self.victims[v].endpoint, self.victims[v].tcp) {
                    (_, Net::Silent) => return,
                    (Some(_), Net::Works) => Happens::Connected { survivor, conn },
                    _ => Happens::ConnLost { survivor, conn },
                };
                self.after(TRIP, answer);
            }
            // No test needs more than the connection itself.
            Happens::Connected { survivor, conn } => {
                self.survivors[survivor].handle_connected(now, conn);
            }
            Happens::ConnLost { survivor, conn } => {
                self.survivors[survivor].handle_conn_lost(now, conn, REFUSED);
            }
            Happens::Fault {
                survivor,
                victim,
                cause,
            } => self.survivors[survivor].fault(now, flow(survivor, victim), cause),
        }
    }

    fn arrive(&mut self, from: SocketAddr, to: SocketAddr, data: Vec<u8>) {
        let now = self.now;
        let port = usize::from(to.port());
        if to.ip() == at(SURVIVORS, 0).ip() {
            let s = match port {
                10_000.. => (port - 10_000) / 100,
                _ => port % 1000,
            };
            return self.survivors[s].handle_datagram(now, from, to, &data);
        }
        let v = match port {
            2000.. => port - 2000,
            80.. => port - 80,
            // The victims have no mailboxes.
            _ => return,
        };
        let victim = &mut self.victims[v];
        match (&mut victim.endpoint, victim.udp) {
            (_, Net::Silent) => {}
            (Some(_), Net::Works) if now < victim.busy => {
                let wait = victim.busy.since(now);
                self.after(wait, Happens::Datagram { from, to, data });
            }
            (Some(endpoint), Net::Works) => endpoint.handle_datagram(now, from, to, &data),
            _ => {
                let survivor = usize::from(from.port()) % 1000;
                if self.icmp() {
                    self.after(TRIP, Happens::Refused { survivor, to, data });
                }
            }
        }
    }

    /// Carries out all actions.
    fn act(&mut self) {
        for s in 0..self.survivors.len() {
            while let Some(action) = self.survivors[s].poll_action() {
                self.carry_out(s, action);
            }
            while let Some((token, _, event)) = self.survivors[s].poll_event() {
                if let Event::Escalate { reason, .. } = event {
                    let v = token.0 as usize % 1000;
                    self.given_up.insert((s, v), (self.now, reason));
                }
            }
        }
        for v in 0..self.victims.len() {
            while let Some(action) = self.victims[v]
                .endpoint
                .as_mut()
                .and_then(Endpoint::poll_action)
            {
                if let Action::Datagram { to, from, data } = action {
                    let from = from.unwrap_or(at(DYING, 2000 + v));
                    self.after(TRIP, Happens::Datagram { from, to, data });
                }
            }
        }
    }

    fn carry_out(&mut self, s: usize, action: Action) {
        let now = self.now;
        match action {
            Action::Datagram { to, from, data } => {
                let aside = from.is_some_and(|from| from.port() == 0);
                self.queries += usize::from(kind_of(&data) == Some(Kind::Query));
                let port = if aside { usize::from(ASIDE) } else { 2000 };
                let from = at(SURVIVORS, port + s);
                self.after(TRIP, Happens::Datagram { from, to, data });
            }
            Action::Connect { conn, path, .. } => {
                self.knocks += 1;
                let to = path.to.tcp().unwrap();
                let survivor = s;
                self.after(TRIP, Happens::Connect { survivor, conn, to });
            }
            Action::Suspend { token } => self.survivors[s].handle_suspended(now, token),
            Action::Drain { token } => self.survivors[s].handle_drained(now, token, 0, 0),
            Action::Verify { token } => self.survivors[s].handle_verified(now, token, false),
            // An end of stream that is believed is an end, too.
            Action::Reinstate { token } | Action::Legacy { token, .. } => {
                let v = token.0 as usize % 1000;
                let reason = EscalateReason::PeerGone;
                self.given_up.entry((s, v)).or_insert((now, reason));
            }
            _ => {}
        }
    }

    /// The longest time from the break of a flow to its verdict.
    fn slowest(&self) -> Duration {
        let took = |(flow, broke): (&(usize, usize), &Time)| {
            let (given_up, reason) = self.given_up.get(flow)?;
            assert_eq!(*reason, EscalateReason::PeerGone, "{flow:?}");
            Some(given_up.since(*broke))
        };
        let took = self
            .broke
            .iter()
            .map(|flow| took(flow).unwrap_or(Duration::MAX));
        took.max().unwrap()
    }

    fn is_given_up(&self, survivor: usize, victim: usize) -> bool {
        self.given_up.contains_key(&(survivor, victim))
    }
}

#[test]
fn one_survivor_learns_soon_that_eight_processes_are_dead() {
    let mut hosts = Hosts::live(1, 8);
    hosts.die(0..8, Duration::ZERO);
    hosts.wait(ms(30_000));
    assert!(hosts.slowest() <= SOON, "{:?}", hosts.slowest());
}

#[test]
fn four_survivors_learn_soon_that_eight_processes_are_dead() {
    for between in [0, 1, 5, 10, 20] {
        let mut hosts = Hosts::live(4, 8);
        hosts.die(0..8, ms(between));
        hosts.wait(ms(30_000));
        let slowest = hosts.slowest();
        assert!(slowest <= SOON, "{slowest:?}, one death every {between} ms");
    }
}

#[test]
fn a_single_refusal_for_each_survivor_is_enough() {
    for survivors in 1..=4 {
        let mut hosts = Hosts::live(survivors, 8);
        hosts.burst = survivors as u32;
        hosts.die(0..8, Duration::ZERO);
        hosts.wait(ms(30_000));
        let slowest = hosts.slowest();
        assert!(slowest <= SOON, "{slowest:?}, {survivors} survivors");
    }
}

#[test]
fn a_single_death_is_confirmed_as_soon_as_before() {
    for cause in [Cause::Eof { received: 0 }, Cause::Errno(RESET)] {
        let mut hosts = Hosts::live(1, 8);
        hosts.victims[3].endpoint = None;
        hosts.fault_after(Duration::ZERO, 0, 3, cause);
        hosts.wait(ms(1000));
        assert!(hosts.slowest() <= ms(160), "{:?}", hosts.slowest());
    }
}

/// Firewalls refuse connections and drop datagrams. Neither is a sign of a death.
#[test]
fn without_a_refused_query_nobody_is_dead() {
    let mut hosts = Hosts::live(2, 8);
    hosts.burst = 0;
    for victim in &mut hosts.victims {
        (victim.udp, victim.tcp) = (Net::Silent, Net::Refuses);
    }
    for s in 0..2 {
        for v in 0..8 {
            hosts.fault_after(Duration::ZERO, s, v, Cause::Errno(RESET));
        }
    }
    hosts.wait(ms(2500));
    assert!(hosts.given_up.is_empty(), "{:?}", hosts.given_up);
    assert!(hosts.knocks > 0);
}

/// One process is dead. The others live, and a firewall has reset their connections and refuses new ones.
#[test]
fn a_process_that_answers_late_is_not_taken_for_a_dead_one() {
    for busy in [0, 5, 25, 75] {
        let mut hosts = Hosts::live(1, 8);
        for victim in &mut hosts.victims {
            victim.tcp = Net::Refuses;
            victim.busy = hosts.now + ms(busy);
        }
        hosts.die(0..1, Duration::ZERO);
        for v in 1..8 {
            hosts.fault_after(Duration::ZERO, 0, v, Cause::Errno(RESET));
        }
        hosts.wait(ms(2500));
        let given_up: Vec<_> = hosts.given_up.keys().collect();
        assert_eq!(given_up, [&(0, 0)], "busy for {busy} ms");
    }
}

/// A process that was never in reach may be behind a firewall that lets in only what its host has asked for.
#[test]
fn a_process_that_was_never_in_reach_does_not_die_with_another() {
    let mut hosts = Hosts::live_with(1, 2, |hosts| {
        hosts.victims[1].udp = Net::Silent;
        hosts.victims[1].tcp = Net::Refuses;
    });
    hosts.die(0..1, Duration::ZERO);
    hosts.fault_after(Duration::ZERO, 0, 1, Cause::Errno(RESET));
    hosts.wait(ms(2500));
    assert!(hosts.is_given_up(0, 0));
    assert!(!hosts.is_given_up(0, 1));
}

/// A fault of the network broke all connections. All processes live.
#[test]
fn questions_to_living_processes_wait_for_one_answer_only() {
    let mut hosts = Hosts::live(1, 8);
    for v in 0..8 {
        hosts.fault_after(Duration::ZERO, 0, v, Cause::Eof { received: 0 });
    }
    hosts.wait(TRIP);
    assert_eq!(hosts.queries, 1);
    hosts.wait(TRIP);
    assert_eq!(hosts.queries, 8);
    hosts.wait(ms(20));
    assert!(hosts.knocks <= 8, "{}", hosts.knocks);
}

#[test]
fn an_answer_is_not_waited_for_long() {
    let mut hosts = Hosts::live(1, 8);
    hosts.victims[0].udp = Net::Silent;
    for v in 0..8 {
        hosts.fault_after(Duration::ZERO, 0, v, Cause::Eof { received: 0 });
    }
    hosts.wait(ms(25));
    assert_eq!(hosts.queries, 8);
}
