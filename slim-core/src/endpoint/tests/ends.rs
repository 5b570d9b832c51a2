//! The end of a flow: FIN, QUERY, unannounced ends, tombstones.

use super::pair::*;
use crate::endpoint::attempts::HEAD_START;
use crate::endpoint::errno::EPIPE;
use crate::endpoint::{Action, State};
use crate::event::{EscalateReason, Event, LegacyReason, Trouble};
use crate::ids::{Cause, FinHow, FlowToken, Verdict};
use crate::wire::{Kind, Message, RefuseReason};

pub(super) const REINSTATE: Action = Action::Reinstate { token: FLOW };

pub(super) fn final_at(seq: u64) -> Action {
    Action::PeerFinal { token: FLOW, seq }
}

pub(super) fn eof(pair: &mut Pair, n: usize, received: u64) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Eof { received });
    pair.run();
}

#[test]
fn closing_announces_the_end() {
    let mut pair = Pair::live();
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::HalfClose);
    pair.run();
    assert_eq!(pair.done[B], [final_at(42)]);
    // A second FIN for the same end gives no second action.
    pair.ends[A].finish(pair.now, FLOW, 42, FinHow::Close);
    pair.run();
    assert_eq!(pair.done[B], [final_at(42)]);
}

#[test]
fn an_unannounced_end_is_asked_about() {
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
    assert_eq!(pair.events[B], [], "no event");
}

