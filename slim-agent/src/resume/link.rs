//! A resume connection and its task's tools.

use std::rc::Rc;

use slim_core::ConnId;

use crate::resume::reader::Reader;
use crate::shared::Shared;
use crate::tasks::mailbox::Receiver;
use crate::tasks::order::Order;
use crate::transport::Connection;

/// See the module.
pub(crate) struct Link {
    pub(crate) conn: ConnId,
    pub(crate) connection: Box<dyn Connection>,
    /// After `connection`: fields are dropped in order.
    _freed: Freed,
    pub(crate) orders: Receiver<Order>,
    pub(crate) shared: Rc<Shared>,
    pub(crate) reader: Reader,
    /// There may be something to read.
    pub(crate) readable: bool,
    /// A `Flush` is to be answered.
    pub(crate) flushing: bool,
}

/// Lets those know who wait for a descriptor.
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
