//! The initiator's side of the resume handshake.

use super::errno::ECONNREFUSED;
use super::flow::State;
use super::record::{DrainState, QueryPurpose};
use super::respond::PEER_RETRY;
use super::resume::{Bound, Conn, Stage};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::auth::{Fresh, verify_with_job};
use crate::event::{EscalateReason, Failure};
use crate::ids::{ConnId, FinHow, FlowToken, Nonce, Time};
use crate::wire::{Challenge, Confirm, Message, Parsed, Refuse, RefuseReason, Resume, ResumeOk};

impl Endpoint {
    /// The connection of an [`Action::Connect`] is established.
    pub fn handle_connected(&mut self, now: Time, conn: ConnId) {
        if let Some(Conn::Knock { peer }) = self.conns.get(&conn) {
            return self.knock_accepted(now, conn, *peer);
        }
        let Some(Conn::Out { token, stage }) = self.conns.get_mut(&conn) else {
            return;
        };
        if matches!(stage, Stage::Connecting) {
            *stage = Stage::Connected;
            let token = *token;
            self.connection_answered(token);
            self.conn_progressed(now, token);
        }
    }

    /// CHALLENGE has come from the peer's resume port.
    pub(super) fn on_challenge(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        parsed: &Parsed<'_>,
        challenge: &Challenge,
    ) {
        let flow = self.flow(token);
        let Some(peer) = &flow.peer else {
            return;
        };
        let id = peer.process.id;
        if !verify_with_job(self.config.job_key.as_ref(), parsed) {
            self.drop_one();
            self.close_conn(conn);
            self.conn_failed(now, token, Failure::BadProof);
            // The peer process may be gone, and a process of another job may have its port.
            return self.ask(now, token, QueryPurpose::Death);
        }
        if challenge.endpoint != id {
            // Another process has the port. If the host is the same, the peer process is gone. If not, the
            // path leads to another host with that address.
            let gone = challenge.endpoint.host == id.host && challenge.endpoint != self.id;
            self.close_conn(conn);
            return if gone {
                self.process_gone(now, id)
            } else {
                self.conn_failed(now, token, Failure::Garbage)
            };
        }
        if let Some(Conn::Out { stage, .. }) = self.conns.get_mut(&conn) {
            *stage = Stage::Challenged {
                nonce_r: challenge.nonce_r,
            };
        }
        self.processes.reached(id);
        // From here on, only our own front end can delay the resume.
        self.stop_waiting(token);
        if let Some(to) = self.flow(token).change.lane {
            let took = self.connecting_for(now, token);
            self.connects.answered(now, to, Some(took));
        }
        self.leave_lane(now, token);
        // Attempts start only after QUERY about an end of stream has been answered or has remained unanswered: the end may be
        // genuine, and RESUME would make the old transport useless.
        self.suspend(now, token);
        self.advance(now, token);
    }

    pub(super) fn send_resume(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        nonce_r: Nonce,
    ) {
        let nonce_i = self.rng.nonce();
        let flow = self.flow(token);
        let epoch = flow.epochs.next();
        if let Some(outage) = &mut flow.outage {
            outage.exposed = true;
        }
        let message = Message::Resume(Resume {
            flow: self.flow(token).name(),
            epoch,
            nonce_i,
        });
        let data = self.seal(token, Fresh::Responder(nonce_r), &message);
        self.out.push(Action::Send { conn, data });
        if let Some(Conn::Out { stage, .. }) = self.conns.get_mut(&conn) {
            *stage = Stage::Requested {
                epoch,
                bound: Bound { nonce_r, nonce_i },
            };
        }
        self.conn_progressed(now, token);
        self.update_state(token);
    }

