//! One peer: the flow to it, and what waits to be sent on it.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::fmt;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slim::Flow;

use crate::frag::FragRef;
use crate::hdr::{FrameHeader, FrameKind, HEADER, padding};
use crate::proc::{ProcBlob, ProcName};

/// Pieces that one system call sends: up to 16 small fragments.
const PIECES: usize = 64;
/// What one fragment needs of them.
const PIECES_OF_ONE: usize = 4;

/// How a send went.
#[derive(Debug)]
pub enum SendOutcome {
    /// The kernel has it; the fragment is to be completed.
    Sent(FragRef),
    /// It is sent later; the callback is owed.
    Queued,
    /// It is sent later, and somebody has to connect.
    Unconnected,
    /// The peer is gone: the fragment is the caller's again.
    Unreachable(FragRef),
}

/// How a process and its peer are connected.
#[derive(Debug)]
pub(crate) enum PeerLink {
    /// Not at all, yet.
    None,
    /// By this process, on the flow with this number; the peer has not accepted yet.
    Connecting(u64),
    /// The peer connects: its flow is the one if both connect at the same time.
    Expected,
    /// By this flow.
    Up(Arc<Flow>),
    /// Not any more.
    Over,
}

/// Something to be sent.
#[derive(Debug)]
enum Outgoing {
    Fragment(FragRef),
    Bytes(Vec<u8>),
}

impl Outgoing {
    fn pieces(&self) -> [&[u8]; PIECES_OF_ONE] {
        match self {
            Self::Fragment(frag) => frag.pieces(),
            Self::Bytes(bytes) => [bytes, &[], &[], &[]],
        }
    }
}

/// A peer. Open MPI has a pointer to it (`mca_btl_base_endpoint_t`).
pub struct BtlEndpoint {
    /// Its name.
    pub name: ProcName,
    state: Mutex<EndpointState>,
    /// Open MPI's `opal_proc_t` of it; null as long as only the peer has asked for the connection.
    proc: AtomicPtr<c_void>,
    /// It has said goodbye, or this process has.
    departed: AtomicBool,
}

struct EndpointState {
    link: PeerLink,
    token: u64,
    /// Addresses that were not tried yet, the next one last.
    untried: Vec<SocketAddr>,
    queue: VecDeque<Outgoing>,
    /// Bytes of the first in the queue that are sent.
    sent: usize,
}

