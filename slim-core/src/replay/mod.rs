//! A copy of the bytes sent that the peer is not yet known to hold.
//!
//! Bytes are named by their place in the flow's sequence space, counted from 0. The buffer holds
//! `[start, end)`: `end` is how far we have sent, `start` how far the peer's kernel is known to
//! have received. A resume may ask for any byte in between.
//!
//! It may also ask for the one before `start`: a FIN that our side never sent takes the sequence number
//! of a byte that is on its way, and when the peer's kernel acknowledges the one, ours takes that for the
//! other. One FIN at most is believed on a connection, so one byte more than acknowledged is kept.
//!
//! ```text
//!      base      start                           end
//!       │          │                              │
//!       ▼          ▼                              ▼
//!       ┌──────────────┬──────────────┬──────────────┐
//!       │ (trimmed)▒▒▒▒│▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒        │   chunks of CHUNK bytes
//!       └──────────────┴──────────────┴──────────────┘
//! ```
//!
//! It costs one copy per byte sent, and no allocation while the last chunk has room or the
//! process-wide pool has a chunk to give.

mod pool;

use std::collections::VecDeque;
use std::fmt;

pub use pool::{CHUNK, POOL_CHUNKS};

use pool::{Chunk, POOL};

/// The replay buffer of one direction of one flow. See the [module](self).
#[derive(Default)]
pub struct Replay {
    /// Sequence number of the first byte of the first chunk; without chunks it means nothing.
    base: u64,
    start: u64,
    end: u64,
    /// The byte before `start`, unless it was skipped.
    before: Option<u8>,
    /// All full but the last.
    chunks: VecDeque<Chunk>,
}

/// A sequence number was asked for that the buffer does not hold. To go on would leave a gap in
/// the stream: the flow has to end instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// What was asked for.
    pub seq: u64,
    /// The first byte held.
    pub start: u64,
    /// One past the last byte sent.
    pub end: u64,
}

impl fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "byte {} is not in the replay buffer [{}, {})",
            self.seq, self.start, self.end
        )
    }
}

impl std::error::Error for OutOfRange {}

impl Replay {
    /// Nothing sent yet.
    pub const fn new() -> Self {
        Replay {
            base: 0,
            start: 0,
            end: 0,
            before: None,
            chunks: VecDeque::new(),
        }
    }

    /// Sequence number of the first byte held.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes sent in all; one past the last byte held.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Bytes sent: keeps a copy and advances [`end`](Replay::end).
    pub fn push(&mut self, mut bytes: &[u8]) {
        if self.chunks.is_empty() {
            self.base = self.end;
        }
        while !bytes.is_empty() {
            let at = self.offset(self.end);
            if at == self.chunks.len() * CHUNK {
                self.chunks.push_back(POOL.take());
            }
            let last = self
                .chunks
                .back_mut()
                .expect("a chunk with room was just made sure of");
            let room = &mut last[at % CHUNK..];
            let n = room.len().min(bytes.len());
            room[..n].copy_from_slice(&bytes[..n]);
            self.end += n as u64;
            bytes = &bytes[n..];
        }
    }

    /// Bytes up to `end` were sent and are acknowledged already, so no copy is needed: everything
    /// held is forgotten, and the buffer is empty at `end`; the byte before it is not there.
    ///
    /// `end` is never less than what was sent before: that would take bytes back.
    pub fn skip_to(&mut self, end: u64) {
        debug_assert!(end >= self.end, "skip_to({end}) behind {}", self.end);
        self.before = None;
        self.end = self.end.max(end);
        self.start = self.end;
        self.release(self.chunks.len());
    }

    /// The peer's kernel holds everything before `acked`: forgets it. Not moving, or moving
    /// backwards, does nothing.
    ///
    /// `acked` beyond [`end`](Replay::end) would mean that somebody acknowledged what was never
    /// sent; it is a bug in the caller, and counts as `end`.
    pub fn trim(&mut self, acked: u64) {
        debug_assert!(acked <= self.end, "trim({acked}) beyond {}", self.end);
        let acked = acked.min(self.end);
        if acked <= self.start {
            return;
        }
        let last = self.offset(acked - 1);
        self.before = Some(self.chunks[last / CHUNK][last % CHUNK]);
        self.start = acked;
        let unused = if self.is_empty() {
            self.chunks.len()
        } else {
            self.offset(acked) / CHUNK
        };
        self.release(unused);
    }

    /// The bytes from `seq` on that lie in one piece: `None` at [`end`](Replay::end), where nothing
    /// is left to replay. The one before [`start`](Replay::start) is still there too.
    ///
    /// # Errors
    /// [`OutOfRange`] if `seq` was trimmed already or was never sent.
    pub fn chunk_at(&self, seq: u64) -> Result<Option<&[u8]>, OutOfRange> {
        if let Some(before) = &self.before
            && seq + 1 == self.start
        {
            return Ok(Some(std::slice::from_ref(before)));
        }
        if seq < self.start || seq > self.end {
            return Err(OutOfRange {
                seq,
                start: self.start,
                end: self.end,
            });
        }
        if seq == self.end {
            return Ok(None);
        }
        let (from, to) = (self.offset(seq), self.offset(self.end));
        let chunk = &self.chunks[from / CHUNK];
        let left_in_chunk = CHUNK - from % CHUNK;
        Ok(Some(&chunk[from % CHUNK..][..left_in_chunk.min(to - from)]))
    }

