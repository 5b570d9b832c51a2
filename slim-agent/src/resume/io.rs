//! Resume connections: accepting and making them, and the messages on them.
//!
//! Each connection, of whatever kind, has a task, which owns it until it is closed or becomes a flow's
//! transport.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use slim_core::ConnId;
use slim_core::transport::Path;
use tokio::select;

use crate::FlowIo;
use crate::resume::link::Link;
use crate::resume::pump;
use crate::resume::reader::Read;
use crate::shared::Shared;
use crate::tasks::mailbox::{Ended, Receiver};
use crate::tasks::order::{Install, Order};
use crate::transport::{Wanted, errno_of, readable};

/// Connects, and then exchanges messages.
pub(crate) async fn outgoing(
    conn: ConnId,
    flow: Option<Arc<dyn FlowIo>>,
    (path, small_segments): (Path, bool),
    orders: Receiver<Order>,
    shared: Rc<Shared>,
) {
    // The peer may have resumed the flow since this was ordered.
    if orders.is_closed() {
        return;
    }
    let made = shared.providers.connect(Wanted {
        path,
        small_segments,
        flow: flow.as_deref(),
        scarce: shared.is_starved(),
    });
    drop(flow);
    let connected = match made {
        Ok(connection) => {
            let mut link = Link::new(conn, connection, orders, shared.clone());
            let outcome = link.established().await;
            outcome.map(|still_wanted| still_wanted.then_some(link))
        }
        Err(e) => Err(e),
    };
    match connected {
        Ok(Some(link)) => {
            shared.with(|d, now| {
                if d.has_conn(conn) {
                    d.endpoint.handle_connected(now, conn);
                }
            });
            link.converse().await;
        }
        Ok(None) => {}
        Err(e) => {
            let errno = errno_of(&e, libc::EIO);
            shared.with(|d, now| d.conn_lost(now, conn, errno));
        }
    }
}

/// What follows from an order.
enum AfterOrder {
    Go,
    End,
    Install(Install),
}

impl Link {
    /// Waits until the connection is made; false if it is not wanted any more.
    async fn established(&mut self) -> io::Result<bool> {
        select! {
            biased;
            order = self.orders.recv() => match order {
                // No order can come before the connection is made.
                Some(_) => Err(io::ErrorKind::NotConnected.into()),
                None => Ok(false),
            },
            made = poll_fn(|context| self.connection.poll_connected(context)) => {
                made.map(|()| true)
            }
        }
    }

    /// Exchanges messages until the connection is closed or becomes a transport.
    pub(crate) async fn converse(mut self) {
        loop {
            let next = match self.step() {
                AfterOrder::Go => self.wait().await,
                other => other,
            };
            match next {
                AfterOrder::Go => {}
                AfterOrder::End => break,
                AfterOrder::Install(install) => {
                    if self.flushing {
                        self.flushed();
                    }
                    pump::carry(self, install).await;
                    break;
                }
            }
        }
    }

    /// Does everything that is possible now. Orders come before messages, since an order that follows from a message
    /// decides what the bytes after that message are.
    fn step(&mut self) -> AfterOrder {
        loop {
            match self.orders.try_recv() {
                Ok(Some(order)) => match self.handle_order(order) {
                    AfterOrder::Go => continue,
                    other => return other,
                },
                Err(Ended) => return AfterOrder::End,
                Ok(None) => {}
            }
            if !self.readable && !self.flushing {
                return AfterOrder::Go;
            }
            match self.reader.step(&*self.connection) {
                Read::Message(message) => {
                    // The peer's next message comes only after our answer to this one.
                    self.connection.expect_nothing();
                    self.readable = false;
                    let conn = self.conn;
                    self.shared.with(|d, now| d.message(now, conn, &message));
                }
                Read::Nothing if self.flushing => self.flushed(),
                Read::Nothing => {
                    self.readable = false;
                    return AfterOrder::Go;
                }
                Read::Lost(errno) => return self.lost(errno),
            }
        }
    }

    /// Sleeps until there is an order or something to read.
    async fn wait(&mut self) -> AfterOrder {
        let ready = select! {
            biased;
            order = self.orders.recv() => return match order {
                Some(order) => self.handle_order(order),
                None => AfterOrder::End,
            },
            ready = readable(&*self.connection), if !self.reader.is_done() => ready,
        };
        match ready {
            Ok(()) => {
                self.readable = true;
                AfterOrder::Go
            }
            Err(e) => {
                let errno = errno_of(&e, libc::EIO);
                self.lost(errno)
            }
        }
    }

    fn handle_order(&mut self, order: Order) -> AfterOrder {
        match order {
            Order::Send(data) => {
                let sent = self.connection.send(&data);
                // Messages are so short, and so few, that a partial write means that the connection is broken.
                match sent {
                    Ok(n) if n == data.len() => AfterOrder::Go,
                    Ok(_) => self.broken(libc::ENOBUFS),
                    Err(e) => self.broken(errno_of(&e, libc::EIO)),
                }
            }
            Order::Flush => {
                self.flushing = true;
                AfterOrder::Go
            }
            Order::Install(install) => AfterOrder::Install(install),
            // These orders are for connections that carry a flow.
            Order::Stop | Order::Drain => AfterOrder::Go,
        }
    }

    /// Writing failed: the messages that have arrived are delivered before the loss is reported.
    fn broken(&mut self, errno: i32) -> AfterOrder {
        while let Read::Message(message) = self.reader.step(&*self.connection) {
            let conn = self.conn;
            self.shared.with(|d, now| d.message(now, conn, &message));
        }
        self.lost(errno)
    }

    fn lost(&mut self, errno: i32) -> AfterOrder {
        if self.flushing {
            self.flushed();
        }
        // That report, or the last message, may have made this connection carry a flow. Then its loss is a fault of the
        // flow.
        while let Ok(Some(order)) = self.orders.try_recv() {
            match order {
                Order::Install(install) => return AfterOrder::Install(install),
                Order::Flush => self.flushed(),
                _ => {}
            }
        }
        let conn = self.conn;
        self.shared.with(|d, now| d.conn_lost(now, conn, errno));
        AfterOrder::End
    }

    fn flushed(&mut self) {
        self.flushing = false;
        let conn = self.conn;
        self.shared
            .with(|d, now| d.endpoint.handle_flushed(now, conn));
    }
}
