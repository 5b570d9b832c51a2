//! Accusations at the witness: `docs/PROTOCOL.md`, section "The witness". Without one, a peer may stand in for it (`tie_break.rs`).
//!
//! All attempts to resume a flow have failed, and the peer process is not known to be gone. Instead of giving the flow up, which the peer
//! would do as well, this process accuses the peer at the witness. While it waits, the attempts go on. Three things end the wait:
//!
//! * The peer is lost, and that is settled: all flows to it are given up. From the moment in which this process knows of the verdict, no flow to
//!   that peer is resumed, and the peer is told by this process, too, until it says that it is fenced: the witness may not reach it.
//! * This process is lost: it fences itself. All its flows are given up, unless the process is to end, and [`Action::Fence`] follows.
//! * The witness does not answer: this process is cut off from both, and fences itself. If a flow to the peer has been resumed meanwhile, the
//!   accusation is dropped instead.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::outage::Outage;
use super::processes::PeerProcess;
use super::record::Bar;
use super::timer::TimerOwner;
use super::{Action, Endpoint};
use crate::auth::{seal_with_job, verify_with_job};
use crate::config::WhenLost;
use crate::event::{EscalateReason, Event};
use crate::ids::{Cause, EndpointId, FlowToken, Time};
use crate::wire::{Accuse, AddrList, Fenced, Lost, Message, Parsed, Ruling, feature};
use crate::witness::SETTLED;

/// ACCUSE is repeated this often.
const AGAIN: Duration = Duration::from_millis(200);
/// LOST is repeated to a lost process after this time at the latest, and so often: for some ten minutes.
const TELL_MAX: Duration = Duration::from_secs(10);
const TELLINGS: u32 = 65;
/// A process that hears nothing from the witness for this long, and cannot reach its peer, fences itself.
const AWAITED: Duration = Duration::from_secs(5);

/// What this process knows of lost processes.
#[derive(Default)]
pub(super) struct Accusations {
    /// The processes that this one has accused.
    cases: BTreeMap<EndpointId, Case>,
    /// This process is lost.
    fenced: bool,
}

pub(super) struct Case {
    judge: Judge,
    state: CaseState,
    control_port: u16,
    addrs: AddrList,
    /// From the judge; 0 before.
    cookie: u64,
}

/// Who decides between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judge {
    Witness,
    /// The two have no common witness, and the peer has the higher name.
    Peer,
    /// The two have no common witness, and this process has the higher name: it goes on.
    Ourselves,
}

#[derive(Clone, Copy)]
enum CaseState {
    /// The judge, or the peer that is told that it is lost, has not answered.
    Asked { since: Time },
    /// The accused is lost. It may still do something for the job.
    Lost { since: Time },
    /// It is fenced, or has had the time for it. `left`: how often it is told again, unless it says that it knows.
    Settled { left: u32 },
}

impl Case {
    pub(super) fn new(now: Time, peer: &PeerProcess, judge: Judge) -> Self {
        Case {
            judge,
            state: CaseState::Asked { since: now },
            control_port: peer.control_port,
            addrs: AddrList::new(peer.addrs.iter().copied()),
            cookie: 0,
        }
    }

    /// Where the accused hears control messages.
    fn control(&self) -> Vec<SocketAddr> {
        let ips = self.addrs.iter();
        ips.map(|ip| SocketAddr::new(*ip, self.control_port))
            .collect()
    }
}

impl Accusations {
    /// Number of accusations that are not settled.
    pub(super) fn len(&self) -> usize {
        let open = |case: &&Case| !matches!(case.state, CaseState::Settled { .. });
        self.cases.values().filter(open).count()
    }
}

impl Endpoint {
    /// Whether this process is lost: the job goes on without it.
    pub fn is_fenced(&self) -> bool {
        self.accusations.fenced
    }

    /// Whether the witness has said that this process is lost.
    pub(super) fn is_lost(&self, process: EndpointId) -> bool {
        let case = self.accusations.cases.get(&process);
        case.is_some_and(|case| !matches!(case.state, CaseState::Asked { .. }))
    }

    /// No attempt to resume this flow has succeeded: accuses its peer. False if there is no witness that both know, so that each decides for
    /// itself.
    pub(super) fn accuse(&mut self, now: Time, token: FlowToken) -> bool {
        let flow = self.flow(token);
        let Some(peer) = flow.peer.as_ref().map(|peer| peer.process.clone()) else {
            return false;
        };
        let Some(judge) = self.judge_of(peer.id, peer.features) else {
            return false;
        };
        // A flow to ourselves; and a flow that has a transport, and only has not replayed yet.
        if peer.id == self.id || self.is_fenced() || self.flow(token).change.pump.is_some() {
            return false;
        }
        let Some(outage) = &mut self.flow(token).outage else {
            return false;
        };
        if !std::mem::replace(&mut outage.accused, true) {
            self.emit(token, Event::Accuse);
        }
        if let Some(case) = self.accusations.cases.get(&peer.id) {
            if let CaseState::Settled { .. } = case.state {
                self.end_flow(now, token, EscalateReason::PeerLost);
            }
            return true;
        }
        self.accusations
            .cases
            .insert(peer.id, Case::new(now, &peer, judge));
        self.press(peer.id);
        self.accusation_after(now, peer.id, AGAIN);
        true
    }

