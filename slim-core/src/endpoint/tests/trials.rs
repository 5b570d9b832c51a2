//! Trials of preferred kinds: many flows at once, and what may happen while one is under way.

use std::time::Duration;

use super::failback::*;
use super::locators::{locator, transports};
use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, Endpoint, State};
use crate::ids::{Cause, FinHow, FlowToken};
use crate::transport::{Path, TransportKind};

const TCP: TransportKind = TransportKind::TCP;
const OTHER: TransportKind = TransportKind::TEST;
const THIRD: TransportKind = TransportKind::new(241);

/// Many flows wait for a slot, and none of them may move any more when the slots become free.
#[test]
fn many_flows_that_wait_for_a_slot_are_half_closed() {
    const FLOWS: u64 = 40_000;
    let mut pair = moved();
    pair.other = [Net::Silent; 2];
    for n in [A, B] {
        pair.open_many(n, FLOWS);
    }
    pair.run();
    pair.wait(ms(300));
    assert_eq!(pair.many(A, FLOWS, State::Live), FLOWS as usize);
    for flow in 0..FLOWS {
        pair.ends[B].finish(pair.now, FlowToken(1000 + flow), 0, FinHow::HalfClose);
    }
    pair.run();
    // The trials under way time out.
    pair.wait(ms(4_000));
    assert_eq!(pair.ends[A].tables().conns, 0);
}

/// A kind that fails soon after each move is tried more and more rarely, whatever way the flow takes back to TCP.
#[test]
fn the_pause_grows_when_a_third_kind_is_on_the_way_down() {
    let mut pair = on_tcp([&[OTHER, THIRD, TCP]; 2]);
    pair.other = [Net::Works; 2];
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let begun = pair.now;
        while kinds_tried(&pair, A).last() != Some(&OTHER) || pair.states() != [State::Live; 2] {
            pair.wait(ms(10));
            assert!(pair.now.since(begun) < Duration::from_secs(300));
        }
        pauses.push(pair.now.since(begun).as_millis());
        pair.wait(ms(500));
        // The best kind fails; only the third one works.
        pair.dead = vec![OTHER];
        pair.tcp = [Net::Refuses; 2];
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.run();
        while pair.states() != [State::Live; 2] {
            pair.wait(ms(1));
        }
        assert_eq!(kinds_tried(&pair, A).last(), Some(&THIRD));
        // That fails, too: only TCP works.
        pair.dead = vec![OTHER, THIRD];
        pair.tcp = [Net::Works; 2];
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.run();
        while pair.states() != [State::Live; 2] {
            pair.wait(ms(1));
        }
        assert_eq!(kinds_tried(&pair, A).last(), Some(&TCP));
        pair.dead.clear();
        pair.forget();
    }
    println!("pauses in ms: {pauses:?}");
    assert!(*pauses.last().unwrap() > 20_000, "{pauses:?}");
}

#[test]
fn a_kind_that_is_down_costs_a_connection_a_minute_however_many_flows_prefer_it() {
    for (flows, net) in [(1, Net::Refuses), (2000, Net::Refuses), (2000, Net::Silent)] {
        let mut pair = both();
        for n in [A, B] {
            pair.open_many(n, flows);
        }
        pair.run();
        pair.other = [net; 2];
        pair.wait(ms(1_800_000));
        pair.forget();
        let end = pair.now + ms(600_000);
        let (mut wakes, mut connects) = (0, 0);
        while let Some(at) = pair
            .ends
            .iter()
            .filter_map(Endpoint::poll_timeout)
            .min()
            .filter(|at| *at <= end)
        {
            if pair.ends[A].poll_timeout() == Some(at) {
                wakes += 1;
            }
            let step = at.since(pair.now);
            pair.wait(step);
            connects += pair.count(A, |a| matches!(a, Action::Connect { .. }));
            pair.forget();
        }
        // One each minute, a little less because of what is added at random. A silent one ends by a timer.
        let most = 11 * if net == Net::Silent { 3 } else { 2 };
        let cost = (wakes, connects);
        assert!(
            wakes <= most && (8..=10).contains(&connects),
            "{flows} flows: {cost:?}"
        );
    }
}

/// The peer's port comes up again with another locator while the pause is long.
#[test]
fn a_new_locator_is_tried_soon() {
    let mut pair = both();
    pair.wait(ms(300_000));
    pair.forget();
    pair.other = [Net::Works; 2];
    let begun = pair.now;
    pair.ends[B].set_locators(pair.now, Vec::new());
    pair.run();
    pair.ends[B].set_locators(pair.now, vec![locator(OTHER, 5)]);
    while moves(&pair) == 0 {
        pair.wait(ms(100));
    }
    assert_eq!(pair.paths(A), [Path::to(locator(OTHER, 5))]);
    assert!(pair.now.since(begun) < Duration::from_secs(1));
}

