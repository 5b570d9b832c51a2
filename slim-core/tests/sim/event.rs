//! Events of the world, and the harm that is done to it.

use std::net::SocketAddr;

use slim_core::{ConnId, FlowToken};

#[derive(Debug)]
pub enum Ev {
    /// TCP: a segment of direction `side` is transmitted.
    Segment {
        conn: usize,
        side: usize,
    },
    /// TCP: an acknowledgement reaches `side`.
    Ack {
        conn: usize,
        side: usize,
        upto: usize,
    },
    /// TCP: a reset reaches `side`.
    Reset {
        conn: usize,
        side: usize,
    },
    /// TCP: a connection request from the process `node` reaches the other host.
    Syn {
        node: usize,
        conn: ConnId,
        path: usize,
    },
    /// TCP: the connection request is answered.
    SynAnswer {
        node: usize,
        conn: ConnId,
        tcp: Option<usize>,
    },
    /// A process looks at a connection.
    Poke {
        conn: usize,
        side: usize,
    },
    Datagram {
        node: usize,
        from: SocketAddr,
        to: SocketAddr,
        data: Vec<u8>,
    },
    Refused {
        node: usize,
        to: SocketAddr,
        data: Vec<u8>,
    },
    Timer {
        node: usize,
    },
    Suspended {
        node: usize,
        token: FlowToken,
    },
    /// The kernel of `node` has asked the other kernel about an end of stream.
    Verified {
        node: usize,
        token: FlowToken,
    },
    Drain {
        node: usize,
        token: FlowToken,
    },
    Drained {
        node: usize,
        token: FlowToken,
        tcp: Option<(usize, usize)>,
    },
    /// An application accepts its connection.
    Accept {
        flow: usize,
    },
    /// The application does something.
    Tick {
        node: usize,
        token: FlowToken,
    },
    /// A datagram reaches the meeting point.
    Meeting {
        from: SocketAddr,
        data: Vec<u8>,
    },
    /// A host changes all its addresses.
    Move {
        node: usize,
        place: u8,
    },
    Fault(Harm),
}

#[derive(Clone, Debug)]
pub enum Harm {
    /// A connection is killed at one end, as by `SOCK_DESTROY`.
    Kill {
        newest: u64,
        side: usize,
        reset: bool,
    },
    /// The same, aimed at a connection on which a resume is under way.
    Snipe {
        conn: usize,
        side: usize,
        reset: bool,
    },
    /// A third party injects an end of stream.
    End { newest: u64, side: usize },
    /// Nothing passes on a path, in one direction or both, before `until`.
    Cut {
        path: usize,
        ways: usize,
        until: u64,
    },
    /// Nothing passes on any network of one kind of transport before `until`.
    Blackout { fabric: bool, until: u64 },
    /// Nothing passes anywhere before `until`.
    Dark { until: u64 },
    /// A process ends, and its host stays.
    Die { node: usize },
    /// The driver of `node` suspects that a flow is stalled.
    Stall { node: usize, flow: usize },
    /// A process is killed.
    Crash { node: usize },
    /// Another process is started in its place, and gets its ports.
    Restart { node: usize },
    /// An attacker who cannot read the traffic sends HELLO for a connection.
    ForgeHello { flow: usize },
    /// An attacker who cannot read the traffic forges the refusal of a port that `node` asks.
    ForgeRefusal { node: usize, flow: usize },
}
