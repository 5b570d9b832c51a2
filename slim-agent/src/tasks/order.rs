//! What the driver wants of the task of a resume connection.

use std::sync::Arc;

use slim_core::FlowToken;

use crate::FlowIo;

/// Orders are carried out in turn.
pub(crate) enum Order {
    /// Write this message.
    Send(Vec<u8>),
    /// Hand in what is there to be read, then say so.
    Flush,
    /// Become the flow's transport.
    Install(Install),
    /// Stop the replay; keep what came.
    Stop,
    /// Read everything that is there for the flow, and close.
    Drain,
}

/// What a connection needs to become a flow's transport.
pub(crate) struct Install {
    pub(crate) token: FlowToken,
    pub(crate) io: Arc<dyn FlowIo>,
    /// Where the replay begins, and where it ends.
    pub(crate) peer_received: u64,
    pub(crate) sent: u64,
    /// Bytes that the peer replays.
    pub(crate) expected: u64,
}