/// The locator goes while trials wait for slots: nobody tries the old one afterwards.
#[test]
fn flows_that_wait_for_a_slot_do_not_try_a_locator_that_has_gone() {
    let mut pair = moved();
    pair.other = [Net::Silent; 2];
    for n in [A, B] {
        pair.open_many(n, 1000);
    }
    pair.run();
    pair.wait(ms(300));
    pair.ends[B].set_locators(pair.now, Vec::new());
    pair.run();
    pair.forget();
    pair.wait(ms(60_000));
    let tried = pair.paths(A).len();
    assert_eq!(tried, 0, "{tried} connections to the old locator");
}

/// CHALLENGE that comes when the patience is over, late, and twice.
#[test]
fn late_and_double_challenges() {
    for late in [0u64, 1, 2] {
        let mut pair = both();
        pair.other = [Net::Silent; 2];
        pair.wait(ms(30));
        let conn = pair.done[A].iter().find_map(|a| match a {
            Action::Connect { conn, .. } => Some(*conn),
            _ => None,
        });
        let conn = conn.unwrap();
        // A true CHALLENGE of the peer.
        let twin = crate::ids::ConnId::incoming(77);
        let now = pair.now;
        pair.ends[B].handle_incoming(now, twin, locator(OTHER, B));
        let mut challenge = None;
        while let Some(action) = pair.ends[B].poll_action() {
            if let Action::Send { data, .. } = action {
                challenge = Some(data);
            }
        }
        let challenge = challenge.unwrap();
        pair.ends[A].handle_connected(pair.now, conn);
        match late {
            0 => {
                pair.ends[A].handle_message(pair.now, conn, &challenge);
                pair.ends[A].handle_message(pair.now, conn, &challenge);
            }
            1 => {
                pair.now = pair.now + ms(3_000);
                pair.ends[A].handle_message(pair.now, conn, &challenge);
                pair.ends[A].handle_timeout(pair.now);
            }
            _ => {
                pair.now = pair.now + ms(3_010);
                pair.ends[A].handle_timeout(pair.now);
                pair.ends[A].handle_message(pair.now, conn, &challenge);
            }
        }
        pair.run();
        pair.wait(ms(20_000));
        assert_eq!(pair.states(), [State::Live; 2], "{late}");
        pair.other = [Net::Works; 2];
        pair.wait(ms(70_000));
        assert_eq!(pair.states(), [State::Live; 2], "{late}");
        assert!(moves(&pair) > 0);
        for n in [A, B] {
            pair.ends[n].finish(pair.now, FLOW, 0, FinHow::Close);
            pair.ends[n].gone(pair.now, FLOW);
        }
        pair.run();
        assert_eq!(pair.ends[A].tables().conns, 0, "{late}");
    }
}

fn conn_of(pair: &Pair) -> crate::ids::ConnId {
    let mut all = pair.done[A].iter().rev();
    all.find_map(|a| match a {
        Action::Connect { conn, .. } => Some(*conn),
        _ => None,
    })
    .unwrap()
}

/// CHALLENGE has come, and nothing comes after it: the flow stands still for the first attempt, and goes on over TCP.
#[test]
fn a_move_that_is_not_answered_after_challenge_ends_on_tcp() {
    let mut pair = both();
    pair.other = [Net::Works; 2];
    pair.answers = false;
    pair.wait(ms(100));
    assert_eq!(pair.state(A), Some(State::Suspended));
    let conn = conn_of(&pair);
    pair.twin.remove(&(A, conn));
    pair.other = [Net::Silent; 2];
    pair.answers = true;
    let begun = pair.now;
    pair.ends[A].handle_suspended(pair.now, FLOW);
    while pair.states() != [State::Live; 2] {
        pair.wait(ms(10));
        assert!(pair.now.since(begun) < Duration::from_millis(1200));
    }
    assert_eq!(kinds_tried(&pair, A).last(), Some(&TCP));
}

