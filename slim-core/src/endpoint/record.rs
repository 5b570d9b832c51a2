//! What the endpoint knows of one flow.

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::ends::Ends;
use super::errno::EPIPE;
use super::flow::{Lifecycle, State};
use super::outage::Outage;
use super::processes::PeerProcess;
use crate::addr::at_port;
use crate::auth::{FlowKey, Fresh, Prepared};
use crate::ids::{ConnId, EndpointId, FinHow, FlowId, FlowToken, Nonce, Role, Time};
use crate::transport::Locator;
use crate::wire::{FlowStatus, Hello, Message, Parsed};

/// An idle flow shall cost little: what is there for a while only is on the heap meanwhile.
pub(super) struct FlowRecord {
    pub(super) token: FlowToken,
    pub(super) role: Role,
    pub(super) ends: Ends,
    pub(super) life: Lifecycle,
    pub(super) opened: Time,
    /// Our name for it if we connected, the peer's once it has said HELLO.
    pub(super) id: Option<FlowId>,
    /// Connector: what we ask, kept because an answer may come late.
    pub(super) hello: Option<Box<Asking>>,
    /// The other side, once there is a key.
    pub(super) peer: Option<Peer>,
    pub(super) bar: Bar,
    /// Our application has finished.
    pub(super) fin: Option<(u64, FinHow)>,
    /// The peer's application has finished.
    pub(super) peer_fin: Option<(u64, FinHow)>,
    /// Given up because the peer had closed it, with all that it had sent.
    pub(super) complete: bool,
    /// Connector: an earlier connection may have had the same addresses and ports.
    pub(super) again: bool,
    pub(super) epochs: Epochs,
    /// Bytes that the peer had sent when the present transport was made: its stream does not end before.
    pub(super) promised: u64,
    pub(super) change: Changing,
    pub(super) outage: Option<Box<Outage>>,
    pub(super) query: Option<Box<Asked>>,
    /// Becomes plain TCP as soon as a transport stands.
    pub(super) leaving: Option<Leaving>,
}

/// Ten thousand of them, most of them idle, are usual.
const _: () = assert!(size_of::<FlowRecord>() <= 240);

/// HELLO under way.
pub(super) struct Asking {
    pub(super) hello: Hello,
    pub(super) sent: u32,
    /// When it was sent last.
    pub(super) at: Time,
    /// HELLO_WAIT came: the peer has SLIM.
    pub(super) waiting: bool,
}

/// The other side of a flow.
#[derive(Clone)]
pub(super) struct Peer {
    pub(super) process: Arc<PeerProcess>,
    pub(super) key: FlowKey,
    /// From HELLO_ACK, which the acceptor says again if it is asked again.
    pub(super) random_s: [u8; 32],
}

/// The change of a flow to another transport.
#[derive(PartialEq, Eq)]
pub(super) struct Change {
    pub(super) drained: DrainState,
    /// Connection we asked for.
    pub(super) outgoing: Option<ConnId>,
    /// Where we connect, or wait for our turn to.
    pub(super) lane: Option<Locator>,
    /// Connection with a genuine RESUME that has no answer yet.
    pub(super) accepted: Option<ConnId>,
    /// Connection on which we sent RESUME_OK. It may hold CONFIRM and stream bytes.
    pub(super) awaiting: Option<ConnId>,
    /// `Flush` under way.
    pub(super) flushing: Option<ConnId>,
    pub(super) pump: Option<Pump>,
}

impl Change {
    const NONE: Self = Change {
        drained: DrainState::No,
        outgoing: None,
        lane: None,
        accepted: None,
        awaiting: None,
        flushing: None,
        pump: None,
    };

    /// Whether a new transport is being made, in either direction, or is there already.
    pub(super) fn has_connection(&self) -> bool {
        self.outgoing.is_some() || self.accepted.is_some() || self.pump.is_some()
    }
}

/// A [`Change`] that takes memory from the first time it is written to until it is over.
#[derive(Default)]
pub(super) struct Changing(Option<Box<Change>>);

