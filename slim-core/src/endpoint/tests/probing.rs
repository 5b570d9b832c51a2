//! Probes of a peer that cannot be reached for some time.

use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, State};
use crate::ids::{Cause, FlowToken};
use crate::wire::{Kind, parse};

/// Milliseconds; more than one interval between probes and the resume after the answer take.
const SOON: u64 = 35;

fn is_query(action: &Action) -> bool {
    matches!(action, Action::Datagram { data, .. }
        if parse(data).is_ok_and(|p| p.message.kind() == Kind::Query))
}

fn hole(pair: &mut Pair, open: bool) {
    let net = if open { Net::Silent } else { Net::Works };
    pair.udp = [net; 2];
    pair.tcp = [net; 2];
}

#[test]
fn a_flow_is_resumed_as_soon_as_the_peer_is_reachable_again() {
    for seconds in [1, 5, 14, 59] {
        for cause in [Cause::Errno(RESET), Cause::Stall] {
            for n in [A, B] {
                let mut pair = Pair::live();
                hole(&mut pair, true);
                pair.ends[n].fault(pair.now, FLOW, cause);
                pair.wait(ms(seconds * 1000 + 333));
                hole(&mut pair, false);
                pair.forget();
                pair.wait(ms(SOON));
                let moved = pair.count(n, |a| matches!(a, Action::Install { .. }));
                assert_eq!(moved, 1, "{cause:?}, {seconds} s, side {n}");
                assert_eq!(pair.states(), [State::Live; 2]);
                assert_eq!(pair.connects(n).len(), 1);
            }
        }
    }
}

#[test]
fn one_peer_is_probed_once_for_all_flows() {
    let mut pair = Pair::new();
    pair.open_many(B, 500);
    pair.open_many(A, 500);
    pair.run();
    pair.forget();
    hole(&mut pair, true);
    for flow in 0..500 {
        pair.ends[A].fault(pair.now, FlowToken(1000 + flow), Cause::Errno(RESET));
    }
    pair.wait(ms(2500));
    let asked = pair.count(A, is_query);
    assert!((150..=210).contains(&asked), "{asked} QUERYs");
    hole(&mut pair, false);
    pair.wait(ms(SOON));
    assert_eq!(pair.many(A, 500, State::Live), 500);
    pair.wait(ms(1000));
    assert_eq!(pair.ends[A].poll_timeout(), None, "no probe is left");
}

#[test]
fn an_established_connection_is_not_probed() {
    let mut pair = Pair::live();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(5000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.count(A, is_query), 0);
}

/// If only UDP passes, the answers do not cause more and more connections.
#[test]
fn answers_without_loss_cause_few_connections() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(14_000));
    let made = pair.connects(A).len();
    assert!((9..=30).contains(&made), "{made} connections");
    let asked = pair.count(A, is_query);
    assert!(asked <= 60, "{asked} QUERYs");
}

#[test]
fn the_next_connection_goes_to_the_address_that_answered() {
    let config = Config::default();
    let mut pair = Pair::with([config.clone(), config]);
    let other = std::net::IpAddr::from([10, 1, 0, 2]);
    pair.ends[B].set_addrs(pair.now, vec![addrs()[B].ip(), other], Vec::new());
    pair.open(A);
    pair.open(B);
    pair.run();
    pair.forget();
    pair.tcp[B] = Net::Silent;
    pair.udp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(300));
    // From now on, only datagrams to the other address arrive.
    let mut asked = 0;
    while pair.connects(A).len() == 1 && asked < 100 {
        asked += 1;
        pair.now = pair.ends[A].poll_timeout().unwrap();
        pair.ends[A].handle_timeout(pair.now);
        while let Some(action) = pair.ends[A].poll_action() {
            let there = matches!(&action, Action::Datagram { to, .. } if to.ip() == other);
            pair.udp[B] = if there { Net::Works } else { Net::Silent };
            pair.done[A].push(action.clone());
            pair.act(A, action);
            while let Some(answer) = pair.ends[B].poll_action() {
                pair.act(B, answer);
            }
        }
    }
    assert_eq!(pair.connects(A).last().map(|to| to.ip()), Some(other));
    assert!(asked <= 6, "{asked} timers");
}

/// A late or repeated answer has no effect.
#[test]
fn only_answers_to_open_probes_count() {
    let mut pair = Pair::live();
    hole(&mut pair, true);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(500));
    let asked = pair.done[A].iter().rfind(|a| is_query(a)).cloned();
    let Some(Action::Datagram { data, .. }) = asked else {
        panic!("no QUERY")
    };
    pair.ends[B].handle_datagram(pair.now, control(A), control(B), &data);
    let Some(Action::Datagram { data, .. }) = pair.ends[B].poll_action() else {
        panic!("no answer")
    };
    let before = pair.connects(A).len();
    pair.ends[A].handle_datagram(pair.now, control(B), control(A), &data);
    pair.run();
    assert_eq!(pair.connects(A).len(), before + 1, "the answer counts");
    let dropped = pair.ends[A].dropped();
    pair.ends[A].handle_datagram(pair.now, control(B), control(A), &data);
    pair.run();
    assert_eq!(pair.connects(A).len(), before + 1, "the probe is over");
    assert_eq!(pair.ends[A].dropped(), dropped + 1);
}
