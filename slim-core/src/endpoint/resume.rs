//! The resume handshake: `docs/PROTOCOL.md`, section "The resume handshake and why it is correct".
//!
//! This file has the parts that both sides share: the connections, and [`Endpoint::advance`], the one place
//! that decides what a suspended flow does next. `initiate.rs` handles the initiator's messages,
//! `respond.rs` the responder's.
//!
//! Three rules ensure that no byte is lost:
//!
//! 1. A side that sends RESUME or RESUME_OK for epoch `e` has suspended the flow before, which stops trimming,
//!    and never again uses a transport with a lower epoch.
//! 2. A side reads its old transport dry only when it knows that the other side has suspended the flow. Otherwise the other
//!    side could trim bytes that arrive here between the last read and the closing.
//! 3. A connection on which RESUME_OK was sent may hold CONFIRM and stream bytes, so it counts as
//!    an old transport, too.

use super::flow::State;
use super::record::{Bar, DrainState, Pump};
use super::relayed::Relayed;
use super::timer::{Timer, TimerOwner};
use super::{Action, Endpoint};
use crate::auth::Fresh;
use crate::event::EscalateReason;
use crate::ids::{ConnId, EndpointId, FinHow, FlowToken, Nonce, Time, Verdict};
use crate::transport::TransportKind;
use crate::wire::{Confirm, End, Message, ResumeOk};

/// A connection that is not a transport, or not yet.
pub(super) enum Conn {
    /// Made by us, to resume a flow.
    Out { token: FlowToken, stage: Stage },
    /// Made by us, to test whether the peer process can be reached (`reach.rs`).
    Aside { peer: EndpointId },
    /// Made by us, to see whether the resume port of a process refuses connections (`neighbours.rs`).
    Knock { peer: EndpointId },
    /// Made by us, to try a kind of transport that the flow prefers (`failback.rs`).
    Trial { token: FlowToken },
    /// Accepted; RESUME has not come yet.
    Fresh {
        nonce_r: Nonce,
        since: Time,
        kind: TransportKind,
    },
    /// Accepted; the proof in RESUME has verified for this flow.
    In {
        token: FlowToken,
        epoch: u64,
        bound: Bound,
        kind: TransportKind,
        /// CONFIRM, if it came when the connection could not be used any more.
        confirm: Option<Confirm>,
    },
}

/// The stage of the handshake on a connection that we made.
pub(super) enum Stage {
    Connecting,
    Connected,
    /// CHALLENGE has come. RESUME is sent once the flow is suspended.
    Challenged {
        nonce_r: Nonce,
    },
    /// RESUME has been sent.
    Requested {
        epoch: u64,
        bound: Bound,
    },
    /// RESUME_OK has come. CONFIRM is sent once our old transports are drained.
    Agreed {
        epoch: u64,
        bound: Bound,
        ok: ResumeOk,
    },
}

/// The responder's and the initiator's nonce of a connection.
#[derive(Clone, Copy)]
pub(super) struct Bound {
    pub(super) nonce_r: Nonce,
    pub(super) nonce_i: Nonce,
}

impl From<Bound> for Fresh {
    fn from(bound: Bound) -> Self {
        Fresh::Both {
            nonce_r: bound.nonce_r,
            nonce_i: bound.nonce_i,
        }
    }
}

impl Endpoint {
    /// Takes the next possible step for a suspended flow. Called whenever an event has happened that the flow may
    /// wait for; an additional call is harmless.
    pub(super) fn advance(&mut self, now: Time, token: FlowToken) {
        let Some(flow) = self.flows.get(&token) else {
            return;
        };
        if flow.bar != Bar::Shut || !matches!(flow.state(), State::Suspended | State::Resuming) {
            return;
        }
        if let Some(conn) = flow.change.outgoing
            && let Some(Conn::Out { stage, .. }) = self.conns.get(&conn)
            && let Stage::Challenged { nonce_r } = *stage
        {
            return self.send_resume(now, token, conn, nonce_r);
        }
        let flow = &self.flows[&token];
        let agreed = flow.change.outgoing.filter(|conn| {
            let conn = self.conns.get(conn);
            matches!(
                conn,
                Some(Conn::Out {
                    stage: Stage::Agreed { .. },
                    ..
                })
            )
        });
        let done = flow.outage.as_ref().and_then(|outage| outage.peer_done);
        let closed = flow.closed_by_peer();
        if flow.change.accepted.is_none() && agreed.is_none() && done.is_none() && closed.is_none()
        {
            return;
        }
        let Some((received, sent)) = self.read_dry(token) else {
            return;
        };
        let flow = &self.flows[&token];
        if let Some(end) = done {
            self.end_at(now, token, (received, sent), end);
        } else if let Some(conn) = flow.change.accepted {
            self.send_ok(now, token, conn, received, sent);
        } else if let Some(conn) = agreed {
            self.commit(now, token, conn, received, sent);
        } else if closed == Some(received) {
            self.end_at(now, token, (received, sent), received);
        } else {
            // Bytes are missing, or there are more than the peer said that it sent: only a resume can tell.
            if let Some(outage) = &mut self.flow(token).outage {
                outage.out_of_count = true;
            }
            self.start_attempts(now, token);
        }
    }

