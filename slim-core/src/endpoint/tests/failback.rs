//! Flows move to the kind of transport that they prefer, and come back to it.

use std::time::Duration;

use super::locators::{locator, transports};
use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, Endpoint, State};
use crate::event::{Event, Trouble};
use crate::ids::{Cause, FinHow, FlowToken, Role};
use crate::transport::{Path, TransportKind};
use crate::wire::Kind;

const TCP: TransportKind = TransportKind::TCP;
const OTHER: TransportKind = TransportKind::TEST;
const THIRD: TransportKind = TransportKind::new(241);

/// A flow that is live at both ends, on TCP. No connection of another kind can be made yet.
pub(super) fn on_tcp(kinds: [&[TransportKind]; 2]) -> Pair {
    let mut pair = Pair::new();
    for (n, kinds) in kinds.into_iter().enumerate() {
        let own = transports(n, kinds);
        pair.ends[n] = Endpoint::new(Config::default(), id(n), own, [n as u8; 32]);
    }
    pair.other = [Net::Refuses; 2];
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.forget();
    pair
}

pub(super) fn both() -> Pair {
    on_tcp([&[OTHER, TCP]; 2])
}

pub(super) fn kinds_tried(pair: &Pair, n: usize) -> Vec<TransportKind> {
    pair.paths(n).iter().map(Path::kind).collect()
}

/// How often a side was moved without a fault.
pub(super) fn moves(pair: &Pair) -> usize {
    let cause = Trouble::Move;
    let all = pair.events[A].iter();
    all.filter(|event| **event == Event::Suspend { cause })
        .count()
}

pub(super) fn count_of(pair: &Pair, n: usize, kind: TransportKind) -> usize {
    kinds_tried(pair, n).iter().filter(|k| **k == kind).count()
}

/// The flow has moved to the other kind.
pub(super) fn moved() -> Pair {
    let mut pair = both();
    pair.other = [Net::Works; 2];
    pair.wait(ms(100));
    assert_eq!((moves(&pair), pair.states()), (1, [State::Live; 2]));
    pair.forget();
    pair
}

/// The transport of the other kind fails, and its path with it.
fn fall_back(pair: &mut Pair) {
    pair.other = [Net::Refuses; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    // Only the connector has noticed so far, and its first connection is refused.
    while pair.states() != [State::Live; 2] {
        pair.wait(ms(1));
    }
    assert_eq!(kinds_tried(pair, A).last(), Some(&TCP));
    pair.forget();
}

#[test]
fn a_flow_moves_to_the_preferred_kind_soon_after_it_is_live() {
    let mut pair = both();
    pair.other = [Net::Works; 2];
    pair.wait(ms(19));
    assert!(pair.paths(A).is_empty(), "short connections cost nothing");
    pair.wait(ms(20));
    assert_eq!(kinds_tried(&pair, A), [OTHER]);
    assert!(pair.paths(B).is_empty(), "only the connector tries");
    assert_eq!((moves(&pair), pair.states()), (1, [State::Live; 2]));
    let resumed = pair.events[B]
        .iter()
        .any(|event| matches!(event, Event::Resume { .. }));
    assert!(resumed);
    // It stays there.
    pair.forget();
    pair.wait(ms(600_000));
    assert!(pair.paths(A).is_empty() && pair.events[A].is_empty());
}

#[test]
fn the_flow_is_suspended_when_challenge_has_come_and_not_before() {
    let mut pair = both();
    pair.other = [Net::Silent; 2];
    pair.wait(ms(2500));
    assert_eq!(kinds_tried(&pair, A), [OTHER]);
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.ends[A].tables().conns, 1);
    let suspends = pair.count(A, |a| matches!(a, Action::Suspend { .. }));
    assert_eq!(suspends, 0);
    assert!(pair.events[A].is_empty(), "{:?}", pair.events[A]);
    pair.wait(ms(1000));
    assert_eq!(pair.ends[A].tables().conns, 0, "a trial takes 3 s at most");
}

#[test]
fn a_trial_that_fails_changes_nothing_and_comes_ever_more_rarely() {
    for net in [Net::Refuses, Net::Silent] {
        let mut pair = both();
        pair.other = [net; 2];
        let mut times = Vec::new();
        for second in 0..600 {
            let before = pair.paths(A).len();
            pair.wait(ms(1000));
            times.extend((before..pair.paths(A).len()).map(|_| second));
            if second == 2 {
                // The test whether the peer can be reached is over.
                pair.heard = Default::default();
            }
        }
        assert!(kinds_tried(&pair, A).iter().all(|kind| *kind == OTHER));
        // 1, 2, 4, 8, 16, 32 and 60 s, a little longer each time, and up to 3 s for each trial.
        assert!((13..=17).contains(&times.len()), "{times:?}");
        let last = times[times.len() - 1] - times[times.len() - 2];
        assert!((60..=71).contains(&last), "{times:?}");
        assert_eq!(pair.states(), [State::Live; 2]);
        for n in [A, B] {
            assert!(pair.events[n].is_empty(), "{:?}", pair.events[n]);
            assert!(pair.heard[n].is_empty(), "nobody is asked");
        }
        pair.other = [Net::Works; 2];
        pair.wait(ms(71_000));
        assert_eq!((moves(&pair), pair.states()), (1, [State::Live; 2]));
    }
}

