//! Connections that end or break before the negotiation is over.

use super::ends::final_at;
use super::pair::*;
use crate::endpoint::{Action, State};
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, FinHow, FlowToken, Role, Verdict};
use crate::wire::Kind;

/// The acceptor has a candidate; the connector has no answer yet.
fn half_way() -> Pair {
    let mut pair = Pair::new();
    pair.udp[A] = Net::Silent;
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Negotiating; 2]);
    assert!(pair.ends[B].may_have_peer(pair.now, FLOW));
    pair.forget();
    pair
}

/// The acceptor has a candidate, and the flow is live at the connector, whose HELLO_DONE is lost.
fn without_proof() -> Pair {
    let mut pair = half_way();
    pair.udp[A] = Net::Works;
    pair.udp[B] = Net::Silent;
    let [a, b] = addrs();
    let hello = |pair: &mut Pair| {
        pair.ends[A].handle_timeout(pair.now + ms(80));
        match pair.ends[A].poll_action() {
            Some(Action::Datagram { data, .. }) => data,
            other => panic!("{other:?}"),
        }
    };
    let data = hello(&mut pair);
    pair.ends[B].handle_datagram(pair.now, control(A), b, &data);
    pair.run();
    assert_eq!(pair.states(), [State::Live, State::Negotiating], "{a}");
    pair.forget();
    pair
}

fn closed(pair: &mut Pair, n: usize, sent: u64) {
    pair.counts[n].sent = sent;
    pair.counts[1 - n].received = sent;
    pair.ends[n].finish(pair.now, FLOW, sent, FinHow::Close);
}

#[test]
fn closing_a_flow_with_candidates_tells_them_where_the_stream_ends() {
    for break_first in [false, true] {
        let mut pair = half_way();
        closed(&mut pair, B, 5);
        pair.ends[B].gone(pair.now, FLOW);
        pair.run();
        if break_first {
            pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        }
        pair.udp[A] = Net::Works;
        pair.wait(ms(80));
        assert_eq!(pair.kinds(A)[..2], [Kind::HelloAck, Kind::Fin]);
        if !break_first {
            assert_eq!(pair.state(A), Some(State::Live));
            pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
            pair.run();
        }
        // A's transport is lost, and no byte is missing.
        assert_eq!(pair.verdict(A), Some(Verdict::Eof));
    }
}

#[test]
fn a_flow_closed_before_hello_came_answers_hello_for_a_second() {
    for (late, answer) in [
        (900, vec![Kind::HelloAck, Kind::Fin]),
        (1100, vec![Kind::HelloNak]),
    ] {
        let mut pair = Pair::new();
        pair.open(B);
        assert!(pair.ends[B].may_have_peer(pair.now, FLOW));
        closed(&mut pair, B, 5);
        pair.ends[B].gone(pair.now, FLOW);
        pair.wait(ms(late));
        pair.open(A);
        pair.run();
        assert_eq!(pair.kinds(A), answer);
        if answer.len() == 2 {
            pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
            pair.run();
            assert_eq!(pair.verdict(A), Some(Verdict::Eof));
        }
    }
}

/// The acceptor does not wait for a HELLO of this host. If HELLO comes all the same, its sender is not told that there is no session.
#[test]
fn a_flow_closed_without_waiting_for_hello_answers_hello() {
    for gone in [true, false] {
        let mut pair = Pair::new();
        pair.open(B);
        pair.wait(ms(250));
        assert!(!pair.ends[B].may_have_peer(pair.now, FLOW));
        pair.ends[B].finish_announced(FLOW, 5, FinHow::Close);
        pair.ends[B].demote(pair.now, FLOW);
        assert_eq!(pair.state(B), Some(State::Legacy));
        if gone {
            pair.ends[B].gone(pair.now, FLOW);
        }
        pair.forget();
        pair.open(A);
        pair.run();
        assert_eq!(pair.kinds(A), [Kind::HelloAck, Kind::Fin], "{gone}");
        assert_eq!(pair.state(A), Some(State::Live));
        assert!(pair.done[A].contains(&final_at(5)));
    }
}

/// Bytes are not counted after a flow has become plain TCP, so its close does not tell where the stream ends.
#[test]
fn a_flow_closed_after_it_became_plain_refuses_hello() {
    for gone in [true, false] {
        let mut pair = Pair::given_up_by_acceptor();
        pair.ends[B].finish(pair.now, FLOW, 5, FinHow::Close);
        if gone {
            pair.ends[B].gone(pair.now, FLOW);
        }
        pair.open(A);
        pair.run();
        assert_eq!(pair.kinds(A), [Kind::HelloNak], "{gone}");
        assert_eq!(pair.state(A), Some(State::Legacy));
    }
}

