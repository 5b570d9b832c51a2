//! The windows against exact counters, and a stream under arbitrary calls and sizes.

use std::collections::VecDeque;

use proptest::prelude::*;
use slim_rdma::in_memory::{Fabric, Step};
use slim_rdma::{
    HalfPair, Immediate, PairError, PairSizes, ReceiveWindow, RingShape, SendWindow, Verbs,
};

fn shape() -> impl Strategy<Value = RingShape> {
    (6..=12u32, 2..=6u32).prop_map(|(ring, slots)| RingShape::new(1 << ring, 1 << slots).unwrap())
}

/// What both sides do: which one, and what.
#[derive(Clone, Debug)]
enum Op {
    Send(bool, u64),
    Deliver(bool),
    Consume(bool, u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (any::<bool>(), 0..5000u64).prop_map(|(side, n)| Op::Send(side, n)),
        3 => any::<bool>().prop_map(Op::Deliver),
        2 => (any::<bool>(), 0..5000u64).prop_map(|(side, n)| Op::Consume(side, n)),
    ]
}

struct End {
    out: SendWindow,
    inn: ReceiveWindow,
    /// Messages on their way to this end.
    coming: VecDeque<(u64, Immediate)>,
    /// Exact: bytes sent, recorded and consumed; messages sent and taken.
    exact: [u64; 5],
}

