//! Negotiation.

use super::pair::*;
use crate::auth::JobKey;
use crate::config::{Config, Policy};
use crate::endpoint::{Action, State};
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, FinHow, FlowToken, Role, Verdict};
use crate::wire::{Kind, Message};

const LEGACY: Action = Action::Legacy {
    token: FLOW,
    required_refused: false,
};

fn because(reason: LegacyReason) -> Event {
    Event::Legacy { reason }
}

#[test]
fn both_sides_are_live_after_one_round_trip() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.open(A);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.kinds(B), [Kind::Hello, Kind::HelloDone]);
    assert_eq!(pair.kinds(A), [Kind::HelloAck]);
    pair.wait(ms(900));
    assert_eq!(pair.kinds(B).len(), 2, "no further message");
    assert_eq!(pair.kinds(A).len(), 1, "no further message");
    // Each side tests once whether the other can be reached.
    pair.wait(ms(100_000));
    let asked = [Kind::Query, Kind::Status];
    assert_eq!(pair.kinds(B)[2..], asked);
    assert_eq!(pair.kinds(A)[1..], asked);
}

#[test]
fn hello_is_sent_again_until_time_is_up() {
    let mut pair = Pair::new();
    pair.udp = [Net::Silent; 2];
    pair.open(A);
    pair.open(B);
    pair.wait(ms(2900));
    assert_eq!(pair.states(), [State::Negotiating; 2]);
    // After 0, 50, 150, 350, 750, 1550 and 2550 ms, where each wait is up to half as long again.
    assert!((6..=7).contains(&pair.done[A].len()));
    pair.wait(ms(200));
    assert_eq!(pair.states(), [State::Legacy; 2]);
    for n in [A, B] {
        assert_eq!(pair.done[n].last(), Some(&LEGACY));
        assert_eq!(pair.events[n], [because(LegacyReason::NoAnswer)]);
    }
}

#[test]
fn a_refusal_by_the_host_makes_the_flow_plain_at_once() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Refuses;
    pair.open(A);
    pair.run();
    assert_eq!(pair.state(A), Some(State::Legacy));
    assert_eq!(pair.events[A], [because(LegacyReason::NoControlSocket)]);
}

#[test]
fn a_connection_that_is_accepted_late_becomes_live() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(20_000));
    assert_eq!(
        pair.state(A),
        Some(State::Negotiating),
        "the flow negotiates until the connection is accepted"
    );
    assert!(pair.kinds(A).iter().all(|kind| *kind == Kind::HelloWait));
    assert!(pair.kinds(A).len() <= 21);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

/// A connection breaks that has waited for 10 s to be accepted.
fn broken_in_the_queue() -> Pair {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(10_000));
    pair.forget();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    pair
}

#[test]
fn a_connection_that_breaks_before_it_is_accepted_is_resumed_after_it() {
    let mut pair = broken_in_the_queue();
    pair.wait(ms(55_000));
    assert_eq!(pair.state(A), Some(State::Negotiating));
    pair.open(B);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(50));
    assert_eq!(pair.states(), [State::Live; 2]);
    let install = |action: &Action| matches!(action, Action::Install { .. });
    assert_eq!([A, B].map(|n| pair.count(n, install)), [1, 1]);
}

#[test]
fn a_broken_connection_that_is_never_accepted_gets_its_error_after_all_attempts() {
    let mut pair = broken_in_the_queue();
    pair.wait(ms(59_000));
    assert_eq!(pair.verdict(A), None);
    pair.wait(ms(1_000));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_connection_that_no_listener_queue_holds_is_plain() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.run();
    let hello = pair.heard[B].last().unwrap().clone();
    let [a, b] = addrs();
    let asked = |pair: &Pair| pair.ends[B].is_waiting(pair.now, a, &hello);
    assert_eq!(asked(&pair), None, "it may have been accepted just now");
    pair.wait(ms(400));
    assert_eq!(asked(&pair), Some(b));
    pair.ends[B].is_not_queued(pair.now, a, &hello);
    assert_eq!(pair.ends[B].pending.len(), 0);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.events[A].last(), Some(&because(LegacyReason::Policy)));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_connection_whose_acceptor_ends_before_accepting_gets_its_error_at_once() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(10_000));
    pair.udp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    // The peer's control socket is closed a moment later.
    pair.udp[B] = Net::Refuses;
    pair.wait(ms(100));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_hello_is_kept_as_long_as_it_is_repeated() {
    let mut pair = Pair::new();
    pair.open(A);
    for _ in 0..100 {
        pair.wait(ms(1_000));
        assert_eq!(pair.ends[B].pending.len(), 1);
    }
}

