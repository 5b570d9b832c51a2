//! An off-path attacker, who sends anything from any address but reads nothing, can do nothing.

use super::pair::*;
use crate::auth::{Fresh, seal_with_job};
use crate::config::Config;
use crate::endpoint::candidates::CANDIDATES;
use crate::endpoint::{Action, State};
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, EndpointId, FinHow, FlowId, FlowToken, Nonce, Role, Verdict};
use crate::wire::{self, AddrList, Fin, Hello, HelloDone, Kind, Message, Query};

/// A forged HELLO for the connection between A and B.
pub(super) fn forged(n: u8) -> Hello {
    Hello {
        flow: FlowId([n; 16]),
        connector: addrs()[A],
        acceptor: addrs()[B],
        endpoint: EndpointId {
            host: [99; 16],
            pid: 9,
            incarnation: 9,
        },
        random_c: [n; 32],
        features: 0,
        resume_port: 9,
        control_port: 9,
        addrs: AddrList::new([]),
    }
}

/// B gets this HELLO, as if from A's host. Answers go to a port that no socket has.
fn say(pair: &mut Pair, hello: Hello) {
    let from = (addrs()[A].ip(), 9).into();
    let data = seal_with_job(None, &Message::Hello(hello));
    pair.ends[B].handle_datagram(pair.now, from, addrs()[B], &data);
    while let Some(action) = pair.ends[B].poll_action() {
        assert!(matches!(action, Action::Datagram { .. }), "{action:?}");
    }
}

/// The datagrams that A sends now.
fn said(pair: &mut Pair) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(action) = pair.ends[A].poll_action() {
        if let Action::Datagram { data, .. } = action {
            all.push(data);
        }
    }
    all
}

#[test]
fn a_refusal_is_believed_only_if_it_quotes_a_message_sent_to_that_address() {
    let mut pair = Pair::new();
    pair.open(A);
    let hello = said(&mut pair).remove(0);
    let mut guess = hello.clone();
    guess[wire::HEADER_LEN] ^= 1;
    let elsewhere = "10.0.0.2:81".parse().unwrap();
    for _ in 0..3 {
        pair.ends[A].handle_refused(pair.now, addrs()[B], &[]);
        pair.ends[A].handle_refused(pair.now, addrs()[B], &hello[..wire::HEADER_LEN]);
        pair.ends[A].handle_refused(pair.now, addrs()[B], &guess);
        pair.ends[A].handle_refused(pair.now, elsewhere, &hello);
        pair.now = pair.now + ms(10);
    }
    assert_eq!(pair.state(A), Some(State::Negotiating));
    assert_eq!(pair.ends[A].dropped(), 12);
    // Later connections send HELLO as if there had been no refusal.
    pair.now = pair.now + ms(60);
    pair.ends[A].handle_refused(pair.now, addrs()[B], &guess);
    pair.ends[A].open(
        pair.now,
        FlowToken(9),
        Role::Connector,
        elsewhere,
        addrs()[B],
    );
    assert_eq!(pair.ends[A].state(FlowToken(9)), Some(State::Negotiating));
    // A quote up to the flow id is enough.
    let quoted = &hello[..wire::HEADER_LEN + 16];
    pair.ends[A].handle_refused(pair.now, addrs()[B], quoted);
    assert_eq!(pair.state(A), Some(State::Legacy));
}

#[test]
fn a_forged_refusal_does_not_make_a_process_dead() {
    let mut pair = Pair::live();
    pair.tcp[B] = Net::Refuses;
    pair.udp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    let query = Message::Query(Query {
        flow: FlowId([3; 16]),
        nonce: Nonce([3; 16]),
    });
    let query = seal_with_job(None, &query);
    for _ in 0..10 {
        pair.wait(ms(20));
        pair.ends[A].handle_refused(pair.now, control(B), &query);
        pair.ends[A].handle_refused(pair.now, control(B), &[]);
    }
    assert_eq!(pair.verdict(A), None);
    pair.tcp[B] = Net::Works;
    pair.udp[B] = Net::Works;
    pair.wait(ms(3000));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_forged_hello_does_not_take_the_connection() {
    // The forged HELLO comes before A's HELLO, or after it while the answer is on its way.
    for early in [true, false] {
        let mut pair = Pair::new();
        pair.open(B);
        if early {
            say(&mut pair, forged(1));
        }
        pair.open(A);
        if !early {
            let hello = said(&mut pair).remove(0);
            pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &hello);
            say(&mut pair, forged(1));
        }
        pair.run();
        pair.wait(ms(200));
        assert_eq!(pair.states(), [State::Live; 2]);
        let ids = [A, B].map(|n| pair.ends[n].flows[&FLOW].id);
        assert_eq!(ids[A], ids[B]);
        // The forged candidate is forgotten then.
        assert!(
            !pair.ends[B]
                .by_id
                .contains_key(&(FlowId([1; 16]), Role::Acceptor))
        );
        pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
        pair.wait(ms(100));
        assert_eq!(pair.states(), [State::Live; 2]);
        assert_eq!(pair.verdict(A), None);
    }
}

