//! How a peer and this process come to their first flow, and to further rails.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slim::Flow;

use super::{BtlEndpoint, EndpointState, PeerLink};
use crate::backlog::Backlog;
use crate::hdr::{FrameHeader, FrameKind};
use crate::proc::ProcName;
use crate::rail::Rail;

/// Limit of rails to one peer that the peer may add.
const RAILS: usize = 16;
/// Limit of rounds over all addresses of a peer. A connection may break before the peer has accepted it.
const ROUNDS: u32 = 32;
/// How long one end waits for the connection that the other end has promised, or prefers its own connection to the peer's.
const PREFERENCE: Duration = Duration::from_secs(1);

impl EndpointState {
    /// From now on a connection is under way.
    fn wait_for(&mut self, link: PeerLink) {
        self.link = link;
        self.since = Some(Instant::now());
    }

    /// Whether a flow that the peer confirms becomes the first flow: there is none yet.
    fn takes_confirm(&self) -> bool {
        match self.link {
            PeerLink::None
            | PeerLink::Connecting(_)
            | PeerLink::Expected
            | PeerLink::Answered(_) => true,
            PeerLink::Up | PeerLink::Lost | PeerLink::Over => false,
        }
    }

    /// Whether the connection that is under way takes longer than it has a preference for.
    fn is_late(&self, now: Instant) -> bool {
        let waited = self.since.map(|since| now.saturating_duration_since(since));
        waited.is_some_and(|waited| waited > PREFERENCE)
    }
}

impl BtlEndpoint {
    /// If nobody connects yet, `connect` begins to: to one address after the other until it succeeds. `None`: nothing to do;
    /// otherwise whether it has begun.
    pub(crate) fn connect(
        &self,
        mut connect: impl FnMut(SocketAddr, u64) -> Option<u64>,
    ) -> Option<bool> {
        let mut state = self.state();
        if state.link != PeerLink::None {
            return None;
        }
        loop {
            while let Some((line, addr)) = state.untried.pop() {
                if let Some(flow) = connect(addr, state.token) {
                    state.wait_for(PeerLink::Connecting(flow));
                    state.line = line;
                    return Some(true);
                }
            }
            if !std::mem::take(&mut state.again) || state.rounds == ROUNDS {
                return Some(false);
            }
            state.rounds += 1;
            state.untried = state.addresses.iter().rev().copied().collect();
        }
    }

    /// The flow with this number, by which this process connected, ended before it was accepted. `broken`: its connection was
    /// established. Returns whether another address is to be tried.
    pub(crate) fn attempt_failed(&self, flow: u64, broken: bool) -> bool {
        let mut state = self.state();
        state.attempts.retain(|attempt| attempt.1 != flow);
        let is_first = state.link == PeerLink::Connecting(flow);
        if is_first {
            state.link = PeerLink::None;
            state.again |= broken;
        }
        is_first
    }

    /// The flow with this number, by which the peer connected, ended before the peer confirmed. Returns whether this process is to
    /// connect itself, because frames wait.
    pub(crate) fn answer_failed(&self, flow: u64) -> bool {
        let mut state = self.state();
        let is_first = state.link == PeerLink::Answered(flow);
        if is_first {
            state.link = PeerLink::None;
            state.again = true;
        }
        is_first && !state.early.is_empty()
    }

    /// Whether this process is to connect itself, because the connection that the peer has promised does not come.
    pub(crate) fn is_let_down(&self, now: Instant) -> bool {
        let mut state = self.state();
        let is_let_down = state.link == PeerLink::Expected && state.is_late(now);
        if is_let_down {
            state.link = PeerLink::None;
            state.again = true;
        }
        is_let_down
    }

    /// The peer has rejected this process's flow, because the peer's own flow is used.
    pub(crate) fn rejected(&self, flow: u64) {
        let mut state = self.state();
        state.attempts.retain(|attempt| attempt.1 != flow);
        if state.link == PeerLink::Connecting(flow) {
            state.wait_for(PeerLink::Expected);
        }
    }