#[test]
fn a_connection_that_is_never_accepted_is_plain_after_five_minutes() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(299_000));
    assert_eq!(pair.state(A), Some(State::Negotiating));
    pair.wait(ms(2_000));
    assert_eq!(pair.events[A], [because(LegacyReason::NoAnswer)]);
    // An acceptor that accepts it later gets DEMOTE.
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
}

#[test]
fn a_hello_for_a_flow_that_was_just_reset_is_refused() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.ends[B].finish(pair.now, FLOW, 0, FinHow::Reset);
    pair.open(A);
    pair.run();
    assert_eq!(pair.events[A].last(), Some(&because(LegacyReason::Policy)));
}

#[test]
fn waiting_hellos_are_refused_when_the_listener_closes() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(200));
    pair.ends[B].refuse_pending(|local| local.port() == 1);
    pair.run();
    assert_eq!(pair.state(A), Some(State::Negotiating), "another address");
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    pair.ends[B].refuse_pending(|_| true);
    pair.run();
    assert_eq!(pair.events[A].last(), Some(&because(LegacyReason::Policy)));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
    assert_eq!(pair.ends[B].pending.len(), 0);
}

#[test]
fn a_repeated_hello_gets_the_same_answer() {
    let mut pair = Pair::new();
    pair.udp[A] = Net::Silent;
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Negotiating; 2]);
    pair.udp[A] = Net::Works;
    pair.wait(ms(80));
    assert_eq!(pair.states(), [State::Live; 2]);
    let sent: Vec<_> = pair.done[B]
        .iter()
        .filter(|action| matches!(action, Action::Datagram { .. }))
        .collect();
    assert_eq!(sent.len(), 2);
    assert_eq!(sent[0], sent[1]);
}

#[test]
fn a_connector_that_gave_up_answers_a_late_hello_ack_by_demote() {
    let mut pair = Pair::given_up_by_connector();
    // The last HELLO_ACK comes late.
    let ack = pair.done[B].iter().find_map(|action| match action {
        Action::Datagram { data, .. } => Some(data.clone()),
        _ => None,
    });
    pair.ends[A].handle_datagram(pair.now, control(B), control(A), &ack.unwrap());
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
    assert_eq!(pair.kinds(B).last(), Some(&Kind::Demote));
}

#[test]
fn each_policy_allows_and_refuses_what_it_says() {
    let config = |policy| Config {
        policy,
        ..Config::default()
    };
    let mut pair = Pair::with([config(Policy::Off), config(Policy::Required)]);
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.done[A], [LEGACY], "policy off sends no HELLO");
    pair.wait(HELLO_TIME);
    assert_eq!(
        pair.done[B],
        [Action::Legacy {
            token: FLOW,
            required_refused: true
        }]
    );
}

#[test]
fn job_keys_must_be_the_same() {
    let config = |key: &str| Config {
        job_key: JobKey::new(key.as_bytes()),
        ..Config::default()
    };
    for (ours, theirs) in [("x", "y"), ("x", ""), ("", "y")] {
        let mut pair = Pair::with([config(ours), config(theirs)]);
        pair.open(A);
        pair.open(B);
        pair.run();
        assert_eq!(pair.state(A), Some(State::Legacy));
        assert_eq!(pair.events[A], [because(LegacyReason::Unauthorized)]);
        assert_eq!(pair.state(B), Some(State::Negotiating));
    }
    let pair = Pair::live_with(config("same"));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_legacy_acceptor_refuses_a_late_hello() {
    let mut pair = Pair::given_up_by_acceptor();
    pair.open(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloNak]);
    assert_eq!(pair.events[A], [because(LegacyReason::Policy)]);
}

