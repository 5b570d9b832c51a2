//! Accusations at the witness, one by one.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::pair::*;
use crate::auth::{JobKey, seal_with_job};
use crate::config::{Config, WhenLost};
use crate::endpoint::{Action, Agreed, Announcement, State};
use crate::event::{EscalateReason, Event, Evidence};
use crate::ids::{Cause, EndpointId, FlowId, FlowToken, Role, Verdict};
use crate::wire::{Fenced, Kind, Lost, Message, Ruling};

fn witness() -> SocketAddr {
    "192.0.2.9:4000".parse().unwrap()
}

fn key() -> JobKey {
    JobKey::new(b"the key of this job").unwrap()
}

fn is_fenced_message(data: &[u8]) -> bool {
    crate::wire::kind_of(data) == Some(Kind::Fenced)
}

fn config() -> Config {
    Config {
        job_key: Some(key()),
        witness: vec![witness()],
        ..Config::default()
    }
}

/// A flow whose ends cannot reach each other any more.
fn parted() -> Pair {
    let mut pair = Pair::live_with(config());
    pair.tcp = [Net::Silent; 2];
    pair.udp = [Net::Silent; 2];
    pair
}

impl Pair {
    /// A message with this key comes to A, from the witness or from B.
    fn said_to_a(&mut self, from: SocketAddr, key: &JobKey, message: &Message) {
        let data = seal_with_job(Some(key), message);
        self.ends[A].handle_datagram(self.now, from, control(A), &data);
        self.run();
    }

    fn lost(&mut self, lost: EndpointId, settled: bool) {
        let to = id(A);
        let ruling = if settled {
            Ruling::Settled
        } else {
            Ruling::Fallen
        };
        let message = Message::Lost(Lost {
            to,
            lost,
            ruling,
            cookie: 0,
        });
        self.said_to_a(witness(), &key(), &message);
    }

    /// The reason and the evidence of A's escalation.
    fn given_up(&self) -> Option<(EscalateReason, Option<Evidence>)> {
        self.events[A].iter().find_map(|event| match event {
            Event::Escalate {
                reason, evidence, ..
            } => Some((*reason, *evidence)),
            _ => None,
        })
    }

    fn fenced(&self, n: usize) -> usize {
        self.count(n, |action| matches!(action, Action::Fence { .. }))
    }

    fn accusations(&self, n: usize) -> usize {
        self.count(n, |action| match action {
            Action::Datagram { to, data, .. } => {
                *to == witness() && crate::wire::kind_of(data) == Some(Kind::Accuse)
            }
            _ => false,
        })
    }
}

#[test]
fn the_error_comes_when_the_verdict_is_settled() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(59_900));
    assert_eq!(pair.accusations(A), 0);
    pair.wait(ms(1_000));
    assert!((4..=5).contains(&pair.accusations(A)), "every 200 ms");
    pair.lost(id(B), false);
    pair.wait(ms(9_000));
    assert_eq!(pair.verdict(A), None, "the lost process may still act");
    pair.lost(id(B), true);
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(110)));
    let reason = (EscalateReason::PeerLost, Some(Evidence::HostSilent));
    assert_eq!(pair.given_up(), Some(reason));
    assert_eq!((pair.fenced(A), pair.ends[A].is_fenced()), (0, false));
}

#[test]
fn the_word_of_the_lost_process_settles_the_verdict() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(60_100));
    let fenced = Message::Fenced(Fenced { endpoint: id(B) });
    pair.said_to_a(control(B), &key(), &fenced);
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(110)));
    // It knows, so it is not told again. What is left is the last probe.
    pair.wait(ms(2_000));
    assert_eq!(pair.ends[A].poll_timeout(), None);
}

#[test]
fn a_lost_process_that_does_not_answer_is_told_for_ten_minutes() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(60_100));
    pair.lost(id(B), true);
    pair.wait(ms(500_000));
    assert!(pair.ends[A].poll_timeout().is_some());
    pair.wait(ms(200_000));
    assert_eq!(pair.ends[A].poll_timeout(), None);
}