#[test]
fn an_end_that_needs_a_second_query_is_reported() {
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
fn fin_may_come_after_the_end_of_the_stream() {
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
fn an_end_that_the_peer_denies_is_a_fault() {
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
            // FIN says 42 bytes, so two bytes are missing before the end.
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
fn an_end_followed_by_an_error_is_decided() {
    // The peer has half-closed the flow, closed it, or closed and forgotten it.
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
        // Then a write of another thread fails.
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

/// The process died while its replay was being written, so its kernel ended the stream before the end of the replay.
#[test]
fn an_end_in_the_middle_of_a_replay_is_never_delivered() {
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
    // If the replay is complete, it is the end of a process that died.
    let mut pair = resumed();
    eof(&mut pair, B, 9);
    pair.wait(ms(400));
    assert_eq!(pair.state(B), Some(State::Legacy));
    assert_eq!(pair.done[B].last(), Some(&REINSTATE));
}

#[test]
fn the_end_of_a_flow_that_the_peer_does_not_know_is_delivered() {
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
fn an_end_without_an_answer_to_query_becomes_a_fault() {
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
fn announcing_an_end_ahead_of_time_changes_no_state() {
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
fn an_end_after_uncounted_bytes_is_delivered_and_the_flow_becomes_plain() {
    for how in [FinHow::HalfClose, FinHow::Close] {
        let mut pair = Pair::live();
        pair.ends[A].finish(pair.now, FLOW, 42, how);
        pair.run();
        eof(&mut pair, B, 50);
        assert_eq!(pair.count(B, |a| *a == REINSTATE), 1, "{how:?}");
        assert_eq!(pair.states(), [State::Legacy; 2], "{how:?}");
        assert_eq!(pair.verdict(B), None, "{how:?}");
    }
    // If the connection has failed as well, the flow is given up.
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
fn a_closed_and_forgotten_flow_ends_in_good_order_if_all_bytes_came() {
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
        // No outage is reported, because the peer has closed the flow.
        assert!(matches!(&events[..], [Event::Escalate { reason: r, .. }] if *r == reason));
    }
}

/// An application closes a flow that has lost its connection. The peer has all bytes, and is done with the flow, before the closing end
/// can ask for a new connection. It must not be told of a reset then, although the peer's application has not closed the flow.
#[test]
fn an_end_that_has_closed_is_told_that_the_peer_has_everything() {
    for released in [false, true] {
        let mut pair = Pair::live();
        let (sent, received) = (9, 5);
        pair.counts[A] = Counts { received, sent };
        pair.counts[B] = Counts {
            received: sent,
            sent: received,
        };
        pair.tcp[B] = Net::Silent;
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.ends[A].finish(pair.now, FLOW, sent, FinHow::Close);
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.run();
        assert_eq!(
            [pair.verdict(A), pair.verdict(B)],
            [None, Some(Verdict::Eof)]
        );
        if released {
            pair.ends[B].gone(pair.now, FLOW);
        }
        pair.tcp[B] = Net::Works;
        pair.wait(ms(4000));
        assert_eq!(pair.verdict(A), Some(Verdict::Eof), "{released}");
        let refused = pair.messages(A).into_iter().any(
            |message| matches!(message, Message::Refuse(r) if r.reason == RefuseReason::Closed(received)),
        );
        assert!(refused, "{released}");
        let reason = EscalateReason::PeerClosed;
        let last = pair.events[A].last();
        assert!(
            matches!(last, Some(Event::Escalate { reason: r, errno: 0, .. }) if *r == reason),
            "{released}: {last:?}"
        );
    }
}

/// Bytes sent to a peer that has closed are answered by a reset. If the close was announced and all bytes have been received, no
/// attempt is made.
#[test]
fn a_reset_after_an_announced_close_is_the_end() {
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
    // Bytes are missing, or more came than were announced.
    assert!(asks(FinHow::Close, EPIPE, 8).0);
    assert!(asks(FinHow::Close, EPIPE, 10).0);
    // The peer still reads.
    assert!(asks(FinHow::HalfClose, EPIPE, 9).0);
    // The peer's kernel has not ended the stream, but the peer confirms the close by STATUS.
    assert_eq!(asks(FinHow::Close, RESET, 9), (false, Some(Verdict::Eof)));
    assert!(asks(FinHow::Close, RESET, 8).0);
}

/// The peer has half-closed the flow, and has closed it since; its second FIN is on its way.
#[test]
fn a_reset_after_a_half_close_may_be_a_close() {
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

/// The error comes before FIN: by some microseconds, or by a millisecond if the hosts are busy.
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
    // If FIN comes later, an attempt has been made.
    let (_, connects, told) = after(EPIPE, FinHow::Close, ms(6));
    assert!(connects > 0 && told.contains(&"attempt"), "{told:?}");
}

/// A flow that ends before its QUERY is answered does not delay the QUERYs about other flows.
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

/// The connector starts an attempt at once. FIN still counts until it has sent RESUME.
#[test]
fn a_close_announced_while_connecting_is_the_end() {
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

/// Both sides have closed the flow, and one has received everything. Then the flow is over at the other side as well, even
/// though its kernel reports an error.
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

/// A process that is about to end announces the end, and then sends more.
#[test]
fn a_reset_after_a_close_announced_too_early_is_a_fault() {
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

/// The front end of one side has given the flow up. The other side takes no end of a connection for the end of the stream.
#[test]
fn a_flow_out_of_step_has_no_orderly_end() {
    let reset = Some(Verdict::Errno(RESET));
    for udp in [Net::Works, Net::Silent] {
        let mut pair = Pair::live();
        pair.udp[B] = udp;
        pair.ends[A].out_of_step(pair.now, FLOW);
        pair.run();
        assert_eq!(pair.verdict(A), reset);
        assert_eq!(pair.state(B), Some(State::Live), "reads what has arrived");
        pair.ends[A].gone(pair.now, FLOW);
        pair.udp[B] = Net::Works;
        eof(&mut pair, B, 5);
        pair.wait(ms(60));
        assert_eq!(pair.verdict(B), reset);
    }
    // Without a transport the error comes at once.
    let mut pair = Pair::live();
    pair.tcp = [Net::Silent; 2];
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
    }
    pair.wait(ms(20));
    assert!(pair.states().iter().all(|state| *state != State::Live));
    pair.ends[A].out_of_step(pair.now, FLOW);
    pair.run();
    assert_eq!([pair.verdict(A), pair.verdict(B)], [reset; 2]);
    // A flow that is plain TCP stays so.
    let mut pair = Pair::live();
    pair.ends[A].demote(pair.now, FLOW);
    pair.ends[A].out_of_step(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.verdict(A), None);
}

/// The name of the event in an event log.
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
fn a_closed_flow_answers_query_from_its_tomb() {
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
fn a_tomb_expires() {
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
    // Announced by FIN: the application gets the error at once.
    let mut pair = Pair::live();
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Reset);
    pair.run();
    assert_eq!(pair.states(), [State::Closed, State::Live]);
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(RESET)));
    assert!(pair.connects(B).is_empty());

    // FIN was lost: the peer refuses the resume.
    let mut pair = Pair::live();
    pair.udp[B] = Net::Silent;
    pair.ends[A].finish(pair.now, FLOW, 9, FinHow::Reset);
    pair.run();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(32));
    pair.wait(HEAD_START);
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(32)));
}

#[test]
fn escalation_is_announced_to_the_peer() {
    let mut pair = Pair::live_with(crate::config::Config {
        deadline: Some(ms(500)),
        ..Default::default()
    });
    pair.tcp = [Net::Silent; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.wait(ms(600));
    assert_eq!(pair.state(A), Some(State::Escalated));
    // B's transport has not failed yet. When it does, B needs no QUERY.
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(110));
    pair.run();
    assert_eq!(pair.verdict(B), Some(Verdict::Errno(110)));
}
