//! Actions: requests of the endpoint to its driver.

use std::net::{IpAddr, SocketAddr};

use crate::event::EscalateReason;
use crate::ids::{ConnId, FlowToken, Verdict};
use crate::transport::Path;

/// A request to the driver. Actions are carried out in order; the driving contract is in the
/// [module documentation](super).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make a mailbox: a UDP socket at this address, at any port. Hand its datagrams to
    /// [`Pairs::receive`](super::Pairs::receive) whenever the mailbox is read. Answered by
    /// [`Endpoint::set_mailbox`](super::Endpoint::set_mailbox), or not at all.
    Mailbox {
        /// A local address.
        ip: IpAddr,
    },
    /// Send a control message over UDP. Losing it is allowed.
    Datagram {
        /// Destination.
        to: SocketAddr,
        /// Send it from the socket bound to this address, because the message it answers came to
        /// that socket. `None`: from the process's own control socket. Port 0: from a port of that address that the peer does
        /// not know; answers that come there are wanted as long as [`is_reaching`](super::Endpoint::is_reaching).
        from: Option<SocketAddr>,
        /// The message.
        data: Vec<u8>,
    },
    /// Start a connection; answered by `handle_connected` or `handle_conn_lost`.
    Connect {
        /// The id of the new connection.
        conn: ConnId,
        /// The flow that it is for.
        token: FlowToken,
        /// Local address, locator of the peer's resume listener, and kind of transport.
        path: Path,
        /// The path may drop long packets: TCP is to send, and to ask for, segments that every path carries.
        small_segments: bool,
    },
    /// Write a whole control message to a connection.
    Send {
        /// Which connection.
        conn: ConnId,
        /// The message.
        data: Vec<u8>,
    },
    /// If a message already waits in the connection's receive queue, hand it in with `handle_message`.
    /// Then answer with `handle_flushed`, in any case.
    Flush {
        /// Which connection.
        conn: ConnId,
    },
    /// Close a connection. The endpoint has forgotten it already.
    Close {
        /// Which connection.
        conn: ConnId,
    },
    /// The peer has SLIM: the flow can be resumed from now on.
    Live {
        /// Which flow.
        token: FlowToken,
    },
    /// The flow stays plain TCP: stop counting bytes and keeping copies.
    Legacy {
        /// Which flow.
        token: FlowToken,
        /// The policy forbids plain TCP: the application must not use the flow.
        required_refused: bool,
    },
    /// Let no data call of the application begin on the flow, and stop trimming its replay buffer; the transport
    /// stays as it is. Answered by `handle_suspended` once no data call is under way. If the replay
    /// after an [`Install`](Action::Install) is still being written, the replay stops.
    Suspend {
        /// Which flow.
        token: FlowToken,
    },
    /// Read the flow's transport dry into the stash and close it. Answered by `handle_drained`, once no data call is under way.
    /// The flow is suspended before.
    Drain {
        /// Which flow.
        token: FlowToken,
    },
    /// The connection is the flow's transport from now on: trim what the peer has received,
    /// replay the rest, then let data calls begin again and answer with `handle_installed`. During the replay,
    /// read the bytes that the peer replays into the stash.
    Install {
        /// Which flow.
        token: FlowToken,
        /// The connection; the endpoint has forgotten it.
        conn: ConnId,
        /// Number of our bytes that the peer has received: replay from here.
        peer_received: u64,
        /// Number of bytes the peer has sent. It replays those that we have not received.
        peer_sent: u64,
        /// Length of the peer's whole stream, if its application has finished.
        peer_final: Option<u64>,
    },
    /// There was no fault: use the old transport, which was not drained, again. If the flow's
    /// state is `Legacy` when this action is taken, the flow is plain TCP from now on.
    Reinstate {
        /// Which flow.
        token: FlowToken,
    },
    /// The flow's transport has ended, and the peer process does not answer. Probe the transport: does the peer's
    /// *kernel* answer as one that has ended the stream itself? Answered by
    /// `handle_verified` within one to two seconds, unless the flow is reinstated, resumed or given up before. The answer is no
    /// for a transport of another kind than TCP: QUERYs may take another network than its bytes, so that an answer on the transport does not
    /// show that QUERYs arrive.
    Verify {
        /// Which flow.
        token: FlowToken,
    },
    /// The peer's application has finished after this many bytes: an end of stream at that place is
    /// genuine.
    PeerFinal {
        /// Which flow.
        token: FlowToken,
        /// Length of the peer's whole stream.
        seq: u64,
    },
    /// The flow is held, and its transport has only stalled: if its bytes have moved, call [`moves_on`](super::Endpoint::moves_on).
    Look {
        /// Which flow.
        token: FlowToken,
    },
    /// Give the flow up. Its old transport may or may not have been drained. The application reads all received
    /// bytes before it sees the verdict.
    Escalate {
        /// Which flow.
        token: FlowToken,
        /// The error or end of stream that the application sees.
        verdict: Verdict,
    },
    /// This process is lost: the job goes on without it. A setting says what that means ([`Config::when_lost`](crate::config::Config::when_lost)).
    /// `Error`: all its flows with a session have ended, or end as soon as they are suspended. `Exit`: the driver ends the process at once, and no
    /// flow has ended before.
    Fence {
        /// `Fenced` or `NoWitness`.
        reason: EscalateReason,
        /// A control message and its destination. It says that this process does no more for the job, so it is sent last, directly before a
        /// process that ends itself does so.
        tell: Option<(SocketAddr, Vec<u8>)>,
    },
}
