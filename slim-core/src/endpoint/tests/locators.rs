//! Other kinds of transport: `docs/PROTOCOL.md`, section "Kinds of transport".

use std::net::SocketAddr;

use std::time::Duration;

use super::pair::*;
use crate::auth::{FlowKey, Fresh};
use crate::config::Config;
use crate::endpoint::ends::Ends;
use crate::endpoint::paths::Paths;
use crate::endpoint::{Action, Endpoint, State};
use crate::ids::{Cause, EndpointId, FlowToken, Role};
use crate::transport::{Locator, OtherLocator, Path, TransportKind, Transports};
use crate::wire::{self, Kind, LocatorList, Message, Offer, feature};

const TCP: TransportKind = TransportKind::TCP;
const OTHER: TransportKind = TransportKind::TEST;
const STRANGE: TransportKind = TransportKind::new(241);

pub(super) fn locator(kind: TransportKind, n: usize) -> OtherLocator {
    OtherLocator::new(kind, &[n as u8 + 1]).unwrap()
}

/// The transports of side `n`: these kinds, with a locator for each kind but TCP.
pub(super) fn transports(n: usize, kinds: &[TransportKind]) -> Transports {
    let others = kinds.iter().filter(|kind| **kind != TCP);
    Transports {
        locators: others.map(|kind| locator(*kind, n)).collect(),
        kinds: kinds.to_vec(),
        ..Transports::tcp(vec![addrs()[n].ip()], 700, 701)
    }
}

/// A pair whose sides have these kinds, with a flow that is live at both ends.
pub(super) fn live(kinds: [&[TransportKind]; 2]) -> Pair {
    live_with(&Config::default(), kinds)
}

fn live_with(config: &Config, kinds: [&[TransportKind]; 2]) -> Pair {
    let mut pair = Pair::new();
    for (n, kinds) in kinds.into_iter().enumerate() {
        let own = transports(n, kinds);
        pair.ends[n] = Endpoint::new(config.clone(), id(n), own, [n as u8; 32]);
    }
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair
}

/// Both sides have both kinds, and prefer `OTHER`.
fn both() -> Pair {
    live([&[OTHER, TCP]; 2])
}

fn offers(pair: &Pair, n: usize) -> usize {
    let kinds = pair.kinds(n);
    kinds.iter().filter(|kind| **kind == Kind::Offer).count()
}

/// The locators of its peer that `n` knows.
fn known(pair: &Pair, n: usize) -> Vec<OtherLocator> {
    let end = &pair.ends[n];
    end.processes
        .locators(id(1 - n), addrs()[1 - n].ip())
        .to_vec()
}

/// `n` sends an OFFER with these values under the key of the flow, correct or not.
fn say(pair: &mut Pair, n: usize, serial: u64, kinds: &[TransportKind]) -> Vec<u8> {
    let offer = Message::Offer(Offer {
        flow: pair.ends[n].flows[&FLOW].id.unwrap(),
        serial,
        answers: 0,
        locators: LocatorList::new(kinds.iter().map(|kind| locator(*kind, 8))),
    });
    let data = pair.ends[n].seal(FLOW, Fresh::None, &offer);
    hear(pair, 1 - n, &data);
    data
}

fn hear(pair: &mut Pair, n: usize, data: &[u8]) {
    let (from, to) = (control(1 - n), control(n));
    pair.ends[n].handle_datagram(pair.now, from, to, data);
}

/// `n` gets `data`, and drops it.
fn is_dropped(pair: &mut Pair, n: usize, data: &[u8]) {
    let (dropped, before) = (pair.ends[n].dropped(), known(pair, n));
    hear(pair, n, data);
    assert_eq!(pair.ends[n].dropped(), dropped + 1);
    assert_eq!(known(pair, n), before);
    assert_eq!(pair.ends[n].poll_action(), None);
}

