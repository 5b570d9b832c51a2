//! Resume: the handshake, precedence, attempts, and dead peers.

use super::pair::*;
use crate::config::Config;
use crate::endpoint::attempts::HEAD_START;
use crate::endpoint::{Action, State};
use crate::event::{EscalateReason, Event, Evidence, Failure, Trouble};
use crate::ids::{Cause, FlowToken, Role, Verdict};
use crate::wire::{Kind, Message, RefuseReason};

fn fault(pair: &mut Pair, n: usize) {
    pair.ends[n].fault(pair.now, FLOW, Cause::Errno(RESET));
}

/// The front end of a side answers `Suspend`, if it was asked for it, and `Drain`.
fn read_dry(pair: &mut Pair, n: usize, suspend: bool) {
    if suspend {
        pair.ends[n].handle_suspended(pair.now, FLOW);
        pair.run();
    }
    pair.ends[n].handle_drained(pair.now, FLOW, 0, 0);
    pair.run();
}

fn is_suspend(action: &Action) -> bool {
    matches!(action, Action::Suspend { .. })
}

#[test]
fn a_resume_takes_four_messages_which_carry_the_counts() {
    let mut pair = Pair::live();
    pair.counts = [
        Counts {
            received: 10,
            sent: 100,
        },
        Counts {
            received: 90,
            sent: 12,
        },
    ];
    fault(&mut pair, A);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.kinds(A), [Kind::Challenge, Kind::ResumeOk]);
    assert_eq!(pair.kinds(B), [Kind::Resume, Kind::Confirm]);
    let install = |n: usize| {
        pair.done[n].iter().find_map(|action| match *action {
            Action::Install {
                peer_received,
                peer_sent,
                ..
            } => Some((peer_received, peer_sent)),
            _ => None,
        })
    };
    assert_eq!(install(A), Some((90, 12)));
    assert_eq!(install(B), Some((10, 100)));
    // The side with the fault has suspended the flow by itself; the other side is asked to.
    assert_eq!(pair.count(A, is_suspend), 0);
    assert_eq!(pair.count(B, is_suspend), 1);
    let resume = |replayed, received, attempts| Event::Resume {
        epoch: 1,
        replayed,
        received,
        lost_ms: 0,
        attempts,
    };
    assert_eq!(pair.events[A].last(), Some(&resume(10, 2, 1)));
    assert_eq!(pair.events[B].last(), Some(&resume(2, 10, 0)));
    assert_eq!(
        pair.events[B].first(),
        Some(&Event::Suspend {
            cause: Trouble::PeerAsked
        })
    );
}

#[test]
fn a_resumed_flow_keeps_no_state_of_the_outage() {
    let mut pair = Pair::live();
    for n in [A, B] {
        fault(&mut pair, n);
        pair.wait(HEAD_START);
        assert_eq!(pair.states(), [State::Live; 2]);
        for end in &pair.ends {
            assert!(end.flows[&FLOW].change.is_at_rest());
        }
    }
}

#[test]
fn nothing_is_drained_before_the_peer_has_suspended() {
    let mut pair = Pair::live();
    pair.answers = false;
    fault(&mut pair, A);
    pair.run();
    let drains = |pair: &Pair, n| pair.count(n, |a| matches!(a, Action::Drain { .. }));
    assert_eq!(pair.kinds(B), [Kind::Resume]);
    assert_eq!((drains(&pair, A), drains(&pair, B)), (0, 0));
    pair.ends[B].handle_suspended(pair.now, FLOW);
    pair.run();
    assert_eq!((drains(&pair, A), drains(&pair, B)), (0, 1));
    assert!(!pair.kinds(A).contains(&Kind::ResumeOk));
    pair.ends[B].handle_drained(pair.now, FLOW, 0, 0);
    pair.run();
    assert_eq!((drains(&pair, A), drains(&pair, B)), (1, 1));
    assert!(!pair.kinds(B).contains(&Kind::Confirm));
    pair.ends[A].handle_drained(pair.now, FLOW, 0, 0);
    pair.run();
    assert_eq!(pair.kinds(B), [Kind::Resume, Kind::Confirm]);
    // The flow is live only when the replay is written.
    assert_eq!(pair.states(), [State::Resuming; 2]);
}