    pub(super) fn on_ok(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        parsed: &Parsed<'_>,
        ok: &ResumeOk,
    ) {
        let Some(Conn::Out { stage, .. }) = self.conns.get_mut(&conn) else {
            return;
        };
        let Stage::Requested { epoch, bound } = *stage else {
            return self.bad_message(now, conn);
        };
        let flow = &self.flows[&token];
        let genuine =
            ok.flow == flow.name() && ok.epoch == epoch && flow.said(bound.into(), parsed);
        if !genuine {
            self.drop_one();
            self.close_conn(conn);
            return self.conn_failed(now, token, Failure::BadProof);
        }
        if let Some(Conn::Out { stage, .. }) = self.conns.get_mut(&conn) {
            *stage = Stage::Agreed {
                epoch,
                bound,
                ok: *ok,
            };
        }
        self.report(token);
        // From here on, only our own front end can delay the resume.
        self.stop_waiting(token);
        self.update_state(token);
        self.advance(now, token);
    }

    /// All old transports are drained: sends CONFIRM, and installs the connection.
    pub(super) fn commit(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        received: u64,
        sent: u64,
    ) {
        let Some(Conn::Out {
            stage: Stage::Agreed { epoch, bound, ok },
            ..
        }) = self.conns.get(&conn)
        else {
            return;
        };
        let (epoch, bound, ok) = (*epoch, *bound, *ok);
        let said = (ok.received, ok.sent, ok.end);
        if !self.in_step(now, token, (received, sent), said) {
            return;
        }
        let confirm = Message::Confirm(Confirm {
            received,
            sent,
            end: self.flow(token).end(),
        });
        let data = self.seal(token, bound.into(), &confirm);
        self.out.push(Action::Send { conn, data });
        self.flow(token).change.outgoing = None;
        let theirs = Confirm {
            received: ok.received,
            sent: ok.sent,
            end: ok.end,
        };
        self.install(now, token, conn, epoch, received, theirs);
    }

    pub(super) fn on_refuse(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        parsed: &Parsed<'_>,
        refuse: &Refuse,
    ) {
        let Some(Conn::Out {
            stage: Stage::Requested { bound, .. },
            ..
        }) = self.conns.get(&conn)
        else {
            return self.bad_message(now, conn);
        };
        let bound = *bound;
        let flow = &self.flows[&token];
        let keyed = flow.said(bound.into(), parsed);
        // A peer that does not know the flow has no key for it.
        let keyless = matches!(
            refuse.reason,
            RefuseReason::UnknownFlow | RefuseReason::Busy | RefuseReason::Legacy
        ) && verify_with_job(self.config.job_key.as_ref(), parsed);
        let genuine =
            refuse.flow == flow.name() && refuse.nonce_i == bound.nonce_i && (keyed || keyless);
        self.close_conn(conn);
        if !genuine {
            self.drop_one();
            return self.conn_failed(now, token, Failure::BadProof);
        }
        match refuse.reason {
            RefuseReason::Busy => self.conn_failed(now, token, Failure::Busy),
            RefuseReason::BadProof => self.conn_failed(now, token, Failure::BadProof),
            RefuseReason::OldEpoch => {
                let epochs = &mut self.flow(token).epochs;
                epochs.behind += 1;
                self.conn_failed(now, token, Failure::OldEpoch);
            }
            RefuseReason::UnknownFlow | RefuseReason::Legacy => {
                self.flow(token).change.outgoing = None;
                self.peer_gone(now, token, EscalateReason::PeerForgot);
            }
            RefuseReason::Reset => {
                self.flow(token).change.outgoing = None;
                self.escalate_with_cause(now, token, EscalateReason::PeerReset);
            }
            RefuseReason::Closed(end) => self.peer_done(now, token, end),
        }
    }

    /// The peer's application closed the flow after sending `end` bytes, and the peer cannot replay them
    /// any more. We may have received them all.
    fn peer_done(&mut self, now: Time, token: FlowToken, end: u64) {
        let flow = self.flow(token);
        flow.change.outgoing = None;
        self.learn_final(token, end, FinHow::Close);
        let flow = self.flow(token);
        let Some(outage) = &mut flow.outage else {
            return;
        };
        if outage.eof == Some(end)
            && flow.change.drained == DrainState::No
            && flow.change.awaiting.is_none()
        {
            // The end of stream was genuine, and the old connection still reports it. Not trimming does
            // no harm, because the peer reads nothing any more.
            return self.reinstate(now, token);
        }
        outage.peer_done = Some(end);
        if flow.state() == State::Resuming {
            self.update_state(token);
        }
        self.advance(now, token);
    }

