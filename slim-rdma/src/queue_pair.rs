//! One queue pair as a transport: bytes in both directions, in order.
//!
//! ```text
//!   HalfPair ── address(), to the peer ──► connect ──► QueuePair ── suspend ──► recv reads the rest ──► release
//! ```
//!
//! A queue pair is driven by its caller: nothing happens between two calls. [`QueuePair::progress`] takes completions and sends credits
//! that are due; it is called when the adapter has reported a completion, and by the data calls themselves.

use std::io::IoSlice;

use crate::address::{PairAddress, QpNumber, RemoteKey};
use crate::immediate::Immediate;
use crate::pieces::Pieces;
use crate::reads::{ReadOver, ReadQueue};
use crate::regions::PairRegions;
use crate::send_queue::SendQueue;
use crate::sizes::{PairSizes, RingShape};
use crate::verbs::{
    AdapterEvent, Completed, LocalKey, Payload, ReadWork, Verbs, VerbsError, WorkError, WriteWork,
};
use crate::window::{ReceiveWindow, SendWindow, Violation};

/// Most bytes in several places that go by value.
const GATHERED: usize = 256;

/// Why a queue pair carries no more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// Posted work has failed.
    Work(WorkError),
    /// The adapter refuses more work.
    Refused(VerbsError),
    /// The adapter has reported it.
    Event(AdapterEvent),
    /// The adapter has reported the completion of other work than the next. A completion was lost, so the place of the bytes of this one
    /// is not known.
    WrongCompletion,
    /// The peer does not keep to the protocol.
    Violation(Violation),
    /// This side has suspended it.
    Suspended,
}

/// Why a data call has moved no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairError {
    /// It can move some later.
    WouldBlock,
    /// This side has ended its direction.
    Ended,
    /// The queue pair is broken. How many bytes the peer has recorded is only known after a resume.
    Broken(Break),
}

/// A connected queue pair. To be given up by [`release`](Self::release): dropping it leaves its objects to the adapter.
#[derive(Debug)]
pub struct QueuePair {
    number: QpNumber,
    /// Global identifiers of the own port and of the peer's.
    ports: [[u8; 16]; 2],
    sizes: PairSizes,
    regions: PairRegions,
    /// The peer's ring.
    peer: RemoteKey,
    peer_shape: RingShape,
    work: SendQueue,
    reads: ReadQueue,
    outgoing: SendWindow,
    incoming: ReceiveWindow,
    /// Number of the receive that must complete next.
    expected: u64,
    /// This direction ends as soon as a message can say so.
    ends: bool,
    suspended: bool,
    broken: Option<Break>,
}

impl QueuePair {
    /// A queue pair that has just been connected. Its receives are posted.
    pub(crate) fn new(
        own: &PairAddress,
        sizes: PairSizes,
        regions: PairRegions,
        peer: &PairAddress,
    ) -> Self {
        QueuePair {
            number: own.number,
            ports: [own.gid, peer.gid],
            sizes,
            regions,
            peer: peer.ring,
            peer_shape: peer.shape,
            work: SendQueue::new(sizes.depth, sizes.staging),
            reads: ReadQueue::default(),
            outgoing: SendWindow::new(peer.shape),
            incoming: ReceiveWindow::new(sizes.shape),
            expected: 0,
            ends: false,
            suspended: false,
            broken: None,
        }
    }

    /// Its number at the adapter.
    pub fn number(&self) -> QpNumber {
        self.number
    }

    /// Global identifiers of its port and of the peer's.
    pub fn ports(&self) -> [[u8; 16]; 2] {
        self.ports
    }

    /// Bytes sent on this queue pair.
    pub fn sent(&self) -> u64 {
        self.outgoing.sent()
    }

    /// Bytes that the peer's software has recorded, as far as it has told: they survive this queue pair. Never counts what only the
    /// adapters have completed.
    pub fn recorded_by_peer(&self) -> u64 {
        self.outgoing.recorded()
    }

