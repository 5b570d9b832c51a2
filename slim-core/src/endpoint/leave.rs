//! How a flow becomes plain TCP: `docs/PROTOCOL.md`, sections "Negotiation" and "End of a flow, and questions about it".

use super::candidates::Candidate;
use super::close::Tomb;
use super::flow::State;
use super::record::{Bar, Leaving};
use super::{Action, Endpoint};
use crate::config::Policy;
use crate::event::{Event, LegacyReason};
use crate::ids::{FlowToken, Role, Time};
use crate::wire::{Demote, FlowStatus, Message};

impl Endpoint {
    /// Ends negotiation without a session. The application of a flow that has already lost its
    /// transport gets its error.
    pub(super) fn become_legacy(&mut self, now: Time, token: FlowToken, reason: LegacyReason) {
        let required = self.config.policy == Policy::Required;
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let flow = self.flow(token);
        let fault = flow.outage.take();
        flow.go(State::Legacy);
        self.dismiss(now, token);
        self.emit(token, Event::Legacy { reason });
        match fault {
            Some(outage) if outage.errno.is_none() => self.reinstate_legacy(token),
            Some(outage) => self.escalate_quietly(now, token, outage.verdict()),
            None => self.out.push(Action::Legacy {
                token,
                required_refused: required,
            }),
        }
    }

    /// Whoever has said HELLO for the flow must not rely on us.
    fn dismiss(&mut self, now: Time, token: FlowToken) {
        self.tell_candidates(token, None, |flow| Message::Demote(Demote { flow }));
        self.forget_candidates(now, token);
    }

    /// A connector's candidate is the process that its OPEN was for: if that asks, or resumes, it is told that the flow is
    /// plain TCP. DEMOTE may be lost.
    fn forget_candidates(&mut self, now: Time, token: FlowToken) {
        let role = self.flow(token).role;
        for Candidate { id, peer, .. } in self.take_candidates(token) {
            if role == Role::Connector {
                let status = FlowStatus::Legacy;
                self.tombs.put(now, (id, role), Tomb { peer, status });
            }
        }
    }

    /// Our front end cannot keep its side of a session any longer.
    pub(super) fn leave(&mut self, now: Time, token: FlowToken, leaving: Leaving) {
        let flow = self.flow(token);
        match flow.state() {
            State::Negotiating | State::Live => {
                self.abandon_connections(now, token);
                self.timers.clear_flow(token);
                self.hello_over(now, token);
                let flow = self.flow(token);
                let fault = flow.outage.take().filter(|_| flow.bar == Bar::Shut);
                flow.query = None;
                flow.go(State::Legacy);
                self.emit_leaving(token, leaving);
                self.forget_candidates(now, token);
                match fault {
                    Some(outage) if outage.errno.is_none() => self.reinstate_legacy(token),
                    Some(outage) => self.escalate_quietly(now, token, outage.verdict()),
                    None => self.push_legacy(token, leaving),
                }
            }
            // The peer had a transport when it left, and we have not.
            State::Suspended if leaving == Leaving::Theirs => {
                self.fall_back(now, token, LegacyReason::PeerDemoted);
            }
            State::Suspended | State::Resuming => flow.leaving = Some(leaving),
            State::Legacy | State::Escalated | State::Closed => {}
        }
    }

    /// Puts the old transport back as plain TCP. The flow is `Legacy` already.
    pub(super) fn reinstate_legacy(&mut self, token: FlowToken) {
        self.out.push(Action::Reinstate { token });
        if self.config.policy == Policy::Required {
            self.out.push(Action::Legacy {
                token,
                required_refused: true,
            });
        }
    }

    fn emit_leaving(&mut self, token: FlowToken, leaving: Leaving) {
        match leaving {
            Leaving::Ours => {
                self.announce_demote(token);
                self.emit(token, Event::Demoted);
            }
            Leaving::Heard => self.emit(token, Event::Demoted),
            Leaving::Theirs => {
                let reason = LegacyReason::PeerDemoted;
                self.emit(token, Event::Legacy { reason });
            }
        }
    }

    /// The flow is plain TCP, and nobody is refused anything for it.
    pub(super) fn push_plain(&mut self, token: FlowToken) {
        self.push_legacy(token, Leaving::Ours);
    }

    fn push_legacy(&mut self, token: FlowToken, leaving: Leaving) {
        self.out.push(Action::Legacy {
            token,
            required_refused: leaving == Leaving::Theirs && self.config.policy == Policy::Required,
        });
    }
}
