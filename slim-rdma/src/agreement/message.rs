//! The messages of the agreement: `docs/VERBS.md`, section "The agreement on a queue pair".

use crate::address::{ADDRESS_LEN, PairAddress, QpNumber, take, take_24};
use crate::datagrams::MAX_DATAGRAM;
use crate::locator::PortLocator;
use crate::verbs::VerbsError;

/// First bytes of each message.
const MAGIC: [u8; 4] = *b"SLQP";
/// Version of these messages. Another one is dropped.
const VERSION: u8 = 1;

/// Bytes of a cookie.
pub(super) const COOKIE_LEN: usize = 16;
/// Bytes of a request, without a cookie.
pub(super) const REQUEST_LEN: usize = 8 + 3 + 4 + ADDRESS_LEN;

// The longest message is a request with a cookie.
const _: () = assert!(6 + REQUEST_LEN + COOKIE_LEN <= MAX_DATAGRAM);

/// Number of an attempt to agree on a queue pair. The asking side chooses it at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PairAttempt(pub u64);

impl PairAttempt {
    /// A number that nobody guesses.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> Result<Self, VerbsError> {
        // EIO
        let number = getrandom::u64().map_err(|_| VerbsError::new("getrandom", 5))?;
        Ok(PairAttempt(number))
    }
}

/// What an asking side gets first and sends back: it shows that the asking side receives datagrams where it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PairCookie(pub [u8; COOKIE_LEN]);

/// What the asking side says of itself. It is the same in all repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PairRequest {
    /// The attempt.
    pub attempt: PairAttempt,
    /// The queue pair for datagrams to which answers go. It is at the port of `pair`.
    pub number: QpNumber,
    /// Its key.
    pub queue_key: u32,
    /// The queue pair to be connected.
    pub pair: PairAddress,
}

impl PairRequest {
    /// Where answers go.
    pub fn locator(&self) -> PortLocator {
        PortLocator::beside(&self.pair, self.number, self.queue_key)
    }

    pub(super) fn bytes(&self) -> [u8; REQUEST_LEN] {
        let mut bytes = [0; REQUEST_LEN];
        bytes[..8].copy_from_slice(&self.attempt.0.to_be_bytes());
        bytes[8..11].copy_from_slice(&self.number.0.to_be_bytes()[1..]);
        bytes[11..15].copy_from_slice(&self.queue_key.to_be_bytes());
        bytes[15..].copy_from_slice(&self.pair.encode());
        bytes
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        let request = PairRequest {
            attempt: take_attempt(from)?,
            number: QpNumber(take_24(from)?),
            queue_key: u32::from_be_bytes(take(from)?),
            pair: take_pair(from)?,
        };
        // A queue pair is for datagrams, or it is not.
        let two = request.number != request.pair.number;
        (two && request.locator().is_possible()).then_some(request)
    }
}

/// Why the answering side makes no queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PairRefusal {
    /// Its adapter has no memory, or no queue pair.
    NoPair = 1,
    /// It cannot reach the other side's queue pair: another partition, or another kind of port.
    NoUse = 2,
}

/// A message of the agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgreementMessage {
    /// From the asking side. With a cookie if it has got one.
    Ask(PairRequest, Option<PairCookie>),
    /// Ask again, with this cookie.
    Cookie(PairAttempt, PairCookie),
    /// This is the other queue pair. It is connected.
    Answer(PairAttempt, PairAddress),
    /// There is no queue pair for this attempt, and will be none.
    Refusal(PairAttempt, PairRefusal),
}

impl AgreementMessage {
    /// The bytes of the document.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MAX_DATAGRAM);
        bytes.extend(MAGIC);
        bytes.push(VERSION);
        match self {
            AgreementMessage::Ask(request, None) => {
                bytes.push(1);
                bytes.extend(request.bytes());
            }
            AgreementMessage::Cookie(attempt, cookie) => {
                bytes.push(2);
                bytes.extend(attempt.0.to_be_bytes());
                bytes.extend(cookie.0);
            }
            AgreementMessage::Ask(request, Some(cookie)) => {
                bytes.push(3);
                bytes.extend(request.bytes());
                bytes.extend(cookie.0);
            }
            AgreementMessage::Answer(attempt, pair) => {
                bytes.push(4);
                bytes.extend(attempt.0.to_be_bytes());
                bytes.extend(pair.encode());
            }
            AgreementMessage::Refusal(attempt, why) => {
                bytes.push(5);
                bytes.extend(attempt.0.to_be_bytes());
                bytes.push(*why as u8);
            }
        }
        bytes
    }

    /// From a datagram. `None` if it is none of these messages, is too short or too long, or a field has a value that it cannot have.
    pub fn decode(mut bytes: &[u8]) -> Option<Self> {
        let from = &mut bytes;
        if take(from)? != MAGIC || take(from)? != [VERSION] {
            return None;
        }
        let message = match take::<1>(from)?[0] {
            1 => AgreementMessage::Ask(PairRequest::take(from)?, None),
            2 => AgreementMessage::Cookie(take_attempt(from)?, PairCookie(take(from)?)),
            3 => {
                let request = PairRequest::take(from)?;
                AgreementMessage::Ask(request, Some(PairCookie(take(from)?)))
            }
            4 => AgreementMessage::Answer(take_attempt(from)?, take_pair(from)?),
            5 => {
                let attempt = take_attempt(from)?;
                let why = match take::<1>(from)?[0] {
                    1 => PairRefusal::NoPair,
                    2 => PairRefusal::NoUse,
                    _ => return None,
                };
                AgreementMessage::Refusal(attempt, why)
            }
            _ => return None,
        };
        bytes.is_empty().then_some(message)
    }
}