/// A peer may have several adapters, and all are to be used.
#[test]
fn processes_and_addresses_begin_with_different_locators() {
    let mut pair = both();
    let all = [7, 8, 9].map(|n| locator(OTHER, n));
    let end = &mut pair.ends[A];
    let own = end.own.clone();
    let flow = end.flows.get_mut(&FLOW).unwrap();
    let (local, there) = flow.ends.both();
    let addrs = [there.ip(), [10, 1, 0, 2].into(), [10, 2, 0, 2].into()];
    let peer = flow.peer.as_mut().unwrap();
    std::sync::Arc::make_mut(&mut peer.process).addrs = addrs.into_iter().collect();
    let mut first = |all: &[OtherLocator], pid, ip| {
        flow.ends = Ends::new(local, SocketAddr::new(ip, there.port()));
        let paths = Paths::of(flow, all, &EndpointId { pid, ..id(A) }, &own);
        paths.of_kinds(|kind| kind == OTHER)[0].to
    };
    let by_process = [1, 2, 3].map(|pid| first(&all, pid, addrs[0]));
    let by_address = addrs.map(|ip| first(&all, 1, ip));
    assert_eq!(by_process, by_address);
    // Some locators begin with addresses.
    let own_address = |ip: &str, more: &[u8]| {
        let ip: std::net::Ipv4Addr = ip.parse().unwrap();
        let bytes = [&ip.to_ipv6_mapped().octets(), more].concat();
        OtherLocator::new(OTHER, &bytes).unwrap()
    };
    let near = ["10.0.0.2", "10.1.0.7", "10.2.0.2"].map(|ip| own_address(ip, b"more"));
    for (n, ip) in addrs.into_iter().enumerate() {
        for pid in 1..4 {
            assert_eq!(first(&near, pid, ip), near[n].into());
        }
    }
    let mut each = by_process;
    each.sort();
    assert_eq!(each, all.map(Into::into));
}

/// Ports of one network are equally near, whatever their numbers in it.
#[test]
fn locators_in_one_network_are_shared_by_processes() {
    let mut pair = both();
    let end = &mut pair.ends[A];
    let own = end.own.clone();
    let flow = end.flows.get_mut(&FLOW).unwrap();
    let local = flow.ends.local();
    for (there, ports) in [
        ("10.0.0.2", ["10.0.0.2", "10.0.0.3"]),
        ("fd00::2", ["fd00::a", "fd00::1b"]),
    ] {
        let ports = ports.map(|ip| {
            let bytes = match ip.parse().unwrap() {
                std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                std::net::IpAddr::V6(ip) => ip.octets(),
            };
            OtherLocator::new(OTHER, &bytes).unwrap()
        });
        flow.ends = Ends::new(local, SocketAddr::new(there.parse().unwrap(), 80));
        let mut first = [1, 2].map(|pid| {
            let paths = Paths::of(flow, &ports, &EndpointId { pid, ..id(A) }, &own);
            paths.of_kinds(|kind| kind == OTHER)[0].to
        });
        first.sort();
        assert_eq!(first, ports.map(Into::into), "{there}");
    }
}

fn fault(pair: &mut Pair, n: usize) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
}

#[test]
fn two_processes_with_another_kind_exchange_offers_once() {
    let mut pair = both();
    for n in [A, B] {
        assert_eq!(offers(&pair, n), 1);
        assert_eq!(known(&pair, n), [locator(OTHER, 1 - n)]);
    }
    pair.forget();
    for n in [A, B] {
        pair.open_many(n, 20);
    }
    pair.run();
    assert_eq!(pair.many(A, 20, State::Live), 20);
    assert_eq!([A, B].map(|n| offers(&pair, n)), [0, 0]);
}

#[test]
fn a_process_with_tcp_only_sends_and_gets_no_offer() {
    for (a, b) in [(&[TCP][..], &[OTHER][..]), (&[OTHER], &[]), (&[], &[])] {
        let mut pair = live([a, b]);
        pair.wait(ms(5000));
        assert_eq!([A, B].map(|n| offers(&pair, n)), [0, 0]);
        for message in pair.messages(A).into_iter().chain(pair.messages(B)) {
            let (features, kinds) = match message {
                Message::Hello(hello) => (hello.features, a),
                Message::HelloAck(ack) => (ack.features, b),
                _ => continue,
            };
            let others = kinds.contains(&OTHER);
            assert_eq!(features & feature::TRANSPORTS != 0, others);
        }
        fault(&mut pair, A);
        assert_eq!(pair.states(), [State::Live; 2]);
        assert!(pair.paths(A).iter().all(|path| path.kind() == TCP));
    }
}

