//! The responder's side of the resume handshake.
//!
//! Until a proof has verified, a connection costs one table entry for a few seconds, and cannot affect
//! any flow.

use std::time::Duration;

use super::attempts::PEER_SILENT;
use super::flow::State;
use super::outage::Outage;
use super::record::{DrainState, FlowRecord};
use super::resume::{Bound, Conn, Stage};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::auth::{Fresh, seal_with_job};
use crate::event::Event;
use crate::ids::{Cause, ConnId, FlowToken, Nonce, Role, Time};
use crate::transport::{Locator, TransportKind};
use crate::wire::{
    Challenge, Confirm, FlowStatus, Message, Parsed, Refuse, RefuseReason, Resume, ResumeOk,
};

/// Maximum number of accepted connections without RESUME.
const FRESH: usize = 1024;
/// How long such a connection waits for RESUME.
const FRESH_AGE: Duration = Duration::from_secs(5);
/// When the table is full, the oldest connection is dropped if it is older than this: an honest initiator answers
/// within a round trip.
const FRESH_GRACE: Duration = Duration::from_millis(250);
/// After the peer's connection broke, the peer has this long to make the next one before we make one.
pub(super) const PEER_RETRY: Duration = Duration::from_millis(100);

/// The answer to a RESUME.
enum Answer {
    Accept(FlowToken),
    /// REFUSE under the key of this flow.
    Refuse(FlowToken, RefuseReason),
    /// REFUSE under the key of a flow that has left only its tomb.
    RefuseTomb(Role, RefuseReason),
    /// REFUSE without a flow key.
    RefuseWithoutKey(RefuseReason),
}

impl Endpoint {
    /// The driver has accepted a connection on the resume listener, or on the listener of another kind of transport. Another
    /// kind must itself decide which hosts may connect by it.
    pub fn handle_incoming(&mut self, now: Time, conn: ConnId, from: impl Into<Locator>) {
        let from = from.into();
        let kind = from.kind();
        let from = from.tcp();
        if from.is_some_and(|from| !self.may_know(from.ip())) {
            self.drop_one();
            return self.out.push(Action::Close { conn });
        }
        if self.fresh.len() >= FRESH && !self.evict(now) {
            self.drop_one();
            return self.out.push(Action::Close { conn });
        }
        let nonce_r = self.rng.nonce();
        self.conns.insert(
            conn,
            Conn::Fresh {
                nonce_r,
                since: now,
                kind,
            },
        );
        self.fresh.push_back(conn);
        self.timers.set(TimerOwner::Conn(conn), now + FRESH_AGE);
        let message = Message::Challenge(Challenge {
            endpoint: self.id,
            nonce_r,
        });
        let data = seal_with_job(self.config.job_key.as_ref(), &message);
        self.out.push(Action::Send { conn, data });
    }

    /// Makes room for a new connection. False if the oldest one is too young to be dropped.
    fn evict(&mut self, now: Time) -> bool {
        let Some(&oldest) = self.fresh.front() else {
            return false;
        };
        let old = match self.conns.get(&oldest) {
            Some(Conn::Fresh { since, .. }) => now.since(*since) >= FRESH_GRACE,
            _ => true,
        };
        if old {
            self.fresh.pop_front();
            self.close_conn(oldest);
        }
        old
    }

    /// No RESUME has come on a connection in time.
    pub(super) fn on_conn_timer(&mut self, conn: ConnId) {
        self.fresh.retain(|fresh| *fresh != conn);
        self.drop_one();
        self.close_conn(conn);
    }