    fn accusation_after(&mut self, now: Time, accused: EndpointId, pause: Duration) {
        self.timers
            .set(TimerOwner::Accusation(accused), now + pause);
    }

    pub(super) fn seal_with_job(&self, message: &Message) -> Vec<u8> {
        seal_with_job(self.config.job_key.as_ref(), message)
    }

    /// Asks the judge, or tells the peer the verdict.
    fn press(&mut self, accused: EndpointId) {
        match self.accusations.cases[&accused].judge {
            Judge::Witness | Judge::Peer => self.send_accuse(accused),
            Judge::Ourselves => self.tell_lost(accused),
        }
    }

    fn send_accuse(&mut self, accused: EndpointId) {
        let case = &self.accusations.cases[&accused];
        let data = self.seal_with_job(&Message::Accuse(Accuse {
            accuser: self.id,
            accused,
            control_port: case.control_port,
            addrs: case.addrs,
            cookie: case.cookie,
        }));
        let to = match case.judge {
            Judge::Witness => self.config.witness.clone(),
            _ => case.control(),
        };
        for to in to {
            self.out.datagram(to, None, data.clone());
        }
    }

    /// Tells a lost process that it is lost.
    pub(super) fn tell_lost(&mut self, lost: EndpointId) {
        let Some(case) = self.accusations.cases.get(&lost) else {
            return;
        };
        let data = self.seal_with_job(&Message::Lost(Lost {
            to: lost,
            lost,
            ruling: Ruling::Settled,
            cookie: 0,
        }));
        for to in case.control() {
            self.out.datagram(to, None, data.clone());
        }
    }

    pub(super) fn on_accusation_timer(&mut self, now: Time, accused: EndpointId) {
        let waits = self.awaits_verdict(accused);
        let Some(case) = self.accusations.cases.get_mut(&accused) else {
            return;
        };
        let pause = match &mut case.state {
            CaseState::Asked { .. } if !waits => {
                self.accusations.cases.remove(&accused);
                return;
            }
            CaseState::Asked { since } if now.since(*since) >= AWAITED => {
                return match case.judge {
                    Judge::Witness => self.fence(now, EscalateReason::NoWitness, None),
                    Judge::Peer | Judge::Ourselves => self.undecided(now, accused),
                };
            }
            CaseState::Asked { .. } => {
                self.press(accused);
                AGAIN
            }
            // The verdict has fallen, even if the witness does not answer any more.
            CaseState::Lost { since } if now.since(*since) >= SETTLED + AWAITED => {
                return self.settle(now, accused, TELLINGS);
            }
            CaseState::Lost { .. } => {
                self.send_accuse(accused);
                self.tell_lost(accused);
                AGAIN
            }
            CaseState::Settled { left: 0 } => return,
            CaseState::Settled { left } => {
                *left -= 1;
                let told = TELLINGS - *left;
                self.tell_lost(accused);
                (AGAIN * (1 << told.min(8))).min(TELL_MAX)
            }
        };
        self.accusation_after(now, accused, pause);
    }

    /// Whether a flow to this process is still without a transport after all its attempts.
    fn awaits_verdict(&self, accused: EndpointId) -> bool {
        !self.accusing(accused).is_empty()
    }

    /// The flows to this process that are without a transport after all their attempts.
    fn accusing(&self, accused: EndpointId) -> Vec<FlowToken> {
        let waiting = self.flows.iter().filter(|(_, flow)| {
            let waits = flow.outage.as_ref().is_some_and(|outage| outage.accused);
            waits && flow.change.pump.is_none() && flow.peer_id() == Some(accused)
        });
        waiting.map(|(token, _)| *token).collect()
    }

    /// The judge, or the other process, has not answered: each of the two decides for itself.
    fn undecided(&mut self, now: Time, accused: EndpointId) {
        self.accusations.cases.remove(&accused);
        for token in self.accusing(accused) {
            self.end_flow(now, token, EscalateReason::Attempts);
        }
    }

    /// Takes note of a lost process that has flows to this one, and that somebody else has accused.
    fn open_case_of(&mut self, now: Time, lost: EndpointId) -> bool {
        let peers = self.flows.values().filter_map(|flow| flow.peer.as_ref());
        let process = peers.map(|peer| &peer.process).find(|peer| peer.id == lost);
        let Some(case) = process.map(|process| Case::new(now, process, Judge::Ourselves)) else {
            return false;
        };
        self.accusations.cases.insert(lost, case);
        true
    }

    pub(super) fn has_job_key(&self, parsed: &Parsed<'_>) -> bool {
        let used = self.features & (feature::WITNESS | feature::TIE_BREAK) != 0;
        used && verify_with_job(self.config.job_key.as_ref(), parsed)
    }