    /// Place of `seq` counted from the start of the first chunk.
    fn offset(&self, seq: u64) -> usize {
        (seq - self.base) as usize
    }

    /// Gives the first `count` chunks back.
    fn release(&mut self, count: usize) {
        if count > 0 {
            self.base += (count * CHUNK) as u64;
            POOL.give(self.chunks.drain(..count));
        }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        POOL.give(self.chunks.drain(..));
    }
}

impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Replay[{}, {})", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Byte `seq` of every stream in these tests: no period that divides the chunk size.
    fn byte(seq: u64) -> u8 {
        (seq % 251) as u8
    }

    fn bytes(from: u64, len: u64) -> Vec<u8> {
        (from..from + len).map(byte).collect()
    }

    fn held_from(replay: &Replay, mut seq: u64) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(piece) = replay.chunk_at(seq).unwrap() {
            assert!(!piece.is_empty());
            all.extend(piece);
            seq += piece.len() as u64;
        }
        all
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push(u64),
        Skip(u64),
        /// Thousandths of what is held.
        Trim(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let chunk = CHUNK as u64;
        prop_oneof![
            4 => (0..64u64).prop_map(Op::Push),
            2 => (0..3 * chunk).prop_map(Op::Push),
            1 => prop_oneof![Just(chunk - 1), Just(chunk), Just(chunk + 1)].prop_map(Op::Push),
            1 => (0..2 * chunk).prop_map(Op::Skip),
            3 => (0..=1000u64).prop_map(Op::Trim),
            1 => Just(Op::Trim(1000)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn holds_what_was_sent_and_not_trimmed(
            ops in proptest::collection::vec(op(), 1..30),
            probe in 0..=1000u64,
        ) {
            let mut replay = Replay::new();
            let (mut start, mut end) = (0u64, 0u64);
            // Whether the byte before `start` is there.
            let mut kept = false;
            for op in ops {
                match op {
                    Op::Push(n) => {
                        replay.push(&bytes(end, n));
                        end += n;
                    }
                    Op::Skip(n) => {
                        end += n;
                        start = end;
                        kept = false;
                        replay.skip_to(end);
                    }
                    Op::Trim(part) => {
                        let by = (end - start) * part / 1000;
                        start += by;
                        kept |= by > 0;
                        replay.trim(start);
                    }
                }
                prop_assert_eq!((replay.start(), replay.end()), (start, end));
                prop_assert_eq!(replay.len() as u64, end - start);
                let seq = start + (end - start) * probe / 1000;
                prop_assert_eq!(held_from(&replay, seq), bytes(seq, end - seq));
                if kept {
                    prop_assert_eq!(held_from(&replay, start - 1), bytes(start - 1, end + 1 - start));
                } else {
                    prop_assert!(start == 0 || replay.chunk_at(start - 1).is_err());
                }
                prop_assert!(start < 2 || replay.chunk_at(start - 2).is_err());
                // Bounded by what is in flight: two chunks may be partly used.
                prop_assert!(replay.chunks.len() <= replay.len() / CHUNK + 2);
                prop_assert!(!replay.is_empty() || replay.chunks.is_empty());
            }
        }
    }

    #[test]
    fn asking_for_what_is_not_there_is_an_error_and_the_end_is_not() {
        let mut replay = Replay::new();
        replay.push(&bytes(0, 100));
        replay.trim(40);
        let error = |seq| OutOfRange {
            seq,
            start: 40,
            end: 100,
        };
        assert_eq!(replay.chunk_at(38), Err(error(38)));
        assert_eq!(replay.chunk_at(39), Ok(Some(&bytes(39, 1)[..])));
        assert_eq!(replay.chunk_at(101), Err(error(101)));
        assert_eq!(replay.chunk_at(100), Ok(None));
        assert_eq!(replay.chunk_at(40), Ok(Some(&bytes(40, 60)[..])));
    }

    #[test]
    fn a_late_watermark_changes_nothing() {
        let mut replay = Replay::new();
        replay.push(&bytes(0, 100));
        replay.trim(80);
        replay.trim(10);
        assert_eq!((replay.start(), replay.end()), (80, 100));
    }

    #[test]
    fn an_idle_flow_holds_no_chunk() {
        let mut replay = Replay::new();
        replay.push(&bytes(0, 1));
        assert_eq!(replay.chunks.len(), 1);
        replay.trim(1);
        assert_eq!(replay.chunks.len(), 0);
        replay.push(&bytes(1, 10));
        assert_eq!(held_from(&replay, 1), bytes(1, 10));
    }
}