    pub(super) fn on_resume(
        &mut self,
        now: Time,
        conn: ConnId,
        nonce_r: Nonce,
        parsed: &Parsed<'_>,
        resume: &Resume,
    ) {
        self.timers.clear(TimerOwner::Conn(conn));
        // Its place is near the front, because RESUMEs come roughly in the order of the connections.
        if let Some(place) = self.fresh.iter().position(|fresh| *fresh == conn) {
            self.fresh.remove(place);
        }
        let bound = Bound {
            nonce_r,
            nonce_i: resume.nonce_i,
        };
        let refusal = |reason| {
            Message::Refuse(Refuse {
                flow: resume.flow,
                nonce_i: resume.nonce_i,
                reason,
            })
        };
        let answer = self.judge(now, nonce_r, parsed, resume);
        let peer = match &answer {
            Answer::Accept(token) | Answer::Refuse(token, _) => self.flows[token].peer_id(),
            Answer::RefuseTomb(role, _) => {
                let tomb = self.tombs.get(now, &(resume.flow, *role));
                tomb.map(|tomb| tomb.peer.process.id)
            }
            Answer::RefuseWithoutKey(_) => None,
        };
        if let Some(peer) = peer.filter(|peer| self.is_lost(*peer)) {
            self.tell_lost(peer);
            return self.close_conn(conn);
        }
        let data = match answer {
            Answer::Accept(token) => return self.accept(now, token, conn, resume.epoch, bound),
            Answer::Refuse(token, reason) => self.seal(token, bound.into(), &refusal(reason)),
            Answer::RefuseTomb(role, reason) => match self.tombs.get(now, &(resume.flow, role)) {
                Some(tomb) => tomb.peer.key.seal(role, bound.into(), &refusal(reason)),
                None => return self.close_conn(conn),
            },
            Answer::RefuseWithoutKey(reason) => {
                seal_with_job(self.config.job_key.as_ref(), &refusal(reason))
            }
        };
        self.out.push(Action::Send { conn, data });
        self.close_conn(conn);
    }

    fn judge(&mut self, now: Time, nonce_r: Nonce, parsed: &Parsed<'_>, resume: &Resume) -> Answer {
        let fresh = Fresh::Responder(nonce_r);
        self.prove(now, resume.flow, (fresh, parsed), None);
        let mut keyless = match self.candidates.may_have_been() {
            true => RefuseReason::Busy,
            false => RefuseReason::UnknownFlow,
        };
        // Both ends of a flow may live in this process. The proof tells which one is meant.
        for role in [Role::Connector, Role::Acceptor] {
            if let Some(&token) = self.by_id.get(&(resume.flow, role)) {
                let flow = &self.flows[&token];
                match &flow.peer {
                    Some(_) if flow.said(fresh, parsed) => {
                        return answer_for(flow, self.own_request(flow), resume.epoch);
                    }
                    Some(_) => keyless = RefuseReason::BadProof,
                    // The answer to our HELLO is still on its way.
                    None if flow.state() == State::Negotiating => keyless = RefuseReason::Busy,
                    None => keyless = RefuseReason::Legacy,
                }
            }
            if let Some(tomb) = self.tombs.get(now, &(resume.flow, role)) {
                if tomb.peer.key.verify(role.other(), fresh, parsed) {
                    let reason = match tomb.status {
                        FlowStatus::Closed(end) | FlowStatus::HalfClosed(end) => {
                            RefuseReason::Closed(end)
                        }
                        FlowStatus::Legacy => RefuseReason::Legacy,
                        FlowStatus::Open | FlowStatus::Reset => RefuseReason::Reset,
                    };
                    return Answer::RefuseTomb(role, reason);
                }
                keyless = RefuseReason::BadProof;
            }
        }
        if keyless == RefuseReason::BadProof {
            self.drop_one();
        }
        Answer::RefuseWithoutKey(keyless)
    }

    /// The epoch of our own RESUME that the peer may be answering now.
    fn own_request(&self, flow: &FlowRecord) -> Option<u64> {
        match self.conns.get(&flow.change.outgoing?)? {
            Conn::Out {
                stage: Stage::Requested { epoch, .. } | Stage::Agreed { epoch, .. },
                ..
            } => Some(*epoch),
            _ => None,
        }
    }