    /// The numbers of bytes received and sent, once every old transport is drained; `None` while that is under way. The peer
    /// has suspended the flow or closed it, so it puts no more bytes into the old transports.
    fn read_dry(&mut self, token: FlowToken) -> Option<(u64, u64)> {
        let flow = self.flow(token);
        if flow.change.flushing.is_some() {
            return None;
        }
        if let Some(conn) = flow.change.awaiting {
            if let Some(Conn::In {
                confirm: Some(_), ..
            }) = self.conns.get(&conn)
            {
                self.install_to_drain(token, conn);
            } else {
                self.flow(token).change.flushing = Some(conn);
                self.flushes.insert(conn, token);
                self.out.push(Action::Flush { conn });
                return None;
            }
        }
        let flow = self.flow(token);
        match flow.change.drained {
            DrainState::Done { received, sent } => Some((received, sent)),
            DrainState::Asked => None,
            DrainState::No => {
                flow.change.drained = DrainState::Asked;
                self.out.push(Action::Drain { token });
                None
            }
        }
    }

    /// The peer has sent CONFIRM on this connection and suspended the flow again. So it has used the connection as
    /// transport, which may hold bytes that the peer has trimmed.
    fn install_to_drain(&mut self, token: FlowToken, conn: ConnId) {
        let Some(Conn::In {
            epoch,
            confirm: Some(confirm),
            ..
        }) = self.conns.remove(&conn)
        else {
            return;
        };
        let flow = self.flow(token);
        flow.change.awaiting = None;
        flow.change.drained = DrainState::No;
        flow.epochs.committed = epoch;
        self.push_install(token, conn, &confirm);
    }

    fn push_install(&mut self, token: FlowToken, conn: ConnId, confirm: &Confirm) {
        self.flow(token).promised = confirm.sent;
        self.out.push(Action::Install {
            token,
            conn,
            peer_received: confirm.received,
            peer_sent: confirm.sent,
            peer_final: confirm.end.map(|end| end.seq),
        });
    }

    /// Answers [`Action::Flush`].
    pub fn handle_flushed(&mut self, now: Time, conn: ConnId) {
        let Some(token) = self.flushes.remove(&conn) else {
            return;
        };
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        if flow.change.flushing != Some(conn) {
            return;
        }
        flow.change.flushing = None;
        if flow.change.awaiting == Some(conn) {
            match self.conns.get(&conn) {
                Some(Conn::In {
                    confirm: Some(_), ..
                }) => self.install_to_drain(token, conn),
                _ => {
                    self.flow(token).change.awaiting = None;
                    self.close_conn(conn);
                }
            }
        }
        self.update_state(token);
        self.advance(now, token);
    }

