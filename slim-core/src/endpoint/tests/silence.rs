//! Silent paths of live flows.

use std::net::IpAddr;
use std::time::Duration;

use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, State};
use crate::event::{Event, Trouble};
use crate::ids::{Cause, FlowToken, Time};
use crate::wire::{Kind, parse};

/// How often a driver glances at its flows.
const GLANCE: Duration = ms(15);

fn second() -> IpAddr {
    IpAddr::from([10, 1, 0, 2])
}

/// A live flow whose acceptor has two addresses.
fn two_paths() -> Pair {
    let mut pair = Pair::new();
    let both = vec![addrs()[B].ip(), second()];
    pair.ends[B] = endpoint_at(id(B), both, Config::default(), 9);
    pair.open(A);
    pair.open(B);
    pair.run();
    pair.forget();
    pair
}

/// The driver of A reports for some time that the flow waits. Returns how long it took until A made a connection.
fn waits(pair: &mut Pair, time: Duration) -> Option<Duration> {
    waits_since(pair, pair.now, time)
}

/// The same for a flow that has waited since `due`.
fn waits_since(pair: &mut Pair, due: Time, time: Duration) -> Option<Duration> {
    let begun = pair.now;
    while pair.now.since(begun) < time {
        let overdue = pair.now.since(due);
        pair.ends[A].in_use(pair.now, FLOW);
        pair.ends[A].quiet(pair.now, FLOW, overdue);
        for _ in 0..15 {
            pair.wait(ms(1));
            if !pair.connects(A).is_empty() {
                return Some(pair.now.since(begun));
            }
        }
    }
    None
}

/// The flow is in use, and nothing is wrong.
fn in_use(pair: &mut Pair, time: Duration) {
    let end = pair.now + time;
    while pair.now < end {
        pair.ends[A].in_use(pair.now, FLOW);
        pair.wait(GLANCE);
    }
}

fn questions(pair: &Pair) -> usize {
    pair.count(A, |action| {
        matches!(action, Action::Datagram { data, .. }
            if parse(data).is_ok_and(|p| p.message.kind() == Kind::Query))
    })
}

fn installs(pair: &Pair) -> usize {
    pair.count(A, |action| matches!(action, Action::Install { .. }))
}

#[test]
fn a_flow_moves_from_a_silent_path_to_another_one() {
    let mut pair = two_paths();
    in_use(&mut pair, ms(1000));
    pair.silent.insert(addrs()[B].ip());
    let took = waits(&mut pair, ms(200)).expect("a new connection");
    assert!(took <= ms(15), "{took:?}");
    assert_eq!(pair.connects(A)[0].ip(), second());
    assert_eq!(installs(&pair), 1);
    let suspend = Event::Suspend {
        cause: Trouble::Stall,
    };
    assert!(pair.events[A].contains(&suspend));
    // The event says where the connection goes.
    assert!(pair.events[A].iter().any(|event| matches!(event,
        Event::Attempt { path, .. } if path.to.tcp().is_some_and(|to| to.ip() == second()))));
}

#[test]
fn a_path_that_never_answered_is_not_silent() {
    let mut pair = two_paths();
    // A firewall drops datagrams. TCP passes.
    pair.silent.insert(addrs()[B].ip());
    in_use(&mut pair, ms(1000));
    assert_eq!(waits(&mut pair, ms(900)), None);
}

#[test]
fn an_old_answer_proves_nothing() {
    let mut pair = two_paths();
    in_use(&mut pair, ms(1000));
    pair.silent.insert(addrs()[B].ip());
    in_use(&mut pair, ms(61_000));
    assert_eq!(waits(&mut pair, ms(900)), None);
}

