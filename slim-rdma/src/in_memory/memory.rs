//! Memory of all hosts: blocks, and the regions that are registered in them.

use std::collections::BTreeMap;

use crate::address::RemoteKey;
use crate::verbs::{Access, LocalKey, RegionId};

/// Distance of two blocks in the address space of keys: larger than any block.
const BLOCK_SPACE: u64 = 1 << 32;
/// Keys are used again after this many registrations.
const KEYS: u32 = 8;

#[derive(Debug)]
struct MemoryRegion {
    block: usize,
    access: Access,
    key: u32,
    valid: bool,
}

/// A place in memory, which stays the same whatever is registered there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot {
    block: usize,
    at: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Memories {
    blocks: Vec<Vec<u8>>,
    /// Released blocks, with their hosts.
    free: Vec<(usize, usize)>,
    regions: BTreeMap<RegionId, MemoryRegion>,
    count: u64,
}

impl Memories {
    pub(crate) fn register(&mut self, host: usize, len: usize, access: Access) -> RegionId {
        let fits =
            |(owner, block): &(usize, usize)| *owner == host && self.blocks[*block].len() == len;
        let block = match self.free.iter().rposition(fits) {
            Some(at) => self.free.remove(at).1,
            None => {
                self.blocks.push(vec![0; len]);
                self.blocks.len() - 1
            }
        };
        self.count += 1;
        let region = MemoryRegion {
            block,
            access,
            // Of a few values only, so that old keys become valid again.
            key: self.count as u32 % KEYS,
            valid: true,
        };
        self.regions.insert(RegionId(self.count), region);
        RegionId(self.count)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    fn region(&self, id: RegionId) -> &MemoryRegion {
        self.regions
            .get(&id)
            .expect("a region that is not released")
    }

    pub(crate) fn key(&self, id: RegionId) -> RemoteKey {
        let region = self.region(id);
        RemoteKey {
            addr: region.block as u64 * BLOCK_SPACE,
            key: region.key,
        }
    }

    /// Returns the spots that no adapter may write to any more.
    pub(crate) fn invalidate(&mut self, id: RegionId) -> impl Fn(&Spot) -> bool + use<> {
        let region = self
            .regions
            .get_mut(&id)
            .expect("a region that is not released");
        region.valid = false;
        let block = region.block;
        move |spot| spot.block == block
    }

    pub(crate) fn release(&mut self, host: usize, id: RegionId) {
        let block = self.region(id).block;
        // With a key that is still valid, writes go on into whatever is made of the block.
        if !self.region(id).valid {
            self.regions.remove(&id);
        }
        self.free.push((host, block));
    }

    pub(crate) fn bytes(&self, id: RegionId, at: usize, len: usize) -> &[u8] {
        &self.blocks[self.region(id).block][at..at + len]
    }

    pub(crate) fn write(&mut self, id: RegionId, at: usize, bytes: &[u8]) {
        let block = self.region(id).block;
        self.blocks[block][at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Where a peer may write `len` bytes.
    pub(crate) fn accept(&self, to: RemoteKey, len: usize) -> Option<Spot> {
        self.find(to, len, Access::Remote)
    }

    /// The bytes that a peer may read.
    pub(crate) fn readable(&self, from: RemoteKey, len: usize) -> Option<&[u8]> {
        let spot = self.find(from, len, Access::Readable)?;
        Some(&self.blocks[spot.block][spot.at..spot.at + len])
    }

    /// Where the own adapter may place `len` bytes that were read.
    pub(crate) fn sink(&self, into: LocalKey, len: usize) -> Option<Spot> {
        let LocalKey { addr, key } = into;
        self.find(RemoteKey { addr, key }, len, Access::Sink)
    }

    fn find(&self, to: RemoteKey, len: usize, access: Access) -> Option<Spot> {
        let (block, at) = (to.addr / BLOCK_SPACE, to.addr % BLOCK_SPACE);
        let (block, at) = (usize::try_from(block).ok()?, usize::try_from(at).ok()?);
        let open = |region: &MemoryRegion| {
            let allowed = region.valid && region.access == access;
            allowed && region.key == to.key && region.block == block
        };
        let inside = self.blocks.get(block).is_some_and(|b| at + len <= b.len());
        (inside && self.regions.values().any(open)).then_some(Spot { block, at })
    }

    pub(crate) fn place(&mut self, spot: Spot, bytes: &[u8]) {
        self.blocks[spot.block][spot.at..spot.at + bytes.len()].copy_from_slice(bytes);
    }
}
