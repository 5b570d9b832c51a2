//! The registered memory of one queue pair.

use crate::sizes::PairSizes;
use crate::verbs::{Access, RegionId, Verbs, VerbsError};

/// The ring, to which the peer writes, and the staging ring, from which the own adapter reads.
#[derive(Debug)]
pub(crate) struct PairRegions {
    pub(crate) ring: RegionId,
    pub(crate) staging: RegionId,
}

impl PairRegions {
    pub(crate) fn register<V: Verbs>(verbs: &mut V, sizes: PairSizes) -> Result<Self, VerbsError> {
        // EOVERFLOW
        let too_long = |_| VerbsError::new("size of a ring", 75);
        let len = |bytes: u64| usize::try_from(bytes).map_err(too_long);
        let ring = verbs.register(len(sizes.shape.ring())?, Access::Remote)?;
        let staging = len(sizes.staging).and_then(|len| verbs.register(len, Access::Local));
        match staging {
            Ok(staging) => Ok(PairRegions { ring, staging }),
            Err(e) => {
                verbs.invalidate(ring);
                verbs.release(ring);
                Err(e)
            }
        }
    }

    /// No adapter reads or writes them any more.
    pub(crate) fn invalidate<V: Verbs>(&self, verbs: &mut V) {
        verbs.invalidate(self.ring);
        verbs.invalidate(self.staging);
    }

    /// Gives their memory back.
    pub(crate) fn release<V: Verbs>(self, verbs: &mut V) {
        verbs.release(self.ring);
        verbs.release(self.staging);
    }
}
