//! Two sessions of the library in this process that prefer queue pairs, and have TCP within the host.

use std::{
    thread,
    time::{Duration, Instant},
};

use slim::{Endpoint, Flow, Session, SessionOptions, StreamState};
use slim_agent::transport::Provider;
use slim_rdma::Verbs;
use slim_verbs::{VerbsPort, VerbsProvider, VerbsSettings};

/// Far longer than any wait takes. The trials of a kind that is bad are half a minute apart in the end.
pub const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

/// The queue pairs of a port.
pub fn of_port<V: Verbs + Clone + Send + 'static>(port: VerbsPort<V>) -> VerbsProvider<V> {
    VerbsProvider::new(vec![port], VerbsSettings::default()).unwrap()
}

/// A session that prefers this kind.
pub fn open(kind: impl Provider + Send + 'static) -> Session {
    let kinds = vec![Box::new(kind) as Box<dyn Provider + Send>];
    Session::open_with(SessionOptions::new("test"), kinds).unwrap()
}

pub struct TwoSessions {
    pub sessions: [Session; 2],
    endpoint: Endpoint,
}

impl TwoSessions {
    pub fn open(kinds: [impl Provider + Send + 'static; 2]) -> Self {
        let sessions = kinds.map(open);
        let endpoint = sessions[1].listen("127.0.0.1:0".parse().unwrap()).unwrap();
        TwoSessions { sessions, endpoint }
    }

    /// A flow on queue pairs.
    pub fn pair(&self) -> (Flow, Flow) {
        let near = self.sessions[0].connect(self.endpoint.local_addr(), LIMIT);
        let near = near.unwrap();
        let far = self.endpoint.accept(LIMIT).unwrap();
        for flow in [&near, &far] {
            assert_eq!(flow.wait_negotiated(LIMIT), StreamState::Protected);
        }
        wait_for(&near, &far, true);
        (near, far)
    }

    /// Waits until both ends are on TCP. Nobody sends or receives.
    pub fn wait_for_tcp(&self, near: &Flow, far: &Flow) -> Duration {
        let begun = Instant::now();
        while [near, far].iter().any(|flow| flow.connection().is_none()) {
            assert!(begun.elapsed() < LIMIT.unwrap(), "never on TCP");
            for session in &self.sessions {
                session.wait(&mut Vec::new(), Some(Duration::from_millis(5)));
            }
        }
        begun.elapsed()
    }
}

/// Whether a flow is on a queue pair. `None`: on nothing, it is suspended.
pub fn by_pair(flow: &Flow) -> Option<bool> {
    let is_live = || flow.state() == StreamState::Protected;
    let by_pair = is_live() && flow.connection().is_none();
    // It may have been suspended meanwhile.
    is_live().then_some(by_pair)
}

/// Passes bytes until both ends are on queue pairs, or on TCP.
pub fn wait_for(near: &Flow, far: &Flow, wanted: bool) -> Duration {
    let begun = Instant::now();
    while [near, far].map(by_pair) != [Some(wanted); 2] {
        assert!(begun.elapsed() < LIMIT.unwrap(), "never there: {wanted}");
        near.send_all(b"?", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
        far.send_all(b"!", LIMIT).unwrap();
        near.recv_exact(&mut [0], LIMIT).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    begun.elapsed()
}
