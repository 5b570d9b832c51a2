//! Whether we and the kernel count the same bytes.
//!
//! From the moment a transport becomes a stream's, our count and the kernel's must grow alike. If they have not, then
//! somebody reads or writes the descriptor past us (io_uring, stdio, a raw system call), and a resume would lose bytes
//! or repeat them. One byte is enough for that, so what the kernel counts besides bytes has to be known exactly: the
//! connector's SYN, and the peer's FIN. Only of our own FIN it cannot be told whether there was one when the connection
//! was over before the front end shut it; but a byte too many that has come to the peer is found there.

use crate::stream::Stream;
use libc::c_int;
use slim_sys as sys;

/// Bytes of both directions, as we count them and as the kernel counts those of one transport.
#[derive(Clone, Copy, Default)]
pub struct Start {
    received: u64,
    sent: u64,
    /// What was read from the transport; the handshake's messages are among it.
    kernel_received: u64,
    kernel_sent: u64,
}

impl Start {
    /// Of a flow's first transport; the kernel counts the SYN of the end that has `dialled`.
    pub fn of_first(dialled: bool) -> Self {
        Self {
            kernel_sent: dialled.into(),
            ..Self::default()
        }
    }

    /// For a transport that nobody reads from or writes to just now; `sent`: bytes of the flow sent by then.
    pub fn of(stream: &Stream, sent: u64, fd: c_int) -> Option<Self> {
        let quiet = sys::unacked(fd) == Ok(0);
        let mut before = sys::counters(fd)?;
        if quiet && sys::readable(fd) == 0 {
            // Nothing that is being acknowledged, and nothing has come.
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

    /// For one that the kernel has given up, and that has been read dry; `None` if it is not over.
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

    /// How much has been received since, by whichever process, as the kernel counts it.
    pub fn all_received(self, fd: c_int) -> Option<u64> {
        let now = sys::counters(fd)?.received;
        Some(self.received + now.saturating_sub(self.kernel_received))
    }

    /// Whether the two counts have grown apart between `self` and `now`, and how. `peer_ended` says whether the peer's
    /// FIN has come.
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

    /// Whether the two counts are the same still, so that a call which has not told has moved nothing. As far as is known:
    /// after our own FIN there is a byte that may be none.
    pub fn agrees(self, now: Self, shut: bool, peer_ended: impl FnOnce() -> bool) -> bool {
        let sent = now.kernel_sent.saturating_sub(self.kernel_sent);
        (shut || sent == now.sent - self.sent) && self.contradiction(now, peer_ended).is_none()
    }
}
