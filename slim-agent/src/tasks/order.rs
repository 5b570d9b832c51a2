//! The driver's orders to the task of a resume connection.

use std::sync::Arc;

use slim_core::FlowToken;

use crate::FlowIo;

/// Orders are carried out one after the other.
pub(crate) enum Order {
    /// Write this message.
    Send(Vec<u8>),
    /// Deliver the messages that have arrived, then report that.
    Flush,
    /// Become the flow's transport.
    Install(Install),
    /// Stop the replay; keep the bytes that have arrived.
    Stop,
    /// Read all bytes that have arrived for the flow, and close.
    Drain,
}

/// What a connection needs to become a flow's transport.
pub(crate) struct Install {
    pub(crate) token: FlowToken,
    pub(crate) io: Arc<dyn FlowIo>,
    /// Where the replay begins.
    pub(crate) peer_received: u64,
    /// Where it ends.
    pub(crate) sent: u64,
    /// Bytes that the peer replays.
    pub(crate) expected: u64,
}