#[test]
fn a_lost_process_is_fenced_and_says_so() {
    let mut pair = parted();
    pair.lost(id(A), true);
    assert_eq!(pair.given_up(), Some((EscalateReason::Fenced, None)));
    assert_eq!(pair.state(A), Some(State::Escalated));
    // The first time with the action, last of all.
    let said = |action: &Action| match action {
        Action::Datagram { to, data, .. } => *to == witness() && is_fenced_message(data),
        Action::Fence {
            tell: Some((to, data)),
            ..
        } => *to == witness() && is_fenced_message(data),
        _ => false,
    };
    assert_eq!((pair.count(A, said), pair.fenced(A)), (1, 1));
    // LOST comes again: FENCED was lost.
    pair.lost(id(A), true);
    assert_eq!((pair.count(A, said), pair.fenced(A)), (2, 1));
}

/// The application must not go on with the error as if the others were lost.
#[test]
fn a_process_that_ends_itself_gives_no_flow_up() {
    let mut pair = Pair::live_with(Config {
        when_lost: Some(WhenLost::Exit),
        ..config()
    });
    pair.lost(id(A), true);
    assert_eq!((pair.verdict(A), pair.fenced(A)), (None, 1));
}

#[test]
fn a_process_without_peer_and_witness_is_fenced() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(64_900));
    assert_eq!(pair.fenced(A), 0);
    pair.wait(ms(400));
    assert_eq!(pair.fenced(A), 1);
    assert_eq!(
        pair.given_up().map(|(reason, _)| reason),
        Some(EscalateReason::NoWitness)
    );
}

/// A stall becomes an error shortly before the attempts are used up: a process that reaches nobody has no more time for that.
#[test]
fn a_stall_that_becomes_an_error_gets_no_new_attempts() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.wait(ms(55_000));
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(15_100));
    assert!(pair.accusations(A) > 0);
}

/// One answer early in the outage does not count for the rest of it.
#[test]
fn silence_counts_in_the_last_window() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
    pair.run();
    let connect = pair.done[A].iter().rev().find_map(|action| match action {
        Action::Connect { conn, .. } => Some(*conn),
        _ => None,
    });
    pair.ends[A].handle_connected(pair.now, connect.expect("an attempt"));
    pair.wait(ms(61_000));
    assert!(pair.accusations(A) > 0);
}

/// An idle flow from A to a third process, which has been in reach before.
fn idle_flow_of_a(pair: &mut Pair) -> EndpointId {
    let third = id(2);
    let peer = Announcement {
        id: third,
        ..pair.ends[B].announcement()
    };
    let agreed = Agreed {
        flow: FlowId([9; 16]),
        secrets: [[1; 32], [2; 32]],
        peer,
    };
    let ends = (addrs()[A], addrs()[B]);
    let token = FlowToken(99);
    pair.ends[A].open_agreed(pair.now, token, Role::Connector, ends, &agreed);
    pair.ends[A].processes.reached(third);
    third
}

/// The processes that A has accused.
fn accused(pair: &Pair) -> BTreeSet<EndpointId> {
    let all = pair.done[A].iter().filter_map(|action| match action {
        Action::Datagram { data, .. } => match crate::wire::parse(data).ok()?.message {
            Message::Accuse(accuse) => Some(accuse.accused),
            _ => None,
        },
        _ => None,
    });
    all.collect()
}

/// So the witness learns at once that this process has lost all others.
#[test]
fn all_processes_that_do_not_answer_are_accused_together() {
    for cause in [Cause::Errno(110), Cause::Stall] {
        let mut pair = parted();
        let third = idle_flow_of_a(&mut pair);
        pair.ends[A].fault(pair.now, FLOW, cause);
        pair.wait(ms(59_900));
        assert_eq!(accused(&pair), BTreeSet::new());
        pair.wait(ms(200));
        assert_eq!(accused(&pair), BTreeSet::from([id(B), third]));
    }
}

