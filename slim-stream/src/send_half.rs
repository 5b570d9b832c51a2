//! The sending direction: the replay buffer, and when the kernel is asked what is acknowledged.

use bytes::Bytes;
use slim_core::replay::Replay;

use crate::answers::Undelivered;

/// After a send of at least this many bytes the kernel is asked how much of it is unacknowledged, and only that is copied.
pub const LARGE: usize = 8 << 10;

/// Each time that the replay buffer has grown by this many bytes the kernel is asked how much to trim.
const TRIM_STEP: usize = 64 << 10;

/// The sending half of a stream. Only its holder may send.
pub struct SendHalf {
    /// Bytes that the peer's kernel may not have. The end of the buffer is the number of bytes sent.
    pub replay: Replay,
    /// When the buffer is longer than this, the kernel is asked how much is acknowledged.
    trim_at: usize,
}

impl SendHalf {
    /// A half that has sent nothing yet.
    pub const fn new() -> Self {
        Self {
            replay: Replay::new(),
            trim_at: TRIM_STEP,
        }
    }

    /// Resets the half for another flow. A small buffer keeps its memory.
    pub fn renew(&mut self) {
        self.replay.renew();
        self.trim_at = TRIM_STEP;
    }

    /// Bytes sent since the flow began.
    #[inline]
    pub fn sent(&self) -> u64 {
        self.replay.end()
    }

    /// Called when the kernel has taken `n` bytes: copies those that the peer's kernel may not have. `copy(from, buffer)` appends
    /// the bytes `from..n` to the buffer; `unacked` asks the kernel how many bytes are unacknowledged.
    #[inline(always)]
    pub fn account(
        &mut self,
        n: usize,
        copy: impl FnOnce(usize, &mut Replay),
        unacked: impl FnOnce() -> u64,
    ) {
        if n >= LARGE {
            return self.account_large(n, copy, unacked);
        }
        copy(0, &mut self.replay);
        if self.replay.len() > self.trim_at {
            self.trim_now(unacked);
        }
    }

    #[inline(never)]
    fn account_large(
        &mut self,
        n: usize,
        copy: impl FnOnce(usize, &mut Replay),
        unacked: impl FnOnce() -> u64,
    ) {
        let unacked = unacked();
        // One byte more than is unacknowledged, see `Replay`.
        let tail = (n as u64).min(unacked.saturating_add(1)) as usize;
        if tail < n {
            self.replay.skip_to(self.replay.end() + (n - tail) as u64);
        }
        copy(n - tail, &mut self.replay);
        self.trim(unacked);
    }

    /// Like [`account`](Self::account), for buffers that the caller shares. `pieces` are the bytes that the kernel has taken. Pieces of
    /// fewer than `copied` bytes are copied; the others are kept without a copy.
    pub fn account_shared(
        &mut self,
        pieces: impl Iterator<Item = Bytes>,
        copied: usize,
        unacked: impl FnOnce() -> u64,
    ) {
        let before = self.sent();
        for piece in pieces {
            if piece.len() < copied {
                self.replay.push(&piece);
            } else {
                self.replay.push_shared(piece);
            }
        }
        if self.sent() - before >= LARGE as u64 || self.replay.len() > self.trim_at {
            self.trim_now(unacked);
        }
    }

    #[cold]
    #[inline(never)]
    fn trim_now(&mut self, unacked: impl FnOnce() -> u64) {
        self.trim(unacked());
    }

    /// Trims the buffer to the last `unacked` bytes, which the peer's kernel lacks. Returns how many of these are kept.
    pub fn trim_to(&mut self, unacked: u64) -> u64 {
        let unacked = unacked.min(self.replay.len() as u64);
        self.replay.trim(self.replay.end() - unacked);
        unacked
    }

