//! Half-close, close and reset of a flow by the program.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slim_core::FinHow;
use slim_core::stash::Stash;

use super::core::{FlowCore, FlowCtl};
use super::transport::FlowTransport;
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
        let transport = ctl.transport.as_ref();
        if let Some(transport) = transport.filter(|_| !self.stream.is_barred()) {
            transport.end();
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

    /// Parts with the transport for good. It is closed as soon as no data call is inside: a call that has read the number of the descriptor
    /// must not use it for another file.
    pub(super) fn part_with_transport(&self, ctl: &mut FlowCtl) {
        self.stream.bar();
        if let Some(transport) = &ctl.transport {
            self.hub.unwatch(transport.descriptor());
            self.forget_carrier();
            ctl.parted = true;
        }
        self.close_parted(ctl);
    }

    /// Closes the transport with which the flow has parted, if no data call is inside.
    pub(super) fn close_parted(&self, ctl: &mut FlowCtl) {
        if ctl.parted && self.stream.idle() {
            ctl.transport = None;
        }
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
        let transport = ctl.transport.clone();
        let in_use = transport.as_ref().filter(|_| !self.stream.is_barred());
        let has_unread = || in_use.is_some_and(|transport| transport.unread() > 0);
        let unread = || !ctl.receiving.stash.is_empty() || has_unread();
        let reset = reset || self.queued.load(Ordering::SeqCst) || unread();
        let end = self.end_sending().or_else(|| self.stream.local_final());
        let how = if reset { FinHow::Reset } else { FinHow::Close };
        if !self.plain.load(Ordering::Acquire) {
            // The agent must know before the kernel sends the FIN: the peer may ask about it, and must not hear that the flow is open.
            let end = end.unwrap_or_default();
            self.agent().finish(self.token, end, how);
        }
        ctl.receiving.stash = Stash::new();
        if reset {
            match &transport {
                Some(FlowTransport::Socket(sock)) => {
                    let at_once = slim_sys::AT_ONCE;
                    slim_sys::set_option(sock.raw(), libc::SOL_SOCKET, libc::SO_LINGER, &at_once);
                }
                // Wakes threads that wait on it.
                Some(FlowTransport::Carrier(carried)) => carried.carrier.suspend(),
                None => {}
            }
            drop(transport);
            self.part_with_transport(&mut ctl);
            self.agent().gone(self.token);
        } else {
            if let Some(transport) = &transport {
                self.hub.unwatch(transport.descriptor());
            }
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