    /// The proof has verified: the peer has suspended the flow, and will not use any older connection.
    fn accept(&mut self, now: Time, token: FlowToken, conn: ConnId, epoch: u64, bound: Bound) {
        let flow = self.flow(token);
        flow.epochs.seen = flow.epochs.seen.max(epoch);
        flow.epochs.answered = epoch;
        // RESUME_OK was not sent on the older connection, so it holds no stream bytes.
        let older = flow.change.accepted.replace(conn);
        let peer = flow.peer_id();
        let kind = match self.conns.get(&conn) {
            Some(Conn::Fresh { kind, .. }) => *kind,
            _ => TransportKind::TCP,
        };
        self.conns.insert(
            conn,
            Conn::In {
                token,
                epoch,
                bound,
                kind,
                confirm: None,
            },
        );
        if let Some(older) = older {
            self.close_conn(older);
        }
        self.drop_outgoing(now, token);
        self.drop_query(token);
        if let Some(peer) = peer {
            self.peer_answered(now, peer);
        }
        if self.flow(token).outage.is_none() {
            self.begin_outage(now, token, Outage::new(now, Cause::PeerAsked));
        } else {
            // A stall of a live flow, a replay under way, or an outage that both
            // sides have noticed.
            self.report(token);
            self.suspend(now, token);
        }
        if let Some(outage) = &mut self.flow(token).outage {
            outage.eof = None;
            if let Some(hold) = &mut outage.hold {
                hold.rests = false;
            }
        }
        self.timers.set(
            TimerOwner::Flow(token, Timer::PeerSilent),
            now + PEER_SILENT,
        );
        self.update_state(token);
        self.advance(now, token);
    }

    /// All old transports are drained: sends RESUME_OK with the final counts.
    pub(super) fn send_ok(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        received: u64,
        sent: u64,
    ) {
        let Some(Conn::In { epoch, bound, .. }) = self.conns.get(&conn) else {
            return;
        };
        let (epoch, bound) = (*epoch, *bound);
        let flow = self.flow(token);
        let message = Message::ResumeOk(ResumeOk {
            flow: flow.name(),
            epoch,
            received,
            sent,
            end: flow.end(),
        });
        flow.change.accepted = None;
        flow.change.awaiting = Some(conn);
        let data = self.seal(token, bound.into(), &message);
        self.out.push(Action::Send { conn, data });
        self.timers.set(
            TimerOwner::Flow(token, Timer::PeerSilent),
            now + PEER_SILENT,
        );
    }

    pub(super) fn on_confirm(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        parsed: &Parsed<'_>,
        confirm: &Confirm,
    ) {
        let Some(Conn::In { epoch, bound, .. }) = self.conns.get(&conn) else {
            return;
        };
        let (epoch, bound) = (*epoch, *bound);
        let flow = &self.flows[&token];
        if flow.change.awaiting != Some(conn) {
            return self.bad_message(now, conn);
        }
        if !flow.said(bound.into(), parsed) {
            return self.bad_message(now, conn);
        }
        // The counts in RESUME_OK still hold: nothing can have been received since.
        let DrainState::Done { received, sent } = flow.change.drained else {
            return;
        };
        let said = (confirm.received, confirm.sent, confirm.end);
        if !self.in_step(now, token, (received, sent), said) {
            return;
        }
        let flow = self.flow(token);
        // The peer may be acting on a later RESUME of ours, which says that no older connection
        // is used any more; or it has sent a later RESUME itself. Then this connection is only drained.
        if flow.epochs.sent > epoch
            || flow.change.accepted.is_some()
            || flow.change.flushing == Some(conn)
        {
            if let Some(Conn::In { confirm: kept, .. }) = self.conns.get_mut(&conn) {
                *kept = Some(*confirm);
            }
            return;
        }
        flow.change.awaiting = None;
        self.drop_outgoing(now, token);
        self.install(now, token, conn, epoch, received, *confirm);
    }

