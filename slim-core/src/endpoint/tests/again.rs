//! Connections with the addresses and ports of an earlier one.

use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, State};
use crate::ids::{Cause, FinHow, FlowToken, Role};
use crate::wire::{Kind, Message};

const SECOND: FlowToken = FlowToken(8);

impl Pair {
    fn open_second(&mut self, n: usize) {
        let [a, b] = addrs();
        let (role, local, remote) = [(Role::Connector, a, b), (Role::Acceptor, b, a)][n];
        self.ends[n].open(self.now, SECOND, role, local, remote);
    }

    fn second(&self) -> [Option<State>; 2] {
        [A, B].map(|n| self.ends[n].state(SECOND))
    }

    fn ends_first(&mut self, n: usize) {
        self.ends[n].finish(self.now, FLOW, 5, FinHow::Close);
        self.ends[n].gone(self.now, FLOW);
    }

    /// The next datagram that a side sends.
    fn said(&mut self, n: usize) -> Vec<u8> {
        match self.ends[n].poll_action() {
            Some(Action::Datagram { data, .. }) => data,
            other => panic!("{other:?}"),
        }
    }
}

/// Whatever has become of the first connection, a HELLO_ACK or QUERY for it may be meant for the second.
#[test]
fn no_answer_for_an_earlier_connection_once_its_addresses_are_used_again() {
    for (gone, told_before) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut pair = Pair::new();
        pair.open(A);
        let first = pair.said(A);
        match gone {
            true => pair.ends_first(A),
            false => pair.ends[A].finish(pair.now, FLOW, 5, FinHow::Close),
        }
        let [a, b] = addrs();
        if told_before {
            pair.ends[A].about_to_connect(pair.now, a, b);
            pair.open_second(B);
        } else {
            pair.open_second(A);
            pair.open_second(B);
        }
        // The HELLO of the first connection is late.
        pair.ends[B].handle_datagram(pair.now, control(A), b, &first);
        let answer = pair.said(B);
        pair.ends[A].handle_datagram(pair.now, b, control(A), &answer);
        if told_before {
            assert_eq!(pair.second(), [None, Some(State::Negotiating)]);
            pair.open_second(A);
        }
        pair.wait(ms(500));
        assert_eq!(pair.second(), [Some(State::Live); 2]);
        // The live flow is the second one: its stream ends where the second one ends.
        pair.ends[A].finish(pair.now, SECOND, 77, FinHow::Close);
        pair.run();
        let told = |action: &Action| matches!(action, Action::PeerFinal { seq: 77, .. });
        assert_eq!(pair.count(B, told), 1, "{gone} {told_before}");
        let other = |action: &Action| matches!(action, Action::PeerFinal { .. });
        assert_eq!(pair.count(B, other), 1);
    }
}

/// Another process has made the later connection, so only the kernel knows of it.
#[test]
fn no_answer_for_an_earlier_connection_once_another_process_uses_its_addresses() {
    for gone in [true, false] {
        let mut pair = Pair::new();
        pair.open(A);
        pair.ends[A].set_connection_number(FLOW, 17);
        let first = pair.said(A);
        if gone {
            pair.ends[A].finish(pair.now, FLOW, 0, FinHow::Reset);
            pair.ends[A].gone(pair.now, FLOW);
        }
        pair.open_second(B);
        let [_, b] = addrs();
        pair.ends[B].handle_datagram(pair.now, control(A), b, &first);
        let answer = pair.said(B);
        let acknowledged = pair.ends[A].acknowledged(pair.now, &answer);
        let acknowledged = acknowledged.expect("the first connection");
        assert_eq!(acknowledged.flow, (!gone).then_some(FLOW));
        assert_eq!(acknowledged.connection, 17);
        assert_eq!(acknowledged.ends, addrs().into());
        // The driver finds that the kernel has a connection with another number.
        pair.ends[A].superseded(pair.now, &acknowledged);
        pair.ends[A].handle_datagram(pair.now, b, control(A), &answer);
        pair.wait(HELLO_TIME);
        assert_eq!(pair.second(), [None, Some(State::Legacy)], "{gone}");
        assert_eq!(pair.state(A), (!gone).then_some(State::Legacy));
    }
}

#[test]
fn an_acknowledged_flow_is_not_looked_up_again() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.ends[A].set_connection_number(FLOW, 17);
    pair.open(B);
    pair.run();
    assert_eq!(pair.kinds(A)[0], Kind::HelloAck);
    let answer = &pair.heard[A][0];
    assert_eq!(pair.ends[A].acknowledged(pair.now, answer), None);
}

