//! Peers whose flow is lost although they may live: which of both ends reports the other.
//!
//! With ULFM, a reported process is failed for good, and ends itself if it lives. If both ends of a lost flow reported each other,
//! the job would lose both. So the end with the lower name reports at once; the other one waits. If it lives after that
//! time, the lower one has died.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::BtlModule;
use crate::endpoint::BtlEndpoint;

/// For how long the higher name waits for the report of the lower one: longer than the runtime takes to spread it.
const GRACE: Duration = Duration::from_millis(500);

/// A peer that is not reported yet. What is sent to it waits.
#[derive(Debug)]
struct Doubt {
    endpoint: Arc<BtlEndpoint>,
    why: String,
    until: Instant,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    list: Mutex<Vec<Doubt>>,
    any: AtomicBool,
}

impl Doubts {
    fn list(&self) -> MutexGuard<'_, Vec<Doubt>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, doubt: Doubt) {
        self.list().push(doubt);
        self.any.store(true, Ordering::Release);
    }

    /// Takes those that `is_due`.
    fn take(&self, mut is_due: impl FnMut(&Doubt) -> bool) -> Vec<Doubt> {
        let mut list = self.list();
        let due = list.extract_if(.., |doubt| is_due(doubt)).collect();
        self.any.store(!list.is_empty(), Ordering::Release);
        due
    }
}

impl BtlModule {
    /// A peer's flow is lost: Open MPI is told now, or after the grace.
    pub(super) fn lose(&self, endpoint: &Arc<BtlEndpoint>, why: &str) {
        if !self.survives_losses() || self.me < endpoint.name {
            self.report(endpoint, why);
            return;
        }
        if !endpoint.doubt() {
            return;
        }
        self.doubts.add(Doubt {
            endpoint: endpoint.clone(),
            why: why.to_owned(),
            until: Instant::now() + GRACE,
        });
    }

    /// Whether the job goes on without a lost peer.
    pub(super) fn survives_losses(&self) -> bool {
        self.upcalls.survives_losses != 0
    }

    /// Whether Open MPI knows that this peer has failed. It has not let go of the peer.
    pub(super) fn has_failed(&self, endpoint: &BtlEndpoint) -> bool {
        // SAFETY: the proc is Open MPI's own pointer, or null.
        unsafe { (self.upcalls.has_failed)(endpoint.proc(), endpoint.name.0) != 0 }
    }

    /// The same for a peer of which frames come; without ULFM no failure is known.
    pub(super) fn is_known_to_have_failed(&self, endpoint: &BtlEndpoint) -> bool {
        // Open MPI may not know the name of a peer that it has never sent to.
        self.survives_losses() && !endpoint.proc().is_null() && self.has_failed(endpoint)
    }

    /// Reports the peers whose grace is over, and lets go of those that Open MPI knows to have failed.
    pub(super) fn settle_doubts(&self) {
        if !self.doubts.any.load(Ordering::Acquire) {
            return;
        }
        let now = Instant::now();
        let due = self.doubts.take(|doubt| {
            let endpoint = &doubt.endpoint;
            endpoint.is_let_go() || now >= doubt.until || self.has_failed(endpoint)
        });
        for doubt in due {
            // What waited for a peer that Open MPI has let go of was freed then.
            if !doubt.endpoint.is_let_go() {
                self.report(&doubt.endpoint, &doubt.why);
            }
        }
    }
}
