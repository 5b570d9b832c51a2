//! The state that the endpoint keeps of one flow.

use std::net::{IpAddr, SocketAddr};
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
use crate::transport::{Locator, TransportKind};
use crate::wire::{End, FlowStatus, Hello, Message, Parsed};

/// One flow. Transient state is boxed, so that an idle flow stays small.
pub(super) struct FlowRecord {
    pub(super) token: FlowToken,
    pub(super) role: Role,
    pub(super) ends: Ends,
    pub(super) life: Lifecycle,
    pub(super) opened: Time,
    /// Drawn by the connector. An acceptor learns it when the flow is agreed on.
    pub(super) id: Option<FlowId>,
    /// Connector: our HELLO, kept because its answer may come late.
    pub(super) hello: Option<Box<Asking>>,
    /// The other side, once the flow key is known.
    pub(super) peer: Option<Peer>,
    pub(super) bar: Bar,
    /// Our application has finished.
    pub(super) fin: Option<(u64, FinHow)>,
    /// The peer's application has finished.
    pub(super) peer_fin: Option<(u64, FinHow)>,
    /// Given up because the peer had closed the flow, after everything that it sent was received.
    pub(super) complete: bool,
    /// Connector: an earlier connection may have had the same addresses and ports.
    pub(super) again: bool,
    pub(super) epochs: Epochs,
    /// Number of bytes that the peer had sent when the present transport was installed: its stream cannot end before.
    pub(super) promised: u64,
    pub(super) change: Changing,
    pub(super) outage: Option<Box<Outage>>,
    pub(super) query: Option<Box<Asked>>,
    /// The flow becomes plain TCP as soon as a transport is in use.
    pub(super) leaving: Option<Leaving>,
}

// A process may have ten thousand flows, most of them idle.
const _: () = assert!(size_of::<FlowRecord>() <= 240);

/// A HELLO without an answer that decides the negotiation.
pub(super) struct Asking {
    pub(super) hello: Hello,
    pub(super) sent: u32,
    /// When HELLO was sent last.
    pub(super) at: Time,
    /// HELLO_WAIT came: the peer has SLIM.
    pub(super) waiting: bool,
}

/// The other side of a flow.
#[derive(Clone)]
pub(super) struct Peer {
    pub(super) process: Arc<PeerProcess>,
    pub(super) key: FlowKey,
    /// From HELLO_ACK, which the acceptor repeats for a repeated HELLO.
    pub(super) random_s: [u8; 32],
}

/// The move of a flow to another transport.
#[derive(PartialEq, Eq)]
pub(super) struct Change {
    pub(super) drained: DrainState,
    /// Connection that we make.
    pub(super) outgoing: Option<ConnId>,
    /// The locator that we connect to, or wait for a slot to connect to (`pace.rs`).
    pub(super) lane: Option<Locator>,
    /// Connection with an authentic RESUME that has not been answered yet.
    pub(super) accepted: Option<ConnId>,
    /// Connection on which we sent RESUME_OK. It may hold CONFIRM and stream bytes.
    pub(super) awaiting: Option<ConnId>,
    /// `Flush` under way.
    pub(super) flushing: Option<ConnId>,
    pub(super) pump: Option<Pump>,
}

impl Change {
    pub(super) const NONE: Self = Change {
        drained: DrainState::No,
        outgoing: None,
        lane: None,
        accepted: None,
        awaiting: None,
        flushing: None,
        pump: None,
    };

    /// Whether a connection for the new transport is under way, in either direction, or is installed already.
    pub(super) fn has_connection(&self) -> bool {
        self.outgoing.is_some() || self.accepted.is_some() || self.pump.is_some()
    }
}

/// A [`Change`] that is allocated at the first write, and freed when it is over.
#[derive(Default)]
pub(super) struct Changing(Option<Box<Change>>);

impl Changing {
    /// Frees the memory if no change is under way.
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

/// Whether data calls of the application are barred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bar {
    Open,
    /// `Suspend` is under way.
    Asked,
    Shut,
}

/// Whether the old transport has been read dry and closed.
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
    /// Highest epoch that either side has named.
    pub(super) seen: u64,
    /// Highest epoch that we sent a RESUME for.
    pub(super) sent: u64,
    /// Highest epoch that we accepted a RESUME for.
    pub(super) answered: u64,
    /// Epoch of the newest transport that we have used.
    pub(super) committed: u64,
    /// Consecutive refusals as too old; the next epoch jumps ahead.
    pub(super) behind: u32,
    /// Number of resumes.
    pub(super) resumes: u32,
}

impl Epochs {
    /// The epoch for our next RESUME. The step doubles with each refusal as too old, because a refusal
    /// does not tell how far we are behind.
    pub(super) fn next(&mut self) -> u64 {
        let step = 1 << self.behind.min(16);
        self.seen = self.seen.saturating_add(step);
        self.sent = self.seen;
        self.seen
    }
}