impl BtlEndpoint {
    pub(crate) fn new(name: ProcName) -> Self {
        Self {
            name,
            state: Mutex::new(EndpointState {
                link: PeerLink::None,
                token: 0,
                untried: Vec::new(),
                queue: VecDeque::new(),
                sent: 0,
            }),
            proc: AtomicPtr::new(ptr::null_mut()),
            departed: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Open MPI's proc, or null.
    pub fn proc(&self) -> *mut c_void {
        self.proc.load(Ordering::Acquire)
    }

    /// Open MPI wants to send to it: what it has published, and its proc.
    pub(crate) fn describe(&self, proc: *mut c_void, blob: &ProcBlob, candidates: Vec<SocketAddr>) {
        let mut state = self.state();
        state.token = blob.token;
        state.untried = candidates.into_iter().rev().collect();
        self.proc.store(proc, Ordering::Release);
    }

    /// Whether an end of the flow is no failure.
    pub(crate) fn has_departed(&self) -> bool {
        self.departed.load(Ordering::Acquire)
    }

    /// The peer has said goodbye.
    pub(crate) fn departs(&self) {
        self.departed.store(true, Ordering::Release);
    }

    /// Sends a fragment: at once if nothing waits before it and the kernel takes all of it.
    pub fn send(&self, mut frag: FragRef, tag: u8) -> SendOutcome {
        frag.seal(tag);
        let mut state = self.state();
        let mut sent = 0;
        match &state.link {
            PeerLink::Over => return SendOutcome::Unreachable(frag),
            PeerLink::Up(flow) if state.queue.is_empty() => {
                let pieces = frag.pieces();
                let total: usize = pieces.iter().map(|p| p.len()).sum();
                // An error of the flow is found by progress, which ends it.
                sent = send_pieces(flow, &pieces, total);
                if sent == total {
                    return SendOutcome::Sent(frag);
                }
            }
            _ => {}
        }
        frag.owe_callback();
        if state.queue.is_empty() {
            state.sent = sent;
        }
        state.queue.push_back(Outgoing::Fragment(frag));
        match state.link {
            PeerLink::None => SendOutcome::Unconnected,
            _ => SendOutcome::Queued,
        }
    }

    /// Sends a payload of two parts now, or not at all: whether it is sent. What the kernel does not take of it is copied.
    pub fn send_now(&self, tag: u8, first: &[u8], second: &[u8]) -> bool {
        let mut state = self.state();
        let PeerLink::Up(flow) = &state.link else {
            return false;
        };
        if !state.queue.is_empty() {
            return false;
        }
        let len = first.len() + second.len();
        let header = FrameHeader {
            kind: FrameKind::Data,
            tag,
            len,
        };
        let header = header.encode();
        let padding = &[0; HEADER][..padding(len)];
        let pieces = [&header[..], first, second, padding];
        let total = header.len() + len + padding.len();
        let sent = send_pieces(flow, &pieces, total);
        if sent == 0 {
            return false;
        }
        if sent < total {
            state.sent = sent;
            state.queue.push_back(Outgoing::Bytes(pieces.concat()));
        }
        true
    }

    /// Sends what waits, several fragments in one call; appends those that are sent to `done`.
    pub(crate) fn flush(&self, done: &mut Vec<FragRef>) {
        let mut state = self.state();
        let state = &mut *state;
        let PeerLink::Up(flow) = &state.link else {
            return;
        };
        while !state.queue.is_empty() {
            let mut pieces = [IoSlice::new(&[]); PIECES];
            let waiting = state.queue.iter().flat_map(Outgoing::pieces);
            let count = gather(waiting, state.sent, &mut pieces);
            match flow.try_send_vectored(&pieces[..count]) {
                Ok(n) => advance(&mut state.queue, &mut state.sent, n, done),
                // The flow tells when there is room again; an error of it is found by progress.
                Err(_) => return,
            }
        }
    }

    /// Whether all is sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.state().queue.is_empty()
    }

    /// If nobody connects yet, `connect` begins to, to one address after the other until it succeeds. `None`: nothing to do;
    /// otherwise whether it has begun.
    pub(crate) fn connect(
        &self,
        mut connect: impl FnMut(SocketAddr, u64) -> Option<u64>,
    ) -> Option<bool> {
        let mut state = self.state();
        if !matches!(state.link, PeerLink::None) {
            return None;
        }
        while let Some(addr) = state.untried.pop() {
            if let Some(flow) = connect(addr, state.token) {
                state.link = PeerLink::Connecting(flow);
                return Some(true);
            }
        }
        Some(false)
    }

    /// The flow with this number, by which this process connected, is over before it was accepted: whether another address is to
    /// be tried.
    pub(crate) fn attempt_failed(&self, flow: u64) -> bool {
        let mut state = self.state();
        let mine = matches!(state.link, PeerLink::Connecting(id) if id == flow);
        if mine {
            state.link = PeerLink::None;
        }
        mine
    }

    /// The peer has rejected this process's flow, because its own is the one.
    pub(crate) fn rejected(&self, flow: u64) {
        let mut state = self.state();
        if matches!(state.link, PeerLink::Connecting(id) if id == flow) {
            state.link = PeerLink::Expected;
        }
    }

    /// The peer has accepted this process's flow: whether it is the one.
    pub(crate) fn accepted(&self, flow: &Arc<Flow>) -> bool {
        let mut state = self.state();
        let is_it = matches!(state.link, PeerLink::Connecting(id) if id == flow.id());
        if is_it {
            state.link = PeerLink::Up(flow.clone());
        }
        is_it
    }

    /// The peer connects by this flow: whether it is the one. Of two that cross, that of the lower name is.
    pub(crate) fn accept(&self, me: ProcName, flow: &Arc<Flow>) -> bool {
        let mut state = self.state();
        let take = match state.link {
            PeerLink::None | PeerLink::Expected => true,
            PeerLink::Connecting(_) => self.name < me,
            PeerLink::Up(_) | PeerLink::Over => false,
        };
        if take {
            let answer = FrameHeader::control(FrameKind::Accept).encode();
            state.queue.push_front(Outgoing::Bytes(answer.into()));
            state.link = PeerLink::Up(flow.clone());
        }
        take
    }

    /// The flow is over: what was not sent.
    pub(crate) fn end(&self) -> Vec<FragRef> {
        let mut state = self.state();
        state.link = PeerLink::Over;
        state.sent = 0;
        let fragments = state.queue.drain(..).filter_map(|out| match out {
            Outgoing::Fragment(frag) => Some(frag),
            Outgoing::Bytes(_) => None,
        });
        fragments.collect()
    }

    /// This process says goodbye, behind all that waits. The flow, if there is one.
    pub(crate) fn say_goodbye(&self) -> Option<Arc<Flow>> {
        self.departs();
        let mut state = self.state();
        let PeerLink::Up(flow) = &state.link else {
            return None;
        };
        let flow = flow.clone();
        let goodbye = FrameHeader::control(FrameKind::Goodbye).encode();
        state.queue.push_back(Outgoing::Bytes(goodbye.into()));
        Some(flow)
    }
}

impl fmt::Debug for BtlEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BtlEndpoint")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Sends these pieces until all `total` bytes are sent or the kernel takes no more, which is when the flow tells that there is room
/// again; how many bytes.
fn send_pieces(flow: &Flow, pieces: &[&[u8]; PIECES_OF_ONE], total: usize) -> usize {
    let mut sent = 0;
    while sent < total {
        let mut rest = [IoSlice::new(&[]); PIECES_OF_ONE];
        let count = gather(pieces.iter().copied(), sent, &mut rest);
        match flow.try_send_vectored(&rest[..count]) {
            Ok(n) => sent += n,
            Err(_) => break,
        }
    }
    sent
}

/// All pieces but for the first `skip` bytes, as many as there is room for; how many.
fn gather<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
    mut skip: usize,
    out: &mut [IoSlice<'a>],
) -> usize {
    let mut count = 0;
    for piece in pieces {
        if count == out.len() {
            break;
        }
        let skipped = skip.min(piece.len());
        skip -= skipped;
        if skipped < piece.len() {
            out[count] = IoSlice::new(&piece[skipped..]);
            count += 1;
        }
    }
    count
}

/// `n` more bytes are sent: removes what is sent as a whole.
fn advance(queue: &mut VecDeque<Outgoing>, sent: &mut usize, n: usize, done: &mut Vec<FragRef>) {
    *sent += n;
    while let Some(first) = queue.front() {
        let len = first.pieces().iter().map(|p| p.len()).sum();
        if *sent < len {
            return;
        }
        *sent -= len;
        if let Some(Outgoing::Fragment(frag)) = queue.pop_front() {
            done.push(frag);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(len: usize, tag: u8) -> FragRef {
        let mut frag = FragRef::allocate(len, 0, 255).unwrap();
        let raw = frag.pieces()[1].as_ptr().cast_mut();
        // SAFETY: the memory is the fragment's own.
        unsafe { ptr::write_bytes(raw, tag, len) };
        frag.seal(tag);
        frag
    }

    #[test]
    fn what_is_sent_in_parts_is_the_whole_once() {
        let mut rng = fastrand::Rng::with_seed(2);
        let mut queue = VecDeque::new();
        for n in 0..40 {
            queue.push_back(match n % 5 {
                0 => Outgoing::Bytes(FrameHeader::control(FrameKind::Accept).encode().into()),
                _ => Outgoing::Fragment(fragment(rng.usize(0..300), n)),
            });
        }
        let all: Vec<u8> = queue.iter().flat_map(|o| o.pieces().concat()).collect();
        let (mut sent, mut done, mut got) = (0, Vec::new(), Vec::<u8>::new());
        while !queue.is_empty() {
            let mut pieces = [IoSlice::new(&[]); PIECES];
            let count = gather(queue.iter().flat_map(Outgoing::pieces), sent, &mut pieces);
            let bytes: Vec<u8> = pieces[..count].iter().flat_map(|p| p.to_vec()).collect();
            let n = rng.usize(1..=bytes.len());
            got.extend(&bytes[..n]);
            advance(&mut queue, &mut sent, n, &mut done);
        }
        assert!(got == all);
        assert_eq!((sent, done.len()), (0, 32));
        done.into_iter().for_each(FragRef::free);
    }

    #[test]
    fn a_peer_that_is_gone_refuses_and_gives_back_what_waited() {
        let endpoint = BtlEndpoint::new(ProcName(3));
        let SendOutcome::Unconnected = endpoint.send(fragment(5, 1), 1) else {
            panic!("not queued");
        };
        assert_eq!(endpoint.connect(|_, _| Some(9)), Some(false));
        let waited = endpoint.end();
        assert_eq!(waited.len(), 1);
        waited.into_iter().for_each(FragRef::free);
        let SendOutcome::Unreachable(frag) = endpoint.send(fragment(5, 1), 1) else {
            panic!("not refused");
        };
        frag.free();
        assert!(!endpoint.send_now(1, b"a", b"b"));
    }

    #[test]
    fn addresses_are_tried_one_after_the_other() {
        let endpoint = BtlEndpoint::new(ProcName(3));
        let blob = ProcBlob::default();
        let addrs: Vec<SocketAddr> = ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"]
            .map(|a| a.parse().unwrap())
            .into();
        endpoint.describe(ptr::null_mut(), &blob, addrs.clone());
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
