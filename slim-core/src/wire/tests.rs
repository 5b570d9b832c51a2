use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;

use super::*;
use crate::ids::{EndpointId, FinHow, FlowId, Nonce};
use crate::transport::{MAX_LOCATOR, OtherLocator, TransportKind};

fn ip() -> impl Strategy<Value = IpAddr> {
    // Mapped addresses are written as IPv4, so they would not be read back unchanged.
    any::<IpAddr>().prop_map(|ip| ip.to_canonical())
}

fn addr() -> impl Strategy<Value = SocketAddr> {
    (ip(), any::<u16>()).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn addrs() -> impl Strategy<Value = AddrList> {
    proptest::collection::vec(ip(), 0..=MAX_ADDRS).prop_map(AddrList::new)
}

fn place() -> impl Strategy<Value = ProcessPlace> {
    (any::<u64>(), any::<u16>(), any::<u16>(), addrs()).prop_map(
        |(serial, resume_port, control_port, addrs)| ProcessPlace {
            serial,
            resume_port,
            control_port,
            addrs,
        },
    )
}

fn locators() -> impl Strategy<Value = LocatorList> {
    let bytes = proptest::collection::vec(any::<u8>(), 1..=MAX_LOCATOR);
    let locator = (1..=u8::MAX, bytes).prop_map(|(kind, bytes)| {
        OtherLocator::new(TransportKind::new(kind), &bytes)
            .expect("of another kind, and not too long")
    });
    proptest::collection::vec(locator, 0..=MAX_LOCATORS).prop_map(LocatorList::new)
}

fn endpoint() -> impl Strategy<Value = EndpointId> {
    any::<([u8; 16], u32, u64)>().prop_map(|(host, pid, incarnation)| EndpointId {
        host,
        pid,
        incarnation,
    })
}

fn flow() -> impl Strategy<Value = FlowId> {
    any::<[u8; 16]>().prop_map(FlowId)
}

fn nonce() -> impl Strategy<Value = Nonce> {
    any::<[u8; 16]>().prop_map(Nonce)
}

prop_compose! {
    fn hello()(
        flow in flow(),
        connector in addr(),
        acceptor in addr(),
        endpoint in endpoint(),
        random_c in any::<[u8; 32]>(),
        (features, resume_port, control_port) in any::<(u64, u16, u16)>(),
        addrs in addrs(),
    ) -> Message {
        Message::Hello(Hello {
            flow, connector, acceptor, endpoint, random_c, features, resume_port, control_port,
            addrs,
        })
    }
}

prop_compose! {
    fn hello_ack()(
        flow in flow(),
        endpoint in endpoint(),
        random_s in any::<[u8; 32]>(),
        (features, resume_port, control_port) in any::<(u64, u16, u16)>(),
        addrs in addrs(),
    ) -> Message {
        Message::HelloAck(HelloAck {
            flow, endpoint, random_s, features, resume_port, control_port, addrs,
        })
    }
}

fn hello_nak() -> impl Strategy<Value = Message> {
    let reason = prop_oneof![
        Just(NakReason::Version),
        Just(NakReason::Policy),
        Just(NakReason::Unauthorized)
    ];
    (flow(), reason).prop_map(|(flow, reason)| Message::HelloNak(HelloNak { flow, reason }))
}

fn end() -> impl Strategy<Value = Option<End>> {
    proptest::option::of(any::<(u64, bool)>().prop_map(|(seq, closed)| End { seq, closed }))
}

fn fin() -> impl Strategy<Value = Message> {
    let how = prop_oneof![
        Just(FinHow::HalfClose),
        Just(FinHow::Close),
        Just(FinHow::Reset)
    ];
    (flow(), any::<u64>(), how).prop_map(|(flow, final_seq, how)| {
        Message::Fin(Fin {
            flow,
            final_seq,
            how,
        })
    })
}

fn status() -> impl Strategy<Value = Message> {
    let state = prop_oneof![
        Just(FlowStatus::Open),
        any::<u64>().prop_map(FlowStatus::HalfClosed),
        any::<u64>().prop_map(FlowStatus::Closed),
        Just(FlowStatus::Reset),
        Just(FlowStatus::Legacy),
    ];
    (flow(), nonce(), state)
        .prop_map(|(flow, nonce, state)| Message::Status(Status { flow, nonce, state }))
}

fn refuse() -> impl Strategy<Value = Message> {
    let reason = prop_oneof![
        Just(RefuseReason::UnknownFlow),
        Just(RefuseReason::OldEpoch),
        Just(RefuseReason::Busy),
        any::<u64>().prop_map(RefuseReason::Closed),
        Just(RefuseReason::Reset),
        Just(RefuseReason::Legacy),
        Just(RefuseReason::BadProof),
    ];
    (flow(), nonce(), reason).prop_map(|(flow, nonce_i, reason)| {
        Message::Refuse(Refuse {
            flow,
            nonce_i,
            reason,
        })
    })
}

fn ruling() -> impl Strategy<Value = Ruling> {
    prop_oneof![
        Just(Ruling::Heard),
        Just(Ruling::Fallen),
        Just(Ruling::Settled)
    ]
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        hello(),
        flow().prop_map(|flow| Message::HelloWait(HelloWait { flow })),
        hello_ack(),
        hello_nak(),
        fin(),
        (flow(), nonce()).prop_map(|(flow, nonce)| Message::Query(Query { flow, nonce })),
        status(),
        (flow(), nonce(), endpoint()).prop_map(|(flow, nonce, endpoint)| Message::Unknown(
            Unknown {
                flow,
                nonce,
                endpoint
            }
        )),
        flow().prop_map(|flow| Message::Demote(Demote { flow })),
        hello().prop_map(|hello| match hello {
            Message::Hello(hello) => Message::HelloDone(HelloDone(hello)),
            other => other,
        }),
        (flow(), flow(), any::<u16>()).prop_map(|(flow, pair, mailbox)| Message::Pair(Pair {
            flow,
            pair: PairId(pair.0),
            mailbox
        })),
        (flow(), flow(), any::<u64>(), addr(), addr()).prop_map(
            |(flow, pair, counter, connector, acceptor)| Message::Open(Open {
                flow,
                pair: PairId(pair.0),
                counter,
                connector,
                acceptor
            })
        ),
        (flow(), any::<u64>()).prop_map(|(pair, counter)| Message::Seen(Seen {
            pair: PairId(pair.0),
            counter
        })),
        (flow(), 1..=u64::MAX, any::<u64>(), locators()).prop_map(
            |(flow, serial, answers, locators)| Message::Offer(Offer {
                flow,
                serial,
                answers,
                locators
            })
        ),
        (endpoint(), nonce())
            .prop_map(|(endpoint, nonce_r)| Message::Challenge(Challenge { endpoint, nonce_r })),
        (flow(), any::<u64>(), nonce()).prop_map(|(flow, epoch, nonce_i)| Message::Resume(
            Resume {
                flow,
                epoch,
                nonce_i
            }
        )),
        (flow(), any::<(u64, u64, u64)>(), end()).prop_map(
            |(flow, (epoch, received, sent), end)| {
                Message::ResumeOk(ResumeOk {
                    flow,
                    epoch,
                    received,
                    sent,
                    end,
                })
            }
        ),
        (any::<(u64, u64)>(), end()).prop_map(|((received, sent), end)| {
            Message::Confirm(Confirm {
                received,
                sent,
                end,
            })
        }),
        refuse(),
        (endpoint(), endpoint(), any::<u16>(), addrs(), any::<u64>()).prop_map(
            |(accuser, accused, control_port, addrs, cookie)| Message::Accuse(Accuse {
                accuser,
                accused,
                control_port,
                addrs,
                cookie
            })
        ),
        (endpoint(), endpoint(), ruling(), any::<u64>()).prop_map(|(to, lost, ruling, cookie)| {
            Message::Lost(Lost {
                to,
                lost,
                ruling,
                cookie,
            })
        }),
        endpoint().prop_map(|endpoint| Message::Fenced(Fenced { endpoint })),
        (any::<u16>(), addrs()).prop_map(|(port, addrs)| Message::Relay(Relay { port, addrs })),
        (endpoint(), endpoint(), any::<u64>(), place()).prop_map(
            |(sender, wanted, known, place)| {
                Message::Where(Where {
                    sender,
                    wanted,
                    known,
                    place,
                })
            }
        ),
        (endpoint(), endpoint(), place()).prop_map(|(to, endpoint, place)| Message::Here(Here {
            to,
            endpoint,
            place
        })),
    ]
}