/// The closed flow would tell the sender of HELLO where its stream ends.
#[test]
fn a_flow_closed_without_waiting_for_hello_takes_no_hello_of_the_next() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.ends[B].set_connection_number(FLOW, 17);
    pair.ends[B].finish_announced(FLOW, 5, FinHow::Close);
    pair.ends[B].demote(pair.now, FLOW);
    pair.open(A);
    let hello = pair.said(A);
    let earlier = pair.ends[B].may_be_of_later(pair.now, control(A), &hello);
    let earlier = earlier.expect("the closed connection");
    assert_eq!((earlier.flow, earlier.connection), (Some(FLOW), Some(17)));
    pair.ends[B].release_addresses(&earlier);
    let [_, b] = addrs();
    pair.ends[B].handle_datagram(pair.now, control(A), b, &hello);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
}

#[test]
fn a_port_bound_to_the_wildcard_address_matches_earlier_connections() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open(A);
    pair.run();
    let [mut a, b] = addrs();
    a.set_ip([0, 0, 0, 0].into());
    pair.ends[A].about_to_connect(pair.now, a, b);
    assert_eq!(pair.state(A), Some(State::Legacy));
    // The application has not closed the first connection, which goes on as plain TCP.
    let plain = |action: &Action| matches!(action, Action::Legacy { .. });
    pair.run();
    assert_eq!(pair.count(A, plain), 1);
}

#[test]
fn a_hello_for_a_later_connection_waits_until_that_is_accepted() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.udp[B] = Net::Silent;
    pair.open(A);
    pair.run();
    pair.ends_first(A);
    pair.run();
    pair.udp[B] = Net::Works;
    pair.open_second(A);
    let hello = pair.said(A);
    let [_, b] = addrs();
    // The driver finds that the kernel has closed the first connection.
    let earlier = pair.ends[B].may_be_of_later(pair.now, control(A), &hello);
    let earlier = earlier.expect("the first connection");
    assert_eq!((earlier.flow, earlier.reused_addresses), (Some(FLOW), true));
    pair.ends[B].release_addresses(&earlier);
    pair.ends[B].handle_datagram(pair.now, control(A), b, &hello);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
    assert_eq!(pair.state(B), Some(State::Negotiating));
    pair.ends_first(B);
    pair.open_second(B);
    pair.run();
    assert_eq!(pair.second(), [Some(State::Live); 2]);
}

#[test]
fn an_ended_connection_without_hello_does_not_take_the_next_ones_hello() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open(A);
    pair.run();
    pair.open(B);
    pair.ends_first(A);
    pair.ends_first(B);
    pair.run();
    pair.udp[B] = Net::Works;
    pair.open_second(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
    pair.open_second(B);
    pair.run();
    assert_eq!(pair.second(), [Some(State::Live); 2]);
}

#[test]
fn a_connection_accepted_after_its_end_takes_no_hello_of_the_next() {
    let mut pair = Pair::new();
    pair.open(A);
    let _ = pair.said(A);
    pair.ends_first(A);
    pair.open_second(A);
    pair.run();
    let [a, b] = addrs();
    assert!(pair.ends[B].is_awaited_again(b, a));
    pair.ends[B].open_ended(pair.now, FLOW, (b, a), None);
    pair.run();
    assert_eq!(pair.state(B), Some(State::Legacy));
    pair.open_second(B);
    pair.run();
    assert_eq!(pair.second(), [Some(State::Live); 2]);
}

/// Another process makes the next connection, so its flow id does not say that the addresses were in use before.
#[test]
fn a_connection_accepted_after_its_end_does_not_refuse_the_hello_of_another_process() {
    let mut pair = Pair::new();
    pair.open(A);
    let hello = pair.said(A);
    let [a, b] = addrs();
    pair.ends[B].open_ended(pair.now, FLOW, (b, a), Some(17));
    pair.ends_first(B);
    pair.wait(ms(1_200));
    let earlier = pair.ends[B].may_be_of_later(pair.now, control(A), &hello);
    let earlier = earlier.expect("the ended connection");
    assert_eq!((earlier.flow, earlier.connection), (None, Some(17)));
    // The driver finds that the kernel has a connection with another number.
    pair.ends[B].release_addresses(&earlier);
    pair.ends[B].handle_datagram(pair.now, control(A), b, &hello);
    pair.run();
    assert_eq!(pair.kinds(A).last(), Some(&Kind::HelloWait));
}

