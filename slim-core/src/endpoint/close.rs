//! The end of a flow, and how to find out whether an end is genuine: `docs/PROTOCOL.md`, section "End of a flow,
//! and questions about it".
//!
//! FIN announces the end; it may get lost, and nothing depends on it. The answer to a question is
//! authoritative: to QUERY after an end of stream that was not announced, to RESUME after a failure of the transport.
//! To answer such questions, a flow that is over leaves a tombstone.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::aged::Aged;
use super::candidates::Candidate;
use super::flow::State;
use super::record::{DrainState, Leaving, Peer};
use super::{Action, Endpoint};
use crate::auth::{Fresh, seal_with_job};
use crate::event::{EscalateReason, Event, LegacyReason, LingerLimit};
use crate::ids::{FinHow, FlowId, FlowToken, Role, Time, Verdict, take};
use crate::wire::{Demote, Fin, FlowStatus, Message, Parsed, Query, Status, Unknown};

/// Maximum number of tombstones.
const TOMBS: usize = 4096;
/// Lifetime of a tombstone.
pub(super) const TOMB_AGE: Duration = Duration::from_secs(120);

/// The message that said where the peer's stream ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EndSource {
    /// FIN. The peer may have sent more since.
    Unasked,
    /// STATUS.
    Asked,
}

/// A flow that is over.
#[derive(Clone)]
pub(super) struct Tomb {
    pub(super) peer: Peer,
    pub(super) status: FlowStatus,
}

/// Flows that are over.
pub(super) type Tombs = Aged<(FlowId, Role), Tomb, TOMBS>;

