//! Two sessions of one process that have TCP, and queue pairs in memory, which they prefer.

#![allow(dead_code, reason = "each test program uses only a part")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slim::{Endpoint, Flow, Session, SessionOptions, StreamState};
use slim_agent::transport::Provider;
use slim_rdma::{PairSizes, RingShape};
use slim_verbs::VerbsSettings;
use slim_verbs::in_memory::MemoryNet;

use super::common::{LIMIT, listen};

/// Sizes so small that rings wrap, and credits matter.
pub fn small() -> VerbsSettings {
    VerbsSettings {
        sizes: PairSizes {
            shape: RingShape::new(16 << 10, 32).unwrap(),
            depth: 16,
            staging: 16 << 10,
            inline: 64,
            message: 4 << 10,
        },
        ..VerbsSettings::default()
    }
}

/// The hosts of each side. Each host is a port.
pub type Hosts = [&'static [usize]; 2];

pub struct VerbsSessions {
    pub net: MemoryNet,
    pub client: Session,
    pub server: Session,
    pub endpoint: Endpoint,
}

impl VerbsSessions {
    pub fn open(options: &SessionOptions, settings: VerbsSettings) -> Self {
        Self::with_hosts(options, settings, [&[0], &[1]])
    }

    pub fn with_hosts(options: &SessionOptions, settings: VerbsSettings, hosts: Hosts) -> Self {
        let net = MemoryNet::start();
        let session = |hosts| {
            let queue_pairs = net.provider(hosts, settings);
            let kinds = vec![Box::new(queue_pairs) as Box<dyn Provider + Send>];
            Session::open_with(options.clone(), kinds).expect("the session opens")
        };
        let (client, server) = (session(hosts[0]), session(hosts[1]));
        let endpoint = listen(&server);
        VerbsSessions {
            net,
            client,
            server,
            endpoint,
        }
    }

    /// A flow that begins on TCP.
    pub fn pair(&self) -> (Flow, Flow) {
        let near = self.client.connect(self.endpoint.local_addr(), LIMIT);
        let near = near.unwrap();
        let far = self.endpoint.accept(LIMIT).unwrap();
        for flow in [&near, &far] {
            assert_eq!(flow.wait_negotiated(LIMIT), StreamState::Protected);
            assert!(flow.connection().is_some());
        }
        (near, far)
    }

    /// A flow that has moved to a queue pair.
    pub fn carried_pair(&self) -> (Flow, Flow) {
        let (near, far) = self.pair();
        wait_for(&near, &far, true);
        (near, far)
    }

    /// Waits until both ends are carried by a queue pair, or by TCP. The programs only look what is new: nobody sends or receives. Returns how long
    /// that took.
    pub fn wait_looking(&self, near: &Flow, far: &Flow, by_pair: bool) -> Duration {
        let begun = Instant::now();
        while ![near, far].into_iter().all(|flow| is_on(flow, by_pair)) {
            assert!(begun.elapsed() < LIMIT.unwrap(), "never there: {by_pair}");
            for session in [&self.client, &self.server] {
                session.wait(&mut Vec::new(), Some(Duration::from_millis(5)));
            }
        }
        begun.elapsed()
    }
}

/// Whether the flow is carried by a queue pair, or by TCP. It is neither while it is suspended.
fn is_on(flow: &Flow, pair: bool) -> bool {
    match pair {
        true => flow.is_carried(),
        false => flow.connection().is_some(),
    }
}

/// Passes bytes until both ends are carried by a queue pair, or by TCP. Returns how long that took.
pub fn wait_for(near: &Flow, far: &Flow, by_pair: bool) -> Duration {
    let begun = Instant::now();
    while ![near, far].into_iter().all(|flow| is_on(flow, by_pair)) {
        assert!(begun.elapsed() < LIMIT.unwrap(), "never there: {by_pair}");
        pass(near, far);
    }
    begun.elapsed()
}

/// One byte each way.
pub fn pass(near: &Flow, far: &Flow) {
    near.send_all(b"?", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
    far.send_all(b"!", LIMIT).unwrap();
    near.recv_exact(&mut [0], LIMIT).unwrap();
}

/// Tells threads that a test is over, also after a panic.
pub struct Done<'a>(pub &'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