    /// The new transport carries the flow: the replay of `replayed` bytes is done.
    pub fn handle_installed(&mut self, now: Time, token: FlowToken, replayed: u64) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        let Some(pump) = flow.change.pump.take() else {
            return;
        };
        flow.change.rest();
        flow.go(State::Live);
        let outage = flow.outage.take();
        let leaving = flow.leaving.take();
        self.timers.clear_flow(token);
        if let Some(outage) = outage {
            self.flow(token).epochs.resumes += 1;
            let lost = now.since(outage.since);
            if outage.hold.is_some() && self.hold_timer().is_some() {
                self.forget_holds();
            }
            let event = Event::Resume {
                epoch: pump.epoch,
                replayed,
                received: pump.replayed_by_peer,
                lost_ms: lost.as_micros().div_ceil(1000) as u64,
                attempts: outage.attempts.map_or(0, |attempts| attempts.begun),
            };
            self.emit(token, event);
        }
        self.reach_later(now, token);
        self.offer_later(now, token);
        self.prefer_later(now, token);
        if let Some(leaving) = leaving {
            self.leave(now, token, leaving);
        }
    }

    /// One whole message, read from a connection. The driver reads at most two messages from a connection: after
    /// CHALLENGE and the answer to RESUME, or after RESUME and CONFIRM, stream bytes may follow.
    pub fn handle_message(&mut self, now: Time, conn: ConnId, data: &[u8]) {
        let Some(known) = self.conns.get(&conn) else {
            return;
        };
        let Ok(parsed) = crate::wire::parse(data) else {
            return self.bad_message(now, conn);
        };
        match (known, &parsed.message) {
            (Conn::Fresh { nonce_r, .. }, Message::Resume(resume)) => {
                let nonce_r = *nonce_r;
                self.on_resume(now, conn, nonce_r, &parsed, resume);
            }
            (Conn::In { token, .. }, Message::Confirm(confirm)) => {
                let token = *token;
                self.on_confirm(now, token, conn, &parsed, confirm);
            }
            (
                Conn::Out {
                    token,
                    stage: Stage::Connecting | Stage::Connected,
                },
                Message::Challenge(challenge),
            ) => {
                let token = *token;
                self.on_challenge(now, token, conn, &parsed, challenge);
            }
            (Conn::Aside { peer }, Message::Challenge(challenge)) => {
                let peer = *peer;
                self.on_challenge_aside(peer, &parsed, challenge);
            }
            (Conn::Trial { token }, Message::Challenge(challenge)) => {
                let token = *token;
                self.on_trial_challenge(now, token, conn, &parsed, challenge);
            }
            (Conn::Out { token, .. }, Message::ResumeOk(ok)) => {
                let token = *token;
                self.on_ok(now, token, conn, &parsed, ok);
            }
            (Conn::Out { token, .. }, Message::Refuse(refuse)) => {
                let token = *token;
                self.on_refuse(now, token, conn, &parsed, refuse);
            }
            _ => self.bad_message(now, conn),
        }
    }
}

/// The answer to an authentic RESUME. `own`: epoch of our own RESUME under way.
fn answer_for(flow: &FlowRecord, own: Option<u64>, epoch: u64) -> Answer {
    let token = flow.token;
    let refuse = |reason| Answer::Refuse(token, reason);
    match flow.state() {
        State::Live | State::Suspended | State::Resuming => {}
        State::Negotiating => return refuse(RefuseReason::Busy),
        State::Legacy => return refuse(RefuseReason::Legacy),
        State::Escalated | State::Closed => match flow.status() {
            FlowStatus::Closed(end) => return refuse(RefuseReason::Closed(end)),
            _ => return refuse(RefuseReason::Reset),
        },
    }
    let epochs = &flow.epochs;
    if epoch <= epochs.answered || epoch <= epochs.committed {
        return refuse(RefuseReason::OldEpoch);
    }
    // The peer may still read any RESUME of ours, even one we gave up, and then relies on our using
    // nothing older. So no older epoch may be agreed on. If both sides have chosen the same
    // epoch, the connector of the flow has precedence.
    let beaten = match flow.role {
        Role::Connector => epoch <= epochs.sent,
        Role::Acceptor => epoch < epochs.sent,
    };
    match (beaten, own) {
        (false, _) => Answer::Accept(token),
        (true, Some(_)) => refuse(RefuseReason::Busy),
        (true, None) => refuse(RefuseReason::OldEpoch),
    }
}
