//! RDMA READs beside the stream of a queue pair.

use super::tests::{Two, bytes, sizes, two};
use super::*;
use crate::in_memory::Step;
use crate::verbs::{Access, RegionId};

/// Two processes, with memory to read at the far one, and a place for it at the near one.
struct Reading {
    two: Two,
    source: RegionId,
    sink: RegionId,
}

const LEN: usize = 100;
/// What is in the sink before a read.
const BEFORE: u8 = 0xee;

fn reading() -> Reading {
    reading_with(sizes(4096, 64))
}

fn reading_with(sizes: PairSizes) -> Reading {
    let mut two = two(sizes);
    let source = two.there.register(LEN, Access::Readable).unwrap();
    let sink = two.here.register(LEN, Access::Sink).unwrap();
    two.there.write(source, 0, &bytes(7, LEN));
    two.here.write(sink, 0, &[BEFORE; LEN]);
    Reading { two, source, sink }
}

impl Reading {
    fn read(&mut self, number: u64) -> Result<(), PairError> {
        let from = self.two.there.remote_key(self.source);
        let into = self.two.here.local_key(self.sink);
        let near = &mut self.two.near;
        near.read(&mut self.two.here, number, from, into, LEN as u32)
    }

    fn over(&mut self) -> Vec<(u64, bool)> {
        let next = || {
            self.two
                .near
                .next_read()
                .map(|over| (over.number, over.done))
        };
        std::iter::from_fn(next).collect()
    }

    fn got(&self) -> Vec<u8> {
        let mut got = vec![0; LEN];
        self.two.here.read(self.sink, 0, &mut got);
        got
    }
}

#[test]
fn a_read_takes_its_turn_among_messages_and_counts_for_nothing() {
    let mut all = reading();
    all.two.send(&bytes(0, 10));
    all.read(5).unwrap();
    all.two.send(&bytes(10, 10));
    assert_eq!(all.over(), []);
    all.two.settle();
    assert_eq!(all.over(), [(5, true)]);
    assert_eq!(all.got(), bytes(7, LEN));
    assert_eq!(all.two.recv(100).unwrap(), bytes(0, 20));
    // The peer's software has noticed nothing of it.
    assert_eq!((all.two.near.sent(), all.two.far.received()), (20, 20));
    assert_eq!(all.over(), []);
}

#[test]
fn messages_have_places_left_however_many_reads_are_wanted() {
    let mut all = reading();
    let posted = (0..100)
        .take_while(|number| all.read(*number).is_ok())
        .count();
    assert!((2..=32).contains(&posted), "{posted}");
    assert_eq!(all.read(200), Err(PairError::WouldBlock));
    all.two.send(&bytes(0, 10));
    all.two.settle();
    let over: Vec<_> = (0..posted as u64).map(|number| (number, true)).collect();
    assert_eq!(all.over(), over);
    all.read(200).unwrap();
    all.two.settle();
    assert_eq!(all.over(), [(200, true)]);
}

/// A read needs a place for the write behind it, too.
#[test]
fn a_read_with_one_place_left_is_not_posted() {
    let mut all = reading_with(sizes(4096, 128));
    while all.two.near.work.has_places(2) {
        all.two.send(&bytes(0, 1));
    }
    assert!(all.two.near.work.has_place());
    assert_eq!(all.read(5), Err(PairError::WouldBlock));
    assert_eq!(all.two.near.broken(), None);
    all.two.settle();
    all.read(5).unwrap();
    all.two.settle();
    assert_eq!(all.over(), [(5, true)]);
}

#[test]
fn a_read_on_a_broken_queue_pair_is_over_when_nothing_is_placed_any_more() {
    // It fails before or after the peer's adapter has answered. In the second case it may have placed a part.
    for answered in [false, true] {
        let mut all = reading();
        all.read(5).unwrap();
        if answered {
            all.two.fabric.take(Step::Arrive(all.two.near.number()));
        }
        all.two.fabric.take(Step::Fail(all.two.near.number()));
        all.two.fabric.run();
        all.two.near.progress(&mut all.two.here);
        assert!(all.two.near.broken().is_some());
        assert_eq!(all.over(), [], "bytes may still be placed");
        all.two.near.suspend(&mut all.two.here);
        assert_eq!(all.over(), [(5, false)]);
        assert_eq!(all.got() != [BEFORE; LEN], answered);
        all.two.here.write(all.sink, 0, &[BEFORE; LEN]);
        all.two.fabric.run();
        assert_eq!(all.got(), [BEFORE; LEN]);
        assert!(matches!(all.read(6), Err(PairError::Broken(_))));
        assert_eq!(all.over(), []);
    }
}

