//! The initiator's side of the resume handshake.

use super::errno::ECONNREFUSED;
use super::flow::State;
use super::record::{DrainState, Why};
use super::respond::PEER_RETRY;
use super::resume::{Bound, Conn, Stage};
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::auth::{Fresh, verify_with_job};
use crate::event::{EscalateReason, Failure};
use crate::ids::{ConnId, FinHow, FlowToken, Nonce, Time};
use crate::wire::{Challenge, Confirm, Message, Parsed, Refuse, RefuseReason, Resume, ResumeOk};

impl Endpoint {
    /// A connection that [`Action::Connect`] asked for stands.
    pub fn handle_connected(&mut self, now: Time, conn: ConnId) {
        let Some(Conn::Out { token, stage }) = self.conns.get_mut(&conn) else {
            return;
        };
        if matches!(stage, Stage::Connecting) {
            *stage = Stage::Connected;
            let token = *token;
            self.got_on(now, token);
        }
    }

    /// Somebody answers at the peer's resume port.
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
            // A process of another job may have the port because ours has gone.
            return self.ask(now, token, Why::Death);
        }
        if challenge.endpoint != id {
            // Another process has the port. If the host is the same, ours has gone; if not, the
            // path leads to a host of that address that we did not mean.
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
        // What is still to be waited for is our own front end.
        self.stop_waiting(token);
        if let Some(to) = self.flow(token).change.lane {
            let took = self.connecting_for(now, token);
            self.connects.answered(now, to, Some(took));
        }
        self.leave_lane(now, token);
        // An end of stream is asked about first: it may be genuine, and RESUME would make the old
        // transport useless. Attempts start only when that question is settled.
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
        self.got_on(now, token);
        self.settle(token);
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
        // Nothing but our own front end is to be waited for now.
        self.stop_waiting(token);
        self.settle(token);
        self.advance(now, token);
    }

    /// Everything old is read dry: say so, and use the connection.
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
        let said = (ok.received, ok.sent, ok.final_seq);
        if !self.in_step(now, token, (received, sent), said) {
            return;
        }
        let final_seq = self.flow(token).fin.map(|(end, _)| end);
        let confirm = Message::Confirm(Confirm {
            received,
            sent,
            final_seq,
        });
        let data = self.seal(token, bound.into(), &confirm);
        self.out.push(Action::Send { conn, data });
        self.flow(token).change.outgoing = None;
        let theirs = Confirm {
            received: ok.received,
            sent: ok.sent,
            final_seq: ok.final_seq,
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
        // A peer without the flow has no key for it.
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

    /// The peer's application closed the flow after sending `end` bytes, and nobody is there any
    /// more who could send them again. We may hold them all.
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
            // The end of stream was genuine, and the connection still says so itself. That we do
            // not trim while nobody is there to read is no matter.
            return self.put_back(now, token);
        }
        outage.peer_done = Some(end);
        if flow.state() == State::Resuming {
            self.settle(token);
        }
        self.advance(now, token);
    }

    /// What came on a connection is no message, or not the one whose turn it is.
    pub(super) fn bad_message(&mut self, now: Time, conn: ConnId) {
        self.drop_one();
        let Some(known) = self.conns.get(&conn) else {
            return;
        };
        let token = match known {
            Conn::Out { token, .. } => Some(*token),
            Conn::Fresh { .. } => None,
            Conn::Aside { peer } => return self.aside_lost(*peer, 0),
            Conn::In { .. } => return self.lost_incoming(now, conn, true),
        };
        self.close_conn(conn);
        if let Some(token) = token {
            self.conn_failed(now, token, Failure::Garbage);
        } else {
            self.fresh.retain(|fresh| *fresh != conn);
        }
    }

    /// A connection is gone, or could not be made. Everything that could be read from it has been
    /// handed in before. `errno` 0 means that the peer ended it.
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
            Some(Conn::Out { token, stage }) => {
                let token = *token;
                let connecting = matches!(stage, Stage::Connecting);
                self.conns.remove(&conn);
                // Refused means refused by the host only before the connection stood.
                let why = match why {
                    Failure::Errno(ECONNREFUSED) if !connecting => Failure::Eof,
                    why => why,
                };
                self.conn_failed(now, token, why);
            }
        }
    }

    /// A connection that the peer had made for this flow is gone; `close` if the driver does not
    /// know yet.
    fn lost_incoming(&mut self, now: Time, conn: ConnId, close: bool) {
        let Some(Conn::In { token, confirm, .. }) = self.conns.get(&conn) else {
            return;
        };
        if confirm.is_some() {
            // It was the peer's transport. What arrived on it is still to be read.
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
        // It is dead and held no CONFIRM, so the peer's kernel has had no stream byte acknowledged.
        if flow.change.awaiting == Some(conn) {
            flow.change.awaiting = None;
        }
        self.settle(token);
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
