//! One peer: the link to it, its rails, and the frames that wait for the first rail.

use std::ffi::c_void;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slim::Flow;

use crate::backlog::{Backlog, Outgoing};
use crate::frag::FragRef;
use crate::hdr::{FrameHeader, FrameKind, HEADER, padding};
use crate::proc::{LineAddresses, ProcAddress, ProcBlob, ProcName};
use crate::rail::{self, Rail, Rails};

/// The tag of `ob1`'s data fragments (`MCA_PML_OB1_HDR_TYPE_FRAG`). Each names its place in the message, so their order is free.
const FRAGMENT_TAG: u8 = 0x46;
/// Time limit of an attempt to add a rail. The line may be dead; a later attempt finds out when it works again.
const RAIL_ATTEMPT: Duration = Duration::from_secs(3);
/// Limit of a fragment's payload when there are several rails.
const SPREAD: usize = 128 << 10;
/// Limit of rails to one peer that the peer may add.
const RAILS: usize = 16;

/// Result of a send.
#[derive(Debug)]
pub enum SendOutcome {
    /// The kernel has the fragment, or a copy waits: the fragment is to be completed.
    Sent(FragRef),
    /// The fragment is sent, now or later, and its callback is owed.
    Queued,
    /// The fragment waits, and the caller must connect.
    Unconnected,
    /// The peer is lost: the fragment belongs to the caller again.
    Unreachable(FragRef),
}

/// What follows from a send for other fragments.
#[derive(Debug, Default)]
pub struct SendEffects {
    /// Fragments that are sent and are to be completed.
    pub done: Vec<FragRef>,
    /// Frames wait for the next system call: progress must flush the endpoint.
    pub deferred: bool,
}

/// How a process and its peer are connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PeerLink {
    /// Not yet.
    #[default]
    None,
    /// This process connects, by the flow with this number; the peer has not accepted yet.
    Connecting(u64),
    /// The peer connects: its flow is used if both connect at the same time.
    Expected,
    /// By the rails.
    Up,
    /// The link is lost, and the peer is not reported yet: what is sent waits.
    Lost,
    /// The link has ended.
    Over,
}

/// A peer. Open MPI has a pointer to it (`mca_btl_base_endpoint_t`).
pub struct BtlEndpoint {
    /// The peer's name.
    pub name: ProcName,
    state: Mutex<EndpointState>,
    /// Open MPI's `opal_proc_t` of the peer; null while only the peer has asked for the connection.
    proc: AtomicPtr<c_void>,
    /// Open MPI has let go of the peer.
    let_go: AtomicBool,
    /// Fragments are spread over several rails.
    spreads: AtomicBool,
}

#[derive(Debug, Default)]
struct EndpointState {
    link: PeerLink,
    token: u64,
    /// All addresses of the peer with their lines.
    addresses: Vec<(u8, SocketAddr)>,
    /// The lines that get a rail.
    lines: Vec<LineAddresses>,
    /// Addresses that were not tried yet for the first flow, the next one last.
    untried: Vec<(u8, SocketAddr)>,
    /// The line of the first flow that this process makes.
    line: u8,
    /// Frames that wait for the first rail.
    early: Backlog,
    rails: Rails,
    /// This process has made the first flow, so it makes the other rails, too.
    makes_rails: bool,
    /// Attempts to add a rail: line, number of the flow, begin.
    attempts: Vec<(u8, u64, Instant)>,
}

/// The changes to a peer's rails that are due.
#[derive(Debug, Default)]
pub(crate) struct RailChanges {
    /// Lines to connect to, with the peer's token.
    pub(crate) connect: Vec<LineAddresses>,
    pub(crate) token: u64,
    /// Flows of attempts that took too long.
    pub(crate) give_up: Vec<u64>,
}

