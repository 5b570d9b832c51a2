//! What happens to flows, and how much.

use std::time::Duration;

use slim_sys::Errno;

/// How a flow stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamState {
    /// Its first connection does not stand yet.
    Connecting,
    /// It can be used, and the peer is being asked whether it has SLIM. Should the connection break now, it is resumed if it has.
    Negotiating,
    /// It outlives its connection.
    Protected,
    /// It is plain TCP: the peer has no SLIM, or the settings forbid it.
    Plain,
    /// Its connection is broken, or suspected, and is being replaced.
    Suspended,
    /// It was given up. `None`: with an orderly end of the stream.
    Failed(Option<Errno>),
    /// Closed here.
    Closed,
}

/// Something that has happened to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionEvent {
    /// The flow's [number](crate::Flow::id).
    pub flow: u64,
    /// What has happened.
    pub change: FlowChange,
}

/// What has happened to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowChange {
    /// Its first connection stands.
    Connected,
    /// The peer has SLIM: from here on the flow outlives its connection.
    Protected,
    /// It is plain TCP from here on.
    Plain,
    /// Its connection is out of use.
    Suspended {
        /// The error that this end met, if it was that.
        errno: Option<Errno>,
    },
    /// It has a new connection.
    Resumed {
        /// Bytes that this end sent again.
        replayed: u64,
        /// How long it was suspended.
        away: Duration,
    },
    /// It has its old connection back: nothing was wrong with it.
    Reinstated,
    /// It was given up, and the program gets this error; `None`: an end of the stream.
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
    /// How often the flow got a new connection.
    pub resumes: u64,
    /// Bytes that this end has sent again.
    pub replayed: u64,
    /// For how long the flow was suspended in all, until now.
    pub suspended: Duration,
}

/// Counters of a session: sums over its flows, those that are closed included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionStats {
    /// Flows that are open.
    pub open: u64,
    /// Flows that were opened or accepted.
    pub flows: u64,
    /// Flows that were given up.
    pub failed: u64,
    /// Events that were dropped because nobody took them.
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