fn take_attempt(from: &mut &[u8]) -> Option<PairAttempt> {
    Some(PairAttempt(u64::from_be_bytes(take(from)?)))
}

/// The address of a queue pair that one port can have.
fn take_pair(from: &mut &[u8]) -> Option<PairAddress> {
    let pair = PairAddress::decode(&take::<ADDRESS_LEN>(from)?)?;
    PortLocator::beside(&pair, pair.number, 0)
        .is_possible()
        .then_some(pair)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PathMtu, RemoteKey, RingShape};
    use proptest::prelude::*;

    fn pair() -> PairAddress {
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

    fn all() -> Vec<AgreementMessage> {
        let attempt = PairAttempt(0x2122_2324_2526_2728);
        let request = PairRequest {
            attempt,
            number: QpNumber(0x31_3233),
            queue_key: 0x4142_4344,
            pair: pair(),
        };
        let cookie = PairCookie(*b"sixteen bytes...");
        vec![
            AgreementMessage::Ask(request, None),
            AgreementMessage::Cookie(attempt, cookie),
            AgreementMessage::Ask(request, Some(cookie)),
            AgreementMessage::Answer(attempt, pair()),
            AgreementMessage::Refusal(attempt, PairRefusal::NoPair),
            AgreementMessage::Refusal(attempt, PairRefusal::NoUse),
        ]
    }

    #[test]
    fn messages_have_the_layout_of_the_document() {
        let text = include_str!("../../../docs/VERBS.md");
        let (_, section) = text.split_once("## The agreement on a queue pair").unwrap();
        let rows = section.lines().skip_while(|l| !l.starts_with("| 1 |"));
        let lengths = rows.take_while(|l| l.starts_with('|')).map(|row| {
            let mut cells = row.split('|').skip(1);
            let kind: u8 = cells.next().unwrap().trim().parse().unwrap();
            let len: usize = cells.nth(1).unwrap().trim().parse().unwrap();
            (kind, len)
        });
        let lengths: Vec<_> = lengths.collect();
        assert_eq!(lengths.len(), 5);
        for message in all() {
            let bytes = message.encode();
            assert_eq!(bytes[..5], *b"SLQP\x01");
            let (_, len) = lengths[usize::from(bytes[5]) - 1];
            assert_eq!(bytes.len(), len, "{message:?}");
            assert_eq!(AgreementMessage::decode(&bytes), Some(message));
        }
        // An answer is never longer than its request.
        assert!(lengths[1].1 < lengths[0].1);
        assert!(lengths[3].1 < lengths[2].1 && lengths[4].1 < lengths[2].1);
        let bytes = all()[2].encode();
        let mut want = b"SLQP\x01\x03\x21\x22\x23\x24\x25\x26\x27\x28123ABCD".to_vec();
        want.extend(pair().encode());
        want.extend(b"sixteen bytes...");
        assert_eq!(bytes, want);
    }

    #[test]
    fn impossible_values_and_lengths_are_refused() {
        for message in all() {
            let good = message.encode();
            for len in 0..good.len() {
                assert_eq!(AgreementMessage::decode(&good[..len]), None);
            }
            let long = [&good[..], &[0]].concat();
            assert_eq!(AgreementMessage::decode(&long), None);
            for (at, value) in [(0, b'X'), (4, 0), (4, 2), (5, 0), (5, 6)] {
                let mut bad = good.clone();
                bad[at] = value;
                assert_eq!(AgreementMessage::decode(&bad), None, "byte {at}: {value}");
            }
        }
        let [ask, _, _, answer, refusal, _] = &all()[..] else {
            unreachable!("six");
        };
        let with = |message: &AgreementMessage, at: usize, value: &[u8]| {
            let mut bytes = message.encode();
            bytes[at..at + value.len()].copy_from_slice(value);
            AgreementMessage::decode(&bytes)
        };
        // The queue: a number of the port's own, one for groups, that of the queue pair; a privileged key.
        for (at, value) in [
            (14, &[0, 0, 1][..]),
            (14, &[0xff, 0xff, 0xff]),
            (14, &[0x0a, 0x0b, 0x0c]),
            (17, &[0x80]),
            (21, &[0xff]),
            (37, &[0xc0]),
        ] {
            assert_eq!(with(ask, at, value), None, "byte {at}: {value:?}");
        }
        // The queue pair, which begins at byte 14: gid, lid, partition, number, ring.
        for (at, value) in [
            (14, &[0; 16][..]),
            (30, &[0xff, 0xff]),
            (32, &[0x80, 0]),
            (35, &[0, 0, 0]),
            (41, &[40]),
            (43, &[0xff; 8]),
        ] {
            assert_eq!(with(answer, at, value), None, "byte {at}: {value:?}");
        }
        for why in [0, 3, 255] {
            assert_eq!(with(refusal, 14, &[why]), None);
        }
    }

    proptest! {
        #[test]
        fn a_message_has_one_encoding(
            which in 0..6_usize,
            changes in proptest::collection::vec((6..78_usize, any::<u8>()), 0..8),
        ) {
            let mut bytes = all()[which].encode();
            for (at, value) in changes {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            if let Some(message) = AgreementMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_are_refused_or_have_one_encoding(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..90),
            kind in 0..7_u8,
        ) {
            let head = [b'S', b'L', b'Q', b'P', 1, kind];
            let len = bytes.len().min(head.len());
            bytes[..len].copy_from_slice(&head[..len]);
            if let Some(message) = AgreementMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