    /// The peer has accepted a flow of this process. Returns whether the flow is used: as the first, or as a further rail.
    pub(crate) fn accepted(&self, flow: &Arc<Flow>) -> bool {
        let mut state = self.state();
        let state = &mut *state;
        let confirm = FrameHeader::control(FrameKind::Confirm).encode();
        let mut backlog = Backlog::default();
        backlog.copy(&[&confirm, &[], &[], &[]]);
        if state.link == PeerLink::Connecting(flow.id()) {
            state.link = PeerLink::Up;
            state.makes_rails = true;
            backlog.append(&mut state.early);
            let rail = Rail::new(flow, state.line, backlog);
            self.add_rail(state, rail);
            return true;
        }
        let mut attempts = state.attempts.iter();
        let Some(at) = attempts.position(|attempt| attempt.1 == flow.id()) else {
            return false;
        };
        let (line, ..) = state.attempts.swap_remove(at);
        let goes_up = state.link == PeerLink::Up;
        if goes_up {
            self.add_rail(state, Rail::new(flow, line, backlog));
        }
        goes_up
    }

    /// The peer connects by this flow. Returns whether the flow is accepted. Of two first flows that cross, the lower name's is used,
    /// unless it takes too long.
    pub(crate) fn accept(&self, me: ProcName, flow: u64, is_rail: bool, now: Instant) -> bool {
        let mut state = self.state();
        if is_rail {
            return state.link == PeerLink::Up && !self.is_let_go() && state.rails.len() < RAILS;
        }
        let accepts = match state.link {
            // The peer has given up the flow that was accepted before.
            PeerLink::None | PeerLink::Expected | PeerLink::Answered(_) => true,
            PeerLink::Connecting(_) => self.name < me || state.is_late(now),
            PeerLink::Over => state.in_order && !self.is_let_go(),
            PeerLink::Up | PeerLink::Lost => false,
        };
        if accepts {
            state.link = PeerLink::Answered(flow);
        }
        accepts
    }

