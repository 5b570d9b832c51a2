//! Many flows, and many peers, that prefer another kind of transport: random faults, and what all of them cost.

use std::time::Duration;

use super::failback::*;
use super::locators::locator;
use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Endpoint, State};
use crate::ids::{Cause, FinHow, FlowToken, Role};
use crate::transport::{Locator, TransportKind};

const TCP: TransportKind = TransportKind::TCP;
const OTHER: TransportKind = TransportKind::TEST;
const THIRD: TransportKind = TransportKind::new(241);

const FLOWS: u64 = 12;

fn token(flow: u64) -> FlowToken {
    FlowToken(1000 + flow)
}

/// Whatever happens, in the end each flow that may move is carried by the kind that it prefers.
#[test]
fn no_flow_stays_behind() {
    let errors: Vec<_> = (0..300)
        .filter_map(|seed| Some((seed, one(seed).err()?)))
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
}

fn one(seed: u64) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let three: &[TransportKind] = &[OTHER, THIRD, TCP];
    let two: &[TransportKind] = &[OTHER, TCP];
    let kinds = if rng.bool() { three } else { two };
    let mut pair = on_tcp([kinds; 2]);
    let mut gone = [[false; FLOWS as usize]; 2];
    for n in [A, B] {
        pair.open_many(n, FLOWS);
    }
    pair.run();
    let nets = [Net::Works, Net::Silent, Net::Refuses];
    let mut port = 10;
    for _ in 0..rng.usize(5..60) {
        let flow = rng.u64(0..FLOWS);
        let n = rng.usize(0..2);
        let live = !gone[0][flow as usize] && !gone[1][flow as usize];
        match rng.u32(0..14) {
            0..=2 => pair.other = [nets[rng.usize(0..3)]; 2],
            3 => pair.dead = [vec![], vec![OTHER], vec![THIRD]][rng.usize(0..3)].clone(),
            4 => pair.tcp = [nets[rng.usize(0..3)]; 2],
            5 if live && rng.u32(0..4) == 0 => {
                let how = [FinHow::HalfClose, FinHow::Close, FinHow::Reset][rng.usize(0..3)];
                pair.ends[n].finish(pair.now, token(flow), 0, how);
                if how != FinHow::HalfClose {
                    pair.ends[n].gone(pair.now, token(flow));
                    gone[n][flow as usize] = true;
                }
            }
            6 if live => pair.ends[n].fault(pair.now, token(flow), Cause::Errno(RESET)),
            7 if live => pair.ends[n].fault(pair.now, token(flow), Cause::Stall),
            8 => {
                for flow in 0..FLOWS {
                    if !gone[n][flow as usize] {
                        pair.ends[n].fault(pair.now, token(flow), Cause::Errno(RESET));
                    }
                }
            }
            9 => {
                port += 1;
                let n = rng.usize(0..2);
                let mut all = vec![locator(OTHER, port)];
                if rng.bool() {
                    all.push(locator(OTHER, port + 60));
                }
                if kinds.len() == 3 {
                    all.push(locator(THIRD, port));
                }
                if rng.u32(0..5) == 0 {
                    all.clear();
                }
                pair.ends[n].set_locators(pair.now, all);
            }
            10 => pair.wait(ms(rng.u64(0..100_000))),
            11 => {
                pair.now = pair.now + Duration::from_secs(rng.u64(0..4000));
                for end in &mut pair.ends {
                    end.handle_timeout(pair.now);
                }
            }
            12 => pair.udp = [nets[rng.usize(0..2)]; 2],
            _ => {}
        }
        pair.run();
        pair.wait(ms([0, 1, 10, 30, 100, 1000, 3000][rng.usize(0..7)]));
    }
    // All is well now.
    pair.other = [Net::Works; 2];
    pair.tcp = [Net::Works; 2];
    pair.udp = [Net::Works; 2];
    pair.dead.clear();
    for n in [A, B] {
        let all = kinds.iter().filter(|kind| **kind != TCP);
        let all = all.map(|kind| locator(*kind, n)).collect();
        pair.ends[n].set_locators(pair.now, all);
    }
    pair.run();
    pair.wait(ms(400_000));
    let mut errors = Vec::new();
    for flow in 0..FLOWS {
        let end = &pair.ends[A];
        let t = token(flow);
        let usual = end.state(t) == Some(State::Live)
            && pair.ends[B].state(t) == Some(State::Live)
            && end.flows[&t].fin.is_none()
            && end.flows[&t].peer_fin.is_none();
        if usual && end.kind_of(t) != OTHER {
            errors.push(format!(
                "{t:?} is on {:?}: may move {}",
                end.kind_of(t),
                end.may_move(t)
            ));
        }
    }
    if !errors.is_empty() {
        return Err(errors.join("; "));
    }
    for n in [A, B] {
        for flow in 0..FLOWS {
            pair.ends[n].finish(pair.now, token(flow), 0, FinHow::Reset);
            pair.ends[n].gone(pair.now, token(flow));
        }
        pair.ends[n].finish(pair.now, FLOW, 0, FinHow::Reset);
        pair.ends[n].gone(pair.now, FLOW);
    }
    pair.run();
    pair.wait(ms(400_000));
    for n in [A, B] {
        pair.ends[n].tidy(pair.now);
        let end = &pair.ends[n];
        let left = (
            end.tables().conns,
            end.tables().timers,
            end.outlooks.len(),
            end.failbacks.len(),
            end.trials.len(),
        );
        if left != (0, 0, 0, 0, 0) {
            return Err(format!("side {n} keeps {left:?}"));
        }
    }
    Ok(())
}

