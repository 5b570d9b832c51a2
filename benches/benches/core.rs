//! Parts of slim-core: replay buffer, messages, authentication codes, and a whole resume in memory.

use std::hint::black_box;
use std::net::SocketAddr;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use slim_core::auth::{FlowKey, Fresh, KeyInputs};
use slim_core::config::Config;
use slim_core::endpoint::{Action, Endpoint, State};
use slim_core::replay::Replay;
use slim_core::transport::Transports;
use slim_core::wire::{self, Message, Resume};
use slim_core::{Cause, ConnId, EndpointId, FlowId, FlowToken, Nonce, Role, Time};

const TOKEN: FlowToken = FlowToken(1);

/// Push, and trim now and then, as a sender does when it asks the kernel.
fn replay(c: &mut Criterion) {
    const TRIM_AT: usize = 256 << 10;
    let mut group = c.benchmark_group("replay");
    for size in [8usize, 64, 1 << 10, 16 << 10, 64 << 10] {
        let bytes = vec![7; size];
        let mut replay = Replay::new();
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(BenchmarkId::new("push and trim", size), |b| {
            b.iter(|| {
                replay.push(black_box(&bytes));
                if replay.len() > TRIM_AT {
                    replay.trim(replay.end());
                }
            });
        });
    }
    group.finish();
}

fn id(n: u8) -> EndpointId {
    EndpointId {
        host: [n; 16],
        pid: n.into(),
        incarnation: n.into(),
    }
}

fn inputs() -> KeyInputs {
    KeyInputs {
        flow: FlowId([1; 16]),
        random_c: [2; 32],
        random_s: [3; 32],
        connector: id(4),
        acceptor: id(5),
    }
}

/// Encoding and parsing a message, and its authentication code.
fn messages(c: &mut Criterion) {
    let message = Message::Resume(Resume {
        flow: FlowId([1; 16]),
        epoch: 3,
        nonce_i: Nonce([8; 16]),
    });
    let key = FlowKey::derive(None, &inputs());
    let fresh = Fresh::Responder(Nonce([7; 16]));
    let bytes = key.seal(Role::Connector, fresh, &message);
    let mut group = c.benchmark_group("messages");
    group.bench_function("encode RESUME", |b| {
        b.iter(|| wire::encode(black_box(&message), |_| [0; wire::MAC_LEN]));
    });
    group.bench_function("parse RESUME", |b| {
        b.iter(|| wire::parse(black_box(&bytes)).is_ok());
    });
    group.bench_function("seal RESUME", |b| {
        b.iter(|| key.seal(Role::Connector, fresh, black_box(&message)));
    });
    group.bench_function("verify RESUME", |b| {
        let parsed = wire::parse(&bytes).expect("sealed above");
        b.iter(|| key.verify(Role::Connector, fresh, black_box(&parsed)));
    });
    group.bench_function("derive a flow key", |b| {
        b.iter(|| FlowKey::derive(None, black_box(&inputs())));
    });
    group.finish();
}

/// Two endpoints, and a network without latency.
struct Pair {
    ends: [Endpoint; 2],
    now: Time,
    accepted: u64,
    /// The connection under way: number of the end that connected, and the connection's name at that end
    /// and at the other.
    connection: Option<(usize, ConnId, ConnId)>,
}

fn addrs() -> [SocketAddr; 2] {
    [([10, 0, 0, 1], 5000).into(), ([10, 0, 0, 2], 80).into()]
}

fn control(n: usize) -> SocketAddr {
    SocketAddr::new(addrs()[n].ip(), 701)
}

impl Pair {
    /// A pair with a flow that is live at both ends.
    fn live() -> Self {
        let end = |n: usize| {
            let ip = vec![addrs()[n].ip()];
            let own = Transports::tcp(ip, 700, 701);
            Endpoint::new(Config::default(), id(n as u8), own, [n as u8; 32])
        };
        let mut pair = Self {
            ends: [end(0), end(1)],
            now: Time(0),
            accepted: 0,
            connection: None,
        };
        for (n, role) in [Role::Connector, Role::Acceptor].into_iter().enumerate() {
            pair.ends[n].open(pair.now, TOKEN, role, addrs()[n], addrs()[1 - n]);
        }
        pair.run_until_idle();
        pair
    }

    fn is_live(&self) -> bool {
        self.ends
            .iter()
            .all(|end| end.state(TOKEN) == Some(State::Live))
    }

    /// The first end's transport dies, and the flow is resumed at both ends.
    fn resume(&mut self) {
        self.ends[0].fault(self.now, TOKEN, Cause::Errno(libc::ECONNRESET));
        self.run_until_idle();
    }

    fn run_until_idle(&mut self) {
        loop {
            let mut idle = true;
            for n in 0..2 {
                while let Some(action) = self.ends[n].poll_action() {
                    idle = false;
                    self.act(n, action);
                }
                while self.ends[n].poll_event().is_some() {}
            }
            if idle {
                return;
            }
        }
    }

    fn act(&mut self, n: usize, action: Action) {
        let (now, other) = (self.now, 1 - n);
        match action {
            Action::Datagram { to, from, data } => {
                let from = from.unwrap_or(control(n));
                self.ends[other].handle_datagram(now, from, to, &data);
            }
            Action::Connect { conn, .. } => {
                self.accepted += 1;
                let twin = ConnId::incoming(self.accepted);
                self.connection = Some((n, conn, twin));
                self.ends[other].handle_incoming(now, twin, addrs()[n]);
                self.ends[n].handle_connected(now, conn);
            }
            Action::Send { data, .. } => {
                if let Some((from, at_from, at_other)) = self.connection {
                    let conn = if n == from { at_other } else { at_from };
                    self.ends[other].handle_message(now, conn, &data);
                }
            }
            Action::Flush { conn } => self.ends[n].handle_flushed(now, conn),
            Action::Suspend { token } => self.ends[n].handle_suspended(now, token),
            Action::Drain { token } => self.ends[n].handle_drained(now, token, 0, 0),
            Action::Install { token, .. } => self.ends[n].handle_installed(now, token, 0),
            _ => {}
        }
    }
}

/// Negotiation, and a resume from the fault until both ends are live: their cost without a network.
fn handshake(c: &mut Criterion) {
    let mut pair = Pair::live();
    assert!(pair.is_live(), "the flow has to be live to be resumed");
    pair.resume();
    assert!(pair.is_live(), "the flow has to be live again");
    let mut group = c.benchmark_group("handshake");
    group.bench_function("negotiate", |b| b.iter(Pair::live));
    group.bench_function("resume", |b| {
        b.iter_batched_ref(Pair::live, Pair::resume, BatchSize::SmallInput);
    });
    group.finish();
}

criterion_group!(benches, replay, messages, handshake);
criterion_main!(benches);
