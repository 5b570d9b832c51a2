//! Queue pairs, and the packets between them.

use std::collections::{BTreeMap, VecDeque};

use super::memory::Spot;
use crate::address::{QpNumber, RemoteKey};
use crate::sizes::RingShape;
use crate::verbs::{Completed, Completion, LocalKey, RegionId, WorkError};

/// The lowest number of a queue pair. Those below are the port's own.
const FIRST_NUMBER: u32 = 2;
/// Numbers of queue pairs are used again after this many, unless they are all in use.
const NUMBERS: u32 = 6;
/// Most queue pairs of a network.
const MOST_PAIRS: u32 = 64;

/// Bytes of a message on its way.
#[derive(Clone, Debug)]
pub(crate) enum Cargo {
    Copied(Vec<u8>),
    /// Read when it arrives.
    Read {
        region: RegionId,
        at: usize,
        len: usize,
    },
    /// None: so many bytes of the peer are wanted.
    Asked {
        len: usize,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) dest: QpNumber,
    pub(crate) psn: u32,
    pub(crate) cargo: Cargo,
    pub(crate) to: RemoteKey,
    pub(crate) immediate: Option<u32>,
}

/// A message that the adapter has accepted, and that is not in memory yet.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) spot: Option<Spot>,
    pub(crate) bytes: Vec<u8>,
    /// The queue pair and what it reports afterwards.
    pub(crate) reports: Option<(u64, Completion)>,
}

/// A read on its way.
#[derive(Debug)]
pub(crate) struct MemoryRead {
    pub(crate) into: LocalKey,
    /// The bytes, once they were read at the peer.
    pub(crate) bytes: Option<Vec<u8>>,
}

/// Posted work that has not completed.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) id: u64,
    pub(crate) signaled: bool,
    /// The packet, until it has arrived.
    pub(crate) packet: Option<Packet>,
    /// The peer has refused it.
    pub(crate) refused: bool,
    /// Of a read.
    pub(crate) read: Option<MemoryRead>,
}

#[derive(Debug)]
pub(crate) struct MemoryPair {
    /// Tells it from a later pair of the same number.
    pub(crate) serial: u64,
    pub(crate) host: usize,
    pub(crate) failed: bool,
    /// The next completion is to be reported.
    pub(crate) armed: bool,
    /// The peer's number, once connected.
    pub(crate) peer: Option<QpNumber>,
    /// Number of the next packet to be sent, and of the next one to be accepted.
    pub(crate) psn: [u32; 2],
    depth: usize,
    slots: usize,
    /// Most bytes that are taken by value.
    pub(crate) inline: usize,
    pub(crate) receives: VecDeque<u64>,
    pub(crate) sends: VecDeque<Posted>,
    /// Completions that can be polled, and those that the adapter has not written yet.
    pub(crate) seen: VecDeque<Completion>,
    pub(crate) hidden: VecDeque<Completion>,
}

impl MemoryPair {
    pub(crate) fn has_place(&self) -> bool {
        self.sends.len() < self.depth
    }

    pub(crate) fn has_receive_place(&self) -> bool {
        self.receives.len() < self.slots
    }

    /// Fails with this error of the first posted write. Returns the packets that are on their way.
    pub(crate) fn fail(&mut self, mut first: WorkError) -> Vec<Packet> {
        self.failed = true;
        let mut packets = Vec::new();
        for posted in self.sends.drain(..) {
            packets.extend(posted.packet);
            let how = Completed::Failed(std::mem::replace(&mut first, WorkError::Flushed));
            self.hidden.push_back(Completion { id: posted.id, how });
        }
        for id in self.receives.drain(..) {
            let how = Completed::Failed(WorkError::Flushed);
            self.hidden.push_back(Completion { id, how });
        }
        packets
    }
}

#[derive(Debug)]
pub(crate) struct Packets {
    pub(crate) pairs: BTreeMap<QpNumber, MemoryPair>,
    /// Accepted messages, in order.
    pub(crate) accepted: VecDeque<Accepted>,
    /// Packets of failed queue pairs, each pair's in order.
    pub(crate) late: VecDeque<Packet>,
    count: u64,
    random: u64,
}

impl Packets {
    pub(crate) fn new(seed: u64) -> Self {
        Packets {
            pairs: BTreeMap::new(),
            accepted: VecDeque::new(),
            late: VecDeque::new(),
            count: 0,
            random: seed,
        }
    }

    /// Makes a queue pair. Returns its number, and that of its first packet.
    pub(crate) fn create(
        &mut self,
        host: usize,
        depth: u32,
        own: RingShape,
        inline: usize,
    ) -> Option<(QpNumber, u32)> {
        let few = (0..NUMBERS).map(|n| (self.count as u32 + n) % NUMBERS);
        let mut numbers = few
            .chain(NUMBERS..MOST_PAIRS)
            .map(|n| QpNumber(FIRST_NUMBER + n));
        let number = numbers.find(|number| !self.pairs.contains_key(number))?;
        self.count += 1;
        // The finalizer of SplitMix64 over a counter.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let psn = (mixed >> 40) as u32;
        let pair = MemoryPair {
            serial: self.count,
            host,
            failed: false,
            armed: false,
            peer: None,
            psn: [psn, 0],
            depth: depth as usize,
            slots: own.slots() as usize,
            inline,
            receives: VecDeque::new(),
            sends: VecDeque::new(),
            seen: VecDeque::new(),
            hidden: VecDeque::new(),
        };
        self.pairs.insert(number, pair);
        Some((number, psn))
    }

    /// A working queue pair.
    pub(crate) fn working(&mut self, number: QpNumber) -> Option<&mut MemoryPair> {
        self.pairs.get_mut(&number).filter(|pair| !pair.failed)
    }

    /// The pair of this serial number.
    pub(crate) fn of_serial(&mut self, serial: u64) -> Option<&mut MemoryPair> {
        self.pairs.values_mut().find(|pair| pair.serial == serial)
    }
}
