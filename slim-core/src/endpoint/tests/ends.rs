//! How flows end: FIN, QUERY, unannounced ends, tombstones.

use super::pair::*;
use crate::endpoint::attempts::HEAD_START;
use crate::endpoint::errno::EPIPE;
use crate::endpoint::{Action, State};
use crate::event::{EscalateReason, Event, LegacyReason, Trouble};
use crate::ids::{Cause, FinHow, FlowToken, Verdict};
use crate::wire::{Kind, Message, RefuseReason};

const REINSTATE: Action = Action::Reinstate { token: FLOW };

fn final_at(seq: u64) -> Action {
    Action::PeerFinal { token: FLOW, seq }
}

fn eof(pair: &mut Pair, n: usize, received: u64) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Eof { received });
    pair.run();
}

#[test]
fn an_end_is_announced() {
    let mut pair = Pair::live();
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::HalfClose);
    pair.run();
    assert_eq!(pair.done[B], [final_at(42)]);
    // A second announcement of the same end is no news.
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::Close);
    pair.run();
    assert_eq!(pair.done[B], [final_at(42)]);
}

#[test]
fn an_end_that_was_not_announced_is_asked_about() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::HalfClose);
    pair.run();
    pair.udp[B] = Net::Works;
    eof(&mut pair, B, 42);
    assert_eq!(pair.kinds(A), [Kind::Query]);
    assert_eq!(pair.kinds(B), [Kind::Status]);
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.done[B][1..], [final_at(42), REINSTATE]);
    assert_eq!(pair.events[B], [], "nothing to be told");
}

#[test]
fn an_end_that_is_asked_about_again_is_told() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::HalfClose);
    eof(&mut pair, B, 42);
    pair.udp[B] = Net::Works;
    pair.wait(ms(60));
    let cause = Trouble::Eof;
    assert_eq!(pair.events[B], [Event::Suspend { cause }, Event::Reinstate]);
}

#[test]
fn the_announcement_may_come_after_the_end() {
    let mut pair = Pair::live();
    pair.udp[A] = Net::Silent;
    eof(&mut pair, B, 42);
    assert_eq!(pair.state(B), Some(State::Suspended));
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::Close);
    pair.run();
    assert_eq!(pair.state(B), Some(State::Live));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
    pair.wait(ms(900));
    assert!(pair.connects(B).is_empty());
}

#[test]
fn an_end_nobody_ordered_is_a_fault() {
    for announced in [false, true] {
        let mut pair = Pair::live();
        pair.counts = [
            Counts {
                received: 0,
                sent: 42,
            },
            Counts {
                received: 40,
                sent: 0,
            },
        ];
        if announced {
            // The end is genuine, but two bytes are missing in front of it.
            pair.ends[A].finish(pair.now, FLOW, 42, FinHow::Close);
            pair.run();
        }
        eof(&mut pair, B, 40);
        assert_eq!(pair.states(), [State::Live; 2]);
        assert_eq!(pair.count(B, |a| *a == REINSTATE), 0);
        let resumed = |e: &Event| matches!(e, Event::Resume { received: 2, .. });
        assert!(pair.events[B].iter().any(resumed), "{:?}", pair.events[B]);
    }
}

#[test]
fn an_end_with_an_error_behind_it_is_not_waited_on_for_ever() {
    // The peer half-closed the flow, closed it, or has forgotten it since.
    for (how, gone) in [
        (FinHow::HalfClose, false),
        (FinHow::Close, false),
        (FinHow::Close, true),
    ] {
        let mut pair = Pair::live();
        pair.counts[A].sent = 42;
        pair.counts[B].received = 42;
        pair.udp = [Net::Silent; 2];
        pair.ends[A].finish(pair.now, FLOW, 42, how);
        if gone {
            pair.ends[A].gone(pair.now, FLOW);
        }
        eof(&mut pair, B, 42);
        // Another thread finds that it cannot write, either.
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.udp = [Net::Works; 2];
        pair.wait(ms(2000));
        let over = (how == FinHow::Close).then_some(Verdict::Eof);
        assert_eq!(pair.verdict(B), over, "{how:?}, gone: {gone}");
        assert_eq!(pair.connects(B).is_empty(), over.is_some());
    }
}

