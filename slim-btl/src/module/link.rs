//! A flow with its received bytes, its stage, and its end.

use std::sync::Arc;
use std::time::Instant;

use nix::libc;
use slim::{Flow, StreamState, TransferError};

use crate::endpoint::BtlEndpoint;
use crate::hdr::{BtlHello, FrameHeader, FrameKind, HELLO_BYTES, MAX_PAYLOAD};
use crate::inbox::FrameReader;
use crate::proc::ProcName;

/// Stage of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkStage {
    /// The connection is not established yet.
    Connecting,
    /// This process has sent its hello.
    Offered,
    /// The peer has accepted; this process confirms once the flow's session has negotiated.
    Accepted,
    /// The peer's hello is expected.
    Unnamed,
    /// This process accepts the flow; the peer has not confirmed yet.
    Answered,
    /// The flow is used in both directions.
    Up,
    /// The peer's stream has ended, and this process still sends what waits. Then the rail is gone.
    Draining,
}

/// A flow, with its received bytes.
pub(super) struct BtlLink {
    /// `None`: no address could be connected to.
    pub(super) flow: Option<Arc<Flow>>,
    pub(super) endpoint: Option<Arc<BtlEndpoint>>,
    pub(super) stage: LinkStage,
    pub(super) token: u64,
    /// A further rail, not the first flow.
    pub(super) is_rail: bool,
    /// When it was added, or accepted by the peer.
    pub(super) since: Instant,
    /// The answer to the peer's hello is to be sent.
    pub(super) owes_answer: bool,
    /// The peer has sent a frame after the handshake.
    pub(super) has_received: bool,
    /// The peer has said goodbye.
    pub(super) goodbye: bool,
    pub(super) reader: FrameReader,
    /// Reads in a row that found nothing.
    pub(super) idle: u32,
    pub(super) busy: bool,
    /// The last read took all that had arrived.
    pub(super) drained: bool,
}

/// How a flow has ended, and why.
#[derive(Clone, Copy, Debug)]
pub(super) enum LinkEnd<'a> {
    /// The end of the peer's stream.
    Eof,
    /// The connection broke.
    Broken(&'a str),
    /// The connection could not be established, or the peer does not keep to the protocol.
    Failed(&'a str),
}

impl<'a> LinkEnd<'a> {
    /// For an error of a data call, with its text.
    pub(super) fn of(error: TransferError, text: &'a str) -> Self {
        match error.errno() {
            Some(libc::ECONNABORTED | libc::ECONNRESET | libc::EPIPE) => Self::Broken(text),
            _ => Self::Failed(text),
        }
    }

    pub(super) fn text(self) -> &'a str {
        match self {
            Self::Eof => "it ended without a goodbye",
            Self::Broken(why) | Self::Failed(why) => why,
        }
    }
}

/// State of a flow after it was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkFate {
    /// Read again.
    Busy,
    /// Nothing was received for a while: the session reports the flow when there is something.
    Quiet,
    /// The flow has ended.
    Over,
}

impl BtlLink {
    pub(super) fn new(
        flow: Option<Arc<Flow>>,
        endpoint: Option<Arc<BtlEndpoint>>,
        stage: LinkStage,
    ) -> Self {
        Self {
            flow,
            endpoint,
            stage,
            token: 0,
            is_rail: false,
            since: Instant::now(),
            owes_answer: false,
            has_received: false,
            goodbye: false,
            reader: FrameReader::default(),
            idle: 0,
            busy: false,
            drained: false,
        }
    }

    /// This process connects.
    pub(super) fn connecting(
        flow: Flow,
        endpoint: Arc<BtlEndpoint>,
        token: u64,
        is_rail: bool,
    ) -> Self {
        let flow = Some(Arc::new(flow));
        Self {
            token,
            is_rail,
            ..Self::new(flow, Some(endpoint), LinkStage::Connecting)
        }
    }

    pub(super) fn is_suspended(&self) -> bool {
        let state = self.flow.as_ref().map(|flow| flow.state());
        state == Some(StreamState::Suspended)
    }

    /// Whether frames go by it that a transport of another kind than TCP carries.
    pub(super) fn is_up_and_carried(&self) -> bool {
        let flow = self.flow.as_ref();
        matches!(self.stage, LinkStage::Up) && flow.is_some_and(|flow| flow.is_carried())
    }

    /// Accepts the flow, if that is still to be said. Without a connection it is said after the resume.
    pub(super) fn answer(&mut self) {
        let Some(flow) = self.flow.as_ref().filter(|_| self.owes_answer) else {
            return;
        };
        let accept = FrameHeader::control(FrameKind::Accept).encode();
        // The first bytes of a connection: the kernel takes all or none.
        self.owes_answer = !flow.try_send(&accept).is_ok_and(|n| n == accept.len());
    }

    /// Says hello as this process, once the connection is established.
    pub(super) fn offer(&mut self, me: ProcName) {
        let Some(flow) = &self.flow else { return };
        if flow.state() == StreamState::Connecting {
            return;
        }
        let hello = BtlHello {
            name: me,
            token: self.token,
            is_rail: self.is_rail,
        };
        let hello = hello.encode();
        // The first bytes of a connection: the kernel takes all or none.
        if flow.try_send(&hello).is_ok_and(|n| n == hello.len()) {
            self.stage = LinkStage::Offered;
        }
    }

    /// What distinguishes the link, as text.
    pub(super) fn summary(&self) -> String {
        format!(
            "{:?} with {:?}: rail {}, goodbye {}, idle {}, busy {}, {:?}",
            self.stage,
            self.endpoint.as_ref().map(|endpoint| endpoint.name),
            self.is_rail,
            self.goodbye,
            self.idle,
            self.busy,
            self.reader
        )
    }

    /// Limit of a frame's payload. Whoever has not shown the token yet may be a stranger.
    pub(super) fn longest_payload(&self) -> usize {
        match self.stage {
            LinkStage::Up | LinkStage::Draining => MAX_PAYLOAD,
            LinkStage::Connecting
            | LinkStage::Offered
            | LinkStage::Accepted
            | LinkStage::Unnamed
            | LinkStage::Answered => HELLO_BYTES,
        }
    }

    /// No address of the peer can be connected to.
    pub(super) fn unreachable(endpoint: Arc<BtlEndpoint>) -> Self {
        Self::new(None, Some(endpoint), LinkStage::Connecting)
    }
}
