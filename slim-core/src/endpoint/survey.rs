//! A survey for layers above that want to ask: the peers and flows of this process, and how flows ended. Plain values.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use super::Endpoint;
use super::flow::State;
use super::paths::Paths;
use super::record::FlowRecord;
use crate::event::{EscalateReason, Event, Evidence, LegacyReason, Trouble};
use crate::ids::{EndpointId, FinHow, FlowId, FlowToken, Role, Time};
use crate::transport::Locator;

/// Flows without a session, and escalations, that are remembered.
const KEPT: usize = 64;

/// Where a flow stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is not known yet whether the peer has SLIM.
    Negotiating,
    /// A transport carries the flow.
    Active,
    /// The flow has no transport.
    Suspended,
    /// Both sides agree on a new transport, or the replay is being written.
    Resuming,
    /// Escalated.
    Ended(EscalateReason, Option<Evidence>),
    /// Plain TCP. Without a reason: this process has demoted it.
    Legacy(Option<LegacyReason>),
}

/// One flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SurveyedFlow {
    /// Its token. For a flow without a session, the token may have been used again.
    pub token: FlowToken,
    /// Its name; zeros while it has none.
    pub flow: FlowId,
    /// Our role.
    pub role: Role,
    /// Our address, as in the event log.
    pub sock: SocketAddr,
    /// The peer's address, as in the event log.
    pub peer: SocketAddr,
    /// The peer process, once it is known.
    pub process: Option<EndpointId>,
    /// Where it stands.
    pub standing: Standing,
    /// Number of the transport in use; 0 is the application's own.
    pub epoch: u64,
    /// Number of resumes.
    pub resumes: u32,
    /// The application has closed it, and its bytes are still being delivered.
    pub closed: bool,
}

/// Where a peer process stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStanding {
    /// At least one flow to it has a transport.
    Reachable,
    /// No flow to it has a transport.
    Suspended,
    /// The witness says that it is lost; or no flow to it is left, and the last one ended with evidence against it.
    Lost,
}

/// One peer process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedPeer {
    /// Its id.
    pub process: EndpointId,
    /// Where it stands.
    pub standing: PeerStanding,
    /// Flows to it that have a session.
    pub flows: u32,
    /// Those of them that have no transport.
    pub suspended: u32,
    /// The last evidence against it, among the flows that are remembered.
    pub evidence: Option<Evidence>,
    /// How it is reached for a resume.
    pub locators: Vec<Locator>,
}

/// An escalation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SurveyedEscalation {
    /// When.
    pub at: Time,
    /// The flow's name; zeros if it has none.
    pub flow: FlowId,
    /// Our address, as in the event log.
    pub sock: SocketAddr,
    /// The peer's address, as in the event log.
    pub peer: SocketAddr,
    /// The peer process, if it is known.
    pub process: Option<EndpointId>,
    /// Why the flow was suspended.
    pub cause: Trouble,
    /// Why it could not be resumed.
    pub reason: EscalateReason,
    /// What is known of the peer.
    pub evidence: Option<Evidence>,
    /// Attempts to resume that were begun.
    pub attempts: u32,
    /// The error that the application gets; 0 for an end of stream.
    pub errno: i32,
    /// Number of escalations before this one that were dropped, because the driver was late.
    pub missed: u64,
}

/// What a survey needs beyond the flows of the endpoint.
#[derive(Default)]
pub(super) struct Surveyed {
    /// The last flows that have lost their session, oldest first.
    released: VecDeque<SurveyedFlow>,
    /// Escalations that the driver has not taken yet, oldest first.
    escalations: VecDeque<SurveyedEscalation>,
}

/// Keeps `new`. If there are too many then, drops the oldest one, and gives it.
fn keep<T>(all: &mut VecDeque<T>, new: T) -> Option<T> {
    all.push_back(new);
    (all.len() > KEPT).then(|| all.pop_front()).flatten()
}

impl Endpoint {
    /// The flows with a session, or that may get one, in the order of their tokens; then the last 64 flows that have none any more, oldest
    /// first.
    pub fn surveyed_flows(&self) -> impl Iterator<Item = SurveyedFlow> {
        let present = self.flows.values();
        let present =
            present.filter_map(|flow| Some(surveyed(flow, standing(flow.state(), flow)?)));
        present.chain(self.surveyed.released.iter().copied())
    }

