//! Buffers that are posted on a flow.

use std::collections::VecDeque;
use std::collections::vec_deque::Iter;

use bytes::Bytes;

/// Buffers of one flow.
#[derive(Default)]
pub(super) struct Posts {
    /// What the kernel has not taken yet.
    pub(super) queue: VecDeque<Bytes>,
    /// Where each post ends in the stream that the kernel has taken, and is not known to be with the peer's kernel.
    pub(super) taken: VecDeque<u64>,
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// What is to be done when the queue is empty.
    pub(super) then: AfterPosts,
}

/// What comes behind the last post.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum AfterPosts {
    #[default]
    More,
    Finish,
    Close,
}

/// Slices of what the kernel has taken of a queue.
pub(super) struct TakenSlices<'a> {
    queue: Iter<'a, Bytes>,
    left: usize,
}

impl<'a> TakenSlices<'a> {
    pub(super) fn new(queue: &'a VecDeque<Bytes>, left: usize) -> Self {
        Self {
            queue: queue.iter(),
            left,
        }
    }
}

impl Iterator for TakenSlices<'_> {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        if self.left == 0 {
            return None;
        }
        let piece = self.queue.next()?;
        let n = piece.len().min(self.left);
        self.left -= n;
        Some(piece.slice(..n))
    }
}
