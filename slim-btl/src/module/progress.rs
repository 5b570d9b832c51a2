//! Progress: receives and delivers frames, and sends what waits.
//!
//! One thread at a time makes progress. Other threads, and callbacks that call progress, find the lock taken and return at once. So the
//! frames of a flow are delivered in order, and a receive buffer belongs to one callback.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

use slim::{Endpoint, Flow, StreamState, TransferError, Update};

use super::BtlModule;
use super::link::{BtlLink, LinkEnd, LinkFate, LinkStage};
use super::rails::RailTimes;
use crate::endpoint::BtlEndpoint;
use crate::frag::{FragRef, SUCCESS, UNREACHABLE};
use crate::hdr::{FrameHeader, FrameKind};

/// Number of reads that may find nothing before progress waits for the session to report the flow again.
const BUSY_READS: u32 = 256;
/// While some flows are read without a report, every 16th call of progress asks the session for updates.
const ASK_EVERY: u32 = 16;
/// Interval at which all flows are attended to: the kernel may have had no memory for a send, and does not report when it has.
const RETRY: Duration = Duration::from_millis(250);
/// Number of calls between two readings of the clock.
const CLOCK_EVERY: u32 = 64;
/// Limit of reads of one flow in one call, so that the others get their turn.
const READS: usize = 4;

/// State that belongs to the thread that makes progress.
pub(super) struct ProgressState {
    listeners: Vec<Endpoint>,
    pub(super) links: HashMap<u64, BtlLink>,
    /// Flows to read without a report of the session.
    busy: Vec<u64>,
    /// Number of flows in `busy` whose last read took all that had arrived.
    drained: usize,
    updates: Vec<Update>,
    /// Buffers that no flow uses now.
    buffers: Vec<Vec<u8>>,
    round: u32,
    /// When all flows were last attended to.
    retried: Instant,
    pub(super) rail_times: RailTimes,
}

impl ProgressState {
    pub(super) fn new(listeners: Vec<Endpoint>) -> Self {
        Self {
            listeners,
            links: HashMap::new(),
            busy: Vec::new(),
            drained: 0,
            updates: Vec::new(),
            buffers: Vec::new(),
            round: 0,
            retried: Instant::now(),
            rail_times: RailTimes::default(),
        }
    }

    /// Reads this flow from now on without a report of the session.
    fn read_on(&mut self, id: u64) {
        if let Some(link) = self.links.get_mut(&id) {
            link.idle = 0;
            if !std::mem::replace(&mut link.busy, true) {
                self.busy.push(id);
            }
        }
    }
}

impl BtlModule {
    /// Receives, delivers and sends without waiting. Returns the number of fragments.
    pub fn progress(&self) -> usize {
        let mut state = match self.progress.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        let state = &mut *state;
        self.deferred.rounds.fetch_add(1, Ordering::Relaxed);
        let mut events = self.flush_deferred();
        for link in self.take_fresh() {
            self.adopt(state, link);
        }
        self.settle_doubts();
        state.round = state.round.wrapping_add(1);
        if state.busy.is_empty() || state.round.is_multiple_of(ASK_EVERY) {
            events += self.ask_session(state);
        }
        // A call that moves much data takes long, so that the next reading must not wait for many of them.
        if events > 0 || state.round.is_multiple_of(CLOCK_EVERY) {
            events += self.keep_time(state);
        }
        // A drained flow is left out once, unless all are drained: most often the process now waits for another peer, and a read that
        // finds nothing costs a system call.
        let all = std::mem::take(&mut state.drained) == state.busy.len();
        let mut at = 0;
        while at < state.busy.len() {
            let id = state.busy[at];
            let patience = BUSY_READS / state.busy.len() as u32;
            let Some(link) = state.links.get_mut(&id) else {
                state.busy.swap_remove(at);
                continue;
            };
            if std::mem::take(&mut link.drained) && !all {
                at += 1;
                continue;
            }
            // Such a flow has room more often than the session is asked.
            if self.deferred.has_blocked() && link.is_up_and_carried() {
                events += self.flush(link);
            }
            link.reader.lend(&mut state.buffers);
            let fate = self.serve(link, patience, &mut events);
            link.reader.give_back(&mut state.buffers);
            match fate {
                LinkFate::Busy => {
                    state.drained += usize::from(link.drained);
                    at += 1;
                }
                LinkFate::Quiet => {
                    link.busy = false;
                    state.busy.swap_remove(at);
                }
                LinkFate::Over => {
                    state.links.remove(&id);
                    state.busy.swap_remove(at);
                }
            }
        }
        events += self
            .gets
            .progress(self.upcalls.module, |endpoint| self.hears_of(endpoint));
        // Sends of the callbacks.
        events + self.flush_deferred()
    }

    /// Whether all flows have ended.
    pub(super) fn is_alone(&self) -> bool {
        let state = self.progress.try_lock();
        state.is_ok_and(|state| state.links.is_empty())
    }

