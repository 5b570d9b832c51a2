//! Flows that go over to the endpoint of the next program of a process.

use super::pair::*;
use crate::config::Config;
use crate::endpoint::{Action, HandOver, HandedFlow, State};
use crate::event::Event;
use crate::ids::{Cause, FinHow, FlowToken};
use crate::saved::Saved;

/// The process of side `n` executes another program.
fn exec(pair: &mut Pair, n: usize) {
    let HandOver::Ready(flow) = pair.ends[n].hand_over(FLOW) else {
        panic!("the flow is not ready");
    };
    let mut bytes = Vec::new();
    flow.save(&mut bytes);
    for len in 0..bytes.len() {
        assert!(HandedFlow::load(&mut &bytes[..len]).is_none());
    }
    let flow = HandedFlow::load(&mut &bytes[..]).unwrap();
    let before = pair.ends[n].announcement();
    pair.ends[n] = endpoint_at(before.id, before.addrs, Config::default(), 77);
    pair.ends[n].continue_serial(before.serial);
    assert!(pair.ends[n].announcement().serial > before.serial);
    pair.ends[n].open_handed(pair.now, FLOW, flow);
    pair.run();
}

fn fault(pair: &mut Pair, n: usize) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    pair.wait(ms(100));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_flow_is_resumed_from_either_side_before_and_after_it_is_handed_over() {
    for (executes, fails) in [(A, A), (A, B), (B, A), (B, B)] {
        let mut pair = Pair::live();
        fault(&mut pair, fails);
        exec(&mut pair, executes);
        fault(&mut pair, fails);
        exec(&mut pair, executes);
        exec(&mut pair, 1 - executes);
        fault(&mut pair, 1 - fails);
        let resumed = |e: &Event| matches!(e, Event::Resume { epoch: 3, .. });
        for events in &pair.events {
            assert!(events.iter().any(resumed), "{executes} {fails}: {events:?}");
        }
    }
}

#[test]
fn ends_of_both_streams_come_over() {
    let mut pair = Pair::live();
    (pair.counts[A].sent, pair.counts[B].received) = (42, 42);
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::HalfClose);
    pair.run();
    pair.done[B].clear();
    exec(&mut pair, B);
    let seq = 42;
    assert!(pair.done[B].contains(&Action::PeerFinal { token: FLOW, seq }));
    exec(&mut pair, A);
    fault(&mut pair, B);
    pair.ends[B].finish(pair.now, FLOW, 7, FinHow::Close);
    pair.run();
    let seq = 7;
    assert!(pair.done[A].contains(&Action::PeerFinal { token: FLOW, seq }));
}

#[test]
fn only_flows_in_which_nothing_is_under_way_are_handed_over() {
    let mut pair = Pair::new();
    let is_never = |pair: &Pair, token| matches!(pair.ends[A].hand_over(token), HandOver::Never);
    assert!(is_never(&pair, FLOW));
    pair.open(A);
    assert!(matches!(pair.ends[A].hand_over(FLOW), HandOver::Negotiates));
    let mut pair = Pair::live();
    assert!(is_never(&pair, FlowToken(99)));
    pair.tcp = [Net::Silent; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    for n in [A, B] {
        let is_busy = matches!(pair.ends[n].hand_over(FLOW), HandOver::Busy);
        assert_eq!(is_busy, pair.ends[n].state(FLOW) != Some(State::Live));
    }
    let mut pair = Pair::live();
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    assert!(is_never(&pair, FLOW));
}
