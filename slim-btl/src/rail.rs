//! Rails: the flows to one peer, one for each pair of lines, and which of them a fragment takes.
//!
//! The first rail carries all frames whose order matters. Data fragments of long messages (`ob1`'s FRAG) name their place in the
//! message, so they may take any rail: each takes the next one when its kernel has room. So a rail's share follows its throughput,
//! and a rail that is suspended gets none.

mod standstill;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use slim::{Carrier, Flow, StreamState};

use standstill::RailAcks;

use crate::backlog::{Backlog, FRAME_SLICES, Outgoing, send_pieces, total};
use crate::frag::FragRef;
use crate::hdr::{FrameHeader, FrameKind};

/// Limit of bytes that a kernel takes for one of several rails and has not sent yet. It bounds the difference between the rails at
/// the end of a message: about 2 ms on a line of 1 Gb/s.
const UNSENT: u32 = 256 << 10;

/// Frames up to this size are copied when they wait for a later system call, so that the sender need not wait for it.
const COPIED: usize = 4096 + 128;
/// Frames that wait are sent as soon as there are so many bytes of them.
const LONG: usize = 32 << 10;
/// Limit of waiting bytes beyond which nothing more is copied.
const HELD: usize = 256 << 10;

/// One flow to a peer, with the frames that wait for it.
#[derive(Debug)]
pub(crate) struct Rail {
    pub(crate) flow: Arc<Flow>,
    /// The peer's line that the rail was made for.
    pub(crate) line: u8,
    pub(crate) backlog: Backlog,
    /// The flow is protected, or is plain for good.
    settled: bool,
    /// The round of progress before the last send.
    round: u64,
    /// Bytes were sent that are not known to be acknowledged.
    owes: bool,
    /// This end has finished the flow: nothing more is sent.
    finished: bool,
    acks: RailAcks,
}

/// Result of offering a fragment to a rail.
#[derive(Debug)]
pub(crate) enum RailAnswer {
    /// The kernel has all of it.
    Sent(FragRef),
    /// The kernel has a part of it; the rail keeps the rest.
    Kept,
    /// The rail takes nothing now.
    Refused(FragRef),
}

impl Rail {
    pub(crate) fn new(flow: &Arc<Flow>, line: u8, backlog: Backlog) -> Self {
        Self {
            flow: flow.clone(),
            line,
            backlog,
            settled: false,
            round: 0,
            owes: true,
            finished: false,
            acks: RailAcks::default(),
        }
    }

    /// Whether the flow is protected, or is plain for good. Until then a silent line could hold fragments back for seconds.
    fn is_settled(&mut self) -> bool {
        self.settled = self.settled
            || matches!(
                self.flow.state(),
                StreamState::Protected | StreamState::Plain
            );
        self.settled
    }

    /// Sends a sealed fragment now, as far as the kernel takes it, unless something waits before it.
    fn offer(&mut self, mut frag: FragRef, done: &mut Vec<FragRef>) -> RailAnswer {
        if !self.backlog.is_empty() && !self.backlog.is_blocked() {
            self.flush(done);
        }
        if !self.backlog.is_empty() {
            return RailAnswer::Refused(frag);
        }
        self.owes = true;
        let pieces = frag.pieces();
        let total = total(&pieces);
        match send_pieces(&self.flow, &pieces, total) {
            0 => RailAnswer::Refused(frag),
            sent if sent == total => RailAnswer::Sent(frag),
            sent => {
                frag.owe_callback();
                self.backlog.put_partial(Outgoing::Fragment(frag), sent);
                RailAnswer::Kept
            }
        }
    }

    /// Whether a send joins earlier ones: it is not the first one since the process last made progress (`round`), or frames wait.
    fn joins(&mut self, round: u64) -> bool {
        let before = std::mem::replace(&mut self.round, round);
        before == round || !self.backlog.is_empty()
    }

