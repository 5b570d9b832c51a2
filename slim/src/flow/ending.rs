//! How a program ends a flow.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slim_core::FinHow;
use slim_core::stash::Stash;

use super::core::{FlowCore, FlowCtl};
use crate::error::TransferError;

impl FlowCore {
    /// Ends our direction.
    pub(super) fn finish(self: &Arc<Self>) -> Result<(), TransferError> {
        self.look_at_connecting();
        match self.finish_after_posts() {
            true => Ok(()),
            false => self.finish_now(),
        }
    }

    /// Where our stream ends, unless it has ended before.
    pub(super) fn end_sending(&self) -> Option<u64> {
        self.with_half(|half| self.stream.end_at(half.sent()).then(|| half.sent()))
    }

    /// The kernel tells the peer's; a transport that is away is not touched, and the next one is shut when it is installed.
    pub(super) fn shut_transport(&self, ctl: &FlowCtl) {
        if let Some(sock) = ctl.sock.as_ref().filter(|_| !self.stream.is_barred()) {
            slim_sys::shutdown(sock.raw(), libc::SHUT_WR);
        }
    }

    /// Closes the flow, behind what is posted. With `reset`, or with bytes that were not received, what is under way is thrown
    /// away.
    pub(super) fn close(&self, reset: bool) {
        if reset || !self.close_after_posts() {
            self.close_now(reset);
        }
    }

    /// Likewise, whatever is posted.
    pub(super) fn close_now(&self, reset: bool) {
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
        let reset = reset || !ctl.receiving.stash.is_empty() || in_kernel();
        let end = self.end_sending().or_else(|| self.stream.local_final());
        let how = if reset { FinHow::Reset } else { FinHow::Close };
        if !self.plain.load(Ordering::Acquire) {
            // Before the kernel sends anything of it: who asks about an end must not be told that the flow is open.
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
