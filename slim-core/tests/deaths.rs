//! Peer processes that die, or never had SLIM. Their hosts limit ICMP messages as Linux does: six in
//! a row, then one per second.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use slim_core::config::Config;
use slim_core::endpoint::{Action, Endpoint, State};
use slim_core::event::{EscalateReason, Event, LegacyReason};
use slim_core::transport::Transports;
use slim_core::{Cause, ConnId, EndpointId, FinHow, FlowId, FlowToken, Role, Time, Verdict};

const RESET: i32 = 104;
const REFUSED: i32 = 111;
const PIPE: i32 = 32;
const FLOWS: u64 = 1000;

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn endpoint(n: u8) -> Endpoint {
    let id = EndpointId {
        host: [n; 16],
        pid: 1,
        incarnation: 7,
    };
    // Both hosts have a bridge of their own, with the same address.
    let addrs = vec![[10, 0, 0, n].into(), [172, 17, 0, 1].into()];
    Endpoint::new(
        Config::default(),
        id,
        Transports::tcp(addrs, 700, 701),
        [n; 32],
    )
}

/// Our endpoint, which connected, and the peer, which dies.
struct World {
    now: Time,
    us: Endpoint,
    peer: Option<Endpoint>,
    /// No datagram gets through, in either direction.
    cut: bool,
    /// Token bucket of the peer's host: ICMP messages that it may send now, and when it was last refilled.
    bucket: (u32, Time),
    /// Connections for a resume are made. Otherwise they hang.
    resumes: bool,
    queries: u32,
    hellos: u32,
    actions: HashMap<FlowToken, Vec<Action>>,
    events: Vec<(FlowToken, FlowId, Event)>,
}

fn near(n: u64) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 1], 10_000 + n as u16))
}

impl World {
    fn new() -> World {
        World {
            now: Time(1_000_000),
            us: endpoint(1),
            peer: Some(endpoint(2)),
            cut: false,
            bucket: (6, Time(0)),
            resumes: false,
            queries: 0,
            hellos: 0,
            actions: HashMap::new(),
            events: Vec::new(),
        }
    }

    fn live(flows: u64) -> World {
        let mut world = World::new();
        for n in 0..flows {
            world.connect(n, "10.0.0.2:80");
            let peer = world.peer.as_mut().unwrap();
            peer.open(
                world.now,
                FlowToken(n),
                Role::Acceptor,
                addr("10.0.0.2:80"),
                near(n),
            );
            world.run();
        }
        for n in 0..flows {
            assert_eq!(world.us.state(FlowToken(n)), Some(State::Live));
        }
        world.events.clear();
        world
    }

    fn connect(&mut self, n: u64, to: &str) {
        self.us
            .open(self.now, FlowToken(n), Role::Connector, near(n), addr(to));
        self.run();
    }

    fn fault(&mut self, n: u64, cause: Cause) {
        self.us.fault(self.now, FlowToken(n), cause);
        self.run();
    }

    fn icmp(&mut self) -> bool {
        let (left, last) = self.bucket;
        let more = self.now.since(last).as_secs().min(6) as u32;
        let (left, last) = if more > 0 {
            ((left + more).min(6), self.now)
        } else {
            (left, last)
        };
        self.bucket = (left.saturating_sub(1), last);
        left > 0
    }

    fn run(&mut self) {
        loop {
            let mut idle = true;
            while let Some(action) = self.us.poll_action() {
                idle = false;
                self.act(action);
            }
            let mut answers = Vec::new();
            if let Some(peer) = &mut self.peer {
                while let Some(action) = peer.poll_action() {
                    idle = false;
                    match action {
                        Action::Datagram { from, data, .. } => {
                            answers.push((from.unwrap_or(addr("10.0.0.2:701")), data));
                        }
                        Action::Send { conn, data } => {
                            let conn = ConnId(conn.0 & !(1 << 63));
                            self.us.handle_message(self.now, conn, &data);
                        }
                        _ => {}
                    }
                }
            }
            for (from, data) in answers.into_iter().filter(|_| !self.cut) {
                self.us
                    .handle_datagram(self.now, from, addr("10.0.0.1:701"), &data);
            }
            while let Some(event) = self.us.poll_event() {
                self.events.push(event);
            }
            if idle {
                return;
            }
        }
    }