impl BtlEndpoint {
    pub(crate) fn new(name: ProcName) -> Self {
        Self {
            name,
            state: Mutex::default(),
            proc: AtomicPtr::new(ptr::null_mut()),
            let_go: AtomicBool::new(false),
            spreads: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Open MPI's proc, or null.
    pub fn proc(&self) -> *mut c_void {
        self.proc.load(Ordering::Acquire)
    }

    /// Open MPI wants to send to the peer: its proc, and what the peer has published, as seen from this process's addresses.
    pub(crate) fn describe(&self, proc: *mut c_void, blob: &ProcBlob, own: &[ProcAddress]) {
        let mut state = self.state();
        state.token = blob.token;
        state.addresses = blob.candidates(own);
        state.untried = state.addresses.iter().rev().copied().collect();
        state.lines = blob.lines(own);
        self.proc.store(proc, Ordering::Release);
    }

    /// Whether Open MPI has let go of the peer.
    pub(crate) fn is_let_go(&self) -> bool {
        self.let_go.load(Ordering::Acquire)
    }

    /// Limits the payload of one fragment: short ones balance several rails better.
    pub fn limit(&self, len: usize) -> usize {
        match self.spreads.load(Ordering::Relaxed) {
            true => len.min(SPREAD),
            false => len,
        }
    }

    /// Adds a rail.
    fn add_rail(&self, state: &mut EndpointState, rail: Rail) {
        state.rails.add(rail);
        let several = state.rails.are_several();
        self.spreads.store(several, Ordering::Relaxed);
    }

    /// Sends a fragment. The first send since the process last made progress (`round`) goes to the kernel at once; those that follow
    /// share system calls, the last of them in the next progress.
    pub fn send(
        &self,
        mut frag: FragRef,
        tag: u8,
        round: u64,
        effects: &mut SendEffects,
    ) -> SendOutcome {
        frag.seal(tag);
        let mut state = self.state();
        let state = &mut *state;
        match state.link {
            PeerLink::Over => return SendOutcome::Unreachable(frag),
            PeerLink::Up if tag == FRAGMENT_TAG && state.rails.are_several() => {
                state.rails.share(frag, &mut effects.done);
                return SendOutcome::Queued;
            }
            _ => {}
        }
        let Some(first) = state.rails.first() else {
            frag.owe_callback();
            state.early.push(Outgoing::Fragment(frag));
            return match state.link {
                PeerLink::None => SendOutcome::Unconnected,
                _ => SendOutcome::Queued,
            };
        };
        let sent = first.send(frag, round, &mut effects.done);
        effects.deferred = first.is_deferring();
        sent.map_or(SendOutcome::Queued, SendOutcome::Sent)
    }

    /// Sends a payload of two parts, or a copy of it later. Returns false if the first rail takes nothing now.
    pub fn send_now(
        &self,
        tag: u8,
        [head, body]: [&[u8]; 2],
        round: u64,
        effects: &mut SendEffects,
    ) -> bool {
        let mut state = self.state();
        let Some(rail) = state.rails.first() else {
            return false;
        };
        let len = head.len() + body.len();
        let header = FrameHeader {
            kind: FrameKind::Data,
            tag,
            len,
        };
        let header = header.encode();
        let padding = &[0; HEADER][..padding(len)];
        let pieces = [&header[..], head, body, padding];
        let sent = rail.send_copied(&pieces, round, &mut effects.done);
        effects.deferred = rail.is_deferring();
        sent
    }

    /// Sends what waits, as far as the kernel takes it. Appends the fragments that are sent to `done`.
    pub(crate) fn flush(&self, done: &mut Vec<FragRef>) {
        self.state().rails.flush(done);
    }

    /// Whether all frames are sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.state().rails.are_flushed()
    }

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
        while let Some((line, addr)) = state.untried.pop() {
            if let Some(flow) = connect(addr, state.token) {
                state.link = PeerLink::Connecting(flow);
                state.line = line;
                return Some(true);
            }
        }
        Some(false)
    }

    /// The flow with this number, by which this process connected, ended before it was accepted. Returns whether another address is
    /// to be tried.
    pub(crate) fn attempt_failed(&self, flow: u64) -> bool {
        let mut state = self.state();
        state.attempts.retain(|attempt| attempt.1 != flow);
        let is_first = state.link == PeerLink::Connecting(flow);
        if is_first {
            state.link = PeerLink::None;
        }
        is_first
    }

    /// The peer has rejected this process's flow, because the peer's own flow is used.
    pub(crate) fn rejected(&self, flow: u64) {
        let mut state = self.state();
        state.attempts.retain(|attempt| attempt.1 != flow);
        if state.link == PeerLink::Connecting(flow) {
            state.link = PeerLink::Expected;
        }
    }

    /// The peer has accepted a flow of this process. Returns whether the flow is used: as the first, or as a further rail.
    pub(crate) fn accepted(&self, flow: &Arc<Flow>) -> bool {
        let mut state = self.state();
        let state = &mut *state;
        if state.link == PeerLink::Connecting(flow.id()) {
            state.link = PeerLink::Up;
            state.makes_rails = true;
            let early = std::mem::take(&mut state.early);
            let rail = Rail::new(flow, state.line, early);
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
            let rail = Rail::new(flow, line, Backlog::default());
            self.add_rail(state, rail);
        }
        goes_up
    }

    /// The peer connects by this flow. Returns whether the flow is used. Of two first flows that cross, the lower name's is used.
    pub(crate) fn accept(&self, me: ProcName, flow: &Arc<Flow>, is_rail: bool) -> bool {
        let mut state = self.state();
        let state = &mut *state;
        let take = match state.link {
            PeerLink::None | PeerLink::Expected => !is_rail,
            PeerLink::Connecting(_) => !is_rail && self.name < me,
            PeerLink::Up => is_rail && !self.is_let_go() && state.rails.len() < RAILS,
            PeerLink::Lost | PeerLink::Over => false,
        };
        if take {
            let answer = FrameHeader::control(FrameKind::Accept).encode();
            let mut backlog = Backlog::default();
            backlog.copy(&[&answer, &[], &[], &[]]);
            backlog.append(&mut state.early);
            state.link = PeerLink::Up;
            self.add_rail(state, Rail::new(flow, 0, backlog));
        }
        take
    }

