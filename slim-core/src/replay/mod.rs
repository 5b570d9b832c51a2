//! A copy of the bytes sent that the peer is not yet known to hold.
//!
//! Bytes are named by their place in the flow's sequence space, counted from 0. The buffer holds
//! `[start, end)`: `end` is how far we have sent, `start` how far the peer's kernel is known to
//! have received. A resume may ask for any byte in between.
//!
//! A resume may also ask for the byte before `start`, because of forged FINs. A FIN that our side never
//! sent takes the sequence number of a byte in flight. When the peer's kernel acknowledges the FIN, our
//! kernel takes that for the acknowledgement of the byte. A kernel believes at most one FIN on a
//! connection, so one acknowledged byte is kept.
//!
//! ```text
//!                start                           end
//!                  │                              │
//!                  ▼                              ▼
//!       ┌──────────────┬──────────────┬──────────────────┐
//!       │ (trimmed)▒▒▒▒│▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒           │
//!       └──────────────┴──────────────┴──────────────────┘
//!            full           full            last
//! ```
//!
//! The cost is one copy per byte sent, and nothing else while the last chunk has room. The first chunk is
//! small and each new one twice as large, up to [`CHUNK`], so that a flow with little in flight takes
//! little memory. Chunks of the full size come from a process-wide pool. Chunks are not zeroed first.
//!
//! Bytes in a buffer that the caller shares ([`Replay::push_shared`]) are not copied: the buffer itself becomes a chunk. It is dropped
//! when all of its bytes are trimmed.
//!
//! If memory is refused, the buffer goes on without the bytes that it should have kept. That does no harm as long as the
//! peer's kernel gets those bytes. If a resume asks for one of them, the flow ends, as it would without SLIM.

mod pool;

use std::fmt;

use bytes::Bytes;

use crate::memory::{self, OutOfMemory};

pub use pool::{CHUNK, POOL_CHUNKS};

use pool::POOL;

/// Bytes in the first chunk.
const FIRST: usize = 64;

/// The replay buffer of one direction of one flow. See the [module](self).
#[derive(Default)]
pub struct Replay {
    start: u64,
    end: u64,
    /// The chunk with room; its bytes end at `end`.
    last: Vec<u8>,
    /// The chunks before `last`.
    full: Vec<Chunk>,
    /// The byte before `start`, unless that byte was skipped.
    before: Option<u8>,
}

/// A full chunk.
struct Chunk {
    /// Sequence number of its first byte.
    from: u64,
    bytes: KeptBytes,
}

/// The bytes of a full chunk: our copy, or a buffer shared with the caller.
enum KeptBytes {
    Copied(Vec<u8>),
    Shared(Bytes),
}

impl KeptBytes {
    #[inline]
    fn get(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }

    /// The memory of a copy, which can be reused.
    fn into_copied(self) -> Option<Vec<u8>> {
        match self {
            Self::Copied(bytes) => Some(bytes),
            Self::Shared(_) => None,
        }
    }
}

impl Chunk {
    fn to(&self) -> u64 {
        self.from + self.bytes.get().len() as u64
    }
}