#[test]
fn the_end_of_a_process_that_died_is_delivered() {
    let mut pair = Pair::live();
    pair.udp[A] = Net::Refuses;
    eof(&mut pair, B, 3);
    pair.wait(ms(400));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
    let reason = LegacyReason::PeerForgot;
    assert_eq!(pair.events[B].last(), Some(&Event::Legacy { reason }));
}

/// It died while its replay was being written: what the kernel then ends is less than what was promised.
#[test]
fn an_end_in_the_middle_of_a_replay_is_never_delivered_as_one() {
    let resumed = || {
        let mut pair = Pair::live();
        pair.counts[A].sent = 9;
        pair.counts[B].received = 5;
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.wait(HEAD_START);
        assert_eq!(pair.states(), [State::Live; 2]);
        pair.forget();
        (pair.udp[A], pair.tcp[A]) = (Net::Refuses, Net::Refuses);
        pair
    };
    let mut pair = resumed();
    eof(&mut pair, B, 7);
    pair.wait(ms(400));
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)));
    // With all of it, it is the end of a process that died.
    let mut pair = resumed();
    eof(&mut pair, B, 9);
    pair.wait(ms(400));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn the_end_of_a_flow_that_the_peer_never_knew_is_delivered() {
    let mut pair = Pair::live();
    let addr = vec![addrs()[A].ip()];
    let config = crate::config::Config::default();
    pair.ends[A] = endpoint_at(id(A), addr, config, 9);
    eof(&mut pair, B, 3);
    assert_eq!(pair.kinds(B), [Kind::Unknown]);
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn a_question_without_answer_becomes_a_fault() {
    let mut pair = Pair::live();
    pair.udp = [Net::Silent; 2];
    eof(&mut pair, B, 0);
    pair.wait(ms(1000));
    assert!(pair.connects(B).is_empty());
    pair.wait(ms(600));
    assert_eq!(pair.connects(B).len(), 1);
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn an_end_that_is_about_to_come_is_announced_and_changes_nothing() {
    let mut pair = Pair::live();
    pair.ends[A].announce(FLOW, 42, FinHow::Close);
    pair.run();
    assert_eq!(pair.done[B], [final_at(42)]);
    assert_eq!(pair.states(), [State::Live; 2]);
    // The process has ended.
    pair.udp[A] = Net::Refuses;
    eof(&mut pair, B, 42);
    assert_eq!(pair.state(B), Some(State::Live));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn an_end_announced_too_early_is_asked_about() {
    let mut pair = Pair::live();
    pair.ends[A].announce(FLOW, 42, FinHow::Close);
    pair.run();
    pair.udp[A] = Net::Refuses;
    eof(&mut pair, B, 50);
    assert_eq!(pair.state(B), Some(State::Suspended));
    pair.wait(ms(400));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn an_end_behind_bytes_that_the_peer_has_not_counted_is_delivered() {
    for how in [FinHow::HalfClose, FinHow::Close] {
        let mut pair = Pair::live();
        pair.ends[A].finish(pair.now, FLOW, 42, how);
        pair.run();
        eof(&mut pair, B, 50);
        assert_eq!(pair.count(B, |a| *a == REINSTATE), 1, "{how:?}");
        assert_eq!(pair.states(), [State::Legacy; 2], "{how:?}");
        assert_eq!(pair.verdict(B), None, "{how:?}");
    }
    // Not if the connection failed meanwhile.
    let mut pair = Pair::live();
    pair.udp = [Net::Silent; 2];
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::HalfClose);
    eof(&mut pair, B, 50);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.counts[A].sent = 42;
    pair.counts[B].received = 50;
    pair.udp = [Net::Works; 2];
    pair.wait(ms(2000));
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)));
}

/// A pair of which `A` can be reached by nobody, and has ended: it says nothing, either.
fn shut_off() -> Pair {
    let mut pair = Pair::live();
    pair.udp = [Net::Silent; 2];
    pair.tcp[A] = Net::Silent;
    pair
}