/// One connector, and many processes that it has one flow or more with.
struct Star {
    now: crate::ids::Time,
    hub: Endpoint,
    peers: Vec<Endpoint>,
    net: Net,
    twins: std::collections::BTreeMap<crate::ids::ConnId, (usize, crate::ids::ConnId)>,
    backs: std::collections::BTreeMap<(usize, crate::ids::ConnId), crate::ids::ConnId>,
    accepted: u64,
}

fn ip(n: usize) -> std::net::IpAddr {
    std::net::Ipv4Addr::from(0x0a01_0000 + n as u32).into()
}

fn at(n: usize) -> crate::transport::OtherLocator {
    crate::transport::OtherLocator::new(OTHER, &(n as u32).to_be_bytes()).unwrap()
}

fn peer_id(n: usize) -> crate::ids::EndpointId {
    let mut host = [9; 16];
    host[..4].copy_from_slice(&(n as u32).to_be_bytes());
    crate::ids::EndpointId {
        host,
        pid: 1,
        incarnation: 5,
    }
}

fn star_transports(n: usize, kinds: &[TransportKind]) -> crate::transport::Transports {
    crate::transport::Transports {
        locators: vec![at(n)],
        kinds: kinds.to_vec(),
        ..crate::transport::Transports::tcp(vec![ip(n)], 700, 701)
    }
}

impl Star {
    fn new(peers: usize, kinds: &[TransportKind]) -> Star {
        let seed = |n: usize| {
            let mut seed = [3; 32];
            seed[..8].copy_from_slice(&n.to_be_bytes());
            seed
        };
        let make = |n| {
            Endpoint::new(
                Config::default(),
                peer_id(n),
                star_transports(n, kinds),
                seed(n),
            )
        };
        Star {
            now: crate::ids::Time(1_000_000),
            hub: make(0),
            peers: (1..=peers).map(make).collect(),
            net: Net::Works,
            twins: Default::default(),
            backs: Default::default(),
            accepted: 0,
        }
    }

    fn open(&mut self, peer: usize, token: FlowToken, port: u16) {
        let ends = [(ip(0), port).into(), (ip(peer + 1), 80).into()];
        self.hub
            .open(self.now, token, Role::Connector, ends[0], ends[1]);
        self.peers[peer].open(self.now, token, Role::Acceptor, ends[1], ends[0]);
    }

    fn end(&mut self, n: usize) -> &mut Endpoint {
        match n {
            0 => &mut self.hub,
            n => &mut self.peers[n - 1],
        }
    }

