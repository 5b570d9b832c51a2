//! Half-close, close and reset of a flow by the program.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slim_core::FinHow;
use slim_core::stash::Stash;

use super::core::{FlowCore, FlowCtl};
use crate::error::TransferError;

impl FlowCore {
    /// Ends our direction, after queued posts.
    pub(super) fn finish(self: &Arc<Self>) -> Result<(), TransferError> {
        self.look_at_connecting();
        match self.finish_after_posts() {
            true => Ok(()),
            false => self.finish_now(),
        }
    }

    /// Ends our stream. Returns its end in the sequence space, or `None` if the stream has ended before.
    pub(super) fn end_sending(&self) -> Option<u64> {
        self.with_half(|half| self.stream.end_at(half.sent()).then(|| half.sent()))
    }

    /// Half-closes the transport. A suspended flow's transport is not touched: the next one is half-closed when it is installed.
    pub(super) fn shut_transport(&self, ctl: &FlowCtl) {
        if let Some(sock) = ctl.sock.as_ref().filter(|_| !self.stream.is_barred()) {
            slim_sys::shutdown(sock.raw(), libc::SHUT_WR);
        }
    }

    /// Closes the flow after queued posts. With `reset` it closes at once and discards undelivered bytes.
    pub(super) fn close(&self, reset: bool) {
        if reset || !self.close_after_posts() {
            self.close_now(reset);
        }
    }

    /// Closes the flow at once. Discards undelivered bytes with `reset`, or if there are bytes that this end has not received, or posts that
    /// are not sent: the peer must not see an orderly end before them.
    pub(super) fn close_now(&self, reset: bool) {
        self.close_locked(reset);
        self.release_posts();
    }

    fn close_locked(&self, reset: bool) {
        let mut ctl = self.ctl();
        if std::mem::replace(&mut ctl.closed, true) {
            return;
        }
        self.closed.store(true, Ordering::Release);
        if let Some(since) = ctl.suspended.take() {
            ctl.away += since.elapsed();
        }
        if !ctl.known || ctl.verdict.is_some() {
            self.unwatch(&mut ctl);
            drop(ctl);
            return self.hub.remove(self.id(), Some(self.counters()));
        }
        let sock = ctl.sock.clone();
        let in_use = sock.as_ref().filter(|_| !self.stream.is_barred());
        let in_kernel = || in_use.is_some_and(|sock| slim_sys::readable(sock.raw()) > 0);
        let unread = || !ctl.receiving.stash.is_empty() || in_kernel();
        let reset = reset || self.queued.load(Ordering::SeqCst) || unread();
        let end = self.end_sending().or_else(|| self.stream.local_final());
        let how = if reset { FinHow::Reset } else { FinHow::Close };
        if !self.plain.load(Ordering::Acquire) {
            // The agent must know before the kernel sends the FIN: the peer may ask about it, and must not hear that the flow is open.
            let end = end.unwrap_or_default();
            self.agent().finish(self.token, end, how);
        }
        if let Some(sock) = &sock {
            self.hub.unwatch(sock);
        }
        ctl.receiving.stash = Stash::new();
        if reset {
            if let Some(sock) = ctl.sock.take() {
                let at_once = slim_sys::AT_ONCE;
                slim_sys::set_option(sock.raw(), libc::SOL_SOCKET, libc::SO_LINGER, &at_once);
            }
            self.agent().gone(self.token);
        } else {
            self.shut_transport(&ctl);
            if !self.plain.load(Ordering::Acquire) {
                ctl.lingers = true;
                self.hub.lingers(true);
            }
        }
        drop(ctl);
        self.stream.wake();
        self.hub.remove(self.id(), Some(self.counters()));
    }
}
