//! Demotion of a flow to plain TCP: `docs/PROTOCOL.md`, sections "Negotiation" and "End of a flow, and questions about it".

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
        let required = self.config.policy == Policy::Required || self.is_fenced();
        self.timers.clear_flow(token);
        self.hello_over(now, token);
        let flow = self.flow(token);
        let fault = flow.outage.take();
        flow.go(State::Legacy);
        self.demote_candidates(now, token);
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

    /// Tells all candidates of the flow by DEMOTE that there is no session, and forgets them.
    fn demote_candidates(&mut self, now: Time, token: FlowToken) {
        self.tell_candidates(token, None, |flow| Message::Demote(Demote { flow }));
        self.forget_candidates(now, token);
    }

    /// Forgets the candidates of the flow. A connector's candidate is the process that its OPEN was for. DEMOTE may be lost, so
    /// a tomb remains: if that process sends QUERY or RESUME, it learns that the flow is plain TCP. An acceptor's candidate that has not got
    /// HELLO_ACK cannot verify DEMOTE. It repeats HELLO, which is refused.
    fn forget_candidates(&mut self, now: Time, token: FlowToken) {
        let role = self.flow(token).role;
        for Candidate { id, peer, .. } in self.take_candidates(token) {
            match role {
                Role::Acceptor => self.late.refuse(now, id),
                Role::Connector => {
                    let status = FlowStatus::Legacy;
                    self.tombs.put(now, (id, role), Tomb { peer, status });
                }
            }
        }
    }

    /// Ends the session of a flow, which becomes plain TCP. A flow without a transport becomes plain TCP later.
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
            // The peer has demoted the flow while it had a transport, and we have none.
            State::Suspended if leaving == Leaving::Theirs => {
                self.fall_back(now, token, LegacyReason::PeerDemoted);
            }
            State::Suspended | State::Resuming => flow.leaving = Some(leaving),
            State::Legacy | State::Escalated | State::Closed => {}
        }
    }

    /// Reinstates the old transport as plain TCP. The flow is `Legacy` already.
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
            Leaving::MailboxState => self.emit(token, Event::Demoted),
            Leaving::Theirs => {
                let reason = LegacyReason::PeerDemoted;
                self.emit(token, Event::Legacy { reason });
            }
        }
    }

    /// Makes the flow plain TCP. The application may go on using it, even if the policy requires SLIM.
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