#[test]
fn an_offer_that_was_not_agreed_on_is_dropped() {
    for kinds in [[&[TCP][..], &[OTHER][..]], [&[OTHER], &[TCP]]] {
        let mut pair = live(kinds);
        for n in [A, B] {
            let data = say(&mut pair, n, 5, &[OTHER]);
            assert_eq!(known(&pair, 1 - n), []);
            is_dropped(&mut pair, 1 - n, &data);
        }
    }
}

#[test]
fn forged_offers_change_nothing() {
    let mut pair = both();
    let data = pair.heard[B]
        .iter()
        .find(|data| wire::parse(data).unwrap().message.kind() == Kind::Offer);
    let genuine = data.unwrap().clone();
    for at in [8, 24, 32, 41, genuine.len() - 1] {
        let mut forged = genuine.clone();
        forged[at] ^= 1;
        is_dropped(&mut pair, B, &forged);
    }
    // Sealed under another key, and reflected to its sender.
    let Message::Offer(offer) = wire::parse(&genuine).unwrap().message else {
        unreachable!()
    };
    let inputs = crate::auth::KeyInputs {
        flow: offer.flow,
        random_c: [1; 32],
        random_s: [2; 32],
        connector: id(A),
        acceptor: id(B),
    };
    let forged =
        FlowKey::derive(None, &inputs).seal(Role::Connector, Fresh::None, &Message::Offer(offer));
    is_dropped(&mut pair, B, &forged);
    is_dropped(&mut pair, A, &genuine);
}

#[test]
fn a_replayed_offer_is_answered_and_an_old_one_is_dropped() {
    let mut pair = both();
    pair.forget();
    let new = say(&mut pair, A, 5, &[OTHER]);
    pair.run();
    assert_eq!(known(&pair, B), [locator(OTHER, 8)]);
    assert_eq!(offers(&pair, A), 1);
    hear(&mut pair, B, &new);
    pair.run();
    assert_eq!(offers(&pair, A), 2);
    let mut old = both();
    let old = say(&mut old, A, 4, &[OTHER]);
    // Both pairs have the same flow key, because they have the same seeds.
    is_dropped(&mut pair, B, &old);
}

