//! Flows that the driver has released: the endpoint keeps enough of them to answer a late peer, for a limited time.

use std::time::Duration;

use super::pair::*;
use crate::endpoint::{Action, State, Tables};
use crate::event::{Event, LegacyReason, LingerLimit};
use crate::ids::{Cause, FinHow, FlowToken, Role, Verdict};
use crate::wire::Kind;

/// The first datagram of a side, which the network had dropped, arrives late.
fn comes_late(pair: &mut Pair, from: usize) {
    let sent = pair.done[from].iter().find_map(|action| match action {
        Action::Datagram { to, data, .. } => Some((*to, data.clone())),
        _ => None,
    });
    let (to, data) = sent.expect("something was sent");
    pair.ends[1 - from].handle_datagram(pair.now, control(from), to, &data);
    pair.run();
}

#[test]
fn a_forgotten_connector_flow_answers_a_late_hello_ack_by_demote() {
    let mut pair = Pair::given_up_by_connector();
    pair.ends[A].gone(pair.now, FLOW);
    assert_eq!(pair.ends[A].tables().flows, 0);
    pair.udp[A] = Net::Works;
    comes_late(&mut pair, B);
    assert_eq!(pair.kinds(B).last(), Some(&Kind::Demote));
    assert_eq!(pair.state(B), Some(State::Legacy));
    // A second HELLO_ACK is not answered.
    let heard = pair.heard[B].len();
    comes_late(&mut pair, B);
    assert_eq!(pair.heard[B].len(), heard);
}

#[test]
fn a_hello_ack_after_two_minutes_is_dropped() {
    let mut pair = Pair::given_up_by_connector();
    pair.ends[A].gone(pair.now, FLOW);
    pair.wait(Duration::from_secs(120));
    let heard = pair.heard[B].len();
    comes_late(&mut pair, B);
    assert_eq!(pair.heard[B].len(), heard);
}

/// The connector was told to wait, so it asks for longer than others do. Meanwhile its connection is accepted and given up.
#[test]
fn a_hello_that_was_told_to_wait_is_refused_after_a_long_outage() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
    for end in &mut pair.ends {
        end.fault(pair.now, FLOW, Cause::Errno(RESET));
    }
    pair.udp[A] = Net::Silent;
    pair.open(B);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(10_000));
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)));
    pair.ends[B].gone(pair.now, FLOW);
    pair.wait(ms(30_000));
    assert_eq!(pair.state(A), Some(State::Negotiating));
    pair.udp[A] = Net::Works;
    pair.wait(ms(2_000));
    assert_eq!(pair.kinds(A).last(), Some(&Kind::HelloNak));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_forgotten_acceptor_flow_refuses_its_own_late_hello_only() {
    let mut pair = Pair::given_up_by_acceptor();
    pair.ends[B].gone(pair.now, FLOW);
    pair.open(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloNak]);
    let reason = LegacyReason::Policy;
    assert_eq!(pair.events[A], [Event::Legacy { reason }]);
    comes_late(&mut pair, A);
    assert_eq!(pair.kinds(A), [Kind::HelloNak; 2], "the first may be lost");
    // The same addresses, but another flow id.
    let next = FlowToken(8);
    let [ours, theirs] = addrs();
    pair.ends[A].open(pair.now, next, Role::Connector, ours, theirs);
    pair.run();
    assert_eq!(pair.kinds(A).last(), Some(&Kind::HelloWait));
    pair.ends[B].open(pair.now, next, Role::Acceptor, theirs, ours);
    pair.run();
    assert_eq!(pair.ends[A].state(next), Some(State::Live));
}

#[test]
fn a_late_hello_is_refused_for_four_times_the_hello_timeout() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.ends[B].demote(pair.now, FLOW);
    pair.ends[B].gone(pair.now, FLOW);
    pair.wait(Duration::from_secs(12));
    pair.open(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
}

#[test]
fn a_demoted_flow_that_is_forgotten_still_answers() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    pair.ends[A].gone(pair.now, FLOW);
    pair.udp[B] = Net::Works;
    pair.ends[B].fault(pair.now, FLOW, Cause::Eof { received: 0 });
    pair.run();
    assert_eq!(pair.state(B), Some(State::Legacy));
    let reason = LegacyReason::PeerDemoted;
    assert_eq!(pair.events[B].last(), Some(&Event::Legacy { reason }));
}

