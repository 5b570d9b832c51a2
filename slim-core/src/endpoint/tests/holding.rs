//! Held flows: `docs/PROTOCOL.md`, section "Held flows". `tests/sim.rs` has outages of days.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::pair::*;
use crate::auth::{JobKey, seal_with_job};
use crate::config::Config;
use crate::endpoint::{HOLD_ROUNDS, State};
use crate::event::{EscalateReason, Event};
use crate::ids::{Cause, FlowToken, Verdict};
use crate::wire::{AddrList, Here, Kind, Message, ProcessPlace};

const HOUR: Duration = Duration::from_secs(3600);
const KEY: &[u8] = b"the key of the job";

fn config() -> Config {
    Config {
        attempts: 1,
        attempt_timeouts: vec![Duration::from_secs(2)],
        hold: Some(HOUR),
        meet: vec![meeting()],
        job_key: JobKey::new(KEY),
        ..Config::default()
    }
}

fn meeting() -> SocketAddr {
    "10.9.0.1:4000".parse().unwrap()
}

/// A pair whose flow is held at `A`, since the network drops everything.
fn held() -> Pair {
    held_with(config())
}

fn held_with(config: Config) -> Pair {
    let mut pair = Pair::live_with(config);
    (pair.udp, pair.tcp) = ([Net::Silent; 2], [Net::Silent; 2]);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(2500));
    assert_eq!(pair.events[A].last(), Some(&Event::Hold));
    assert!(pair.ends[A].is_held(FLOW));
    pair.forget();
    pair
}

fn expiries(pair: &mut Pair, time: Duration) -> usize {
    let (end, mut n) = (pair.now + time, 0);
    while let Some(next) = pair.ends[A].poll_timeout().filter(|next| *next <= end) {
        pair.wait(next.since(pair.now));
        n += 1;
    }
    n
}

#[test]
fn a_held_flow_wakes_its_process_once_a_minute() {
    let mut pair = held();
    pair.udp[B] = Net::Works;
    pair.udp[A] = Net::Silent;
    let n = expiries(&mut pair, HOUR / 2);
    assert!((27..=30).contains(&n), "{n} in half an hour");
    assert_eq!(pair.kinds(B).len(), n * 2, "one QUERY and one WHERE each");
    assert!(pair.connects(A).is_empty());
}

#[test]
fn the_peer_is_asked_in_a_short_hold_too() {
    for seconds in [4, 30, 60, 100, 239] {
        let hold = Duration::from_secs(seconds);
        let mut pair = held_with(Config {
            hold: Some(hold),
            ..config()
        });
        pair.wait(hold / 2);
        assert!(pair.ends[A].is_held(FLOW), "{hold:?}");
        (pair.udp, pair.tcp) = ([Net::Works; 2], [Net::Works; 2]);
        pair.wait(hold / 2);
        assert_eq!(pair.states(), [State::Live; 2], "{hold:?}");
        assert!(matches!(pair.events[A].last(), Some(Event::Resume { .. })));
    }
}

#[test]
fn an_outage_that_ends_shortly_before_the_hold_is_not_too_long() {
    for seconds in [4, 60, 239, 1000] {
        let hold = Duration::from_secs(seconds);
        let mut pair = held_with(Config {
            hold: Some(hold),
            ..config()
        });
        // The hold began up to half a second ago, so it is still to last for at least 100 ms.
        pair.wait(hold - ms(600));
        assert!(pair.ends[A].is_held(FLOW), "{hold:?}");
        (pair.udp, pair.tcp) = ([Net::Works; 2], [Net::Works; 2]);
        pair.wait(HOLD_ROUNDS + Duration::from_secs(4));
        assert_eq!(pair.states(), [State::Live; 2], "{hold:?}");
    }
}

/// A pair whose `A` has lost so many flows, one after the other. They rest, or will soon, since the network drops everything.
fn many_held(hold: Duration, flows: u64, gap: Duration) -> Pair {
    let config = Config {
        hold: Some(hold),
        ..config()
    };
    let mut pair = Pair::with([config.clone(), config]);
    pair.open_many(B, flows);
    pair.open_many(A, flows);
    pair.run();
    assert_eq!(pair.many(A, flows, State::Live), flows as usize);
    (pair.udp, pair.tcp) = ([Net::Silent; 2], [Net::Silent; 2]);
    for n in 0..flows {
        pair.ends[A].fault(pair.now, FlowToken(1000 + n), Cause::Errno(RESET));
        pair.wait(gap);
    }
    pair.forget();
    pair
}