    /// Bytes that this side has recorded. Final once the queue pair is [suspended](Self::suspend).
    pub fn received(&self) -> u64 {
        self.incoming.recorded()
    }

    /// Bytes that [`recv`](Self::recv) returns without waiting.
    pub fn unread(&self) -> u64 {
        self.incoming.unread()
    }

    /// Whether the peer has ended its direction. Bytes may be unread.
    pub fn peer_has_ended(&self) -> bool {
        self.incoming.has_ended()
    }

    /// Why it carries no more bytes.
    pub fn broken(&self) -> Option<Break> {
        self.broken
    }

    /// Whether bytes are recorded of which the peer does not know that yet.
    pub fn owes_count(&self) -> bool {
        self.broken.is_none() && self.incoming.owes_count()
    }

    /// Whether [`tell_count`](Self::tell_count) has something to tell, and a slot for the message.
    pub fn can_tell_count(&self) -> bool {
        self.owes_count() && self.can_post(false)
    }

    /// Sends as many bytes as there is room for. They are copied, or in the peer's ring.
    ///
    /// # Errors
    /// None were sent.
    pub fn send<V: Verbs>(&mut self, verbs: &mut V, data: &[u8]) -> Result<usize, PairError> {
        self.send_pieces(verbs, &mut Pieces::new(&[IoSlice::new(data)]))
    }

    /// [`send`](Self::send) for bytes in several places, which share messages. What is sent is taken out of `data`.
    ///
    /// # Errors
    /// None were sent.
    pub fn send_pieces<V: Verbs>(
        &mut self,
        verbs: &mut V,
        data: &mut Pieces<'_>,
    ) -> Result<usize, PairError> {
        if self.ends {
            return Err(PairError::Ended);
        }
        let all = data.left();
        let mut looked = false;
        while data.left() > 0 {
            let taken = all - data.left();
            if let Some(why) = self.broken {
                return if taken > 0 {
                    Ok(taken)
                } else {
                    Err(PairError::Broken(why))
                };
            }
            let len = self.next_len(data.left());
            if len > 0 {
                self.post_bytes(verbs, data, len);
            } else if !looked {
                looked = true;
                self.progress(verbs);
            } else if taken == 0 {
                return Err(PairError::WouldBlock);
            } else {
                break;
            }
        }
        Ok(all - data.left())
    }

    /// Whether [`send`](Self::send) can take bytes, or fails.
    pub fn can_send(&self) -> bool {
        self.broken.is_some() || self.next_len(1) > 0
    }

    /// Ends this direction. The peer learns of it behind all bytes that were sent.
    pub fn end<V: Verbs>(&mut self, verbs: &mut V) {
        self.ends = true;
        self.settle(verbs);
    }

    /// Takes bytes out of the ring; 0 is the end of the peer's direction. Works after a break, too, until the ring is empty.
    ///
    /// # Errors
    /// There are none.
    pub fn recv<V: Verbs>(&mut self, verbs: &mut V, into: &mut [u8]) -> Result<usize, PairError> {
        if self.incoming.unread() == 0 {
            self.progress(verbs);
        }
        let mut n = 0;
        while n < into.len() && self.incoming.unread() > 0 {
            let at = self.incoming.consumed() % self.sizes.shape.ring();
            let piece = (self.sizes.shape.ring() - at).min(self.incoming.unread());
            let piece = piece.min((into.len() - n) as u64) as usize;
            verbs.read(self.regions.ring, at as usize, &mut into[n..n + piece]);
            self.incoming.consume(piece as u64);
            n += piece;
        }
        if n > 0 {
            self.settle(verbs);
            return Ok(n);
        }
        match self.broken {
            _ if into.is_empty() || self.incoming.has_ended() => Ok(0),
            Some(why) => Err(PairError::Broken(why)),
            None => Err(PairError::WouldBlock),
        }
    }

