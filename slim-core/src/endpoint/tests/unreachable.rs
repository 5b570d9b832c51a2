//! The end of a process that cannot be reached, behind a firewall for example.

use super::ends::*;
use super::pair::*;
use crate::endpoint::State;
use crate::endpoint::attempts::HEAD_START;
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, FinHow, FlowToken, Verdict};
use crate::wire::Kind;

/// A pair in which `A` cannot be reached and sends nothing: its process has ended behind a firewall.
fn shut_off() -> Pair {
    let mut pair = Pair::live();
    pair.udp = [Net::Silent; 2];
    pair.tcp[A] = Net::Silent;
    pair
}

/// A pair in which `B` has found `A` to be out of reach behind a firewall, which has forgotten the datagrams that `A` sent.
fn found_shut(firewall: Net) -> Pair {
    let mut pair = Pair::live();
    pair.asked.clear();
    pair.guard[A] = Some(firewall);
    pair.wait(ms(3000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert!(pair.kinds(A).contains(&Kind::Status));
    pair.asked.clear();
    pair.forget();
    pair
}

#[test]
fn the_end_of_a_process_that_was_out_of_reach_is_believed_soon() {
    for firewall in [Net::Silent, Net::Refuses] {
        let mut pair = found_shut(firewall);
        eof(&mut pair, B, 3);
        pair.wait(ms(250));
        let ended = [State::Legacy, State::Escalated];
        let state = pair.state(B);
        assert!(
            state.is_some_and(|s| ended.contains(&s)),
            "{firewall:?}: {state:?}"
        );
        assert!(pair.connects(B).is_empty(), "{firewall:?}");
    }
}

#[test]
fn a_process_reachable_at_one_port_is_not_out_of_reach() {
    for (udp, tcp) in [(Net::Works, Net::Silent), (Net::Silent, Net::Works)] {
        let mut pair = Pair::live();
        (pair.udp[A], pair.tcp[A]) = (udp, tcp);
        pair.wait(ms(5000));
        pair.udp = [Net::Silent; 2];
        pair.tcp[A] = Net::Silent;
        pair.forget();
        eof(&mut pair, B, 3);
        pair.wait(ms(55_000));
        assert_eq!(pair.state(B), Some(State::Suspended), "{udp:?} {tcp:?}");
    }
}

#[test]
fn a_process_out_of_reach_that_sends_query_has_not_ended() {
    let mut pair = found_shut(Net::Silent);
    // The ends of both directions are forged.
    eof(&mut pair, B, 0);
    pair.wait(ms(100));
    eof(&mut pair, A, 0);
    pair.wait(ms(1000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.connects(A).len(), 1);
}

#[test]
fn the_verdict_out_of_reach_is_dropped_after_a_network_failure() {
    let mut pair = found_shut(Net::Silent);
    pair.guard[A] = None;
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(100));
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.guard[A] = Some(Net::Silent);
    eof(&mut pair, B, 0);
    pair.wait(ms(3000));
    assert_eq!(pair.state(B), Some(State::Suspended));
}

/// A server may have many clients that connect for a short time only.
#[test]
fn the_peers_of_short_flows_are_not_tested() {
    let mut pair = Pair::live();
    pair.forget();
    for end in 0..2 {
        pair.ends[end].finish(pair.now, FLOW, 0, FinHow::Close);
        pair.ends[end].gone(pair.now, FLOW);
        assert_eq!(pair.ends[end].poll_timeout(), None);
    }
    pair.wait(ms(10_000));
    assert!(!pair.kinds(A).contains(&Kind::Query));
}

#[test]
fn an_end_confirmed_by_the_kernel_is_believed_if_the_process_was_never_reached() {
    let mut pair = shut_off();
    pair.kernels_answer = true;
    eof(&mut pair, B, 3);
    // To the kernel, a forged end in the place of bytes on their way looks the same.
    pair.wait(ms(2500));
    assert_eq!(pair.state(B), Some(State::Suspended));
    assert!(!pair.connects(B).is_empty());
    pair.wait(ms(2500));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
    let reason = LegacyReason::NoAnswer;
    assert_eq!(pair.events[B].last(), Some(&Event::Legacy { reason }));
}

#[test]
fn the_next_end_from_the_same_host_is_believed_sooner() {
    let mut pair = shut_off();
    pair.kernels_answer = true;
    eof(&mut pair, B, 3);
    pair.wait(ms(5000));
    pair.open_many(A, 1);
    pair.open_many(B, 1);
    pair.udp = [Net::Works; 2];
    pair.run();
    assert_eq!(pair.many(B, 1, State::Live), 1);
    pair.udp = [Net::Silent; 2];
    pair.kernels_answer = false;
    let cause = Cause::Eof { received: 3 };
    pair.ends[B].fault(pair.now, FlowToken(1000), cause);
    pair.wait(ms(250));
    assert_eq!(pair.many(B, 1, State::Legacy), 1);
}

#[test]
fn an_unconfirmed_end_is_believed_after_all_attempts() {
    let mut pair = shut_off();
    eof(&mut pair, B, 3);
    pair.wait(ms(55_000));
    assert_eq!(pair.state(B), Some(State::Suspended));
    assert!(pair.connects(B).len() > 10);
    pair.wait(ms(10_000));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

/// The process has answered before, so it may only be cut off for a while, and the end may be forged.
#[test]
fn an_end_is_not_believed_if_the_process_was_reached_before() {
    for by_resume in [false, true] {
        let mut pair = Pair::live();
        if by_resume {
            pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
            pair.wait(HEAD_START);
        } else {
            eof(&mut pair, B, 0);
            assert_eq!(pair.kinds(B)[0], Kind::Status);
        }
        assert_eq!(pair.states(), [State::Live; 2]);
        pair.forget();
        (pair.udp[A], pair.tcp[A]) = (Net::Silent, Net::Silent);
        eof(&mut pair, B, 0);
        pair.wait(ms(55_000));
        assert_eq!(pair.state(B), Some(State::Suspended), "{by_resume}");
        pair.wait(ms(10_000));
        assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)), "{by_resume}");
    }
}

#[test]
fn a_process_that_was_reached_before_gets_an_attempt_before_its_kernel_is_believed() {
    let mut pair = Pair::live();
    eof(&mut pair, B, 0);
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.forget();
    (pair.udp, pair.tcp[A]) = ([Net::Silent; 2], Net::Silent);
    pair.kernels_answer = true;
    eof(&mut pair, B, 0);
    pair.wait(ms(2500));
    assert_eq!(pair.state(B), Some(State::Suspended));
    assert!(!pair.connects(B).is_empty());
    pair.wait(ms(1500));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}
