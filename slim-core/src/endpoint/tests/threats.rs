//! The purpose of a job key: each attack succeeds without one, and fails with one. `docs/SECURITY.md`.

use super::pair::*;
use crate::auth::{FlowKey, Fresh, JobKey, KeyInputs};
use crate::config::Config;
use crate::endpoint::{Action, State};
use crate::ids::{FlowId, FlowToken, Role};
use crate::wire::{self, Demote, Hello, HelloAck, HelloDone, Kind, Message};

fn config(keyed: bool) -> Config {
    Config {
        job_key: JobKey::new(b"the key of this job").filter(|_| keyed),
        ..Config::default()
    }
}

/// The flow key as derived by an attacker who has read HELLO and HELLO_ACK.
fn derived(job: Option<&JobKey>, hello: &Hello, ack: &HelloAck) -> FlowKey {
    let inputs = KeyInputs {
        flow: hello.flow,
        random_c: hello.random_c,
        random_s: ack.random_s,
        connector: hello.endpoint,
        acceptor: ack.endpoint,
    };
    FlowKey::derive(job, &inputs)
}

#[test]
fn another_user_of_the_connectors_host_needs_the_job_key() {
    for keyed in [false, true] {
        let mut pair = Pair::with([config(keyed), config(keyed)]);
        pair.open(B);
        // The attacker has A's address, and sees A's connection. B's answer comes to the attacker.
        let mut other = endpoint(A, config(false));
        // A first flow, so that the attacker's endpoint draws other random numbers than A's.
        let elsewhere = FlowToken(0);
        other.open(pair.now, elsewhere, Role::Connector, addrs()[A], addrs()[A]);
        while other.poll_action().is_some() {}
        other.open(pair.now, FLOW, Role::Connector, addrs()[A], addrs()[B]);
        let Some(Action::Datagram { data, .. }) = other.poll_action() else {
            panic!("HELLO goes out at once");
        };
        pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &data);
        let Some(Action::Datagram { data: answer, .. }) = pair.ends[B].poll_action() else {
            panic!("HELLO_ACK");
        };
        other.handle_datagram(pair.now, addrs()[B], control(A), &answer);
        while let Some(action) = other.poll_action() {
            if let Action::Datagram { data, .. } = action {
                pair.ends[B].handle_datagram(pair.now, control(A), control(B), &data);
            }
        }
        let his = pair.state(B) == Some(State::Live);
        assert_eq!(his, !keyed);
        pair.open(A);
        pair.run();
        assert_eq!(pair.state(A) == Some(State::Live), keyed);
    }
}

#[test]
fn an_observer_of_the_negotiation_needs_the_job_key() {
    for keyed in [false, true] {
        let mut pair = Pair::with([config(keyed), config(keyed)]);
        pair.open(B);
        pair.open(A);
        pair.run();
        assert_eq!(pair.states(), [State::Live; 2]);
        let Some(Message::Hello(hello)) = pair.messages(B).first().copied() else {
            panic!("HELLO");
        };
        let Some(Message::HelloAck(ack)) = pair.messages(A).first().copied() else {
            panic!("HELLO_ACK");
        };
        let guess = JobKey::new(b"the key of that job");
        let jobs = [None, guess.filter(|_| keyed)];
        for job in jobs {
            let key = derived(job.as_ref(), &hello, &ack);
            let demote = Message::Demote(Demote { flow: hello.flow });
            let data = key.seal(Role::Connector, Fresh::None, &demote);
            let anywhere = "10.0.0.66:1".parse().unwrap();
            pair.ends[B].handle_datagram(pair.now, anywhere, control(B), &data);
        }
        pair.run();
        let demoted = pair.state(B) == Some(State::Legacy);
        assert_eq!(demoted, !keyed);
    }
}

#[test]
fn a_hello_done_of_another_job_is_not_believed() {
    let mut pair = Pair::with([config(true), config(true)]);
    pair.open(B);
    pair.open(A);
    let Some(Action::Datagram { data: hello, .. }) = pair.ends[A].poll_action() else {
        panic!("HELLO");
    };
    pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &hello);
    let Some(Action::Datagram { data: ack, .. }) = pair.ends[B].poll_action() else {
        panic!("HELLO_ACK");
    };
    let (hello, ack) = (wire::parse(&hello).unwrap(), wire::parse(&ack).unwrap());
    let (Message::Hello(hello), Message::HelloAck(ack)) = (hello.message, ack.message) else {
        panic!("{hello:?} {ack:?}");
    };
    let done = Message::HelloDone(HelloDone(hello));
    let data = derived(None, &hello, &ack).seal(Role::Connector, Fresh::None, &done);
    assert_eq!(wire::quoted(&data), Some((Kind::HelloDone, hello.flow)));
    assert_ne!(hello.flow, FlowId([0; 16]));
    pair.ends[B].handle_datagram(pair.now, control(A), control(B), &data);
    assert_eq!(pair.state(B), Some(State::Negotiating));
}