/// A pair of which `B` has found out that `A`'s firewall keeps it out. That firewall has forgotten what `A` has asked.
fn found_shut(firewall: Net) -> Pair {
    let mut pair = Pair::live();
    pair.asked.clear();
    pair.guard[A] = Some(firewall);
    pair.wait(ms(3000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert!(pair.kinds(A).contains(&Kind::Status));
    pair.asked.clear();
    pair.forget();
    pair
}

#[test]
fn the_end_of_a_process_that_was_out_of_reach_is_believed_soon() {
    for firewall in [Net::Silent, Net::Refuses] {
        let mut pair = found_shut(firewall);
        eof(&mut pair, B, 3);
        pair.wait(ms(250));
        let ended = [State::Legacy, State::Escalated];
        let state = pair.state(B);
        assert!(
            state.is_some_and(|s| ended.contains(&s)),
            "{firewall:?}: {state:?}"
        );
        assert!(pair.connects(B).is_empty(), "{firewall:?}");
    }
}

#[test]
fn whoever_can_be_reached_by_one_of_its_ports_is_not_out_of_reach() {
    for (udp, tcp) in [(Net::Works, Net::Silent), (Net::Silent, Net::Works)] {
        let mut pair = Pair::live();
        (pair.udp[A], pair.tcp[A]) = (udp, tcp);
        pair.wait(ms(5000));
        pair.udp = [Net::Silent; 2];
        pair.tcp[A] = Net::Silent;
        pair.forget();
        eof(&mut pair, B, 3);
        pair.wait(ms(55_000));
        assert_eq!(pair.state(B), Some(State::Suspended), "{udp:?} {tcp:?}");
    }
}

#[test]
fn a_process_out_of_reach_that_asks_about_the_flow_has_not_ended() {
    let mut pair = found_shut(Net::Silent);
    // A stranger has ended both directions.
    eof(&mut pair, B, 0);
    pair.wait(ms(100));
    eof(&mut pair, A, 0);
    pair.wait(ms(1000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.connects(A).len(), 1);
}

#[test]
fn what_was_found_out_before_the_network_failed_is_asked_again() {
    let mut pair = found_shut(Net::Silent);
    pair.guard[A] = None;
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(100));
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.guard[A] = Some(Net::Silent);
    eof(&mut pair, B, 0);
    pair.wait(ms(3000));
    assert_eq!(pair.state(B), Some(State::Suspended));
}

/// A server has many clients that do not stay.
#[test]
fn short_flows_are_not_asked_about() {
    let mut pair = Pair::live();
    pair.forget();
    for end in 0..2 {
        pair.ends[end].finish(pair.now, FLOW, 0, FinHow::Close);
        pair.ends[end].gone(pair.now, FLOW);
        assert_eq!(pair.ends[end].poll_timeout(), None);
    }
    pair.wait(ms(10_000));
    assert!(!pair.kinds(A).contains(&Kind::Query));
}

#[test]
fn an_end_that_the_peers_kernel_confirms_is_believed_where_its_process_was_never_reached() {
    let mut pair = shut_off();
    pair.kernels_answer = true;
    eof(&mut pair, B, 3);
    // A stranger's end in the place of bytes that are on their way looks the same to the kernel.
    pair.wait(ms(2500));
    assert_eq!(pair.state(B), Some(State::Suspended));
    assert!(!pair.connects(B).is_empty());
    pair.wait(ms(2500));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
    let reason = LegacyReason::NoAnswer;
    assert_eq!(pair.events[B].last(), Some(&Event::Legacy { reason }));
}

#[test]
fn the_next_end_of_that_host_is_believed_sooner() {
    let mut pair = shut_off();
    pair.kernels_answer = true;
    eof(&mut pair, B, 3);
    pair.wait(ms(5000));
    pair.open_many(A, 1);
    pair.open_many(B, 1);
    pair.udp = [Net::Works; 2];
    pair.run();
    assert_eq!(pair.many(B, 1, State::Live), 1);
    pair.udp = [Net::Silent; 2];
    pair.kernels_answer = false;
    let cause = Cause::Eof { received: 3 };
    pair.ends[B].fault(pair.now, FlowToken(1000), cause);
    pair.wait(ms(250));
    assert_eq!(pair.many(B, 1, State::Legacy), 1);
}

#[test]
fn an_end_that_nobody_confirms_is_believed_when_attempts_have_ended() {
    let mut pair = shut_off();
    eof(&mut pair, B, 3);
    pair.wait(ms(55_000));
    assert_eq!(pair.state(B), Some(State::Suspended));
    assert!(pair.connects(B).len() > 10);
    pair.wait(ms(10_000));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

/// It has answered before, so it is only away: the end may be a stranger's.
#[test]
fn an_end_is_not_believed_where_the_process_was_reached_before() {
    for by_resume in [false, true] {
        let mut pair = Pair::live();
        if by_resume {
            pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
            pair.wait(HEAD_START);
        } else {
            eof(&mut pair, B, 0);
            assert_eq!(pair.kinds(B)[0], Kind::Status);
        }
        assert_eq!(pair.states(), [State::Live; 2]);
        pair.forget();
        (pair.udp[A], pair.tcp[A]) = (Net::Silent, Net::Silent);
        eof(&mut pair, B, 0);
        pair.wait(ms(55_000));
        assert_eq!(pair.state(B), Some(State::Suspended), "{by_resume}");
        pair.wait(ms(10_000));
        assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)), "{by_resume}");
    }
}