impl Changing {
    /// Gives the memory back if nothing is under way.
    pub(super) fn rest(&mut self) {
        if **self == Change::NONE {
            self.0 = None;
        }
    }

    #[cfg(test)]
    pub(super) fn is_at_rest(&self) -> bool {
        self.0.is_none()
    }
}

impl Deref for Changing {
    type Target = Change;

    fn deref(&self) -> &Change {
        static NONE: Change = Change::NONE;
        self.0.as_deref().unwrap_or(&NONE)
    }
}

impl DerefMut for Changing {
    fn deref_mut(&mut self) -> &mut Change {
        self.0.get_or_insert_with(|| Box::new(Change::NONE))
    }
}

/// Is the application kept out?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bar {
    Open,
    /// `Suspend` is under way.
    Asked,
    Shut,
}

/// Is the old transport read dry and closed?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DrainState {
    No,
    /// `Drain` is under way.
    Asked,
    Done {
        received: u64,
        sent: u64,
    },
}

/// The numbers of the transports: `docs/PROTOCOL.md`, section "The resume handshake and why it is
/// correct".
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Epochs {
    /// Highest that anybody ever named.
    pub(super) seen: u64,
    /// Highest that we sent a RESUME for.
    pub(super) sent: u64,
    /// Highest that we took a RESUME for.
    pub(super) answered: u64,
    /// Of the newest transport that was ours.
    pub(super) committed: u64,
    /// Refusals as too old in a row: the next number jumps.
    pub(super) behind: u32,
}

impl Epochs {
    /// A number for our next RESUME. Grows faster each time it was too low, because a refusal
    /// does not tell how far we are behind.
    pub(super) fn next(&mut self) -> u64 {
        let step = 1 << self.behind.min(16);
        self.seen = self.seen.saturating_add(step);
        self.sent = self.seen;
        self.seen
    }
}

/// QUERY under way.
pub(super) struct Asked {
    pub(super) why: Why,
    pub(super) nonce: Nonce,
    /// 0 while the answer to a question about another flow is waited for.
    pub(super) sent: u32,
    pub(super) to: SocketAddr,
}

/// What a QUERY is to find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// Was that end of stream genuine?
    Eof,
    /// Does the process still exist?
    Death,
    /// Has it heard that the flow is plain TCP?
    Plain,
}

/// The replay is being written to a new transport.
#[derive(PartialEq, Eq)]
pub(super) struct Pump {
    pub(super) epoch: u64,
    /// Bytes the peer has to send again.
    pub(super) owed: u64,
}

/// Why a flow shall become plain TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// Our front end wants it.
    Ours,
    /// The same, and the peer has heard it.
    Heard,
    /// The peer did it.
    Theirs,
}

impl FlowRecord {
    pub(super) fn new(now: Time, token: FlowToken, role: Role, ends: Ends) -> Self {
        FlowRecord {
            token,
            role,
            ends,
            life: Lifecycle::new(),
            opened: now,
            id: None,
            hello: None,
            peer: None,
            bar: Bar::Open,
            fin: None,
            peer_fin: None,
            complete: false,
            again: false,
            epochs: Epochs::default(),
            promised: 0,
            change: Changing::default(),
            outage: None,
            query: None,
            leaving: None,
        }
    }

    pub(super) fn state(&self) -> State {
        self.life.state()
    }

    /// The move must be in the table: a caller that breaks this is a bug here, never a peer's
    /// doing, so a release build carries on with the state as it was.
    pub(super) fn go(&mut self, next: State) {
        if let Err(illegal) = self.life.go(next) {
            debug_assert!(false, "flow {:?}: {illegal}", self.token);
        }
    }

    /// Zeros while it has none.
    pub(super) fn name(&self) -> FlowId {
        self.id.unwrap_or(FlowId([0; 16]))
    }