#[test]
fn resumes_from_both_sides_at_once_make_one_transport() {
    for second_first in [false, true] {
        let mut pair = Pair::live();
        let (one, two) = if second_first { (B, A) } else { (A, B) };
        fault(&mut pair, one);
        fault(&mut pair, two);
        pair.run();
        pair.wait(ms(2000));
        assert_eq!(pair.states(), [State::Live; 2]);
        for n in [A, B] {
            let installs = pair.count(n, |a| matches!(a, Action::Install { .. }));
            assert_eq!(installs, 1, "side {n}");
            assert!(pair.count(n, is_suspend) == 0);
        }
    }
}

#[test]
fn with_equal_epochs_the_connector_has_precedence() {
    let mut pair = Pair::live();
    pair.answers = false;
    // Both sides suspect a stall, and both get CHALLENGE before either sends RESUME.
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Stall);
    }
    pair.run();
    assert_eq!(
        (pair.kinds(A), pair.kinds(B)),
        (vec![Kind::Challenge], vec![Kind::Challenge])
    );
    assert_eq!(pair.count(A, is_suspend) + pair.count(B, is_suspend), 2);
    // A's RESUME is sent, but has not arrived yet; then B sends RESUME, too.
    pair.ends[A].handle_suspended(pair.now, FLOW);
    let Some(Action::Send { conn, data }) = pair.ends[A].poll_action() else {
        panic!("RESUME");
    };
    pair.ends[B].handle_suspended(pair.now, FLOW);
    pair.run();
    // A refuses B's RESUME. When A's RESUME arrives, B drops its own.
    let refused = pair
        .messages(B)
        .into_iter()
        .find_map(|message| match message {
            Message::Refuse(refuse) => Some(refuse.reason),
            _ => None,
        });
    assert_eq!(refused, Some(RefuseReason::Busy));
    let twin = pair.twin[&(A, conn)];
    pair.ends[B].handle_message(pair.now, twin, &data);
    pair.answers = true;
    pair.ends[B].poll_timeout();
    pair.run();
    pair.ends[B].handle_drained(pair.now, FLOW, 0, 0);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_stalled_transport_stays_in_use_until_the_peer_answers() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.wait(ms(120_000));
    assert_eq!(pair.state(A), Some(State::Live));
    assert_eq!(pair.count(A, is_suspend), 0);
    assert_eq!(pair.verdict(A), None);
    assert_eq!(
        pair.ends[A].poll_timeout(),
        None,
        "no attempts until a stall is suspected again"
    );
    // When the network works again, the flow moves to a new transport.
    pair.tcp[B] = Net::Works;
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.count(A, is_suspend), 1);
    assert!(
        pair.events[A]
            .iter()
            .any(|e| matches!(e, Event::Resume { .. }))
    );
}

#[test]
fn a_suspected_connection_is_replaced_over_another_path_first() {
    let other: std::net::IpAddr = "10.9.0.2".parse().unwrap();
    for (suspected, first) in [(true, other), (false, addrs()[B].ip())] {
        let mut pair = Pair::new();
        let both = vec![addrs()[B].ip(), other];
        pair.ends[B] = endpoint_at(id(B), both, Config::default(), 9);
        pair.open(A);
        pair.open(B);
        pair.run();
        assert_eq!(pair.states(), [State::Live; 2]);
        match suspected {
            true => pair.ends[A].suspect(pair.now, FLOW),
            false => pair.ends[A].fault(pair.now, FLOW, Cause::Stall),
        }
        pair.run();
        assert_eq!(pair.connects(A)[0].ip(), first, "{suspected}");
        let told = pair.events[A].iter().find_map(|event| match event {
            Event::Attempt { path, .. } => path.to.tcp(),
            _ => None,
        });
        assert_eq!(told.map(|to| to.ip()), Some(first), "{suspected}");
        assert_eq!(pair.states(), [State::Live; 2]);
    }
}