    /// The link is lost. What is sent waits until [`end`](Self::end). Returns false if that was known.
    pub(crate) fn doubt(&self) -> bool {
        let link = &mut self.state().link;
        let is_news = !matches!(link, PeerLink::Lost | PeerLink::Over);
        if is_news {
            *link = PeerLink::Lost;
        }
        is_news
    }

    /// Whether the link has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.state().link == PeerLink::Over
    }

    /// Finds the changes to the rails that are due, and retires superfluous rails. `has_met`: whether the flow with this number is
    /// connected; the peer may already use it, so it is not given up.
    pub(crate) fn tend_rails(&self, now: Instant, has_met: impl Fn(u64) -> bool) -> RailChanges {
        let mut state = self.state();
        let state = &mut *state;
        if !state.makes_rails || state.link != PeerLink::Up || self.is_let_go() {
            return RailChanges::default();
        }
        let is_late = |attempt: &mut (u8, u64, Instant)| {
            now.saturating_duration_since(attempt.2) > RAIL_ATTEMPT && !has_met(attempt.1)
        };
        let late = state.attempts.extract_if(.., is_late);
        let give_up = late.map(|attempt| attempt.1).collect();
        let lines: Vec<u8> = state.lines.iter().map(|line| line.line).collect();
        let line_of = |ip: IpAddr| {
            let mut addresses = state.addresses.iter();
            addresses
                .find(|(_, addr)| addr.ip() == ip)
                .map(|(line, _)| *line)
        };
        let places = state.rails.places(line_of);
        let connecting: Vec<u8> = state.attempts.iter().map(|attempt| attempt.0).collect();
        let plan = rail::plan(&lines, &places, &connecting);
        for flow in plan.retire {
            state.rails.retire(flow);
        }
        let connect = state
            .lines
            .iter()
            .filter(|l| plan.connect.contains(&l.line));
        RailChanges {
            connect: connect.cloned().collect(),
            token: state.token,
            give_up,
        }
    }

    /// Finds rails that stand still; see [`Rails::watch`].
    pub(crate) fn watch_rails(&self, now: Instant) {
        if self.spreads.load(Ordering::Relaxed) {
            self.state().rails.watch(now);
        }
    }

    /// This process begins to add a rail, by the flow with this number.
    pub(crate) fn adding_rail(&self, line: u8, flow: u64, now: Instant) {
        self.state().attempts.push((line, flow, now));
    }

    /// The peer has said goodbye on this rail. If it is not the first one, this process says goodbye on it, too.
    pub(crate) fn peer_retires(&self, flow: u64) {
        if !self.is_let_go() {
            self.state().rails.retire(flow);
        }
    }

    /// Whether frames wait on this rail, which is not the first one and gets no more.
    pub(crate) fn is_leaving(&self, flow: u64) -> bool {
        self.state().rails.is_leaving(flow)
    }

    /// Removes a rail that has ended, unless it is the first one: returns whether it is not, and its fragments that were not sent.
    pub(crate) fn remove_rail(&self, flow: u64) -> Option<Vec<FragRef>> {
        self.state().rails.remove(flow)
    }

    /// The link has ended: returns the fragments that were not sent.
    pub(crate) fn end(&self) -> Vec<FragRef> {
        let mut state = self.state();
        state.link = PeerLink::Over;
        let mut fragments = state.early.take_fragments();
        fragments.extend(std::mem::take(&mut state.rails).take_fragments());
        fragments
    }

    /// Open MPI lets go of the peer: a goodbye follows all that waits, on each rail. Returns the flows.
    pub(crate) fn say_goodbye(&self) -> Vec<Arc<Flow>> {
        self.let_go.store(true, Ordering::Release);
        let mut state = self.state();
        state.rails.say_goodbye();
        state.rails.flows()
    }
}

impl fmt::Debug for BtlEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The lock is not waited for: a debugger may have stopped its holder.
        f.debug_struct("BtlEndpoint")
            .field("name", &self.name)
            .field("let_go", &self.let_go)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frag::tests::fragment;

    #[test]
    fn a_lost_peer_refuses_fragments_and_returns_those_that_waited() {
        let endpoint = BtlEndpoint::new(ProcName(3));
        let effects = &mut SendEffects::default();
        let SendOutcome::Unconnected = endpoint.send(fragment(5, 1), 1, 1, effects) else {
            panic!("not queued");
        };
        assert_eq!(endpoint.connect(|_, _| Some(9)), Some(false));
        let waited = endpoint.end();
        assert_eq!(waited.len(), 1);
        waited.into_iter().for_each(FragRef::free);
        let SendOutcome::Unreachable(frag) = endpoint.send(fragment(5, 1), 1, 1, effects) else {
            panic!("not refused");
        };
        frag.free();
        assert!(!endpoint.send_now(1, [b"a", b"b"], 1, effects));
    }

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
        assert!(!endpoint.attempt_failed(77) && endpoint.attempt_failed(2));
        assert_eq!(endpoint.connect(&mut connect), Some(true));
        assert!(endpoint.attempt_failed(3));
        assert_eq!(endpoint.connect(&mut connect), Some(false));
        assert_eq!(tried, addrs);
    }
}