    /// Takes all completions that have come, and sends what is due. Returns whether there were any.
    pub fn progress<V: Verbs>(&mut self, verbs: &mut V) -> bool {
        let found = self.take_completions(verbs);
        self.settle(verbs);
        found
    }

    /// Prepares to wait: has the adapter report the next completion. Returns false if there is no need to wait, because something has come
    /// meanwhile, or the queue pair is broken.
    pub fn arm<V: Verbs>(&mut self, verbs: &mut V) -> bool {
        if self.broken.is_none()
            && let Err(e) = verbs.arm(self.number)
        {
            self.breaks(Break::Refused(e));
        }
        // A completion that came before causes no report.
        let found = self.progress(verbs);
        self.broken.is_none() && !found
    }

    /// Number of the peer's messages that were recorded, also those without bytes. The first one shows that the peer is connected to this
    /// queue pair.
    pub fn heard(&self) -> u64 {
        self.expected
    }

    /// Bytes that this side has recorded, as far as it has told the peer.
    pub fn told(&self) -> u64 {
        self.incoming.told_count()
    }

    /// Tells the peer how many bytes this side has recorded, unless it knows. To be called when nothing was sent for a while: the peer
    /// keeps copies until it knows. While there is no slot for the message, nothing is told, and the count [is owed](Self::owes_count) still.
    pub fn tell_count<V: Verbs>(&mut self, verbs: &mut V) {
        if self.can_tell_count() {
            self.post_credit(verbs, false);
        }
    }

    /// Sends a message without bytes, which tells the peer that this side is connected. To be called once, before anything else is sent.
    pub fn greet<V: Verbs>(&mut self, verbs: &mut V) {
        if self.can_post(false) {
            self.post_credit(verbs, false);
        }
    }

    /// Has the adapter check the path by a write of no bytes, unless a write is on its way that reports anyway. The peer's software does not notice. If
    /// the path or the peer is gone, a completion reports it after the adapter's own attempts.
    ///
    /// If the peer has not recorded all bytes, a message without bytes goes before it: its completion shows the peer if that of the last message was
    /// lost.
    pub fn ping<V: Verbs>(&mut self, verbs: &mut V) {
        if self.outgoing.recorded() < self.outgoing.sent() && self.can_post(false) {
            self.post_credit(verbs, false);
        }
        if self.broken.is_none() && !self.work.will_report() && self.work.has_place() {
            self.post_check(verbs);
        }
    }

    /// Posts a write of no bytes, which the peer's software does not notice.
    fn post_check<V: Verbs>(&mut self, verbs: &mut V) {
        let (id, _) = self.work.next(self.outgoing.sent());
        let posted = verbs.post_write(
            self.number,
            &WriteWork {
                id,
                payload: Payload::Inline(&[]),
                to: self.peer,
                immediate: None,
                signaled: true,
            },
        );
        match posted {
            Ok(()) => self.work.post(self.outgoing.sent(), true),
            Err(e) => self.breaks(Break::Refused(e)),
        }
    }

    /// Reads `len` bytes of the peer's memory into memory of this process, by an RDMA READ. [`next_read`](Self::next_read) tells when it is over. Bytes that were
    /// sent before are on their way before it.
    ///
    /// A key or an address that is not right breaks the queue pair.
    ///
    /// # Errors
    /// The read is not posted: too many are on their way, or the queue pair carries nothing more.
    pub fn read<V: Verbs>(
        &mut self,
        verbs: &mut V,
        number: u64,
        from: RemoteKey,
        into: LocalKey,
        len: u32,
    ) -> Result<(), PairError> {
        // One for the read, and one for the write behind it.
        let has_places = |pair: &Self| pair.work.has_places(2) && pair.reads.has_place();
        if !has_places(self) {
            self.progress(verbs);
        }
        if let Some(why) = self.broken {
            return Err(PairError::Broken(why));
        }
        if self.ends {
            return Err(PairError::Ended);
        }
        if !has_places(self) {
            return Err(PairError::WouldBlock);
        }
        let sent = self.outgoing.sent();
        let (id, _) = self.work.next(sent);
        let work = ReadWork {
            id,
            from,
            into,
            len,
        };
        match verbs.post_read(self.number, &work) {
            Ok(()) => {
                self.work.post(sent, true);
                self.reads.post(id, number);
                // When it completes, the read has its bytes.
                self.post_check(verbs);
                Ok(())
            }
            Err(e) => {
                let why = Break::Refused(e);
                self.breaks(why);
                Err(PairError::Broken(why))
            }
        }
    }

