//! What control is told of a stream.

/// How far both directions have come, for good, when a transport has been drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Bytes received since the flow began: given to the application, or stashed.
    pub received: u64,
    /// Bytes sent since the flow began, as the application counts them.
    pub sent: u64,
}

/// What is known of a flow's transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Bytes sent that the peer's end has not acknowledged. If there are none, the rest need not be filled in.
    pub unacked: u64,
    /// Bytes that the peer's end has acknowledged since the flow began.
    pub acked: u64,
    /// The transport reports no error and yet looks stuck: what is unacknowledged was sent more than once. For how long that
    /// must last before it is a stall is not for the transport to say.
    pub stuck: bool,
}

impl Probe {
    /// Something is unacknowledged, and more cannot be told just now.
    pub const BUSY: Self = Self {
        unacked: 1,
        acked: 0,
        stuck: false,
    };
}

/// What is owed to the peer of a flow that the application has closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owed {
    /// Bytes of which there is a copy.
    pub kept: usize,
    /// Bytes that the peer's kernel has acknowledged since the flow began; of no meaning while it is suspended.
    pub acked: u64,
}

/// How the transport of a flow stands that the application has closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Nothing is owed any more, or the peer is to learn from the kernel that nobody reads what it sends.
    Done,
    /// The kernel is at it.
    Owed(Owed),
    /// The kernel has given the transport up before.
    Broken(Owed),
}