#[test]
fn a_host_without_hello_is_not_waited_for_again() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.wait(ms(249));
    assert!(pair.ends[B].may_have_peer(pair.now, FLOW));
    pair.wait(ms(1));
    assert!(!pair.ends[B].may_have_peer(pair.now, FLOW));
    // The next connection from this host is not waited for either. If its HELLO comes, it becomes live all the same.
    pair.ends[B].gone(pair.now, FLOW);
    pair.open(B);
    assert!(!pair.ends[B].may_have_peer(pair.now, FLOW));
    pair.open(A);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_closed_flow_delivers_its_bytes_when_a_candidate_has_shown_the_key() {
    let mut pair = without_proof();
    pair.counts[B].sent = 9;
    pair.counts[A].received = 4;
    pair.ends[B].finish(pair.now, FLOW, 9, FinHow::Close);
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    }
    assert!(pair.ends[B].lacks_transport(FLOW));
    pair.udp[B] = Net::Works;
    pair.wait(ms(500));
    assert_eq!(pair.states(), [State::Live; 2]);
    let install = |action: &Action| {
        matches!(
            action,
            Action::Install {
                peer_received: 4,
                peer_sent: 0,
                ..
            }
        )
    };
    assert_eq!(pair.count(B, install), 1);
    assert!(!pair.kinds(A).contains(&Kind::Demote));
}

#[test]
fn a_connector_that_closed_before_hello_ack_tells_where_the_stream_ends() {
    let mut pair = half_way();
    closed(&mut pair, A, 3);
    pair.ends[A].gone(pair.now, FLOW);
    pair.udp[A] = Net::Works;
    // HELLO_ACK is repeated before QUERY, because the first one was lost.
    pair.wait(ms(210));
    assert_eq!(pair.kinds(A), [Kind::HelloAck, Kind::Query]);
    assert_eq!(pair.kinds(B), [Kind::Fin, Kind::Status]);
    assert_eq!(pair.state(B), Some(State::Live));
    let told = Action::PeerFinal {
        token: FLOW,
        seq: 3,
    };
    assert_eq!(pair.count(B, |action| *action == told), 1);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(50));
    assert_eq!(pair.verdict(B), Some(Verdict::Eof));
}

#[test]
fn a_connector_that_closed_before_hello_ack_does_not_deny_the_flow() {
    let mut pair = half_way();
    closed(&mut pair, A, 3);
    pair.ends[A].gone(pair.now, FLOW);
    pair.wait(ms(210));
    pair.udp[A] = Net::Works;
    // Only QUERY comes through, without HELLO_ACK.
    pair.wait(ms(500));
    assert!(pair.kinds(A).iter().all(|kind| *kind == Kind::Query));
    assert_eq!(pair.kinds(B), []);
    assert_eq!(pair.state(B), Some(State::Negotiating));
}

#[test]
fn announcing_an_end_tells_the_candidates() {
    let mut pair = without_proof();
    pair.counts[A].received = 2;
    pair.ends[B].announce(FLOW, 2, FinHow::Close);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::Fin]);
}

/// A connection that the acceptor has accepted breaks at once, and no HELLO comes: the number of milliseconds after which its
/// application gets the error.
fn error_after(pair: &mut Pair, token: u64) -> u64 {
    let token = FlowToken(token);
    let mut ends = addrs();
    ends[A].set_port(token.0 as u16);
    pair.ends[B].open(pair.now, token, Role::Acceptor, ends[B], ends[A]);
    pair.ends[B].fault(pair.now, token, Cause::Errno(RESET));
    let mut waited = 0;
    while pair.ends[B].state(token) == Some(State::Negotiating) {
        waited += 1;
        assert!(waited < 10_000);
        pair.wait(ms(1));
    }
    let reason = LegacyReason::NoAnswer;
    assert_eq!(pair.events[B].last(), Some(&Event::Legacy { reason }));
    waited
}

#[test]
fn a_host_is_waited_for_by_whether_it_has_sent_hello() {
    let mut pair = Pair::new();
    assert_eq!(error_after(&mut pair, 1000), 250);
    assert_eq!(error_after(&mut pair, 1001), 20);
    pair.wait(ms(59_000));
    assert_eq!(error_after(&mut pair, 1002), 20);
    pair.wait(ms(60_000));
    assert_eq!(error_after(&mut pair, 1003), 250);
    // Now the host has sent HELLO lately.
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(error_after(&mut pair, 1004), 500);
    pair.wait(ms(3000));
    assert_eq!(error_after(&mut pair, 1005), 250);
}

#[test]
fn a_connection_whose_hello_is_late_is_resumed() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(200));
    pair.open(A);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(50));
    assert_eq!(pair.states(), [State::Live; 2]);
}

/// The connector takes the flow for protected, and the agents are slow: it proves itself two seconds after the connection has broken.
#[test]
fn a_candidate_whose_host_is_slow_is_waited_for() {
    let mut pair = without_proof();
    pair.counts[A].sent = 9;
    pair.counts[B].received = 4;
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    }
    pair.tcp = [Net::Silent; 2];
    pair.wait(ms(2000));
    assert_eq!(pair.state(B), Some(State::Negotiating));
    pair.tcp = [Net::Works; 2];
    pair.udp[B] = Net::Works;
    pair.wait(ms(1500));
    assert_eq!(pair.states(), [State::Live; 2]);
    let install = |action: &Action| matches!(action, Action::Install { .. });
    assert_eq!([A, B].map(|n| pair.count(n, install)), [1, 1]);
}

/// A peer whose process has ended is not waited for: its host refuses the QUERY.
#[test]
fn a_candidate_that_has_ended_is_not_waited_for() {
    let mut pair = half_way();
    pair.udp[A] = Net::Refuses;
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(60));
    assert_eq!(
        pair.events[B].last(),
        Some(&Event::Legacy {
            reason: LegacyReason::NoAnswer
        })
    );
}