/// The timer that gives up one flow must not take the last round from another one.
#[test]
fn every_flow_has_its_last_round_although_another_one_ends_shortly_before() {
    for hold in [8, 60, 239, 1000].map(Duration::from_secs) {
        for gap in (1..24).map(|n| ms(250 * n)) {
            let mut pair = many_held(hold, 2, gap);
            // The second flow's attempts have failed 2 s after its fault, which came `gap` ago.
            pair.wait(ms(2000) + hold - gap - ms(100));
            let second = FlowToken(1001);
            assert!(pair.ends[A].is_held(second), "{hold:?} {gap:?}");
            (pair.udp, pair.tcp) = ([Net::Works; 2], [Net::Works; 2]);
            pair.wait(HOLD_ROUNDS + Duration::from_secs(20));
            let state = pair.ends[A].state(second);
            assert_eq!(state, Some(State::Live), "{hold:?} {gap:?}");
        }
    }
}

#[test]
fn holds_that_end_one_after_the_other_do_not_wake_the_process_each_time() {
    let hold = Duration::from_secs(1000);
    for gap in [500, 900, 1000, 1500].map(ms) {
        let mut pair = many_held(hold, 100, gap);
        while pair.ends[A].is_held(FlowToken(1000)) {
            pair.wait(ms(50));
        }
        // Rounds go on, and each is followed by one expiry for the flows that had their last round in it.
        let n = expiries(&mut pair, Duration::from_secs(200));
        assert!(n <= 8, "{n} with {gap:?}");
    }
}

#[test]
fn an_answer_of_the_peer_starts_the_attempts_anew() {
    let mut pair = held();
    (pair.udp, pair.tcp) = ([Net::Works; 2], [Net::Works; 2]);
    pair.wait(HOLD_ROUNDS + Duration::from_secs(4));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert!(matches!(pair.events[A].last(), Some(Event::Resume { .. })));
    assert_eq!(pair.ends[A].hold_timer(), None);
}

#[test]
fn a_question_of_the_peer_starts_them_once_a_minute() {
    let mut pair = held();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(2500));
    assert!(pair.ends[B].is_held(FLOW));
    // Only what B sends arrives.
    pair.udp[A] = Net::Works;
    pair.wait(HOLD_ROUNDS + Duration::from_secs(4));
    let attempts = |pair: &Pair| {
        let all = pair.events[A].iter();
        all.filter(|e| matches!(e, Event::Attempt { .. })).count()
    };
    assert_eq!(attempts(&pair), 1);
    // The same question, recorded.
    let query = pair.heard[A]
        .iter()
        .rev()
        .find(|data| data[5] == Kind::Query as u8);
    let query = query.unwrap().clone();
    pair.udp = [Net::Silent; 2];
    pair.wait(ms(2500));
    assert!(pair.ends[A].is_held(FLOW));
    pair.ends[A].handle_datagram(pair.now, control(B), control(A), &query);
    pair.run();
    assert_eq!(attempts(&pair), 1);
}

#[test]
fn a_flow_is_given_up_when_it_has_been_held_for_so_long() {
    let mut pair = held();
    pair.wait(HOUR + HOLD_ROUNDS);
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
    let reason = pair.events[A].iter().find_map(|event| match event {
        Event::Escalate { reason, .. } => Some(*reason),
        _ => None,
    });
    assert_eq!(reason, Some(EscalateReason::Attempts));
    // The other end has not noticed anything.
    assert_eq!(pair.state(B), Some(State::Live));
}