    fn act(&mut self, action: Action) {
        let now = self.now;
        match action {
            Action::Datagram { to, from, data } => {
                // A probe whether the process can be reached is sent from a port of its own.
                let about_reach = from.is_some_and(|from| from.port() == 0);
                // The byte behind magic and version is the kind.
                match data[5] {
                    _ if about_reach => {}
                    1 => self.hellos += 1,
                    6 => self.queries += 1,
                    _ => {}
                }
                if to.ip() == addr("172.17.0.1:1").ip() {
                    // Our own bridge: no process is there, so our own kernel refuses.
                    self.us.handle_refused(now, to, &data);
                } else if self.cut {
                } else if let Some(peer) = &mut self.peer {
                    peer.handle_datagram(now, addr("10.0.0.1:701"), to, &data);
                } else if self.icmp() {
                    self.us.handle_refused(now, to, &data);
                }
            }
            Action::Connect { conn, path, .. } => {
                let ours = path.to.tcp().map(|to| to.ip()) == Some(addr("172.17.0.1:1").ip());
                if ours || (self.peer.is_none() && !self.cut) {
                    self.us.handle_conn_lost(now, conn, REFUSED);
                } else if let (true, Some(peer)) = (self.resumes, &mut self.peer) {
                    self.us.handle_connected(now, conn);
                    peer.handle_incoming(now, ConnId::incoming(conn.0), near(0));
                }
            }
            Action::Send { conn, data } => {
                if let Some(peer) = &mut self.peer {
                    peer.handle_message(now, ConnId::incoming(conn.0), &data);
                }
            }
            Action::Suspend { token } => self.us.handle_suspended(now, token),
            Action::Verify { token } => self.us.handle_verified(now, token, false),
            Action::Drain { token } => self.us.handle_drained(now, token, 0, 0),
            Action::Reinstate { token }
            | Action::Legacy { token, .. }
            | Action::Escalate { token, .. } => {
                self.actions.entry(token).or_default().push(action);
            }
            _ => {}
        }
    }

    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(next) = self.us.poll_timeout().filter(|next| *next <= end) {
            self.now = self.now.max(next);
            self.us.handle_timeout(self.now);
            self.run();
        }
        self.now = end;
    }

    fn verdict(&self, n: u64) -> Option<Verdict> {
        self.actions
            .get(&FlowToken(n))?
            .iter()
            .find_map(|action| match action {
                Action::Escalate { verdict, .. } => Some(*verdict),
                _ => None,
            })
    }
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn a_thousand_flows_learn_of_a_death_from_two_refusals() {
    let mut world = World::live(FLOWS);
    world.peer = None;
    let begun = world.now;
    for n in 0..FLOWS {
        let eof = Cause::Eof { received: 3 };
        world.fault(n, if n % 2 == 0 { Cause::Errno(RESET) } else { eof });
    }
    assert_eq!(world.queries, 1);
    world.wait(ms(200));
    assert_eq!(world.queries, 2, "after {:?}", world.now.since(begun));
    for n in 0..FLOWS {
        if n % 2 == 0 {
            assert_eq!(world.verdict(n), Some(Verdict::Errno(RESET)), "flow {n}");
        } else {
            let reinstated = [Action::Reinstate {
                token: FlowToken(n),
            }];
            assert_eq!(world.actions[&FlowToken(n)], reinstated, "flow {n}");
            assert_eq!(world.us.state(FlowToken(n)), Some(State::Legacy));
        }
    }
    let gone = |event: &Event| {
        let reason = EscalateReason::PeerGone;
        matches!(event, Event::Escalate { reason: r, .. } if *r == reason)
    };
    let count = world
        .events
        .iter()
        .filter(|(_, _, event)| gone(event))
        .count();
    assert_eq!(count as u64, FLOWS / 2);
}

#[test]
fn flows_that_notice_a_death_late_send_no_further_query() {
    let mut world = World::live(FLOWS);
    world.peer = None;
    for n in 0..FLOWS {
        world.fault(n, Cause::Errno(RESET));
        world.wait(ms(4));
    }
    world.wait(ms(200));
    for n in 0..FLOWS {
        assert_eq!(world.verdict(n), Some(Verdict::Errno(RESET)), "flow {n}");
    }
    assert_eq!(world.queries, 2);
}

