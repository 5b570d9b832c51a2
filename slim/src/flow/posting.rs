//! Posted sends: buffers that the program hands to the flow, which keeps them until the peer's kernel has acknowledged them.
//!
//! ```text
//!   post ──► queued ──► taken by the kernel: kept as they are, and replayed if the connection breaks ──► completed
//!             │                       │
//!             └── the sending half of the stream gets slices of the same buffers; only small ones are copied
//! ```

use std::collections::VecDeque;
use std::io::IoSlice;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use bytes::{Buf, Bytes};
use slim_core::{Cause, FinHow};

use super::core::FlowCore;
use super::posts::{AfterPosts, Posts, TakenSlices};
use crate::error::TransferError;
use crate::hub::bits;

/// Pieces with fewer bytes are copied. `docs/design/posted-sends.md` has the measurement.
const COPIED: usize = 1024;
/// Limit of buffers in one system call.
const PIECES: usize = 64;

impl FlowCore {
    fn posts(&self) -> MutexGuard<'_, Posts> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the program waits for posted buffers that the peer may not have. While a call has the posts, the next probe answers that.
    pub(super) fn awaits_posts(&self) -> bool {
        let posts = self.posts.try_lock();
        posts.is_ok_and(|posts| !posts.taken.is_empty())
    }

    /// Queues a buffer, and sends what the kernel takes at once. Returns the number of the post, counted from 1.
    pub(super) fn post(self: &Arc<Self>, buffer: Bytes) -> Result<u64, TransferError> {
        let mut posts = self.posts();
        // Checked with the posts locked: a flow that ends or is closed releases its posts afterwards.
        if let Some(error) = self.refuses_posts() {
            return Err(error);
        }
        if posts.then != AfterPosts::More || self.stream.local_final().is_some() {
            return Err(TransferError::ShutDown);
        }
        // Otherwise the session pumps the flow already.
        let first = posts.queue.is_empty() && posts.taken.is_empty();
        posts.queue.push_back(buffer);
        posts.posted += 1;
        let number = posts.posted;
        self.queued.store(true, Ordering::SeqCst);
        let emptied = self.send_queued(&mut posts);
        let hopeless = self.take_hopeless(&mut posts);
        drop(posts);
        if !hopeless.is_empty() {
            // The flow has ended meanwhile, and this buffer, the last one, was not sent.
            drop(hopeless);
            return Err(self.refuses_posts().unwrap_or(TransferError::Closed));
        }
        if emptied {
            self.note_room(true);
        }
        if first {
            self.hub.pump_later(self.clone());
        }
        Ok(number)
    }

    /// Reports that other sends may follow the posts, if one was refused because of them.
    fn note_room(&self, wake: bool) {
        if self.blocked.swap(false, Ordering::SeqCst) {
            self.note_and(bits::WRITABLE, wake);
        }
    }

    /// Takes the posts of a flow that has ended out of it: queued ones will not be sent, and the taken ones are not known to have
    /// arrived. The caller drops the buffers, whose owner may be the program, after the lock.
    fn take_hopeless(&self, posts: &mut Posts) -> VecDeque<Bytes> {
        if self.refuses_posts().is_none() {
            return VecDeque::new();
        }
        self.queued.store(false, Ordering::SeqCst);
        posts.taken.clear();
        std::mem::take(&mut posts.queue)
    }

    /// Releases the posts of a flow that has failed or is closed.
    pub(super) fn release_posts(&self) {
        let hopeless = self.take_hopeless(&mut self.posts());
        drop(hopeless);
    }

    /// The number of posts, and the number of completed ones.
    pub(super) fn posted(&self) -> (u64, u64) {
        let posts = self.posts();
        (posts.posted, posts.completed)
    }

    pub(super) fn has_posts(&self) -> bool {
        let posts = self.posts();
        !posts.queue.is_empty() || !posts.taken.is_empty()
    }

    /// Has `then` done once the queue is empty. Returns false if it is empty already, or if the flow takes no more posts.
    fn after_posts(&self, then: AfterPosts) -> bool {
        let mut posts = self.posts();
        let queued = !posts.queue.is_empty() && self.refuses_posts().is_none();
        if queued && posts.then != AfterPosts::Close {
            posts.then = then;
        }
        queued
    }

    /// Ends our direction after queued posts. Returns false if none are queued.
    pub(super) fn finish_after_posts(&self) -> bool {
        self.after_posts(AfterPosts::Finish)
    }

    /// Closes the flow after queued posts. Returns false if none are queued.
    pub(super) fn close_after_posts(&self) -> bool {
        self.after_posts(AfterPosts::Close)
    }