/// The buffer does not hold the requested sequence number. Going on would leave a gap in the
/// stream, so the flow has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// The requested sequence number.
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
    /// An empty buffer of a flow that has sent nothing.
    pub const fn new() -> Self {
        Replay {
            start: 0,
            end: 0,
            last: Vec::new(),
            full: Vec::new(),
            before: None,
        }
    }

    /// Sequence number of the first byte held.
    #[inline]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Bytes sent in all; one past the last byte held.
    #[inline]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes held.
    #[inline]
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether nothing is held.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Records bytes as sent: keeps a copy, if there is memory for it, and advances [`end`](Replay::end).
    #[inline]
    pub fn push(&mut self, bytes: &[u8]) {
        if bytes.len() <= self.room() {
            self.last.extend_from_slice(bytes);
            self.end += bytes.len() as u64;
        } else {
            self.push_across_chunks(bytes);
        }
    }

    /// Bytes that the last chunk can still take.
    #[inline]
    fn room(&self) -> usize {
        self.last.capacity() - self.last.len()
    }

    #[cold]
    #[inline(never)]
    fn push_across_chunks(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.room() == 0 && self.grow(bytes.len()).is_err() {
                return self.skip_to(self.end + bytes.len() as u64);
            }
            let (now, later) = bytes.split_at(self.room().min(bytes.len()));
            self.last.extend_from_slice(now);
            self.end += now.len() as u64;
            bytes = later;
        }
    }

    /// Appends sent bytes without a copy and advances [`end`](Replay::end). The buffer itself is kept, unless memory for its entry is
    /// refused. It is dropped when all of it is trimmed; the byte before [`start`](Replay::start) is a copy.
    pub fn push_shared(&mut self, bytes: Bytes) {
        let len = bytes.len() as u64;
        if len == 0 {
            return;
        }
        // One entry for the buffer, and one for the chunk with room, which comes before the buffer.
        if self.reserve(2).is_err() {
            return self.skip_to(self.end + len);
        }
        if !self.last.is_empty() {
            let from = self.end - self.last.len() as u64;
            let bytes = KeptBytes::Copied(std::mem::take(&mut self.last));
            self.full.push(Chunk { from, bytes });
        }
        let (from, bytes) = (self.end, KeptBytes::Shared(bytes));
        self.full.push(Chunk { from, bytes });
        self.end += len;
    }

    /// Makes room for so many chunks.
    fn reserve(&mut self, chunks: usize) -> Result<(), OutOfMemory> {
        // Most flows never have a full chunk, so the list of full chunks gets its memory here.
        if self.full.capacity() - self.full.len() < chunks {
            let more = self.full.len().max(4);
            memory::reserve(&mut self.full, more)?;
        }
        Ok(())
    }

    /// Replaces the last chunk, which is full, by a new one. That has room for `wanted` bytes, but at most [`CHUNK`].
    fn grow(&mut self, wanted: usize) -> Result<(), OutOfMemory> {
        let twice = 2 * self.last.capacity();
        let size = twice.max(wanted.next_power_of_two()).clamp(FIRST, CHUNK);
        if !self.last.is_empty() {
            self.reserve(1)?;
        }
        let full = std::mem::replace(&mut self.last, POOL.take(size)?);
        if full.is_empty() {
            POOL.give([full]);
        } else {
            let from = self.end - full.len() as u64;
            let bytes = KeptBytes::Copied(full);
            self.full.push(Chunk { from, bytes });
        }
        Ok(())
    }

    /// Records bytes up to `end` as sent, without a copy: they are acknowledged already, or memory for a copy
    /// was refused. The buffer drops all it holds and is empty at `end`; it does not have the byte before `end`.
    ///
    /// `end` is never less than [`end()`](Replay::end): that would take back bytes that were sent.
    pub fn skip_to(&mut self, end: u64) {
        debug_assert!(end >= self.end, "skip_to({end}) behind {}", self.end);
        self.before = None;
        self.end = self.end.max(end);
        self.start = self.end;
        self.last.clear();
        self.release(self.full.len());
    }

    /// Drops everything before `acked`, because the peer's kernel holds it. Does nothing if `acked` is
    /// not beyond [`start`](Replay::start). Keeps one chunk for later bytes, see [`shrink`](Replay::shrink).
    ///
    /// `acked` beyond [`end`](Replay::end) would acknowledge bytes that were never sent. That is a bug
    /// in the caller, and counts as `end`.
    pub fn trim(&mut self, acked: u64) {
        debug_assert!(acked <= self.end, "trim({acked}) beyond {}", self.end);
        let acked = acked.min(self.end);
        if acked <= self.start {
            return;
        }
        self.before = self.held(acked - 1).first().copied();
        self.start = acked;
        if self.is_empty() {
            self.last.clear();
        }
        self.release(self.full.partition_point(|c| c.to() <= acked));
    }

    /// Frees all memory if nothing is held. For a flow that will not send soon.
    pub fn shrink(&mut self) {
        if self.is_empty() {
            POOL.give([std::mem::take(&mut self.last)]);
            self.full = Vec::new();
        }
    }

    /// Resets the buffer as [`new`](Replay::new), for another flow. A small chunk stays, so that a short flow allocates nothing.
    pub fn renew(&mut self) {
        let mut last = std::mem::take(&mut self.last);
        *self = Replay::new();
        if last.capacity() <= FIRST {
            last.clear();
            self.last = last;
        } else {
            POOL.give([last]);
        }
    }

    /// The bytes from `seq` on that lie in one piece. `None` at [`end`](Replay::end), where nothing is
    /// left to replay. The byte before [`start`](Replay::start) may be requested, unless it was skipped.
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
        Ok(Some(self.held(seq)).filter(|piece| !piece.is_empty()))
    }

    /// The bytes from `seq` on that lie in one piece; `seq` is in `[start, end]`.
    fn held(&self, seq: u64) -> &[u8] {
        let before = self.full.partition_point(|c| c.to() <= seq);
        let (from, bytes) = match self.full.get(before) {
            Some(chunk) => (chunk.from, chunk.bytes.get()),
            None => (self.end - self.last.len() as u64, &self.last[..]),
        };
        &bytes[(seq - from) as usize..]
    }

    /// Gives the first `count` full chunks back to the pool.
    fn release(&mut self, count: usize) {
        if count > 0 {
            let released = self.full.drain(..count);
            POOL.give(released.filter_map(|c| c.bytes.into_copied()));
        }
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        let last = std::mem::take(&mut self.last);
        let full = self.full.drain(..);
        POOL.give(full.filter_map(|c| c.bytes.into_copied()).chain([last]));
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

    /// Byte `seq` of every stream in these tests. Their period does not divide the chunk size.
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

    /// Memory of all copies, in bytes. Shared buffers count as 0.
    fn memory(replay: &Replay) -> usize {
        let copied = |c: &Chunk| match &c.bytes {
            KeptBytes::Copied(bytes) => bytes.capacity(),
            KeptBytes::Shared(_) => 0,
        };
        replay.full.iter().map(copied).sum::<usize>() + replay.last.capacity()
    }

    fn shared(replay: &Replay) -> usize {
        let is_shared = |c: &&Chunk| matches!(c.bytes, KeptBytes::Shared(_));
        replay.full.iter().filter(is_shared).count()
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push(u64),
        Share(u64),
        Skip(u64),
        /// Thousandths of what is held.
        Trim(u64),
        Shrink,
    }

    fn op() -> impl Strategy<Value = Op> {
        let chunk = CHUNK as u64;
        prop_oneof![
            4 => (0..64u64).prop_map(Op::Push),
            2 => (0..3 * chunk).prop_map(Op::Push),
            1 => prop_oneof![Just(chunk - 1), Just(chunk), Just(chunk + 1)].prop_map(Op::Push),
            2 => (0..3 * chunk).prop_map(Op::Share),
            1 => (0..64u64).prop_map(Op::Share),
            1 => (0..2 * chunk).prop_map(Op::Skip),
            3 => (0..=1000u64).prop_map(Op::Trim),
            1 => Just(Op::Trim(1000)),
            1 => Just(Op::Shrink),
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
            // Whether the buffer has the byte before `start`.
            let mut kept = false;
            for op in ops {
                match op {
                    Op::Push(n) => {
                        replay.push(&bytes(end, n));
                        end += n;
                    }
                    Op::Share(n) => {
                        replay.push_shared(bytes(end, n).into());
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
                    Op::Shrink => {
                        replay.shrink();
                        prop_assert!(!replay.is_empty() || memory(&replay) == 0);
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
                // Bounded by the bytes in flight. Two chunks may be partly used, and also the chunk before each shared buffer.
                let partly = 2 + shared(&replay);
                prop_assert!(memory(&replay) <= replay.len() + partly * CHUNK);
                prop_assert!(!replay.is_empty() || replay.full.is_empty());
            }
        }
    }

    #[test]
    fn a_byte_that_is_not_held_is_an_error_and_the_end_is_not() {
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

    /// Sends a message when it is dropped.
    struct Owner(Vec<u8>, std::sync::mpsc::Sender<()>);

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            let _ = self.1.send(());
        }
    }

    #[test]
    fn a_shared_buffer_is_not_copied_and_is_dropped_when_all_of_it_is_trimmed() {
        let mut replay = Replay::new();
        let (tell, dropped) = std::sync::mpsc::channel();
        replay.push(&bytes(0, 10));
        let buffer = Bytes::from_owner(Owner(bytes(10, 100), tell));
        let at = buffer.as_ptr();
        // In two slices, as if two system calls had taken the buffer.
        replay.push_shared(buffer.slice(..60));
        replay.push_shared(buffer.slice(60..));
        drop(buffer);
        replay.push(&bytes(110, 5));
        assert_eq!(held_from(&replay, 0), bytes(0, 115));
        assert_eq!(replay.chunk_at(10).unwrap().unwrap().as_ptr(), at);
        assert!(memory(&replay) <= 2 * FIRST);
        replay.trim(109);
        assert!(dropped.try_recv().is_err());
        assert_eq!(held_from(&replay, 108), bytes(108, 7));
        replay.trim(110);
        assert!(dropped.try_recv().is_ok());
        // The byte before `start` is still held, as a copy.
        assert_eq!(held_from(&replay, 109), bytes(109, 6));
        replay.push_shared(Bytes::new());
        assert_eq!((replay.start(), replay.end()), (110, 115));
    }

    #[test]
    fn a_trim_below_start_changes_nothing() {
        let mut replay = Replay::new();
        replay.push(&bytes(0, 100));
        replay.trim(80);
        replay.trim(10);
        assert_eq!((replay.start(), replay.end()), (80, 100));
    }

    #[test]
    fn shrink_frees_the_memory_of_an_empty_buffer_only() {
        let mut replay = Replay::new();
        replay.push(&bytes(0, 1));
        assert_eq!(memory(&replay), FIRST);
        replay.trim(1);
        assert_eq!(memory(&replay), FIRST);
        replay.shrink();
        assert_eq!(memory(&replay), 0);
        replay.push(&bytes(1, 10));
        assert_eq!(held_from(&replay, 1), bytes(1, 10));
        replay.shrink();
        assert_eq!(held_from(&replay, 1), bytes(1, 10));
    }

    #[test]
    fn a_renewed_buffer_holds_nothing_but_a_small_chunk() {
        for sent in [1, FIRST as u64, FIRST as u64 + 1, 3 * CHUNK as u64] {
            let mut replay = Replay::new();
            replay.push(&bytes(0, sent));
            replay.trim(sent / 2);
            replay.renew();
            assert_eq!((replay.start(), replay.end()), (0, 0));
            assert!(replay.chunk_at(0).expect("the end").is_none());
            assert!(memory(&replay) <= FIRST, "{sent}");
            replay.push(&bytes(0, 1));
            assert_eq!(held_from(&replay, 0), bytes(0, 1));
            assert_eq!(memory(&replay), FIRST);
        }
    }

    #[test]
    fn chunks_grow_to_their_full_size() {
        let mut replay = Replay::new();
        while memory(&replay) < 8 * CHUNK {
            replay.push(&bytes(replay.end(), 8));
        }
        assert_eq!(replay.last.capacity(), CHUNK);
        assert!(
            replay
                .full
                .iter()
                .all(|c| matches!(&c.bytes, KeptBytes::Copied(b) if b.len() == b.capacity()))
        );
        assert!(memory(&replay) <= replay.len() + CHUNK);
    }
}