impl Endpoint {
    /// The application has finished with a flow after sending `final_seq` bytes. A half-closed flow
    /// can still be resumed, in both directions. A flow that was closed, or shut in both directions, can still be
    /// resumed until [`gone`](Endpoint::gone). A flow that was reset is over. The peer is told by FIN.
    pub fn finish(&mut self, now: Time, token: FlowToken, final_seq: u64, how: FinHow) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        flow.ended_at(final_seq, how);
        self.end_trial(now, token);
        self.announce_fin(token);
        if how == FinHow::Reset {
            self.flow(token).change.pump = None;
            self.abandon_connections(now, token);
            self.timers.clear_flow(token);
            let flow = self.flow(token);
            flow.query = None;
            flow.outage = None;
            flow.go(State::Closed);
            self.hello_over(now, token);
        }
    }

    /// As [`finish`](Endpoint::finish), without sending FIN: the peer has been told already, or has closed the flow itself and
    /// everything that it sent has been read.
    pub fn finish_announced(&mut self, token: FlowToken, final_seq: u64, how: FinHow) {
        if let Some(flow) = self.flows.get_mut(&token) {
            flow.ended_at(final_seq, how);
        }
    }

    /// The process of the application is about to end, which will finish the flow. Only FIN is sent; the flow stays as it is.
    /// If the application sends more after that, the peer asks by QUERY where the end is.
    pub fn announce(&mut self, token: FlowToken, final_seq: u64, how: FinHow) {
        let flow = self.flows.get(&token);
        let told = flow.is_some_and(|flow| {
            let known = flow.state().carries() || self.candidates.any(token);
            flow.fin.is_none() && known
        });
        if told {
            self.tell_fin(token, None, final_seq, how);
        }
    }

    /// The front end has given the flow up: its stream lacks bytes, or it is not known which bytes have been sent. The peer is told that
    /// the flow is reset, so that it takes the end of no connection for the end of the stream. A flow that is plain TCP or over stays
    /// as it is.
    pub fn out_of_step(&mut self, now: Time, token: FlowToken) {
        match self.state(token) {
            Some(State::Negotiating) => self.hello_over(now, token),
            Some(state) if state.carries() => {}
            _ => return,
        }
        self.escalate_with_cause(now, token, EscalateReason::OutOfStep);
    }

    /// The application has closed the flow, and the driver stops waiting for the delivery of its bytes: `owed` bytes
    /// may get lost. The driver calls [`gone`](Endpoint::gone) next.
    pub fn orphan(&mut self, now: Time, token: FlowToken, owed: u64, limit: LingerLimit) {
        self.emit(token, Event::Orphaned { owed, limit });
        if self.lacks_transport(token) {
            self.escalate_with_cause(now, token, EscalateReason::Orphaned);
        }
    }

    /// The driver has released everything of this flow. Its token may be used again.
    pub fn gone(&mut self, now: Time, token: FlowToken) {
        if !self.flows.contains_key(&token) {
            return;
        }
        self.abandon_connections(now, token);
        self.hello_over(now, token);
        self.timers.clear_flow(token);
        let candidates = self.take_candidates(token);
        self.relayed.remove(&token);
        self.forget_failback(now, token);
        self.silences.moved.remove(&token);
        self.silences.deaf.remove(&token);
        let Some(mut flow) = self.flows.remove(&token) else {
            return;
        };
        if let Some(peer) = flow.peer_id() {
            self.reach_remove_flow(token, peer);
        }
        if let Some((sent, how)) = flow.fin
            && flow.peer.is_some()
            && !matches!(flow.state(), State::Legacy | State::Escalated)
        {
            let event = Event::Closed { how, sent };
            self.out.event(token, flow.name(), event);
        }
        // A later connection may have the same addresses.
        if self.by_ends.get(&flow.ends) == Some(&token) {
            self.by_ends.remove(&flow.ends);
        }
        self.clear_dialling(&flow.ends, token);
        let status = match (flow.status(), flow.fin) {
            (FlowStatus::Legacy, _) => flow.final_unasked(),
            // The driver has released the flow, so nothing can be sent or received for it any more.
            (FlowStatus::Open, _) => FlowStatus::Reset,
            (FlowStatus::HalfClosed(end), _) => FlowStatus::Closed(end),
            (status, _) => status,
        };
        let asked = candidates.last().map(|candidate| candidate.id);
        for Candidate { id, peer, .. } in candidates {
            // The connector has closed the flow before its candidate had to be asked.
            if flow.role == Role::Connector
                && let Some((sent, how)) = flow.fin
            {
                self.out.event(token, id, Event::Live);
                self.out.event(token, id, Event::Closed { how, sent });
            }
            let tomb = Tomb { peer, status };
            self.tombs.put(now, (id, flow.role), tomb);
        }
        let name = flow.id.map(|id| (id, flow.role));
        if let Some(name) = name
            && self.by_id.get(&name) == Some(&token)
        {
            self.by_id.remove(&name);
        }
        if let Some((id, Role::Acceptor)) = name {
            self.pairs.forget(now, &id);
        }
        self.note_ended(now, &flow);
        if let (Some(name), Some(peer)) = (name, flow.peer.take()) {
            self.tombs.put(now, name, Tomb { peer, status });
        } else {
            self.note_unmet(now, &flow, status, asked);
        }
        take(&mut self.numbers, token);
    }

    /// Sends the final status of a flow that has left only its tomb: DEMOTE or FIN to the peer at `ip`, under the flow key.
    pub(super) fn announce_final_status(
        &mut self,
        (flow, role): (FlowId, Role),
        tomb: &Tomb,
        ip: IpAddr,
    ) {
        let fin = |final_seq, how| {
            Message::Fin(Fin {
                flow,
                final_seq,
                how,
            })
        };
        let message = match tomb.status {
            FlowStatus::Legacy => Message::Demote(Demote { flow }),
            FlowStatus::Closed(end) => fin(end, FinHow::Close),
            FlowStatus::Reset => fin(0, FinHow::Reset),
            FlowStatus::Open | FlowStatus::HalfClosed(_) => return,
        };
        let data = tomb.peer.key.seal(role, Fresh::None, &message);
        let to = (ip, tomb.peer.process.control_port).into();
        self.out.datagram(to, None, data);
    }

    /// Tells the peer that our application has finished, if it has.
    pub(super) fn announce_fin(&mut self, token: FlowToken) {
        self.announce_fin_to(token, None);
    }

    /// As [`announce_fin`](Self::announce_fin). While the peer is not known, FIN goes to all candidates, or to `only` that one.
    pub(super) fn announce_fin_to(&mut self, token: FlowToken, only: Option<FlowId>) {
        if let Some((final_seq, how)) = self.flows[&token].fin {
            self.tell_fin(token, only, final_seq, how);
        }
    }

    fn tell_fin(&mut self, token: FlowToken, only: Option<FlowId>, final_seq: u64, how: FinHow) {
        let flow = &self.flows[&token];
        if flow.state() == State::Legacy {
            return;
        }
        let fin = |flow| {
            Message::Fin(Fin {
                flow,
                final_seq,
                how,
            })
        };
        self.tell(token, only, fin);
    }

    pub(super) fn announce_demote(&mut self, token: FlowToken) {
        self.tell(token, None, |flow| Message::Demote(Demote { flow }));
    }

    /// Sends the peer a message under the flow key; `message` gets the flow id. While the peer is not known, the
    /// message goes to all candidates, or to `only` that one.
    pub(super) fn tell(
        &mut self,
        token: FlowToken,
        only: Option<FlowId>,
        message: impl Fn(FlowId) -> Message,
    ) {
        let flow = &self.flows[&token];
        match flow.control() {
            Some(to) => {
                let data = self.seal(token, Fresh::None, &message(flow.name()));
                let from = self.own_end(token, to);
                self.out.datagram(to, from, data);
            }
            None => self.tell_candidates(token, only, message),
        }
    }

    pub(super) fn on_fin(&mut self, now: Time, parsed: &Parsed<'_>, fin: &Fin) {
        let end = Some((fin.final_seq, fin.how));
        self.prove(now, fin.flow, (Fresh::None, parsed), end);
        let Some(token) = self.genuine(fin.flow, parsed) else {
            return self.drop_one();
        };
        self.peer_finished(now, token, fin.final_seq, fin.how, EndSource::Unasked);
    }

    /// The peer's application has finished, as a FIN or a STATUS says.
    pub(super) fn peer_finished(
        &mut self,
        now: Time,
        token: FlowToken,
        end: u64,
        how: FinHow,
        source: EndSource,
    ) {
        let flow = self.flow(token);
        if !flow.state().carries() {
            return;
        }
        if how == FinHow::Reset {
            flow.peer_fin = Some((end, how));
            // A live connection will report the reset itself, after the bytes that were sent before.
            if flow.state() != State::Live {
                self.escalate_with_cause(now, token, EscalateReason::PeerReset);
            }
            return;
        }
        self.learn_final(token, end, how);
        match &mut self.flow(token).outage {
            Some(outage) if outage.errno.is_some() => {
                outage.confirmed |= source == EndSource::Asked;
                self.check_error(now, token);
            }
            _ => self.eof_explained(now, token, end, source),
        }
    }

    /// Tells the front end where the end of the peer's stream is genuine.
    pub(super) fn learn_final(&mut self, token: FlowToken, end: u64, how: FinHow) {
        let flow = self.flow(token);
        let known = flow.peer_fin.replace((end, how));
        if known.is_none_or(|(known, _)| known != end) {
            self.out.push(Action::PeerFinal { token, seq: end });
        }
    }

    pub(super) fn on_query(
        &mut self,
        now: Time,
        from: SocketAddr,
        local: SocketAddr,
        parsed: &Parsed<'_>,
        query: &Query,
    ) {
        let answer = |state| {
            Message::Status(Status {
                flow: query.flow,
                nonce: query.nonce,
                state,
            })
        };
        self.prove_by_query(now, query.flow, parsed);
        let mut known = self.candidates.may_have_been() || self.awaits_answer(now, query.flow);
        for role in [Role::Connector, Role::Acceptor] {
            if let Some(&token) = self.by_id.get(&(query.flow, role)) {
                let flow = &self.flows[&token];
                match &flow.peer {
                    Some(peer) if peer.key.verify(role.other(), Fresh::None, parsed) => {
                        let peer = peer.process.id;
                        if self.is_lost(peer) {
                            return self.tell_lost(peer);
                        }
                        let data = self.seal(token, Fresh::None, &answer(flow.status()));
                        if role == Role::Acceptor {
                            // With this answer, the connector knows that its OPEN was taken. From now on its FIN comes
                            // to the control port, not to the mailbox.
                            self.pairs.forget(now, &query.flow);
                        }
                        self.peer_asks(token);
                        self.held_asked(now, token, from.ip());
                        return self.out.datagram(from, Some(local), data);
                    }
                    // Without a key the question cannot be answered yet. If the negotiation is over,
                    // there is no session, and the answer is UNKNOWN.
                    Some(_) => known = true,
                    None => known |= flow.state() == State::Negotiating,
                }
            }
            if let Some(tomb) = self.tombs.get(now, &(query.flow, role)) {
                if tomb.peer.key.verify(role.other(), Fresh::None, parsed) {
                    let peer = tomb.peer.process.id;
                    if self.is_lost(peer) {
                        return self.tell_lost(peer);
                    }
                    let message = answer(tomb.status);
                    let data = tomb.peer.key.seal(role, Fresh::None, &message);
                    return self.out.datagram(from, Some(local), data);
                }
                known = true;
            }
        }
        if known {
            return self.drop_one();
        }
        // A connector that gets UNKNOWN for an OPEN sends HELLO instead, so the OPEN must not count later.
        self.forget_open(now, query.flow, parsed);
        let message = Message::Unknown(Unknown {
            flow: query.flow,
            nonce: query.nonce,
            endpoint: self.id,
        });
        let data = seal_with_job(self.config.job_key.as_ref(), &message);
        self.out.datagram(from, Some(local), data);
    }

    pub(super) fn on_demote(&mut self, now: Time, parsed: &Parsed<'_>, demote: &Demote) {
        self.prove(now, demote.flow, (Fresh::None, parsed), None);
        match self.genuine(demote.flow, parsed) {
            Some(token) => self.leave(now, token, Leaving::Theirs),
            None => self.drop_one(),
        }
    }

    /// The flow that a control message is about, if the message verifies under the key of that flow.
    pub(super) fn genuine(&self, id: FlowId, parsed: &Parsed<'_>) -> Option<FlowToken> {
        [Role::Connector, Role::Acceptor]
            .into_iter()
            .find_map(|role| {
                let token = *self.by_id.get(&(id, role))?;
                let peer = self.flows.get(&token)?.peer.as_ref()?;
                peer.key
                    .verify(role.other(), Fresh::None, parsed)
                    .then_some(token)
            })
    }

    /// The peer process does not exist any more, or has forgotten the flow.
    pub(super) fn peer_gone(&mut self, now: Time, token: FlowToken, reason: EscalateReason) {
        if self.flow(token).state() == State::Live {
            // There was only a stall. The old transport is still in use and will report an error by itself.
            self.abandon_connections(now, token);
            let flow = self.flow(token);
            flow.outage = None;
            flow.query = None;
            self.timers.clear_flow(token);
            return self.prefer_later(now, token);
        }
        if self.ended_intact(token) {
            return self.fall_back(now, token, LegacyReason::PeerForgot);
        }
        self.escalate_with_cause(now, token, reason);
    }

    /// Whether the old transport has only ended, without an error, and has not been drained. The end of a relayed transport does not count: the
    /// witness's kernel has sent it.
    pub(super) fn ended_intact(&self, token: FlowToken) -> bool {
        let flow = &self.flows[&token];
        !self.is_relayed(token)
            && flow.change.drained == DrainState::No
            && flow.change.awaiting.is_none()
            && flow.change.pump.is_none()
            && flow
                .outage
                .as_ref()
                .is_some_and(|outage| outage.eof.is_some() && outage.errno.is_none())
    }

    /// The peer has no session for this flow. If the old transport is intact, the flow becomes plain TCP on it;
    /// if not, the flow is given up.
    pub(super) fn fall_back(&mut self, now: Time, token: FlowToken, reason: LegacyReason) {
        let flow = self.flow(token);
        if !matches!(flow.state(), State::Suspended | State::Resuming) {
            return self.leave(now, token, Leaving::Theirs);
        }
        if !flow.intact() && !self.ended_intact(token) {
            return self.escalate_with_cause(now, token, EscalateReason::PeerForgot);
        }
        let flow = self.end_outage(now, token);
        flow.go(State::Legacy);
        self.emit(token, Event::Legacy { reason });
        self.reinstate_legacy(token);
    }

    /// Gives a flow up.
    pub(super) fn escalate(
        &mut self,
        now: Time,
        token: FlowToken,
        reason: EscalateReason,
        verdict: Verdict,
    ) {
        self.flow(token).change.pump = None;
        self.abandon_connections(now, token);
        self.timers.clear_flow(token);
        if !matches!(
            reason,
            EscalateReason::PeerClosed | EscalateReason::PeerReset
        ) {
            self.report(token);
        }
        let event = self.escalation(now, token, reason, verdict);
        let flow = self.flow(token);
        flow.query = None;
        flow.outage = None;
        flow.go(State::Escalated);
        let final_seq = flow.fin.map_or(0, |(end, _)| end);
        self.out.push(Action::Escalate { token, verdict });
        if let Some(event) = event {
            self.emit(token, event);
        }
        let peer_waits = matches!(
            reason,
            EscalateReason::Attempts
                | EscalateReason::Deadline
                | EscalateReason::OutOfStep
                | EscalateReason::Orphaned
        );
        if peer_waits {
            self.tell_fin(token, None, final_seq, FinHow::Reset);
        }
    }

    /// The event of an escalation, which is noted for [`poll_escalation`](Self::poll_escalation); none for a flow that has lost no
    /// transport.
    fn escalation(
        &mut self,
        now: Time,
        token: FlowToken,
        reason: EscalateReason,
        verdict: Verdict,
    ) -> Option<Event> {
        let outage = self.flows[&token].outage.as_ref()?;
        let (cause, attempts) = (outage.trouble(), outage.attempts.as_ref());
        let attempts = attempts.map_or(0, |attempts| attempts.begun);
        let evidence = reason.evidence(outage.accused, outage.heard);
        let errno = match verdict {
            Verdict::Errno(errno) => errno,
            Verdict::Eof => 0,
        };
        self.note_escalation(now, token, (cause, reason, evidence), attempts, errno);
        Some(Event::Escalate {
            cause,
            reason,
            errno,
            evidence,
        })
    }

    /// Logs the escalation of a flow whose application will not see it, because the process ends.
    pub(super) fn tell_escalation(
        &mut self,
        now: Time,
        token: FlowToken,
        reason: EscalateReason,
        verdict: Verdict,
    ) {
        if let Some(event) = self.escalation(now, token, reason, verdict) {
            self.emit(token, event);
        }
    }

    /// Escalates for a flow that never had a session: the application gets the error as without SLIM.
    pub(super) fn escalate_quietly(&mut self, _now: Time, token: FlowToken, errno: i32) {
        self.timers.clear_flow(token);
        self.flow(token).go(State::Escalated);
        self.out.push(Action::Escalate {
            token,
            verdict: Verdict::Errno(errno),
        });
    }
}

impl State {
    /// Whether a flow in this state has a session that is not over.
    pub(super) fn carries(self) -> bool {
        matches!(self, State::Live | State::Suspended | State::Resuming)
    }
}