#[test]
fn an_error_during_negotiation_waits_for_its_outcome() {
    // If the flow becomes live, it is resumed.
    let mut pair = Pair::new();
    pair.open(A);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.state(A), Some(State::Negotiating));
    pair.open(B);
    pair.run();
    pair.wait(ms(10));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert!(
        pair.events[A]
            .iter()
            .any(|e| matches!(e, Event::Resume { epoch: 1, .. }))
    );

    // If the flow becomes plain TCP, the application gets the error, at the latest when the time for HELLO is up.
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open(A);
    pair.run();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(HELLO_TIME);
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(110)));
    assert_eq!(pair.count(A, |a| *a == LEGACY), 0);
}

/// The connection breaks before its HELLO has come. HELLO is waited for if its host has sent one before.
#[test]
fn a_late_hello_is_waited_for_if_its_host_has_sent_one_before() {
    for asked in [false, true] {
        let mut pair = if asked { Pair::live() } else { Pair::new() };
        let another = FlowToken(1000);
        pair.open_many(B, 1);
        pair.ends[B].fault(pair.now, another, Cause::Errno(RESET));
        pair.wait(ms(300));
        pair.open_many(A, 1);
        pair.wait(ms(100));
        let state = pair.ends[B].state(another);
        assert_eq!(
            state == Some(State::Live),
            asked,
            "asked {asked}: {state:?}"
        );
    }
}

#[test]
fn an_end_of_stream_during_negotiation_is_passed_on() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open(A);
    pair.ends[A].fault(pair.now, FLOW, Cause::Eof { received: 5 });
    pair.run();
    assert_eq!(pair.state(A), Some(State::Legacy));
    assert_eq!(
        pair.done[A].last(),
        Some(&Action::Reinstate { token: FLOW })
    );
}

#[test]
fn plain_flows_get_their_errors_at_once() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Refuses;
    pair.open(A);
    pair.run();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(32));
    pair.run();
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(32)));
    assert_eq!(pair.state(A), Some(State::Escalated));
}

/// The refusal of one HELLO may be read only after another HELLO was sent, for a connection that a process with
/// SLIM has accepted since.
#[test]
fn a_refusal_holds_for_earlier_hellos_only() {
    for (refused, legacy) in [(0, 1), (1, 2), (2, 3)] {
        let mut pair = Pair::new();
        let mut hellos = Vec::new();
        for flow in 0..3 {
            pair.now = pair.now + ms(1);
            let mut ours = addrs()[A];
            ours.set_port(flow + 1);
            let token = FlowToken(u64::from(flow));
            pair.ends[A].open(pair.now, token, Role::Connector, ours, addrs()[B]);
            while let Some(action) = pair.ends[A].poll_action() {
                if let Action::Datagram { data, .. } = action {
                    hellos.push(data);
                }
            }
        }
        pair.ends[A].handle_refused(pair.now, addrs()[B], &hellos[refused]);
        let states: Vec<_> = (0..3)
            .map(|flow| pair.ends[A].state(FlowToken(flow)))
            .collect();
        let (plain, asking) = states.split_at(legacy);
        assert!(
            plain.iter().all(|state| *state == Some(State::Legacy)),
            "{states:?}"
        );
        assert!(
            asking
                .iter()
                .all(|state| *state == Some(State::Negotiating)),
            "{states:?}"
        );
    }
}

#[test]
fn a_hello_for_a_connection_of_another_host_is_dropped() {
    let mut pair = Pair::new();
    pair.open(A);
    let Some(Action::Datagram { data, .. }) = pair.ends[A].poll_action() else {
        panic!("HELLO goes out at once");
    };
    pair.open(B);
    let stranger = "10.0.0.66:701".parse().unwrap();
    pair.ends[B].handle_datagram(pair.now, stranger, addrs()[B], &data);
    pair.run();
    assert_eq!(pair.state(B), Some(State::Negotiating));
    assert_eq!(pair.ends[B].dropped(), 1);
    assert!(pair.done[B].is_empty());
}

