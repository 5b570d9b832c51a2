//! Flows that go on through the witness.

use super::locators::live;
use super::pair::*;
use crate::endpoint::State;
use crate::endpoint::outage::Outage;
use crate::endpoint::record::DrainState;
use crate::ids::{Cause, FinHow, Verdict};
use crate::transport::{Path, TransportKind};

const TCP: TransportKind = TransportKind::TCP;
const RELAY: TransportKind = TransportKind::RELAY;

/// A flow whose ends reach each other only through the witness.
fn parted() -> Pair {
    let mut pair = live([&[RELAY]; 2]);
    pair.forget();
    pair.tcp = [Net::Silent; 2];
    pair.udp = [Net::Silent; 2];
    pair
}

fn fail(pair: &mut Pair, n: usize) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Errno(110));
    pair.run();
}

fn stall(pair: &mut Pair, n: usize) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Stall);
    pair.run();
}

/// The same, and the flow goes through the witness.
fn relayed() -> Pair {
    let mut pair = parted();
    fail(&mut pair, A);
    pair.wait(ms(3_100));
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.forget();
    pair
}

fn kinds(pair: &Pair, n: usize) -> Vec<TransportKind> {
    pair.paths(n).iter().map(Path::kind).collect()
}

#[test]
fn the_witness_is_the_last_way() {
    let mut pair = parted();
    fail(&mut pair, A);
    pair.wait(ms(2_900));
    assert!(kinds(&pair, A).iter().all(|kind| *kind == TCP));
    assert_eq!(pair.state(A), Some(State::Suspended));
    pair.wait(ms(200));
    assert_eq!(kinds(&pair, A).last(), Some(&RELAY));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn after_an_error_the_witness_comes_first() {
    for n in [A, B] {
        let mut pair = relayed();
        fail(&mut pair, n);
        pair.wait(ms(20));
        assert_eq!(
            kinds(&pair, n),
            [RELAY],
            "both ends know that the flow is relayed"
        );
        assert_eq!(pair.states(), [State::Live; 2]);
    }
}

#[test]
fn a_stall_is_a_resume_and_the_direct_paths_come_first_now_and_then() {
    let mut pair = relayed();
    pair.wait(ms(1_000));
    stall(&mut pair, B);
    assert_eq!(
        (kinds(&pair, B), pair.states()),
        (vec![RELAY], [State::Live; 2])
    );
    pair.forget();
    pair.wait(ms(4_000));
    stall(&mut pair, B);
    assert_eq!(kinds(&pair, B), [TCP]);
    // The data flows on meanwhile, and the direct paths have their time.
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.wait(ms(2_100));
    assert_eq!(kinds(&pair, B), [TCP, TCP, RELAY]);
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.forget();
    pair.tcp = [Net::Works; 2];
    pair.wait(ms(5_000));
    stall(&mut pair, A);
    assert_eq!(
        (kinds(&pair, A), pair.states()),
        (vec![TCP], [State::Live; 2])
    );
    pair.forget();
    fail(&mut pair, A);
    assert_eq!(kinds(&pair, A), [TCP], "it is relayed no more");
}

#[test]
fn with_too_many_bytes_kept_the_direct_paths_do_not_get_their_time() {
    let mut pair = relayed();
    pair.wait(ms(5_100));
    for _ in 0..2 {
        pair.ends[A].handle_full(pair.now, FLOW);
        pair.run();
    }
    assert_eq!(
        (kinds(&pair, A), pair.states()),
        (vec![TCP, RELAY], [State::Live; 2])
    );
    pair.forget();
    pair.ends[A].handle_full(pair.now, FLOW);
    pair.run();
    assert_eq!(kinds(&pair, A), [RELAY]);
    // A flow that is not relayed is let alone.
    let mut direct = live([&[RELAY]; 2]);
    direct.forget();
    direct.ends[A].handle_full(direct.now, FLOW);
    direct.run();
    assert_eq!(
        (kinds(&direct, A), direct.states()),
        (Vec::new(), [State::Live; 2])
    );
}

/// The witness is gone, or refuses. That says nothing about the peer process.
#[test]
fn a_refusal_by_the_witness_is_no_sign_of_a_dead_peer() {
    let mut pair = parted();
    pair.other = [Net::Refuses; 2];
    pair.udp = [Net::Refuses; 2];
    fail(&mut pair, A);
    pair.wait(ms(10_000));
    assert!(kinds(&pair, A).contains(&RELAY));
    assert_eq!(
        (pair.state(A), pair.verdict(A)),
        (Some(State::Suspended), None)
    );
}

/// The connection has ended because the witness has died. The kernel of the witness has sent that end, and not the peer's.
#[test]
fn the_end_of_a_relayed_transport_is_never_believed() {
    let mut pair = relayed();
    pair.other = [Net::Refuses; 2];
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Eof { received: 0 });
    }
    pair.run();
    pair.wait(ms(70_000));
    for n in [A, B] {
        assert_eq!(
            pair.verdict(n),
            Some(Verdict::Errno(104)),
            "{:?}",
            pair.state(n)
        );
    }
}

/// FIN does not arrive, and the end of a relayed transport says nothing. A resume tells.
#[test]
fn a_resume_tells_that_the_peer_has_closed() {
    for asks in [A, B] {
        let mut pair = relayed();
        pair.ends[A].finish(pair.now, FLOW, 0, FinHow::Close);
        fail(&mut pair, asks);
        pair.wait(ms(20));
        assert_eq!(pair.states(), [State::Live; 2]);
        pair.forget();
        // The process of A is gone.
        pair.other = [Net::Refuses; 2];
        stall(&mut pair, B);
        assert!(kinds(&pair, B).is_empty(), "nobody reads what B has sent");
        pair.ends[B].finish(pair.now, FLOW, 0, FinHow::Close);
        fail(&mut pair, B);
        pair.wait(ms(100));
        assert_eq!(kinds(&pair, B), [RELAY], "it tells that all has arrived");
        assert_eq!(pair.verdict(B), Some(Verdict::Eof), "nobody is accused");
    }
}

/// It may still read.
#[test]
fn a_half_closed_flow_goes_on() {
    let mut pair = relayed();
    pair.ends[A].finish(pair.now, FLOW, 0, FinHow::HalfClose);
    fail(&mut pair, A);
    pair.wait(ms(20));
    pair.forget();
    stall(&mut pair, B);
    assert_eq!(kinds(&pair, B), [RELAY]);
}

/// The peer has asked for a resume, and this end has drained its transport. Then the witness dies: no kernel waits for anything any more.
#[test]
fn a_drained_flow_without_a_way_does_not_wait_as_long_as_a_kernel() {
    let mut pair = relayed();
    pair.other = [Net::Refuses; 2];
    let end = &mut pair.ends[B];
    end.begin_outage(pair.now, FLOW, Outage::new(pair.now, Cause::PeerAsked));
    pair.run();
    let (received, sent) = (0, 0);
    pair.ends[B].flow(FLOW).change.drained = DrainState::Done { received, sent };
    pair.ends[B].start_attempts(pair.now, FLOW);
    pair.wait(ms(70_000));
    assert_eq!(
        pair.verdict(B),
        Some(Verdict::Errno(104)),
        "{:?}",
        pair.state(B)
    );
}