    /// Sends queued posts and counts completed ones. Returns true if posts are left. Changes are noted for the program; with `wake` the
    /// session's descriptor becomes readable, too.
    pub(super) fn pump_posts(self: &Arc<Self>, wake: bool) -> bool {
        let mut posts = self.posts();
        let emptied = self.send_queued(&mut posts);
        let before = posts.completed;
        self.complete(&mut posts);
        let completed = posts.completed > before;
        let hopeless = self.take_hopeless(&mut posts);
        let then = match posts.queue.is_empty() {
            true => std::mem::take(&mut posts.then),
            false => AfterPosts::More,
        };
        let more = !posts.queue.is_empty() || !posts.taken.is_empty();
        drop(posts);
        drop(hopeless);
        match then {
            AfterPosts::More => {}
            // The program's call has returned already, so an error has no receiver.
            AfterPosts::Finish => drop(self.finish_now()),
            AfterPosts::Close => self.close_now(false),
        }
        if completed {
            self.hub.completes();
            self.note_and(bits::COMPLETED, wake);
        }
        if emptied {
            self.note_room(wake);
        }
        more
    }

    /// Sends queued posts until the kernel takes no more. Returns whether it has taken the last one in this call.
    fn send_queued(self: &Arc<Self>, posts: &mut Posts) -> bool {
        if posts.queue.is_empty() {
            return false;
        }
        while !posts.queue.is_empty() {
            if !matches!(self.enter(), Ok(true)) {
                return false;
            }
            let sent = self.send_posts(posts);
            if let Err(TransferError::Lost(errno)) = sent {
                self.fault(Cause::Errno(errno));
            }
            self.leave_with_posts();
            if sent.is_err() {
                return false;
            }
        }
        self.queued.store(false, Ordering::SeqCst);
        true
    }

    /// Sends queued posts with one system call. The caller is inside the stream.
    fn send_posts(&self, posts: &mut Posts) -> Result<(), TransferError> {
        let way = self.way();
        let mut slices = [IoSlice::new(&[]); PIECES];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&posts.queue) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        let (n, end) = self.with_half(|half| {
            if self.stream.local_final().is_some() {
                return Err(TransferError::ShutDown);
            }
            let n = way.send(&slices[..count])?;
            if !self.plain.load(Ordering::Acquire) {
                let pieces = TakenSlices::new(&posts.queue, n);
                half.account_shared(pieces, COPIED, || way.unacked(&self.stream));
            }
            let before = self.sent.fetch_add(n as u64, Ordering::Relaxed);
            Ok((n, before + n as u64))
        })?;
        let mut left = n;
        let mut at = end - n as u64;
        while let Some(front) = posts.queue.front_mut() {
            let len = front.len();
            if len > left {
                front.advance(left);
                break;
            }
            left -= len;
            at += len as u64;
            posts.queue.pop_front();
            posts.taken.push_back(at);
        }
        if !self.plain.load(Ordering::Relaxed) {
            self.stream.mark_dirty(|| self.agent().dirty(self.token));
        }
        Ok(())
    }

    /// Counts the posts that the peer's kernel has acknowledged.
    fn complete(self: &Arc<Self>, posts: &mut Posts) {
        if posts.taken.is_empty() || !matches!(self.enter(), Ok(true)) {
            return;
        }
        let way = self.way();
        let acked = self.with_half(|half| {
            let unacked = way.unacked(&self.stream);
            if self.plain.load(Ordering::Acquire) {
                return self.sent.load(Ordering::Relaxed).saturating_sub(unacked);
            }
            half.trim_to(unacked);
            half.replay.start()
        });
        self.leave_with_posts();
        while posts.taken.front().is_some_and(|end| *end <= acked) {
            posts.taken.pop_front();
            posts.completed += 1;
        }
    }

    /// Drops the posted buffers of a closed flow. The kernel delivers the bytes that it has taken; a replay would not find them.
    pub(super) fn release_buffers(&self) {
        let queued = std::mem::take(&mut self.posts().queue);
        drop(queued);
        self.with_half(|half| half.replay.skip_to(half.replay.end()));
    }

    /// Ends our direction. The kernel has taken all posts.
    pub(super) fn finish_now(self: &Arc<Self>) -> Result<(), TransferError> {
        // Held until the stream has ended: a post comes before that, or is refused.
        let mut posts = self.posts();
        if !posts.queue.is_empty() {
            if posts.then != AfterPosts::Close {
                posts.then = AfterPosts::Finish;
            }
            return Ok(());
        }
        let ctl = self.ctl();
        if ctl.closed {
            return Err(TransferError::Closed);
        }
        if !ctl.known {
            return Err(TransferError::WouldBlock);
        }
        if let Some(end) = self.end_sending() {
            self.agent().shut(self.token, end, FinHow::HalfClose);
            self.shut_transport(&ctl);
        }
        Ok(())
    }
}
