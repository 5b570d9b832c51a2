//! A flow that has lost its transport, and how far the search for another one is.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::time::Duration;

use super::errno::ECONNRESET;
use crate::auth::Prepared;
use crate::event::{Event, Failure, Trouble};
use crate::ids::{Cause, Time};
use crate::transport::Path;

/// Where we are in looking for a new transport.
pub(super) struct Attempts {
    /// Window, counted from 0.
    pub(super) n: u32,
    /// Attempts begun so far, which is more than `n` if the last window is repeated.
    pub(super) begun: u32,
    /// Connections made in this window.
    pub(super) turn: u32,
    /// Failures in a row in this window.
    pub(super) failures: u32,
    /// What the window still had when it was stopped, because a transport was being installed.
    pub(super) left: Option<Duration>,
    pub(super) last: Failure,
    /// The connection under way, or the one that waits for its turn.
    pub(super) path: Path,
    pub(super) asked: Time,
    /// Connections replaced in this window because the peer had answered.
    pub(super) replaced: u32,
    /// Where it has answered: the next connection goes there.
    pub(super) heard_at: Option<IpAddr>,
}

/// From the first suspicion until the flow is live again.
pub(super) struct Outage {
    pub(super) cause: Cause,
    /// What the kernel said, or has to be said in its place, if anything.
    pub(super) errno: Option<i32>,
    pub(super) since: Time,
    /// A RESUME of ours may have reached the peer: it may act on our not trimming any more, so the
    /// old transport can never be used again.
    pub(super) exposed: bool,
    /// Bytes received when the stream ended unannounced. The old transport is intact.
    pub(super) eof: Option<u64>,
    /// What the peer's kernel says to that.
    pub(super) proof: Proof,
    /// The peer has closed and forgotten the flow after sending this many bytes.
    pub(super) peer_done: Option<u64>,
    /// The peer has answered that it has closed the flow.
    pub(super) confirmed: bool,
    /// The peer has closed the flow, but we do not hold what it says that it has sent.
    pub(super) out_of_count: bool,
    /// Its events, while it may turn out to be the end that the peer wanted.
    pub(super) kept: Option<Vec<Event>>,
    pub(super) attempts: Option<Attempts>,
    /// The flow's key, from the first message that it was needed for.
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
            key: OnceCell::new(),
        }
    }

    /// The error that the application gets if it must get one.
    pub(super) fn verdict(&self) -> i32 {
        self.errno.unwrap_or(ECONNRESET)
    }

    /// Nothing of ours has failed as far as the kernel knows: it would wait, and so do we.
    pub(super) fn patient(&self) -> bool {
        self.errno.is_none() && matches!(self.cause, Cause::Stall | Cause::PeerAsked)
    }

    pub(super) fn trouble(&self) -> Trouble {
        self.cause.into()
    }
}

/// Whether the peer's kernel has ended the stream, as far as [`Action::Verify`](super::Action::Verify) can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    Unasked,
    /// `Verify` is under way.
    Awaited,
    /// `Verify` is under way, and the process has answered none of the questions about the flow meanwhile.
    AwaitedAlone,
    Denied,
    Given,
}