#[test]
fn a_suspended_stall_is_as_patient_as_the_kernel() {
    let mut pair = Pair::live();
    pair.answers = false;
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.run();
    pair.tcp = [Net::Silent; 2];
    pair.ends[A].handle_suspended(pair.now, FLOW);
    pair.wait(ms(900_000));
    assert_eq!(pair.verdict(A), None);
    pair.wait(ms(100_000));
    assert_eq!(
        pair.verdict(A),
        Some(Verdict::Errno(RESET)),
        "patience ends after 924 s"
    );
}

#[test]
fn three_windows_and_then_the_error_of_the_kernel() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Silent;
    pair.udp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(59_900));
    assert_eq!(pair.state(A), Some(State::Suspended));
    assert_eq!(pair.verdict(A), None);
    pair.wait(ms(200));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(110)));
    assert_eq!(pair.state(A), Some(State::Escalated));
    let failed: Vec<_> = pair.events[A]
        .iter()
        .filter_map(|event| match event {
            Event::AttemptFailed { n, reason } => Some((*n, *reason)),
            _ => None,
        })
        .collect();
    let timed_out = Failure::TimedOut;
    assert_eq!(failed, [(1, timed_out), (2, timed_out), (3, timed_out)]);
    assert_eq!(
        pair.events[A].last(),
        Some(&Event::Escalate {
            cause: Trouble::Errno(110),
            reason: EscalateReason::Attempts,
            errno: 110,
            evidence: Some(Evidence::HostSilent),
        })
    );
    // A connection that hangs is replaced after 1 s, in later windows after 2 s and 4 s.
    let connects = pair.connects(A).len();
    assert!((20..=24).contains(&connects), "{connects}");
    assert_eq!(pair.ends[A].poll_timeout(), None);
}

#[test]
fn the_deadline_counts_for_all_attempts_together() {
    let mut pair = Pair::live_with(Config {
        deadline: Some(ms(5000)),
        ..Config::default()
    });
    pair.tcp[B] = Net::Silent;
    fault(&mut pair, A);
    pair.wait(ms(4900));
    assert_eq!(pair.verdict(A), None);
    pair.wait(ms(200));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn connections_that_fail_at_once_are_repeated_with_pauses() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Refuses;
    fault(&mut pair, A);
    // The process answers QUERY, so refused connections are no verdict.
    pair.wait(ms(2900));
    let connects = pair.connects(A).len();
    assert!((5..=40).contains(&connects), "{connects}");
    assert_eq!(pair.verdict(A), None);
    pair.tcp[B] = Net::Works;
    pair.wait(ms(1100));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_killed_peer_is_detected_within_half_a_second() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Refuses;
    pair.udp[B] = Net::Refuses;
    fault(&mut pair, A);
    pair.wait(ms(140));
    assert_eq!(
        pair.verdict(A),
        None,
        "one refusal must be confirmed by another"
    );
    pair.wait(ms(260));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
    assert!(matches!(
        pair.events[A].last(),
        Some(Event::Escalate {
            reason: EscalateReason::PeerGone,
            ..
        })
    ));
}

