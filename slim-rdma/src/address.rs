//! The address of one queue pair, which each side tells the other before the pair is connected.

use crate::sizes::RingShape;

/// Bytes of an encoded address.
pub const ADDRESS_LEN: usize = 41;

/// Number of a queue pair at its adapter. A number may be given again after the queue pair is destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpNumber(pub u32);

/// What the peer needs to write to a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RemoteKey {
    /// Address of its first byte.
    pub addr: u64,
    /// The key that the adapter checks.
    pub key: u32,
}

/// The largest packet that the whole path carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

/// Everything that the peer needs to connect its queue pair to this one, and to write to its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PairAddress {
    /// Global identifier of the port: of InfiniBand, or the IP address of RoCE.
    pub gid: [u8; 16],
    /// Local identifier of the port in its InfiniBand subnet; 0 for RoCE.
    pub lid: u16,
    /// Key of the partition of both ports.
    pub partition: u16,
    /// What the port carries. The smaller one of both sides is used.
    pub mtu: PathMtu,
    /// The queue pair, 24 bits.
    pub number: QpNumber,
    /// Number of the first packet that this side sends, 24 bits at random.
    pub psn: u32,
    /// Sizes of ring and receive queue.
    pub shape: RingShape,
    /// The ring.
    pub ring: RemoteKey,
}

impl PathMtu {
    pub(crate) fn of(number: u8) -> Option<Self> {
        let all = [
            Self::Mtu256,
            Self::Mtu512,
            Self::Mtu1024,
            Self::Mtu2048,
            Self::Mtu4096,
        ];
        all.into_iter().find(|mtu| *mtu as u8 == number)
    }
}

/// The next `N` bytes.
pub(crate) fn take<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(*first)
}

/// A number of 24 bits.
pub(crate) fn take_24(from: &mut &[u8]) -> Option<u32> {
    let [a, b, c] = take(from)?;
    Some(u32::from_be_bytes([0, a, b, c]))
}

impl PairAddress {
    /// The bytes of `docs/VERBS.md`, section "The address of a queue pair". `number` and `psn` have 24 bits.
    pub fn encode(&self) -> [u8; ADDRESS_LEN] {
        let mut bytes = [0; ADDRESS_LEN];
        let fields: [&[u8]; 10] = [
            &self.gid,
            &self.lid.to_be_bytes(),
            &self.partition.to_be_bytes(),
            &[self.mtu as u8],
            &self.number.0.to_be_bytes()[1..],
            &self.psn.to_be_bytes()[1..],
            // Below 64, as a logarithm of 64 bits.
            &[self.shape.ring().trailing_zeros() as u8],
            &[self.shape.slots().trailing_zeros() as u8],
            &self.ring.addr.to_be_bytes(),
            &self.ring.key.to_be_bytes(),
        ];
        let mut at = 0;
        for field in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        bytes
    }

    /// From these bytes. `None` if they are too few or too many, or a field has a value that it cannot have.
    pub fn decode(mut bytes: &[u8]) -> Option<Self> {
        let from = &mut bytes;
        let address = PairAddress {
            gid: take(from)?,
            lid: u16::from_be_bytes(take(from)?),
            partition: u16::from_be_bytes(take(from)?),
            mtu: PathMtu::of(take::<1>(from)?[0])?,
            number: QpNumber(take_24(from)?),
            psn: take_24(from)?,
            shape: {
                let power = |log: [u8; 1]| 1u64.checked_shl(log[0].into());
                RingShape::new(power(take(from)?)?, power(take(from)?)?)?
            },
            ring: RemoteKey {
                addr: u64::from_be_bytes(take(from)?),
                key: u32::from_be_bytes(take(from)?),
            },
        };
        (bytes.is_empty() && address.ring_has_places()).then_some(address)
    }

    /// Whether each byte of the ring has an address.
    pub(crate) fn ring_has_places(&self) -> bool {
        self.ring.addr.checked_add(self.shape.ring() - 1).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> PairAddress {
        PairAddress {
            gid: *b"0123456789abcdef",
            lid: 0x1122,
            partition: 0xffff,
            mtu: PathMtu::Mtu4096,
            number: QpNumber(0x0a_0b0c),
            psn: 0xfe_dcba,
            shape: RingShape::new(1 << 20, 512).unwrap(),
            ring: RemoteKey {
                addr: 0x0102_0304_0506_0708,
                key: 0x090a_0b0c,
            },
        }
    }

    #[test]
    fn an_address_has_the_layout_of_the_document() {
        let text = include_str!("../../docs/VERBS.md");
        let (_, section) = text.split_once("## The address of a queue pair").unwrap();
        let rows = section.lines().skip_while(|l| !l.starts_with("| gid"));
        let sizes = rows.take_while(|l| l.starts_with('|')).flat_map(|row| {
            let size = row.split('|').nth(2).unwrap();
            size.split(',')
                .map(|n| n.trim().parse::<usize>().unwrap())
                .collect::<Vec<_>>()
        });
        let sizes: Vec<usize> = sizes.collect();
        assert_eq!(sizes, [16, 2, 2, 1, 3, 3, 1, 1, 8, 4]);
        assert_eq!(sizes.iter().sum::<usize>(), ADDRESS_LEN);
        let bytes = example().encode();
        let mut want = b"0123456789abcdef".to_vec();
        want.extend([
            0x11, 0x22, 0xff, 0xff, 5, 0x0a, 0x0b, 0x0c, 0xfe, 0xdc, 0xba, 20, 9,
        ]);
        want.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(bytes[..], want[..]);
        assert_eq!(PairAddress::decode(&bytes), Some(example()));
    }

    #[test]
    fn impossible_values_and_lengths_are_refused() {
        let good = example().encode();
        for (at, value) in [
            (20, 0),
            (20, 6),
            (27, 5),
            (27, 21),
            (27, 64),
            (28, 1),
            (28, 16),
            (28, 255),
        ] {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(PairAddress::decode(&bad), None, "byte {at}: {value}");
        }
        for len in 0..ADDRESS_LEN {
            assert_eq!(PairAddress::decode(&good[..len]), None);
        }
        assert_eq!(PairAddress::decode(&[&good[..], &[0]].concat()), None);
    }

    proptest! {
        #[test]
        fn an_address_has_one_encoding(
            mut bytes in proptest::collection::vec(any::<u8>(), ADDRESS_LEN),
            right in any::<bool>(),
        ) {
            if right {
                (bytes[20], bytes[27], bytes[28]) = (1 + bytes[20] % 5, 6 + bytes[27] % 15, 2 + bytes[28] % 14);
                bytes[29] &= 0x7f;
            }
            let read = PairAddress::decode(&bytes);
            prop_assert!(read.is_some() || !right);
            if let Some(address) = read {
                prop_assert_eq!(&address.encode()[..], &bytes[..]);
            }
        }
    }
}