#[test]
fn when_no_more_icmp_comes_a_refused_connection_confirms_the_death() {
    let mut world = World::live(10);
    world.peer = None;
    world.bucket = (1, world.now);
    for n in 0..10 {
        world.fault(n, Cause::Errno(RESET));
    }
    world.wait(ms(500));
    for n in 0..10 {
        assert_eq!(world.verdict(n), Some(Verdict::Errno(RESET)), "flow {n}");
    }
}

#[test]
fn a_living_peer_is_asked_about_every_end_of_stream() {
    let mut world = World::live(FLOWS);
    for n in 0..FLOWS {
        let peer = world.peer.as_mut().unwrap();
        peer.finish(world.now, FlowToken(n), 3, FinHow::HalfClose);
        // No announcement arrives.
        while peer.poll_action().is_some() {}
    }
    world.cut = true;
    for n in 0..FLOWS {
        world.fault(n, Cause::Eof { received: 3 });
    }
    assert_eq!(world.queries, 1, "the others wait for the first answer");
    world.cut = false;
    world.wait(ms(60));
    for n in 0..FLOWS {
        assert_eq!(world.us.state(FlowToken(n)), Some(State::Live), "flow {n}");
        let reinstated = [Action::Reinstate {
            token: FlowToken(n),
        }];
        assert_eq!(world.actions[&FlowToken(n)], reinstated, "flow {n}");
    }
    assert_eq!(u64::from(world.queries), FLOWS + 1);
}

#[test]
fn the_flow_in_a_query_may_be_gone_before_the_answer() {
    let mut world = World::live(10);
    world.cut = true;
    for n in 0..10 {
        world.fault(n, Cause::Eof { received: 3 });
    }
    world.us.gone(world.now, FlowToken(0));
    world.run();
    world.cut = false;
    world.peer = None;
    world.wait(ms(400));
    for n in 1..10 {
        assert_eq!(
            world.us.state(FlowToken(n)),
            Some(State::Legacy),
            "flow {n}"
        );
    }
}

#[test]
fn without_an_answer_every_end_of_stream_is_a_fault() {
    let mut world = World::live(10);
    world.cut = true;
    for n in 0..10 {
        world.fault(n, Cause::Eof { received: 3 });
    }
    world.wait(ms(1600));
    for n in 0..10 {
        assert_eq!(world.us.state(FlowToken(n)), Some(State::Suspended));
        let attempt = world.events.iter().any(|(token, _, event)| {
            *token == FlowToken(n) && matches!(event, Event::Attempt { n: 1, .. })
        });
        assert!(attempt, "flow {n}");
    }
}

#[test]
fn a_bridge_of_our_own_is_not_taken_for_the_peer() {
    let mut world = World::live(10);
    world.cut = true;
    world.fault(0, Cause::Errno(RESET));
    world.fault(1, Cause::Eof { received: 3 });
    world.wait(ms(10_000));
    assert_eq!(world.us.state(FlowToken(0)), Some(State::Suspended));
    assert_eq!(world.us.state(FlowToken(1)), Some(State::Suspended));
}

#[test]
fn the_error_of_a_dead_peers_flow_is_the_one_the_kernel_gave() {
    for errno in [PIPE, RESET, 110] {
        let mut world = World::live(10);
        world.peer = None;
        world.fault(0, Cause::Errno(errno));
        world.wait(ms(200));
        assert_eq!(world.verdict(0), Some(Verdict::Errno(errno)));
        // The flow was suspended for another reason first.
        let mut world = World::live(10);
        world.cut = true;
        world.fault(0, Cause::Eof { received: 3 });
        world.fault(0, Cause::Errno(errno));
        world.cut = false;
        world.peer = None;
        world.wait(ms(2500));
        assert_eq!(world.verdict(0), Some(Verdict::Errno(errno)));
    }
}