#[test]
fn unknown_kinds_are_left_out() {
    let mut pair = both();
    say(
        &mut pair,
        A,
        5,
        &[STRANGE, OTHER, STRANGE, TransportKind::VERBS],
    );
    assert_eq!(known(&pair, B), [locator(OTHER, 8)]);
    say(&mut pair, A, 6, &[STRANGE]);
    assert_eq!(known(&pair, B), []);
    fault(&mut pair, B);
    pair.wait(ms(10));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn an_offer_without_an_answer_is_repeated_while_a_flow_is_live() {
    let mut pair = both();
    pair.forget();
    pair.udp[A] = Net::Silent;
    pair.ends[A].set_locators(pair.now, vec![locator(OTHER, 5)]);
    pair.wait(ms(10_000));
    assert_eq!(offers(&pair, B), 8);
    assert_eq!(known(&pair, B), [locator(OTHER, 5)]);
    pair.forget();
    pair.wait(ms(600_000));
    assert!((9..=13).contains(&offers(&pair, B)), "{}", offers(&pair, B));
    pair.udp[A] = Net::Works;
    pair.forget();
    pair.wait(ms(60_000));
    assert_eq!([A, B].map(|n| offers(&pair, n)), [1, 1]);
    assert_eq!(pair.ends[A].tables().questions, 0);
}

#[test]
fn offers_end_while_a_flow_is_held_and_begin_again_when_it_is_live() {
    let holding = Config {
        hold: Some(Duration::from_secs(3600)),
        ..Config::default()
    };
    let mut pair = live_with(&holding, [&[OTHER, TCP]; 2]);
    for net in [&mut pair.udp, &mut pair.tcp, &mut pair.other] {
        *net = [Net::Silent; 2];
    }
    pair.ends[B].set_locators(pair.now, vec![locator(OTHER, 5)]);
    fault(&mut pair, A);
    fault(&mut pair, B);
    pair.wait(ms(100_000));
    assert_eq!(pair.ends[B].exchanges.len(), 1);
    pair.wait(ms(20_000));
    assert_eq!(pair.ends[B].exchanges.len(), 0);
    for net in [&mut pair.udp, &mut pair.tcp, &mut pair.other] {
        *net = [Net::Works; 2];
    }
    assert_eq!(known(&pair, A), [locator(OTHER, B)]);
    pair.wait(ms(120_000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(known(&pair, A), [locator(OTHER, 5)]);
}

#[test]
fn new_locators_are_offered_once_per_process() {
    for n in [A, B] {
        let mut pair = both();
        for n in [A, B] {
            pair.open_many(n, 20);
        }
        pair.run();
        pair.forget();
        pair.ends[n].set_locators(pair.now, vec![locator(OTHER, 5)]);
        pair.run();
        assert_eq!(known(&pair, 1 - n), [locator(OTHER, 5)]);
        assert_eq!([A, B].map(|n| offers(&pair, n)), [1, 1]);
    }
}

#[test]
fn an_exchange_continues_with_another_flow_when_its_own_is_over() {
    let mut pair = both();
    for n in [A, B] {
        pair.open_many(n, 2);
    }
    pair.run();
    pair.forget();
    pair.udp[B] = Net::Silent;
    pair.ends[A].set_locators(pair.now, vec![locator(OTHER, 5)]);
    pair.run();
    pair.ends[A].gone(pair.now, FLOW);
    pair.ends[A].gone(pair.now, FlowToken(1000));
    pair.udp[B] = Net::Works;
    pair.wait(ms(200));
    assert_eq!(known(&pair, B), [locator(OTHER, 5)]);
    assert_eq!([A, B].map(|n| offers(&pair, n)), [1, 1]);
    // The exchange ends when no flow is left.
    pair.udp[B] = Net::Silent;
    pair.ends[A].set_locators(pair.now, vec![locator(OTHER, 6)]);
    pair.ends[A].gone(pair.now, FlowToken(1001));
    pair.wait(ms(200));
    assert_eq!(pair.ends[A].tables().questions, 0);
}

#[test]
fn a_false_identity_at_another_address_changes_no_locators() {
    let mut pair = both();
    let stranger: SocketAddr = "10.0.0.9:5000".parse().unwrap();
    let own = Transports {
        locators: vec![locator(OTHER, 77)],
        ..transports(A, &[OTHER])
    };
    let mut liar = Endpoint::new(Config::default(), id(A), own, [99; 32]);
    let token = FlowToken(3);
    liar.open(pair.now, token, Role::Connector, stranger, addrs()[B]);
    pair.ends[B].open(pair.now, token, Role::Acceptor, addrs()[B], stranger);
    for _ in 0..5 {
        while let Some(action) = liar.poll_action() {
            if let Action::Datagram { to, data, .. } = action {
                let from = SocketAddr::new(stranger.ip(), 701);
                pair.ends[B].handle_datagram(pair.now, from, to, &data);
            }
        }
        while let Some(action) = pair.ends[B].poll_action() {
            if let Action::Datagram { data, .. } = action {
                liar.handle_datagram(pair.now, control(B), stranger, &data);
            }
        }
    }
    assert_eq!(pair.ends[B].state(token), Some(State::Live));
    let at = |ip| pair.ends[B].processes.locators(id(A), ip).to_vec();
    assert_eq!(at(stranger.ip()), [locator(OTHER, 77)]);
    assert_eq!(at(addrs()[A].ip()), [locator(OTHER, A)]);
}

#[test]
fn the_preferred_kind_comes_first_and_every_second_connection_goes_to_the_first_address() {
    let home = Path::to(SocketAddr::new(addrs()[B].ip(), 700));
    let other = Path::to(locator(OTHER, B));
    let orders = [
        (&[OTHER][..], [other, home, home]),
        (&[TCP, OTHER], [home, home, other]),
    ];
    // An answer of the process over UDP does not change the order.
    let nets = [Net::Silent, Net::Works].into_iter();
    for ((kinds, first), udp) in nets.flat_map(|udp| orders.map(|order| (order, udp))) {
        let mut pair = live([kinds, &[OTHER]]);
        pair.forget();
        (pair.tcp, pair.other) = ([Net::Silent; 2], [Net::Silent; 2]);
        pair.udp = [udp; 2];
        fault(&mut pair, A);
        pair.wait(ms(60_000));
        let paths = pair.paths(A);
        assert_eq!(paths[..3], first);
        let others = paths.iter().filter(|path| **path == other).count();
        assert!(others > 3, "{others} of {}", paths.len());
    }
}

#[test]
fn a_flow_moves_from_one_kind_to_the_other_and_back() {
    let mut pair = both();
    for (works, kind) in [(TCP, TCP), (OTHER, OTHER), (TCP, TCP)] {
        pair.forget();
        let state = |kind| {
            if kind == works {
                Net::Works
            } else {
                Net::Refuses
            }
        };
        (pair.tcp, pair.other) = ([state(TCP); 2], [state(OTHER); 2]);
        fault(&mut pair, A);
        pair.wait(ms(1000));
        assert_eq!(pair.states(), [State::Live; 2]);
        let paths = pair.paths(A);
        assert_eq!(paths.last().map(Path::kind), Some(kind), "{paths:?}");
    }
}

/// Nothing passes by that kind, and the peer answers over IP.
#[test]
fn a_kind_that_never_connects_delays_a_resume_only_a_little() {
    for n in [A, B] {
        let mut pair = both();
        pair.forget();
        pair.other = [Net::Silent; 2];
        fault(&mut pair, n);
        pair.wait(ms(50));
        assert_eq!(pair.states(), [State::Live; 2]);
        let kinds: Vec<_> = pair.paths(n).iter().map(Path::kind).collect();
        assert_eq!(kinds, [OTHER, TCP]);
        assert_eq!(pair.paths(n)[0].to, Locator::from(locator(OTHER, 1 - n)));
    }
}

/// OFFER is repeated as long as one of the flows is live.
#[test]
fn offers_go_on_while_another_flow_is_live() {
    let holding = Config {
        hold: Some(Duration::from_secs(3600)),
        ..Config::default()
    };
    let mut pair = live_with(&holding, [&[OTHER, TCP]; 2]);
    for n in [A, B] {
        pair.open_many(n, 1);
    }
    pair.run();
    let second = FlowToken(1000);
    assert_eq!(pair.ends[A].state(second), Some(State::Live));
    // No new connection can be made, and no datagram arrives. One of the two flows has lost its transport.
    for net in [&mut pair.udp, &mut pair.tcp, &mut pair.other] {
        *net = [Net::Silent; 2];
    }
    pair.ends[B].set_locators(pair.now, vec![locator(OTHER, 5)]);
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    }
    pair.wait(ms(200_000));
    assert_eq!(pair.ends[B].state(second), Some(State::Live));
    assert!(pair.ends[B].is_held(FLOW));
    pair.udp = [Net::Works; 2];
    pair.wait(ms(600_000));
    assert_eq!(pair.ends[A].state(second), Some(State::Live));
    assert_eq!(pair.ends[A].locators(second), [locator(OTHER, 5)]);
}

/// OFFER ends when it is answered, although this process cannot remember the peer's locators.
#[test]
fn offers_end_when_the_table_is_full() {
    use crate::endpoint::processes::ToldLocators;
    let mut pair = Pair::new();
    for n in [A, B] {
        let own = transports(n, &[OTHER, TCP]);
        pair.ends[n] = Endpoint::new(Config::default(), id(n), own, [n as u8; 32]);
    }
    // Another process has told locators at many addresses, and is in use.
    let _kept = pair.ends[A]
        .processes
        .share(crate::endpoint::processes::PeerProcess {
            id: id(9),
            addrs: Box::new([]),
            resume_port: 700,
            control_port: 701,
            features: 0,
            moved: false,
        });
    for n in 0..4096u32 {
        let told = ToldLocators {
            serial: 1,
            heard: 1,
            locators: Box::new([]),
        };
        pair.ends[A]
            .processes
            .tell(id(9), n.to_be_bytes().into(), told);
    }
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.wait(ms(1000));
    pair.forget();
    pair.wait(ms(3_600_000));
    let all = [A, B].map(|n| offers(&pair, n));
    assert!(all[B] < 10, "{all:?}");
}
