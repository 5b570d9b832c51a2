//! A resume connection, with the state of its task.

use std::rc::Rc;

use slim_core::ConnId;

use crate::resume::reader::Reader;
use crate::shared::Shared;
use crate::tasks::mailbox::Receiver;
use crate::tasks::order::Order;
use crate::transport::Connection;

/// A resume connection, with the state of its task.
pub(crate) struct Link {
    pub(crate) conn: ConnId,
    pub(crate) connection: Box<dyn Connection>,
    /// Field order matters: this is dropped after `connection`.
    _freed: Freed,
    pub(crate) orders: Receiver<Order>,
    pub(crate) shared: Rc<Shared>,
    pub(crate) reader: Reader,
    /// There may be something to read.
    pub(crate) readable: bool,
    /// A `Flush` has not been answered yet.
    pub(crate) flushing: bool,
}

/// When dropped, reports that a descriptor is free.
struct Freed(Rc<Shared>);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.descriptor_freed();
    }
}

impl Link {
    pub(crate) fn new(
        conn: ConnId,
        connection: Box<dyn Connection>,
        orders: Receiver<Order>,
        shared: Rc<Shared>,
    ) -> Self {
        Link {
            conn,
            connection,
            _freed: Freed(shared.clone()),
            orders,
            shared,
            reader: Reader::new(conn.is_incoming()),
            readable: false,
            flushing: false,
        }
    }
}
