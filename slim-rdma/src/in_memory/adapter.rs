//! The adapter of one host.

use super::mail::MemoryDatagrams;
use super::pairs::{Cargo, MemoryRead, Packet, Posted};
use super::ports::{PARTITION, gid};
use super::{Fabric, FabricState};
use crate::address::{PairAddress, PathMtu, QpNumber, RemoteKey};
use crate::sizes::PairSizes;
use crate::verbs::{
    Access, AdapterEvent, Completion, CreatedPair, LocalKey, Payload, ReadWork, RegionId, Verbs,
    VerbsError, WorkError, WriteWork,
};

/// A full queue.
const NO_MEMORY: VerbsError = VerbsError {
    call: "adapter in memory",
    errno: 12,
};
/// A queue pair in the wrong state.
const INVALID: VerbsError = VerbsError {
    call: "adapter in memory",
    errno: 22,
};

/// An adapter of a [`Fabric`].
#[derive(Clone, Debug)]
pub struct MemoryAdapter {
    fabric: Fabric,
    host: usize,
}

impl MemoryAdapter {
    pub(super) fn new(fabric: Fabric, host: usize) -> Self {
        MemoryAdapter { fabric, host }
    }

    /// Opens a queue for datagrams. Its number is never given again.
    pub fn datagrams(&self) -> MemoryDatagrams {
        MemoryDatagrams::open(self.fabric.clone(), self.host)
    }
}

impl FabricState {
    /// Takes a queue pair out of service. What it has sent stays on its way.
    pub(super) fn fail(&mut self, pair: QpNumber, first: WorkError) {
        let Some(failing) = self.packets.working(pair) else {
            return;
        };
        // A read that fails may have placed some of its bytes.
        let reads = failing
            .sends
            .iter_mut()
            .filter_map(|posted| posted.read.take());
        let begun: Vec<_> = reads
            .filter_map(|read| Some((read.into, read.bytes?)))
            .collect();
        let packets = failing.fail(first);
        for (into, bytes) in begun {
            if let Some(spot) = self.memories.sink(into, bytes.len()) {
                self.memories.place(spot, &bytes[..bytes.len() / 2]);
            }
        }
        for mut packet in packets {
            // The memory may be used for something else before it arrives.
            if let Cargo::Read { region, at, len } = packet.cargo {
                packet.cargo = Cargo::Copied(self.memories.bytes(region, at, len).to_vec());
            }
            self.packets.late.push_back(packet);
        }
    }
}

