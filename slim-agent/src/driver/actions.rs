//! Carries out the endpoint's actions; those that take more than a few lines are in `flows.rs`.

use slim_core::endpoint::{Action, State};

use super::{Driver, Notice};
use crate::tasks::Task;
use crate::tasks::order::Order;

impl Driver {
    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::Mailbox { ip } => self.open_mailbox(ip),
            Action::Datagram {
                to,
                from: Some(from),
                data,
            } if from.port() == 0 => self.control.send_aside(to, from, &data, &mut self.tasks),
            Action::Datagram { to, from, data } => self.control.send(to, from, &data),
            Action::Connect {
                conn,
                token,
                path,
                small_segments,
            } => {
                let (orders, io) = (self.add_conn(conn), self.survivor.io(token));
                self.tasks.start_and_forget(Task::Connect {
                    conn,
                    io,
                    path,
                    small_segments,
                    orders,
                });
            }
            Action::Send { conn, data } => drop(self.order(conn, Order::Send(data))),
            Action::Fence { reason, tell } => self.fence(reason, tell),
            Action::Flush { conn } => {
                if !self.order(conn, Order::Flush) {
                    self.notices.push_back(Notice::Flushed(conn));
                }
            }
            // The task of the connection ends once the orders before this one are carried out.
            Action::Close { conn } => self.remove_conn(conn),
            other => self.act_on_flow(other),
        }
    }

    /// Carries out an action that concerns a flow; see `flows.rs`.
    fn act_on_flow(&mut self, action: Action) {
        match action {
            Action::Live { token } => self.with_io(token, |io| io.live()),
            Action::Legacy {
                token,
                required_refused,
            } => {
                self.drop_carrier(token);
                self.with_io(token, |io| io.legacy(required_refused));
                self.survivor.set_away(token, false);
                self.release(token);
            }
            Action::Suspend { token } => self.suspend(token),
            Action::Look { token } => self.look_at_held(token),
            Action::Verify { token } => self.verify(token),
            Action::Drain { token } => self.drain(token, action),
            Action::Install {
                token,
                conn,
                peer_received,
                peer_sent,
                peer_final,
            } => {
                if let Some(seq) = peer_final {
                    self.with_io(token, |io| io.peer_final(seq));
                }
                self.install(token, conn, peer_received, peer_sent);
            }
            Action::Reinstate { token } => {
                let legacy = self.endpoint.state(token) == Some(State::Legacy);
                self.with_io(token, |io| io.reinstate(legacy));
                self.survivor.set_away(token, false);
                if legacy {
                    self.release(token);
                }
            }
            Action::PeerFinal { token, seq } => self.with_io(token, |io| io.peer_final(seq)),
            Action::Escalate { token, .. } => {
                // Before the application sees the error.
                self.note_escalations();
                self.escalate(token, action);
            }
            // `act` has carried out the actions that concern no flow.
            Action::Mailbox { .. }
            | Action::Datagram { .. }
            | Action::Connect { .. }
            | Action::Send { .. }
            | Action::Flush { .. }
            | Action::Fence { .. }
            | Action::Close { .. } => {}
        }
    }
}