/// A QUERY without an answer.
pub(super) struct Asked {
    pub(super) purpose: QueryPurpose,
    pub(super) nonce: Nonce,
    /// 0 while this flow waits for the answer to a QUERY about another flow of the same process.
    pub(super) sent: u32,
    pub(super) to: SocketAddr,
}

/// The purpose of a QUERY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueryPurpose {
    /// Was the end of stream genuine?
    Eof,
    /// Does the peer process still exist?
    Death,
    /// The connection has failed, and none has been tried yet: the first refusal of such a question counts for [`Death`](Self::Death).
    HeadStart,
    /// Does the peer know that the flow is plain TCP?
    Plain,
}

/// A replay that is being written to a new transport.
#[derive(PartialEq, Eq)]
pub(super) struct Pump {
    pub(super) epoch: u64,
    /// Number of bytes that the peer replays.
    pub(super) replayed_by_peer: u64,
}

/// Why a flow becomes plain TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// Our front end demotes it.
    Ours,
    /// Our front end demotes it, and the peer knows already.
    MailboxState,
    /// The peer has demoted it.
    Theirs,
}

impl FlowRecord {
    /// The kind of the connection that the attempts have made last.
    pub(super) fn connects_by(&self) -> Option<TransportKind> {
        self.connects_to().map(|to| to.kind())
    }

    /// Where that connection leads.
    pub(super) fn connects_to(&self) -> Option<Locator> {
        let outage = self.outage.as_ref();
        let attempts = outage.and_then(|outage| outage.attempts.as_ref());
        attempts.map(|attempts| attempts.path.to)
    }

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

    /// The transition must be in the table. A caller that breaks this is a bug of the endpoint, and no peer
    /// can cause it, so a release build keeps the old state and carries on.
    pub(super) fn go(&mut self, next: State) {
        if let Err(illegal) = self.life.go(next) {
            debug_assert!(false, "flow {:?}: {illegal}", self.token);
        }
    }

    /// The flow id, or zeros while the flow has none.
    pub(super) fn name(&self) -> FlowId {
        self.id.unwrap_or(FlowId([0; 16]))
    }

    /// Whether the peer wrote this message; its code covers the nonces in `fresh`.
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

    /// The prepared key. It is kept during an outage only, when several messages are sealed and verified.
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

    /// A port at one of the peer's addresses. The address that the flow leads to may have a scope.
    pub(super) fn peer_at(&self, ip: IpAddr, port: u16) -> SocketAddr {
        match self.ends.remote() {
            first if first.ip() == ip => at_port(first, port),
            _ => SocketAddr::new(ip, port),
        }
    }

    /// Whether the old transport can be reinstated: it was not drained, and no message of ours
    /// can have made the peer drain its end.
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

    /// Whether a resume with the peer is under way, or may be.
    pub(super) fn is_resuming(&self) -> bool {
        self.change.accepted.is_some()
            || self.change.awaiting.is_some()
            || self.change.pump.is_some()
            || self.outage.as_ref().is_some_and(|outage| outage.exposed)
    }

    /// The length of the peer's stream, if the peer has closed the flow and the transport has failed. If we hold that many
    /// bytes, nothing is left to resume. A process that ends may announce its end too early; so either our kernel must have
    /// seen the end of the stream before the error (EPIPE), or the peer must have confirmed the end.
    pub(super) fn closed_by_peer(&self) -> Option<u64> {
        let outage = self.outage.as_ref()?;
        let sure = outage.errno == Some(EPIPE) || outage.eof.is_some() || outage.confirmed;
        let failed = outage.errno.is_some() && !outage.out_of_count && !self.is_resuming();
        match self.peer_fin {
            Some((end, FinHow::Close)) if sure && failed => Some(end),
            _ => None,
        }
    }

    /// How our application has finished, for messages of a resume.
    pub(super) fn end(&self) -> Option<End> {
        self.fin.map(|(seq, how)| End {
            seq,
            closed: how == FinHow::Close,
        })
    }

    /// The application has finished. After a flow has become plain TCP, its bytes are not counted.
    pub(super) fn ended_at(&mut self, final_seq: u64, how: FinHow) {
        if self.state() != State::Legacy {
            self.fin = Some((final_seq, how));
        }
    }

    /// The answer to a HELLO that comes after the flow has become plain TCP. If the application has closed an accepted connection before
    /// that, HELLO was only late, and its sender learns where the stream ends.
    pub(super) fn final_unasked(&self) -> FlowStatus {
        match self.fin {
            Some((end, FinHow::Close)) if self.role == Role::Acceptor && self.peer.is_none() => {
                FlowStatus::Closed(end)
            }
            _ => FlowStatus::Legacy,
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
    fn a_change_is_allocated_only_while_it_is_under_way() {
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