#[test]
fn a_repeated_hello_for_a_demoted_flow_is_refused() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.udp[A] = Net::Silent;
    pair.open(A);
    pair.run();
    assert_eq!(pair.states(), [State::Negotiating; 2]);
    pair.ends[B].demote(pair.now, FLOW);
    pair.run();
    pair.ends[B].gone(pair.now, FLOW);
    pair.udp[A] = Net::Works;
    pair.wait(ms(200));
    assert_eq!(pair.state(A), Some(State::Legacy));
    assert_eq!(pair.kinds(A), [Kind::HelloNak]);
}

/// The tables after four minutes, in which everything old is forgotten.
fn in_a_while(pair: &mut Pair, n: usize) -> Tables {
    for _ in 0..4 {
        pair.wait(Duration::from_secs(60));
        pair.ends[n].tidy(pair.now);
    }
    assert!(!pair.ends[n].tidy(pair.now), "no entry is left to expire");
    pair.ends[n].tables()
}

#[test]
fn flows_of_all_kinds_leave_no_state_in_the_end() {
    // Legacy by silence or by a refusal; demoted, closed, reset and half-closed.
    let mut pair = Pair::new();
    pair.open_many(A, 300);
    pair.wait(Duration::from_secs(13));
    pair.udp[B] = Net::Refuses;
    pair.open(A);
    pair.wait(ms(100));
    for token in (0..300).map(|n| FlowToken(1000 + n)).chain([FLOW]) {
        pair.ends[A].demote(pair.now, token);
        pair.run();
        pair.ends[A].gone(pair.now, token);
    }
    for how in [FinHow::Close, FinHow::Reset, FinHow::HalfClose] {
        let mut other = Pair::live();
        other.ends[A].fault(other.now, FLOW, Cause::Errno(RESET));
        other.ends[A].finish(other.now, FLOW, 0, how);
        other.run();
        for n in [A, B] {
            other.ends[n].gone(other.now, FLOW);
            other.run();
            assert_eq!(other.ends[n].tables().flows, 0);
            assert_eq!(in_a_while(&mut other, n), Tables::default());
        }
    }
    for n in [A, B] {
        assert_eq!(in_a_while(&mut pair, n), Tables::default());
    }
}

#[test]
fn all_tables_are_bounded() {
    let mut pair = Pair::new();
    for n in 0..20_000_u32 {
        let ip = std::net::Ipv4Addr::from(0x0a00_0000 + n);
        let token = FlowToken(n.into());
        let role = [Role::Connector, Role::Acceptor][n as usize % 2];
        pair.ends[A].open(pair.now, token, role, addrs()[A], (ip, 80).into());
        pair.ends[A].demote(pair.now, token);
        pair.ends[A].gone(pair.now, token);
        while pair.ends[A].poll_action().is_some() {}
        while pair.ends[A].poll_event().is_some() {}
    }
    let tables = pair.ends[A].tables();
    assert_eq!((tables.flows, tables.names, tables.timers), (0, 0, 0));
    assert!(tables.past <= 3 * 4096 + 2 * 1024 + 1, "{tables:?}");
    assert_eq!(in_a_while(&mut pair, A), Tables::default());
}

#[test]
fn an_orphaned_flow_ends_where_it_was_closed() {
    let (owed, limit) = (9, LingerLimit::Memory);
    for received in [50, 41] {
        let mut pair = Pair::live();
        pair.counts[B].received = received;
        pair.ends[A].finish(pair.now, FLOW, 50, FinHow::Close);
        pair.ends[A].orphan(pair.now, FLOW, owed, limit);
        pair.ends[A].gone(pair.now, FLOW);
        pair.run();
        assert_eq!(pair.events[A][0], Event::Orphaned { owed, limit });
        // The kernel goes on delivering. If the connection fails, the peer has received everything, or gets an error.
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.wait(Duration::from_secs(1));
        let whole = received == 50;
        let end = if whole {
            Verdict::Eof
        } else {
            Verdict::Errno(RESET)
        };
        assert_eq!(pair.verdict(B), Some(end));
    }
}

#[test]
fn an_orphaned_flow_without_a_transport_is_given_up_at_both_ends() {
    let mut pair = Pair::live();
    pair.tcp = [Net::Silent; 2];
    pair.ends[A].finish(pair.now, FLOW, 50, FinHow::Close);
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    }
    pair.run();
    pair.ends[A].orphan(pair.now, FLOW, 9, LingerLimit::Flows);
    pair.run();
    assert_eq!(pair.states(), [State::Escalated; 2]);
    pair.ends[A].gone(pair.now, FLOW);
    assert_eq!(pair.ends[A].tables().conns, 0);
}