#[test]
fn a_flow_that_fell_back_comes_back_after_a_second() {
    let mut pair = moved();
    fall_back(&mut pair);
    pair.other = [Net::Works; 2];
    pair.wait(ms(990));
    assert!(pair.paths(A).is_empty());
    pair.wait(ms(200));
    assert_eq!((kinds_tried(&pair, A), moves(&pair)), (vec![OTHER], 1));
}

/// If nothing passes at all, nothing is replaced sooner than other connections.
#[test]
fn a_kind_keeps_its_turn_if_the_peer_does_not_answer() {
    let mut pair = moved();
    (pair.other, pair.tcp, pair.udp) = ([Net::Silent; 2], [Net::Silent; 2], [Net::Silent; 2]);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(900));
    assert_eq!(kinds_tried(&pair, A), [OTHER]);
}

#[test]
fn a_kind_that_fails_again_and_again_is_tried_ever_more_rarely() {
    let mut pair = moved();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        fall_back(&mut pair);
        pair.other = [Net::Works; 2];
        let begun = pair.now;
        while moves(&pair) == 0 {
            pair.wait(ms(100));
        }
        pauses.push(pair.now.since(begun).as_secs());
        pair.wait(ms(500));
        pair.forget();
    }
    assert_eq!(pauses[..3], [1, 2, 4]);
    assert!(
        pauses[3..6]
            .iter()
            .zip([8, 16, 32])
            .all(|(p, s)| (s..=s * 9 / 8).contains(p))
    );
    assert!(
        pauses[6..].iter().all(|pause| (60..=67).contains(pause)),
        "{pauses:?}"
    );
    // It has been good for a minute.
    pair.wait(ms(61_000));
    fall_back(&mut pair);
    pair.other = [Net::Works; 2];
    pair.wait(ms(1200));
    assert_eq!(moves(&pair), 1);
}

#[test]
fn a_resume_on_tcp_does_not_hurry_the_next_trial() {
    let mut pair = both();
    pair.other = [Net::Refuses; 2];
    pair.wait(ms(40_000));
    let tried = count_of(&pair, A, OTHER);
    for _ in 0..10 {
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.tcp[A] = Net::Works;
        pair.run();
        pair.wait(ms(100));
        assert_eq!(pair.states(), [State::Live; 2]);
    }
    assert_eq!(count_of(&pair, A, OTHER), tried);
}

/// The path of the preferred kind is silent, so a flow is on TCP. When its connection is lost, it does not wait for that path first.
#[test]
fn a_resume_begins_with_tcp_while_the_preferred_kind_is_bad() {
    let mut pair = both();
    pair.other = [Net::Silent; 2];
    pair.wait(ms(3200));
    assert_eq!(kinds_tried(&pair, A), [OTHER], "a trial that has failed");
    pair.forget();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(100));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(kinds_tried(&pair, A), [TCP]);
    // If TCP fails, too, the preferred kind gets its turn.
    pair.forget();
    pair.tcp = [Net::Refuses; 2];
    pair.other = [Net::Works; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(500));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(kinds_tried(&pair, A).last(), Some(&OTHER));
}

#[test]
fn the_order_of_the_connector_counts() {
    // The acceptor prefers the other kind, and the connector TCP.
    let mut pair = on_tcp([&[TCP, OTHER], &[OTHER, TCP]]);
    pair.other = [Net::Works; 2];
    pair.wait(ms(100_000));
    assert!(pair.paths(A).is_empty() && pair.paths(B).is_empty());
    // TCP fails for a while, and the flow comes back to it.
    pair.tcp = [Net::Refuses; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(500));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(kinds_tried(&pair, A).last(), Some(&OTHER));
    pair.tcp = [Net::Works; 2];
    pair.forget();
    pair.wait(ms(3_000));
    assert_eq!(
        (kinds_tried(&pair, A).last(), moves(&pair)),
        (Some(&TCP), 1)
    );
}

#[test]
fn each_kind_that_is_better_takes_its_turn_and_the_best_is_reached_in_the_end() {
    let mut pair = on_tcp([&[OTHER, THIRD, TCP]; 2]);
    pair.wait(ms(10_000));
    assert!(count_of(&pair, A, OTHER) > 0 && count_of(&pair, A, THIRD) > 0);
    pair.other = [Net::Works; 2];
    pair.forget();
    pair.wait(ms(100_000));
    assert_eq!(kinds_tried(&pair, A).last(), Some(&OTHER));
    pair.forget();
    pair.wait(ms(100_000));
    assert!(pair.paths(A).is_empty());
}

