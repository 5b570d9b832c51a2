//! Waiting on a carrier, whose descriptor must be reset by those who wait.
//!
//! A socket is readable as long as it has bytes. The descriptor of a carrier only says that something has happened, and is reset before one looks
//! what. So of all threads that sleep in blocking calls of a flow one *leads*: it sleeps on the descriptor, resets it, and wakes the others, which
//! sleep on the stream's signal. While a thread leads, only that thread resets the descriptor, and it reports to the session's poll set: the poll
//! set does not see an event any more whose descriptor was reset.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slim_core::Cause;

use super::core::{FlowCore, locked};
use super::transport::{CARRIED, Carried, DataPath, FlowTransport};
use crate::hub::bits;

/// The thread that leads. Dropping it ends that.
struct Leader<'a> {
    core: &'a FlowCore,
    carried: &'a Carried,
    /// Whether the descriptor was readable in the end, and so was reset.
    happened: &'a Cell<bool>,
}

impl FlowCore {
    /// Leads, until something has happened to the carrier, at most `limit`. Returns false at once if another thread leads, or if the stream's signal
    /// has changed since it was `seen`.
    pub(super) fn sleep_on(
        self: &Arc<Self>,
        carried: &Carried,
        seen: u32,
        limit: Duration,
    ) -> bool {
        let happened = Cell::new(false);
        let Some(leader) = self.lead(carried, seen, &happened) else {
            return false;
        };
        let fd = carried.carrier.descriptor().raw();
        self.agent().wait_for(fd, libc::POLLIN, limit);
        drop(leader);
        if happened.get() {
            self.look_at_carrier(true);
        }
        true
    }

    fn lead<'a>(
        &'a self,
        carried: &'a Carried,
        seen: u32,
        happened: &'a Cell<bool>,
    ) -> Option<Leader<'a>> {
        let mut leads = locked(&carried.leads);
        if *leads || self.stream.signal() != seen {
            return None;
        }
        *leads = true;
        Some(Leader {
            core: self,
            carried,
            happened,
        })
    }

    /// The present transport, if it is a carrier.
    pub(super) fn carried(&self) -> Option<Arc<Carried>> {
        if !self.is_carried() {
            return None;
        }
        match &self.ctl().transport {
            Some(FlowTransport::Carrier(carried)) => Some(carried.clone()),
            _ => None,
        }
    }

    /// The poll set has reported an event of the carrier.
    pub(super) fn carrier_ready(self: &Arc<Self>, carried: &Carried) {
        let leads = locked(&carried.leads);
        if *leads {
            // That thread has been woken, too, and will report.
            return;
        }
        self.reset_carrier(carried);
        drop(leads);
        self.agent().wake_waiting();
        self.look_at_carrier(false);
    }

    /// The caller has locked `leads`.
    fn reset_carrier(&self, carried: &Carried) {
        carried.carrier.reset();
        self.stream.wake();
    }

    /// Finds out what has happened to the carrier, whose descriptor was reset, and reports it. With `wake` the session's descriptor becomes readable.
    fn look_at_carrier(self: &Arc<Self>, wake: bool) {
        // A suspended flow can transfer nothing, and reports when it is resumed.
        if !matches!(self.enter(), Ok(true)) {
            return;
        }
        let DataPath::Carrier(carried) = self.way() else {
            return self.leave();
        };
        let carrier = &carried.carrier;
        let over = carrier.is_over();
        let room = over || (self.blocked.load(Ordering::SeqCst) && carrier.has_room());
        if over {
            // The bytes that arrived before it broke are drained.
            self.fault(Cause::Errno(libc::ECONNRESET));
        }
        self.leave();
        let mut what = bits::READABLE;
        if room && self.blocked.swap(false, Ordering::SeqCst) {
            what |= bits::WRITABLE;
        }
        self.note_and(what, wake);
    }
}

impl FlowCore {
    /// What a data call uses. The caller is inside the stream.
    pub(super) fn way(&self) -> DataPath {
        match self.fd.load(Ordering::Relaxed) {
            CARRIED => self.carried_way(),
            fd => DataPath::Socket(fd),
        }
    }

    /// Whether the transport is a carrier.
    pub(super) fn is_carried(&self) -> bool {
        self.fd.load(Ordering::Relaxed) == CARRIED
    }

    #[cold]
    fn carried_way(&self) -> DataPath {
        // Both change only while no call is inside, except that the carrier of a closed flow is dropped.
        let carried = locked(&self.carrier).clone();
        carried.map_or(DataPath::Gone, DataPath::Carrier)
    }

    /// No later data call uses the carrier.
    pub(super) fn forget_carrier(&self) {
        if self.is_carried() {
            drop(locked(&self.carrier).take());
        }
    }

    /// Makes this the transport. No call is inside the stream.
    pub(super) fn carry_by(
        &self,
        place: &mut Option<FlowTransport>,
        transport: FlowTransport,
    ) -> FlowTransport {
        let (fd, carried) = match &transport {
            FlowTransport::Socket(sock) => (sock.raw(), None),
            FlowTransport::Carrier(carried) => (CARRIED, Some(carried.clone())),
        };
        self.fd.store(fd, Ordering::Relaxed);
        *locked(&self.carrier) = carried;
        place.insert(transport).clone()
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let mut leads = locked(&self.carried.leads);
        let fd = self.carried.carrier.descriptor().raw();
        // Decided under the lock: what happens from here on stays for the next leader, or for the poll set, which no thread keeps from it any more.
        if slim_sys::ready(fd, libc::POLLIN) != 0 {
            self.happened.set(true);
            self.core.reset_carrier(self.carried);
        } else {
            // One of the others leads now.
            self.core.stream.wake();
        }
        *leads = false;
        drop(leads);
        // What has happened may concern the others.
        self.core.agent().wake_waiting();
    }
}