impl Verbs for MemoryAdapter {
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        Ok(self
            .fabric
            .state()
            .memories
            .register(self.host, len, access))
    }

    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.fabric.state().memories.key(region)
    }

    fn local_key(&self, region: RegionId) -> LocalKey {
        let RemoteKey { addr, key } = self.fabric.state().memories.key(region);
        LocalKey { addr, key }
    }

    fn invalidate(&mut self, region: RegionId) {
        let state = &mut *self.fabric.state();
        if state.keeps_keys {
            return;
        }
        let inside = state.memories.invalidate(region);
        let before = state.packets.accepted.len();
        state
            .packets
            .accepted
            .retain(|accepted| !accepted.spot.as_ref().is_some_and(&inside));
        state.tallies.fenced += (before - state.packets.accepted.len()) as u64;
    }

    fn release(&mut self, region: RegionId) {
        self.fabric.state().memories.release(self.host, region);
    }

    fn read(&self, region: RegionId, at: usize, into: &mut [u8]) {
        let state = self.fabric.state();
        into.copy_from_slice(state.memories.bytes(region, at, into.len()));
    }

    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]) {
        self.fabric.state().memories.write(region, at, bytes);
    }

    fn create(&mut self, sizes: &PairSizes) -> Result<CreatedPair, VerbsError> {
        let state = &mut *self.fabric.state();
        if state.packets.pairs.len() >= state.most_pairs {
            return Err(NO_MEMORY);
        }
        let inline = sizes.inline.min(state.most_inline);
        let made = state
            .packets
            .create(self.host, sizes.depth, sizes.shape, inline);
        let (number, psn) = made.ok_or(NO_MEMORY)?;
        let address = PairAddress {
            gid: gid(self.host),
            lid: 0,
            partition: PARTITION,
            mtu: PathMtu::Mtu4096,
            number,
            psn,
            shape: sizes.shape,
            ring: RemoteKey::default(),
        };
        Ok(CreatedPair { address, inline })
    }

    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError> {
        let mut state = self.fabric.state();
        let pair = state.packets.working(pair).ok_or(INVALID)?;
        pair.peer = Some(peer.number);
        pair.psn[1] = peer.psn;
        state.ring_for_work();
        Ok(())
    }

    fn fail(&mut self, pair: QpNumber) {
        let mut state = self.fabric.state();
        state.fail(pair, WorkError::Flushed);
        state.ring_for_work();
    }

    fn destroy(&mut self, pair: QpNumber) {
        let mut state = self.fabric.state();
        state.fail(pair, WorkError::Flushed);
        state.packets.pairs.remove(&pair);
        state.ring_for_work();
    }

    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError> {
        let mut state = self.fabric.state();
        let pair = state.packets.working(pair).ok_or(INVALID)?;
        if !pair.has_receive_place() {
            return Err(NO_MEMORY);
        }
        pair.receives.push_back(id);
        state.ring_for_work();
        Ok(())
    }

    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError> {
        let mut state = self.fabric.state();
        let pair = state.packets.working(pair).ok_or(INVALID)?;
        let dest = pair.peer.ok_or(INVALID)?;
        if !pair.has_place() {
            return Err(NO_MEMORY);
        }
        if matches!(work.payload, Payload::Inline(bytes) if bytes.len() > pair.inline) {
            return Err(INVALID);
        }
        let packet = Packet {
            dest,
            psn: pair.psn[0],
            cargo: match work.payload {
                Payload::Inline(bytes) => Cargo::Copied(bytes.to_vec()),
                Payload::Staged { region, at, len } => Cargo::Read { region, at, len },
            },
            to: work.to,
            immediate: work.immediate,
        };
        pair.psn[0] = (pair.psn[0] + 1) % (1 << 24);
        pair.sends.push_back(Posted {
            id: work.id,
            signaled: work.signaled,
            packet: Some(packet),
            refused: false,
            read: None,
        });
        match work.payload {
            Payload::Inline(_) => state.tallies.inline += 1,
            Payload::Staged { .. } => state.tallies.staged += 1,
        }
        state.ring_for_work();
        Ok(())
    }

    fn post_read(&mut self, pair: QpNumber, work: &ReadWork) -> Result<(), VerbsError> {
        let mut state = self.fabric.state();
        let pair = state.packets.working(pair).ok_or(INVALID)?;
        let dest = pair.peer.ok_or(INVALID)?;
        if !pair.has_place() {
            return Err(NO_MEMORY);
        }
        let packet = Packet {
            dest,
            psn: pair.psn[0],
            cargo: Cargo::Asked {
                len: work.len as usize,
            },
            to: work.from,
            immediate: None,
        };
        pair.psn[0] = (pair.psn[0] + 1) % (1 << 24);
        let (into, bytes) = (work.into, None);
        pair.sends.push_back(Posted {
            id: work.id,
            signaled: true,
            packet: Some(packet),
            refused: false,
            read: Some(MemoryRead { into, bytes }),
        });
        state.ring_for_work();
        Ok(())
    }

    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        let mut state = self.fabric.state();
        state.packets.pairs.get_mut(&pair)?.seen.pop_front()
    }

    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError> {
        let mut state = self.fabric.state();
        state.packets.pairs.get_mut(&pair).ok_or(INVALID)?.armed = true;
        Ok(())
    }

    fn reported(&mut self) -> Option<QpNumber> {
        let reports = &mut self.fabric.state().reports;
        let at = reports.iter().position(|(host, _)| *host == self.host)?;
        reports.remove(at).map(|(_, number)| number)
    }

    fn event(&mut self) -> Option<AdapterEvent> {
        let events = &mut self.fabric.state().events;
        let at = events.iter().position(|(host, _)| *host == self.host)?;
        events.remove(at).map(|(_, event)| event)
    }
}
