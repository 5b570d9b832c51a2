//! Other kinds of transport: `docs/PROTOCOL.md`, section "Kinds of transport".

use std::net::SocketAddr;

use super::pair::*;
use crate::auth::{FlowKey, Fresh};
use crate::config::Config;
use crate::endpoint::{Action, Endpoint, State};
use crate::ids::{Cause, FlowToken, Role};
use crate::transport::{Locator, OtherLocator, Path, TransportKind, Transports};
use crate::wire::{self, Kind, LocatorList, Message, Offer, feature};

const TCP: TransportKind = TransportKind::TCP;
const OTHER: TransportKind = TransportKind::TEST;
const STRANGE: TransportKind = TransportKind::new(241);

fn locator(kind: TransportKind, n: usize) -> OtherLocator {
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

fn with(kinds: [&[TransportKind]; 2]) -> Pair {
    let mut pair = Pair::new();
    for (n, kinds) in kinds.into_iter().enumerate() {
        let own = transports(n, kinds);
        pair.ends[n] = Endpoint::new(Config::default(), id(n), own, [n as u8; 32]);
    }
    pair
}

/// A pair whose sides have these kinds, with a flow that is live at both ends.
pub(super) fn live(kinds: [&[TransportKind]; 2]) -> Pair {
    let mut pair = with(kinds);
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
fn an_offer_without_an_answer_is_repeated_a_limited_number_of_times() {
    let mut pair = both();
    pair.forget();
    pair.udp[A] = Net::Silent;
    pair.ends[A].set_locators(pair.now, vec![locator(OTHER, 5)]);
    pair.wait(ms(10_000));
    assert_eq!(offers(&pair, B), 6);
    assert_eq!(known(&pair, B), [locator(OTHER, 5)]);
    assert_eq!(pair.ends[A].tables().questions, 0);
    // The next flow starts a new exchange.
    pair.udp[A] = Net::Works;
    pair.forget();
    for n in [A, B] {
        pair.open_many(n, 1);
    }
    pair.run();
    assert_eq!([A, B].map(|n| offers(&pair, n)), [1, 1]);
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

#[test]
fn a_kind_that_never_connects_delays_a_resume_only_a_little() {
    let mut pair = both();
    pair.forget();
    pair.other = [Net::Silent; 2];
    fault(&mut pair, A);
    pair.wait(ms(1100));
    assert_eq!(pair.states(), [State::Live; 2]);
    let kinds: Vec<_> = pair.paths(A).iter().map(Path::kind).collect();
    assert_eq!(kinds, [OTHER, TCP]);
    assert_eq!(pair.paths(A)[0].to, Locator::from(locator(OTHER, B)));
}
