//! Flows agreed on by other means: `docs/PROTOCOL.md`, section of that name.

use super::locators::transports;
use super::pair::*;
use crate::config::{Config, Policy};
use crate::endpoint::{Action, Agreed, Endpoint, State};
use crate::event::{EscalateReason, Event, Failure};
use crate::ids::{Cause, FinHow, FlowId, Role, Verdict};
use crate::transport::{Path, TransportKind};
use crate::wire::Kind;

const NOT_CONNECTED: i32 = 107;

fn open(pair: &mut Pair, n: usize, secrets: [[u8; 32]; 2]) {
    let agreed = Agreed {
        flow: FlowId([6; 16]),
        secrets,
        peer: pair.ends[1 - n].announcement(),
    };
    let role = [Role::Connector, Role::Acceptor][n];
    let ends = (addrs()[n], addrs()[1 - n]);
    pair.ends[n].open_agreed(pair.now, FLOW, role, ends, &agreed);
}

fn opened(mut pair: Pair) -> Pair {
    for n in [A, B] {
        open(&mut pair, n, [[1; 32], [2; 32]]);
    }
    pair
}

fn agreed() -> Pair {
    opened(Pair::new())
}

fn fault(pair: &mut Pair, n: usize, errno: i32) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Errno(errno));
    pair.run();
}

#[test]
fn an_agreed_flow_is_live_at_once_without_messages() {
    let mut pair = agreed();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.run();
    assert!(pair.heard.iter().all(Vec::is_empty));
    for n in [A, B] {
        assert_eq!(pair.done[n], [Action::Live { token: FLOW }]);
        assert_eq!(pair.events[n], [Event::Live]);
    }
}

#[test]
fn an_agreed_flow_is_resumed_from_either_side() {
    for n in [A, B] {
        let mut pair = agreed();
        fault(&mut pair, n, RESET);
        pair.wait(ms(100));
        assert_eq!(pair.states(), [State::Live; 2]);
        let resumed = |e: &Event| matches!(e, Event::Resume { epoch: 1, .. });
        assert!(pair.events.iter().all(|events| events.iter().any(resumed)));
    }
}

#[test]
fn an_agreed_flow_may_begin_without_a_connection() {
    let mut pair = agreed();
    fault(&mut pair, A, NOT_CONNECTED);
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.paths(A).len(), 1);
}

#[test]
fn the_end_of_an_agreed_flow_is_announced_asked_about_and_remembered() {
    let mut pair = agreed();
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::Close);
    pair.run();
    assert!(pair.done[B].contains(&Action::PeerFinal {
        token: FLOW,
        seq: 42
    }));
    pair.ends[A].gone(pair.now, FLOW);
    let mut pair = agreed();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::Close);
    pair.run();
    pair.udp[B] = Net::Works;
    pair.ends[A].gone(pair.now, FLOW);
    pair.ends[B].fault(pair.now, FLOW, Cause::Eof { received: 42 });
    pair.run();
    assert_eq!(pair.kinds(A), [Kind::Query]);
    assert_eq!(pair.state(B), Some(State::Live));
    assert!(pair.done[B].contains(&Action::Reinstate { token: FLOW }));
}

#[test]
fn an_agreed_flow_can_be_demoted() {
    let mut pair = agreed();
    pair.ends[B].demote(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
}

#[test]
fn an_agreed_flow_leaves_no_state_when_it_is_over() {
    let mut pair = agreed();
    pair.run();
    for n in [A, B] {
        pair.ends[n].gone(pair.now, FLOW);
        let late = pair.now + ms(10 * 60_000);
        assert!(!pair.ends[n].tidy(late));
        assert_eq!(pair.ends[n].tables(), Default::default());
    }
}

#[test]
fn an_agreed_flow_cannot_be_resumed_with_other_secrets() {
    let mut pair = Pair::new();
    open(&mut pair, A, [[1; 32], [2; 32]]);
    open(&mut pair, B, [[1; 32], [3; 32]]);
    fault(&mut pair, A, RESET);
    pair.wait(ms(100));
    assert_eq!(pair.states(), [State::Suspended, State::Live]);
    pair.wait(ms(70_000));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
    let reason = Failure::BadProof;
    let failed = |e: &Event| matches!(e, Event::AttemptFailed { reason: r, .. } if *r == reason);
    assert!(pair.events[A].iter().any(failed), "{:?}", pair.events[A]);
}

#[test]
fn a_peer_that_has_not_opened_an_agreed_flow_says_so() {
    let mut pair = Pair::new();
    open(&mut pair, A, [[1; 32], [2; 32]]);
    fault(&mut pair, A, RESET);
    let forgot = |e: &Event| matches!(e, Event::Escalate { reason, .. } if *reason == EscalateReason::PeerForgot);
    assert!(pair.events[A].iter().any(forgot), "{:?}", pair.events[A]);
}

#[test]
fn an_agreed_flow_is_plain_if_the_policy_is_off() {
    let off = Config {
        policy: Policy::Off,
        ..Config::default()
    };
    let mut pair = opened(Pair::with([off, Config::default()]));
    pair.run();
    assert_eq!(pair.state(A), Some(State::Legacy));
}

#[test]
fn an_agreed_flow_is_resumed_by_the_announced_kinds() {
    let mut pair = Pair::new();
    for n in [A, B] {
        let own = transports(n, &[TransportKind::TEST]);
        pair.ends[n] = Endpoint::new(Config::default(), id(n), own, [n as u8; 32]);
    }
    // OFFER does not come in time.
    pair.udp = [Net::Silent; 2];
    let mut pair = opened(pair);
    for n in [A, B] {
        pair.forget();
        fault(&mut pair, n, RESET);
        pair.wait(ms(10));
        assert_eq!(pair.states(), [State::Live; 2]);
        let kinds: Vec<_> = pair.paths(n).iter().map(Path::kind).collect();
        assert_eq!(kinds, [TransportKind::TEST]);
    }
}