#[test]
fn a_process_that_was_reached_before_gets_an_attempt_before_its_kernel_is_believed() {
    let mut pair = Pair::live();
    eof(&mut pair, B, 0);
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.forget();
    (pair.udp, pair.tcp[A]) = ([Net::Silent; 2], Net::Silent);
    pair.kernels_answer = true;
    eof(&mut pair, B, 0);
    pair.wait(ms(2500));
    assert_eq!(pair.state(B), Some(State::Suspended));
    assert!(!pair.connects(B).is_empty());
    pair.wait(ms(1500));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn a_closed_flow_can_be_resumed_until_it_is_gone() {
    let mut pair = Pair::live();
    pair.counts = [
        Counts {
            received: 0,
            sent: 9,
        },
        Counts {
            received: 5,
            sent: 0,
        },
    ];
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Close);
    pair.run();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(HEAD_START);
    assert_eq!(pair.states(), [State::Live; 2]);
    let with_final = |a: &Action| {
        matches!(
            a,
            Action::Install {
                peer_final: Some(9),
                peer_sent: 9,
                ..
            }
        )
    };
    assert_eq!(pair.count(B, with_final), 1);
}

#[test]
fn a_closed_and_forgotten_flow_ends_orderly_if_all_has_come() {
    for (received, verdict) in [(9, Verdict::Eof), (8, Verdict::Errno(RESET))] {
        let mut pair = Pair::live();
        pair.udp[B] = Net::Silent;
        pair.counts[B] = Counts { received, sent: 0 };
        pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Close);
        pair.ends[A].gone(pair.now, FLOW);
        pair.run();
        assert_eq!(pair.state(A), None);
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.wait(HEAD_START);
        assert_eq!(pair.verdict(B), Some(verdict));
        let refused = pair.messages(B).into_iter().any(
            |message| matches!(message, Message::Refuse(r) if r.reason == RefuseReason::Closed(9)),
        );
        assert!(refused);
        let events = &pair.events[B];
        let reason = EscalateReason::PeerClosed;
        // No outage is told of: this is how the peer wanted it.
        assert!(matches!(&events[..], [Event::Escalate { reason: r, .. }] if *r == reason));
    }
}

