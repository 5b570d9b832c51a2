//! The 32 bits of immediate data that go with every message: `docs/VERBS.md`, section "Messages".

/// Bits of [`Immediate::recorded`].
const RECORDED_BITS: u32 = 21;
/// Bits of [`Immediate::freed`].
const FREED_BITS: u32 = 7;
/// Bits of [`Immediate::slots`].
const SLOTS_BITS: u32 = 3;

/// Modulus of [`Immediate::recorded`].
pub(crate) const RECORDED_MODULUS: u64 = 1 << RECORDED_BITS;
/// Modulus of [`Immediate::freed`].
pub(crate) const FREED_MODULUS: u64 = 1 << FREED_BITS;
/// Modulus of [`Immediate::slots`].
pub(crate) const SLOTS_MODULUS: u64 = 1 << SLOTS_BITS;

/// What the sender of a message says of itself. Each number is a counter that has been reduced to its lowest bits; the reader knows the
/// rest, because a counter is never further ahead of what the reader knows than half of its modulus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Immediate {
    /// No bytes of this direction follow this message.
    pub end: bool,
    /// Messages that the sender has taken from its receive queue, in quarters of that queue: modulo 8.
    pub slots: u8,
    /// Bytes that the sender has taken out of its ring, in 64ths of the ring: modulo 128.
    pub freed: u8,
    /// Bytes that the sender's software has recorded as received: modulo 2^21.
    pub recorded: u32,
}

impl Immediate {
    /// As 32 bits. Bits that do not fit into their fields are cut off.
    pub fn pack(self) -> u32 {
        let low = |value: u32, bits: u32| value & ((1 << bits) - 1);
        u32::from(self.end) << (RECORDED_BITS + FREED_BITS + SLOTS_BITS)
            | low(self.slots.into(), SLOTS_BITS) << (RECORDED_BITS + FREED_BITS)
            | low(self.freed.into(), FREED_BITS) << RECORDED_BITS
            | low(self.recorded, RECORDED_BITS)
    }

    /// From 32 bits: each value means something.
    pub fn unpack(bits: u32) -> Self {
        let field = |from: u32, count: u32| bits >> from & ((1 << count) - 1);
        // The casts are of at most 7 bits.
        Immediate {
            end: bits >> (RECORDED_BITS + FREED_BITS + SLOTS_BITS) == 1,
            slots: field(RECORDED_BITS + FREED_BITS, SLOTS_BITS) as u8,
            freed: field(RECORDED_BITS, FREED_BITS) as u8,
            recorded: field(0, RECORDED_BITS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_field_has_its_own_bits() {
        let all = Immediate {
            end: true,
            slots: 7,
            freed: 127,
            recorded: (1 << 21) - 1,
        };
        assert_eq!(all.pack(), u32::MAX);
        let none = Immediate::default();
        for (one, bits) in [
            (Immediate { end: true, ..none }, 0x8000_0000),
            (Immediate { slots: 7, ..none }, 0x7000_0000),
            (Immediate { freed: 127, ..none }, 0x0fe0_0000),
            (
                Immediate {
                    recorded: 0x1f_ffff,
                    ..none
                },
                0x001f_ffff,
            ),
        ] {
            assert_eq!(one.pack(), bits);
        }
    }

    proptest! {
        #[test]
        fn all_bits_are_read_back(bits: u32) {
            prop_assert_eq!(Immediate::unpack(bits).pack(), bits);
        }
    }
}
