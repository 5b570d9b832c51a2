//! The handshake of two components on a new flow.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slim::{Flow, StreamState};

use super::BtlModule;
use super::link::{BtlLink, LinkEnd, LinkFate, LinkStage};
use super::progress::ProgressState;
use crate::endpoint::BtlEndpoint;
use crate::hdr::{BtlHello, FrameHeader, FrameKind};

/// How long a flow may negotiate after the peer has accepted it. Then it is used nevertheless: a firewall may keep the peer's answer away.
const NEGOTIATION: Duration = Duration::from_secs(1);

impl BtlModule {
    /// Handles a frame of the handshake. Returns whether the link goes on.
    pub(super) fn shake_hands(
        &self,
        link: &mut BtlLink,
        flow: &Arc<Flow>,
        header: FrameHeader,
        at: Range<usize>,
    ) -> bool {
        match (link.stage, header.kind) {
            (LinkStage::Unnamed, FrameKind::Hello) => {
                let payload = link.reader.payload(at);
                let Some(hello) = BtlHello::parse(payload, self.blob.token) else {
                    self.log(1, || format!("a stranger at {}", flow.remote_addr()));
                    return false;
                };
                let endpoint = self.peer(hello.name);
                if !endpoint.accept(self.me, flow.id(), hello.is_rail, Instant::now()) {
                    // The first bytes of a connection: the kernel takes them. They are delivered although the flow is closed.
                    let _ = flow.try_send(&FrameHeader::control(FrameKind::Reject).encode());
                    return false;
                }
                let name = hello.name;
                self.log(2, || format!("accepts {name} at {}", flow.remote_addr()));
                link.endpoint = Some(endpoint);
                link.is_rail = hello.is_rail;
                link.stage = LinkStage::Answered;
                link.owes_answer = true;
                link.answer();
                true
            }
            (LinkStage::Answered, FrameKind::Confirm) => {
                let (endpoint, is_rail) = (&link.endpoint, link.is_rail);
                let is_used = endpoint
                    .as_ref()
                    .is_some_and(|e| e.confirmed(flow, is_rail));
                if is_used {
                    self.goes_up(link);
                } else {
                    // This process has left meanwhile: the peer must not take the end of this flow for a failure.
                    let _ = flow.try_send(&FrameHeader::control(FrameKind::Goodbye).encode());
                }
                is_used
            }
            (LinkStage::Offered, FrameKind::Accept) => {
                link.stage = LinkStage::Accepted;
                link.since = Instant::now();
                self.confirm(link, flow)
            }
            (LinkStage::Offered, FrameKind::Reject) => {
                link.endpoint.iter().for_each(|e| e.rejected(flow.id()));
                false
            }
            _ => {
                let why = LinkEnd::Failed("it sent a frame out of turn");
                self.ended(link, why) != LinkFate::Over
            }
        }
    }

    /// Confirms a flow that the peer has accepted, but not while its session negotiates: if the connection breaks then, the flow may fail,
    /// and with it what was sent. Returns whether the link goes on.
    pub(super) fn confirm(&self, link: &mut BtlLink, flow: &Arc<Flow>) -> bool {
        match flow.state() {
            StreamState::Negotiating if link.since.elapsed() < NEGOTIATION => return true,
            // Progress gives it up, like a connection that breaks before it is accepted.
            StreamState::Suspended | StreamState::Failed(_) => return true,
            _ => {}
        }
        let is_used = link.endpoint.as_ref().is_some_and(|e| e.accepted(flow));
        if is_used {
            self.goes_up(link);
        } else {
            // The link has ended meanwhile: the peer must not take the end of this flow for a failure.
            let _ = flow.try_send(&FrameHeader::control(FrameKind::Goodbye).encode());
        }
        is_used
    }

    /// The flow is used from now on: sends what waits, and adds rails after the first one.
    fn goes_up(&self, link: &mut BtlLink) {
        link.stage = LinkStage::Up;
        self.flush(link);
        if let Some(endpoint) = link.endpoint.as_ref().filter(|e| !e.is_flushed()) {
            self.deferred_thread.watch(&self.deferred, endpoint);
        }
        if let Some(endpoint) = link.endpoint.as_ref().filter(|_| !link.is_rail) {
            self.add_rails(endpoint);
        }
    }

    pub(super) fn connect_or_lose(&self, endpoint: &Arc<BtlEndpoint>, why: &str) {
        if self.connect(endpoint) == Some(false) {
            self.lose(endpoint, why);
        }
    }

    /// Closes connections without a hello, and connects to peers that have promised to connect and do not.
    pub(super) fn tend_handshakes(&self, state: &mut ProgressState, now: Instant) {
        let limit = self.hello_limit;
        state.links.retain(|_, link| {
            let waited = now.saturating_duration_since(link.since);
            link.stage != LinkStage::Unnamed || waited < limit
        });
        let peers: Vec<_> = self.peers().values().cloned().collect();
        for peer in peers {
            if peer.is_let_down(now) {
                self.connect_or_lose(&peer, "it does not connect as it has promised");
            }
        }
    }
}
