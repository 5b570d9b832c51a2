//! An end of stream, or a failure like one, is explained: it is genuine, or a fault. `docs/PROTOCOL.md`, section "End of a
//! flow, and questions about it".

use std::time::Duration;

use super::close::EndSource;
use super::errno::EPIPE;
use super::flow::State;
use super::record::{Bar, FlowRecord, Leaving, QueryPurpose};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::event::{EscalateReason, Event};
use crate::ids::{FinHow, FlowToken, Time};

/// If a transport has failed as if the peer had closed the flow, attempts start only if the peer does not confirm that within
/// this time.
const EXPLANATION: Duration = Duration::from_millis(5);

impl Endpoint {
    /// The peer's stream is `end` bytes long: compares that with the number of bytes received when the stream ended.
    pub(super) fn eof_explained(
        &mut self,
        now: Time,
        token: FlowToken,
        end: u64,
        source: EndSource,
    ) {
        let flow = self.flow(token);
        let Some(at) = flow.outage.as_ref().and_then(|outage| outage.eof) else {
            return;
        };
        match at.cmp(&end) {
            std::cmp::Ordering::Equal if flow.intact() => self.reinstate(now, token),
            // The end was genuine, but the transport cannot be reinstated: bytes that we send would not arrive.
            std::cmp::Ordering::Equal => self.look_for_transport(now, token),
            // The stream was ended early, by a middlebox or an attacker.
            std::cmp::Ordering::Less => self.eof_is_fault(now, token),
            // A process that was about to end has sent FIN, and then more bytes. So this end was not announced.
            std::cmp::Ordering::Greater if source == EndSource::Unasked => {
                self.flow(token).peer_fin = None;
                self.ask(now, token, QueryPurpose::Eof);
            }
            // The peer's application writes past SLIM (io_uring, direct system calls). No byte is missing, but later bytes could
            // not be counted, so the flow becomes plain TCP.
            std::cmp::Ordering::Greater if flow.intact() => {
                flow.leaving = Some(Leaving::Ours);
                self.reinstate(now, token);
            }
            std::cmp::Ordering::Greater => {
                self.escalate_with_cause(now, token, EscalateReason::OutOfStep);
            }
        }
    }

    /// The transport has failed. That is no fault if the peer has closed or reset the flow. Otherwise attempts
    /// start.
    pub(super) fn check_error(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        if flow.is_resuming() {
            return;
        }
        let outage = flow.outage.as_ref();
        let refused = outage.is_some_and(|outage| outage.errno == Some(EPIPE));
        let confirmed = outage.is_some_and(|outage| outage.confirmed);
        let counted = outage.is_some_and(|outage| outage.out_of_count);
        match flow.peer_fin {
            Some((_, FinHow::Reset)) => {
                self.escalate_with_cause(now, token, EscalateReason::PeerReset);
            }
            // All bytes may have been received: drain and count before any attempt.
            _ if flow.closed_by_peer().is_some() => self.advance(now, token),
            Some((_, FinHow::Close)) if !counted => self.ask_about_error(now, token),
            // EPIPE: the peer's stream has ended, too. FIN, or a second FIN after a half-close, may be on its way.
            None | Some((_, FinHow::HalfClose)) if refused && !confirmed => {
                self.ask_about_error(now, token);
            }
            _ => self.look_for_transport(now, token),
        }
    }

    /// Asks whether the peer has closed the flow. A short deadline keeps this from delaying a resume much.
    fn ask_about_error(&mut self, now: Time, token: FlowToken) {
        let owner = TimerOwner::Flow(token, Timer::Explanation);
        if self.timers.get(owner).is_none() {
            self.drop_outgoing(now, token);
            self.timers.set(owner, now + EXPLANATION);
            self.ask(now, token, QueryPurpose::Eof);
        }
    }

    /// The peer has not confirmed in time that it closed the flow.
    pub(super) fn on_unexplained(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        if !flow.is_resuming() && flow.outage.is_some() {
            self.drop_query(token);
            self.start_attempts(now, token);
        }
    }

    /// Reinstates the old transport: its end of stream was genuine.
    pub(super) fn reinstate(&mut self, now: Time, token: FlowToken) {
        let told = self
            .flow(token)
            .outage
            .as_ref()
            .is_none_or(|o| o.kept.is_none());
        let flow = self.end_outage(now, token);
        flow.go(State::Live);
        let leaving = flow.leaving.take();
        self.out.push(Action::Reinstate { token });
        if told {
            self.emit(token, Event::Reinstate);
        }
        if let Some(leaving) = leaving {
            self.leave(now, token, leaving);
        }
    }

    /// Ends the outage: the old transport is used again.
    pub(super) fn end_outage(&mut self, now: Time, token: FlowToken) -> &mut FlowRecord {
        self.abandon_connections(now, token);
        self.update_state(token);
        self.timers.clear_flow(token);
        let flow = self.flow(token);
        flow.query = None;
        flow.outage = None;
        flow.bar = Bar::Open;
        flow
    }

    /// The flow's transport has ended: decides whether that end of stream is genuine.
    pub(super) fn check_eof(&mut self, now: Time, token: FlowToken) {
        match self.flow(token).peer_fin {
            Some((_, FinHow::Reset)) => {
                self.escalate_with_cause(now, token, EscalateReason::PeerReset);
            }
            Some((end, _)) => self.eof_explained(now, token, end, EndSource::Unasked),
            None => self.ask(now, token, QueryPurpose::Eof),
        }
    }

    /// The end of stream was not genuine: attempts start.
    pub(super) fn eof_is_fault(&mut self, now: Time, token: FlowToken) {
        self.drop_query(token);
        let flow = self.flow(token);
        let Some(outage) = &mut flow.outage else {
            return;
        };
        outage.eof = None;
        self.look_for_transport(now, token);
    }

    /// Starts attempts, if they have not started yet.
    pub(super) fn look_for_transport(&mut self, now: Time, token: FlowToken) {
        let outage = self.flow(token).outage.as_ref();
        if outage.is_some_and(|outage| outage.attempts.is_none()) {
            self.drop_query(token);
            self.start_attempts(now, token);
        }
    }
}
