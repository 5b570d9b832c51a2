//! States, events and counters of flows.

use std::time::Duration;

use slim_sys::Errno;

/// State of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamState {
    /// The first connection is not established yet.
    Connecting,
    /// The flow is usable, and the peer is being asked whether it has SLIM. Its bytes are kept already. But if the connection breaks now
    /// and the peer does not answer within half a second, the flow fails. [`Flow::wait_negotiated`](crate::Flow::wait_negotiated) waits for
    /// the answer; a flow by blob is never in this state.
    Negotiating,
    /// The flow outlives its connection.
    Protected,
    /// The flow is plain TCP: the peer does not have SLIM, or the settings forbid it.
    Plain,
    /// The connection is broken, or suspected to be, and is being replaced.
    Suspended,
    /// The flow was escalated with this error. `None`: with an orderly end of the stream.
    Failed(Option<Errno>),
    /// This end has closed the flow.
    Closed,
}

/// A change of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionEvent {
    /// The flow's [number](crate::Flow::id).
    pub flow: u64,
    /// The change.
    pub change: FlowChange,
}

/// Kind of change of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowChange {
    /// The first connection is established.
    Connected,
    /// The peer has SLIM: from now on the flow outlives its connection.
    Protected,
    /// The flow is plain TCP from now on.
    Plain,
    /// The flow has lost its connection and is suspended.
    Suspended {
        /// The error of the connection, if this end met one.
        errno: Option<Errno>,
    },
    /// The flow has a new connection.
    Resumed {
        /// Bytes that this end has replayed in this resume.
        replayed: u64,
        /// Length of this suspension.
        away: Duration,
    },
    /// The flow goes on with its old connection, which proved to be intact.
    Reinstated,
    /// The flow was escalated: the program gets this error, or an end of the stream if it is `None`.
    Escalated {
        /// The error number.
        errno: Option<Errno>,
    },
}

/// Counters of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowStats {
    /// Bytes that the program has sent.
    pub sent: u64,
    /// Bytes that the program has received.
    pub received: u64,
    /// Number of resumes onto a new connection.
    pub resumes: u64,
    /// Bytes that this end has replayed.
    pub replayed: u64,
    /// Total time of all suspensions, the present one included.
    pub suspended: Duration,
}

/// What the kernel knows of the delivery of a flow's bytes on its present connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowDelivery {
    /// Bytes that the program has sent.
    pub sent: u64,
    /// Bytes of these that the peer's kernel has acknowledged.
    pub acknowledged: u64,
    /// Packets that are under way without an acknowledgement. If there are none, unacknowledged bytes wait for room at the peer, or
    /// the kernel [cannot send](Self::cannot_send).
    pub in_flight: u32,
    /// The peer has room for a packet, and yet the kernel sends nothing: for example, the local address is gone. Needs Linux 5.4.
    pub cannot_send: bool,
    /// The smoothed round-trip time.
    pub round_trip: Duration,
}

/// Counters of a session: sums over its flows, closed ones included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionStats {
    /// Flows that are open.
    pub open: u64,
    /// Flows that were opened or accepted.
    pub flows: u64,
    /// Flows that have failed.
    pub failed: u64,
    /// Events that were dropped because the program did not take them in time.
    pub lost_events: u64,
    /// Sums over all flows.
    pub total: FlowStats,
}

impl FlowStats {
    pub(crate) fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.resumes += other.resumes;
        self.replayed += other.replayed;
        self.suspended += other.suspended;
    }
}