proptest! {
    /// What a sender knows never goes beyond the truth, and lags behind it by less than a part once it was told.
    #[test]
    fn windows_know_what_is_true(
        shapes in [shape(), shape()],
        ops in proptest::collection::vec(op(), 1..400),
    ) {
        let mut ends = [0, 1].map(|n: usize| End {
            out: SendWindow::new(shapes[1 - n]),
            inn: ReceiveWindow::new(shapes[n]),
            coming: VecDeque::new(),
            exact: [0; 5],
        });
        for op in ops {
            match op {
                Op::Send(side, n) => {
                    let me = usize::from(side);
                    let n = n.min(ends[me].out.room());
                    if !ends[me].out.has_slot(n == 0) {
                        continue;
                    }
                    let says = ends[me].inn.says(false);
                    ends[me].inn.told();
                    ends[me].out.post(n, false);
                    ends[me].exact[0] += n;
                    ends[me].exact[3] += 1;
                    ends[1 - me].coming.push_back((n, says));
                }
                Op::Deliver(side) => {
                    let me = usize::from(side);
                    let Some((n, says)) = ends[me].coming.pop_front() else { continue };
                    prop_assert_eq!(ends[me].inn.record(n, false), Ok(()));
                    prop_assert_eq!(ends[me].out.learn(says), Ok(()));
                    ends[me].exact[1] += n;
                    ends[me].exact[4] += 1;
                }
                Op::Consume(side, n) => {
                    let me = usize::from(side);
                    let n = n.min(ends[me].inn.unread());
                    ends[me].inn.consume(n);
                    ends[me].exact[2] += n;
                }
            }
            for me in [0, 1] {
                let ([sent, .., messages, _], peer) = (ends[me].exact, ends[1 - me].exact);
                let out = &ends[me].out;
                prop_assert_eq!(out.sent(), sent);
                prop_assert!(out.recorded() <= peer[1]);
                // The peer's ring never overflows, nor does its queue.
                let ring = shapes[1 - me].ring();
                prop_assert!(sent - peer[2] <= ring && out.room() <= ring - (sent - peer[2]));
                prop_assert!(messages - peer[4] <= shapes[1 - me].slots());
                if out.has_slot(true) {
                    prop_assert!(messages - peer[4] < shapes[1 - me].slots());
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Call {
    Send(usize, usize),
    Recv(usize, usize),
    Progress(usize),
    Tell(usize),
    Ping(usize),
    Steps(usize),
    End(usize),
}

fn call() -> impl Strategy<Value = Call> {
    let side = || 0..2usize;
    prop_oneof![
        4 => (side(), 0..300usize).prop_map(|(s, n)| Call::Send(s, n)),
        4 => (side(), 0..300usize).prop_map(|(s, n)| Call::Recv(s, n)),
        2 => side().prop_map(Call::Progress),
        1 => side().prop_map(Call::Tell),
        1 => side().prop_map(Call::Ping),
        6 => (0..60usize).prop_map(Call::Steps),
        1 => (0..40usize).prop_map(Call::End),
    ]
}

fn pair_sizes() -> impl Strategy<Value = PairSizes> {
    (shape(), 1..40u32, 6..12u32, 0..100usize, 1..500u64).prop_map(
        |(shape, depth, staging, inline, message)| PairSizes {
            shape,
            depth,
            staging: 1 << staging,
            inline,
            message,
        },
    )
}

/// Byte `at` of a side's stream.
fn byte(side: usize, at: u64) -> u8 {
    ((at * 7 + at / 256) % 251) as u8 ^ (side as u8 * 0x80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Without faults: all bytes in order, no message without a receive, and both sides come to an end.
    #[test]
    fn a_stream_is_exact_under_any_calls(
        sizes in [pair_sizes(), pair_sizes()],
        calls in proptest::collection::vec(call(), 1..300),
        seed: u64,
    ) {
        let fabric = Fabric::new(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let mut adapters = [fabric.adapter(0), fabric.adapter(1)];
        let [a, b] = [0, 1].map(|n| HalfPair::open(&mut adapters[n], sizes[n]).unwrap());
        let addresses = [a.address(), b.address()];
        let mut pairs = [
            a.connect(&mut adapters[0], &addresses[1]).unwrap(),
            b.connect(&mut adapters[1], &addresses[0]).unwrap(),
        ];
        let (mut sent, mut read, mut ended, mut seen) = ([0; 2], [0; 2], [false; 2], [false; 2]);
        // In the end, both sides end and everything is carried out.
        let rest = (0..20_000).flat_map(|_| {
            [Call::Steps(40), Call::Recv(0, 500), Call::Recv(1, 500), Call::End(0), Call::End(1)]
        });
        for call in calls.into_iter().chain(rest) {
            match call {
                Call::Send(s, n) => {
                    let data: Vec<u8> = (sent[s]..sent[s] + n as u64).map(|at| byte(s, at)).collect();
                    match pairs[s].send(&mut adapters[s], &data) {
                        Ok(n) => sent[s] += n as u64,
                        Err(PairError::Ended) => prop_assert!(ended[s]),
                        Err(e) => prop_assert_eq!(e, PairError::WouldBlock),
                    }
                }
                Call::Recv(s, n) => {
                    let mut buf = vec![0; n];
                    match pairs[s].recv(&mut adapters[s], &mut buf) {
                        Ok(0) if n > 0 => {
                            prop_assert!(ended[1 - s] && read[s] == sent[1 - s]);
                            seen[s] = true;
                        }
                        Ok(n) => {
                            for (i, got) in buf[..n].iter().enumerate() {
                                prop_assert_eq!(*got, byte(1 - s, read[s] + i as u64));
                            }
                            read[s] += n as u64;
                        }
                        Err(e) => prop_assert_eq!(e, PairError::WouldBlock),
                    }
                }
                Call::Progress(s) => drop(pairs[s].progress(&mut adapters[s])),
                Call::Tell(s) => pairs[s].tell_count(&mut adapters[s]),
                Call::Ping(s) => pairs[s].ping(&mut adapters[s]),
                Call::Steps(n) => {
                    for _ in 0..n {
                        if let Some(step) = random.choice(fabric.steps()) {
                            fabric.take(step);
                        }
                    }
                }
                Call::End(s) if s < 2 => {
                    ended[s] = true;
                    pairs[s].end(&mut adapters[s]);
                }
                Call::End(_) => {}
            }
            for s in [0, 1] {
                prop_assert_eq!(pairs[s].broken(), None);
                prop_assert!(pairs[s].recorded_by_peer() <= pairs[1 - s].received());
                prop_assert!(pairs[1 - s].received() <= sent[s]);
            }
            if seen == [true; 2] {
                break;
            }
        }
        prop_assert_eq!(seen, [true; 2], "both sides come to an end");
        prop_assert_eq!(fabric.tallies().not_ready, 0);
        // At the end the counts are told, too.
        for _ in 0..100 {
            for s in [0, 1] {
                pairs[s].progress(&mut adapters[s]);
                pairs[s].tell_count(&mut adapters[s]);
            }
            fabric.run();
        }
        for (s, pair) in pairs.into_iter().enumerate() {
            prop_assert_eq!(pair.recorded_by_peer(), sent[s]);
            pair.release(&mut adapters[s]);
        }
        prop_assert!(fabric.is_empty());
        prop_assert!(adapters[0].event().is_none());
    }
}

/// A message that a failing adapter has placed in part is neither recorded nor read.
#[test]
fn a_message_that_arrives_in_part_is_not_recorded() {
    for part in [0, 1, 50, 99, 100] {
        let fabric = Fabric::new(1);
        let sizes = PairSizes {
            shape: RingShape::new(256, 8).unwrap(),
            depth: 8,
            staging: 256,
            inline: 0,
            message: 256,
        };
        let mut adapters = [fabric.adapter(0), fabric.adapter(1)];
        let [a, b] = [0, 1].map(|n| HalfPair::open(&mut adapters[n], sizes).unwrap());
        let addresses = [a.address(), b.address()];
        let mut near = a.connect(&mut adapters[0], &addresses[1]).unwrap();
        let mut far = b.connect(&mut adapters[1], &addresses[0]).unwrap();
        near.send(&mut adapters[0], &[1; 100]).unwrap();
        fabric.take(Step::Arrive(near.number()));
        fabric.take(Step::PlacePart(part));
        fabric.run();
        assert!(matches!(
            far.recv(&mut adapters[1], &mut [0; 9]),
            Err(PairError::Broken(_))
        ));
        assert_eq!(far.suspend(&mut adapters[1]), 0);
    }
}