    /// Adds a new link, and attends to it: earlier reports of the session about it may have been lost.
    fn adopt(&self, state: &mut ProgressState, link: BtlLink) {
        let Some(id) = link.flow.as_ref().map(|flow| flow.id()) else {
            if let Some(endpoint) = link.endpoint {
                self.lose(&endpoint, "it cannot be connected to at any address");
            }
            return;
        };
        state.links.insert(id, link);
        self.attend(state, id);
    }

    /// Acts on the session's updates. Returns the number of sent fragments.
    fn ask_session(&self, state: &mut ProgressState) -> usize {
        let mut updates = std::mem::take(&mut state.updates);
        self.session.progress(&mut updates);
        let mut sent = 0;
        for update in updates.drain(..) {
            if update.acceptable {
                self.accept_all(state, update.id);
            } else {
                sent += self.attend(state, update.id);
            }
        }
        state.updates = updates;
        sent
    }

    /// Does what is due by the clock. Returns the number of sent fragments.
    fn keep_time(&self, state: &mut ProgressState) -> usize {
        let now = Instant::now();
        self.watch_rails(state, now);
        if now.saturating_duration_since(state.retried) < RETRY {
            return 0;
        }
        state.retried = now;
        let ids: Vec<u64> = state.links.keys().copied().collect();
        ids.iter().map(|id| self.attend(state, *id)).sum()
    }

    fn accept_all(&self, state: &mut ProgressState, listener: u64) {
        let mut accepted = Vec::new();
        if let Some(listener) = state.listeners.iter().find(|l| l.id() == listener) {
            while let Ok(flow) = listener.try_accept() {
                accepted.push(Arc::new(flow));
            }
        }
        for flow in accepted {
            let link = BtlLink::new(Some(flow), None, LinkStage::Unnamed);
            self.adopt(state, link);
        }
    }

    /// Acts on a change of a flow. Returns the number of sent fragments.
    fn attend(&self, state: &mut ProgressState, id: u64) -> usize {
        let Some(link) = state.links.get_mut(&id) else {
            return 0;
        };
        let is_early = matches!(
            link.stage,
            LinkStage::Connecting | LinkStage::Offered | LinkStage::Accepted
        );
        if is_early && link.is_suspended() {
            // The peer may not have accepted the connection, and then cannot resume it. A new one is sure to work.
            if let Some(mut link) = state.links.remove(&id) {
                self.ended(&mut link, LinkEnd::Broken("its connection broke"));
            }
            return 0;
        }
        let sent = match link.stage {
            LinkStage::Connecting => {
                link.offer(self.me);
                0
            }
            LinkStage::Accepted => {
                let flow = link.flow.clone();
                if !flow.is_some_and(|flow| self.confirm(link, &flow)) {
                    state.links.remove(&id);
                }
                0
            }
            LinkStage::Answered => {
                link.answer();
                0
            }
            LinkStage::Up => self.flush(link),
            LinkStage::Draining => {
                let sent = self.flush(link);
                if self.is_drained(link, id) {
                    state.links.remove(&id);
                }
                return sent;
            }
            LinkStage::Offered | LinkStage::Unnamed => 0,
        };
        state.read_on(id);
        sent
    }

    /// Whether nothing is left to be sent on a rail that gets no more, or nothing can be.
    fn is_drained(&self, link: &BtlLink, id: u64) -> bool {
        let Some(endpoint) = &link.endpoint else {
            return true;
        };
        let state = link.flow.as_ref().map(|flow| flow.state());
        if let Some(StreamState::Failed(_)) = state {
            // The peer has left this rail, so it does not need what waits.
            let rest = endpoint.remove_rail(id);
            self.complete(endpoint, rest.unwrap_or_default(), SUCCESS);
        }
        !endpoint.is_leaving(id)
    }

    pub(super) fn flush(&self, link: &BtlLink) -> usize {
        let Some(endpoint) = &link.endpoint else {
            return 0;
        };
        let mut done = Vec::new();
        endpoint.flush(&mut done);
        let sent = done.len();
        self.complete(endpoint, done, SUCCESS);
        sent
    }

    /// Reads a flow and delivers the received frames.
    fn serve(&self, link: &mut BtlLink, patience: u32, events: &mut usize) -> LinkFate {
        let Some(flow) = link.flow.clone() else {
            return LinkFate::Over;
        };
        for _ in 0..READS {
            let room = link.reader.room();
            let asked = room.len();
            let got = match flow.try_recv(room) {
                Ok(0) => return self.ended(link, LinkEnd::Eof),
                Ok(got) => got,
                Err(TransferError::WouldBlock) => {
                    link.idle += 1;
                    return match link.idle < patience {
                        true => LinkFate::Busy,
                        false => LinkFate::Quiet,
                    };
                }
                Err(TransferError::Kernel(_)) => return LinkFate::Busy,
                Err(e) => {
                    let text = e.to_string();
                    return self.ended(link, LinkEnd::of(e, &text));
                }
            };
            link.idle = 0;
            link.reader.filled(got);
            loop {
                match link.reader.next_frame(link.longest_payload()) {
                    Ok(None) => break,
                    Ok(Some((header, at))) => {
                        *events += 1;
                        if !self.handle(link, &flow, header, at) {
                            return LinkFate::Over;
                        }
                    }
                    Err(_) => {
                        let why = "it sent something that is not a frame";
                        return self.ended(link, LinkEnd::Failed(why));
                    }
                }
            }
            if got < asked {
                link.drained = true;
                break;
            }
        }
        LinkFate::Busy
    }