    /// The unacknowledged bytes: the last `unacked` ones, or all that are kept if the kernel's number cannot be trusted (`None`).
    pub(crate) fn undelivered(&mut self, unacked: Option<u64>) -> Undelivered {
        let unacked = self.trim_to(unacked.unwrap_or(u64::MAX));
        Undelivered {
            kept: self.replay.len(),
            acked: self.sent() - unacked,
        }
    }

    /// Trims the buffer to the last `unacked` bytes, and sets when to ask the kernel next.
    fn trim(&mut self, unacked: u64) {
        self.trim_to(unacked);
        self.trim_at = self.replay.len() + TRIM_STEP;
    }
}

impl Default for SendHalf {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(from: u64, n: usize) -> Vec<u8> {
        (from..from + n as u64)
            .map(|seq| (seq % 251) as u8)
            .collect()
    }

    /// Sends `n` bytes; afterwards `unacked` bytes of the stream are unacknowledged. Returns how many bytes were copied.
    fn send(half: &mut SendHalf, n: usize, unacked: u64) -> usize {
        let all = bytes(half.sent(), n);
        let mut copied = 0;
        let copy = |from: usize, replay: &mut Replay| {
            copied = n - from;
            replay.push(&all[from..]);
        };
        half.account(n, copy, || unacked);
        copied
    }

    #[test]
    fn a_large_send_copies_only_the_unacknowledged_tail_and_the_byte_before_it() {
        let mut half = SendHalf::new();
        assert_eq!(send(&mut half, 100, u64::MAX), 100);
        let sent = 100 + 2 * LARGE as u64;
        assert_eq!(send(&mut half, 2 * LARGE, 1000), 1001);
        assert_eq!((half.sent(), half.replay.start()), (sent, sent - 1000));
        // The one byte more can be read.
        let kept = half.replay.chunk_at(sent - 1001).unwrap();
        assert_eq!(kept.unwrap()[0], bytes(sent - 1001, 1)[0]);
        assert_eq!(send(&mut half, LARGE, u64::MAX), LARGE);
        assert_eq!(half.replay.len(), 1000 + LARGE);
    }

    #[test]
    fn shared_buffers_are_released_when_acknowledged_and_small_ones_are_copied() {
        let mut half = SendHalf::new();
        let at = |half: &SendHalf, n| Bytes::from(bytes(half.sent(), n));
        let (small, large) = (at(&half, 100), Bytes::from(bytes(100, 3 * LARGE)));
        let place = large.as_ptr();
        let pieces = [small.clone(), large.clone()];
        half.account_shared(pieces.into_iter(), 101, || LARGE as u64);
        assert!(small.is_unique() && !large.is_unique());
        let sent = 100 + 3 * LARGE as u64;
        assert_eq!((half.sent(), half.replay.len()), (sent, LARGE));
        let kept = half.replay.chunk_at(sent - 10).unwrap().unwrap();
        assert_eq!(kept.as_ptr(), place.wrapping_add(3 * LARGE - 10));
        assert_eq!(kept, &bytes(sent - 10, 10));
        assert_eq!(half.trim_to(0), 0);
        assert!(large.is_unique());
        // After small pieces the kernel is seldom asked.
        let mut asked = 0;
        for _ in 0..=(TRIM_STEP + LARGE) / 1024 {
            let piece = at(&half, 1024);
            half.account_shared([piece].into_iter(), 0, || {
                asked += 1;
                0
            });
        }
        assert_eq!(asked, 1);
    }

    #[test]
    fn the_kernel_is_asked_when_the_buffer_has_grown_by_a_step() {
        let mut half = SendHalf::new();
        let mut asked = 0;
        for i in 1..=3 * (TRIM_STEP / 1024) {
            half.account(
                1024,
                |_, replay| replay.push(&[0; 1024]),
                || {
                    asked += 1;
                    2048
                },
            );
            assert!(half.replay.len() <= TRIM_STEP + 2048, "{i}");
        }
        assert_eq!(asked, 2);
        half.renew();
        assert_eq!((half.sent(), half.replay.len()), (0, 0));
    }
}