#[test]
fn a_fault_or_a_stall_ends_the_trial() {
    for cause in [Cause::Errno(RESET), Cause::Stall] {
        let mut pair = both();
        pair.other = [Net::Silent; 2];
        pair.wait(ms(100));
        assert_eq!(pair.ends[A].tables().conns, 1);
        pair.forget();
        pair.ends[A].fault(pair.now, FLOW, cause);
        pair.run();
        pair.wait(ms(900));
        assert_eq!(pair.states(), [State::Live; 2]);
        assert_eq!(pair.ends[A].tables().conns, 0);
        assert_eq!(kinds_tried(&pair, A), [OTHER, TCP]);
    }
}

#[test]
fn a_flow_that_ends_is_not_moved() {
    let ended: [fn(&mut Pair); 4] = [
        |pair| pair.ends[A].finish(pair.now, FLOW, 0, FinHow::HalfClose),
        |pair| pair.ends[A].finish(pair.now, FLOW, 0, FinHow::Close),
        |pair| pair.ends[B].finish(pair.now, FLOW, 0, FinHow::HalfClose),
        |pair| pair.ends[A].demote(pair.now, FLOW),
    ];
    for end in ended {
        // While it waits, and while the trial is under way.
        for under_way in [false, true] {
            let mut pair = both();
            if under_way {
                pair.other = [Net::Silent; 2];
                pair.wait(ms(100));
                assert_eq!(pair.paths(A).len(), 1);
            }
            end(&mut pair);
            pair.run();
            pair.other = [Net::Works; 2];
            pair.forget();
            pair.wait(ms(100_000));
            assert!(pair.paths(A).is_empty());
            assert_eq!((moves(&pair), pair.ends[A].tables().conns), (0, 0));
        }
    }
}

#[test]
fn nothing_is_left_of_a_flow_that_is_gone() {
    for net in [Net::Silent, Net::Refuses, Net::Works] {
        let mut pair = both();
        pair.other = [net; 2];
        pair.wait(ms(100));
        for n in [A, B] {
            pair.ends[n].finish(pair.now, FLOW, 0, FinHow::Close);
            pair.ends[n].gone(pair.now, FLOW);
        }
        pair.run();
        assert!(pair.ends[A].failbacks.is_empty());
        assert_eq!(
            (pair.ends[A].tables().conns, pair.ends[A].tables().timers),
            (0, 0)
        );
        pair.ends[A].tidy(pair.now + ms(600_000));
        assert_eq!(pair.ends[A].trials.len(), 0);
    }
}

#[test]
fn processes_with_tcp_only_pay_nothing() {
    for kinds in [[&[][..], &[]], [&[OTHER], &[]], [&[TCP], &[OTHER]]] {
        let mut pair = on_tcp(kinds);
        for n in [A, B] {
            pair.open_many(n, 100);
        }
        pair.run();
        // The test whether the peer can be reached.
        pair.wait(ms(5_000));
        pair.forget();
        for n in [A, B] {
            assert_eq!(pair.ends[n].tables().timers, 0);
            assert!(pair.ends[n].failbacks.is_empty());
        }
        for n in [A, B] {
            pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
        }
        pair.wait(ms(100));
        assert_eq!(pair.states(), [State::Live; 2]);
        for n in [A, B] {
            assert_eq!(pair.ends[n].tables().timers, 0);
            assert!(pair.ends[n].failbacks.is_empty());
        }
    }
}

#[test]
fn a_flow_waits_for_locators_that_come_later_and_stops_when_they_go() {
    let mut pair = both();
    pair.ends[B].set_locators(pair.now, Vec::new());
    pair.run();
    pair.other = [Net::Works; 2];
    pair.forget();
    pair.wait(ms(100_000));
    assert!(pair.paths(A).is_empty());
    assert_eq!(pair.ends[A].tables().timers, 0);
    // The peer's port comes up again, with another address.
    pair.ends[B].set_locators(pair.now, vec![locator(OTHER, 5)]);
    pair.wait(ms(100));
    assert_eq!(pair.paths(A), [Path::to(locator(OTHER, 5))]);
    assert_eq!(moves(&pair), 1);
}

#[test]
fn a_process_without_a_port_of_a_kind_does_not_try_it() {
    let mut pair = both();
    pair.ends[A].set_locators(pair.now, Vec::new());
    pair.other = [Net::Works; 2];
    pair.wait(ms(100_000));
    assert!(pair.paths(A).is_empty());
    pair.ends[A].set_locators(pair.now, vec![locator(OTHER, A)]);
    pair.wait(ms(100));
    assert_eq!(moves(&pair), 1);
}