    /// Sends a sealed fragment, or keeps it for a later system call. Returns the fragment if it is to be completed now.
    pub(crate) fn send(
        &mut self,
        mut frag: FragRef,
        round: u64,
        done: &mut Vec<FragRef>,
    ) -> Option<FragRef> {
        if !self.joins(round) {
            match self.offer(frag, done) {
                RailAnswer::Sent(frag) => return Some(frag),
                RailAnswer::Kept => return None,
                RailAnswer::Refused(refused) => frag = refused,
            }
        }
        let pieces = frag.pieces();
        let copies = total(&pieces) <= COPIED && self.backlog.bytes() <= HELD;
        if copies {
            self.backlog.copy(&pieces);
        } else {
            frag.owe_callback();
        }
        let left = match copies {
            true => Some(frag),
            false => {
                self.backlog.push(Outgoing::Fragment(frag));
                None
            }
        };
        self.flush_if_long(done);
        left
    }

    /// Sends the pieces of a frame, or keeps a copy of the rest. Returns false if too much waits already.
    pub(crate) fn send_copied(
        &mut self,
        pieces: &[&[u8]; FRAME_SLICES],
        round: u64,
        done: &mut Vec<FragRef>,
    ) -> bool {
        let total = total(pieces);
        if self.joins(round) {
            if self.backlog.bytes() > HELD {
                return false;
            }
            self.backlog.copy(pieces);
            self.flush_if_long(done);
            return true;
        }
        self.owes = true;
        let sent = send_pieces(&self.flow, pieces, total);
        if sent == 0 {
            self.backlog.copy(pieces);
            self.flush(done);
        } else if sent < total {
            let frame = Outgoing::Bytes(pieces.concat());
            self.backlog.put_partial(frame, sent);
        }
        true
    }

    fn flush_if_long(&mut self, done: &mut Vec<FragRef>) {
        if self.backlog.bytes() >= LONG && !self.backlog.is_blocked() {
            self.flush(done);
        }
    }

    /// Whether frames wait that the kernel could take.
    pub(crate) fn is_deferring(&self) -> bool {
        !self.backlog.is_empty() && !self.backlog.is_blocked()
    }

    pub(crate) fn flush(&mut self, done: &mut Vec<FragRef>) {
        self.owes |= !self.backlog.is_empty();
        self.backlog.flush(&self.flow, done);
    }

    pub(crate) fn push_goodbye(&mut self) {
        let goodbye = FrameHeader::control(FrameKind::Goodbye).encode();
        self.backlog.push(Outgoing::Bytes(goodbye.into()));
    }

    /// Whether the peer has all that was sent on this finished rail, or will never get it.
    fn is_over(&self) -> bool {
        let failed = matches!(self.flow.state(), StreamState::Failed(_));
        self.finished && (!self.owes || failed)
    }

    /// The peer's address that the flow's present connection goes to.
    fn remote_ip(&self) -> Option<IpAddr> {
        Some(self.flow.connection()?.1.ip())
    }
}

/// The rails of a peer, and the fragments that may take any of them.
#[derive(Debug, Default)]
pub(crate) struct Rails {
    /// The first one carries frames whose order matters. Empty until the first flow is accepted.
    all: Vec<Rail>,
    /// Fragments that no rail has taken yet.
    shared: VecDeque<FragRef>,
    /// The rail that the next shared fragment is offered to first.
    turn: usize,
    /// Rails that get no more fragments; kept until all that they have sent is acknowledged.
    leaving: Vec<Rail>,
}

impl Rails {
    pub(crate) fn first(&mut self) -> Option<&mut Rail> {
        self.all.first_mut()
    }

    /// Adds a rail.
    pub(crate) fn add(&mut self, rail: Rail) {
        self.all.push(rail);
        if self.are_several() {
            let flows = self.all.iter().map(|rail| &rail.flow);
            flows.for_each(|flow| flow.limit_unsent(UNSENT));
        }
    }

    /// Whether fragments are spread over several rails.
    pub(crate) fn are_several(&self) -> bool {
        self.all.len() > 1
    }

