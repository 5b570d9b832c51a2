//! Resumes after which nothing arrives: `docs/PROTOCOL.md`, section "Attempts".
//!
//! A path may carry the messages of a resume, but none of the bytes that follow: a path MTU below that of small segments, or a filter that
//! drops what is sent. Then each resume succeeds, and helps nobody. At each resume a side hears how many bytes the peer has received. If bytes
//! were sent again and that number stays the same, the time since the resume before counts as spent on attempts.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Endpoint;
use super::attempts::PATIENCE;
use crate::event::EscalateReason;
use crate::ids::{FlowToken, Time};

/// So much of the time between two resumes counts at most. The rest is an outage in which nothing passes, or the application has waited.
const COUNTS: Duration = Duration::from_secs(1);
/// A standstill is forgotten so long after the last resume.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// The flows whose last resume had bytes to send again.
#[derive(Default)]
pub(super) struct Standstills(BTreeMap<FlowToken, Standstill>);

/// What a flow has spent on resumes after which nothing arrives.
struct Standstill {
    /// Number of bytes that the peer has received.
    at: u64,
    /// The last resume.
    resumed: Time,
    spent: Duration,
    /// The flow is given up when so much is spent.
    limit: Duration,
}

impl Standstills {
    /// A resume: the peer has received `at` bytes, and there are more. `limit` applies if nothing has stood still so far. True if the limit is
    /// reached.
    fn is_over(&mut self, now: Time, token: FlowToken, at: u64, limit: Duration) -> bool {
        let new = || Standstill {
            at,
            resumed: now,
            spent: Duration::ZERO,
            limit,
        };
        let known = self.0.entry(token).or_insert_with(new);
        if known.at != at {
            *known = new();
        }
        known.spent += now.since(known.resumed).min(COUNTS);
        known.resumed = now;
        known.spent >= known.limit
    }

    pub(super) fn forget(&mut self, token: FlowToken) {
        self.0.remove(&token);
    }

    pub(super) fn expire(&mut self, now: Time) {
        self.0
            .retain(|_, known| now.since(known.resumed) < FORGOTTEN);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Endpoint {
    /// A resume is agreed on: we have sent `sent` bytes, of which the peer has received `peer_received`. True if the flow is given up instead,
    /// because nothing arrives however often it is resumed.
    pub(super) fn stands_still(
        &mut self,
        now: Time,
        token: FlowToken,
        sent: u64,
        peer_received: u64,
    ) -> bool {
        if sent == peer_received {
            self.standstills.forget(token);
            return false;
        }
        let outage = self.flows[&token].outage.as_ref();
        // The kernel would have waited so long for the first transport.
        let patient = outage.is_some_and(|outage| outage.patient());
        let attempts = match patient {
            true => PATIENCE,
            false => self.config.resumable_for(),
        };
        let limit = attempts + self.config.hold.unwrap_or_default();
        let over = self.standstills.is_over(now, token, peer_received, limit);
        if over {
            self.abandon_connections(now, token);
            self.update_state(token);
            self.give_up_for_good(now, token, EscalateReason::Attempts);
        }
        over
    }
}