#[test]
fn a_process_that_answers_is_not_accused_with_another_one() {
    let mut pair = parted();
    idle_flow_of_a(&mut pair);
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    // The listener of the third process accepts connections.
    while pair.accusations(A) == 0 {
        pair.wait(ms(100));
        let third = |action: &Action| match action {
            Action::Connect { conn, token, .. } if *token == FlowToken(99) => Some(*conn),
            _ => None,
        };
        for conn in pair.done[A].iter().filter_map(third).collect::<Vec<_>>() {
            pair.ends[A].handle_connected(pair.now, conn);
        }
    }
    pair.wait(ms(1_000));
    assert_eq!(accused(&pair), BTreeSet::from([id(B)]));
}

#[test]
fn a_flow_to_ourselves_is_no_reason() {
    let mut pair = parted();
    let own = pair.ends[A].announcement();
    let agreed = Agreed {
        flow: FlowId([9; 16]),
        secrets: [[1; 32], [2; 32]],
        peer: own,
    };
    let token = FlowToken(99);
    let ends = (addrs()[A], control(A));
    pair.ends[A].open_agreed(pair.now, token, Role::Connector, ends, &agreed);
    pair.ends[A].fault(pair.now, token, Cause::Errno(110));
    pair.wait(ms(70_000));
    assert_eq!((pair.accusations(A), pair.fenced(A)), (0, 0));
}

#[test]
fn an_accusation_is_dropped_if_the_flow_is_resumed() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(62_000));
    pair.tcp = [Net::Works; 2];
    pair.udp = [Net::Works; 2];
    pair.wait(ms(30_000));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!((pair.fenced(A), pair.given_up()), (0, None));
}

#[test]
fn a_flow_to_a_lost_process_is_not_resumed() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(61_000));
    pair.lost(id(B), false);
    pair.tcp = [Net::Works; 2];
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(2_000));
    assert_ne!(pair.state(A), Some(State::Live));
    // A tells B itself.
    pair.udp = [Net::Works; 2];
    pair.wait(ms(500));
    assert_eq!((pair.fenced(B), pair.state(A)), (1, Some(State::Escalated)));
}

#[test]
fn silence_is_a_reason_only_if_nothing_at_the_host_answers() {
    for answers in [false, true] {
        let mut pair = parted();
        pair.ends[A].fault(pair.now, FLOW, Cause::Stall);
        for _ in 0..61 {
            pair.wait(ms(1_000));
            let connect = pair.done[A].iter().rev().find_map(|action| match action {
                Action::Connect { conn, .. } => Some(*conn),
                _ => None,
            });
            if answers && let Some(conn) = connect {
                // The kernel of a process that stands still.
                pair.ends[A].handle_connected(pair.now, conn);
            }
        }
        assert_eq!(pair.accusations(A) > 0, !answers, "answers: {answers}");
    }
}

#[test]
fn forged_verdicts_do_nothing() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(60_100));
    let (a, b, other) = (
        id(A),
        id(B),
        JobKey::new(b"the key of another job").unwrap(),
    );
    for lost in [a, b] {
        let message = |to| {
            Message::Lost(Lost {
                to,
                lost,
                ruling: Ruling::Settled,
                cookie: 0,
            })
        };
        pair.said_to_a(witness(), &other, &message(a));
        // For another process.
        pair.said_to_a(witness(), &key(), &message(b));
    }
    pair.said_to_a(control(B), &other, &Message::Fenced(Fenced { endpoint: b }));
    // Nobody is lost yet.
    let heard = Message::Lost(Lost {
        to: a,
        lost: a,
        ruling: Ruling::Heard,
        cookie: 7,
    });
    pair.said_to_a(witness(), &key(), &heard);
    assert_eq!((pair.verdict(A), pair.fenced(A)), (None, 0));
    // A process that has no witness believes none.
    let mut plain = Pair::live_with(Config {
        job_key: Some(key()),
        ..Config::default()
    });
    plain.lost(a, true);
    assert_eq!((plain.state(A), plain.fenced(A)), (Some(State::Live), 0));
}

