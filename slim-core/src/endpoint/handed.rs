//! Flows that go over to the endpoint of the next program, when a process executes one.
//!
//! That endpoint has the same id, the same ports and the keys of the flows, so the peers notice nothing. Only flows in which nothing is
//! under way are handed over: no negotiation, no outage, no question to the peer.

use std::net::{IpAddr, SocketAddr};

use super::Endpoint;
use super::ends::Ends;
use super::flow::State;
use super::processes::PeerProcess;
use super::record::{Bar, Change, Epochs, FlowRecord, Peer};
use crate::auth::FlowKey;
use crate::ids::{EndpointId, FinHow, FlowId, FlowToken, Role, Time};
use crate::saved::Saved;

/// The endpoint's state of a flow.
pub struct HandedFlow {
    /// Our side of it.
    pub role: Role,
    /// The ends of its first connection, ours first.
    pub ends: (SocketAddr, SocketAddr),
    id: FlowId,
    key: FlowKey,
    random_s: [u8; 32],
    peer: PeerProcess,
    fin: Option<(u64, FinHow)>,
    peer_fin: Option<(u64, FinHow)>,
    epochs: Epochs,
    promised: u64,
}

/// Whether a flow can be handed over.
pub enum HandOver {
    /// Now.
    Ready(Box<HandedFlow>),
    /// Not before its negotiation has ended.
    Negotiates,
    /// Not before its outage, or the question to its peer, is over.
    Busy,
    /// It has no session, or its transport goes through the witness.
    Never,
}

impl Endpoint {
    /// What another endpoint with our id needs to go on with the flow.
    pub fn hand_over(&self, token: FlowToken) -> HandOver {
        let Some(flow) = self.flows.get(&token) else {
            return HandOver::Never;
        };
        if self.is_relayed(token) || self.is_fenced() {
            return HandOver::Never;
        }
        match (flow.state(), &flow.peer, flow.id) {
            (State::Negotiating, ..) => HandOver::Negotiates,
            (State::Live, Some(peer), Some(id)) if is_quiet(flow) => {
                HandOver::Ready(Box::new(handed(flow, peer, id)))
            }
            (State::Live | State::Suspended | State::Resuming, ..) => HandOver::Busy,
            (State::Legacy | State::Escalated | State::Closed, ..) => HandOver::Never,
        }
    }

    /// Goes on with a flow of the program that this process has executed before. Its transport may have failed meanwhile: that is a
    /// [`fault`](Endpoint::fault) like any other.
    pub fn open_handed(&mut self, now: Time, token: FlowToken, handed: HandedFlow) {
        let ends = Ends::new(handed.ends.0, handed.ends.1);
        if !self.add(now, token, handed.role, ends) {
            return;
        }
        let peer = Peer {
            process: self.processes.share(handed.peer),
            key: handed.key,
            random_s: handed.random_s,
        };
        let flow = self.flow(token);
        flow.fin = handed.fin;
        flow.epochs = handed.epochs;
        flow.promised = handed.promised;
        self.agree(now, token, handed.id, peer, handed.peer_fin);
    }

    /// The serial number of our locators is greater than that of the endpoint which had our id before: peers believe no older ones.
    pub fn continue_serial(&mut self, before: u64) {
        self.exchanges.continue_serial(before);
    }
}

fn is_quiet(flow: &FlowRecord) -> bool {
    let rests = flow.outage.is_none() && flow.query.is_none() && flow.leaving.is_none();
    rests && flow.bar == Bar::Open && *flow.change == Change::NONE
}

fn handed(flow: &FlowRecord, peer: &Peer, id: FlowId) -> HandedFlow {
    let process = &peer.process;
    HandedFlow {
        role: flow.role,
        ends: flow.ends.both(),
        id,
        key: peer.key.clone(),
        random_s: peer.random_s,
        peer: PeerProcess {
            id: process.id,
            addrs: process.addrs.clone(),
            resume_port: process.resume_port,
            control_port: process.control_port,
            features: process.features,
            moved: process.moved,
        },
        fin: flow.fin,
        peer_fin: flow.peer_fin,
        epochs: flow.epochs,
        promised: flow.promised,
    }
}

impl Saved for HandedFlow {
    fn save(&self, out: &mut Vec<u8>) {
        (self.role, self.ends).save(out);
        (self.id, self.key.clone()).save(out);
        self.random_s.save(out);
        let peer = &self.peer;
        (peer.id, peer.addrs.to_vec()).save(out);
        (peer.resume_port, peer.control_port).save(out);
        (peer.features, peer.moved).save(out);
        (self.fin, self.peer_fin).save(out);
        let epochs = &self.epochs;
        (epochs.seen, epochs.sent).save(out);
        (epochs.answered, epochs.committed).save(out);
        (epochs.behind, epochs.resumes).save(out);
        self.promised.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (role, ends) = Saved::load(from)?;
        let (id, key) = Saved::load(from)?;
        let random_s = Saved::load(from)?;
        let (peer, addrs) = <(EndpointId, Vec<IpAddr>)>::load(from)?;
        let (resume_port, control_port) = Saved::load(from)?;
        let (features, moved) = Saved::load(from)?;
        let (fin, peer_fin) = Saved::load(from)?;
        let (seen, sent) = Saved::load(from)?;
        let (answered, committed) = Saved::load(from)?;
        let (behind, resumes) = Saved::load(from)?;
        Some(HandedFlow {
            role,
            ends,
            id,
            key,
            random_s,
            peer: PeerProcess {
                id: peer,
                addrs: addrs.into(),
                resume_port,
                control_port,
                features,
                moved,
            },
            fin,
            peer_fin,
            epochs: Epochs {
                seen,
                sent,
                answered,
                committed,
                behind,
                resumes,
            },
            promised: Saved::load(from)?,
        })
    }
}