#[test]
fn a_live_connection_takes_no_other_flow_id() {
    let mut pair = Pair::live();
    // HELLO for the same connection from another flow of A's host.
    let mut other = endpoint(A, Config::default());
    other.open(
        pair.now,
        FlowToken(0),
        Role::Connector,
        addrs()[A],
        addrs()[A],
    );
    while other.poll_action().is_some() {}
    other.open(
        pair.now,
        FlowToken(1),
        Role::Connector,
        addrs()[A],
        addrs()[B],
    );
    let Some(Action::Datagram { data, .. }) = other.poll_action() else {
        panic!("HELLO goes out at once");
    };
    pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &data);
    pair.run();
    assert!(pair.done[B].is_empty());
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_late_hello_of_a_closed_flow_is_answered() {
    let mut pair = Pair::new();
    pair.udp[A] = Net::Silent;
    pair.open(A);
    pair.open(B);
    pair.run();
    pair.ends[B].gone(pair.now, FLOW);
    pair.udp[A] = Net::Works;
    // The pause before the second HELLO is 50 ms and up to half as long again.
    pair.wait(ms(75));
    assert_eq!(pair.kinds(A), [Kind::HelloAck, Kind::Fin]);
    assert_eq!(pair.state(A), Some(State::Live));
}

#[test]
fn demoted_flows_are_plain_at_both_ends() {
    let mut pair = Pair::live();
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
    assert_eq!(pair.events[A], [Event::Demoted]);
    assert_eq!(pair.events[B], [because(LegacyReason::PeerDemoted)]);
    assert!(matches!(pair.messages(B)[..], [Message::Demote(_)]));
    for n in [A, B] {
        assert_eq!(pair.count(n, |a| *a == LEGACY), 1);
    }
}

#[test]
fn demote_heard_keeps_the_session_until_the_peer_confirms() {
    let mut pair = Pair::live();
    pair.ends[A].demote_confirmed(pair.now, FLOW);
    assert_eq!(pair.state(A), Some(State::Live));
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
    assert_eq!(pair.events[A], [Event::Demoted]);
    assert_eq!(pair.events[B], [because(LegacyReason::PeerDemoted)]);
    assert_eq!(pair.kinds(B), [Kind::Demote, Kind::Query]);
    assert_eq!(pair.kinds(A), [Kind::Status]);
    for n in [A, B] {
        assert_eq!(pair.count(n, |a| *a == LEGACY), 1);
    }
}

#[test]
fn demote_is_repeated_until_it_is_confirmed_or_time_is_up() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].demote_confirmed(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.udp[B] = Net::Works;
    pair.wait(ms(60));
    assert_eq!(pair.states(), [State::Legacy; 2]);
    // The session ends even if the peer never answers, or cannot be asked.
    for live in [true, false] {
        let mut pair = if live { Pair::live() } else { Pair::new() };
        pair.udp[B] = Net::Silent;
        if !live {
            pair.open(A);
        }
        pair.ends[A].demote_confirmed(pair.now, FLOW);
        pair.run();
        assert_eq!(pair.state(A) == Some(State::Live), live);
        pair.wait(ms(5000));
        assert_eq!(pair.state(A), Some(State::Legacy));
    }
}

#[test]
fn a_fault_before_demote_is_confirmed_still_ends_the_session() {
    for cause in [Cause::Errno(RESET), Cause::Eof { received: 0 }] {
        let mut pair = Pair::live();
        pair.ends[A].demote_confirmed(pair.now, FLOW);
        pair.ends[A].fault(pair.now, FLOW, cause);
        pair.wait(ms(5000));
        let over = |state| matches!(state, Some(State::Legacy | State::Escalated));
        assert!(over(pair.state(A)), "{:?}", pair.states());
        assert_eq!(pair.state(B), Some(State::Legacy));
    }
}

#[test]
fn a_flow_without_transport_is_demoted_when_it_has_one() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.state(A), Some(State::Suspended));
    pair.tcp[B] = Net::Works;
    pair.wait(ms(1500));
    assert_eq!(pair.states(), [State::Legacy; 2]);
    assert!(
        pair.events[A]
            .iter()
            .any(|e| matches!(e, Event::Resume { .. }))
    );
}