proptest! {
    #[test]
    fn a_written_message_is_read_back(message in message(), mac: Mac) {
        let mut covered_by_writer = Vec::new();
        let bytes = encode(&message, |covered| {
            covered_by_writer = covered.to_vec();
            mac
        });
        prop_assert_eq!(bytes.len(), message.kind().message_len());
        let parsed = parse(&bytes).unwrap();
        prop_assert_eq!(parsed.message, message);
        prop_assert_eq!(parsed.mac, mac);
        prop_assert_eq!(parsed.covered, &covered_by_writer[..]);
        prop_assert_eq!(parsed.covered.len() + MAC_LEN, bytes.len());
        let header = bytes.first_chunk().unwrap();
        prop_assert_eq!(message_len(header), Ok(bytes.len()));
    }

    #[test]
    fn a_message_of_another_length_is_refused(message in message(), cut in 0..MAX_LEN) {
        let bytes = encode(&message, |_| [9; MAC_LEN]);
        let mut other = bytes.clone();
        other.resize(cut, 0);
        prop_assert_eq!(parse(&other).is_ok(), cut == bytes.len());
    }

    #[test]
    fn a_changed_bit_is_an_error_or_another_message(
        message in message(), mac: Mac, at in any::<prop::sample::Index>(), bit in 0..8u8,
    ) {
        let bytes = encode(&message, |_| mac);
        let mut changed = bytes.clone();
        changed[at.index(bytes.len())] ^= 1u8 << bit;
        if let Ok(parsed) = parse(&changed) {
            prop_assert!(parsed.message != message || parsed.mac != mac);
            prop_assert_eq!(encode(&parsed.message, |_| parsed.mac), changed);
        }
    }
}

