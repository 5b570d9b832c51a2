//! A stream: what data calls and control share.

mod entry;
mod half;

use slim_core::gate::Gate;
use slim_sys::lock::Lock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::send_half::SendHalf;

pub use entry::{Inside, forget_marks};

/// "Not known", for sequence numbers.
const UNKNOWN: u64 = u64::MAX;

/// Threads that wait for any stream. One that never comes back costs the others a system call.
static WAITERS: AtomicU32 = AtomicU32::new(0);

/// The data half of one flow. All of it may be used from any thread, and in a signal's handler.
pub struct Stream {
    /// Lets data calls in; barred while no transport is there for them.
    gate: Gate,
    /// Bytes taken from transports by all but the owner of the pass, and by that one: what the application got, plus
    /// the stash.
    received: AtomicU64,
    received_by_pass: AtomicU64,
    /// Where the peer's stream ends, once it has said so.
    peer_final: AtomicU64,
    /// Where our stream ends, once the application has shut it.
    local_final: AtomicU64,
    /// What the application wrote. Held over the real send, so that the copy has the kernel's order.
    send: Lock<SendHalf>,
    /// The thread that has locked it for a data call, by the address of its control block; 0 if that is not known.
    sender: AtomicUsize,
    /// Changes whenever a call that waits for the stream should look again.
    signal: AtomicU32,
    /// The agent sweeps the flow because it has unacknowledged bytes.
    dirty: AtomicBool,
}

impl Stream {
    /// One that has not begun yet ([`Stream::begin`]).
    pub const fn new() -> Self {
        Self {
            gate: Gate::new(),
            received: AtomicU64::new(0),
            received_by_pass: AtomicU64::new(0),
            peer_final: AtomicU64::new(UNKNOWN),
            local_final: AtomicU64::new(UNKNOWN),
            send: Lock::new(SendHalf::new()),
            sender: AtomicUsize::new(0),
            signal: AtomicU32::new(0),
            dirty: AtomicBool::new(false),
        }
    }

    /// As new, for another flow, but for the gate: nobody is inside, and it is closed until [`Stream::begin`].
    pub fn renew(&self) {
        self.received.store(0, Ordering::Relaxed);
        self.received_by_pass.store(0, Ordering::Relaxed);
        self.peer_final.store(UNKNOWN, Ordering::Relaxed);
        self.local_final.store(UNKNOWN, Ordering::Relaxed);
        // As the agent begins with it.
        self.dirty.store(true, Ordering::Relaxed);
        self.with_half(SendHalf::renew);
    }

    /// A flow begins: lets calls in, without those of an earlier life.
    pub fn begin(&self) {
        self.gate.reuse();
    }

    /// Bytes taken from transports.
    pub fn received(&self) -> u64 {
        let by_pass = self.received_by_pass.load(Ordering::SeqCst);
        self.received.load(Ordering::SeqCst).wrapping_add(by_pass)
    }

    /// Counts bytes that control took from a transport.
    pub fn add_received(&self, n: u64) {
        self.received.fetch_add(n, Ordering::SeqCst);
    }

    /// All bytes that were taken, by whichever process.
    pub fn set_received(&self, all: u64) {
        let by_pass = self.received_by_pass.load(Ordering::SeqCst);
        self.received
            .store(all.wrapping_sub(by_pass), Ordering::SeqCst);
    }

    /// Where the peer's stream ends, once it has said so.
    pub fn peer_final(&self) -> Option<u64> {
        known(&self.peer_final)
    }

    /// Whether the peer has said that its stream ends after so many bytes.
    pub fn ends_at(&self, received: u64) -> bool {
        self.peer_final.load(Ordering::Acquire) == received
    }

    /// The peer has said where its stream ends.
    pub fn set_peer_final(&self, seq: u64) {
        self.peer_final.store(seq, Ordering::Release);
    }

    /// Where our stream ends, once the application has ended it.
    pub fn local_final(&self) -> Option<u64> {
        known(&self.local_final)
    }

    /// The application ends its direction after so many bytes. False if it has done so before.
    pub fn end_at(&self, sent: u64) -> bool {
        let first =
            self.local_final
                .compare_exchange(UNKNOWN, sent, Ordering::SeqCst, Ordering::SeqCst);
        first.is_ok()
    }

    /// Tells threads that wait for the stream ([`Stream::wait`]) to look at it again.
    pub fn wake(&self) {
        self.signal.fetch_add(1, Ordering::SeqCst);
        // Who begins to wait after this has been asked finds that the signal has changed.
        if WAITERS.load(Ordering::SeqCst) > 0 {
            slim_sys::futex_wake_all(&self.signal);
        }
    }

    /// What [`Stream::wait`] is to be told. Read before it is found that there is reason to wait.
    pub fn signal(&self) -> u32 {
        self.signal.load(Ordering::SeqCst)
    }

    /// Waits until the stream is woken; `seen` is what its signal was when there was reason to wait.
    ///
    /// # Errors
    /// `EAGAIN` if it was woken before, `ETIMEDOUT`, `EINTR`.
    pub fn wait(&self, seen: u32, limit: Option<Duration>) -> Result<(), slim_sys::Errno> {
        WAITERS.fetch_add(1, Ordering::SeqCst);
        let waited = slim_sys::futex_wait(&self.signal, seen, limit);
        WAITERS.fetch_sub(1, Ordering::SeqCst);
        waited
    }

    /// Something has been sent: calls `tell` unless the agent sweeps the flow already.
    #[inline]
    pub fn mark_dirty(&self, tell: impl FnOnce()) {
        if !self.dirty.load(Ordering::Relaxed) {
            self.mark_dirty_slow(tell);
        }
    }

    #[cold]
    #[inline(never)]
    fn mark_dirty_slow(&self, tell: impl FnOnce()) {
        if !self.dirty.swap(true, Ordering::Relaxed) {
            tell();
        }
    }

    /// The agent finds nothing unacknowledged, and sweeps the flow no more.
    pub fn clear_dirty(&self) {
        self.dirty.store(false, Ordering::Relaxed);
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}

fn known(seq: &AtomicU64) -> Option<u64> {
    Some(seq.load(Ordering::Acquire)).filter(|seq| *seq != UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_counters_are_one() {
        let stream = Stream::new();
        stream.count(&Inside::Counted, 5);
        stream.add_received(2);
        assert_eq!(stream.received(), 7);
        stream.set_received(3);
        assert_eq!(stream.received(), 3);
    }

    #[test]
    fn an_end_is_said_once_and_belongs_to_one_life() {
        let stream = Stream::new();
        stream.renew();
        assert_eq!((stream.local_final(), stream.peer_final()), (None, None));
        assert!(!stream.ends_at(0));
        assert!(stream.end_at(3));
        assert!(!stream.end_at(4));
        stream.set_peer_final(0);
        assert!(stream.ends_at(0));
        assert_eq!(
            (stream.local_final(), stream.peer_final()),
            (Some(3), Some(0))
        );
        stream.renew();
        assert_eq!((stream.local_final(), stream.peer_final()), (None, None));
    }

    #[test]
    fn the_agent_is_told_once_until_it_has_swept() {
        let stream = Stream::new();
        let told = |stream: &Stream| {
            let mut told = false;
            stream.mark_dirty(|| told = true);
            told
        };
        assert!(told(&stream));
        assert!(!told(&stream));
        stream.clear_dirty();
        assert!(told(&stream));
        stream.renew();
        assert!(!told(&stream), "the agent begins with it");
    }
}