#[test]
fn wrong_keys_and_wrong_rights_break_the_queue_pair() {
    type Wrong = fn(&mut Reading);
    let cases: [Wrong; 4] = [
        // A place that nothing may be read from: the far ring.
        |all| all.source = all.two.there.register(LEN, Access::Remote).unwrap(),
        |all| all.two.there.invalidate(all.source),
        // A place that nothing may be written to.
        |all| all.sink = all.two.here.register(LEN, Access::Local).unwrap(),
        |all| all.two.here.invalidate(all.sink),
    ];
    for (case, wrong) in cases.into_iter().enumerate() {
        let mut all = reading();
        wrong(&mut all);
        all.read(5).unwrap();
        all.two.settle();
        assert!(all.two.near.broken().is_some(), "{case}");
        all.two.near.suspend(&mut all.two.here);
        assert_eq!(all.over(), [(5, false)], "{case}");
        assert!(!all.got().starts_with(&bytes(7, 10)), "{case}");
    }
}

#[test]
fn a_read_whose_completion_is_lost_is_over_with_the_write_behind_it() {
    let mut all = reading();
    all.read(5).unwrap();
    all.two.fabric.take(Step::Arrive(all.two.near.number()));
    all.two
        .fabric
        .take(Step::Acknowledge(all.two.near.number()));
    all.two
        .fabric
        .take(Step::LoseCompletion(all.two.near.number()));
    all.two.settle();
    assert_eq!(all.over(), [(5, true)]);
    assert_eq!(all.got(), bytes(7, LEN));
    all.read(6).unwrap();
    all.two.settle();
    assert_eq!(all.over(), [(6, true)]);
}

#[test]
fn a_read_that_is_reported_without_its_bytes_is_not_done() {
    let mut all = reading();
    all.read(5).unwrap();
    all.two.fabric.take(Step::FailAsDone(all.two.near.number()));
    all.two.fabric.run();
    all.two.near.progress(&mut all.two.here);
    assert!(all.two.near.broken().is_some());
    all.two.near.suspend(&mut all.two.here);
    assert_eq!(all.over(), [(5, false)]);
    assert_eq!(all.got(), [BEFORE; LEN]);
}

/// Reads, messages and faults in any order: a read that is done has the bytes, and one that is over changes nothing any more.
#[test]
fn reads_are_right_whatever_the_order_of_events() {
    let mut failed = 0;
    for seed in 0..2000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut all = reading();
        let (mut sent, mut received) = (0, 0);
        for number in 0..20 {
            all.two.here.write(all.sink, 0, &[BEFORE; LEN]);
            let from = random.u64(..1000);
            all.two.there.write(all.source, 0, &bytes(from, LEN));
            if all.read(number).is_err() {
                break;
            }
            let mut over = Vec::new();
            while over.is_empty() {
                let steps = all.two.fabric.steps();
                match random.u32(..31) {
                    0 => all.two.fabric.take(Step::Fail(all.two.near.number())),
                    30 => all.two.fabric.take(Step::FailAsDone(all.two.near.number())),
                    1 => drop(all.two.near.suspend(&mut all.two.here)),
                    2..=9 => {
                        let data = bytes(sent, random.usize(1..50));
                        let taken = all.two.near.send(&mut all.two.here, &data).unwrap_or(0);
                        sent += taken as u64;
                    }
                    10..=15 => {
                        let got = all.two.recv(64).unwrap_or_default();
                        assert_eq!(got, bytes(received, got.len()), "{seed}");
                        received += got.len() as u64;
                    }
                    16..=19 => drop(all.two.near.progress(&mut all.two.here)),
                    _ => {
                        if let Some(step) = random.choice(steps) {
                            all.two.fabric.take(step);
                        }
                    }
                }
                over = all.over();
            }
            match over[..] {
                [(over, true)] => {
                    assert_eq!(over, number, "{seed}");
                    assert_eq!(all.got(), bytes(from, LEN), "{seed}");
                }
                [(over, false)] => {
                    assert_eq!(over, number, "{seed}");
                    failed += 1;
                }
                _ => panic!("{seed}: {over:?}"),
            }
            let before = all.got();
            all.two.there.write(all.source, 0, &[1; LEN]);
            all.two.fabric.run();
            assert_eq!(all.got(), before, "{seed}");
        }
    }
    assert!((500..2000).contains(&failed), "{failed}");
}
