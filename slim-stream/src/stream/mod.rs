//! The stream: the state that data calls and control share.

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

/// Number of threads that wait for any stream. If one never returns, each [`Stream::wake`] makes a needless system call.
static WAITERS: AtomicU32 = AtomicU32::new(0);

/// The data half of one flow. Its methods may be called from any thread, and in a signal handler.
pub struct Stream {
    /// Admits data calls; barred while the flow has no usable transport.
    gate: Gate,
    /// Bytes taken from transports: by all threads but the owner of the pass, and (next field) by the owner. Their sum is what
    /// the application has read, plus the stash.
    received: AtomicU64,
    received_by_pass: AtomicU64,
    /// The position at which the peer's stream ends, once the peer has announced it.
    peer_final: AtomicU64,
    /// The position at which our stream ends, once the application has shut it.
    local_final: AtomicU64,
    /// The sending half. The lock is held during the real send, so that the copy has the kernel's order.
    send: Lock<SendHalf>,
    /// The thread that has locked the half, by the address of its control block; 0 if that is not known.
    sender: AtomicUsize,
    /// Changes whenever calls that wait for the stream should check it again.
    signal: AtomicU32,
    /// The agent sweeps the flow because it has unacknowledged bytes.
    dirty: AtomicBool,
    /// The transport ends at the witness, which passes the bytes on: what its kernel acknowledges, the peer need not have.
    relayed: AtomicBool,
    /// The next resume tells the peer where our stream ends.
    tells_end: AtomicBool,
}

impl Stream {
    /// A stream that has not begun yet ([`Stream::begin`]).
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
            relayed: AtomicBool::new(false),
            tells_end: AtomicBool::new(false),
        }
    }

    /// Resets everything but the gate, for another flow. No call is inside, and the gate stays closed until [`Stream::begin`].
    pub fn renew(&self) {
        self.received.store(0, Ordering::Relaxed);
        self.received_by_pass.store(0, Ordering::Relaxed);
        self.peer_final.store(UNKNOWN, Ordering::Relaxed);
        self.local_final.store(UNKNOWN, Ordering::Relaxed);
        // The agent begins to sweep a new flow without being told.
        self.dirty.store(true, Ordering::Relaxed);
        self.relayed.store(false, Ordering::Relaxed);
        self.tells_end.store(false, Ordering::Relaxed);
        self.with_half(SendHalf::renew);
    }

    /// A flow begins: opens the gate. No call that entered for an earlier flow may still be inside.
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

    /// Sets the number of bytes taken from transports to `all`, which includes those that other processes took.
    pub fn set_received(&self, all: u64) {
        let by_pass = self.received_by_pass.load(Ordering::SeqCst);
        self.received
            .store(all.wrapping_sub(by_pass), Ordering::SeqCst);
    }

    /// The position at which the peer's stream ends, once the peer has announced it.
    pub fn peer_final(&self) -> Option<u64> {
        known(&self.peer_final)
    }

    /// Whether the peer has announced that its stream ends after `received` bytes.
    pub fn ends_at(&self, received: u64) -> bool {
        self.peer_final.load(Ordering::Acquire) == received
    }

    /// The peer has announced where its stream ends.
    pub fn set_peer_final(&self, seq: u64) {
        self.peer_final.store(seq, Ordering::Release);
    }

    /// The position at which our stream ends, once the application has ended it.
    pub fn local_final(&self) -> Option<u64> {
        known(&self.local_final)
    }

    /// The application ends its direction after `sent` bytes. False if it had ended it before.
    pub fn end_at(&self, sent: u64) -> bool {
        let first =
            self.local_final
                .compare_exchange(UNKNOWN, sent, Ordering::SeqCst, Ordering::SeqCst);
        first.is_ok()
    }

    /// Whether the transport goes through the witness, so that nothing is known to be acknowledged before the next resume.
    pub fn is_relayed(&self) -> bool {
        self.relayed.load(Ordering::SeqCst)
    }

    /// Notes that the agent knows where our stream ends, and will tell the peer in the next resume. True if it was noted before.
    pub(crate) fn will_tell_end(&self) -> bool {
        self.tells_end.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn set_relayed(&self, relayed: bool) {
        self.relayed.store(relayed, Ordering::SeqCst);
    }

    /// Wakes the threads that wait for the stream ([`Stream::wait`]), so that they check it again.
    pub fn wake(&self) {
        self.signal.fetch_add(1, Ordering::SeqCst);
        // A thread that begins to wait after this check finds the signal changed, and does not sleep.
        if WAITERS.load(Ordering::SeqCst) > 0 {
            slim_sys::futex_wake_all(&self.signal);
        }
    }

    /// The value to pass to [`Stream::wait`]. Read it before checking whether there is a reason to wait.
    pub fn signal(&self) -> u32 {
        self.signal.load(Ordering::SeqCst)
    }

    /// Waits until the stream is woken. `seen` is the [`Stream::signal`] from before the check for a reason to wait.
    ///
    /// # Errors
    /// `EAGAIN` if the stream has been woken since, `ETIMEDOUT`, `EINTR`.
    pub fn wait(&self, seen: u32, limit: Option<Duration>) -> Result<(), slim_sys::Errno> {
        WAITERS.fetch_add(1, Ordering::SeqCst);
        let waited = slim_sys::futex_wait(&self.signal, seen, limit);
        WAITERS.fetch_sub(1, Ordering::SeqCst);
        waited
    }

    /// Bytes have been sent: calls `tell` unless the agent sweeps the flow already.
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

    /// The agent has found nothing unacknowledged, and stops sweeping the flow.
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
    fn received_is_the_sum_of_both_counters() {
        let stream = Stream::new();
        stream.count(&Inside::Counted, 5);
        stream.add_received(2);
        assert_eq!(stream.received(), 7);
        stream.set_received(3);
        assert_eq!(stream.received(), 3);
    }

    #[test]
    fn our_end_is_set_once_and_renew_clears_both_ends() {
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
    fn the_agent_is_told_once_until_the_flow_is_clean() {
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
        assert!(!told(&stream), "the agent sweeps a new flow anyway");
    }
}