/// Each move breaks after CHALLENGE: the pauses grow.
#[test]
fn moves_that_fail_come_ever_more_rarely() {
    let mut pair = both();
    let mut pauses = Vec::new();
    for _ in 0..6 {
        pair.other = [Net::Works; 2];
        pair.answers = false;
        pair.forget();
        let begun = pair.now;
        while pair.state(A) != Some(State::Suspended) {
            pair.wait(ms(10));
        }
        pauses.push(pair.now.since(begun).as_secs());
        let conn = conn_of(&pair);
        pair.other = [Net::Refuses; 2];
        pair.answers = true;
        pair.ends[A].handle_conn_lost(pair.now, conn, RESET);
        pair.ends[A].handle_suspended(pair.now, FLOW);
        while pair.states() != [State::Live; 2] {
            pair.wait(ms(1));
        }
    }
    assert!(pauses[5] >= 16, "{pauses:?}");
}

/// A process with the peer's id that lacks the job key is not taken for the peer.
#[test]
fn challenge_needs_the_job_key() {
    let with = |key: &[u8]| Config {
        job_key: crate::auth::JobKey::new(key),
        ..Config::default()
    };
    let mut pair = Pair::new();
    for n in [A, B] {
        let own = transports(n, &[OTHER, TCP]);
        pair.ends[n] = Endpoint::new(with(b"of this job"), id(n), own, [n as u8; 32]);
    }
    pair.other = [Net::Refuses; 2];
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    let own = transports(B, &[OTHER, TCP]);
    let stranger = Endpoint::new(with(b"of another"), id(B), own, [9; 32]);
    let peer = std::mem::replace(&mut pair.ends[B], stranger);
    pair.other = [Net::Works; 2];
    pair.wait(ms(5_000));
    assert_eq!((pair.state(A), moves(&pair)), (Some(State::Live), 0));
    pair.ends[B] = peer;
    pair.wait(ms(10_000));
    assert_eq!(moves(&pair), 1);
}

/// The peer half-closes the flow while the trial is under way, and CHALLENGE comes.
#[test]
fn challenge_for_a_flow_that_the_peer_has_half_closed() {
    let mut pair = both();
    pair.other = [Net::Silent; 2];
    pair.wait(ms(100));
    let conn = conn_of(&pair);
    let twin = crate::ids::ConnId::incoming(77);
    pair.ends[B].handle_incoming(pair.now, twin, locator(OTHER, B));
    let mut challenge = None;
    while let Some(action) = pair.ends[B].poll_action() {
        if let Action::Send { data, .. } = action {
            challenge = Some(data);
        }
    }
    pair.ends[B].finish(pair.now, FLOW, 0, FinHow::HalfClose);
    pair.run();
    pair.ends[A].handle_connected(pair.now, conn);
    pair.ends[A].handle_message(pair.now, conn, &challenge.unwrap());
    pair.run();
    assert_eq!((pair.state(A), moves(&pair)), (Some(State::Live), 0));
    assert_eq!(pair.ends[A].tables().conns, 0);
}

/// Flows that wait for a slot when the peer half-closes them do not connect.
#[test]
fn flows_that_wait_for_a_slot_and_may_not_move_do_not_connect() {
    let mut pair = moved();
    pair.other = [Net::Silent; 2];
    for n in [A, B] {
        pair.open_many(n, 300);
    }
    pair.run();
    pair.wait(ms(200));
    for flow in 0..300 {
        pair.ends[B].finish(pair.now, FlowToken(1000 + flow), 0, FinHow::HalfClose);
    }
    pair.run();
    pair.forget();
    pair.wait(ms(10_000));
    assert_eq!(pair.paths(A), []);
}

/// The trial ends at once when the application finishes.
#[test]
fn finish_closes_the_connection_of_the_trial() {
    let mut pair = both();
    pair.other = [Net::Silent; 2];
    pair.wait(ms(100));
    assert_eq!(pair.ends[A].tables().conns, 1);
    pair.ends[A].finish(pair.now, FLOW, 0, FinHow::HalfClose);
    assert_eq!(pair.ends[A].tables().conns, 0);
}

/// New locators that come during a stall begin no trial; when it is over, the flow tries them.
#[test]
fn no_trial_during_a_stall() {
    let mut pair = both();
    pair.ends[B].set_locators(pair.now, Vec::new());
    pair.run();
    pair.wait(ms(100));
    pair.tcp = [Net::Silent; 2];
    pair.other = [Net::Silent; 2];
    pair.forget();
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.run();
    pair.ends[B].set_locators(pair.now, vec![locator(OTHER, 5)]);
    pair.run();
    let before = pair.ends[A].trials.len();
    pair.wait(ms(2_000));
    assert_eq!(
        (pair.state(A), pair.ends[A].trials.len()),
        (Some(State::Live), before)
    );
    pair.other = [Net::Works; 2];
    pair.wait(ms(200_000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.paths(A).last(), Some(&Path::to(locator(OTHER, 5))));
}