#[test]
fn a_flow_does_not_leave_a_kind_because_it_is_not_offered_any_more() {
    let mut pair = moved();
    pair.ends[B].set_locators(pair.now, Vec::new());
    pair.wait(ms(100_000));
    assert!(pair.paths(A).is_empty());
}

#[test]
fn several_paths_of_a_kind_take_turns() {
    let mut pair = both();
    let ports = vec![locator(OTHER, 5), locator(OTHER, 6)];
    pair.ends[B].set_locators(pair.now, ports.clone());
    pair.wait(ms(8_000));
    for port in ports {
        assert!(pair.paths(A).contains(&Path::to(port)), "{port:?}");
    }
}

#[test]
fn another_process_at_the_locator_is_not_taken_for_the_peer() {
    let mut pair = both();
    pair.wait(ms(10));
    let stranger = id(5);
    let own = transports(B, &[OTHER, TCP]);
    let flows = std::mem::replace(
        &mut pair.ends[B],
        Endpoint::new(Config::default(), stranger, own, [9; 32]),
    );
    pair.other = [Net::Works; 2];
    pair.wait(ms(5_000));
    assert!(pair.paths(A).len() > 1);
    assert_eq!((pair.state(A), moves(&pair)), (Some(State::Live), 0));
    pair.ends[B] = flows;
    pair.wait(ms(5_000));
    assert_eq!((pair.states(), moves(&pair)), ([State::Live; 2], 1));
}

#[test]
fn a_connection_that_breaks_after_challenge_is_a_fault_and_a_failure_of_the_kind() {
    let mut pair = both();
    pair.other = [Net::Works; 2];
    pair.answers = false;
    pair.wait(ms(100));
    // CHALLENGE has come, and the front end has not suspended the flow yet.
    assert_eq!(pair.state(A), Some(State::Suspended));
    let conn = pair.done[A].iter().find_map(|action| match action {
        Action::Connect { conn, .. } => Some(*conn),
        _ => None,
    });
    pair.other = [Net::Refuses; 2];
    pair.answers = true;
    pair.ends[A].handle_conn_lost(pair.now, conn.unwrap(), RESET);
    pair.ends[A].handle_suspended(pair.now, FLOW);
    pair.wait(Duration::from_millis(200));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(kinds_tried(&pair, A), [OTHER, TCP]);
    // The next trial comes after a second.
    pair.forget();
    pair.wait(ms(790));
    assert!(pair.paths(A).is_empty());
    pair.wait(ms(400));
    assert_eq!(kinds_tried(&pair, A), [OTHER]);
}

#[test]
fn many_flows_move_in_turns() {
    let mut pair = both();
    pair.other = [Net::Silent; 2];
    for n in [A, B] {
        pair.open_many(n, 300);
    }
    pair.run();
    pair.wait(ms(200));
    assert_eq!(count_of(&pair, A, OTHER), 1, "one for all");
    pair.other = [Net::Works; 2];
    pair.wait(ms(10_000));
    assert_eq!(moves(&pair), 301);
    assert_eq!(pair.many(A, 300, State::Live), 300);
    assert_eq!(pair.many(B, 300, State::Live), 300);
    // The slots are free again.
    let none = |n: u64| {
        pair.ends[A]
            .trials
            .is_waiting(locator(OTHER, B).into(), FlowToken(n))
    };
    assert!(!(1000..1300).any(none));
}

#[test]
fn a_trial_waits_for_no_acceptor() {
    let mut pair = both();
    assert_eq!(pair.ends[B].flows[&FLOW].role, Role::Acceptor);
    pair.other = [Net::Works; 2];
    pair.wait(ms(100));
    let heard = pair.kinds(A);
    assert_eq!(heard, [Kind::Challenge, Kind::ResumeOk]);
    assert_eq!(pair.kinds(B), [Kind::Resume, Kind::Confirm]);
}

/// The preferred kind has failed for a moment only, and soon afterwards nothing passes by IP. It gets its turn in the first window, whenever that is.
#[test]
fn a_kind_that_works_again_gets_its_turn_in_the_first_window() {
    for after in (0..1000).step_by(50) {
        let mut pair = moved();
        fall_back(&mut pair);
        pair.other = [Net::Works; 2];
        pair.wait(ms(after));
        (pair.tcp, pair.udp) = ([Net::Silent; 2], [Net::Silent; 2]);
        let begun = pair.now;
        // Only the connector notices.
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        while pair.states() != [State::Live; 2] && pair.now.since(begun) < ms(60_000) {
            pair.wait(ms(1));
        }
        let took = pair.now.since(begun);
        let tried = kinds_tried(&pair, A);
        assert!(took < ms(3000), "{after} ms: {took:?} {tried:?}");
    }
}
