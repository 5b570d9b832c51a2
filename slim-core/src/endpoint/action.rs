//! What the endpoint asks its driver to do.

use std::net::{IpAddr, SocketAddr};

use crate::ids::{ConnId, FlowToken, Verdict};
use crate::transport::Path;

/// Something for the driver to do now. The driving contract stands at
/// [`Endpoint`](super::Endpoint); actions are to be carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A mailbox is wanted: a UDP socket at this address, at any port. What comes to it is for
    /// [`Pairs::receive`](super::Pairs::receive), whenever somebody looks. Answered by
    /// [`Endpoint::set_mailbox`](super::Endpoint::set_mailbox), or not at all.
    Mailbox {
        /// An address of ours.
        ip: IpAddr,
    },
    /// Send a control message over UDP. Losing it is allowed.
    Datagram {
        /// Where to.
        to: SocketAddr,
        /// Send it from the socket bound to this address, because the message it answers came to
        /// it; `None`: from the process's own control socket. Port 0: from a port of that address which the peer has not
        /// heard of; what comes back there is wanted as long as [`is_reaching`](super::Endpoint::is_reaching).
        from: Option<SocketAddr>,
        /// The message.
        data: Vec<u8>,
    },
    /// Start a connection; answered by `handle_connected` or `handle_conn_lost`.
    Connect {
        /// Its name from now on.
        conn: ConnId,
        /// The flow that it is for.
        token: FlowToken,
        /// From where to which resume listener of the peer's, and by what kind of transport.
        path: Path,
    },
    /// Write a whole control message to a connection.
    Send {
        /// Which connection.
        conn: ConnId,
        /// The message.
        data: Vec<u8>,
    },
    /// Hand in, with `handle_message`, the message that may already wait in the connection's
    /// receive queue; then answer with `handle_flushed`, in any case.
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
    /// The flow is plain TCP for good: stop counting and keeping copies.
    Legacy {
        /// Which flow.
        token: FlowToken,
        /// The policy forbids plain TCP: the application must not use the flow.
        required_refused: bool,
    },
    /// Keep the application out of the flow and stop trimming its replay buffer; the transport
    /// stays as it is. Answered by `handle_suspended` once no data call is under way. If the replay
    /// after an [`Install`](Action::Install) is still being written, it stops.
    Suspend {
        /// Which flow.
        token: FlowToken,
    },
    /// Read the flow's transport dry into the stash and close it; answered by `handle_drained`, once no data call is under way.
    /// The flow is suspended.
    Drain {
        /// Which flow.
        token: FlowToken,
    },
    /// The connection is the flow's transport from now on: forget what the peer has received,
    /// replay the rest, then let the application in and answer with `handle_installed`. Reading
    /// goes on into the stash meanwhile, up to the bytes that the peer has to replay.
    Install {
        /// Which flow.
        token: FlowToken,
        /// The connection; the endpoint has forgotten it.
        conn: ConnId,
        /// Bytes of ours that the peer holds: replay from here.
        peer_received: u64,
        /// Bytes the peer has sent; what we lack of them is what it replays.
        peer_sent: u64,
        /// Bytes the peer will have sent in all, if its application has finished.
        peer_final: Option<u64>,
    },
    /// Nothing was wrong: put the old transport, which was not drained, back to use. If the flow's
    /// state is `Legacy` when this action is taken, it is plain TCP from now on.
    Reinstate {
        /// Which flow.
        token: FlowToken,
    },
    /// The flow's transport has ended, and the peer process does not answer: find out whether the peer's
    /// *kernel* still answers on that transport as one that has ended the stream itself; answered by
    /// `handle_verified` within one to two seconds, unless the flow is put back, resumed or given up before.
    Verify {
        /// Which flow.
        token: FlowToken,
    },
    /// The peer's application has finished after this many bytes: an end of stream there is
    /// genuine.
    PeerFinal {
        /// Which flow.
        token: FlowToken,
        /// Bytes the peer has sent in all.
        seq: u64,
    },
    /// Give the flow up. Its old transport may or may not have been drained; what is received is
    /// for the application to read before it sees the verdict.
    Escalate {
        /// Which flow.
        token: FlowToken,
        /// What the application is to see.
        verdict: Verdict,
    },
}