#[test]
fn a_peer_without_a_witness_is_not_accused() {
    let mut pair = Pair::with([
        config(),
        Config {
            job_key: Some(key()),
            ..Config::default()
        },
    ]);
    pair.open(A);
    pair.open(B);
    pair.run();
    pair.tcp = [Net::Silent; 2];
    pair.udp = [Net::Silent; 2];
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(60_100));
    assert_eq!(
        pair.given_up().map(|(reason, _)| reason),
        Some(EscalateReason::Attempts)
    );
    assert_eq!(pair.accusations(A), 0);
}

#[test]
fn a_lost_process_gets_no_session_any_more() {
    // LOST comes while the flow negotiates.
    let mut pair = Pair::with([config(), config()]);
    pair.open(A);
    pair.lost(id(A), true);
    pair.open(B);
    pair.wait(ms(1_000));
    assert_eq!(pair.state(A), Some(State::Escalated));
    // A flow that is opened later.
    let token = FlowToken(8);
    let (own, peer) = (addrs()[A], addrs()[B]);
    pair.ends[A].open(pair.now, token, Role::Connector, own, peer);
    pair.run();
    assert_eq!(pair.ends[A].state(token), Some(State::Legacy));
    let refused = |action: &Action| matches!(action, Action::Legacy { token: t, required_refused: true } if *t == token);
    assert_eq!(pair.count(A, refused), 1);
}

#[test]
fn nobody_opens_a_session_with_a_lost_process() {
    let mut pair = parted();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(60_100));
    pair.lost(id(B), true);
    let peer = pair.ends[B].announcement();
    let agreed = Agreed {
        flow: FlowId([9; 16]),
        secrets: [[1; 32], [2; 32]],
        peer,
    };
    let token = FlowToken(99);
    pair.ends[A].open_agreed(
        pair.now,
        token,
        Role::Connector,
        (addrs()[A], addrs()[B]),
        &agreed,
    );
    pair.run();
    assert_eq!(pair.ends[A].state(token), Some(State::Escalated));
}

/// The runtime of such a job reports dead processes within milliseconds, too.
#[test]
fn a_dead_process_is_given_up_soon_in_a_job_with_recovery() {
    let mut pair = Pair::live_with(config());
    pair.tcp[B] = Net::Refuses;
    pair.udp[B] = Net::Refuses;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(104));
    pair.wait(ms(2));
    assert_eq!(pair.verdict(A), None, "one refusal must be confirmed");
    pair.wait(ms(10));
    assert_eq!(pair.verdict(A), Some(Verdict::Errno(104)));
    let evidence = Some(Evidence::ProcessGone);
    assert_eq!(pair.given_up(), Some((EscalateReason::PeerGone, evidence)));
}

/// The acceptor asks while it leaves the connector a head start.
#[test]
fn both_ends_hear_of_a_death_equally_soon() {
    for (dead, left) in [(B, A), (A, B)] {
        let mut pair = Pair::live_with(config());
        (pair.tcp[dead], pair.udp[dead]) = (Net::Refuses, Net::Refuses);
        pair.ends[left].fault(pair.now, FLOW, Cause::Errno(104));
        pair.wait(ms(4));
        assert_eq!(pair.verdict(left), None, "one refusal must be confirmed");
        pair.wait(ms(3));
        assert_eq!(pair.verdict(left), Some(Verdict::Errno(104)));
    }
}

/// A firewall refuses datagrams for a while, and has reset a connection at its acceptor only. The peer lives, and takes new connections.
#[test]
fn an_acceptor_whose_datagrams_are_refused_tries_a_connection_before_it_gives_up() {
    let mut pair = Pair::live_with(config());
    pair.udp = [Net::Refuses; 2];
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(104));
    pair.wait(ms(2_000));
    assert_eq!(pair.verdict(B), None);
    assert_eq!(pair.states(), [State::Live; 2]);
}