/// What is written to a peer that has closed is answered by a reset. Whoever knows that, and holds all, asks nobody.
#[test]
fn a_reset_behind_an_announced_close_is_the_end() {
    let asks = |how, errno, received| {
        let mut pair = Pair::live();
        pair.counts[A].sent = 9;
        pair.counts[B] = Counts { received, sent: 5 };
        pair.ends[A].finish(pair.now, FLOW, 9, how);
        pair.run();
        pair.heard = Default::default();
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(errno));
        pair.wait(HEAD_START);
        (!pair.connects(B).is_empty(), pair.verdict(B))
    };
    assert_eq!(asks(FinHow::Close, EPIPE, 9), (false, Some(Verdict::Eof)));
    // Bytes are missing, or more came than was announced.
    assert!(asks(FinHow::Close, EPIPE, 8).0);
    assert!(asks(FinHow::Close, EPIPE, 10).0);
    // The peer still reads.
    assert!(asks(FinHow::HalfClose, EPIPE, 9).0);
    // Its kernel has not ended the stream, but it says itself that this was all.
    assert_eq!(asks(FinHow::Close, RESET, 9), (false, Some(Verdict::Eof)));
    assert!(asks(FinHow::Close, RESET, 8).0);
}

/// It has half-closed the flow, and has closed it since, word of which is on its way.
#[test]
fn a_reset_behind_a_half_close_may_be_a_close() {
    let mut pair = Pair::live();
    pair.counts[B].sent = 9;
    pair.counts[A] = Counts {
        received: 9,
        sent: 5,
    };
    pair.ends[B].finish(pair.now, FLOW, 9, FinHow::HalfClose);
    pair.run();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(EPIPE));
    pair.ends[B].finish(pair.now, FLOW, 9, FinHow::Close);
    pair.run();
    assert_eq!(pair.verdict(A), Some(Verdict::Eof));
    let told: Vec<_> = pair.events[A].iter().map(name).collect();
    assert_eq!((pair.connects(A).len(), told), (0, vec!["escalate"]));
}

/// The error comes first, by some microseconds or, where hosts are busy, by a millisecond.
#[test]
fn a_reset_just_before_the_announced_close_is_the_end() {
    let after = |errno, how, wait| {
        let mut pair = Pair::live();
        pair.counts[A].sent = 9;
        pair.counts[B] = Counts {
            received: 9,
            sent: 5,
        };
        pair.udp[A] = Net::Silent;
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(errno));
        pair.wait(wait);
        pair.ends[A].finish(pair.now, FLOW, 9, how);
        pair.udp[A] = Net::Works;
        pair.wait(ms(20));
        let told: Vec<_> = pair.events[B].iter().map(name).collect();
        (pair.verdict(B), pair.connects(B).len(), told)
    };
    let over = |verdict| (Some(verdict), 0, vec!["escalate"]);
    for wait in [0, 1, 4] {
        for errno in [EPIPE, RESET] {
            assert_eq!(after(errno, FinHow::Close, ms(wait)), over(Verdict::Eof));
            let reset = over(Verdict::Errno(errno));
            assert_eq!(after(errno, FinHow::Reset, ms(wait)), reset);
        }
    }
    // One that comes late finds the flow resumed, or being resumed.
    let (_, connects, told) = after(EPIPE, FinHow::Close, ms(6));
    assert!(connects > 0 && told.contains(&"attempt"), "{told:?}");
}

/// A question whose flow ends before the answer comes holds nobody up.
#[test]
fn the_next_flow_of_a_process_is_asked_about_at_once() {
    let mut pair = Pair::live();
    pair.open_many(A, 2);
    pair.open_many(B, 2);
    pair.run();
    assert_eq!(pair.many(B, 2, State::Live), 2);
    let [first, second] = [1000, 1001].map(FlowToken);
    pair.udp[A] = Net::Silent;
    pair.ends[B].fault(pair.now, first, Cause::Errno(EPIPE));
    pair.run();
    pair.udp = [Net::Works, Net::Silent];
    pair.ends[A].finish(pair.now, second, 0, FinHow::Close);
    pair.run();
    pair.udp[B] = Net::Works;
    pair.ends[A].finish(pair.now, first, 0, FinHow::Close);
    pair.run();
    assert_eq!(pair.ends[B].state(first), Some(State::Escalated));
    pair.ends[B].fault(pair.now, second, Cause::Errno(EPIPE));
    pair.run();
    assert_eq!(pair.ends[B].state(second), Some(State::Escalated));
}

