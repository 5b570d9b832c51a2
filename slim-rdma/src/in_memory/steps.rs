//! What can happen in a network.

use super::mail::MailDelivery;
use super::pairs::{Accepted, Cargo, MemoryPair, MemoryRead, Packet};
use super::{Fabric, FabricState};
use crate::address::QpNumber;
use crate::verbs::{AdapterEvent, Completed, Completion, WorkError};

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The next message of a queue pair arrives at the peer's adapter.
    Arrive(QpNumber),
    /// The next accepted message is placed in memory, and its completion is on the way.
    Place,
    /// The acknowledgement of the oldest write of a queue pair arrives.
    Acknowledge(QpNumber),
    /// The next completion of a queue pair can be polled.
    Reveal(QpNumber),
    /// The oldest packet of a failed queue pair arrives.
    ArriveLate,
    /// A queue pair's attempts are used up: it fails. Its peer does not notice.
    Fail(QpNumber),
    /// The oldest work of a queue pair, if it is a read, is reported as done without its bytes, and then the queue pair fails.
    FailAsDone(QpNumber),
    /// A part of the next accepted message is placed in memory, and nothing of it is ever reported: its queue pair fails.
    PlacePart(usize),
    /// The next completion of a queue pair never comes.
    LoseCompletion(QpNumber),
    /// The oldest packet of a failed queue pair is lost.
    LoseLate,
    /// The datagram with this index among those on their way arrives.
    Deliver(usize),
    /// It arrives, and will again.
    DeliverTwice(usize),
    /// It is lost.
    LoseDatagram(usize),
}

impl Fabric {
    /// The steps that can be taken now, without faults.
    pub fn steps(&self) -> Vec<Step> {
        let state = self.state();
        let mut steps = Vec::new();
        for (number, pair) in &state.packets.pairs {
            if pair.sends.iter().any(|posted| posted.packet.is_some()) {
                steps.push(Step::Arrive(*number));
            }
            if pair
                .sends
                .front()
                .is_some_and(|posted| posted.packet.is_none())
            {
                steps.push(Step::Acknowledge(*number));
            }
            if !pair.hidden.is_empty() {
                steps.push(Step::Reveal(*number));
            }
        }
        if !state.packets.accepted.is_empty() {
            steps.push(Step::Place);
        }
        if !state.packets.late.is_empty() {
            steps.push(Step::ArriveLate);
        }
        if state.mail.on_way() > 0 {
            steps.push(Step::Deliver(0));
        }
        steps
    }

    /// Takes one step. A step that is not possible does nothing.
    pub fn take(&self, step: Step) {
        let mut state = self.state();
        match step {
            Step::Arrive(number) => state.arrive(number),
            Step::Place => state.place(),
            Step::Acknowledge(number) => state.acknowledge(number),
            Step::Reveal(number) => {
                state.reveal(number);
            }
            Step::ArriveLate => {
                if let Some(packet) = state.packets.late.pop_front() {
                    let before = state.packets.accepted.len();
                    state.deliver(packet);
                    state.tallies.late += (state.packets.accepted.len() - before) as u64;
                }
            }
            Step::Fail(number) => {
                state.fail(number, WorkError::RetryExceeded);
                state.ring_for_work();
            }
            Step::FailAsDone(number) => {
                state.report_without_bytes(number);
                state.fail(number, WorkError::RetryExceeded);
                state.ring_for_work();
            }
            Step::PlacePart(len) => state.place_part(len),
            Step::LoseCompletion(number) => {
                if let Some(pair) = state.packets.pairs.get_mut(&number) {
                    pair.hidden.pop_front();
                }
            }
            Step::LoseLate => drop(state.packets.late.pop_front()),
            Step::Deliver(at) => state.deliver_datagram(at, false),
            Step::DeliverTwice(at) => state.deliver_datagram(at, true),
            Step::LoseDatagram(at) => state.mail.lose(at),
        }
    }

