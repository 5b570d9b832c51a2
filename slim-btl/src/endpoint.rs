//! One peer: the link to it, its rails, and the frames that wait for the first rail.

mod handshake;

use std::ffi::c_void;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slim::{Carrier, Flow};

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
    /// Frames wait for the kernel to take more.
    pub blocked: bool,
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
    /// The peer connects, by the flow with this number. This process has accepted; the peer has not confirmed yet.
    Answered(u64),
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
    /// The thread for deferred sends looks after the frames that wait.
    watched: AtomicBool,
    /// The peer can read this process's memory.
    reads: AtomicBool,
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
    /// An attempt failed although an address was reached: all addresses are tried again.
    again: bool,
    /// Number of times that all addresses were tried again.
    rounds: u32,
    /// When the link last became [`Connecting`](PeerLink::Connecting) or [`Expected`](PeerLink::Expected).
    since: Option<Instant>,
    /// The peer has ended the link in order: it may connect again.
    in_order: bool,
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
            watched: AtomicBool::new(false),
            reads: AtomicBool::new(false),
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
        self.reads.store(blob.reads, Ordering::Relaxed);
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

    /// Whether the peer can read this process's memory now: it knows how, and the first rail is on a queue pair.
    pub(crate) fn can_read(&self) -> bool {
        self.reads.load(Ordering::Relaxed) && {
            let mut state = self.state();
            state.link == PeerLink::Up
                && state
                    .rails
                    .first()
                    .is_some_and(|rail| rail.flow.is_carried())
        }
    }

    /// What carries the rails, where that is no socket.
    pub(crate) fn carriers(&self) -> Vec<Arc<dyn Carrier>> {
        self.state().rails.carriers()
    }

    /// Adds a rail.
    fn add_rail(&self, state: &mut EndpointState, rail: Rail) {
        state.rails.add(rail);
        self.count_rails(state);
    }

    /// The number of rails may have changed.
    fn count_rails(&self, state: &EndpointState) {
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
                effects.blocked = !state.rails.are_flushed();
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
        effects.blocked = first.backlog.is_blocked() && !first.backlog.is_empty();
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
        effects.blocked = rail.backlog.is_blocked() && !rail.backlog.is_empty();
        sent
    }

    /// Sends what waits, as far as the kernel takes it. Appends the fragments that are sent to `done`.
    pub(crate) fn flush(&self, done: &mut Vec<FragRef>) {
        self.state().rails.flush(done);
    }

    /// Whether the thread for deferred sends looks after the frames that wait; sets that to `on`.
    pub(crate) fn watch(&self, on: bool) -> bool {
        // Most calls find it as it is to be, and then need not write.
        self.watched.load(Ordering::SeqCst) == on || self.watched.swap(on, Ordering::SeqCst) == on
    }

    /// Whether all frames are sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.state().rails.are_flushed()
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
        self.count_rails(state);
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
    pub(crate) fn watch_rails(&self, now: Instant) -> bool {
        let mut state = self.state();
        state.rails.are_watched() && state.rails.watch(now)
    }

    /// This process begins to add a rail, by the flow with this number.
    pub(crate) fn adding_rail(&self, line: u8, flow: u64, now: Instant) {
        self.state().attempts.push((line, flow, now));
    }

    /// The peer has said goodbye on this rail. If it is not the first one, this process says goodbye on it, too.
    pub(crate) fn peer_retires(&self, flow: u64) {
        if !self.is_let_go() {
            let mut state = self.state();
            state.rails.retire(flow);
            self.count_rails(&state);
        }
    }

    /// Whether frames wait on this rail, which is not the first one and gets no more.
    pub(crate) fn is_leaving(&self, flow: u64) -> bool {
        self.state().rails.is_leaving(flow)
    }

    /// Removes a rail that has ended, unless it is the first one: returns whether it is not, and its fragments that were not sent.
    pub(crate) fn remove_rail(&self, flow: u64) -> Option<Vec<FragRef>> {
        let mut state = self.state();
        let fragments = state.rails.remove(flow);
        self.count_rails(&state);
        fragments
    }

    /// The link has ended, `in_order` or by a failure: returns the fragments that were not sent.
    pub(crate) fn end(&self, in_order: bool) -> Vec<FragRef> {
        let mut state = self.state();
        state.link = PeerLink::Over;
        state.in_order = in_order;
        let mut fragments = state.early.take_fragments();
        fragments.extend(std::mem::take(&mut state.rails).take_fragments());
        self.count_rails(&state);
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
        let waited = endpoint.end(false);
        assert_eq!(waited.len(), 1);
        waited.into_iter().for_each(FragRef::free);
        let SendOutcome::Unreachable(frag) = endpoint.send(fragment(5, 1), 1, 1, effects) else {
            panic!("not refused");
        };
        frag.free();
        assert!(!endpoint.send_now(1, [b"a", b"b"], 1, effects));
    }
}
