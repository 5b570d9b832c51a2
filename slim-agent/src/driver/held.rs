//! Held flows: nothing is looked at more often than their timer fires ([`Endpoint::hold_timer`](slim_core::endpoint::Endpoint::hold_timer)),
//! once a minute at most.

use slim_core::{FlowToken, Time};

use super::{Driver, Notice};

impl Driver {
    /// Whether all flows without a transport are held.
    pub(crate) fn rests(&self) -> bool {
        self.survivor.all_away(|token| self.endpoint.is_held(token))
    }

    /// Carries out `Look`: have the bytes of a held flow moved since the last look?
    pub(super) fn look_at_held(&mut self, token: FlowToken) {
        if self.carriers.contains_key(&token) || self.watch.is_busy(token) {
            return;
        }
        let Some(io) = self.survivor.io(token) else {
            return;
        };
        let acked = io.probe().acked;
        let before = self.watch.held.insert(token, acked);
        if before.is_some_and(|before| before != acked) {
            self.watch.held.remove(&token);
            self.notices.push_back(Notice::Moves(token));
        }
    }

    /// Looks at the closed flows that are held. Between two expiries of the timer, that is not done.
    pub(super) fn look_at_held_lingering(&mut self, now: Time) {
        let all: Vec<FlowToken> = self.watch.linger.tokens().collect();
        for token in all {
            if self.endpoint.is_held(token) {
                self.poll_linger(now, token);
            }
        }
    }
}