    /// Takes steps without faults until none changes anything. A message that finds no receive, or a queue pair that is not connected
    /// yet, stays on its way.
    pub fn run(&self) {
        loop {
            let before = self.state().moves;
            for step in self.steps() {
                self.take(step);
            }
            if self.state().moves == before {
                return;
            }
        }
    }
}

/// What became of a packet.
enum PacketFate {
    Accepted,
    /// It has asked for these bytes.
    Answered(Vec<u8>),
    /// There is no receive, or the queue pair is not connected yet: it is sent again later.
    NotReady(Packet),
    Refused,
    /// No queue pair took it.
    Strayed,
}

impl FabricState {
    fn arrive(&mut self, number: QpNumber) {
        let Some(pair) = self.packets.working(number) else {
            return;
        };
        let Some(at) = pair.sends.iter().position(|posted| posted.packet.is_some()) else {
            return;
        };
        let packet = pair.sends[at].packet.take().expect("just found");
        let host = pair.host;
        let arrival = match self.cuts.has(host) {
            true => {
                self.moves += 1;
                PacketFate::Strayed
            }
            false => self.deliver(packet),
        };
        let Some(pair) = self.packets.working(number) else {
            return;
        };
        match arrival {
            PacketFate::Accepted => {}
            PacketFate::Answered(bytes) => {
                if let Some(read) = &mut pair.sends[at].read {
                    read.bytes = Some(bytes);
                }
            }
            PacketFate::NotReady(packet) => pair.sends[at].packet = Some(packet),
            PacketFate::Refused => pair.sends[at].refused = true,
            // No acknowledgement comes, and the attempts are used up.
            PacketFate::Strayed => self.fail(number, WorkError::RetryExceeded),
        }
    }

    fn deliver(&mut self, mut packet: Packet) -> PacketFate {
        let bytes = match &mut packet.cargo {
            Cargo::Copied(bytes) => bytes.clone(),
            Cargo::Read { region, at, len } => self.memories.bytes(*region, *at, *len).to_vec(),
            Cargo::Asked { .. } => Vec::new(),
        };
        let asks = matches!(packet.cargo, Cargo::Asked { .. });
        let answer = match packet.cargo {
            Cargo::Asked { len } => self.memories.readable(packet.to, len).map(<[u8]>::to_vec),
            _ => None,
        };
        let spot = self.memories.accept(packet.to, bytes.len());
        let pair = self.packets.working(packet.dest);
        if pair.as_ref().is_some_and(|pair| pair.peer.is_none()) {
            return PacketFate::NotReady(packet);
        }
        let cuts = &self.cuts;
        let takes = |pair: &&mut MemoryPair| pair.psn[1] == packet.psn && !cuts.has(pair.host);
        let Some(pair) = pair.filter(takes) else {
            self.moves += 1;
            self.tallies.strayed += 1;
            return PacketFate::Strayed;
        };
        if packet.immediate.is_some() && pair.receives.is_empty() {
            self.tallies.not_ready += 1;
            return PacketFate::NotReady(packet);
        }
        self.moves += 1;
        let allowed = match asks {
            true => answer.is_some(),
            false => spot.is_some() || bytes.is_empty(),
        };
        if !allowed {
            self.tallies.refused += 1;
            let (host, dest) = (pair.host, packet.dest);
            self.fail(dest, WorkError::Flushed);
            self.events
                .push_back((host, AdapterEvent::PairFailed(dest)));
            self.ring_for_report(host);
            return PacketFate::Refused;
        }
        pair.psn[1] = (pair.psn[1] + 1) % (1 << 24);
        if let Some(bytes) = answer {
            return PacketFate::Answered(bytes);
        }
        let serial = pair.serial;
        let reports = packet.immediate.and_then(|immediate| {
            let id = pair.receives.pop_front()?;
            let len = bytes.len() as u32;
            let how = Completed::Received { len, immediate };
            Some((serial, Completion { id, how }))
        });
        self.packets.accepted.push_back(Accepted {
            spot,
            bytes,
            reports,
        });
        PacketFate::Accepted
    }