    fn run_one(&mut self, n: usize) -> bool {
        use crate::endpoint::Action;
        let mut any = false;
        while let Some(action) = self.end(n).poll_action() {
            any = true;
            let now = self.now;
            match action {
                Action::Datagram { to, from, data } => {
                    let std::net::IpAddr::V4(v4) = to.ip() else {
                        continue;
                    };
                    let m = (u32::from(v4) - 0x0a01_0000) as usize;
                    let from = from.unwrap_or((ip(n), 701).into());
                    self.end(m).handle_datagram(now, from, to, &data);
                    if m != 0 {
                        self.run_one(m);
                    }
                }
                Action::Connect { conn, path, .. } => {
                    let m = match path.to {
                        Locator::Tcp(to) => {
                            let std::net::IpAddr::V4(v4) = to.ip() else {
                                continue;
                            };
                            (u32::from(v4) - 0x0a01_0000) as usize
                        }
                        Locator::Other(other) => {
                            u32::from_be_bytes(other.bytes().try_into().unwrap()) as usize
                        }
                    };
                    let works = matches!(path.to, Locator::Tcp(_)) || self.net == Net::Works;
                    if !works {
                        if self.net == Net::Refuses {
                            self.end(n).handle_conn_lost(now, conn, REFUSED);
                        }
                        continue;
                    }
                    self.accepted += 1;
                    let twin = crate::ids::ConnId::incoming(self.accepted);
                    self.twins.insert(conn, (m, twin));
                    self.backs.insert((m, twin), conn);
                    let from: Locator = match path.to {
                        Locator::Tcp(_) => Locator::Tcp((ip(n), 5000).into()),
                        other => other,
                    };
                    self.end(m).handle_incoming(now, twin, from);
                    self.end(n).handle_connected(now, conn);
                    self.run_one(m);
                }
                Action::Send { conn, data } => {
                    if n == 0 {
                        if let Some(&(m, twin)) = self.twins.get(&conn) {
                            self.end(m).handle_message(now, twin, &data);
                            self.run_one(m);
                        }
                    } else if let Some(&back) = self.backs.get(&(n, conn)) {
                        self.hub.handle_message(now, back, &data);
                    }
                }
                Action::Close { conn } => {
                    if n == 0 {
                        if let Some((m, twin)) = self.twins.remove(&conn) {
                            self.backs.remove(&(m, twin));
                            self.end(m).handle_conn_lost(now, twin, 0);
                            self.run_one(m);
                        }
                    } else if let Some(back) = self.backs.remove(&(n, conn)) {
                        self.twins.remove(&back);
                        self.hub.handle_conn_lost(now, back, 0);
                    }
                }
                Action::Flush { conn } => self.end(n).handle_flushed(now, conn),
                Action::Suspend { token } => self.end(n).handle_suspended(now, token),
                Action::Verify { token } => self.end(n).handle_verified(now, token, false),
                Action::Drain { token } => self.end(n).handle_drained(now, token, 0, 0),
                Action::Install { token, .. } => self.end(n).handle_installed(now, token, 0),
                _ => {}
            }
        }
        while self.end(n).poll_event().is_some() {}
        any
    }

    fn run(&mut self) {
        loop {
            let mut any = false;
            for n in 0..=self.peers.len() {
                any |= self.run_one(n);
            }
            if !any {
                return;
            }
        }
    }

    /// Lets time pass for the connector, and then for the others.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        self.run();
        loop {
            let next = self.hub.poll_timeout();
            let Some(next) = next.filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            self.hub.handle_timeout(self.now);
            while self.run_one(0) {}
        }
        self.now = end;
        for n in 0..self.peers.len() {
            self.peers[n].handle_timeout(self.now);
        }
        self.run();
    }
}

/// Two processes tell the same locator, which leads to one of them. Its flows move, whatever becomes of those of the other one.
#[test]
fn a_locator_that_two_processes_tell() {
    let mut star = Star::new(2, &[OTHER, TCP]);
    let now = star.now;
    star.peers[0].set_locators(now, vec![at(2)]);
    for flow in 0..100 {
        star.open(flow % 2, FlowToken(flow as u64), 1000 + flow as u16);
    }
    star.run();
    star.wait(ms(600_000));
    for flow in 0..100 {
        let kind = [TCP, OTHER][flow as usize % 2];
        assert_eq!(star.hub.kind_of(FlowToken(flow)), kind, "{flow}");
    }
}

