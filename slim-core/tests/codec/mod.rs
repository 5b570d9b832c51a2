//! Shared parts of the two fuzzers of the control message codec: `tests/fuzz.rs`, which stable Rust runs, and `fuzz/`, which
//! cargo-fuzz runs.

use std::net::{IpAddr, SocketAddr};

use fastrand::Rng;
use slim_core::transport::{OtherLocator, TransportKind};
use slim_core::wire::{
    self, Accuse, AddrList, Challenge, Confirm, Demote, End, Fenced, Fin, FlowStatus, HEADER_LEN,
    Hello, HelloAck, HelloDone, HelloNak, HelloWait, Here, Kind, LocatorList, Lost, MAC_LEN, MAGIC,
    MAX_LEN, Message, NakReason, Offer, Open, Pair, PairId, ProcessPlace, Query, Refuse,
    RefuseReason, Relay, Resume, ResumeOk, Ruling, Seen, Status, Unknown, VERSION, Where,
};
use slim_core::{EndpointId, FinHow, FlowId, Nonce};

/// A random byte. Values that have a meaning in messages are more frequent.
fn byte(rng: &mut Rng) -> u8 {
    match rng.usize(..4) {
        0 => [0, 1, 4, 6, 7, 8, 9, 0x7f, 0x80, 0xff][rng.usize(..10)],
        _ => rng.u8(..),
    }
}

/// At least one valid message of every kind.
pub fn corpus() -> Vec<Vec<u8>> {
    let flow = FlowId([0x11; 16]);
    let nonce = Nonce([0x22; 16]);
    let endpoint = EndpointId {
        host: [0x33; 16],
        pid: 4711,
        incarnation: 0x0123_4567_89ab_cdef,
    };
    let v4: SocketAddr = "192.0.2.1:1024".parse().expect("an address");
    let v6: SocketAddr = "[2001:db8::1]:65535".parse().expect("an address");
    let many: Vec<IpAddr> = (0..8)
        .map(|i| if i % 2 == 0 { v4.ip() } else { v6.ip() })
        .collect();
    let mut messages = Vec::new();
    for (a, b, addrs) in [(v4, v6, &many[..]), (v6, v4, &many[..1]), (v4, v4, &[])] {
        let addrs = AddrList::new(addrs.iter().copied());
        let hello = Hello {
            flow,
            connector: a,
            acceptor: b,
            endpoint,
            random_c: [0x44; 32],
            features: 1,
            resume_port: 7000,
            control_port: 7001,
            addrs,
        };
        messages.push(Message::Hello(hello));
        messages.push(Message::HelloDone(HelloDone(hello)));
        messages.push(Message::HelloAck(HelloAck {
            flow,
            endpoint,
            random_s: [0x55; 32],
            features: u64::MAX,
            resume_port: 7002,
            control_port: 7003,
            addrs,
        }));
    }
    messages.push(Message::HelloWait(HelloWait { flow }));
    for reason in [
        NakReason::Version,
        NakReason::Policy,
        NakReason::Unauthorized,
    ] {
        messages.push(Message::HelloNak(HelloNak { flow, reason }));
    }
    for how in [FinHow::HalfClose, FinHow::Close, FinHow::Reset] {
        messages.push(Message::Fin(Fin {
            flow,
            final_seq: 1 << 40,
            how,
        }));
    }
    messages.push(Message::Query(Query { flow, nonce }));
    for state in [
        FlowStatus::Open,
        FlowStatus::HalfClosed(7),
        FlowStatus::Closed(u64::MAX),
        FlowStatus::Reset,
        FlowStatus::Legacy,
    ] {
        messages.push(Message::Status(Status { flow, nonce, state }));
    }
    messages.push(Message::Unknown(Unknown {
        flow,
        nonce,
        endpoint,
    }));
    messages.push(Message::Demote(Demote { flow }));
    let pair = PairId([0x66; 16]);
    messages.push(Message::Pair(Pair {
        flow,
        pair,
        mailbox: 7004,
    }));
    for (connector, acceptor) in [(v4, v6), (v6, v4)] {
        messages.push(Message::Open(Open {
            flow,
            pair,
            counter: 1 << 34,
            connector,
            acceptor,
        }));
    }
    messages.push(Message::Seen(Seen { pair, counter: 9 }));
    let locator = |n: usize| {
        let kind = TransportKind::new(n as u8);
        OtherLocator::new(kind, &vec![0x77; n]).expect("of another kind, and not too long")
    };
    for (answers, lengths) in [(0, &[][..]), (7, &[1]), (u64::MAX, &[64, 1, 63, 2])] {
        messages.push(Message::Offer(Offer {
            flow,
            serial: 1 << 41,
            answers,
            locators: LocatorList::new(lengths.iter().map(|n| locator(*n))),
        }));
    }
    messages.push(Message::Challenge(Challenge {
        endpoint,
        nonce_r: nonce,
    }));
    messages.push(Message::Resume(Resume {
        flow,
        epoch: 3,
        nonce_i: nonce,
    }));
    let ends = [(0, false), (99, false), (99, true)].map(|(seq, closed)| End { seq, closed });
    for end in ends.map(Some).into_iter().chain([None]) {
        let (epoch, received, sent) = (3, 1 << 33, 99);
        messages.push(Message::ResumeOk(ResumeOk {
            flow,
            epoch,
            received,
            sent,
            end,
        }));
        messages.push(Message::Confirm(Confirm {
            received,
            sent,
            end,
        }));
    }
    for reason in [
        RefuseReason::UnknownFlow,
        RefuseReason::OldEpoch,
        RefuseReason::Busy,
        RefuseReason::Closed(5),
        RefuseReason::Reset,
        RefuseReason::Legacy,
        RefuseReason::BadProof,
    ] {
        messages.push(Message::Refuse(Refuse {
            flow,
            nonce_i: nonce,
            reason,
        }));
    }
    for addrs in [AddrList::new([]), AddrList::new([v4.ip(), v6.ip()])] {
        messages.push(Message::Accuse(Accuse {
            accuser: endpoint,
            accused: endpoint,
            control_port: 7005,
            addrs,
            cookie: 1 << 42,
        }));
    }
    for ruling in [Ruling::Heard, Ruling::Fallen, Ruling::Settled] {
        messages.push(Message::Lost(Lost {
            to: endpoint,
            lost: endpoint,
            ruling,
            cookie: 1 << 43,
        }));
    }
    messages.push(Message::Fenced(Fenced { endpoint }));
    messages.push(Message::Relay(Relay {
        port: 7006,
        addrs: AddrList::new([v4.ip(), v6.ip()]),
    }));
    for addrs in [AddrList::new([]), AddrList::new([v4.ip(), v6.ip()])] {
        let place = ProcessPlace {
            serial: 3 << 32,
            resume_port: 7007,
            control_port: 7008,
            addrs,
        };
        messages.push(Message::Where(Where {
            sender: endpoint,
            wanted: endpoint,
            known: 2 << 32,
            place,
        }));
        messages.push(Message::Here(Here {
            to: endpoint,
            endpoint,
            place,
        }));
    }
    for kind in Kind::ALL {
        assert!(
            messages.iter().any(|m| m.kind() == kind),
            "the corpus has no {}",
            kind.name()
        );
    }
    messages
        .iter()
        .map(|m| wire::encode(m, |_| [0x66; MAC_LEN]))
        .collect()
}