    /// Whether Open MPI may hear from the peer. If not, it has let go of it, or has ended the requests with it and reuses them.
    fn hears_of(&self, endpoint: &BtlEndpoint) -> bool {
        !endpoint.is_let_go() && !self.is_known_to_have_failed(endpoint)
    }

    /// Handles one frame. Returns whether the link goes on.
    fn handle(
        &self,
        link: &mut BtlLink,
        flow: &Arc<Flow>,
        header: FrameHeader,
        at: std::ops::Range<usize>,
    ) -> bool {
        match (link.stage, header.kind) {
            (LinkStage::Up, FrameKind::Data) => {
                let Some(endpoint) = &link.endpoint else {
                    return false;
                };
                link.has_received = true;
                if !self.hears_of(endpoint) {
                    return true;
                }
                let endpoint = Arc::as_ptr(endpoint).cast();
                link.reader.deliver(at, |payload| {
                    let data = payload.as_mut_ptr();
                    // SAFETY: the payload belongs to the callback until it returns: only this thread makes progress meanwhile.
                    unsafe { (self.upcalls.deliver)(endpoint, header.tag, data, header.len) };
                });
                true
            }
            (LinkStage::Up, FrameKind::Goodbye) => {
                link.goodbye = true;
                link.endpoint.iter().for_each(|e| e.peer_retires(flow.id()));
                self.flush(link);
                true
            }
            (LinkStage::Unnamed | LinkStage::Offered | LinkStage::Answered, _) => {
                self.shake_hands(link, flow, header, at)
            }
            _ => {
                let why = LinkEnd::Failed("it sent a frame out of turn");
                self.ended(link, why) != LinkFate::Over
            }
        }
    }

    /// A flow has ended.
    pub(super) fn ended(&self, link: &mut BtlLink, end: LinkEnd<'_>) -> LinkFate {
        let (Some(endpoint), Some(flow)) = (&link.endpoint, &link.flow) else {
            return LinkFate::Over;
        };
        let is_eof = matches!(end, LinkEnd::Eof);
        let why = end.text();
        // The peer has left before it learned that this rail is used. The first rail tells whether it has left in order.
        let is_unused = link.is_rail && !link.has_received && is_eof;
        match link.stage {
            LinkStage::Up if link.goodbye && endpoint.is_leaving(flow.id()) => {
                link.stage = LinkStage::Draining;
                return LinkFate::Quiet;
            }
            LinkStage::Up if link.goodbye || endpoint.is_let_go() || is_unused => {
                // The peer has left in order, so it does not need what waits.
                let rest = endpoint.remove_rail(flow.id());
                self.complete(
                    endpoint,
                    rest.unwrap_or_else(|| endpoint.end(true)),
                    SUCCESS,
                );
            }
            // The end of its stream was confirmed: it cannot report this process.
            LinkStage::Up if is_eof => self.report(endpoint, why),
            LinkStage::Up => self.lose(endpoint, why),
            LinkStage::Connecting | LinkStage::Offered | LinkStage::Accepted => {
                let broken = !matches!(end, LinkEnd::Failed(_));
                if endpoint.attempt_failed(flow.id(), broken) {
                    self.connect_or_lose(endpoint, why);
                }
            }
            LinkStage::Answered => {
                if endpoint.answer_failed(flow.id()) {
                    self.connect_or_lose(endpoint, why);
                }
            }
            LinkStage::Unnamed | LinkStage::Draining => {}
        }
        LinkFate::Over
    }

    /// Tells Open MPI, once, that a peer is lost.
    pub(super) fn report(&self, endpoint: &Arc<BtlEndpoint>, why: &str) {
        if endpoint.is_over() {
            return; // another rail has told
        }
        let waiting = endpoint.end(false);
        // Their requests fail with the report.
        self.gets.forget(endpoint);
        if self.survives_losses() && self.has_failed(endpoint) {
            // Open MPI has ended the requests that these fragments belong to, and uses their memory for others: no callback.
            waiting.into_iter().for_each(FragRef::abandon);
            return;
        }
        // With ULFM, requests are to fail before Open MPI ends them. Otherwise the report ends the job, and says why.
        if self.survives_losses() {
            self.complete(endpoint, waiting, UNREACHABLE);
            self.tell_loss(endpoint, why);
        } else {
            self.tell_loss(endpoint, why);
            self.complete(endpoint, waiting, UNREACHABLE);
        }
    }

    fn tell_loss(&self, endpoint: &BtlEndpoint, why: &str) {
        // SAFETY: the text lives until the function returns; the proc is Open MPI's own pointer, or null. No lock is held.
        unsafe {
            let why = (why.as_ptr().cast(), why.len());
            (self.upcalls.lost)(endpoint.proc(), endpoint.name.0, why.0, why.1);
        }
    }
}