    fn deliver_datagram(&mut self, at: usize, again: bool) {
        match self.mail.deliver(at, again, &self.cuts) {
            MailDelivery::None => return,
            MailDelivery::Taken(report) => {
                self.tallies.delivered += 1;
                if let Some((host, number)) = report {
                    self.reports.push_back((host, number));
                    self.ring_for_report(host);
                }
            }
            MailDelivery::Dropped => self.tallies.undelivered += 1,
        }
        self.moves += 1;
    }

    fn reveal(&mut self, number: QpNumber) {
        let Some(pair) = self.packets.pairs.get_mut(&number) else {
            return;
        };
        let mut next = pair.hidden.pop_front();
        if next.is_some() {
            self.moves += 1;
            self.revealed += 1;
            let revealed = self.revealed;
            let is_lost = |each| revealed % each == 0;
            next.take_if(|_| self.loses_each.is_some_and(is_lost));
        }
        if next.is_some() && std::mem::take(&mut pair.armed) {
            let host = pair.host;
            self.reports.push_back((host, number));
            pair.seen.extend(next);
            self.ring_for_report(host);
            return;
        }
        pair.seen.extend(next);
    }

    fn place(&mut self) {
        let Some(accepted) = self.packets.accepted.pop_front() else {
            return;
        };
        if let Some(spot) = accepted.spot {
            self.memories.place(spot, &accepted.bytes);
        }
        self.moves += 1;
        self.tallies.placed += 1;
        if let Some((serial, completion)) = accepted.reports
            && let Some(pair) = self.packets.of_serial(serial)
        {
            // A queue pair that has failed meanwhile has reported the receive as flushed, or does not report it at all.
            if !pair.failed {
                pair.hidden.push_back(completion);
            }
        }
    }

    fn place_part(&mut self, len: usize) {
        let Some(accepted) = self.packets.accepted.pop_front() else {
            return;
        };
        if let Some(spot) = accepted.spot {
            let len = len.min(accepted.bytes.len());
            self.memories.place(spot, &accepted.bytes[..len]);
        }
        let failing = accepted.reports.and_then(|(serial, _)| {
            let pairs = &self.packets.pairs;
            pairs.iter().find(|(_, pair)| pair.serial == serial)
        });
        if let Some(number) = failing.map(|(number, _)| *number) {
            self.fail(number, WorkError::Flushed);
        }
    }

    fn report_without_bytes(&mut self, number: QpNumber) {
        if let Some(pair) = self.packets.working(number)
            && let Some(id) = pair
                .sends
                .front()
                .filter(|posted| posted.read.is_some())
                .map(|posted| posted.id)
        {
            pair.sends.pop_front();
            let how = Completed::Read;
            pair.hidden.push_back(Completion { id, how });
        }
    }

    fn acknowledge(&mut self, number: QpNumber) {
        let Some(pair) = self.packets.working(number) else {
            return;
        };
        match pair.sends.front() {
            Some(posted) if posted.refused => {
                self.moves += 1;
                self.fail(number, WorkError::RemoteAccess);
            }
            Some(posted) if posted.packet.is_none() => {
                let (id, signaled) = (posted.id, posted.signaled);
                let read = pair.sends.pop_front().and_then(|posted| posted.read);
                self.moves += 1;
                let mut how = Completed::Written;
                if let Some(MemoryRead { into, bytes }) = read {
                    let bytes = bytes.unwrap_or_default();
                    let Some(spot) = self.memories.sink(into, bytes.len()) else {
                        return self.fail(number, WorkError::Flushed);
                    };
                    self.memories.place(spot, &bytes);
                    how = Completed::Read;
                }
                if signaled && let Some(pair) = self.packets.working(number) {
                    pair.hidden.push_back(Completion { id, how });
                }
            }
            _ => {}
        }
    }
}
