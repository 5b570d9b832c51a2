//! Many flows that end at once, because their front end or the agent is about to go.

use std::net::SocketAddr;
use std::ops::RangeInclusive;

use slim_core::config::WhenLost;
use slim_core::event::EscalateReason;
use slim_core::{FlowToken, Time, Verdict};

use super::Driver;
use crate::commands::command::FlowsEnd;
use crate::events;

impl Driver {
    /// Ends the session of the flows with these tokens. Returns how many there were, without closed ones that are not delivered.
    pub(super) fn end_flows(
        &mut self,
        now: Time,
        tokens: RangeInclusive<FlowToken>,
        how: FlowsEnd,
    ) -> usize {
        let all = self.survivor.tokens(tokens);
        let lingers = |driver: &Self, token| driver.watch.linger.has(token);
        let open = all.iter().filter(|token| !lingers(self, **token)).count();
        for token in all {
            match how {
                FlowsEnd::Forgotten => self.gone(now, token),
                FlowsEnd::Lost => self.lose(now, token),
                FlowsEnd::Plain if lingers(self, token) => {}
                FlowsEnd::Plain => self.endpoint.demote(now, token),
            }
        }
        open
    }

    /// Carries out `Fence`: see there.
    pub(super) fn fence(&mut self, reason: EscalateReason, tell: Option<(SocketAddr, Vec<u8>)>) {
        let why = match reason {
            EscalateReason::NoWitness => {
                "this process can reach neither its peer nor the witness of the job"
            }
            _ => {
                "another process of the job could not reach this one, and the verdict is against it"
            }
        };
        let exits = self.when_lost == Some(WhenLost::Exit);
        let then = match exits {
            true => "it ends itself (SLIM_WHEN_LOST=exit)",
            false => "its connections end with an error",
        };
        self.write_events();
        self.log
            .error(|| format!("lost: {why}; the job goes on without it, so {then}"));
        if exits {
            events::write_out();
        }
        if let Some((to, data)) = tell {
            self.control.send(to, None, &data);
        }
        if exits {
            slim_sys::end_self();
        }
    }

    /// Ends a flow as after a panic of the agent.
    fn lose(&mut self, now: Time, token: FlowToken) {
        if let Some(io) = self.survivor.io(token) {
            match self.survivor.is_away(token) {
                true => io.escalate(Verdict::Errno(libc::ECONNRESET)),
                false => io.legacy(false),
            }
        }
        self.gone(now, token);
    }
}
