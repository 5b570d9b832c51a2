//! Result types of the control operations on a stream.

/// The final positions of both directions when a transport has been drained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Bytes received since the flow began: read by the application, or in the stash.
    pub received: u64,
    /// Bytes sent since the flow began, as the application counts them.
    pub sent: u64,
}

/// How far the peer has acknowledged on a flow's transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Bytes sent that the peer's end has not acknowledged. If 0, `stuck` need not be filled in.
    pub unacked: u64,
    /// Bytes that the peer's end has acknowledged since the flow began.
    pub acked: u64,
    /// The transport reports no error and yet looks stuck: unacknowledged bytes were sent more than once. The agent decides how
    /// long that must last to be a stall.
    pub stuck: bool,
    /// Only a resume can tell how many of the unacknowledged bytes the peer has.
    pub relayed: bool,
    /// There are so many of them, or somebody waits for that answer, so that the resume must not be put off.
    pub full: bool,
}

impl Probe {
    /// Some bytes are unacknowledged; how many cannot be determined at the moment.
    pub const BUSY: Self = Self {
        unacked: 1,
        acked: 0,
        stuck: false,
        relayed: false,
        full: false,
    };
}

/// The unacknowledged bytes of a flow that the application has closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Undelivered {
    /// Bytes in the replay buffer.
    pub kept: usize,
    /// Bytes that the peer's kernel has acknowledged since the flow began; meaningless while the flow is suspended.
    pub acked: u64,
}

/// State of delivery on the transport of a flow that the application has closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// All bytes are acknowledged; or the peer has sent bytes that will not be read, and the kernel answers these with a reset.
    Done,
    /// The kernel is still delivering.
    Undelivered(Undelivered),
    /// The kernel has given the transport up before all bytes were acknowledged.
    Broken(Undelivered),
}