/// The side that had connected resumes at once. Until it has sent RESUME, the announcement counts.
#[test]
fn a_close_that_is_announced_while_a_connection_is_made_is_the_end() {
    let mut pair = Pair::live();
    pair.counts[B].sent = 9;
    pair.counts[A].received = 9;
    pair.tcp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.connects(A).len(), 1);
    pair.ends[B].finish(pair.now, FLOW, 9, FinHow::Close);
    pair.run();
    assert_eq!(pair.verdict(A), Some(Verdict::Eof));
    assert_eq!(
        pair.events[A].iter().map(name).collect::<Vec<_>>(),
        ["escalate"]
    );
}

/// Both have closed the flow, and one of them has seen all: so has the other, whose kernel does not know.
#[test]
fn a_flow_that_is_over_at_one_end_is_over_at_the_other() {
    for gone in [false, true] {
        let mut pair = Pair::live();
        for n in [A, B] {
            pair.ends[n].finish(pair.now, FLOW, 9, FinHow::Close);
            pair.counts[n] = Counts {
                received: 9,
                sent: 9,
            };
        }
        pair.run();
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(EPIPE));
        pair.run();
        assert_eq!(pair.verdict(B), Some(Verdict::Eof));
        if gone {
            pair.ends[B].gone(pair.now, FLOW);
        }
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
        pair.wait(ms(20));
        assert_eq!(pair.verdict(A), Some(Verdict::Eof), "gone: {gone}");
    }
}

/// An ending process announces its end, and sends more.
#[test]
fn a_reset_behind_a_close_announced_too_early_is_a_fault() {
    let mut pair = Pair::live();
    pair.counts[A].sent = 12;
    pair.counts[B].received = 9;
    pair.ends[A].announce(FLOW, 9, FinHow::Close);
    pair.run();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(20));
    assert_eq!(pair.states(), [State::Live; 2]);
    let resumed = |e: &Event| matches!(e, Event::Resume { received: 3, .. });
    assert!(pair.events[B].iter().any(resumed), "{:?}", pair.events[B]);
}

/// What an event log would call it.
fn name(event: &Event) -> &'static str {
    match event {
        Event::Suspend { .. } => "suspend",
        Event::Attempt { .. } => "attempt",
        Event::Resume { .. } => "resume",
        Event::Escalate { .. } => "escalate",
        _ => "other",
    }
}

#[test]
fn a_closed_flow_answers_questions_from_its_grave() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Close);
    pair.ends[A].gone(pair.now, FLOW);
    pair.run();
    pair.udp[B] = Net::Works;
    eof(&mut pair, B, 9);
    assert_eq!(pair.state(B), Some(State::Live));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn a_grave_is_not_kept_for_ever() {
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Close);
    pair.ends[A].gone(pair.now, FLOW);
    pair.wait(ms(121_000));
    pair.udp[B] = Net::Works;
    pair.forget();
    eof(&mut pair, B, 9);
    assert_eq!(pair.kinds(B), [Kind::Unknown]);
}

#[test]
fn a_reset_is_not_resumed() {
    // Announced: the error goes up at once.
    let mut pair = Pair::live();
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Reset);
    pair.run();
    assert_eq!(pair.states(), [State::Closed, State::Live]);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)));
    assert!(pair.connects(B).is_empty());

    // Not announced: the peer says so when asked to resume.
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Reset);
    pair.run();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(32));
    pair.wait(HEAD_START);
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(32)));
}

#[test]
fn who_gives_up_tells_the_other() {
    let mut pair = Pair::live_with(crate::config::Config {
        deadline: Some(ms(500)),
        ..Default::default()
    });
    pair.tcp = [Net::Silent; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(600));
    assert_eq!(pair.state(A), Some(State::Escalated));
    // B's transport has not failed yet; when it does, nobody need be asked.
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(110));
    pair.run();
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(110)));
}