    /// Takes a sealed fragment that may take any rail, and sends what the kernel takes. Appends sent fragments to `done`.
    pub(crate) fn share(&mut self, mut frag: FragRef, done: &mut Vec<FragRef>) {
        frag.owe_callback();
        self.shared.push_back(frag);
        self.spread(done);
    }

    /// Offers the shared fragments to the rails in turn, until each has refused.
    fn spread(&mut self, done: &mut Vec<FragRef>) {
        let mut refused = 0;
        while refused < self.all.len()
            && let Some(frag) = self.shared.pop_front()
        {
            self.turn = (self.turn + 1) % self.all.len();
            let rail = &mut self.all[self.turn];
            // The first rail carries the other frames, too, so it need not wait.
            let answer = match self.turn == 0 || rail.is_settled() {
                true => rail.offer(frag, done),
                false => RailAnswer::Refused(frag),
            };
            match answer {
                RailAnswer::Sent(frag) => {
                    done.push(frag);
                    refused = 0;
                }
                RailAnswer::Kept => refused += 1,
                RailAnswer::Refused(frag) => {
                    self.shared.push_front(frag);
                    refused += 1;
                }
            }
        }
    }

    /// Sends as much of what waits as the kernel takes. Appends sent fragments to `done`.
    pub(crate) fn flush(&mut self, done: &mut Vec<FragRef>) {
        for rail in self.all.iter_mut().chain(&mut self.leaving) {
            rail.flush(done);
        }
        self.spread(done);
        for rail in &mut self.leaving {
            if rail.backlog.is_empty() && !std::mem::replace(&mut rail.finished, true) {
                // Progress receives the rest, and closes the flow at the end of the peer's stream.
                let _ = rail.flow.finish();
            }
        }
    }

    /// What carries the rails, where that is no socket.
    pub(crate) fn carriers(&self) -> Vec<Arc<dyn Carrier>> {
        self.all
            .iter()
            .filter_map(|rail| rail.flow.carrier())
            .collect()
    }

    fn rails(&self) -> impl Iterator<Item = &Rail> {
        self.all.iter().chain(&self.leaving)
    }

    /// Whether nothing waits.
    pub(crate) fn are_flushed(&self) -> bool {
        self.shared.is_empty() && self.rails().all(|rail| rail.backlog.is_empty())
    }

    /// Ends one rail in order: it gets no more fragments, and its last frame is a goodbye. The first rail stays.
    pub(crate) fn retire(&mut self, flow: u64) {
        let at = self.all.iter().skip(1).position(|r| r.flow.id() == flow);
        if let Some(at) = at {
            let mut rail = self.all.remove(at + 1);
            rail.push_goodbye();
            self.leaving.push(rail);
        }
    }

    /// Whether frames wait on this rail, which gets no more.
    pub(crate) fn is_leaving(&self, flow: u64) -> bool {
        let mut left = self.leaving.iter().filter(|rail| !rail.backlog.is_empty());
        left.any(|rail| rail.flow.id() == flow)
    }

    /// Removes a rail that has ended; returns its fragments that were not sent. `None`: it is the first one, which stays.
    pub(crate) fn remove(&mut self, flow: u64) -> Option<Vec<FragRef>> {
        if self.all.first().is_some_and(|rail| rail.flow.id() == flow) {
            return None;
        }
        let mut fragments = Vec::new();
        for rails in [&mut self.all, &mut self.leaving] {
            for mut rail in rails.extract_if(.., |rail| rail.flow.id() == flow) {
                fragments.extend(rail.backlog.take_fragments());
            }
        }
        Some(fragments)
    }

    /// Ends all rails in order. Shared fragments go by the first one.
    pub(crate) fn say_goodbye(&mut self) {
        if let Some(first) = self.all.first_mut() {
            let shared = self.shared.drain(..).map(Outgoing::Fragment);
            shared.for_each(|frame| first.backlog.push(frame));
        }
        self.all.iter_mut().for_each(Rail::push_goodbye);
    }

