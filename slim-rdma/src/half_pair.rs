//! A queue pair before it is connected.

use crate::address::PairAddress;
use crate::queue_pair::QueuePair;
use crate::regions::PairRegions;
use crate::sizes::PairSizes;
use crate::verbs::{Verbs, VerbsError};

/// EINVAL.
const INVALID: i32 = 22;

/// A queue pair that is not connected yet.
#[derive(Debug)]
pub struct HalfPair {
    address: PairAddress,
    sizes: PairSizes,
    regions: PairRegions,
}

impl HalfPair {
    /// Makes a queue pair with a ring of its own, and posts its receives.
    ///
    /// # Errors
    /// The adapter has no memory, or no queue pair; or a size is 0. Nothing is left behind.
    pub fn open<V: Verbs>(verbs: &mut V, sizes: PairSizes) -> Result<Self, VerbsError> {
        if sizes.depth == 0 || sizes.staging == 0 || sizes.message == 0 {
            return Err(VerbsError::new("sizes of a queue pair", INVALID));
        }
        let regions = PairRegions::register(verbs, sizes)?;
        let mut half = match verbs.create(&sizes) {
            Ok(made) => HalfPair {
                address: made.address,
                sizes: PairSizes {
                    inline: sizes.inline.min(made.inline),
                    ..sizes
                },
                regions,
            },
            Err(e) => {
                regions.invalidate(verbs);
                regions.release(verbs);
                return Err(e);
            }
        };
        half.address.ring = verbs.remote_key(half.regions.ring);
        for id in 0..sizes.shape.slots() {
            if let Err(e) = verbs.post_receive(half.address.number, id) {
                half.abandon(verbs);
                return Err(e);
            }
        }
        Ok(half)
    }

    /// What the peer has to know.
    pub fn address(&self) -> PairAddress {
        self.address
    }

    /// Connects it to the peer's queue pair.
    ///
    /// # Errors
    /// The peer's address is of no use. Nothing is left behind.
    pub fn connect<V: Verbs>(
        self,
        verbs: &mut V,
        peer: &PairAddress,
    ) -> Result<QueuePair, VerbsError> {
        let connected = if peer.ring_has_places() {
            verbs.connect(self.address.number, peer)
        } else {
            Err(VerbsError::new("address of the peer's ring", INVALID))
        };
        if let Err(e) = connected {
            self.abandon(verbs);
            return Err(e);
        }
        let own = &self.address;
        Ok(QueuePair::new(own, self.sizes, self.regions, peer))
    }

    /// Gives it up.
    pub fn abandon<V: Verbs>(self, verbs: &mut V) {
        verbs.destroy(self.address.number);
        self.regions.invalidate(verbs);
        self.regions.release(verbs);
    }
}