/// What the acceptor has asked during the head start does not outlive the connector's resume.
#[test]
fn a_question_of_the_head_start_ends_with_the_resume() {
    for udp in [Net::Works, Net::Silent, Net::Refuses] {
        let mut pair = Pair::live_with(config());
        pair.udp[A] = udp;
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(104));
        pair.run();
        pair.wait(ms(1));
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(104));
        pair.wait(ms(1));
        assert_eq!(pair.states(), [State::Live; 2], "{udp:?}");
        // It breaks again when the refusal is old enough for a second one to be believed.
        pair.wait(ms(4));
        pair.ends[B].fault(pair.now, FLOW, Cause::Errno(104));
        pair.run();
        assert_eq!(pair.verdict(B), None, "{udp:?}");
        pair.wait(ms(1));
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(104));
        pair.wait(ms(1_000));
        assert_eq!(
            (pair.verdict(B), pair.states()),
            (None, [State::Live; 2]),
            "{udp:?}"
        );
        assert_eq!(pair.ends[B].inquiries.open.len(), 0);
    }
}

/// One question is for all of them.
#[test]
fn many_flows_that_break_at_once_ask_little() {
    for role in [A, B] {
        let mut pair = Pair::with([config(), config()]);
        pair.open_many(A, 10_000);
        pair.open_many(B, 10_000);
        pair.run();
        assert_eq!(pair.many(B, 10_000, State::Live), 10_000);
        pair.forget();
        (pair.tcp[1 - role], pair.udp[1 - role]) = (Net::Refuses, Net::Refuses);
        for flow in 0..10_000 {
            pair.ends[role].fault(pair.now, FlowToken(1000 + flow), Cause::Errno(104));
        }
        pair.wait(ms(20));
        assert_eq!(pair.many(role, 10_000, State::Escalated), 10_000);
        let asked = pair.count(role, |a| matches!(a, Action::Datagram { .. }));
        assert!(asked < 10, "{asked}");
    }
}

/// A firewall refuses everything between two living processes. Their kernels have not ended the connection.
#[test]
fn refusals_alone_do_not_make_a_process_dead_if_a_witness_can_decide() {
    for lasts in [20, 3_000, 62_000] {
        let mut pair = parted();
        pair.tcp = [Net::Refuses; 2];
        pair.udp = [Net::Refuses; 2];
        for n in [A, B] {
            pair.ends[n].fault(pair.now, FLOW, Cause::Errno(103));
        }
        pair.run();
        pair.wait(ms(lasts));
        let accused = lasts > 60_000;
        for n in [A, B] {
            assert_eq!((pair.verdict(n), pair.accusations(n) > 0), (None, accused));
        }
        pair.tcp = [Net::Works; 2];
        pair.udp = [Net::Works; 2];
        pair.wait(ms(2_000));
        assert_eq!(pair.states(), [State::Live; 2], "after {lasts} ms");
    }
}

/// The kernel of a process that dies ends its connections and then refuses everything.
#[test]
fn a_process_whose_kernel_has_ended_the_connection_is_dead_soon() {
    let received = 0;
    for cause in [Cause::Errno(104), Cause::Errno(32), Cause::Eof { received }] {
        let mut pair = parted();
        pair.tcp = [Net::Refuses; 2];
        pair.udp = [Net::Refuses; 2];
        pair.ends[A].fault(pair.now, FLOW, cause);
        pair.run();
        pair.wait(ms(20));
        // An end of stream behind which nothing is missing is believed: the flow is plain TCP.
        let believed = pair.state(A) == Some(State::Legacy);
        assert!(pair.verdict(A).is_some() || believed, "{cause}");
        assert_eq!(pair.accusations(A), 0);
    }
}
