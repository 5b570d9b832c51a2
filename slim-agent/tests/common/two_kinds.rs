//! Two agents that have TCP and another kind of transport, which they prefer.

use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use slim_agent::Agent;
use slim_agent::transport::Provider;
use slim_core::Role;
use slim_core::config::Config;
use slim_core::transport::TransportKind;

use super::any_flow::{AnyFlow, End, FlowEnds, exchange};
use super::{LIMIT, Pattern, Server};

pub struct TwoKinds {
    client: Agent,
    server: Server,
}

impl TwoKinds {
    /// `provider` makes the other kind of side 0 and of side 1.
    pub fn start(provider: impl Fn(usize) -> Box<dyn Provider + Send>) -> Self {
        let agent = |side| Agent::start_with(Config::default(), vec![provider(side)]).unwrap();
        let client = agent(0);
        let server = Server::of(agent(1), (Ipv4Addr::LOCALHOST, 0).into());
        TwoKinds { client, server }
    }

    /// A flow that begins on TCP.
    pub fn pair(&self) -> FlowEnds {
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
}

/// Waits until both ends are carried by this kind.
pub fn wait_for((near, far): &FlowEnds, kind: TransportKind) {
    let begun = Instant::now();
    while [near, far].iter().any(|flow| flow.kind() != Some(kind)) {
        assert!(begun.elapsed() < LIMIT, "never carried by {kind}");
        // An end that has nothing on its way notices only when it goes on. A TCP connection that is shut has delivered everything.
        near.write(b"?").unwrap();
        far.read_exact(&mut [0]);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Most time for which a flow may stand still while it moves. One round trip is some hundred microseconds here. The rest is for a machine whose
/// processors are all busy: each step needs one of two threads.
const LONGEST_MOVE: Duration = Duration::from_millis(500);

/// Flows begin on TCP, move to the other kind, fall back when it is down, which `set_down` is called for, and come back when it is up again; data flows all the time. A move
/// is no break: no front end reports a fault.
pub fn move_and_come_back(agents: &TwoKinds, other: TransportKind, set_down: impl Fn(bool)) {
    let pairs: Vec<_> = (0..3).map(|_| agents.pair()).collect();
    let ends = || pairs.iter().flat_map(|(near, far)| [near, far]);
    let faults = || ends().map(|flow| flow.faults()).sum::<u32>();
    let pause = || ends().map(|flow| flow.longest_pause()).max().unwrap();
    let mut random = Pattern::new(9);
    let mut until_all_are_on = |kind| {
        let begun = Instant::now();
        while ends().any(|flow| flow.kind() != Some(kind)) {
            assert!(begun.elapsed() < LIMIT, "never all on {kind}");
            exchange(&pairs, 20, &mut random, |_| {});
        }
        begun.elapsed()
    };
    until_all_are_on(other);
    assert!(ends().all(|flow| flow.resumed() == 1));
    assert_eq!(faults(), 0);
    let mut moves = vec![(Duration::ZERO, pause())];
    for _ in 0..2 {
        set_down(true);
        pairs.iter().for_each(|(near, _)| near.shut_down());
        until_all_are_on(TransportKind::TCP);
        let (before, _) = (faults(), pause());
        set_down(false);
        let took = until_all_are_on(other);
        assert_eq!(faults(), before);
        moves.push((took, pause()));
    }
    println!("time until all flows were back, and longest pause of a move: {moves:?}");
    assert!(moves.iter().all(|(_, pause)| *pause < LONGEST_MOVE));
}

/// How often a flow was on the other kind and on TCP.
#[derive(Debug, Default)]
pub struct KindsSeen {
    pub other: u32,
    pub tcp: u32,
}

impl KindsSeen {
    pub fn look(&mut self, flow: &AnyFlow) {
        match flow.kind() {
            Some(TransportKind::TCP) => self.tcp += 1,
            Some(_) => self.other += 1,
            None => {}
        }
    }

    pub fn both(&self) -> bool {
        self.other > 0 && self.tcp > 0
    }
}
