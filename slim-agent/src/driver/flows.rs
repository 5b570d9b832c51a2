//! What the driver does to flows: suspend, drain, install, escalate.
//!
//! Between [`install`](Driver::install) and the end of the replay a flow is *carried*: the connection is its transport,
//! but belongs to the connection's task ([`pump`](crate::resume::pump)), and the application's data calls are barred.
//! If that connection breaks, the bytes that it has received must not be lost, because our kernel may have acknowledged
//! them to the peer. So the connection is kept, stopped, until the flow is drained the next time.

use slim_core::endpoint::Action;
use slim_core::{Cause, ConnId, FlowToken, Time};
use slim_stream::Drained;

use super::{Driver, FlowCarrier, Notice};
use crate::handover::Transport;
use crate::tasks::order::{Install, Order};

impl Driver {
    pub(crate) fn suspend(&mut self, token: FlowToken) {
        let now = self.now();
        let Some(io) = self.survivor.io(token) else {
            self.notices.push_back(Notice::Suspended(token));
            return;
        };
        if let Some(carrier) = self.carriers.get_mut(&token) {
            // Data calls are barred already.
            carrier.stopped = true;
            let conn = carrier.conn;
            self.order(conn, Order::Stop);
            self.notices.push_back(Notice::Suspended(token));
            return;
        }
        self.survivor.set_away(token, true);
        if io.suspend() {
            self.notices.push_back(Notice::Suspended(token));
        } else {
            self.watch.suspend_later(now, token);
        }
    }

    /// Carries out `Drain`.
    pub(crate) fn drain(&mut self, token: FlowToken, action: Action) {
        if self.drain_carrier(token, &action) {
            return;
        }
        let Some(io) = self.survivor.io(token) else {
            // The flow is unknown, so nothing was received.
            let drained = Drained {
                received: 0,
                sent: 0,
            };
            self.notices.push_back(Notice::Drained(token, drained));
            return;
        };
        // The front end may report a fault while other calls are still inside.
        if !io.suspend() {
            let now = self.now();
            return self.watch.act_later(now, token, action);
        }
        let drained = io.drain();
        self.drained.insert(token, drained);
        self.notices.push_back(Notice::Drained(token, drained));
    }

    /// Carries out `Escalate`.
    pub(crate) fn escalate(&mut self, token: FlowToken, action: Action) {
        let Action::Escalate { verdict, .. } = action else {
            return;
        };
        if self.drain_carrier(token, &action) {
            return;
        }
        if let Some(io) = self.survivor.io(token) {
            // The application still gets the bytes in the old transport, so it is drained: no call may be inside.
            if self.survivor.is_away(token) && !io.suspend() {
                let now = self.now();
                return self.watch.act_later(now, token, action);
            }
            io.escalate(verdict);
            self.survivor.set_away(token, false);
        }
        self.watch.forget_busy(token);
        self.release(token);
    }

    /// Carries out `Install`.
    pub(crate) fn install(
        &mut self,
        token: FlowToken,
        conn: ConnId,
        peer_received: u64,
        peer_sent: u64,
    ) {
        let Some(io) = self.survivor.io(token) else {
            self.remove_conn(conn);
            return;
        };
        let drained = self.drained.get(&token).copied();
        let drained = drained.unwrap_or_else(|| Drained {
            received: 0,
            sent: io.sent(),
        });
        let install = Install {
            token,
            io,
            peer_received,
            sent: drained.sent,
            expected: peer_sent.saturating_sub(drained.received),
        };
        let carrier = FlowCarrier {
            conn,
            stopped: false,
            then: None,
        };
        self.carriers.insert(token, carrier);
        if !self.order(conn, Order::Install(install)) {
            // The connection broke, and the endpoint did not know that yet when it decided.
            self.carriers.remove(&token);
            let cause = Cause::Errno(libc::ECONNRESET);
            self.notices.push_back(Notice::Fault(token, cause));
        }
    }

    /// The replay failed: the flow needs another transport. The connection is kept for the bytes that it has received.
    pub(crate) fn carrier_failed(&mut self, token: FlowToken, errno: i32) {
        self.give_up_carrier(token, Notice::Fault(token, Cause::Errno(errno)));
    }

    /// The same for a replay that makes no progress.
    pub(crate) fn carrier_stalled(&mut self, token: FlowToken) {
        self.give_up_carrier(token, Notice::ReplayStalled(token));
    }

    fn give_up_carrier(&mut self, token: FlowToken, notice: Notice) {
        if let Some(carrier) = self.carriers.get_mut(&token)
            && !carrier.stopped
        {
            carrier.stopped = true;
            self.notices.push_back(notice);
        }
    }

    /// Whether the finished replay on `conn` still makes the flow live.
    pub(crate) fn may_go_live(&self, token: FlowToken, conn: ConnId) -> bool {
        let carrier = self.carriers.get(&token);
        carrier.is_some_and(|c| c.conn == conn && !c.stopped)
    }

    /// The replay is written: installs `transport` as the flow's transport.
    pub(crate) fn go_live(
        &mut self,
        now: Time,
        token: FlowToken,
        transport: Transport,
        replayed: u64,
    ) {
        if let Some(io) = self.survivor.io(token) {
            self.drop_carrier(token);
            self.drained.remove(&token);
            if let Some((local, remote)) = transport.ends() {
                self.endpoint.moves(token, local, remote);
            }
            io.install(transport);
            self.survivor.set_away(token, false);
            self.endpoint.handle_installed(now, token, replayed);
            // The replayed bytes are not acknowledged yet.
            self.watch.dirty(now, token);
            self.linger_again(now, token);
        }
    }

    /// The connection that carried the flow is drained and closed: carries out the action that waited for that.
    pub(crate) fn carrier_drained(&mut self, token: FlowToken) {
        let Some(carrier) = self.carriers.remove(&token) else {
            return;
        };
        self.remove_conn(carrier.conn);
        match carrier.then {
            Some(action @ Action::Drain { .. }) => self.drain(token, action),
            Some(action @ Action::Escalate { .. }) => self.escalate(token, action),
            _ => {}
        }
    }

    /// Forgets the connection that carries a flow, if there is one. Its task closes it, unless it has become the
    /// transport.
    pub(crate) fn drop_carrier(&mut self, token: FlowToken) {
        if let Some(carrier) = self.carriers.remove(&token) {
            self.remove_conn(carrier.conn);
        }
    }

    /// If a connection carries the flow, has it drained and closed before `action` is carried out. False if none does.
    fn drain_carrier(&mut self, token: FlowToken, action: &Action) -> bool {
        let Some(carrier) = self.carriers.get_mut(&token) else {
            return false;
        };
        carrier.stopped = true;
        carrier.then = Some(action.clone());
        let conn = carrier.conn;
        if !self.order(conn, Order::Drain) {
            self.drop_carrier(token);
            return false;
        }
        true
    }
}
