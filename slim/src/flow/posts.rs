//! The queue of a flow's posts.

use std::collections::VecDeque;
use std::collections::vec_deque::Iter;

use bytes::Bytes;

/// Posts of one flow.
#[derive(Default)]
pub(super) struct Posts {
    /// Buffers that the kernel has not taken yet; a partly taken one keeps its rest.
    pub(super) queue: VecDeque<Bytes>,
    /// End, in the sequence space, of each post that the kernel has taken and the peer's kernel has not acknowledged.
    pub(super) taken: VecDeque<u64>,
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// Action to take when the queue is empty.
    pub(super) then: AfterPosts,
}

/// Action that follows the last post. `More`: none.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum AfterPosts {
    #[default]
    More,
    Finish,
    Close,
}

/// Slices of the first `left` bytes of a queue: those that the kernel has taken.
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
