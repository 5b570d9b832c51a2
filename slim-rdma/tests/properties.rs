//! The windows against exact counters, and a stream under arbitrary calls and sizes.

mod common;

use std::collections::VecDeque;

use common::{ALL, Call, connect, stream};
use proptest::prelude::*;
use slim_rdma::in_memory::{Fabric, Step};
use slim_rdma::{Immediate, PairError, PairSizes, ReceiveWindow, RingShape, SendWindow, Verbs};

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
        stream(&mut adapters, sizes, calls, |n| {
            if n == ALL {
                return fabric.run();
            }
            for _ in 0..n {
                if let Some(step) = random.choice(fabric.steps()) {
                    fabric.take(step);
                }
            }
        });
        prop_assert_eq!(fabric.tallies().not_ready, 0);
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
        let [mut near, mut far] = connect(&mut adapters, [sizes; 2]);
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
