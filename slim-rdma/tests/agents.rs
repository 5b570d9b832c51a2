//! Flows of two agents go from TCP to queue pairs and back: real sessions, real resumes, queue pairs of adapters in memory.

#[path = "../../slim-agent/tests/common/mod.rs"]
mod common;
#[path = "agents/pairs.rs"]
mod pairs;

use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::any_flow::{AnyFlow, End, read_pieces, write_pieces};
use common::{LIMIT, Pattern, Server};
use pairs::{PairNet, PairProvider};
use slim_agent::Agent;
use slim_core::Role;
use slim_core::config::Config;
use slim_core::transport::TransportKind;

/// Two agents with both kinds, queue pairs preferred.
struct Agents {
    net: Arc<PairNet>,
    client: Agent,
    server: Server,
}

impl Agents {
    fn start() -> Agents {
        let net = PairNet::start();
        let agent = |side| {
            let provider = Box::new(PairProvider::new(&net, side));
            Agent::start_with(Config::default(), vec![provider]).unwrap()
        };
        let client = agent(0);
        let server = Server::of(agent(1), (Ipv4Addr::LOCALHOST, 0).into());
        Agents {
            net,
            client,
            server,
        }
    }

    /// A flow that begins on TCP.
    fn pair(&self) -> (Arc<AnyFlow>, Arc<AnyFlow>) {
        let near = TcpStream::connect(self.server.addr()).unwrap();
        let far = self.server.listener.accept().unwrap().0;
        let flow = |agent: &Agent, role, sock: TcpStream| {
            sock.set_nonblocking(true).unwrap();
            let path = (sock.local_addr().unwrap(), sock.peer_addr().unwrap());
            AnyFlow::new(agent, role, End::Tcp(sock), path)
        };
        let near = flow(&self.client, Role::Connector, near);
        let far = flow(&self.server.agent, Role::Acceptor, far);
        near.wait_live();
        far.wait_live();
        (near, far)
    }

    fn pairs(&self, up: bool) {
        self.net.down.store(!up, Ordering::Relaxed);
    }
}

/// Waits until both ends are carried by this kind.
fn wait_for([near, far]: [&AnyFlow; 2], kind: TransportKind) {
    let begun = Instant::now();
    while [near, far].iter().any(|flow| flow.kind() != Some(kind)) {
        assert!(begun.elapsed() < LIMIT, "never carried by {kind}");
        // An end that has nothing on its way notices only when it goes on.
        near.write(b"?").unwrap();
        far.read_exact(&mut [0]);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_flow_goes_from_tcp_to_queue_pairs_and_back() {
    let agents = Agents::start();
    let (near, far) = agents.pair();
    let both = [&*near, &*far];
    wait_for(both, TransportKind::TCP);
    let lose_some = || {
        near.write(b"in flight, and lost").unwrap();
        far.write(b"so is this").unwrap();
        near.shut_down();
        let (mut there, mut back) = ([0; 19], [0; 10]);
        far.read_exact(&mut there);
        near.read_exact(&mut back);
        let got = (&there[..], &back[..]);
        assert_eq!(got, (&b"in flight, and lost"[..], &b"so is this"[..]));
    };
    // The peers offer each other the queue pairs once the flow is live; until then a resume uses TCP only.
    let begun = Instant::now();
    while agents.net.made.load(Ordering::Relaxed) == 0 {
        assert!(begun.elapsed() < LIMIT, "no queue pair is ever made");
        lose_some();
    }
    wait_for(both, TransportKind::VERBS);
    let before = (near.resumed(), far.resumed());
    for round in 0..10 {
        // From one queue pair to the next, too.
        let kind = match round % 3 {
            0 => TransportKind::TCP,
            _ => TransportKind::VERBS,
        };
        agents.pairs(kind == TransportKind::VERBS);
        lose_some();
        wait_for(both, kind);
    }
    let resumed = (near.resumed() - before.0, far.resumed() - before.1);
    assert!(resumed.0 >= 10 && resumed.1 >= 10, "{resumed:?}");
    assert_eq!(agents.net.fabric.tallies().not_ready, 0);
}

#[test]
fn flows_stay_byte_exact_while_queue_pairs_fail_and_tcp_is_cut() {
    const PIECES: usize = 600;
    let agents = Agents::start();
    let pairs: Vec<_> = (0..4).map(|_| agents.pair()).collect();
    let mut seen = [0, 0];
    thread::scope(|scope| {
        let mut jobs = Vec::new();
        for (n, (near, far)) in (0..).zip(&pairs) {
            jobs.push(scope.spawn(move || write_pieces(near, n, PIECES)));
            jobs.push(scope.spawn(move || read_pieces(far, n, PIECES)));
            jobs.push(scope.spawn(move || write_pieces(far, !n, PIECES)));
            jobs.push(scope.spawn(move || read_pieces(near, !n, PIECES)));
        }
        let mut random = Pattern::new(7);
        let mut cuts = 0u32;
        while !jobs.iter().all(|job| job.is_finished()) {
            thread::sleep(Duration::from_millis(random.next() % 10));
            if cuts < 40 {
                agents.pairs(cuts % 4 != 3);
                for (near, far) in &pairs {
                    match near.kind() {
                        Some(TransportKind::VERBS) => seen[0] += 1,
                        Some(_) => seen[1] += 1,
                        None => {}
                    }
                    // Either end fails, and the other one learns of it by the resume.
                    let one = if random.next() & 1 == 0 { near } else { far };
                    one.shut_down();
                }
                cuts += 1;
            }
        }
    });
    let resumed: u32 = pairs.iter().map(|(near, _)| near.resumed()).sum();
    let tallies = agents.net.fabric.tallies();
    println!("cut on queue pairs and on TCP: {seen:?}; {resumed} resumes, {tallies:?}");
    assert!(
        resumed >= 6 && seen.iter().all(|times| *times > 0),
        "{seen:?}"
    );
    assert_eq!(tallies.not_ready, 0);
}
