//! The outage of a flow that has lost its transport, and the state of its attempts.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::time::Duration;

use super::errno::{ECONNRESET, EPIPE};
use crate::auth::Prepared;
use crate::event::{EscalateReason, Event, Failure, Trouble};
use crate::ids::{Cause, Time};
use crate::transport::{Locator, Path};

/// The state of the attempts to get a new transport.
pub(super) struct Attempts {
    /// Number of the window, counted from 0.
    pub(super) n: u32,
    /// Attempts begun so far: more than `n + 1` if the last window is repeated.
    pub(super) begun: u32,
    /// Connections made in this window.
    pub(super) turn: u32,
    /// Failed connections in this window.
    pub(super) failures: u32,
    /// Rest of the window when it was paused, because a transport was being installed.
    pub(super) left: Option<Duration>,
    pub(super) last: Failure,
    /// Path of the connection under way, or of the one that waits for a slot.
    pub(super) path: Path,
    pub(super) asked: Time,
    /// Connections replaced in this window because the peer had answered a probe.
    pub(super) replaced: u32,
    /// The address where the peer has answered a probe: the next connection goes there.
    pub(super) heard_at: Option<IpAddr>,
    /// Locators that were bad when the window began. If the kinds changed their order within a window, one of them might miss its turn.
    pub(super) bad: Vec<Locator>,
}

/// A flow is held after its attempts have failed.
#[derive(Clone, Copy)]
pub(super) struct HoldState {
    /// When its time is over; after its last round, when it is given up.
    pub(super) until: Time,
    /// No attempts are under way.
    pub(super) rests: bool,
    /// The last round has been sent: the flow waits for its answer until `until`.
    pub(super) last: bool,
}

impl HoldState {
    /// The same, with attempts under way.
    pub(super) fn awake(self) -> Self {
        HoldState {
            rests: false,
            ..self
        }
    }
}

/// State of a flow from the first suspicion of a fault until the flow is live again.
pub(super) struct Outage {
    pub(super) cause: Cause,
    /// The error that the kernel reported, or one that stands in for it.
    pub(super) errno: Option<i32>,
    pub(super) since: Time,
    /// A RESUME of ours may have reached the peer. The peer may rely on our not trimming any more, so the
    /// old transport can never be used again.
    pub(super) exposed: bool,
    /// Bytes received when the stream ended unannounced. The old transport is intact.
    pub(super) eof: Option<u64>,
    /// Whether the peer's kernel has confirmed that end of stream.
    pub(super) proof: Proof,
    /// The peer has closed and forgotten the flow after sending this many bytes.
    pub(super) peer_done: Option<u64>,
    /// The peer has confirmed, by STATUS or in a resume through the witness, that its application has finished.
    pub(super) confirmed: bool,
    /// The peer has closed the flow, but we have received more or fewer bytes than it says that it sent.
    pub(super) out_of_count: bool,
    /// Events held back while the outage may turn out to be a close by the peer.
    pub(super) kept: Option<Vec<Event>>,
    pub(super) attempts: Option<Attempts>,
    /// When this outage, or the stall that it has come from, began.
    pub(super) suspected: Time,
    /// Something at the peer's host has answered in this window.
    pub(super) heard: bool,
    /// Something at the peer's host has answered in this outage.
    pub(super) answered: bool,
    /// All attempts have failed, and the peer is accused at the witness.
    pub(super) accused: bool,
    /// The flow is given up for this reason as soon as it is suspended.
    pub(super) ending: Option<EscalateReason>,
    /// The front end suspects the path of the present connection, so another path comes first.
    pub(super) elsewhere: bool,
    /// The peer answers at this address, so the first connection goes there.
    pub(super) via: Option<IpAddr>,
    /// The path may drop long packets: connections are to have small segments.
    pub(super) small_segments: bool,
    /// A replay has made no progress.
    pub(super) replay_stalled: bool,
    /// The flow is held, or has been since the outage began.
    pub(super) hold: Option<HoldState>,
    /// The transport is well: the flow moves to a kind that it prefers.
    pub(super) moves: bool,
    /// Connections through the witness come first.
    pub(super) relay_first: bool,
    /// The prepared flow key, filled when the first message of the outage needs it.
    pub(super) key: OnceCell<Prepared>,
}

impl Outage {
    pub(super) fn new(now: Time, cause: Cause) -> Self {
        let (errno, eof) = match cause {
            Cause::Errno(errno) => (Some(errno), None),
            Cause::Eof { received } => (None, Some(received)),
            Cause::Stall | Cause::PeerAsked => (None, None),
        };
        Outage {
            cause,
            errno,
            since: now,
            exposed: false,
            eof,
            proof: Proof::Unasked,
            peer_done: None,
            confirmed: false,
            out_of_count: false,
            kept: Some(Vec::new()),
            attempts: None,
            suspected: now,
            heard: false,
            answered: false,
            accused: false,
            ending: None,
            elsewhere: false,
            via: None,
            small_segments: false,
            replay_stalled: false,
            hold: None,
            moves: false,
            relay_first: false,
            key: OnceCell::new(),
        }
    }

    /// The error that the application gets if the flow is given up.
    pub(super) fn verdict(&self) -> i32 {
        self.errno.unwrap_or(ECONNRESET)
    }

    /// The peer's kernel has ended the transport, as it does when the process dies.
    pub(super) fn ended_by_peer(&self) -> bool {
        match self.cause {
            Cause::Eof { .. } => true,
            Cause::Errno(errno) => [ECONNRESET, EPIPE].contains(&errno),
            Cause::Stall | Cause::PeerAsked => false,
        }
    }

    /// The kernel has reported no fault of the transport. It would go on waiting, so the flow is not given up early.
    pub(super) fn patient(&self) -> bool {
        self.errno.is_none() && matches!(self.cause, Cause::Stall | Cause::PeerAsked)
    }

    /// The flow is held, and no attempts are under way.
    pub(super) fn rests(&self) -> bool {
        self.hold.is_some_and(|hold| hold.rests)
    }

    pub(super) fn trouble(&self) -> Trouble {
        match self.moves {
            true => Trouble::Move,
            false => self.cause.into(),
        }
    }
}

/// Whether the peer's kernel has ended the stream: the result of [`Action::Verify`](super::Action::Verify).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    Unasked,
    /// `Verify` is under way.
    Awaited,
    /// `Verify` is under way, and the peer process has answered none of the QUERYs about the flow.
    AwaitedAlone,
    Denied,
    Given,
}
