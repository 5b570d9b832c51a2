//! Two processes whose addresses have both changed find each other at a place that both know: `docs/PROTOCOL.md`, section "Held flows".

use super::Endpoint;
use super::processes::PeerProcess;
use crate::auth::{seal_with_job, verify_with_job};
use crate::ids::{EndpointId, FlowToken, Time};
use crate::wire::{AddrList, Here, Message, Parsed, ProcessPlace, Where};

impl Endpoint {
    /// Serial number of the place where this process is. The first half grows when the process executes another program.
    fn own_place(&self) -> u64 {
        self.own_serial() << 32 | u64::from(self.holds.moves)
    }

    /// Whether the meeting point must still be told that this process is elsewhere now. Peers may look for this process although no flow is
    /// held here: a flow that has ended here may be held there.
    pub(super) fn is_to_be_told(&self) -> bool {
        let asks = self.config.hold.is_some() && !self.config.meet.is_empty();
        let moved = self.holds.moves > 0 && self.holds.told != self.own_place();
        asks && moved && (!self.by_id.is_empty() || self.remembers_flows())
    }

    /// Tells the meeting point where this process is, and asks where that process is.
    pub(super) fn ask_where(&mut self, wanted: EndpointId) {
        if self.config.meet.is_empty() {
            return;
        }
        let message = Message::Where(Where {
            sender: self.id,
            wanted,
            known: self.holds.places.get(&wanted).copied().unwrap_or(0),
            place: ProcessPlace {
                serial: self.own_place(),
                resume_port: self.own.resume_port,
                control_port: self.own.control_port,
                addrs: AddrList::new(self.own.addrs.iter().copied()),
            },
        });
        let data = seal_with_job(self.config.job_key.as_ref(), &message);
        for to in self.config.meet.clone() {
            self.out.datagram(to, None, data.clone());
        }
    }

    /// The meeting point says where a process is.
    pub(super) fn on_here(&mut self, now: Time, parsed: &Parsed<'_>, here: &Here) {
        let peer = here.endpoint;
        let genuine = !self.config.meet.is_empty()
            && here.to == self.id
            && verify_with_job(self.config.job_key.as_ref(), parsed);
        if genuine && peer == self.id {
            self.holds.told = here.place.serial;
            return self.forget_holds();
        }
        let known = self.holds.places.get(&peer).copied().unwrap_or(0);
        let tokens = self.flows.values().filter(|f| f.peer_id() == Some(peer));
        let tokens: Vec<FlowToken> = tokens.map(|flow| flow.token).collect();
        if !genuine || here.place.serial <= known || tokens.is_empty() {
            return self.drop_one();
        }
        self.holds.places.insert(peer, here.place.serial);
        for token in &tokens {
            self.peer_moved(*token, &here.place);
        }
        if let Some(token) = tokens.iter().find(|token| self.is_held(**token)) {
            self.ask_held(now, peer, *token);
        }
    }

    /// The flow's peer is at this place.
    fn peer_moved(&mut self, token: FlowToken, place: &ProcessPlace) {
        let Some(old) = self.flows[&token].peer.as_ref().map(|p| p.process.clone()) else {
            return;
        };
        let process = self.processes.share(PeerProcess {
            id: old.id,
            addrs: place.addrs[..].into(),
            resume_port: place.resume_port,
            control_port: place.control_port,
            features: old.features,
            moved: true,
        });
        if let Some(peer) = &mut self.flow(token).peer {
            peer.process = process;
        }
    }
}