/// The kernel has closed the accepted connection, which may be the earlier one or this one. No connection is left in the queue,
/// so none will be accepted for this HELLO.
#[test]
fn a_connection_accepted_after_its_end_gets_its_error_soon() {
    let mut pair = Pair::new();
    pair.open(A);
    let _ = pair.said(A);
    pair.ends_first(A);
    pair.open_second(A);
    pair.run();
    let hello = pair.heard[B].last().unwrap().clone();
    let [a, b] = addrs();
    pair.ends[B].open_ended(pair.now, FLOW, (b, a), None);
    pair.ends[A].fault(pair.now, SECOND, Cause::Errno(RESET));
    pair.wait(ms(400));
    assert_eq!(pair.second(), [Some(State::Negotiating), None]);
    assert_eq!(pair.ends[B].is_waiting(pair.now, a, &hello), Some(b));
    pair.ends[B].is_not_queued(pair.now, a, &hello);
    pair.wait(ms(3_000));
    assert_eq!(pair.second()[A], Some(State::Escalated));
}

#[test]
fn only_flow_ids_of_reused_addresses_have_the_lowest_bit_set() {
    let mut pair = Pair::with([Config::default(), Config::default()]);
    for (token, again) in [(FLOW, false), (SECOND, true)] {
        let [a, b] = addrs();
        pair.ends[A].open(pair.now, token, Role::Connector, a, b);
        pair.run();
        let Some(Message::Hello(hello)) = pair.messages(B).pop() else {
            panic!("no HELLO");
        };
        assert_eq!(hello.flow.is_again(), again);
        pair.forget();
    }
}

/// HELLO_DONE is lost. The next HELLO for these addresses is not that of the first connection.
#[test]
fn an_ended_connection_with_candidates_does_not_take_the_next_ones_hello() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.open(A);
    let [_, b] = addrs();
    let hello = pair.said(A);
    pair.ends[B].handle_datagram(pair.now, control(A), b, &hello);
    let answer = pair.said(B);
    pair.ends[A].handle_datagram(pair.now, b, control(A), &answer);
    assert_eq!(pair.state(A), Some(State::Live));
    while pair.ends[A].poll_action().is_some() {}
    assert!(pair.ends[B].has_hello(FLOW));
    pair.udp[B] = Net::Silent;
    pair.ends_first(B);
    pair.ends_first(A);
    pair.run();
    pair.udp[B] = Net::Works;
    pair.forget();
    pair.open_second(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
    pair.open_second(B);
    pair.run();
    assert_eq!(pair.second(), [Some(State::Live); 2]);
}

/// The sender of HELLO cannot correct this: it may be a process that has left the port since.
#[test]
fn a_hello_long_before_its_connection_is_of_an_earlier_one() {
    for (age, meant) in [(ms(100), false), (ms(1600), true)] {
        let mut pair = Pair::new();
        pair.open(A);
        let hello = pair.said(A);
        let [a, b] = addrs();
        pair.ends[B].handle_datagram(pair.now, control(A), b, &hello);
        assert!(pair.ends[B].is_awaited(b, a));
        pair.wait(ms(2000));
        while pair.ends[B].poll_action().is_some() {}
        pair.ends[B].note_connection_age(pair.now, (b, a), age);
        assert_eq!(pair.ends[B].is_awaited(b, a), meant);
        pair.open(B);
        assert_eq!(pair.ends[B].has_hello(FLOW), meant);
    }
}

/// The tables by flow id and by addresses have the same size, but one of them fills faster.
#[test]
fn no_answer_for_a_connection_whose_addresses_are_forgotten() {
    for others in [0, 4400] {
        let mut pair = Pair::new();
        pair.open(A);
        let first = pair.said(A);
        pair.ends_first(A);
        let [a, b] = addrs();
        // The first 200 flows stay open and take the slots, so that no HELLO is sent for the later ones.
        for n in 0..others {
            let mut local = a;
            local.set_port(10_000 + n);
            let token = FlowToken(100 + u64::from(n));
            pair.ends[A].open(pair.now, token, Role::Connector, local, b);
            if n >= 200 {
                pair.ends[A].gone(pair.now, token);
            }
        }
        while pair.ends[A].poll_action().is_some() {}
        pair.open(B);
        pair.ends[B].handle_datagram(pair.now, control(A), b, &first);
        let answer = pair.said(B);
        pair.ends[A].handle_datagram(pair.now, b, control(A), &answer);
        let answered = pair.ends[A].poll_action().is_some();
        assert_eq!(answered, others == 0);
    }
}