#[test]
fn a_forged_hello_does_not_take_a_connection_that_is_accepted_late() {
    let mut pair = Pair::new();
    say(&mut pair, forged(1));
    pair.open(A);
    pair.run();
    say(&mut pair, forged(2));
    assert_eq!(pair.kinds(A), [Kind::HelloWait]);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_flood_of_forged_hellos_does_not_displace_the_real_one() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.open(A);
    let hello = said(&mut pair).remove(0);
    pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &hello);
    let Some(Action::Datagram { data: ack, .. }) = pair.ends[B].poll_action() else {
        panic!("HELLO_ACK");
    };
    for n in 1..=200 {
        say(&mut pair, forged(n));
        assert!(pair.ends[B].candidates.count(FLOW) <= CANDIDATES);
    }
    pair.ends[A].handle_datagram(pair.now, addrs()[B], control(A), &ack);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    let named = pair.ends[B].by_id.len();
    assert_eq!(named, 1, "no other flow id is left");
}

#[test]
fn an_answer_given_for_one_connection_proves_nothing_for_another() {
    let mut pair = Pair::new();
    pair.open(B);
    // An attacker on a third host sends HELLO for its own connection, and gets an answer.
    let mut own = forged(1);
    own.connector = "10.0.0.66:5000".parse().unwrap();
    let there = (own.connector.ip(), 9).into();
    pair.ends[B].open(
        pair.now,
        FlowToken(66),
        Role::Acceptor,
        addrs()[B],
        own.connector,
    );
    let data = seal_with_job(None, &Message::Hello(own));
    pair.ends[B].handle_datagram(pair.now, there, addrs()[B], &data);
    let key = pair.ends[B].candidates.named(FlowToken(66), own.flow);
    let key = key.expect("a candidate").peer.key.clone();
    while pair.ends[B].poll_action().is_some() {}
    pair.ends[B].gone(pair.now, FlowToken(66));
    // Then the attacker sends the same HELLO for A's connection, and goes on with the key of the other one.
    say(&mut pair, forged(1));
    for message in [
        Message::HelloDone(HelloDone(forged(1))),
        Message::Fin(Fin {
            flow: own.flow,
            final_seq: 0,
            how: FinHow::Reset,
        }),
    ] {
        let data = key.seal(Role::Connector, Fresh::None, &message);
        let from = (addrs()[A].ip(), 9).into();
        pair.ends[B].handle_datagram(pair.now, from, addrs()[B], &data);
    }
    pair.open(A);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_connector_that_never_said_hello_stays_plain() {
    let mut pair = Pair::new();
    pair.open(B);
    say(&mut pair, forged(1));
    pair.wait(ms(13_000));
    assert_eq!(pair.state(B), Some(State::Legacy));
    let because = LegacyReason::NoAnswer;
    assert_eq!(pair.events[B], [Event::Legacy { reason: because }]);
    let sent = pair.count(B, |a| matches!(a, Action::Datagram { .. }));
    assert!(sent <= 7, "{sent} answers to one HELLO");

    // An end of the connection is reported at most half a second late, an error as late as the answer to a HELLO may be: the sender of the
    // HELLO, if it is the peer, may take the flow for protected.
    for (cause, verdict, late) in [
        (Cause::Errno(RESET), Some(Verdict::Errno(RESET)), 3010),
        (Cause::Eof { received: 3 }, None, 510),
    ] {
        let mut pair = Pair::new();
        pair.open(B);
        say(&mut pair, forged(1));
        pair.ends[B].fault(pair.now, FLOW, cause);
        pair.udp[A] = Net::Silent;
        pair.wait(ms(late));
        assert_eq!(pair.verdict(B), verdict);
        let reinstated = pair.count(B, |a| *a == Action::Reinstate { token: FLOW });
        assert_eq!(reinstated, usize::from(verdict.is_none()));
    }
}

#[test]
fn a_candidate_that_does_not_know_the_flow_is_not_waited_for() {
    for net in [Net::Works, Net::Refuses] {
        let mut pair = Pair::new();
        pair.open(B);
        let mut hello = forged(1);
        hello.endpoint = id(A);
        hello.control_port = 701;
        say(&mut pair, hello);
        pair.udp[A] = net;
        pair.ends[B].fault(pair.now, FLOW, Cause::Eof { received: 3 });
        pair.run();
        assert_eq!(pair.state(B), Some(State::Legacy), "{net:?}");
        assert_eq!(
            pair.count(B, |a| *a == Action::Reinstate { token: FLOW }),
            1
        );
    }
}

/// The first message under the flow key shows the acceptor that HELLO_ACK has arrived.
#[test]
fn any_message_under_the_key_proves_the_candidate() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.open(A);
    pair.ends[A].finish(pair.now, FLOW, 0, FinHow::HalfClose);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.kinds(B), [Kind::Hello, Kind::Fin], "FIN is enough");

    // HELLO_DONE is lost, and the connector sends RESUME.
    let lost = || {
        let mut pair = Pair::with([Config::default(), Config::default()]);
        pair.open(B);
        pair.open(A);
        let hello = said(&mut pair).remove(0);
        pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &hello);
        let Some(Action::Datagram { data: ack, .. }) = pair.ends[B].poll_action() else {
            panic!("HELLO_ACK");
        };
        pair.ends[A].handle_datagram(pair.now, addrs()[B], control(A), &ack);
        let done = said(&mut pair);
        assert_eq!(done.len(), 1);
        assert_eq!(pair.states(), [State::Live, State::Negotiating]);
        pair
    };
    let mut pair = lost();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    // HELLO_DONE is lost, and the connector sends DEMOTE.
    let mut pair = lost();
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
    // HELLO_DONE is lost, and the connector sends QUERY about the end of the stream.
    let mut pair = lost();
    pair.ends[B].finish(pair.now, FLOW, 5, FinHow::HalfClose);
    while pair.ends[B].poll_action().is_some() {}
    pair.ends[A].fault(pair.now, FLOW, Cause::Eof { received: 5 });
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    // HELLO_DONE is lost, and the acceptor sends QUERY after some time.
    let mut pair = lost();
    pair.wait(ms(250));
    assert_eq!(pair.states(), [State::Live; 2]);
    // HELLO_DONE is lost, and the connection fails at the acceptor.
    let mut pair = lost();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    pair.wait(ms(10));
    assert_eq!(pair.states(), [State::Live; 2]);
    // HELLO_DONE is lost, and the connection ends where the connector has announced it.
    let mut pair = lost();
    pair.ends[A].finish(pair.now, FLOW, 5, FinHow::HalfClose);
    said(&mut pair);
    pair.ends[B].fault(pair.now, FLOW, Cause::Eof { received: 5 });
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(
        pair.count(B, |a| *a == Action::Reinstate { token: FLOW }),
        1
    );
    // HELLO_DONE is lost, and the connection ends unannounced.
    let mut pair = lost();
    pair.ends[B].fault(pair.now, FLOW, Cause::Eof { received: 5 });
    pair.run();
    pair.wait(ms(10));
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(
        pair.count(B, |a| *a == Action::Reinstate { token: FLOW }),
        0
    );
}

#[test]
fn a_flow_that_ends_while_it_has_candidates_still_answers_them() {
    let mut pair = Pair::new();
    pair.udp[A] = Net::Silent;
    pair.open(A);
    pair.open(B);
    pair.run();
    pair.ends[B].finish(pair.now, FLOW, 5, FinHow::Close);
    pair.run();
    pair.ends[B].gone(pair.now, FLOW);
    assert_eq!(pair.ends[B].by_id.len(), 0);
    pair.udp[A] = Net::Works;
    pair.wait(ms(75));
    assert_eq!(pair.state(A), Some(State::Live));
    pair.ends[A].fault(pair.now, FLOW, Cause::Eof { received: 5 });
    pair.run();
    assert_eq!(
        pair.count(A, |a| *a == Action::Reinstate { token: FLOW }),
        1
    );
}