    /// The peer processes of these flows, in the order of their ids. A process to which no flow with a session leads is listed if it is
    /// lost.
    pub fn surveyed_peers(&self) -> Vec<SurveyedPeer> {
        let mut peers = BTreeMap::new();
        for flow in self.surveyed_flows() {
            let Some(process) = flow.process else {
                continue;
            };
            let peer = peers.entry(process).or_insert_with(|| SurveyedPeer {
                process,
                standing: PeerStanding::Reachable,
                flows: 0,
                suspended: 0,
                evidence: None,
                locators: Vec::new(),
            });
            match flow.standing {
                Standing::Ended(_, Some(evidence)) => peer.evidence = Some(evidence),
                Standing::Ended(..) | Standing::Legacy(_) => {}
                _ => {
                    let away = self.lacks_transport(flow.token);
                    peer.flows += 1;
                    peer.suspended += u32::from(away);
                    if peer.locators.is_empty() {
                        peer.locators = self.locators_of(flow.token);
                    }
                }
            }
        }
        let mut peers: Vec<_> = peers.into_values().collect();
        for peer in &mut peers {
            let gone = peer.flows == 0 && peer.evidence.is_some();
            if gone || self.is_lost(peer.process) {
                peer.standing = PeerStanding::Lost;
            } else if peer.suspended == peer.flows {
                peer.standing = PeerStanding::Suspended;
            }
        }
        peers.retain(|peer| peer.flows > 0 || peer.standing == PeerStanding::Lost);
        peers
    }

    /// The next escalation since the last call; if the driver is late, the oldest are dropped. An escalation can be taken before its
    /// action `Escalate` is.
    pub fn poll_escalation(&mut self) -> Option<SurveyedEscalation> {
        self.surveyed.escalations.pop_front()
    }

    /// Notes an event that ends the session of a flow.
    pub(super) fn note_event(&mut self, token: FlowToken, event: &Event) {
        let standing = match event {
            Event::Legacy { reason } => Standing::Legacy(Some(*reason)),
            Event::Demoted => Standing::Legacy(None),
            Event::Escalate {
                reason, evidence, ..
            } => Standing::Ended(*reason, *evidence),
            _ => return,
        };
        if let Some(flow) = self.flows.get(&token) {
            keep(&mut self.surveyed.released, surveyed(flow, standing));
        }
    }

    pub(super) fn note_escalation(
        &mut self,
        at: Time,
        token: FlowToken,
        (cause, reason, evidence): (Trouble, EscalateReason, Option<Evidence>),
        attempts: u32,
        errno: i32,
    ) {
        let flow = &self.flows[&token];
        let (sock, peer) = flow.ends.both();
        let escalation = SurveyedEscalation {
            at,
            flow: flow.name(),
            sock,
            peer,
            process: flow.peer_id(),
            cause,
            reason,
            evidence,
            attempts,
            errno,
            missed: 0,
        };
        let all = &mut self.surveyed.escalations;
        let dropped = keep(all, escalation);
        if let (Some(dropped), Some(oldest)) = (dropped, all.front_mut()) {
            oldest.missed += dropped.missed + 1;
        }
    }

    fn locators_of(&self, token: FlowToken) -> Vec<Locator> {
        let flow = &self.flows[&token];
        let at = flow.ends.remote().ip();
        let others = flow.peer_id().map(|id| self.processes.locators(id, at));
        Paths::of(flow, others.unwrap_or_default(), &self.id, &self.own).locators()
    }
}

fn surveyed(flow: &FlowRecord, standing: Standing) -> SurveyedFlow {
    let (sock, peer) = flow.ends.both();
    SurveyedFlow {
        token: flow.token,
        flow: flow.name(),
        role: flow.role,
        sock,
        peer,
        process: flow.peer_id(),
        standing,
        epoch: flow.epochs.committed,
        resumes: flow.epochs.resumes,
        closed: flow.fin.is_some_and(|(_, how)| how == FinHow::Close),
    }
}

/// Where a flow stands that the endpoint has; `None` if it has no session, so that it is among the released ones.
fn standing(state: State, flow: &FlowRecord) -> Option<Standing> {
    match state {
        State::Negotiating if flow.outage.is_some() => Some(Standing::Suspended),
        State::Negotiating => Some(Standing::Negotiating),
        State::Live => Some(Standing::Active),
        State::Suspended => Some(Standing::Suspended),
        State::Resuming => Some(Standing::Resuming),
        State::Legacy | State::Escalated | State::Closed => None,
    }
}