    /// The next [read](Self::read) that is over, among those that completed in the last [`progress`](Self::progress) or before. A read that was on
    /// its way when the queue pair broke is over when it is [suspended](Self::suspend): nothing is placed any more then.
    pub fn next_read(&mut self) -> Option<ReadOver> {
        self.reads.next_over()
    }

    /// The adapter has reported an event.
    pub fn handle_event(&mut self, event: AdapterEvent) {
        match event {
            AdapterEvent::PairFailed(number) if number != self.number => {}
            AdapterEvent::PortUp => {}
            _ => self.breaks(Break::Event(event)),
        }
    }

    /// Ends the use of this queue pair. When it returns, the number of bytes received is final, and the peer's adapter cannot write to
    /// this side's memory any more: so it must be called before the peer is told of the suspension. Returns the number.
    pub fn suspend<V: Verbs>(&mut self, verbs: &mut V) -> u64 {
        if !self.suspended {
            self.breaks(Break::Suspended);
            verbs.fail(self.number);
            // Bytes that the adapter has completed by now need not be sent again. The others are not recorded, and will be.
            self.take_completions(verbs);
            verbs.destroy(self.number);
            self.reads.fail();
            self.regions.invalidate(verbs);
            self.suspended = true;
        }
        self.incoming.recorded()
    }

    /// Gives everything back. Bytes that are unread are lost.
    pub fn release<V: Verbs>(mut self, verbs: &mut V) {
        self.suspend(verbs);
        self.regions.release(verbs);
    }

    fn breaks(&mut self, why: Break) {
        self.broken.get_or_insert(why);
    }

    fn take_completions<V: Verbs>(&mut self, verbs: &mut V) -> bool {
        let mut found = false;
        while !self.suspended
            && let Some(completion) = verbs.poll(self.number)
        {
            found = true;
            match completion.how {
                Completed::Received { len, immediate } => {
                    self.receive(
                        verbs,
                        completion.id,
                        len.into(),
                        Immediate::unpack(immediate),
                    );
                }
                Completed::Written | Completed::Read if self.work.complete(completion.id) => {
                    self.reads.complete(completion.id);
                }
                Completed::Written | Completed::Read => {
                    self.reads.doubt();
                    self.breaks(Break::WrongCompletion);
                }
                Completed::Failed(why) => {
                    self.reads.doubt();
                    self.breaks(Break::Work(why));
                }
            }
        }
        found
    }

    /// Records a message. After an error of the adapter, messages that had arrived before still count; after a wrong one, none does.
    fn receive<V: Verbs>(&mut self, verbs: &mut V, id: u64, len: u64, said: Immediate) {
        if let Some(Break::Violation(_)) = self.broken {
            return;
        }
        if id != self.expected {
            // It explains more than an adapter's error that came before. No later message is the expected one, either.
            self.broken = Some(Break::WrongCompletion);
            return;
        }
        self.expected += 1;
        let right = self.outgoing.learn(said);
        if let Err(violation) = right.and_then(|()| self.incoming.record(len, said.end)) {
            self.broken = Some(Break::Violation(violation));
            return;
        }
        // Posted again before the peer hears that the slot is free.
        let id = id + self.sizes.shape.slots();
        if self.broken.is_none()
            && let Err(e) = verbs.post_receive(self.number, id)
        {
            self.breaks(Break::Refused(e));
        }
    }

