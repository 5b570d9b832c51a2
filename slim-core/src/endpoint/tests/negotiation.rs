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
    assert_eq!(pair.kinds(B).len(), 2, "nothing more is said");
    assert_eq!(pair.kinds(A).len(), 1, "nothing more is said");
    // Each asks once whether the other can be reached.
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
    // 0, 50, 150, 350, 750, 1550, 2550 ms, or up to half as late again.
    assert!((6..=7).contains(&pair.done[A].len()));
    pair.wait(ms(200));
    assert_eq!(pair.states(), [State::Legacy; 2]);
    for n in [A, B] {
        assert_eq!(pair.done[n].last(), Some(&LEGACY));
        assert_eq!(pair.events[n], [because(LegacyReason::NoAnswer)]);
    }
}

#[test]
fn a_host_that_says_nobody_listens_makes_it_plain_at_once() {
    let mut pair = Pair::new();
    pair.udp[B] = Net::Refuses;
    pair.open(A);
    pair.run();
    assert_eq!(pair.state(A), Some(State::Legacy));
    assert_eq!(pair.events[A], [because(LegacyReason::NoControlSocket)]);
}

#[test]
fn a_connection_that_is_accepted_late_becomes_live_then() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(20_000));
    assert_eq!(
        pair.state(A),
        Some(State::Negotiating),
        "it waits as long as it takes"
    );
    assert!(pair.kinds(A).iter().all(|kind| *kind == Kind::HelloWait));
    assert!(pair.kinds(A).len() <= 21);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

/// A connection that waits to be accepted since 10 s breaks.
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
fn a_connection_that_breaks_before_it_is_accepted_is_resumed_then() {
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
fn a_connection_that_breaks_and_is_never_accepted_has_its_error_after_the_attempts() {
    let mut pair = broken_in_the_queue();
    pair.wait(ms(59_000));
    assert_eq!(pair.verdict(A), None);
    pair.wait(ms(1_000));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_connection_that_is_in_no_queue_any_more_is_plain() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.run();
    let hello = pair.heard[B].last().unwrap().clone();
    let [a, b] = addrs();
    let asked = |pair: &Pair| pair.ends[B].is_waiting(pair.now, a, &hello);
    assert_eq!(asked(&pair), None, "it may just be accepted");
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
fn what_breaks_with_the_process_that_was_to_accept_it_has_its_error_at_once() {
    let mut pair = Pair::new();
    pair.open(A);
    pair.wait(ms(10_000));
    pair.udp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    // Its control socket is closed a moment later.
    pair.udp[B] = Net::Refuses;
    pair.wait(ms(100));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_hello_is_kept_for_as_long_as_it_is_said_again() {
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
    // Whoever accepts it all the same is told.
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
}

#[test]
fn who_asks_for_a_flow_that_has_just_been_thrown_away_is_answered() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.ends[B].finish(pair.now, FLOW, 0, FinHow::Reset);
    pair.open(A);
    pair.run();
    assert_eq!(pair.events[A].last(), Some(&because(LegacyReason::Policy)));
}

#[test]
fn who_waits_to_be_accepted_is_told_when_nobody_accepts_any_more() {
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
fn a_lost_answer_is_given_again_and_is_the_same() {
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
fn who_gave_up_waiting_says_so_to_who_did_not() {
    let mut pair = Pair::given_up_by_connector();
    // The last answer was only late.
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
fn policies() {
    let config = |policy| Config {
        policy,
        ..Config::default()
    };
    let mut pair = Pair::with([config(Policy::Off), config(Policy::Required)]);
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.done[A], [LEGACY], "off asks nobody");
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
fn who_counts_no_more_refuses_a_late_hello() {
    let mut pair = Pair::given_up_by_acceptor();
    pair.open(A);
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::HelloNak]);
    assert_eq!(pair.events[A], [because(LegacyReason::Policy)]);
}

#[test]
fn an_error_during_negotiation_waits_for_its_outcome() {
    // Live: it is resumed.
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

    // Plain TCP: it goes up as it is, at the latest when HELLO's time is up.
    let mut pair = Pair::new();
    pair.udp[B] = Net::Silent;
    pair.open(A);
    pair.run();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(HELLO_TIME);
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(110)));
    assert_eq!(pair.count(A, |a| *a == LEGACY), 0);
}

/// The connection is broken before its HELLO has come. Of a host that has asked before it is waited for.
#[test]
fn a_late_hello_of_a_host_that_has_asked_is_waited_for() {
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
fn an_end_during_negotiation_is_taken_as_it_is() {
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

/// The answer to the first question may be read only after a second was asked, about a connection that a process with
/// SLIM has accepted meanwhile.
#[test]
fn a_refusal_is_of_what_was_asked_before_it() {
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
fn nobody_names_a_connection_of_another_host() {
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
fn a_named_connection_takes_no_other_name() {
    let mut pair = Pair::live();
    // The same connection, asked for by another flow of A's host.
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
fn a_flow_is_plain_when_the_peer_has_heard_it() {
    let mut pair = Pair::live();
    pair.ends[A].demote_heard(pair.now, FLOW);
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
fn a_peer_that_has_not_heard_is_told_again() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].demote_heard(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.udp[B] = Net::Works;
    pair.wait(ms(60));
    assert_eq!(pair.states(), [State::Legacy; 2]);
    // Who never answers is not waited for for ever; nor is who cannot be asked.
    for live in [true, false] {
        let mut pair = if live { Pair::live() } else { Pair::new() };
        pair.udp[B] = Net::Silent;
        if !live {
            pair.open(A);
        }
        pair.ends[A].demote_heard(pair.now, FLOW);
        pair.run();
        assert_eq!(pair.state(A) == Some(State::Live), live);
        pair.wait(ms(5000));
        assert_eq!(pair.state(A), Some(State::Legacy));
    }
}

#[test]
fn a_flow_that_breaks_before_the_peer_has_heard_is_looked_into() {
    for cause in [Cause::Errno(RESET), Cause::Eof { received: 0 }] {
        let mut pair = Pair::live();
        pair.ends[A].demote_heard(pair.now, FLOW);
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
