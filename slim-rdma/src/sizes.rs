//! The sizes of one receiving side.

/// Parts of a ring in which its free space is announced.
pub(crate) const RING_PARTS: u64 = 64;
/// Parts of a receive queue in which its free slots are announced.
pub(crate) const SLOT_PARTS: u64 = 4;

/// The largest ring: 1 MiB, so that 21 bits tell which of its bytes are recorded.
pub const MAX_RING: u64 = 1 << 20;
/// The longest receive queue.
pub const MAX_SLOTS: u64 = 1 << 15;

/// How much one side can receive before its software looks: a ring of bytes, and a queue of posted receives. Both are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    ring_log2: u8,
    slots_log2: u8,
}

impl RingShape {
    /// A ring of `ring` bytes and a queue of `slots` receives. `None` if one of them is no power of two, or is outside of 64 to
    /// [`MAX_RING`], or 4 to [`MAX_SLOTS`].
    pub fn new(ring: u64, slots: u64) -> Option<Self> {
        let right = ring.is_power_of_two()
            && slots.is_power_of_two()
            && (RING_PARTS..=MAX_RING).contains(&ring)
            && (SLOT_PARTS..=MAX_SLOTS).contains(&slots);
        // Powers of two below 2^64 have less than 64 zeros.
        right.then(|| RingShape {
            ring_log2: ring.trailing_zeros() as u8,
            slots_log2: slots.trailing_zeros() as u8,
        })
    }

    /// Bytes of the ring.
    pub fn ring(self) -> u64 {
        1 << self.ring_log2
    }

    /// Receives that are posted while none is in use.
    pub fn slots(self) -> u64 {
        1 << self.slots_log2
    }

    pub(crate) fn ring_part(self) -> u64 {
        self.ring() / RING_PARTS
    }

    pub(crate) fn slot_part(self) -> u64 {
        self.slots() / SLOT_PARTS
    }
}

/// Sizes of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairSizes {
    /// Ring and receive queue.
    pub shape: RingShape,
    /// Most writes that are posted and not completed.
    pub depth: u32,
    /// Most bytes that are posted and not completed.
    pub staging: u64,
    /// Most bytes of a write that the adapter takes by value.
    pub inline: usize,
    /// Most bytes of one message. The peer's software learns of a message when all of it has arrived.
    pub message: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_within_bounds() {
        for (ring, slots) in [(64, 4), (MAX_RING, MAX_SLOTS), (4096, 128)] {
            let shape = RingShape::new(ring, slots).unwrap();
            assert_eq!((shape.ring(), shape.slots()), (ring, slots));
            assert!(shape.ring_part() > 0 && shape.slot_part() > 0);
        }
        for (ring, slots) in [
            (0, 4),
            (32, 4),
            (96, 4),
            (2 * MAX_RING, 4),
            (64, 2),
            (64, 6),
            (64, 0),
            (64, 2 * MAX_SLOTS),
        ] {
            assert_eq!(RingShape::new(ring, slots), None, "{ring} {slots}");
        }
    }
}