#[test]
fn a_flow_with_one_path_is_resumed_as_soon_as_the_path_works_again() {
    for hole in [30, 100, 300, 900] {
        let mut pair = Pair::live();
        in_use(&mut pair, ms(100));
        pair.silent.insert(addrs()[B].ip());
        assert_eq!(waits(&mut pair, ms(hole)), None, "no connection in vain");
        pair.silent.clear();
        let took = waits(&mut pair, ms(100)).expect("a new connection");
        assert!(took <= ms(20), "{hole} ms: {took:?}");
        assert_eq!(installs(&pair), 1);
    }
}

#[test]
fn a_late_acknowledgement_is_no_silence() {
    // The longest delay of Linux is 200 ms.
    for mut pair in [Pair::live(), two_paths()] {
        in_use(&mut pair, ms(100));
        pair.forget();
        assert_eq!(waits(&mut pair, ms(280)), None);
        let asked = questions(&pair);
        assert!((5..=40).contains(&asked), "{asked} questions");
    }
}

/// Something on the path drops the connection only, or long packets only.
#[test]
fn a_flow_gets_a_new_connection_if_its_path_carries_only_questions() {
    for (mut pair, to) in [(Pair::live(), addrs()[B].ip()), (two_paths(), second())] {
        in_use(&mut pair, ms(100));
        let took = waits(&mut pair, ms(900)).expect("a new connection");
        assert!((ms(300)..=ms(330)).contains(&took), "{took:?}");
        assert_eq!(pair.connects(A)[0].ip(), to);
        assert!(!has_small_segments(&pair));
        // The new connection does not help: long packets are dropped.
        pair.forget();
        let again = waits(&mut pair, ms(2000)).expect("another connection");
        assert!((ms(300)..=ms(330)).contains(&again), "{again:?}");
        assert!(has_small_segments(&pair));
        // That does not help, either.
        pair.forget();
        let third = waits(&mut pair, ms(2000)).expect("another connection");
        assert!(third >= ms(900), "{third:?}");
        assert!(has_small_segments(&pair));
        // Much later the path carries long packets again.
        in_use(&mut pair, ms(12_000));
        pair.forget();
        waits(&mut pair, ms(900)).expect("a new connection");
        assert!(!has_small_segments(&pair));
    }
}

/// Whether the first connection that A makes is to have small segments.
fn has_small_segments(pair: &Pair) -> bool {
    let small = |action: &Action| match action {
        Action::Connect { small_segments, .. } => Some(*small_segments),
        _ => None,
    };
    pair.done[A].iter().find_map(small).expect("a connection")
}

/// The messages of a resume pass, but its replay does not: once because the path is silent again, and then because it drops long packets.
#[test]
fn a_replay_that_makes_no_progress_is_given_up() {
    let mut pair = Pair::live();
    pair.replays = false;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    for small_segments in [false, true] {
        assert_eq!((pair.state(A), installs(&pair)), (Some(State::Resuming), 1));
        pair.forget();
        pair.ends[A].replay_stalled(pair.now, FLOW);
        pair.run();
        assert_eq!(has_small_segments(&pair), small_segments);
    }
    for end in &mut pair.ends {
        end.handle_installed(pair.now, FLOW, 0);
    }
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    // There is no replay any more.
    pair.forget();
    pair.ends[A].replay_stalled(pair.now, FLOW);
    pair.run();
    assert!(pair.connects(A).is_empty());
}

/// As when neither end's kernel gets the processor: the acknowledgement and the answer come late.
#[test]
fn a_path_whose_last_answer_is_older_than_the_silence_is_asked_first() {
    let mut pair = two_paths();
    in_use(&mut pair, ms(100));
    let due = pair.now;
    pair.now = pair.now + ms(400);
    assert_eq!(waits_since(&mut pair, due, ms(10)), None);
}

