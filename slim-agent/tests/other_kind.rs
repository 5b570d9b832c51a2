//! Flows that never have a descriptor: all their transports, the first one too, are pipes in memory.

mod common;

use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::any_flow::{AnyFlow, End, exchange, lose_some, read_pieces, resumed, write_pieces};
use common::memory::{PipeNet, Pipes, pipe};
use common::{Kill, Pattern, Server, config};
use slim_agent::Agent;
use slim_core::config::Config;
use slim_core::transport::TransportKind;
use slim_core::{FinHow, Role};

/// Two agents that resume by pipes.
struct Agents {
    net: Arc<PipeNet>,
    client: Agent,
    server: Agent,
    listener: TcpListener,
}

impl Agents {
    fn start(config: &Config) -> Agents {
        let net = Arc::<PipeNet>::default();
        let agent = |side| {
            let provider = Box::new(Pipes::new(&net, side, TransportKind::TCP));
            Agent::start_with(config.clone(), vec![provider]).unwrap()
        };
        let (client, server) = (agent(0), agent(1));
        // No connection to it is ever made. HELLO is sent to its UDP port.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        server.listen(listener.as_fd(), listener.local_addr().unwrap());
        Agents {
            net,
            client,
            server,
            listener,
        }
    }

    fn pair(&self) -> (Arc<AnyFlow>, Arc<AnyFlow>) {
        let there = self.listener.local_addr().unwrap();
        // An arbitrary address, which only names the flow.
        let here = (Ipv4Addr::LOCALHOST, 1).into();
        let (near, far) = pipe(None);
        let near = AnyFlow::new(
            &self.client,
            Role::Connector,
            End::Other(Box::new(near)),
            (here, there),
        );
        let far = AnyFlow::new(
            &self.server,
            Role::Acceptor,
            End::Other(Box::new(far)),
            (there, here),
        );
        near.wait_live();
        far.wait_live();
        (near, far)
    }
}

#[test]
fn a_flow_without_descriptors_is_resumed_byte_exact() {
    let agents = Agents::start(&Config::default());
    let ends = agents.pair();
    lose_some(&ends);
    let (near, far) = ends;
    near.wait_resumed(1);
    far.wait_resumed(1);
    assert_eq!((near.resumed(), far.resumed()), (1, 1));
    assert!(agents.net.made.load(Ordering::Relaxed) >= 1);
    let mut there = [0; 6];
    near.write(b"and on").unwrap();
    far.read_exact(&mut there);
    assert_eq!(&there, b"and on");
    near.stream.end_at(near.stream.sent());
    agents
        .client
        .finish(near.token, near.stream.sent(), FinHow::Close);
    assert_eq!(far.read(&mut there), Ok(0));
}

#[test]
fn pipes_that_break_in_the_handshake_or_in_the_replay_lose_nothing() {
    // As much as a pipe holds in each direction.
    const PIECES: usize = 6;
    let agents = Agents::start(&Config::default());
    let (near, far) = agents.pair();
    // The handshake has a few hundred bytes, and what follows is the replay of both.
    for fuse in [1, 60, 200, 400, 2_000, 30_000, 50_000, 90_000] {
        // Nothing is read yet, so all bytes are in flight when the pipe breaks.
        write_pieces(&near, 1, PIECES);
        write_pieces(&far, 2, PIECES);
        let (resumed, made) = (near.resumed(), agents.net.made.load(Ordering::Relaxed));
        *agents.net.fuses.lock().unwrap() = [fuse, fuse + 1].into();
        near.shut_down();
        thread::scope(|scope| {
            scope.spawn(|| read_pieces(&far, 1, PIECES));
            read_pieces(&near, 2, PIECES);
        });
        near.wait_resumed(resumed + 1);
        let made = agents.net.made.load(Ordering::Relaxed) - made;
        let resumed = near.resumed() - resumed;
        println!("fuse {fuse}: {made} pipes, {resumed} resumes");
        if fuse <= 30_000 {
            // Neither end can have written its replay when the first two broke, so they never were transports.
            assert!(made >= 3 && resumed == 1, "fuse {fuse}");
        }
        assert!(made >= 2, "fuse {fuse}");
    }
}

#[test]
fn flows_of_pipes_stay_byte_exact_while_all_of_them_break() {
    let agents = Agents::start(&Config::default());
    let pairs: Vec<_> = (0..8).map(|_| agents.pair()).collect();
    let mut cuts = 0;
    exchange(&pairs, 400, &mut Pattern::new(5), |random| {
        // Limited, so that the transfer ends.
        if cuts < 40 {
            let fuses = (0..4).map(|_| random.next() as usize % 100_000);
            *agents.net.fuses.lock().unwrap() = fuses.collect();
            pairs.iter().for_each(|(near, _)| near.shut_down());
            cuts += 1;
        }
    });
    let resumed = resumed(&pairs);
    println!("{cuts} times cut, {resumed} resumes");
    assert!(resumed >= 8);
}

#[test]
fn a_connection_that_the_front_end_refuses_is_a_failed_attempt() {
    let agents = Agents::start(&Config::default());
    let (near, far) = agents.pair();
    far.state.lock().unwrap().refused = 2;
    near.write(b"in flight").unwrap();
    near.shut_down();
    let mut buf = [0; 9];
    far.read_exact(&mut buf);
    assert_eq!(&buf, b"in flight");
    far.write(b"taken").unwrap();
    near.read_exact(&mut buf[..5]);
    assert_eq!(far.state.lock().unwrap().refused, 0);
    assert_eq!(far.resumed(), 1);
    assert!(agents.net.made.load(Ordering::Relaxed) >= 3);
}

#[test]
fn a_front_end_that_does_not_take_this_kind_gets_the_error() {
    let vars = [("SLIM_ATTEMPTS", "1"), ("SLIM_ATTEMPT_TIMEOUTS", "0.3")];
    let agents = Agents::start(&config(&vars));
    let server = Server {
        agent: agents.server,
        listener: agents.listener,
    };
    // These flows are of sockets, and cannot use pipes.
    let (near, far) = server.pair(&agents.client);
    near.wait_live();
    far.wait_live();
    let begun = Instant::now();
    near.kill(Kill::Fin);
    far.read(&mut [0]).unwrap_err();
    near.read(&mut [0]).unwrap_err();
    assert_eq!((near.state().resumed, far.state().resumed), (0, 0));
    assert!(begun.elapsed() < Duration::from_secs(10));
}