    /// Whether the peer said this, bound to what `fresh` says.
    pub(super) fn said(&self, fresh: Fresh, parsed: &Parsed<'_>) -> bool {
        let from = self.role.other();
        match (self.prepared(), &self.peer) {
            (Some(key), _) => key.verify(from, fresh, parsed),
            (None, Some(peer)) => peer.key.verify(from, fresh, parsed),
            (None, None) => false,
        }
    }

    /// The bytes of a message of ours; `None` while the peer is not known.
    pub(super) fn seal(&self, fresh: Fresh, message: &Message) -> Option<Vec<u8>> {
        match (self.prepared(), &self.peer) {
            (Some(key), _) => Some(key.seal(self.role, fresh, message)),
            (None, peer) => Some(peer.as_ref()?.key.seal(self.role, fresh, message)),
        }
    }

    /// While the transport is away, several messages are to be said and heard.
    fn prepared(&self) -> Option<&Prepared> {
        let key = &self.peer.as_ref()?.key;
        Some(self.outage.as_ref()?.key.get_or_init(|| key.prepare()))
    }

    /// The process at the other end, once it is known.
    pub(super) fn peer_id(&self) -> Option<EndpointId> {
        self.peer.as_ref().map(|peer| peer.process.id)
    }

    /// Where control messages for the peer go.
    pub(super) fn control(&self) -> Option<SocketAddr> {
        let peer = self.peer.as_ref()?;
        Some(at_port(self.ends.remote(), peer.process.control_port))
    }

    /// The old transport can be put back to use: nothing was done to it, and the peer has not been
    /// given reason to do anything to its end.
    pub(super) fn intact(&self) -> bool {
        self.bar == Bar::Shut
            && self.change.drained == DrainState::No
            && self.change.accepted.is_none()
            && self.change.awaiting.is_none()
            && self.change.pump.is_none()
            && self
                .outage
                .as_ref()
                .is_some_and(|outage| outage.errno.is_none() && !outage.exposed)
    }

    /// A new transport is agreed on with the peer, or may be.
    pub(super) fn is_resuming(&self) -> bool {
        self.change.accepted.is_some()
            || self.change.awaiting.is_some()
            || self.change.pump.is_some()
            || self.outage.as_ref().is_some_and(|outage| outage.exposed)
    }

    /// Where the stream ends, if the peer has closed the flow there and the transport has failed: if we hold that much, the
    /// peer owes nothing and takes nothing. An ending process may announce its end too early, so either the kernel has
    /// seen an end of the stream before the error (EPIPE), or the peer has confirmed it.
    pub(super) fn closed_by_peer(&self) -> Option<u64> {
        let outage = self.outage.as_ref()?;
        let sure = outage.errno == Some(EPIPE) || outage.eof.is_some() || outage.confirmed;
        let failed = outage.errno.is_some() && !outage.out_of_count && !self.is_resuming();
        match self.peer_fin {
            Some((end, FinHow::Close)) if sure && failed => Some(end),
            _ => None,
        }
    }

    /// The answer to a QUERY.
    pub(super) fn status(&self) -> FlowStatus {
        match (self.state(), self.fin) {
            (State::Legacy, _) => FlowStatus::Legacy,
            (State::Escalated, Some((seq, FinHow::HalfClose | FinHow::Close))) if self.complete => {
                FlowStatus::Closed(seq)
            }
            (State::Escalated | State::Closed, _) | (_, Some((_, FinHow::Reset))) => {
                FlowStatus::Reset
            }
            (_, Some((seq, FinHow::HalfClose))) => FlowStatus::HalfClosed(seq),
            (_, Some((seq, FinHow::Close))) => FlowStatus::Closed(seq),
            (_, None) => FlowStatus::Open,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_takes_memory_while_it_lasts() {
        let mut change = Changing::default();
        assert_eq!(change.outgoing, None);
        assert!(change.is_at_rest());
        change.outgoing = Some(ConnId(1));
        change.rest();
        assert_eq!(change.outgoing, Some(ConnId(1)));
        change.outgoing = None;
        change.rest();
        assert!(change.is_at_rest());
    }
}
