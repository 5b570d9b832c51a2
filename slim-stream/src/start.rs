//! Checks that our byte counts and the kernel's agree.
//!
//! From the moment that a transport carries a stream, our count and the kernel's must grow by the same amount. If they do not,
//! something reads or writes the descriptor without SLIM (io_uring, stdio, a raw system call), and a resume would lose or repeat
//! bytes. One byte is enough for that. So it must be known exactly what the kernel counts besides bytes: the connector's SYN and
//! the peer's FIN. Our own FIN is the exception: if the connection was over before the front end shut it, it is unknown whether
//! the kernel counted a FIN. A byte too many that has reached the peer is found at the peer.

use crate::stream::Stream;
use libc::c_int;
use slim_core::saved::Saved;
use slim_sys as sys;

/// Byte counts of both directions at one moment: ours, of the whole stream, and the kernel's, of one transport.
#[derive(Clone, Copy, Default)]
pub struct Start {
    received: u64,
    sent: u64,
    /// Bytes read from the transport, those of the resume handshake included.
    kernel_received: u64,
    kernel_sent: u64,
}

impl Start {
    /// The counts when a flow's first transport begins. The kernel counts the SYN of the end that has `dialled`.
    pub fn of_first(dialled: bool) -> Self {
        Self {
            kernel_sent: dialled.into(),
            ..Self::default()
        }
    }

    /// The counts now, for a transport that no call reads from or writes to at the moment. `sent`: bytes sent since the flow
    /// began.
    pub fn of(stream: &Stream, sent: u64, fd: c_int) -> Option<Self> {
        let quiet = sys::unacked(fd) == Ok(0);
        let mut before = sys::counters(fd)?;
        if quiet && sys::readable(fd) == 0 {
            // No acknowledgement is outstanding and no byte is unread, so one reading is consistent.
            return Some(Self::new(stream, sent, before, 0, 0));
        }
        loop {
            let (unread, unacked) = (sys::readable(fd), sys::unacked(fd).ok()?);
            let after = if before.is_over {
                before
            } else {
                sys::counters(fd)?
            };
            if before == after {
                return Some(Self::new(stream, sent, after, unread, unacked));
            }
            before = after;
        }
    }

    /// The counts now, for a transport that has been read until empty. `None` if the kernel has not given it up.
    pub fn of_dry(stream: &Stream, sent: u64, fd: c_int) -> Option<Self> {
        let counters = sys::counters(fd).filter(|c| c.is_over)?;
        Some(Self::new(stream, sent, counters, 0, sys::unacked(fd).ok()?))
    }

    fn new(stream: &Stream, sent: u64, counters: sys::Counters, unread: u64, unacked: u64) -> Self {
        Self {
            received: stream.received(),
            sent,
            kernel_received: counters.received.saturating_sub(unread),
            kernel_sent: counters.acked + unacked,
        }
    }

    /// Whether bytes have been sent on the transport: since the flow began, there are `sent` now.
    pub fn has_sent(self, sent: u64) -> bool {
        sent != self.sent
    }

    /// Bytes received since the flow began, by any process that shares the transport `fd`: ours until `self`, the kernel's from
    /// then on.
    pub fn all_received(self, fd: c_int) -> Option<u64> {
        let now = sys::counters(fd)?.received;
        Some(self.received + now.saturating_sub(self.kernel_received))
    }

    /// How many bytes more the kernel has received than we, between `self` and `now`. An end counts like a byte.
    pub fn uncounted(self, now: Self) -> u64 {
        let kernel = now.kernel_received.saturating_sub(self.kernel_received);
        kernel.saturating_sub(now.received - self.received)
    }

    /// If our counts and the kernel's have grown by different amounts between `self` and `now`: a description of the
    /// difference. `peer_ended` says whether the peer's FIN has arrived.
    pub fn contradiction(self, now: Self, peer_ended: impl FnOnce() -> bool) -> Option<String> {
        let differ = |what, ours: u64, kernel: u64| {
            format!(
                "{ours} bytes {what} here, {kernel} by the kernel: something uses the descriptor past SLIM"
            )
        };
        let ours = now.received - self.received;
        let kernel = now.kernel_received.saturating_sub(self.kernel_received);
        if kernel != ours && !(kernel == ours + 1 && peer_ended()) {
            return Some(differ("received", ours, kernel));
        }
        let ours = now.sent - self.sent;
        let kernel = now.kernel_sent.saturating_sub(self.kernel_sent);
        (kernel != ours && kernel != ours + 1).then(|| differ("sent", ours, kernel))
    }

    /// Whether our counts and the kernel's still agree. If so, a call that has not returned has moved no bytes. After our own
    /// FIN (`shut`) the kernel may have counted one more, so a difference of one byte sent is accepted.
    pub fn agrees(self, now: Self, shut: bool, peer_ended: impl FnOnce() -> bool) -> bool {
        let sent = now.kernel_sent.saturating_sub(self.kernel_sent);
        (shut || sent == now.sent - self.sent) && self.contradiction(now, peer_ended).is_none()
    }
}

impl Saved for Start {
    fn save(&self, out: &mut Vec<u8>) {
        (self.received, self.sent).save(out);
        (self.kernel_received, self.kernel_sent).save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (received, sent) = Saved::load(from)?;
        let (kernel_received, kernel_sent) = Saved::load(from)?;
        Some(Self {
            received,
            sent,
            kernel_received,
            kernel_sent,
        })
    }
}
