//! The locator of kind 1: the queue pair for unreliable datagrams of a port, where others ask for queue pairs.

use crate::address::{PairAddress, QpNumber, take, take_24};

/// Bytes of an encoded locator.
pub const LOCATOR_LEN: usize = 27;

/// Lowest local identifier that is no port's, but a group's.
const FIRST_GROUP: u16 = 0xc000;
/// Bits of a partition key that name the partition; the highest one tells full members from limited ones.
const PARTITION: u16 = 0x7fff;
/// With this bit, adapters send their own queue key instead.
const PRIVILEGED: u32 = 1 << 31;

/// How a port's queue pair for datagrams is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortLocator {
    /// Global identifier of the port: of InfiniBand, or the IP address of RoCE.
    pub gid: [u8; 16],
    /// Local identifier of the port in its InfiniBand subnet; 0 for RoCE.
    pub lid: u16,
    /// Key of the partition.
    pub partition: u16,
    /// The queue pair, 24 bits.
    pub number: QpNumber,
    /// A datagram without this key is dropped by the adapter. Random; whoever knows the locator knows it.
    pub queue_key: u32,
}

impl PortLocator {
    /// The bytes of `docs/VERBS.md`, section "The locator". `number` has 24 bits.
    pub fn encode(&self) -> [u8; LOCATOR_LEN] {
        let mut bytes = [0; LOCATOR_LEN];
        bytes[..16].copy_from_slice(&self.gid);
        bytes[16..18].copy_from_slice(&self.lid.to_be_bytes());
        bytes[18..20].copy_from_slice(&self.partition.to_be_bytes());
        bytes[20..23].copy_from_slice(&self.number.0.to_be_bytes()[1..]);
        bytes[23..].copy_from_slice(&self.queue_key.to_be_bytes());
        bytes
    }

    /// From these bytes. `None` if they are too few or too many, or a field has a value that it cannot have.
    pub fn decode(mut bytes: &[u8]) -> Option<Self> {
        let from = &mut bytes;
        let locator = PortLocator {
            gid: take(from)?,
            lid: u16::from_be_bytes(take(from)?),
            partition: u16::from_be_bytes(take(from)?),
            number: QpNumber(take_24(from)?),
            queue_key: u32::from_be_bytes(take(from)?),
        };
        (bytes.is_empty() && locator.is_possible()).then_some(locator)
    }

    /// The locator of the queue with this number and key at the port of a queue pair.
    pub(crate) fn beside(pair: &PairAddress, number: QpNumber, queue_key: u32) -> Self {
        PortLocator {
            gid: pair.gid,
            lid: pair.lid,
            partition: pair.partition,
            number,
            queue_key,
        }
    }

    /// Whether a queue pair of this address is at the same port, and in the same partition.
    pub(crate) fn is_port_of(&self, pair: &PairAddress) -> bool {
        (self.gid, self.lid, self.partition) == (pair.gid, pair.lid, pair.partition)
    }

    /// Whether one port can have this address, and one queue pair this number.
    pub(crate) fn is_possible(&self) -> bool {
        let one_port = match self.gid {
            // An IPv4 address of one host: not 0.x, and below the groups.
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, first, ..] => (1..224).contains(&first),
            [0xff, ..] => false,
            gid => gid != [0; 16],
        };
        one_port
            && self.lid < FIRST_GROUP
            && self.partition & PARTITION != 0
            // 0 and 1 are the port's own, and the last one stands for groups.
            && (2..0xff_ffff).contains(&self.number.0)
            && self.queue_key & PRIVILEGED == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> PortLocator {
        PortLocator {
            gid: *b"0123456789abcdef",
            lid: 0x1122,
            partition: 0xffff,
            number: QpNumber(0x0a_0b0c),
            queue_key: 0x0d0e_0f10,
        }
    }

    #[test]
    fn a_locator_has_the_layout_of_the_document() {
        let text = include_str!("../../docs/VERBS.md");
        let (_, section) = text.split_once("## The locator").unwrap();
        let rows = section.lines().skip_while(|l| !l.starts_with("| gid"));
        let sizes = rows.take_while(|l| l.starts_with('|')).map(|row| {
            let size = row.split('|').nth(2).unwrap();
            size.trim().parse::<usize>().unwrap()
        });
        let sizes: Vec<usize> = sizes.collect();
        assert_eq!(sizes, [16, 2, 2, 3, 4]);
        assert_eq!(sizes.iter().sum::<usize>(), LOCATOR_LEN);
        let bytes = example().encode();
        let mut want = b"0123456789abcdef".to_vec();
        want.extend([
            0x11, 0x22, 0xff, 0xff, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10,
        ]);
        assert_eq!(bytes[..], want[..]);
        assert_eq!(PortLocator::decode(&bytes), Some(example()));
    }

    #[test]
    fn impossible_values_and_lengths_are_refused() {
        let good = example().encode();
        let with = |at: usize, value: &[u8]| {
            let mut bytes = good;
            bytes[at..at + value.len()].copy_from_slice(value);
            PortLocator::decode(&bytes)
        };
        let v4 = |last: [u8; 4]| {
            let mut gid = [0; 16];
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&last);
            gid
        };
        for (at, value) in [
            (0, &[0; 16][..]),
            (0, &[0xff, 2]),
            (0, &v4([0, 0, 0, 0])),
            (0, &v4([239, 1, 1, 1])),
            (0, &v4([255, 255, 255, 255])),
            (16, &[0xc0, 0]),
            (16, &[0xff, 0xff]),
            (18, &[0, 0]),
            (18, &[0x80, 0]),
            (20, &[0, 0, 0]),
            (20, &[0, 0, 1]),
            (20, &[0xff, 0xff, 0xff]),
            (23, &[0x80]),
        ] {
            assert_eq!(with(at, value), None, "byte {at}: {value:?}");
        }
        for (at, value) in [
            (0, &v4([10, 1, 0, 1])[..]),
            (16, &[0, 0]),
            (16, &[0xbf, 0xff]),
            (18, &[0x80, 1]),
            (20, &[0, 0, 2]),
            (23, &[0; 4]),
        ] {
            assert!(with(at, value).is_some(), "byte {at}: {value:?}");
        }
        for len in 0..LOCATOR_LEN {
            assert_eq!(PortLocator::decode(&good[..len]), None);
        }
        assert_eq!(PortLocator::decode(&[&good[..], &[0]].concat()), None);
    }

    proptest! {
        #[test]
        fn a_locator_has_one_encoding(
            mut bytes in proptest::collection::vec(any::<u8>(), LOCATOR_LEN),
            right in any::<bool>(),
        ) {
            if right {
                (bytes[0], bytes[16], bytes[18], bytes[20], bytes[23]) =
                    (bytes[0] | 1, bytes[16] & 0x3f, bytes[18] | 1, bytes[20] & 0x7f | 1, bytes[23] & 0x7f);
                bytes[0] &= 0x7f;
            }
            let read = PortLocator::decode(&bytes);
            prop_assert!(read.is_some() || !right);
            if let Some(locator) = read {
                prop_assert_eq!(&locator.encode()[..], &bytes[..]);
            }
        }
    }
}
