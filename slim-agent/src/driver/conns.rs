//! Resume connections as the driver sees them: an id, and a queue of orders for the connection's task.

use slim_core::transport::Locator;
use slim_core::{ConnId, Time};

use super::Driver;
use crate::tasks::mailbox::{self, mailbox};
use crate::tasks::order::Order;

impl Driver {
    /// Registers the connection. Its task takes its orders from the receiver.
    pub(super) fn add_conn(&mut self, conn: ConnId) -> mailbox::Receiver<Order> {
        let (sender, receiver) = mailbox();
        self.conns.insert(conn, sender);
        self.incoming += usize::from(conn.is_incoming());
        receiver
    }

    /// Forgets a connection. Its task closes it.
    pub(crate) fn remove_conn(&mut self, conn: ConnId) {
        let known = self.conns.remove(&conn).is_some();
        self.incoming -= usize::from(known && conn.is_incoming());
        self.silent.remove(&conn);
    }

    /// Gives an order to a connection's task; false if there is no such connection.
    pub(crate) fn order(&mut self, conn: ConnId, order: Order) -> bool {
        self.conns
            .get(&conn)
            .is_some_and(|orders| orders.send(order))
    }

    /// Whether the endpoint, or a flow, still uses this connection.
    pub(crate) fn has_conn(&self, conn: ConnId) -> bool {
        self.conns.contains_key(&conn)
    }

    /// A connection was accepted: returns its id and its orders. `None` if there are too many already, and a message
    /// has come on each.
    pub(crate) fn accept(
        &mut self,
        now: Time,
        from: Locator,
    ) -> Option<(ConnId, mailbox::Receiver<Order>)> {
        if self.incoming >= self.most_incoming {
            // The oldest connection without a message makes room.
            let silent = self.silent.pop_first()?;
            self.remove_conn(silent);
            self.endpoint
                .handle_conn_lost(now, silent, libc::ECONNABORTED);
        }
        self.accepted += 1;
        let conn = ConnId::incoming(self.accepted);
        let orders = self.add_conn(conn);
        self.silent.insert(conn);
        self.endpoint.handle_incoming(now, conn, from);
        Some((conn, orders))
    }

    /// A whole message came on a connection.
    pub(crate) fn message(&mut self, now: Time, conn: ConnId, data: &[u8]) {
        self.silent.remove(&conn);
        if self.has_conn(conn) {
            if !conn.is_incoming() {
                // The peer's agent carries out its application's commands before it answers, so its FIN may have
                // arrived before this message.
                self.take_datagrams(now);
            }
            self.demote_closed(now, data);
            self.endpoint.handle_message(now, conn, data);
        }
    }

    /// A connection broke, or could not be made.
    pub(crate) fn conn_lost(&mut self, now: Time, conn: ConnId, errno: i32) {
        if self.has_conn(conn) {
            self.remove_conn(conn);
            self.endpoint.handle_conn_lost(now, conn, errno);
        }
    }
}