/// OFFER that is replayed costs nothing, however many flows lead to the process.
#[test]
fn offers_that_tell_nothing_new_begin_no_trials() {
    let mut pair = both();
    pair.wait(ms(100));
    let offer = pair.heard[A]
        .clone()
        .into_iter()
        .find(|data| crate::wire::parse(data).unwrap().message.kind() == crate::wire::Kind::Offer);
    pair.ends[B].set_locators(pair.now, vec![locator(OTHER, 5)]);
    pair.run();
    let newer = pair.heard[A].last().cloned().unwrap();
    assert_ne!(offer.as_ref(), Some(&newer));
    pair.wait(ms(100));
    let timers = pair.ends[A].tables();
    for data in offer.iter().chain([&newer]) {
        pair.ends[A].handle_datagram(pair.now, control(B), control(A), data);
        assert_eq!(pair.ends[A].tables(), timers);
    }
}

/// Flows that wait for a slot when the locator goes bad try it when it is well again.
#[test]
fn flows_that_waited_for_a_slot_in_vain_move_later() {
    const FLOWS: u64 = 600;
    let mut pair = moved();
    pair.other = [Net::Silent; 2];
    for n in [A, B] {
        pair.open_many(n, FLOWS);
    }
    pair.run();
    pair.wait(ms(10_000));
    pair.other = [Net::Works; 2];
    pair.wait(ms(100_000));
    for flow in 0..FLOWS {
        assert_eq!(pair.ends[A].kind_of(token(flow)), OTHER, "{flow}");
    }
}

/// The TCP connection of one flow breaks again and again. The other flow comes back to the kind that it prefers all the same.
#[test]
fn a_flow_that_breaks_all_the_time_holds_no_other_back() {
    let mut pair = on_tcp([&[OTHER, TCP]; 2]);
    for n in [A, B] {
        pair.open_many(n, 1);
    }
    pair.run();
    pair.wait(ms(10_000));
    for _ in 0..1000 {
        // The attempt of the broken flow on the other kind meets a moment in which it does not work.
        pair.other = [Net::Refuses; 2];
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.run();
        while pair.states() != [State::Live; 2] {
            pair.wait(ms(1));
        }
        pair.other = [Net::Works; 2];
        pair.wait(ms(900));
    }
    assert_eq!(pair.ends[A].kind_of(token(0)), OTHER);
}

/// The flow whose trial all wait for is gone, fails or becomes plain TCP, without an end of its stream: another one tries the locator.
#[test]
fn others_try_when_the_probe_is_gone() {
    for way in 0..4 {
        let mut pair = both();
        pair.wait(ms(60_000));
        for n in [A, B] {
            pair.open_many(n, 20);
        }
        pair.run();
        pair.other = [Net::Silent; 2];
        let tried = pair.paths(A).len();
        while pair.paths(A).len() == tried {
            pair.wait(ms(10));
        }
        let probe = pair.done[A].iter().rev().find_map(|action| match action {
            crate::endpoint::Action::Connect { token, .. } => Some(*token),
            _ => None,
        });
        let probe = probe.unwrap();
        let now = pair.now;
        match way {
            0 => pair.ends[A].gone(now, probe),
            1 => pair.ends[A].out_of_step(now, probe),
            2 => pair.ends[B].out_of_step(now, probe),
            _ => pair.ends[A].demote(now, probe),
        }
        pair.run();
        // A reset by the peer ends no trial: it takes its time.
        let left = usize::from(way == 2);
        assert_eq!(pair.ends[A].tables().conns, left, "{way}");
        pair.other = [Net::Works; 2];
        pair.wait(ms(100_000));
        for flow in 0..20 {
            if token(flow) != probe {
                assert_eq!(pair.ends[A].kind_of(token(flow)), OTHER, "{way}: {flow}");
            }
        }
    }
}
