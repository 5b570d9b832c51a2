//! An attacker without the key can do nothing, and costs bounded memory.

use super::pair::*;
use crate::auth::{FlowKey, Fresh, JobKey, KeyInputs, seal_with_job};
use crate::config::Config;
use crate::endpoint::{Action, State};
use crate::ids::{Cause, ConnId, FinHow, FlowId, FlowToken, Nonce, Role};
use crate::wire::{
    self, AddrList, Challenge, Confirm, Demote, Fin, Hello, Kind, Message, Query, Refuse,
    RefuseReason, Resume, ResumeOk, Status, Unknown,
};

/// The flow id, which an attacker who reads the wire knows.
fn flow_id(pair: &Pair) -> FlowId {
    pair.ends[A].flows[&FLOW].id.unwrap()
}

/// A key that is not the flow's.
fn wrong_key(flow: FlowId) -> FlowKey {
    let inputs = KeyInputs {
        flow,
        random_c: [1; 32],
        random_s: [2; 32],
        connector: id(A),
        acceptor: id(B),
    };
    FlowKey::derive(None, &inputs)
}

fn challenge(pair: &mut Pair, conn: ConnId) -> Nonce {
    pair.ends[B].handle_incoming(pair.now, conn, addrs()[A]);
    let Some(Action::Send { data, .. }) = pair.ends[B].poll_action() else {
        panic!("CHALLENGE");
    };
    match wire::parse(&data).unwrap().message {
        Message::Challenge(challenge) => challenge.nonce_r,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_wrong_proof_does_nothing() {
    let mut pair = Pair::live();
    let flow = flow_id(&pair);
    for (n, named) in [(1, flow), (2, FlowId([5; 16]))] {
        let conn = ConnId::incoming(1000 + n);
        let nonce_r = challenge(&mut pair, conn);
        let resume = Message::Resume(Resume {
            flow: named,
            epoch: 9,
            nonce_i: Nonce([3; 16]),
        });
        let data = wrong_key(named).seal(Role::Connector, Fresh::Responder(nonce_r), &resume);
        pair.ends[B].handle_message(pair.now, conn, &data);
        pair.run();
        assert_eq!(pair.states(), [State::Live; 2]);
        let said: Vec<_> = pair.done[B].drain(..).collect();
        let [Action::Send { data, .. }, Action::Close { .. }] = &said[..] else {
            panic!("{said:?}");
        };
        assert_eq!(wire::parse(data).unwrap().message.kind(), Kind::Refuse);
    }
}

#[test]
fn a_replayed_resume_does_nothing() {
    let mut pair = Pair::live();
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    let kind = |data: &Vec<u8>| wire::parse(data).unwrap().message.kind();
    let resume = pair.heard[B]
        .iter()
        .find(|data| kind(data) == Kind::Resume)
        .cloned()
        .unwrap();
    pair.forget();
    let conn = ConnId::incoming(1000);
    challenge(&mut pair, conn);
    pair.ends[B].handle_message(pair.now, conn, &resume);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    assert!(pair.count(B, |a| matches!(a, Action::Suspend { .. })) == 0);
    assert!(pair.events[B].is_empty());
}

#[test]
fn forged_datagrams_do_nothing() {
    let mut pair = Pair::live();
    let flow = flow_id(&pair);
    pair.udp[A] = Net::Silent;
    pair.ends[B].fault(pair.now, FLOW, Cause::Eof { received: 1 });
    pair.run();
    let forged = [
        Message::Fin(Fin {
            flow,
            final_seq: 1,
            how: FinHow::Close,
        }),
        Message::Fin(Fin {
            flow,
            final_seq: 1,
            how: FinHow::Reset,
        }),
        Message::Demote(Demote { flow }),
        Message::Query(Query {
            flow,
            nonce: Nonce([0; 16]),
        }),
        Message::Status(Status {
            flow,
            nonce: Nonce([0; 16]),
            state: wire::FlowStatus::Closed(1),
        }),
        Message::Unknown(Unknown {
            flow,
            nonce: Nonce([0; 16]),
            endpoint: id(A),
        }),
    ];
    let before = pair.done[B].len();
    let key = wrong_key(flow);
    for message in &forged {
        let datagrams = [
            seal_with_job(None, message),
            key.seal(Role::Connector, Fresh::None, message),
        ];
        for data in datagrams {
            pair.ends[B].handle_datagram(pair.now, control(A), control(B), &data);
            pair.run();
        }
    }
    assert_eq!(pair.done[B].len(), before);
    assert_eq!(pair.states(), [State::Live, State::Suspended]);
    assert_eq!(pair.ends[B].dropped(), 2 * forged.len() as u64);
}

#[test]
fn forged_answers_do_not_end_a_flow() {
    let mut pair = Pair::live();
    let flow = flow_id(&pair);
    pair.answers = false;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    let (conn, nonce_i) = pair
        .twin
        .keys()
        .find(|(n, _)| *n == A)
        .map(|(_, conn)| *conn)
        .zip(
            pair.messages(B)
                .into_iter()
                .find_map(|message| match message {
                    Message::Resume(resume) => Some(resume.nonce_i),
                    _ => None,
                }),
        )
        .unwrap();
    let both = Fresh::Both {
        nonce_r: Nonce([0; 16]),
        nonce_i,
    };
    let key = wrong_key(flow);
    let reasons = [
        RefuseReason::Closed(0),
        RefuseReason::Reset,
        RefuseReason::OldEpoch,
    ];
    let mut lies: Vec<Message> = reasons
        .map(|reason| {
            Message::Refuse(Refuse {
                flow,
                nonce_i,
                reason,
            })
        })
        .to_vec();
    lies.push(Message::ResumeOk(ResumeOk {
        flow,
        epoch: 1,
        received: 0,
        sent: 0,
        end: None,
    }));
    lies.push(Message::Confirm(Confirm {
        received: 0,
        sent: 0,
        end: None,
    }));
    for lie in lies {
        let data = [
            key.seal(Role::Acceptor, both, &lie),
            seal_with_job(None, &lie),
        ];
        for data in data {
            pair.ends[A].handle_message(pair.now, conn, &data);
        }
    }
    assert_eq!(
        pair.state(A),
        Some(State::Suspended),
        "the attempt failed, the flow did not"
    );
    assert_eq!(pair.verdict(A), None);
}

#[test]
fn a_forged_challenge_does_not_end_a_flow() {
    let config = Config {
        job_key: JobKey::new(b"of this job"),
        ..Config::default()
    };
    let mut pair = Pair::live_with(config);
    pair.tcp[B] = Net::Silent;
    pair.ends[A].fault(pair.now, FLOW, Cause::Errno(RESET));
    pair.run();
    let Some(Action::Connect { conn, .. }) = pair.done[A].last() else {
        panic!("{:?}", pair.done[A]);
    };
    // A process without the job key claims that another process has the peer's port.
    let mut stranger = id(B);
    stranger.incarnation += 1;
    let challenge = Message::Challenge(Challenge {
        endpoint: stranger,
        nonce_r: Nonce([0; 16]),
    });
    let data = seal_with_job(None, &challenge);
    let conn = *conn;
    pair.ends[A].handle_message(pair.now, conn, &data);
    pair.run();
    assert_eq!(pair.verdict(A), None);
    // It may be a process of another job, so the peer is asked by QUERY.
    assert_eq!(pair.kinds(B), [Kind::Query]);
    pair.tcp[B] = Net::Works;
    pair.wait(ms(100));
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn one_flow_id_is_not_given_to_two_connections() {
    let mut pair = Pair::new();
    let mut hello = Hello {
        flow: FlowId([5; 16]),
        connector: addrs()[A],
        acceptor: addrs()[B],
        endpoint: id(A),
        random_c: [7; 32],
        features: 0,
        resume_port: 700,
        control_port: 701,
        addrs: AddrList::new([]),
    };
    for port in [1000, 2000] {
        hello.connector.set_port(port);
        let data = seal_with_job(None, &Message::Hello(hello));
        pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &data);
    }
    // Both HELLOs came before either connection was accepted.
    for (token, port) in [(1, 1000), (2, 2000)] {
        hello.connector.set_port(port);
        pair.ends[B].open(
            pair.now,
            FlowToken(token),
            Role::Acceptor,
            addrs()[B],
            hello.connector,
        );
    }
    assert_eq!(pair.ends[B].candidates.count(FlowToken(1)), 1);
    assert_eq!(pair.ends[B].candidates.count(FlowToken(2)), 0);
}

#[test]
fn hosts_that_are_no_peers_are_neither_asked_nor_answered() {
    let strict = Config::from_vars([("SLIM_PEERS".to_owned(), "10.0.0.1".to_owned())]).0;
    let mut pair = Pair::with([Config::default(), strict]);
    let stranger = |port| std::net::SocketAddr::from(([198, 51, 100, 7], port));
    // No HELLO is sent to such a host, and a connection from it is plain TCP at once.
    for n in [A, B] {
        for (token, role) in [(50, Role::Connector), (51, Role::Acceptor)] {
            let token = FlowToken(token);
            pair.ends[n].open(pair.now, token, role, addrs()[n], stranger(80));
            assert_eq!(pair.ends[n].state(token), Some(State::Legacy));
        }
    }
    pair.run();
    let told = |a: &Action| matches!(a, Action::Datagram { .. } | Action::Send { .. });
    assert_eq!(pair.count(A, told) + pair.count(B, told), 0);
    // No message of such a host is answered.
    let query = Message::Query(Query {
        flow: FlowId([1; 16]),
        nonce: Nonce([1; 16]),
    });
    let query = seal_with_job(None, &query);
    pair.ends[B].handle_datagram(pair.now, stranger(701), control(B), &query);
    pair.ends[B].handle_incoming(pair.now, ConnId::incoming(9), stranger(1000));
    pair.run();
    assert_eq!(pair.count(B, told), 0);
    let closed = Action::Close {
        conn: ConnId::incoming(9),
    };
    assert_eq!(pair.count(B, |a| *a == closed), 1);
    // A peer is answered at all addresses that it announces.
    pair.ends[A].set_addrs(
        pair.now,
        vec![addrs()[A].ip(), stranger(0).ip()],
        Vec::new(),
    );
    pair.open(A);
    pair.open(B);
    pair.run();
    assert_eq!(pair.states(), [State::Live; 2]);
    pair.forget();
    pair.ends[B].handle_incoming(pair.now, ConnId::incoming(10), stranger(1000));
    pair.run();
    assert_eq!(pair.count(B, told), 1);
}

#[test]
fn a_flood_of_garbage_is_dropped() {
    let mut pair = Pair::live();
    let mut noise = fastrand::Rng::with_seed(1);
    for n in 0..100_000 {
        let len = noise.usize(..400);
        let mut data = vec![noise.u8(..); len];
        if n % 3 == 0 && len > 8 {
            data[..4].copy_from_slice(&wire::MAGIC);
            data[4] = wire::VERSION;
        }
        pair.ends[B].handle_datagram(pair.now, control(A), control(B), &data);
    }
    assert_eq!(pair.ends[B].dropped(), 100_000);
    assert_eq!(pair.ends[B].poll_action(), None);
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn a_flood_of_hellos_takes_bounded_memory() {
    let mut pair = Pair::live();
    let hello = |n: u32| {
        let mut id16 = [0; 16];
        id16[..4].copy_from_slice(&n.to_be_bytes());
        Message::Hello(Hello {
            flow: FlowId(id16),
            connector: std::net::SocketAddr::new(addrs()[A].ip(), (n % 60_000) as u16),
            acceptor: addrs()[B],
            endpoint: id(A),
            random_c: [0; 32],
            features: 0,
            resume_port: 1,
            control_port: 1,
            addrs: wire::AddrList::new([]),
        })
    };
    for n in 0..100_000 {
        let data = seal_with_job(None, &hello(n));
        pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &data);
        while pair.ends[B].poll_action().is_some() {}
    }
    assert_eq!(pair.ends[B].pending.len(), 4096);
    pair.now = pair.now + ms(61_000);
    let data = seal_with_job(None, &hello(70_000));
    pair.ends[B].handle_datagram(pair.now, control(A), addrs()[B], &data);
    assert_eq!(pair.ends[B].pending.len(), 1, "old entries expire");
    while pair.ends[B].poll_action().is_some() {}
    assert_eq!(pair.states(), [State::Live; 2]);
}

#[test]
fn silent_connections_are_bounded_in_number_and_time() {
    let mut pair = Pair::live();
    let mut closed = 0;
    for n in 0..5000 {
        pair.ends[B].handle_incoming(pair.now, ConnId::incoming(n), addrs()[A]);
        while let Some(action) = pair.ends[B].poll_action() {
            closed += usize::from(matches!(action, Action::Close { .. }));
        }
    }
    assert_eq!(closed, 5000 - 1024);
    // A new connection displaces the oldest one after a grace period.
    pair.now = pair.now + ms(300);
    pair.ends[B].handle_incoming(pair.now, ConnId::incoming(9999), addrs()[A]);
    let gone = Action::Close {
        conn: ConnId::incoming(0),
    };
    assert_eq!(pair.ends[B].poll_action(), Some(gone));
    pair.run();
    pair.forget();
    pair.wait(ms(5100));
    assert_eq!(pair.count(B, |a| matches!(a, Action::Close { .. })), 1024);
    assert!(pair.ends[B].conns.is_empty() && pair.ends[B].fresh.is_empty());
    assert_eq!(pair.ends[B].poll_timeout(), None);
}

#[test]
fn garbage_on_a_connection_closes_only_that_connection() {
    let mut pair = Pair::live();
    let conn = ConnId::incoming(5);
    challenge(&mut pair, conn);
    pair.ends[B].handle_message(pair.now, conn, b"GET / HTTP/1.0\r\n\r\n");
    pair.run();
    assert_eq!(pair.done[B], [Action::Close { conn }]);
    assert!(pair.ends[B].conns.is_empty() && pair.ends[B].fresh.is_empty());
}

#[test]
fn tombs_are_bounded() {
    let mut pair = Pair::new();
    for n in 0..5000u16 {
        let token = FlowToken(u64::from(n));
        let local = std::net::SocketAddr::new(addrs()[A].ip(), n);
        for end in [A, B] {
            let role = [Role::Connector, Role::Acceptor][end];
            let (local, remote) = if end == A {
                (local, addrs()[B])
            } else {
                (addrs()[B], local)
            };
            pair.ends[end].open(pair.now, token, role, local, remote);
        }
        pair.run();
        assert_eq!(pair.ends[B].state(token), Some(State::Live));
        for end in [A, B] {
            pair.ends[end].finish(pair.now, token, 0, FinHow::Close);
            pair.ends[end].gone(pair.now, token);
        }
        pair.run();
        pair.forget();
    }
    let end = &pair.ends[B];
    assert_eq!(end.tombs.len(), 4096);
    assert!(end.flows.is_empty() && end.by_id.is_empty() && end.by_ends.is_empty());
    assert_eq!(end.poll_timeout(), None);
}
