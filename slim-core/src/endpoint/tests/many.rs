//! Many flows to one peer: opened at once, and broken at once.

use super::pair::*;
use crate::endpoint::{Action, State};
use crate::event::Event;
use crate::ids::{Cause, FlowToken};
use crate::wire::{Kind, Message, parse};

const FLOWS: u64 = 3000;
/// Number of datagrams that a socket's receive buffer of the usual size holds.
const ROOM: usize = 250;

fn is_hello(action: &Action) -> bool {
    matches!(action, Action::Datagram { data, .. }
        if parse(data).is_ok_and(|p| p.message.kind() == Kind::Hello))
}

fn is_connect(action: &Action) -> bool {
    matches!(action, Action::Connect { .. })
}

/// A pair with this many live flows; the recorded actions, events and messages are cleared.
fn live() -> Pair {
    let mut pair = Pair::new();
    pair.open_many(B, FLOWS);
    pair.open_many(A, FLOWS);
    pair.run();
    assert_eq!(pair.many(A, FLOWS, State::Live), FLOWS as usize);
    pair.forget();
    pair
}

#[test]
fn many_hellos_at_once_are_sent_in_portions() {
    let mut pair = Pair::new();
    pair.room = ROOM;
    pair.open_many(B, FLOWS);
    pair.open_many(A, FLOWS);
    pair.wait(ms(500));
    assert_eq!(pair.many(A, FLOWS, State::Live), FLOWS as usize);
    let asked = pair.count(A, is_hello);
    assert!(asked <= FLOWS as usize * 5 / 4, "{asked} HELLOs");
    // An acceptor that has not got HELLO_DONE sends QUERY.
    pair.wait(ms(500));
    assert_eq!(pair.many(B, FLOWS, State::Live), FLOWS as usize);
}

#[test]
fn not_all_flows_send_hello_to_a_silent_peer() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open_many(A, FLOWS);
    pair.wait(ms(1000));
    let asked = pair.count(A, is_hello);
    assert!(asked <= 128 * 6, "{asked} HELLOs");
    pair.wait(ms(2500));
    assert_eq!(pair.many(A, FLOWS, State::Legacy), FLOWS as usize);
    // Later, the address works as if it were new.
    pair.udp[B] = Net::Works;
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn the_slot_of_a_flow_that_has_ended_goes_to_the_next() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open_many(A, 200);
    pair.run();
    assert_eq!(pair.count(A, is_hello), 128);
    for flow in 0..100 {
        pair.ends[A].gone(pair.now, FlowToken(1000 + flow));
    }
    pair.run();
    assert_eq!(pair.count(A, is_hello), 200);
}

#[test]
fn a_flow_that_fails_while_it_waits_for_a_slot_sends_hello_at_once() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open_many(A, 200);
    pair.run();
    pair.forget();
    let last = FlowToken(1199);
    pair.ends[A].fault(pair.now, last, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.count(A, is_hello), 1);
    pair.wait(ms(600));
    assert_eq!(pair.ends[A].state(last), Some(State::Escalated));
}

#[test]
fn a_peer_that_has_answered_other_hellos_is_waited_for_longer() {
    let mut pair = Pair::new();
    pair.open_many(A, 2);
    pair.open_many(B, 2);
    pair.run();
    // For five seconds no HELLO of a later flow arrives, while HELLOs of other flows are answered.
    let lost = |data: &[u8]| match parse(data).unwrap().message {
        Message::Hello(hello) => hello.connector == addrs()[A],
        _ => false,
    };
    pair.open(A);
    pair.open(B);
    let mut other = 0;
    for _ in 0..5 {
        while let Some(action) = pair.ends[A].poll_action() {
            match &action {
                Action::Datagram { data, .. } if lost(data) => {}
                _ => pair.act(A, action),
            }
        }
        pair.run();
        pair.udp[B] = Net::Silent;
        pair.wait(ms(1000));
        pair.udp[B] = Net::Works;
        other += 1;
        let ends = addrs();
        let theirs = std::net::SocketAddr::new(ends[A].ip(), 20_000 + other);
        let token = FlowToken(5000 + u64::from(other));
        let (now, mine) = (pair.now, ends[B]);
        pair.ends[A].open(now, token, crate::ids::Role::Connector, theirs, mine);
        pair.ends[B].open(now, token, crate::ids::Role::Acceptor, mine, theirs);
        pair.run();
    }
    assert_eq!(pair.states(), [State::Negotiating; 2]);
    pair.wait(ms(2000));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn many_broken_flows_connect_in_portions() {
    let mut pair = live();
    pair.tcp[B] = Net::Silent;
    for flow in 0..FLOWS {
        pair.ends[A].fault(pair.now, FlowToken(1000 + flow), Cause::Errno(RESET));
    }
    pair.run();
    assert_eq!(pair.count(A, is_connect), 128);
    // When the flows under way get through, the waiting ones follow.
    pair.tcp[B] = Net::Works;
    pair.wait(ms(1100));
    for n in [A, B] {
        assert_eq!(pair.many(n, FLOWS, State::Live), FLOWS as usize, "side {n}");
    }
}

#[test]
fn two_sides_that_lost_all_flows_rarely_make_two_connections_for_one() {
    let mut pair = live();
    for n in [A, B] {
        for flow in 0..FLOWS {
            pair.ends[n].fault(pair.now, FlowToken(1000 + flow), Cause::Errno(RESET));
        }
    }
    pair.wait(ms(1000));
    for n in [A, B] {
        assert_eq!(pair.many(n, FLOWS, State::Live), FLOWS as usize, "side {n}");
        let resumes = |e: &&Event| matches!(e, Event::Resume { .. });
        assert_eq!(
            pair.events[n].iter().filter(resumes).count(),
            FLOWS as usize
        );
    }
    let made = pair.count(A, is_connect) + pair.count(B, is_connect);
    assert!(made <= FLOWS as usize + 1024, "{made} connections");
}