    /// LOST has come, from the witness or from a process that has accused this one.
    pub(super) fn on_lost(
        &mut self,
        now: Time,
        from: SocketAddr,
        parsed: &Parsed<'_>,
        lost: &Lost,
    ) {
        if lost.to != self.id || !self.has_job_key(parsed) {
            return self.drop_one();
        }
        if lost.lost == self.id && lost.ruling != Ruling::Heard {
            return match self.may_judge(now, from) {
                true => self.fence(now, EscalateReason::Fenced, Some(from)),
                false => self.drop_one(),
            };
        }
        let Some(case) = self.accusations.cases.get_mut(&lost.lost) else {
            return;
        };
        if lost.ruling == Ruling::Heard {
            case.cookie = lost.cookie;
            return self.send_accuse(lost.lost);
        }
        if let CaseState::Asked { .. } = case.state {
            case.state = CaseState::Lost { since: now };
            self.hold_flows(now, lost.lost);
            self.tell_lost(lost.lost);
        }
        if lost.ruling == Ruling::Settled {
            self.settle(now, lost.lost, TELLINGS);
        }
    }

    /// FENCED has come from a lost process itself.
    pub(super) fn on_fenced(&mut self, now: Time, parsed: &Parsed<'_>, fenced: &Fenced) {
        let peer = fenced.endpoint;
        let known = || self.accusations.cases.contains_key(&peer);
        if !self.has_job_key(parsed) || !(known() || self.open_case_of(now, peer)) {
            return self.drop_one();
        }
        self.settle(now, peer, 0);
    }

    /// The flows to the lost process are not resumed any more.
    fn hold_flows(&mut self, now: Time, lost: EndpointId) {
        for token in self.flows_to(Some(lost)) {
            self.abandon_connections(now, token);
            self.suspend_for_good(now, token);
            self.update_state(token);
        }
    }

    /// The flows to this process, or all, that have a session.
    fn flows_to(&self, peer: Option<EndpointId>) -> Vec<FlowToken> {
        let carried = self.flows.iter().filter(|(_, flow)| {
            let meant = peer.is_none() || flow.peer_id() == peer;
            meant && flow.state().carries()
        });
        carried.map(|(token, _)| *token).collect()
    }

    /// The accused is lost, and fenced: all flows to it are given up. `left`: how often it is told; 0 if it has said that it knows.
    fn settle(&mut self, now: Time, lost: EndpointId, left: u32) {
        let Some(case) = self.accusations.cases.get_mut(&lost) else {
            return;
        };
        let known = matches!(case.state, CaseState::Settled { .. });
        if !known || left == 0 {
            case.state = CaseState::Settled { left };
            match left {
                0 => self.timers.clear(TimerOwner::Accusation(lost)),
                _ => self.accusation_after(now, lost, AGAIN),
            }
        }
        for token in self.flows_to(Some(lost)) {
            self.end_flow(now, token, EscalateReason::PeerLost);
        }
    }

    /// A flow is live that is not to be: this process, or the peer, is lost.
    pub(super) fn end_if_lost(&mut self, now: Time, token: FlowToken) {
        if self.is_fenced() {
            return self.end_flow(now, token, EscalateReason::Fenced);
        }
        if let Some(peer) = self
            .flow(token)
            .peer_id()
            .filter(|peer| self.is_lost(*peer))
        {
            self.tell_lost(peer);
            self.end_flow(now, token, EscalateReason::PeerLost);
        }
    }

    /// This process is lost: all its flows that have a session end, unless the process ends itself. The sender of LOST is told.
    fn fence(&mut self, now: Time, reason: EscalateReason, told_by: Option<SocketAddr>) {
        let before = std::mem::replace(&mut self.accusations.fenced, true);
        for accused in std::mem::take(&mut self.accusations.cases).into_keys() {
            self.timers.clear(TimerOwner::Accusation(accused));
        }
        for token in self.flows_to(None) {
            match self.config.when_lost.unwrap_or_default() {
                WhenLost::Error => self.end_flow(now, token, reason),
                // The application must not get an error, as if the others were lost, and go on.
                WhenLost::Exit => self.tell_escalation(now, token, reason, self.verdict_of(token)),
            }
        }
        let tell = told_by.map(|to| {
            let message = Message::Fenced(Fenced { endpoint: self.id });
            (to, self.seal_with_job(&message))
        });
        match before {
            true => tell
                .into_iter()
                .for_each(|(to, data)| self.out.datagram(to, None, data)),
            false => self.out.push(Action::Fence { reason, tell }),
        }
    }

    /// Gives a flow up that has a session, as soon as its front end has suspended it.
    pub(super) fn end_flow(&mut self, now: Time, token: FlowToken, reason: EscalateReason) {
        self.suspend_for_good(now, token);
        let flow = self.flow(token);
        if flow.bar == Bar::Shut {
            return self.escalate_with_cause(now, token, reason);
        }
        if let Some(outage) = &mut flow.outage {
            outage.ending = Some(reason);
        }
    }

    /// Suspends a flow that is not resumed any more.
    fn suspend_for_good(&mut self, now: Time, token: FlowToken) {
        let flow = self.flow(token);
        let outage = Outage::new(now, Cause::PeerAsked);
        flow.outage.get_or_insert_with(|| Box::new(outage));
        self.suspend(now, token);
        self.timers.clear_flow(token);
    }
}