    /// Posts what is due: the end of this direction, a credit, or the last count: after the peer's end it waits for nothing else.
    fn settle<V: Verbs>(&mut self, verbs: &mut V) {
        if self.ends && !self.outgoing.has_ended() && self.can_post(false) {
            self.post_credit(verbs, true);
        }
        let slots = self.incoming.owes_slots() && self.can_post(true);
        let last = self.incoming.has_ended() && self.incoming.owes_count();
        if slots || (last || self.incoming.owes_room()) && self.can_post(false) {
            self.post_credit(verbs, false);
        }
    }

    fn can_post(&self, gives_slots: bool) -> bool {
        self.broken.is_none() && self.work.has_place() && self.outgoing.has_slot(gives_slots)
    }

    /// Length of the next message, if `left` bytes are left to send; 0 if there is no room.
    fn next_len(&self, left: usize) -> usize {
        if !self.can_post(false) {
            return 0;
        }
        let sent = self.outgoing.sent();
        // Neither ring is left at its end in the middle of a message.
        let to_end = self.peer_shape.ring() - sent % self.peer_shape.ring();
        let to_staging_end = self.sizes.staging - self.work.place(sent);
        let bounds = [
            self.outgoing.room(),
            self.work.room(sent),
            to_end,
            to_staging_end,
            self.sizes.message,
        ];
        // At most `left`, which fits.
        bounds.into_iter().fold(left as u64, u64::min) as usize
    }

    /// Posts a message of the next `len` bytes of `data`, and takes them.
    fn post_bytes<V: Verbs>(&mut self, verbs: &mut V, data: &mut Pieces<'_>, len: usize) {
        let mut gathered;
        let mut pieces = data.next(len);
        let payload = if len <= self.sizes.inline.min(GATHERED) {
            let first = pieces.next().unwrap_or_default();
            match first.len() == len {
                true => Payload::Inline(first),
                false => {
                    gathered = [0; GATHERED];
                    let mut at = 0;
                    for piece in [first].into_iter().chain(pieces) {
                        gathered[at..at + piece.len()].copy_from_slice(piece);
                        at += piece.len();
                    }
                    Payload::Inline(&gathered[..len])
                }
            }
        } else {
            let begin = self.work.place(self.outgoing.sent()) as usize;
            let mut at = begin;
            for piece in pieces {
                verbs.write(self.regions.staging, at, piece);
                at += piece.len();
            }
            Payload::Staged {
                region: self.regions.staging,
                at: begin,
                len,
            }
        };
        if self.post(verbs, payload, len as u64, false) {
            data.take(len);
        }
    }

    /// Posts a message without bytes.
    fn post_credit<V: Verbs>(&mut self, verbs: &mut V, end: bool) {
        self.post(verbs, Payload::Inline(&[]), 0, end);
    }

    /// Posts a message of `len` bytes, with the counters of this side. Returns false if the adapter refuses it.
    fn post<V: Verbs>(&mut self, verbs: &mut V, payload: Payload<'_>, len: u64, end: bool) -> bool {
        let sent = self.outgoing.sent();
        let (id, signaled) = self.work.next(sent + len);
        let work = WriteWork {
            id,
            payload,
            to: RemoteKey {
                addr: self.peer.addr + sent % self.peer_shape.ring(),
                key: self.peer.key,
            },
            immediate: Some(self.incoming.says(end).pack()),
            signaled,
        };
        match verbs.post_write(self.number, &work) {
            Ok(()) => {
                self.work.post(sent + len, signaled);
                self.outgoing.post(len, end);
                self.incoming.told();
            }
            Err(e) => self.breaks(Break::Refused(e)),
        }
        self.broken.is_none()
    }
}

#[cfg(test)]
mod break_tests;
#[cfg(test)]
mod read_tests;
#[cfg(test)]
mod tests;
