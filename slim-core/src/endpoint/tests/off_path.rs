//! What somebody can do who sends what he likes, from any address, and reads nothing: nothing.

use super::pair::*;
use crate::auth::{Fresh, seal_with_job};
use crate::config::Config;
use crate::endpoint::candidates::CANDIDATES;
use crate::endpoint::{Action, State};
use crate::event::{Event, LegacyReason};
use crate::ids::{Cause, EndpointId, FinHow, FlowId, FlowToken, Nonce, Role, Verdict};
use crate::wire::{self, AddrList, Fin, Hello, HelloDone, Kind, Message, Query};

/// A HELLO for the connection between A and B that A has not said.
fn forged(n: u8) -> Hello {
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

/// B gets it, as if from A's host. Answers go to a port where nobody is.
fn say(pair: &mut Pair, hello: Hello) {
    let from = (addrs()[A].ip(), 9).into();
    let data = seal_with_job(None, &Message::Hello(hello));
    pair.ends[B].handle_datagram(pair.now, from, addrs()[B], &data);
    while let Some(action) = pair.ends[B].poll_action() {
        assert!(matches!(action, Action::Datagram { .. }), "{action:?}");
    }
}

/// The datagrams that A wants to be sent now.
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
fn a_refusal_is_believed_only_if_it_quotes_what_was_sent_there() {
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
    // Later connections ask as if nothing had been said.
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
    // As much as names the flow will do.
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
    // Before the one that is meant, after it, and while the answer is on its way.
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
        // It is forgotten then.
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
fn a_flood_of_forged_hellos_does_not_push_out_the_real_one() {
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
    assert_eq!(named, 1, "nothing is left of the others");
}

#[test]
fn an_answer_given_for_one_connection_proves_nothing_for_another() {
    let mut pair = Pair::new();
    pair.open(B);
    // Somebody on a third host asks for a connection of his own, and gets an answer.
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
    // Then he says the same of A's, and goes on as if he had been answered.
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

    // Its errors and ends come half a second late at most.
    for (cause, verdict) in [
        (Cause::Errno(RESET), Some(Verdict::Errno(RESET))),
        (Cause::Eof { received: 3 }, None),
    ] {
        let mut pair = Pair::new();
        pair.open(B);
        say(&mut pair, forged(1));
        pair.ends[B].fault(pair.now, FLOW, cause);
        pair.udp[A] = Net::Silent;
        pair.wait(ms(510));
        assert_eq!(pair.verdict(B), verdict);
        let reinstated = pair.count(B, |a| *a == Action::Reinstate { token: FLOW });
        assert_eq!(reinstated, usize::from(verdict.is_none()));
    }
}

#[test]
fn whoever_is_asked_and_does_not_know_the_flow_is_not_waited_for() {
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

/// What the acceptor hears first from the connector shows that its answer has arrived.
#[test]
fn every_word_under_the_key_will_do() {
    let mut pair = Pair::new();
    pair.open(B);
    pair.open(A);
    pair.ends[A].finish(pair.now, FLOW, 0, FinHow::HalfClose);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert_eq!(pair.kinds(B), [Kind::Hello, Kind::Fin], "FIN is enough");

    // HELLO_DONE is lost. The connector resumes, ...
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
    // ... or leaves, ...
    let mut pair = lost();
    pair.ends[A].demote(pair.now, FLOW);
    pair.run();
    assert_eq!(pair.states(), [State::Legacy; 2]);
    // ... or wants to know how the stream ended, ...
    let mut pair = lost();
    pair.ends[B].finish(pair.now, FLOW, 5, FinHow::HalfClose);
    while pair.ends[B].poll_action().is_some() {}
    pair.ends[A].fault(pair.now, FLOW, Cause::Eof { received: 5 });
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    // ... or nothing happens, and it is asked.
    let mut pair = lost();
    pair.wait(ms(250));
    assert_eq!(pair.states(), [State::Live; 2]);
    // The acceptor notices that the connection is broken, ...
    let mut pair = lost();
    pair.ends[B].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    pair.wait(ms(10));
    assert_eq!(pair.states(), [State::Live; 2]);
    // ... or at its end, which the connector has announced,
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
    // ... or not.
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
fn what_is_over_before_it_is_known_who_asked_is_answered_all_the_same() {
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