/// Damages a message, perhaps with a part of another one.
pub fn mutate(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Rng) {
    let at = random.usize(..bytes.len().max(1)).min(bytes.len());
    match random.usize(..9) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random.usize(..8),
        1 if !bytes.is_empty() => bytes[at] = byte(random),
        2 => bytes.truncate(at),
        3 => {
            for _ in 0..random.usize(..40) {
                bytes.push(byte(random));
            }
        }
        // The start of this message and the end of another one.
        4 => {
            let other = &corpus[random.usize(..corpus.len())];
            bytes.truncate(at);
            bytes.extend(&other[random.usize(..other.len())..]);
        }
        5 => bytes.insert(at, byte(random)),
        6 if !bytes.is_empty() => {
            bytes.remove(at);
        }
        // A run of one value: empties a field, or fills it.
        7 => {
            let (value, end) = (byte(random), bytes.len().min(at + random.usize(..24)));
            bytes[at..end].fill(value);
        }
        // A valid header in front of arbitrary bytes, which gets past the first checks.
        _ => {
            let kind = Kind::ALL[random.usize(..Kind::ALL.len())];
            if random.usize(..2) == 0 {
                bytes.resize(kind.message_len(), 0);
            }
            let length = (kind.message_len() as u16).to_be_bytes();
            let header = [&MAGIC[..], &[VERSION, kind as u8], &length].concat();
            let n = header.len().min(bytes.len());
            bytes[..n].copy_from_slice(&header[..n]);
        }
    }
}

/// Returns whether `bytes` are a message. Checks that
/// - `parse` and `message_len` do not panic,
/// - a message is exactly as long as its header says, and encodes to the same bytes again,
/// - `message_len` and `parse` agree on which headers are valid.
pub fn check(bytes: &[u8]) -> bool {
    let announced = bytes.first_chunk::<HEADER_LEN>().map(wire::message_len);
    match wire::parse(bytes) {
        Ok(parsed) => {
            assert_eq!(announced, Some(Ok(bytes.len())));
            assert!(bytes.len() <= MAX_LEN);
            assert_eq!(parsed.covered.len() + MAC_LEN, bytes.len());
            let again = wire::encode(&parsed.message, |covered| {
                assert_eq!(covered, parsed.covered);
                parsed.mac
            });
            assert_eq!(again, bytes);
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            if let Some(Ok(length)) = announced {
                assert!((HEADER_LEN + MAC_LEN..=MAX_LEN).contains(&length));
            }
            false
        }
    }
}
