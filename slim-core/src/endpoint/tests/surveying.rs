//! What layers above can ask: flows, peers, escalations.

use super::pair::*;
use crate::endpoint::{Endpoint, PeerStanding, Standing, SurveyedFlow, SurveyedPeer};
use crate::event::{EscalateReason, Evidence, LegacyReason, Trouble};
use crate::ids::{Cause, FinHow, FlowId, FlowToken, Role};
use crate::transport::Locator;

fn flows(end: &Endpoint) -> Vec<SurveyedFlow> {
    end.surveyed_flows().collect()
}

fn only_flow(end: &Endpoint) -> SurveyedFlow {
    let [flow] = flows(end)[..] else {
        panic!("{:?}", flows(end));
    };
    flow
}

fn only_peer(end: &Endpoint) -> SurveyedPeer {
    let mut peers = end.surveyed_peers();
    assert_eq!(peers.len(), 1, "{peers:?}");
    peers.remove(0)
}

#[test]
fn a_broken_flow_is_suspended_and_then_active_with_one_resume() {
    let mut pair = Pair::new();
    assert_eq!(flows(&pair.ends[A]), []);
    pair.open(A);
    assert_eq!(only_flow(&pair.ends[A]).standing, Standing::Negotiating);
    assert_eq!(pair.ends[A].surveyed_peers(), []);
    pair.open(B);
    pair.run();
    let before = only_flow(&pair.ends[A]);
    let [sock, peer] = addrs();
    assert_ne!(before.flow, FlowId([0; 16]));
    assert_eq!(before.flow, only_flow(&pair.ends[B]).flow);
    let expected = SurveyedFlow {
        token: FLOW,
        flow: before.flow,
        role: Role::Connector,
        sock,
        peer,
        process: Some(id(B)),
        standing: Standing::Active,
        epoch: 0,
        resumes: 0,
        closed: false,
    };
    assert_eq!(before, expected);
    let reachable = SurveyedPeer {
        process: id(B),
        standing: PeerStanding::Reachable,
        flows: 1,
        suspended: 0,
        evidence: None,
        locators: vec![Locator::Tcp("10.0.0.2:700".parse().unwrap())],
    };
    assert_eq!(only_peer(&pair.ends[A]), reachable);

    pair.tcp[B] = Net::Silent;
    pair.tcp[A] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    assert_eq!(only_flow(&pair.ends[A]).standing, Standing::Suspended);
    let suspended = SurveyedPeer {
        standing: PeerStanding::Suspended,
        suspended: 1,
        ..reachable.clone()
    };
    assert_eq!(only_peer(&pair.ends[A]), suspended);
    pair.wait(ms(100));
    pair.tcp = [Net::Works; 2];
    pair.wait(ms(5000));
    let after = SurveyedFlow {
        epoch: 1,
        resumes: 1,
        ..before
    };
    let now = only_flow(&pair.ends[A]);
    assert_eq!(
        now,
        SurveyedFlow {
            epoch: now.epoch,
            ..after
        }
    );
    assert!(now.epoch >= 1);
    assert_eq!(only_peer(&pair.ends[A]), reachable);
    assert_eq!(pair.ends[A].poll_escalation(), None);
}

#[test]
fn a_dead_process_is_lost_and_its_flow_has_ended_with_evidence() {
    let mut pair = Pair::live();
    let flow = only_flow(&pair.ends[A]).flow;
    (pair.udp[B], pair.tcp[B]) = (Net::Refuses, Net::Refuses);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(60_000));
    let escalation = pair.ends[A].poll_escalation().unwrap();
    let [sock, peer] = addrs();
    assert_eq!((escalation.sock, escalation.peer), (sock, peer));
    assert_eq!((escalation.flow, escalation.process), (flow, Some(id(B))));
    assert_eq!(escalation.cause, Trouble::Errno(RESET));
    assert_eq!(escalation.reason, EscalateReason::PeerGone);
    assert_eq!(escalation.evidence, Some(Evidence::ProcessGone));
    assert_eq!(escalation.errno, RESET);
    assert_eq!(pair.ends[A].poll_escalation(), None);
    // The driver forgets the flow; the survey does not.
    pair.ends[A].gone(pair.now, FLOW);
    let ended = only_flow(&pair.ends[A]);
    let gone = Some(Evidence::ProcessGone);
    assert_eq!(
        ended.standing,
        Standing::Ended(EscalateReason::PeerGone, gone)
    );
    let peer = only_peer(&pair.ends[A]);
    assert_eq!((peer.standing, peer.flows), (PeerStanding::Lost, 0));
    assert_eq!(peer.evidence, gone);
}

#[test]
fn a_silent_host_is_the_evidence_when_all_attempts_are_used_up() {
    let mut pair = Pair::live();
    (pair.udp, pair.tcp) = ([Net::Silent; 2], [Net::Silent; 2]);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(90_000));
    let escalation = pair.ends[A].poll_escalation().unwrap();
    assert_eq!(escalation.reason, EscalateReason::Attempts);
    assert_eq!(escalation.evidence, Some(Evidence::HostSilent));
    assert!(escalation.attempts > 1, "{escalation:?}");
    assert_eq!(only_peer(&pair.ends[A]).standing, PeerStanding::Lost);
}

#[test]
fn a_flow_without_a_session_is_legacy_with_its_reason() {
    let pair = Pair::given_up_by_connector();
    let flow = only_flow(&pair.ends[A]);
    let reason = LegacyReason::NoAnswer;
    assert_eq!(flow.standing, Standing::Legacy(Some(reason)));
    let mut pair = Pair::live();
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    let standing = |n: usize| only_flow(&pair.ends[n]).standing;
    assert_eq!(standing(A), Standing::Legacy(None));
    assert_eq!(
        standing(B),
        Standing::Legacy(Some(LegacyReason::PeerDemoted))
    );
    assert_eq!(pair.ends[A].surveyed_peers(), []);
}

#[test]
fn a_closed_flow_is_marked_until_it_is_gone() {
    let mut pair = Pair::live();
    pair.ends[A].finish(pair.now, FLOW, 0, FinHow::Close);
    assert!(only_flow(&pair.ends[A]).closed);
    pair.ends[A].gone(pair.now, FLOW);
    assert_eq!(flows(&pair.ends[A]), []);
}

#[test]
fn only_the_last_flows_and_escalations_are_remembered() {
    let mut pair = Pair::new();
    pair.udp = [Net::Silent; 2];
    pair.open_many(A, 100);
    pair.wait(HELLO_TIME);
    for n in 0..100 {
        pair.ends[A].gone(pair.now, FlowToken(1000 + n));
    }
    let kept = flows(&pair.ends[A]);
    assert_eq!(kept.len(), 64);
    assert_eq!(kept.last().map(|flow| flow.peer), Some(addrs()[B]));
}

#[test]
fn escalations_that_were_dropped_are_counted() {
    let mut pair = Pair::live();
    let what = (Trouble::Errno(RESET), EscalateReason::PeerGone, None);
    let mut number = 0;
    for at_once in [1, 64, 65, 300] {
        let before = number;
        for _ in 0..at_once {
            pair.ends[A].note_escalation(pair.now, FLOW, what, 1, RESET);
        }
        while let Some(escalation) = pair.ends[A].poll_escalation() {
            number += escalation.missed + 1;
        }
        assert_eq!(number, before + at_once);
    }
}
