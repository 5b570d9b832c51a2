//! The sizes of an endpoint's tables, and how old entries are forgotten.
//!
//! The entries of a flow are removed with the flow. Entries that outlive their flow are bounded in number by their table, and
//! in time by [`Endpoint::tidy`].

use super::Endpoint;
use crate::ids::Time;

/// Number of entries in the tables of an endpoint: see [`Endpoint::tables`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Flows.
    pub flows: usize,
    /// Ids and addresses by which flows are found, and candidates.
    pub names: usize,
    /// Resume connections that are not transports yet.
    pub conns: usize,
    /// Timers that are set.
    pub timers: usize,
    /// Questions to peers that have not been answered.
    pub questions: usize,
    /// Entries that outlive flows for a limited time: ids and keys of ended flows, early and late HELLOs, peers and their
    /// addresses. Each of these tables is bounded.
    pub past: usize,
}

impl Endpoint {
    /// The sizes of all tables now.
    pub fn tables(&self) -> Tables {
        let (questions, gone) = self.inquiries.len();
        Tables {
            flows: self.flows.len(),
            names: self.by_id.len()
                + self.by_ends.len()
                + self.dialling.len()
                + self.numbers.len()
                + self.candidates.len(),
            conns: self.conns.len() + self.fresh.len() + self.flushes.len(),
            timers: self.timers.len(),
            questions: questions
                + self.probes.len()
                + self.reaches.len()
                + self.exchanges.len()
                + self.accusations.len(),
            past: [
                self.tombs.len(),
                self.pairs.len(),
                self.offers.len(),
                gone,
                self.late.len(),
                self.pending.len(),
                self.refusals.len(),
                self.askers.len(),
                self.hellos.len(),
                self.connects.len(),
                self.trials.len(),
                self.outlooks.len(),
                self.processes.len(),
                self.silences.len(),
                self.holds.len(),
            ]
            .iter()
            .sum(),
        }
    }

    /// Forgets entries that are too old, and gives memory back. To be called about once a minute while
    /// something happens, and after that for as long as it returns true: entries are left that will expire.
    pub fn tidy(&mut self, now: Time) -> bool {
        self.tombs.expire(now);
        self.pairs.expire(now);
        self.offers.expire(now);
        self.late.expire(now);
        self.pending.tidy(now);
        self.refusals.expire(now);
        self.askers.expire(now, self.config.hello_timeout);
        self.inquiries.expire(now);
        self.hellos.expire(now);
        self.connects.expire(now);
        self.trials.expire(now);
        self.outlooks.expire(now);
        self.silences.expire(now);
        self.forget_holds();
        // After the tombs, because tombs refer to processes.
        self.processes.forget_unused();
        if self.conns.is_empty() {
            self.conns.shrink_to_fit();
            self.fresh.shrink_to_fit();
            self.flushes.shrink_to_fit();
        }
        let known = self.processes.len();
        let tables = self.tables();
        // Ended flows are remembered for as long as flows can be held. That is no reason to wake every minute.
        let kept = match self.config.hold {
            Some(_) => self.tombs.len(),
            None => 0,
        };
        tables.past - kept > known || tables.questions > 0
    }

    /// Whether a peer may still ask about a flow that has ended.
    pub fn remembers_flows(&self) -> bool {
        self.tombs.len() > 0
    }
}