#[test]
fn a_temporary_refusal_does_not_end_the_flow() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Refuses;
    pair.udp[B] = Net::Refuses;
    fault(&mut pair, A);
    pair.wait(ms(100));
    pair.tcp[B] = Net::Works;
    pair.udp[B] = Net::Works;
    pair.wait(ms(1200));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_process_that_sends_a_message_is_not_gone() {
    let mut pair = Pair::live();
    let other = FlowToken(8);
    let [mut a, b] = addrs();
    a.set_port(5001);
    pair.ends[A].open(pair.now, other, Role::Connector, a, b);
    pair.ends[B].open(pair.now, other, Role::Acceptor, b, a);
    pair.run();
    // A firewall refuses everything on its way to B.
    pair.tcp[B] = Net::Refuses;
    pair.udp[B] = Net::Refuses;
    fault(&mut pair, A);
    pair.wait(ms(140));
    // Meanwhile B connects to resume another flow.
    pair.ends[B].fault(pair.now, other, Cause::Errno(RESET));
    pair.wait(ms(60));
    assert_eq!(pair.ends[A].state(other), Some(State::Live));
    assert_eq!(pair.verdict(A), None);
    pair.tcp[B] = Net::Works;
    pair.udp[B] = Net::Works;
    pair.wait(ms(1500));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn another_process_on_the_peers_port_means_that_the_peer_is_gone() {
    for same_host in [true, false] {
        let mut pair = Pair::live();
        let mut stranger = id(B);
        stranger.incarnation += 1;
        if !same_host {
            stranger.host = [99; 16];
        }
        let addr = vec![addrs()[B].ip()];
        pair.ends[B] = endpoint_at(stranger, addr, Config::default(), 9);
        fault(&mut pair, A);
        pair.run();
        // Another host with that address only makes the path fail.
        let gone = pair.verdict(A) == Some(Verdict::Errno(RESET));
        assert_eq!(gone, same_host);
    }
}

#[test]
fn addresses_that_both_hosts_have_are_not_tried() {
    let shared = std::net::IpAddr::from([172, 17, 0, 1]);
    let mut pair = Pair::new();
    for n in [A, B] {
        let addrs = vec![addrs()[n].ip(), shared];
        pair.ends[n] = endpoint_at(id(n), addrs, Config::default(), n as u8);
        pair.open(n);
    }
    pair.run();
    pair.tcp = [Net::Silent; 2];
    fault(&mut pair, A);
    pair.wait(ms(10_000));
    let connects = pair.connects(A);
    assert!(connects.len() > 3, "{connects:?}");
    assert!(connects.iter().all(|to| to.ip() != shared), "{connects:?}");
}

#[test]
fn a_peer_that_forgot_the_flow_ends_it() {
    let mut pair = Pair::live();
    let addr = vec![addrs()[B].ip()];
    pair.ends[B] = endpoint_at(id(B), addr, Config::default(), 9);
    fault(&mut pair, A);
    pair.run();
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn a_flow_is_resumed_again_after_a_failed_replay() {
    let mut pair = Pair::live();
    pair.counts = [
        Counts {
            received: 0,
            sent: 50,
        },
        Counts {
            received: 20,
            sent: 0,
        },
    ];
    pair.answers = false;
    fault(&mut pair, A);
    pair.run();
    pair.ends[B].handle_suspended(pair.now, FLOW);
    pair.run();
    pair.ends[B].handle_drained(pair.now, FLOW, 20, 0);
    pair.run();
    pair.ends[A].handle_drained(pair.now, FLOW, 0, 50);
    pair.run();
    assert_eq!(pair.states(), [State::Resuming; 2]);
    // The new connection breaks before the replay is written.
    pair.answers = true;
    fault(&mut pair, A);
    pair.run();
    pair.wait(ms(10));
    assert_eq!(pair.states(), [State::Live; 2]);
    let last = |n: usize| pair.events[n].last().cloned();
    assert!(
        matches!(last(A), Some(Event::Resume { epoch: 2, .. })),
        "{:?}",
        last(A)
    );
    assert_eq!(pair.count(B, is_suspend), 2, "B's replay was suspended");
}

#[test]
fn attempts_end_even_after_two_failed_replays() {
    let mut pair = Pair::live();
    pair.answers = false;
    fault(&mut pair, A);
    pair.run();
    for (n, suspend) in [(B, true), (A, false)] {
        read_dry(&mut pair, n, suspend);
    }
    assert_eq!(pair.states(), [State::Resuming; 2]);
    // While both replay, the new connection breaks at B, which makes the next one.
    fault(&mut pair, B);
    pair.run();
    for (n, suspend) in [(A, true), (B, false)] {
        read_dry(&mut pair, n, suspend);
    }
    assert_eq!(pair.count(A, |a| matches!(a, Action::Install { .. })), 2);
    // The next connection breaks at A, and the host is gone.
    pair.tcp = [Net::Silent; 2];
    pair.udp = [Net::Silent; 2];
    fault(&mut pair, A);
    pair.wait(ms(62_000));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(RESET)));
}