#[test]
fn a_refusal_is_confirmed_and_ends_the_flow() {
    let mut pair = held();
    (pair.udp[B], pair.tcp[B]) = (Net::Refuses, Net::Refuses);
    pair.wait(HOLD_ROUNDS + Duration::from_secs(4));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_stall_is_held_too_and_ends_with_the_kernels_error_or_with_bytes_that_move() {
    for moves in [false, true] {
        let mut pair = Pair::live_with(config());
        (pair.udp, pair.tcp) = ([Net::Silent; 2], [Net::Silent; 2]);
        pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
        pair.wait(ms(2500));
        assert!(pair.ends[A].is_held(FLOW));
        assert_eq!(
            pair.state(A),
            Some(State::Live),
            "the old transport is in use"
        );
        pair.forget();
        if moves {
            pair.ends[A].moves_on(pair.now, FLOW);
            assert!(!pair.ends[A].is_held(FLOW));
            continue;
        }
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
        pair.run();
        assert!(pair.ends[A].is_held(FLOW));
        assert_eq!(pair.state(A), Some(State::Suspended));
        assert!(pair.connects(A).is_empty(), "no attempts");
        pair.wait(HOUR + HOLD_ROUNDS);
        assert_eq!(pair.verdict(A), Some(Verdict::Errno(110)));
    }
}

fn here(serial: u64, ip: [u8; 4], key: &[u8]) -> Vec<u8> {
    let place = ProcessPlace {
        serial,
        resume_port: 700,
        control_port: 701,
        addrs: AddrList::new([IpAddr::from(ip)]),
    };
    let here = Here {
        to: id(A),
        endpoint: id(B),
        place,
    };
    seal_with_job(JobKey::new(key).as_ref(), &Message::Here(here))
}

#[test]
fn the_newest_place_of_the_peer_counts_if_the_message_has_the_key_of_the_job() {
    let mut pair = held();
    let mut asked = |serial: u64, ip: [u8; 4], key: &[u8]| -> Vec<IpAddr> {
        pair.forget();
        pair.ends[A].handle_datagram(pair.now, meeting(), control(A), &here(serial, ip, key));
        pair.run();
        let to = pair.done[A].iter().filter_map(|action| match action {
            crate::endpoint::Action::Datagram { to, .. } => Some(to.ip()),
            _ => None,
        });
        to.collect()
    };
    let none: Vec<IpAddr> = Vec::new();
    let (old, new) = (addrs()[B].ip(), IpAddr::from([10, 5, 0, 2]));
    assert_eq!(asked(2 << 32, [10, 5, 0, 2], b"another key of a job"), none);
    assert_eq!(asked(2 << 32, [10, 5, 0, 2], KEY), [old, new]);
    assert_eq!(asked(2 << 32, [10, 5, 0, 9], KEY), none, "known");
    assert_eq!(asked(1 << 32, [10, 5, 0, 9], KEY), none, "recorded");
    assert!(pair.ends[A].may_know(new));
    // At the old address is another host by now, perhaps.
    let query = |pair: &Pair| {
        let all = pair.done[A].iter().filter_map(|action| match action {
            crate::endpoint::Action::Datagram { to, data, .. } => Some((*to, data.clone())),
            _ => None,
        });
        all.collect::<Vec<_>>()
    };
    pair.forget();
    pair.wait(HOLD_ROUNDS + Duration::from_secs(4));
    for (to, data) in query(&pair) {
        pair.ends[A].handle_refused(pair.now, SocketAddr::new(old, to.port()), &data);
    }
    pair.run();
    assert_eq!(pair.ends[A].tables().questions, 0);
}

#[test]
fn a_process_that_has_moved_says_so_until_it_is_heard() {
    for hold in [Duration::from_secs(4), HOUR] {
        says_where_it_is(Config {
            hold: Some(hold),
            ..config()
        });
    }
}

fn says_where_it_is(config: Config) {
    let mut pair = Pair::live_with(config);
    pair.ends[A].set_addrs(pair.now, vec![[10, 5, 0, 1].into()], Vec::new());
    let told = |pair: &Pair| {
        let all = pair.done[A].iter().filter_map(|action| match action {
            crate::endpoint::Action::Datagram { to, data, .. } if *to == meeting() => {
                match crate::wire::parse(data).unwrap().message {
                    Message::Where(message) => Some(message),
                    _ => None,
                }
            }
            _ => None,
        });
        all.collect::<Vec<_>>()
    };
    pair.run();
    let [first] = told(&pair)[..] else {
        panic!("{:?}", told(&pair));
    };
    assert_eq!((first.sender, first.wanted), (id(A), id(A)));
    pair.wait(HOLD_ROUNDS * 3);
    assert!(
        (3..=5).contains(&told(&pair).len()),
        "{}",
        told(&pair).len()
    );
    let confirmed = Here {
        to: id(A),
        endpoint: id(A),
        place: first.place,
    };
    let data = seal_with_job(JobKey::new(KEY).as_ref(), &Message::Here(confirmed));
    pair.ends[A].handle_datagram(pair.now, meeting(), control(A), &data);
    assert_eq!(pair.ends[A].hold_timer(), None);
}
