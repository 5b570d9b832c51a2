//! How much an endpoint remembers, and for how long.
//!
//! What a flow takes goes with the flow. What outlives it is bounded in number by its table, and in time by
//! [`Endpoint::tidy`].

use super::Endpoint;
use crate::ids::Time;

/// How many entries the tables of an endpoint have: see [`Endpoint::tables`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Flows.
    pub flows: usize,
    /// Names and addresses by which flows are found, and who may be at their other ends.
    pub names: usize,
    /// Connections that are to become transports, or have not said for which flow they are.
    pub conns: usize,
    /// Timers that are set.
    pub timers: usize,
    /// Questions to peers that have no answer.
    pub questions: usize,
    /// What outlives flows, for a while: their names and keys, HELLOs that are early or late, peers and their addresses.
    /// Each table of them is bounded.
    pub past: usize,
}

impl Endpoint {
    /// How much is remembered at this moment.
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
            questions: questions + self.probes.len() + self.reaches.len() + self.exchanges.len(),
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
                self.processes.len(),
            ]
            .iter()
            .sum(),
        }
    }

    /// Forgets what is too old to be of any use, and gives memory back. To be called about once a minute while
    /// something happens, and again for as long as the answer is that something is left that will be too old.
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
        // Not before the tombs, which have some.
        self.processes.forget_unused();
        if self.conns.is_empty() {
            self.conns.shrink_to_fit();
            self.fresh.shrink_to_fit();
            self.flushes.shrink_to_fit();
        }
        let known = self.processes.len();
        let tables = self.tables();
        tables.past > known || tables.questions > 0
    }
}