/// A message with known fields, encoded by hand from the specification.
#[test]
fn resume_is_encoded_as_specified() {
    let message = Message::Resume(Resume {
        flow: FlowId([0xf1; 16]),
        epoch: 0x0102_0304_0506_0708,
        nonce_i: Nonce([0xa0; 16]),
    });
    let bytes = encode(&message, |_| [0xcc; MAC_LEN]);
    let mut expected = b"SLIM\x01\x11\x00\x40".to_vec();
    expected.extend([0xf1; 16]);
    expected.extend([1, 2, 3, 4, 5, 6, 7, 8]);
    expected.extend([0xa0; 16]);
    expected.extend([0xcc; 16]);
    assert_eq!(bytes, expected);
}

#[test]
fn each_error_in_a_header_is_told_apart() {
    let good = encode(
        &Message::Demote(Demote {
            flow: FlowId([1; 16]),
        }),
        |_| [0; MAC_LEN],
    );
    let with = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        parse(&bytes).unwrap_err()
    };
    assert_eq!(parse(&good[..7]).unwrap_err(), ParseError::Short(7));
    assert_eq!(with(0, b'X'), ParseError::Magic);
    assert_eq!(with(4, 2), ParseError::Version(2));
    assert_eq!(with(5, 0), ParseError::Kind(0));
    assert_eq!(
        with(7, 41),
        ParseError::Length {
            kind: Kind::Demote,
            got: 41
        }
    );
    assert_eq!(
        parse(&good[..39]).unwrap_err(),
        ParseError::Length {
            kind: Kind::Demote,
            got: 39
        }
    );
}

#[test]
fn numbers_of_kinds_are_unique_and_lengths_bounded() {
    for (i, a) in Kind::ALL.into_iter().enumerate() {
        assert_eq!(Kind::from_byte(a as u8), Some(a));
        assert!(a.message_len() <= MAX_LEN);
        assert!(Kind::ALL[i + 1..].iter().all(|&b| b as u8 != a as u8));
    }
}