    /// Removes everything that waits; returns the fragments.
    pub(crate) fn take_fragments(&mut self) -> Vec<FragRef> {
        let mut all: Vec<FragRef> = self.shared.drain(..).collect();
        for rail in self.all.iter_mut().chain(&mut self.leaving) {
            all.extend(rail.backlog.take_fragments());
        }
        all
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// The flows that the rails use.
    pub(crate) fn flows(&self) -> Vec<Arc<Flow>> {
        self.all.iter().map(|rail| rail.flow.clone()).collect()
    }

    /// The lines of the rails as they were made, and the lines that their present connections use.
    pub(crate) fn places(&self, line_of: impl Fn(IpAddr) -> Option<u8>) -> Vec<RailPlace> {
        let place = |rail: &Rail| RailPlace {
            flow: rail.flow.id(),
            home: rail.line,
            present: rail.remote_ip().and_then(&line_of),
        };
        self.all.iter().map(place).collect()
    }
}

/// Where a rail is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RailPlace {
    pub(crate) flow: u64,
    /// The line that the rail was made for.
    pub(crate) home: u8,
    /// The line of its present connection; `None` while it has none, or if the line is unknown.
    pub(crate) present: Option<u8>,
}

/// The changes that give each line a rail again after a rail was resumed over another line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RailPlan {
    /// Lines to connect to.
    pub(crate) connect: Vec<u8>,
    /// Flows of rails that are superfluous.
    pub(crate) retire: Vec<u64>,
}

/// Plans from the lines to use, the rails (the first one first), and the lines that are being connected to.
pub(crate) fn plan(lines: &[u8], rails: &[RailPlace], connecting: &[u8]) -> RailPlan {
    // A rail without a connection counts for its own line: that line may have failed, and the rail is being resumed.
    let on = |rail: &RailPlace| rail.present.unwrap_or(rail.home);
    let carried = |line: u8| rails.iter().any(|rail| on(rail) == line);
    let missing = |line: &&u8| !carried(**line) && !connecting.contains(line);
    let moved = rails.iter().skip(1).filter(|rail| {
        let others = rails.iter().filter(|other| other.flow != rail.flow);
        // Its own line has another rail, and so has the line that it uses.
        on(rail) != rail.home
            && others.clone().any(|other| on(other) == rail.home)
            && others.clone().any(|other| on(other) == on(rail))
    });
    RailPlan {
        connect: lines.iter().filter(missing).copied().collect(),
        // One at a time: each removal changes what is superfluous.
        retire: moved.map(|rail| rail.flow).take(1).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(flow: u64, home: u8, present: impl Into<Option<u8>>) -> RailPlace {
        RailPlace {
            flow,
            home,
            present: present.into(),
        }
    }

    #[test]
    fn each_line_gets_one_rail() {
        let plan = |rails: &[_], connecting: &[u8]| plan(&[0, 1, 2], rails, connecting);
        assert_eq!(plan(&[rail(1, 1, 1)], &[]).connect, [0, 2]);
        assert_eq!(plan(&[rail(1, 1, 1)], &[2]).connect, [0]);
        let all = [rail(1, 1, 1), rail(2, 0, 0), rail(3, 2, None)];
        assert_eq!(plan(&all, &[]), RailPlan::default());
    }

    #[test]
    fn a_rail_that_was_resumed_over_another_line_is_replaced() {
        let lines = [0, 1];
        let moved = [rail(1, 0, 0), rail(2, 1, 0)];
        let first = plan(&lines, &moved, &[]);
        assert_eq!((first.connect, first.retire), (vec![1], vec![]));
        let replaced = [rail(1, 0, 0), rail(2, 1, 0), rail(3, 1, 1)];
        let then = plan(&lines, &replaced, &[]);
        assert_eq!((then.connect, then.retire), (vec![], vec![2]));
    }

    #[test]
    fn the_first_rail_is_never_retired() {
        let moved = [rail(1, 0, 1), rail(2, 1, 1), rail(3, 0, 0)];
        assert_eq!(plan(&[0, 1], &moved, &[]), RailPlan::default());
    }
}