#[test]
fn a_host_that_refuses_hello_is_not_asked_about_every_connection() {
    let mut world = World::new();
    world.peer = None;
    // One connection a millisecond for seven seconds.
    let legacy = |world: &World| world.actions.len() as u64;
    let mut n = 0;
    while n < 7000 {
        world.connect(n, "10.0.0.9:80");
        world.wait(ms(1));
        n += 1;
    }
    assert_eq!(legacy(&world), n, "all of them are known to be plain TCP");
    let late = (1100..n).filter(|n| {
        let reason = LegacyReason::NoControlSocket;
        let known = |(token, _, event): &(FlowToken, FlowId, Event)| {
            *token == FlowToken(*n) && *event == Event::Legacy { reason }
        };
        !world.events.iter().any(known)
    });
    assert_eq!(late.count(), 0);
    assert!(world.hellos < 4500, "{} were sent", world.hellos);

    // Another port of the same host is asked.
    let before = world.hellos;
    world.connect(n, "10.0.0.9:81");
    assert_eq!(world.hellos, before + 1);
    // A server that gets SLIM later is found.
    world.wait(ms(5000));
    world.connect(n + 1, "10.0.0.9:80");
    assert_eq!(world.hellos, before + 2);
}

#[test]
fn an_accepted_flow_without_hello_gets_its_error_soon() {
    let mut world = World::new();
    world.us.open(
        world.now,
        FlowToken(1),
        Role::Acceptor,
        addr("10.0.0.1:80"),
        near(1),
    );
    world.run();
    world.wait(ms(100));
    world.fault(1, Cause::Errno(RESET));
    assert_eq!(world.verdict(1), None, "HELLO may be on its way");
    world.wait(ms(249));
    assert_eq!(world.verdict(1), None);
    world.wait(ms(1));
    assert_eq!(world.verdict(1), Some(Verdict::Errno(RESET)));
}

#[test]
fn hello_may_come_right_behind_the_fault() {
    let mut world = World::new();
    let peer = world.peer.as_mut().unwrap();
    peer.open(
        world.now,
        FlowToken(1),
        Role::Connector,
        addr("10.0.0.2:5000"),
        addr("10.0.0.1:80"),
    );
    let Some(Action::Datagram { data, .. }) = peer.poll_action() else {
        panic!()
    };
    let local = addr("10.0.0.1:80");
    world.us.open(
        world.now,
        FlowToken(1),
        Role::Acceptor,
        local,
        addr("10.0.0.2:5000"),
    );
    world.fault(1, Cause::Errno(RESET));
    world.wait(ms(19));
    world
        .us
        .handle_datagram(world.now, addr("10.0.0.2:701"), local, &data);
    world.run();
    assert_eq!(world.us.state(FlowToken(1)), Some(State::Suspended));
    world.wait(ms(100));
    assert_eq!(world.verdict(1), None);
}

#[test]
fn a_connector_without_answer_waits_half_a_second_for_it() {
    let mut world = World::new();
    world.cut = true;
    world.connect(1, "10.0.0.2:80");
    world.wait(ms(100));
    world.fault(1, Cause::Errno(RESET));
    world.wait(ms(499));
    assert_eq!(world.verdict(1), None);
    world.wait(ms(1));
    assert_eq!(world.verdict(1), Some(Verdict::Errno(RESET)));
    // The remaining time for an answer is not made longer.
    let mut world = World::new();
    world.cut = true;
    world.connect(1, "10.0.0.2:80");
    world.wait(ms(2900));
    world.fault(1, Cause::Errno(RESET));
    world.wait(ms(100));
    assert_eq!(world.verdict(1), Some(Verdict::Errno(RESET)));
}

#[test]
fn the_end_of_a_closed_flow_keeps_the_errno_of_the_kernel() {
    for errno in [PIPE, RESET] {
        let mut world = World::live(1);
        // The peer has sent three bytes that never arrived, closed the flow, and forgotten it.
        let peer = world.peer.as_mut().unwrap();
        peer.finish(world.now, FlowToken(0), 3, FinHow::Close);
        peer.gone(world.now, FlowToken(0));
        while peer.poll_action().is_some() {}
        world.resumes = true;
        world.fault(0, Cause::Errno(errno));
        assert_eq!(world.verdict(0), Some(Verdict::Errno(errno)));
    }
}
