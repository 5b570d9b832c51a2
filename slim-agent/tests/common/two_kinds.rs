//! Two agents that have TCP and another kind of transport, which they prefer.

use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slim_agent::Agent;
use slim_agent::transport::Provider;
use slim_core::Role;
use slim_core::config::Config;
use slim_core::transport::TransportKind;

use super::any_flow::{AnyFlow, End, FlowEnds, lose_some};
use super::{LIMIT, Server};

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

/// Waits until the agents have made a connection of the other kind, of which there have been `made`: the peers offer it to each other once the
/// flow is live, and until then a resume uses TCP only.
pub fn wait_until_offered(flow: &FlowEnds, made: &AtomicU32) {
    let begun = Instant::now();
    while made.load(Ordering::Relaxed) == 0 {
        assert!(begun.elapsed() < LIMIT, "no connection of it is ever made");
        lose_some(flow);
    }
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