    /// The bytes on a connection are no message, or a message that is not allowed at this stage.
    pub(super) fn bad_message(&mut self, now: Time, conn: ConnId) {
        self.drop_one();
        let Some(known) = self.conns.get(&conn) else {
            return;
        };
        let token = match known {
            Conn::Out { token, .. } => Some(*token),
            Conn::Fresh { .. } => None,
            Conn::Aside { peer } => return self.aside_lost(*peer, 0),
            Conn::Trial { token } => {
                let token = *token;
                return self.trial_failed(now, token);
            }
            // It is closed as soon as it is established.
            Conn::Knock { .. } => return,
            Conn::In { .. } => return self.lost_incoming(now, conn, true),
        };
        self.close_conn(conn);
        if let Some(token) = token {
            self.conn_failed(now, token, Failure::Garbage);
        } else {
            self.fresh.retain(|fresh| *fresh != conn);
        }
    }

    /// A connection is lost, or could not be made. Everything that could be read from it has been
    /// handed in before. `errno` 0 means that the peer ended the connection.
    pub fn handle_conn_lost(&mut self, now: Time, conn: ConnId, errno: i32) {
        let why = match errno {
            0 => Failure::Eof,
            errno => Failure::Errno(errno),
        };
        match self.conns.get(&conn) {
            None => {}
            Some(Conn::Fresh { .. }) => {
                self.timers.clear(TimerOwner::Conn(conn));
                self.conns.remove(&conn);
                self.fresh.retain(|fresh| *fresh != conn);
            }
            Some(Conn::In { .. }) => self.lost_incoming(now, conn, false),
            Some(Conn::Aside { peer }) => {
                let peer = *peer;
                self.conns.remove(&conn);
                self.aside_lost(peer, errno);
            }
            Some(Conn::Trial { token }) => {
                let token = *token;
                self.conns.remove(&conn);
                self.trial_failed(now, token);
            }
            Some(Conn::Knock { peer }) => {
                let peer = *peer;
                self.conns.remove(&conn);
                self.knock_lost(now, conn, peer, errno);
            }
            Some(Conn::Out { token, stage }) => {
                let token = *token;
                let connecting = matches!(stage, Stage::Connecting);
                self.conns.remove(&conn);
                // ECONNREFUSED comes from the peer's host only before the connection is established.
                let why = match why {
                    Failure::Errno(ECONNREFUSED) if !connecting => Failure::Eof,
                    why => why,
                };
                if why == Failure::Errno(ECONNREFUSED) {
                    self.connection_answered(token);
                }
                self.conn_failed(now, token, why);
            }
        }
    }

    /// A connection that the peer had made for a flow is lost. `close`: the driver must still close it.
    fn lost_incoming(&mut self, now: Time, conn: ConnId, close: bool) {
        let Some(Conn::In { token, confirm, .. }) = self.conns.get(&conn) else {
            return;
        };
        if confirm.is_some() {
            // The peer has used it as transport, so the bytes that arrived on it must still be drained.
            return;
        }
        let token = *token;
        if close {
            self.close_conn(conn);
        } else {
            self.conns.remove(&conn);
        }
        let flow = self.flow(token);
        if flow.change.accepted == Some(conn) {
            flow.change.accepted = None;
        }
        // It is dead and held no CONFIRM, so no stream byte on it was acknowledged.
        if flow.change.awaiting == Some(conn) {
            flow.change.awaiting = None;
        }
        self.update_state(token);
        if self.is_held(token) {
            return;
        }
        self.timers
            .set(TimerOwner::Flow(token, Timer::PeerSilent), now + PEER_RETRY);
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Epochs;

    #[test]
    fn epochs_jump_further_each_time_they_were_too_low() {
        let mut epochs = Epochs::default();
        let mut drawn = Vec::new();
        for behind in [0, 0, 1, 2, 3] {
            epochs.behind = behind;
            drawn.push(epochs.next());
        }
        assert_eq!(drawn, [1, 2, 4, 8, 16]);
        assert_eq!(epochs.sent, 16);
    }
}