    /// Answers [`Action::Suspend`].
    pub fn handle_suspended(&mut self, now: Time, token: FlowToken) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        if flow.bar == Bar::Asked {
            flow.bar = Bar::Shut;
            match flow.outage.as_ref().and_then(|outage| outage.ending) {
                Some(reason) => self.escalate_with_cause(now, token, reason),
                None => self.advance(now, token),
            }
        }
    }

    /// Answers [`Action::Drain`]. `received`: number of bytes of the flow received in all, read by the
    /// application or stashed. `sent`: number of bytes that the application has sent in all.
    pub fn handle_drained(&mut self, now: Time, token: FlowToken, received: u64, sent: u64) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        if flow.change.drained == DrainState::Asked {
            flow.change.drained = DrainState::Done { received, sent };
            self.advance(now, token);
        }
    }

    /// Whether the peer's counts fit ours. If not, going on would corrupt the stream, so the flow is given up.
    pub(super) fn in_step(
        &mut self,
        now: Time,
        token: FlowToken,
        (received, sent): (u64, u64),
        (peer_received, peer_sent, peer_end): (u64, u64, Option<End>),
    ) -> bool {
        let good = peer_received <= sent
            && peer_sent >= received
            && peer_end.is_none_or(|end| end.seq == peer_sent);
        if !good {
            self.escalate_with_cause(now, token, EscalateReason::OutOfStep);
        }
        good
    }

    /// Makes the connection the flow's transport.
    pub(super) fn install(
        &mut self,
        now: Time,
        token: FlowToken,
        conn: ConnId,
        epoch: u64,
        received: u64,
        confirm: Confirm,
    ) {
        self.pause_attempts(now, token);
        let removed = self.conns.remove(&conn);
        let flow = self.flow(token);
        let kind = match removed {
            Some(Conn::In { kind, .. }) => kind,
            _ => flow.connects_by().unwrap_or(TransportKind::TCP),
        };
        let relayed = kind == TransportKind::RELAY;
        let closed = confirm.end.is_some_and(|end| end.closed);
        match relayed {
            true => {
                self.relayed
                    .entry(token)
                    .or_insert(Relayed::new(now))
                    .peer_closed |= closed
            }
            false => drop(self.relayed.remove(&token)),
        }
        self.carried_by(now, token, kind);
        let flow = self.flow(token);
        flow.go(State::Resuming);
        flow.bar = Bar::Open;
        flow.change.drained = DrainState::No;
        flow.epochs.committed = epoch;
        flow.epochs.behind = 0;
        flow.change.pump = Some(Pump {
            epoch,
            replayed_by_peer: confirm.sent.saturating_sub(received),
        });
        if let Some(outage) = &mut flow.outage {
            outage.exposed = false;
            outage.eof = None;
        }
        if let Some(end) = confirm.end {
            flow.peer_fin.get_or_insert((end.seq, FinHow::HalfClose));
            if closed && relayed {
                flow.peer_fin = Some((end.seq, FinHow::Close));
            }
        }
        self.push_install(token, conn, &confirm);
    }

    /// The peer has closed and forgotten the flow after sending `end` bytes, of which we have received
    /// `received`.
    fn end_at(&mut self, now: Time, token: FlowToken, (received, sent): (u64, u64), end: u64) {
        if received == end {
            let flow = self.flow(token);
            flow.complete = true;
            // Our stream ends here, too, because nobody reads it any more. If the peer still waits for the news that we have all its
            // bytes, it learns that from the answer `Closed` to its QUERY or RESUME.
            flow.fin.get_or_insert((sent, FinHow::Close));
            let reason = EscalateReason::PeerClosed;
            self.escalate(now, token, reason, Verdict::Eof);
        } else {
            self.escalate_with_cause(now, token, EscalateReason::PeerClosed);
        }
    }

    /// Sets the state to `Resuming` or `Suspended`, depending on whether a resume is under way.
    pub(super) fn update_state(&mut self, token: FlowToken) {
        let Some(flow) = self.flows.get(&token) else {
            return;
        };
        if !matches!(flow.state(), State::Suspended | State::Resuming) {
            return;
        }
        let asking = flow.change.outgoing.and_then(|conn| self.conns.get(&conn));
        let resuming = flow.change.accepted.is_some()
            || flow.change.awaiting.is_some()
            || flow.change.pump.is_some()
            || matches!(
                asking,
                Some(Conn::Out {
                    stage: Stage::Requested { .. } | Stage::Agreed { .. },
                    ..
                })
            );
        self.flow(token).go(if resuming {
            State::Resuming
        } else {
            State::Suspended
        });
    }

    /// Forgets a connection and has it closed.
    pub(super) fn close_conn(&mut self, conn: ConnId) {
        self.timers.clear(TimerOwner::Conn(conn));
        if self.conns.remove(&conn).is_some() && !self.out.withdraw(conn) {
            self.out.push(Action::Close { conn });
        }
    }

    /// Closes everything that was to become the flow's transport.
    pub(super) fn abandon_connections(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let conns = [
            flow.change.outgoing.take(),
            flow.change.accepted.take(),
            flow.change.awaiting.take(),
        ];
        if let Some(conn) = flow.change.flushing.take() {
            self.flushes.remove(&conn);
        }
        for conn in conns.into_iter().flatten() {
            self.close_conn(conn);
        }
        self.end_trial(now, token);
        for timer in [Timer::Hung, Timer::Stuck, Timer::Backoff, Timer::PeerSilent] {
            self.timers.clear(TimerOwner::Flow(token, timer));
        }
        self.leave_lane(now, token);
        self.flow(token).change.rest();
    }

    /// The bytes of a message of ours, under the flow key.
    pub(super) fn seal(&self, token: FlowToken, fresh: Fresh, message: &Message) -> Vec<u8> {
        let sealed = self.flows[&token].seal(fresh, message);
        sealed.expect("only flows whose peer is known resume")
    }
}