#[test]
fn a_busy_peer_is_not_silent() {
    let mut pair = two_paths();
    in_use(&mut pair, ms(100));
    pair.forget();
    pair.udp[B] = Net::Silent;
    assert_eq!(waits(&mut pair, ms(300)), None);
    // It reads all questions at once, those over the other path first.
    pair.udp[B] = Net::Works;
    let sent = pair.done[A].clone();
    let is_first = |to: IpAddr| to == addrs()[B].ip();
    for first in [false, true] {
        for action in &sent {
            if let Action::Datagram { to, from, data } = action
                && is_first(to.ip()) == first
            {
                let from = from.unwrap_or(control(A));
                pair.ends[B].handle_datagram(pair.now, from, *to, data);
            }
        }
    }
    pair.run();
    assert_eq!(waits(&mut pair, ms(200)), None);
}

#[test]
fn one_lost_question_is_no_silence() {
    let mut pair = two_paths();
    in_use(&mut pair, ms(100));
    pair.udp[B] = Net::Silent;
    pair.ends[A].quiet(pair.now, FLOW, ms(8));
    pair.run();
    pair.udp[B] = Net::Works;
    assert_eq!(waits(&mut pair, ms(200)), None);
}

#[test]
fn a_flow_that_waits_no_more_stays() {
    let mut pair = two_paths();
    in_use(&mut pair, ms(100));
    pair.udp[B] = Net::Silent;
    assert_eq!(waits(&mut pair, ms(60)), None);
    in_use(&mut pair, ms(500));
    pair.udp[B] = Net::Works;
    pair.forget();
    in_use(&mut pair, ms(1500));
    assert!(pair.connects(A).is_empty());
    assert_eq!(questions(&pair), 0);
    assert_eq!(pair.ends[A].poll_timeout(), None, "no timer is left");
}

#[test]
fn flows_of_one_path_are_asked_about_once_and_move_together() {
    let mut pair = two_paths();
    pair.open_many(B, 20);
    pair.open_many(A, 20);
    pair.run();
    in_use(&mut pair, ms(100));
    pair.forget();
    pair.silent.insert(addrs()[B].ip());
    for flow in 0..20 {
        pair.ends[A].quiet(pair.now, FlowToken(1000 + flow), ms(8));
    }
    pair.wait(ms(40));
    assert_eq!(installs(&pair), 20);
    let asked = questions(&pair);
    assert!(asked <= 12, "{asked} questions");
}

#[test]
fn peers_on_this_host_and_flows_without_a_session_are_not_asked() {
    let mut pair = Pair::new();
    let mut same = id(B);
    same.host = id(A).host;
    pair.ends[B] = endpoint_at(same, vec![addrs()[B].ip(), second()], Config::default(), 9);
    pair.open(A);
    pair.open(B);
    pair.run();
    pair.forget();
    assert_eq!(pair.ends[A].in_use(pair.now, FLOW), 0);
    pair.ends[A].quiet(pair.now, FLOW, ms(8));
    assert_eq!(pair.ends[A].in_use(pair.now, FlowToken(99)), 0);
    pair.run();
    assert_eq!(questions(&pair), 0);

    let mut pair = Pair::live();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    assert_eq!(pair.ends[A].in_use(pair.now, FLOW), 0);
}

#[test]
fn flows_leave_an_address_that_this_host_has_lost() {
    let mut pair = Pair::live();
    pair.ends[A].address_gone(pair.now, second());
    pair.run();
    assert!(pair.connects(A).is_empty());
    pair.ends[A].set_addrs(pair.now, vec![IpAddr::from([10, 0, 0, 9])], Vec::new());
    pair.ends[A].address_gone(pair.now, addrs()[A].ip());
    pair.run();
    assert_eq!((pair.connects(A).len(), installs(&pair)), (1, 1));
}

#[test]
fn paths_that_are_not_in_use_are_forgotten() {
    let mut pair = two_paths();
    let before = pair.ends[A].tables().past;
    in_use(&mut pair, ms(100));
    assert_eq!(pair.ends[A].tables().past, before + 1);
    pair.wait(ms(61_000));
    pair.ends[A].tidy(pair.now);
    assert!(pair.ends[A].tables().past <= before);
}
