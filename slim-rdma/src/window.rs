//! What may be sent, and what is owed to the peer: counters only.
//!
//! A message takes a *slot* of the peer's receive queue, and its bytes take *room* in the peer's ring. The peer announces both back, and
//! with them the number of bytes that its software has recorded. All three travel in the [immediate data](Immediate) of every message,
//! and in messages without bytes (*credits*) if there is nothing else to send.
//!
//! Credits take slots, too. So two sides could wait for each other, each without a slot for the credit that the other needs. The last
//! slot is therefore only for a message that gives slots back. `tests/credits.rs` checks every interleaving.

use crate::immediate::{FREED_MODULUS, Immediate, RECORDED_MODULUS, SLOTS_MODULUS};
use crate::sizes::RingShape;

/// Quarters of the receive queue that are announced without waiting for bytes to send.
const OWED_SLOTS: u64 = 2;
/// 64ths of the ring that are announced without waiting for bytes to send.
const OWED_PARTS: u64 = 16;

/// The peer has announced, or sent, something impossible. What it says of its counters cannot be trusted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// It has recorded bytes that were not sent.
    Recorded,
    /// It has taken bytes out of its ring that it had not recorded.
    Freed,
    /// It has taken messages from its queue that were not sent.
    Slots,
    /// It has sent more bytes than there was room for.
    Overflow,
    /// It has sent bytes after the end of its direction.
    AfterEnd,
    /// It has sent more messages than it was told of slots.
    Flood,
}

/// The sending direction, as far as this side knows. Positions are counted from the first byte on this queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SendWindow {
    peer: RingShape,
    sent: u64,
    recorded: u64,
    freed: u64,
    messages: u64,
    taken: u64,
    ended: bool,
}

/// By how much a counter has grown since it was `known`, if `low` are its lowest bits now.
fn growth(known: u64, low: u64, modulus: u64) -> u64 {
    low.wrapping_sub(known) & (modulus - 1)
}

impl SendWindow {
    /// Nothing is sent yet to a peer of this shape.
    pub fn new(peer: RingShape) -> Self {
        SendWindow {
            peer,
            sent: 0,
            recorded: 0,
            freed: 0,
            messages: 0,
            taken: 0,
            ended: false,
        }
    }

    /// Bytes sent.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Bytes that the peer's software has recorded, as far as it has said so.
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Whether this direction has ended.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Bytes for which there is room in the peer's ring.
    pub fn room(&self) -> u64 {
        self.peer.ring() - (self.sent - self.freed)
    }

    /// Whether the peer's receive queue has a slot for a message. The last slot is for messages that give slots back.
    pub fn has_slot(&self, gives_slots: bool) -> bool {
        let reserve = u64::from(!gives_slots);
        self.messages - self.taken + reserve < self.peer.slots()
    }

    /// A message of `len` bytes has been posted. `end`: it is the last one with bytes.
    pub fn post(&mut self, len: u64, end: bool) {
        debug_assert!(len <= self.room() && !(self.ended && len > 0));
        self.sent += len;
        self.messages += 1;
        self.ended |= end;
    }

    /// The peer has announced its counters.
    ///
    /// # Errors
    /// They are impossible; nothing is learned.
    pub fn learn(&mut self, said: Immediate) -> Result<(), Violation> {
        let recorded =
            self.recorded + growth(self.recorded, said.recorded.into(), RECORDED_MODULUS);
        if recorded > self.sent {
            return Err(Violation::Recorded);
        }
        let part = self.peer.ring_part();
        let freed = self.freed + part * growth(self.freed / part, said.freed.into(), FREED_MODULUS);
        if freed > recorded {
            return Err(Violation::Freed);
        }
        let part = self.peer.slot_part();
        let taken = self.taken + part * growth(self.taken / part, said.slots.into(), SLOTS_MODULUS);
        if taken > self.messages {
            return Err(Violation::Slots);
        }
        (self.recorded, self.freed, self.taken) = (recorded, freed, taken);
        Ok(())
    }
}

/// The receiving direction.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveWindow {
    own: RingShape,
    recorded: u64,
    consumed: u64,
    messages: u64,
    ended: bool,
    /// What the peer has been told: bytes recorded, parts of the ring, parts of the queue.
    told: (u64, u64, u64),
}

impl ReceiveWindow {
    /// Nothing has arrived yet at a side of this shape.
    pub fn new(own: RingShape) -> Self {
        ReceiveWindow {
            own,
            recorded: 0,
            consumed: 0,
            messages: 0,
            ended: false,
            told: (0, 0, 0),
        }
    }

    /// Bytes recorded.
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Bytes taken out of the ring.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Bytes in the ring.
    pub fn unread(&self) -> u64 {
        self.recorded - self.consumed
    }

    /// Whether the peer has ended its direction. Bytes may be unread.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// A message of `len` bytes was taken from the receive queue, and its slot is free again. `end`: no bytes follow.
    ///
    /// # Errors
    /// The message cannot be right; nothing is recorded.
    pub fn record(&mut self, len: u64, end: bool) -> Result<(), Violation> {
        if self.unread() + len > self.own.ring() {
            return Err(Violation::Overflow);
        }
        if self.ended && len > 0 {
            return Err(Violation::AfterEnd);
        }
        // A slot is posted again before the peer hears of it. One that uses it all the same could keep this side busy for ever.
        if self.messages >= self.told.2 * self.own.slot_part() + self.own.slots() {
            return Err(Violation::Flood);
        }
        self.recorded += len;
        self.messages += 1;
        self.ended |= end;
        Ok(())
    }

    /// `n` bytes were taken out of the ring.
    pub fn consume(&mut self, n: u64) {
        debug_assert!(n <= self.unread());
        self.consumed += n;
    }

    fn parts(&self) -> (u64, u64, u64) {
        let parts = self.consumed / self.own.ring_part();
        (self.recorded, parts, self.messages / self.own.slot_part())
    }

    /// What the next message says.
    pub fn says(&self, end: bool) -> Immediate {
        let (recorded, parts, slots) = self.parts();
        // Each is reduced to less than its modulus, which fits.
        Immediate {
            end,
            slots: (slots % SLOTS_MODULUS) as u8,
            freed: (parts % FREED_MODULUS) as u8,
            recorded: (recorded % RECORDED_MODULUS) as u32,
        }
    }

    /// A message that [says](Self::says) this has been posted.
    pub fn told(&mut self) {
        self.told = self.parts();
    }

    /// Whether the peer may wait for slots: a message that gives them back is to be sent, even if it has no bytes.
    pub fn owes_slots(&self) -> bool {
        self.parts().2 - self.told.2 >= OWED_SLOTS
    }

    /// Whether the peer may wait for room.
    pub fn owes_room(&self) -> bool {
        self.parts().1 - self.told.1 >= OWED_PARTS
    }

    /// Bytes that the peer knows to be recorded.
    pub fn told_count(&self) -> u64 {
        self.told.0
    }

    /// Whether bytes are recorded of which the peer does not know that.
    pub fn owes_count(&self) -> bool {
        self.recorded > self.told.0
    }
}