#[test]
fn suspend_is_asked_for_once() {
    let mut pair = Pair::live();
    pair.answers = false;
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.run();
    assert_eq!(pair.count(A, is_suspend), 1);
    // Before `Suspend` is answered, the peer sends RESUME, and the transport reports an error.
    fault(&mut pair, B);
    pair.wait(HEAD_START);
    fault(&mut pair, A);
    pair.run();
    assert_eq!(pair.count(A, is_suspend), 1);
    assert_eq!(pair.count(A, |a| matches!(a, Action::Drain { .. })), 0);
    pair.ends[A].handle_suspended(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.count(A, |a| matches!(a, Action::Drain { .. })), 1);
}

#[test]
fn the_acceptor_gives_the_connector_a_head_start() {
    let mut pair = Pair::live();
    fault(&mut pair, A);
    fault(&mut pair, B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.wait(2 * HEAD_START);
    assert_eq!((pair.connects(A).len(), pair.connects(B).len()), (1, 0));

    // If the connector has not noticed the fault, or cannot connect, the acceptor connects.
    let mut pair = Pair::live();
    fault(&mut pair, B);
    pair.wait(HEAD_START);
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!((pair.connects(A).len(), pair.connects(B).len()), (0, 1));
}

#[test]
fn a_peer_that_falls_silent_after_resume_is_not_waited_for() {
    let mut pair = Pair::live();
    pair.answers = false;
    fault(&mut pair, A);
    pair.run();
    // A's RESUME has arrived; no later message of A does.
    pair.tcp[B] = Net::Silent;
    pair.ends[B].handle_suspended(pair.now, FLOW);
    pair.run();
    pair.ends[B].handle_drained(pair.now, FLOW, 0, 0);
    pair.wait(ms(1900));
    assert!(pair.connects(B).is_empty());
    pair.wait(ms(300));
    assert!(!pair.connects(B).is_empty());
}

#[test]
fn both_ends_may_live_in_one_process() {
    let mut pair = Pair::new();
    let (a, b) = (addrs()[A], addrs()[B]);
    let (one, two) = (FlowToken(1), FlowToken(2));
    let end = &mut pair.ends[A];
    end.open(pair.now, one, Role::Connector, a, b);
    end.open(pair.now, two, Role::Acceptor, b, a);
    let mut faulted = false;
    for _ in 0..200 {
        let Some(action) = end.poll_action() else {
            if faulted {
                break;
            }
            faulted = true;
            assert_eq!(end.state(one), Some(State::Live));
            assert_eq!(end.state(two), Some(State::Live));
            end.fault(pair.now, one, Cause::Errno(RESET));
            continue;
        };
        let now = pair.now;
        let incoming = crate::ids::ConnId::incoming;
        match action {
            Action::Datagram { to, data, .. } => end.handle_datagram(now, control(A), to, &data),
            Action::Connect { conn, .. } => {
                end.handle_incoming(now, incoming(conn.0), a);
                end.handle_connected(now, conn);
            }
            Action::Send { conn, data } => {
                let twin = crate::ids::ConnId(conn.0 ^ incoming(0).0);
                end.handle_message(now, twin, &data);
            }
            Action::Suspend { token } => end.handle_suspended(now, token),
            Action::Drain { token } => end.handle_drained(now, token, 0, 0),
            Action::Install { token, .. } => end.handle_installed(now, token, 0),
            _ => {}
        }
    }
    assert_eq!(end.state(one), Some(State::Live));
    assert_eq!(end.state(two), Some(State::Live));
    let mut resumed = 0;
    while let Some((_, _, event)) = end.poll_event() {
        resumed += usize::from(matches!(event, Event::Resume { .. }));
    }
    assert_eq!(resumed, 2);
}
