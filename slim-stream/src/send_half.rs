//! The sending direction: a copy of what the peer may not have, and when the kernel is asked what that is.

use bytes::Bytes;
use slim_core::replay::Replay;

use crate::answers::Owed;

/// Sends of at least this many bytes ask the kernel first what is worth copying.
pub const LARGE: usize = 8 << 10;

/// After this many bytes more in the replay buffer the kernel is asked what may be forgotten.
const TRIM_STEP: usize = 64 << 10;

/// The sending half of a stream. Who has it may send.
pub struct SendHalf {
    /// Bytes that the peer's kernel may not have; its end is the number of bytes sent.
    pub replay: Replay,
    /// Ask the kernel how much is acknowledged when the buffer grows beyond this many bytes.
    trim_at: usize,
}

impl SendHalf {
    /// Nothing sent yet.
    pub const fn new() -> Self {
        Self {
            replay: Replay::new(),
            trim_at: TRIM_STEP,
        }
    }

    /// As new, for another flow: memory for a short one stays.
    pub fn renew(&mut self) {
        self.replay.renew();
        self.trim_at = TRIM_STEP;
    }

    /// Bytes sent since the flow began.
    #[inline]
    pub fn sent(&self) -> u64 {
        self.replay.end()
    }

    /// The kernel has taken `n` bytes: keeps a copy of what the peer's may not have. `copy` appends those from the given one
    /// on, up to the `n`th, to the buffer; `unacked` asks the kernel how many bytes are unacknowledged.
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
        // One byte more than unacknowledged, see `Replay`.
        let tail = (n as u64).min(unacked.saturating_add(1)) as usize;
        if tail < n {
            self.replay.skip_to(self.replay.end() + (n - tail) as u64);
        }
        copy(n - tail, &mut self.replay);
        self.trim(unacked);
    }

    /// As [`account`](Self::account), of buffers that the caller shares: `pieces` are what the kernel has taken. They are kept
    /// themselves, but for those of less than `copied` bytes.
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

    /// Forgets what the peer's kernel has, which lacks the last `unacked` bytes; how many that are, as far as they are kept.
    pub fn trim_to(&mut self, unacked: u64) -> u64 {
        let unacked = unacked.min(self.replay.len() as u64);
        self.replay.trim(self.replay.end() - unacked);
        unacked
    }

    /// What is owed to the peer: all that is kept, or the bytes `unacked` if the kernel can be believed about them.
    pub(crate) fn owed(&mut self, unacked: Option<u64>) -> Owed {
        let unacked = self.trim_to(unacked.unwrap_or(u64::MAX));
        Owed {
            kept: self.replay.len(),
            acked: self.sent() - unacked,
        }
    }

    /// Forgets what the peer's kernel has, all but the last `unacked` bytes, and sets when to ask next.
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

    /// Sends `n` bytes of which, with all before them, `unacked` are not acknowledged; how many were copied.
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
    fn of_a_large_send_only_the_unacknowledged_tail_is_copied_and_the_byte_before_it() {
        let mut half = SendHalf::new();
        assert_eq!(send(&mut half, 100, u64::MAX), 100);
        let sent = 100 + 2 * LARGE as u64;
        assert_eq!(send(&mut half, 2 * LARGE, 1000), 1001);
        assert_eq!((half.sent(), half.replay.start()), (sent, sent - 1000));
        // The one byte more can be asked for.
        let kept = half.replay.chunk_at(sent - 1001).unwrap();
        assert_eq!(kept.unwrap()[0], bytes(sent - 1001, 1)[0]);
        assert_eq!(send(&mut half, LARGE, u64::MAX), LARGE);
        assert_eq!(half.replay.len(), 1000 + LARGE);
    }

    #[test]
    fn of_shared_buffers_what_is_acknowledged_is_let_go_and_small_ones_are_copied() {
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
        // Small ones ask the kernel seldom.
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
