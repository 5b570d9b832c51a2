//! Two processes without a common witness that cannot resume their flows: `docs/PROTOCOL.md`, section "Without a witness".
//!
//! Messages may still pass between them, though no connection can be kept. Then the one with the higher name stands in for the witness: it
//! goes on, and the other one is lost. If no message passes, each of them decides for itself after a grace period.

use std::net::SocketAddr;
use std::time::Duration;

use super::Endpoint;
use super::accusations::Judge;
use super::flow::State;
use super::record::FlowRecord;
use crate::ids::{Cause, EndpointId, FlowToken, Time};
use crate::wire::{Accuse, Lost, Message, Parsed, Ruling, feature};
use crate::witness::Cookies;

/// A flow without a fault has this long to get another transport, before LOST about it is believed. The judge repeats LOST for longer.
const TESTED: Duration = Duration::from_secs(1);

impl Endpoint {
    /// Who decides between this process and its peer, which has announced these features; nobody if each decides for itself.
    pub(super) fn judge_of(&self, peer: EndpointId, features: u64) -> Option<Judge> {
        let common = self.features & features;
        if common & feature::WITNESS != 0 {
            return Some(Judge::Witness);
        }
        let alike = common & feature::TIE_BREAK != 0;
        alike.then_some(match self.id > peer {
            true => Judge::Ourselves,
            false => Judge::Peer,
        })
    }

    /// Who decides between this process and the flow's peer.
    pub(super) fn judge_of_flow(&self, token: FlowToken) -> Option<Judge> {
        let peer = &self.flows[&token].peer.as_ref()?.process;
        self.judge_of(peer.id, peer.features)
    }

    /// ACCUSE has come from a process that takes this one for its judge.
    pub(super) fn on_accuse(
        &mut self,
        now: Time,
        from: SocketAddr,
        parsed: &Parsed<'_>,
        accuse: &Accuse,
    ) {
        let accuser = accuse.accuser;
        let meant = accuse.accused == self.id && self.id > accuser;
        let judged = meant && self.judge_of_peer(accuser) == Some(Judge::Ourselves);
        if !judged || self.is_fenced() || !self.has_job_key(parsed) {
            return self.drop_one();
        }
        let heard = Cookies::new(self.secret).ask_back(now, accuse);
        let lost = heard.unwrap_or(Lost {
            to: accuser,
            lost: accuser,
            ruling: Ruling::Settled,
            cookie: 0,
        });
        let data = self.seal_with_job(&Message::Lost(lost));
        self.out.datagram(from, None, data);
    }

    /// As [`judge_of`](Self::judge_of), for a process that has a flow.
    fn judge_of_peer(&self, peer: EndpointId) -> Option<Judge> {
        let mut flows = self.flows.iter();
        let token = flows.find(|(_, flow)| flow.peer_id() == Some(peer))?.0;
        self.judge_of_flow(*token)
    }

    /// Whether this address is believed that this process is lost: any, if there is a witness; otherwise the peer that stands in for it, about a
    /// flow that has no transport. If the kernel reports no fault of the flow, the flow is tested: LOST may be an old one, of before a resume.
    pub(super) fn may_judge(&mut self, now: Time, from: SocketAddr) -> bool {
        if self.features & feature::WITNESS != 0 {
            return true;
        }
        let judged: Vec<FlowToken> = self
            .flows
            .values()
            .filter(|flow| self.stands_in(flow, from))
            .map(|flow| flow.token)
            .collect();
        let is_broken = |token: &FlowToken| {
            let outage = self.flows[token].outage.as_ref();
            outage.is_some_and(|o| !o.patient() || now.since(o.suspected) >= TESTED)
        };
        let believed = judged.iter().any(is_broken);
        for token in judged {
            let flow = &self.flows[&token];
            if !believed && flow.outage.is_none() && flow.state() == State::Live {
                self.fault(now, token, Cause::Stall);
            }
        }
        believed
    }

    /// Whether this is the control port of the flow's peer, and that one stands in for the witness.
    fn stands_in(&self, flow: &FlowRecord, from: SocketAddr) -> bool {
        let Some(peer) = flow.peer.as_ref().map(|peer| &peer.process) else {
            return false;
        };
        let at = from.ip() == flow.ends.remote().ip() || peer.addrs.contains(&from.ip());
        let judges = self.judge_of(peer.id, peer.features) == Some(Judge::Peer);
        judges && at && from.port() == peer.control_port
    }
}