    /// The peer uses this flow, which was accepted. Returns whether this process uses it, too.
    pub(crate) fn confirmed(&self, flow: &Arc<Flow>, is_rail: bool) -> bool {
        let mut state = self.state();
        let state = &mut *state;
        let is_used = match is_rail {
            true => state.link == PeerLink::Up && !self.is_let_go(),
            // The peer confirms only the flow that it uses. This process may have answered an older hello of the peer after this one,
            // or have begun to connect because that older flow has ended; the peer refuses both.
            false => state.takes_confirm() && !self.is_let_go(),
        };
        if is_used {
            state.link = PeerLink::Up;
            let mut backlog = Backlog::default();
            if !is_rail {
                state.makes_rails = false;
                backlog.append(&mut state.early);
            }
            self.add_rail(state, Rail::new(flow, 0, backlog));
        }
        is_used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::{ProcAddress, ProcBlob};
    use slim::{Session, SessionOptions};
    use std::ptr;

    #[test]
    fn addresses_are_tried_one_after_the_other() {
        let endpoint = BtlEndpoint::new(ProcName(3));
        let addrs: Vec<SocketAddr> = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"]
            .map(|a| a.parse().unwrap())
            .into();
        let address = |addr: &SocketAddr| ProcAddress {
            addr: *addr,
            prefix: 24,
            line: 0,
        };
        let blob = ProcBlob {
            reads: false,
            token: 7,
            addresses: addrs.iter().map(address).collect(),
        };
        endpoint.describe(ptr::null_mut(), &blob, &[]);
        let mut tried = Vec::new();
        let mut connect = |addr: SocketAddr, _| {
            tried.push(addr);
            (addr.port() != 1).then_some(addr.port().into())
        };
        assert_eq!(endpoint.connect(&mut connect), Some(true));
        assert_eq!(endpoint.connect(&mut connect), None);
        assert!(!endpoint.attempt_failed(77, true) && endpoint.attempt_failed(2, false));
        assert_eq!(endpoint.connect(&mut connect), Some(true));
        assert!(endpoint.attempt_failed(3, false));
        assert_eq!(endpoint.connect(&mut connect), Some(false));
        assert_eq!(tried, addrs);
    }

    #[test]
    fn addresses_are_tried_again_if_one_was_reached_but_not_for_ever() {
        let endpoint = BtlEndpoint::new(ProcName(3));
        let blob = ProcBlob {
            reads: false,
            token: 7,
            addresses: vec![ProcAddress {
                addr: "10.0.0.1:1".parse().unwrap(),
                prefix: 24,
                line: 0,
            }],
        };
        endpoint.describe(ptr::null_mut(), &blob, &[]);
        let mut tries = 0;
        while endpoint.connect(|_, _| Some(tries)) == Some(true) {
            assert!(endpoint.attempt_failed(tries, true));
            tries += 1;
        }
        assert_eq!(tries, u64::from(ROUNDS) + 1);
    }

    #[test]
    fn a_promised_connection_that_does_not_come_is_made_by_the_other_end() {
        let endpoint = BtlEndpoint::new(ProcName(3));
        endpoint.state().untried = vec![(0, "10.0.0.1:1".parse().unwrap())];
        assert_eq!(endpoint.connect(|_, _| Some(4)), Some(true));
        endpoint.rejected(4);
        let now = Instant::now();
        assert!(!endpoint.is_let_down(now) && endpoint.is_let_down(now + 2 * PREFERENCE));
        assert_eq!(endpoint.state().link, PeerLink::None);
    }

    #[test]
    fn of_two_connections_that_cross_the_lower_names_is_used_unless_it_takes_too_long() {
        let now = Instant::now();
        for (peer, later, used) in [(1, 0, true), (9, 0, false), (9, 2, true)] {
            let endpoint = BtlEndpoint::new(ProcName(peer));
            endpoint.state().untried = vec![(0, "10.0.0.1:1".parse().unwrap())];
            assert_eq!(endpoint.connect(|_, _| Some(4)), Some(true));
            let at = now + later * PREFERENCE;
            assert_eq!(
                endpoint.accept(ProcName(5), 6, false, at),
                used,
                "{peer}, {later}"
            );
        }
    }

    #[test]
    fn a_confirmed_flow_is_used_although_an_older_hello_was_answered_after_it() {
        let session = Session::open(SessionOptions::new("confirm")).unwrap();
        let listener = session.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let limit = Some(Duration::from_secs(60));
        let connector = session.connect(listener.local_addr(), limit).unwrap();
        let flow = Arc::new(listener.accept(limit).unwrap());
        let (older, now) = (flow.id() + 1000, Instant::now());
        // 0: the older flow has not ended yet. 1: it has. 2: it has, and this process connects. 3: this process has left.
        for (then, used) in [(0, true), (1, true), (2, true), (3, false)] {
            let endpoint = BtlEndpoint::new(ProcName(3));
            endpoint.state().untried = vec![(0, "10.0.0.1:1".parse().unwrap())];
            for answered in [flow.id(), older] {
                assert!(endpoint.accept(ProcName(5), answered, false, now));
            }
            if then > 0 {
                assert!(!endpoint.answer_failed(older));
            }
            if then == 2 {
                assert_eq!(endpoint.connect(|_, _| Some(older + 1)), Some(true));
            }
            if then == 3 {
                endpoint.end(true);
            }
            assert_eq!(endpoint.confirmed(&flow, false), used, "{then}");
            assert_eq!(endpoint.state().link == PeerLink::Up, used, "{then}");
            // What is left of the other attempts does not harm the flow.
            endpoint.rejected(older + 1);
            assert!(!endpoint.attempt_failed(older + 1, true) && !endpoint.answer_failed(older));
            assert_eq!(endpoint.state().link == PeerLink::Up, used, "{then}");
        }
        drop(connector);
    }
}
