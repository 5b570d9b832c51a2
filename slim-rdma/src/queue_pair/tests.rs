//! One queue pair, step by step.

use super::*;
use crate::half_pair::HalfPair;
use crate::in_memory::{Fabric, MemoryAdapter, Step};

pub(super) struct Two {
    pub(super) fabric: Fabric,
    pub(super) here: MemoryAdapter,
    pub(super) there: MemoryAdapter,
    pub(super) near: QueuePair,
    pub(super) far: QueuePair,
}

pub(super) fn sizes(ring: u64, slots: u64) -> PairSizes {
    PairSizes {
        shape: RingShape::new(ring, slots).unwrap(),
        depth: 64,
        staging: ring,
        inline: 8,
        message: ring,
    }
}

fn connected(fabric: &Fabric, sizes: PairSizes) -> Two {
    let (mut here, mut there) = (fabric.adapter(0), fabric.adapter(1));
    let near = HalfPair::open(&mut here, sizes).unwrap();
    let far = HalfPair::open(&mut there, sizes).unwrap();
    let (a, b) = (near.address(), far.address());
    Two {
        near: near.connect(&mut here, &b).unwrap(),
        far: far.connect(&mut there, &a).unwrap(),
        fabric: fabric.clone(),
        here,
        there,
    }
}

pub(super) fn two(sizes: PairSizes) -> Two {
    connected(&Fabric::new(1), sizes)
}

pub(super) fn bytes(from: u64, len: usize) -> Vec<u8> {
    (from..from + len as u64)
        .map(|at| (at % 251) as u8)
        .collect()
}

impl Two {
    pub(super) fn send(&mut self, data: &[u8]) {
        assert_eq!(self.near.send(&mut self.here, data), Ok(data.len()));
    }

    pub(super) fn recv(&mut self, most: usize) -> Result<Vec<u8>, PairError> {
        let mut buf = vec![0; most];
        let n = self.far.recv(&mut self.there, &mut buf)?;
        buf.truncate(n);
        Ok(buf)
    }

    pub(super) fn settle(&mut self) {
        loop {
            self.fabric.run();
            let near = self.near.progress(&mut self.here);
            if !near && !self.far.progress(&mut self.there) {
                return;
            }
        }
    }

    pub(super) fn release(self) -> Fabric {
        let Two {
            fabric,
            mut here,
            mut there,
            near,
            far,
        } = self;
        near.release(&mut here);
        far.release(&mut there);
        assert!(fabric.is_empty());
        fabric
    }
}

#[test]
fn a_stream_goes_around_both_rings_many_times() {
    for (ring, slots) in [(64, 4), (64, 128), (256, 8)] {
        let mut two = two(sizes(ring, slots));
        let (mut sent, mut read) = (0, 0);
        for round in 0..2000 {
            let data = bytes(sent, 1 + round % 40);
            if let Ok(n) = two.near.send(&mut two.here, &data) {
                sent += n as u64;
            }
            two.settle();
            if let Ok(got) = two.recv(1 + round % 37) {
                assert_eq!(got, bytes(read, got.len()));
                read += got.len() as u64;
            }
        }
        assert!(read > 20_000, "{read}");
        let tallies = two.fabric.tallies();
        assert!(tallies.inline > 0 && tallies.staged > 0 && tallies.not_ready == 0);
        two.release();
    }
}

#[test]
fn a_sender_takes_what_the_ring_holds_and_goes_on_when_a_quarter_is_free() {
    let mut two = two(sizes(64, 64));
    assert_eq!(two.near.send(&mut two.here, &bytes(0, 100)), Ok(64));
    two.settle();
    assert_eq!(
        two.near.send(&mut two.here, &[1]),
        Err(PairError::WouldBlock)
    );
    assert_eq!(two.recv(15).unwrap().len(), 15);
    two.settle();
    assert_eq!(
        two.near.send(&mut two.here, &[1]),
        Err(PairError::WouldBlock)
    );
    assert_eq!(two.recv(1).unwrap().len(), 1);
    two.settle();
    assert_eq!(two.near.send(&mut two.here, &bytes(64, 100)), Ok(16));
    two.settle();
    assert_eq!(two.recv(100).unwrap(), bytes(16, 64));
}

#[test]
fn pieces_of_one_send_share_a_message() {
    let mut two = two(sizes(64, 64));
    let mut sent = 0;
    // The last one goes around the end of the ring.
    for (lens, inline, staged) in [
        ([2, 3, 3], 1, 0),
        ([8, 0, 0], 1, 0),
        ([4, 20, 16], 0, 1),
        ([6, 8, 7], 1, 1),
    ] {
        let before = two.fabric.tallies();
        let data = bytes(sent, lens.iter().sum());
        let (first, rest) = data.split_at(lens[0]);
        let (second, third) = rest.split_at(lens[1]);
        let slices = [first, second, third].map(IoSlice::new);
        let mut pieces = Pieces::new(&slices);
        let all = two.near.send_pieces(&mut two.here, &mut pieces);
        assert_eq!((all, pieces.left()), (Ok(data.len()), 0));
        let after = two.fabric.tallies();
        let messages = [after.inline - before.inline, after.staged - before.staged];
        assert_eq!(messages, [inline, staged], "{lens:?}");
        two.settle();
        assert_eq!(two.recv(100).unwrap(), data);
        two.settle();
        sent += data.len() as u64;
    }
    two.release();
}

#[test]
fn a_send_of_pieces_takes_what_there_is_room_for_and_goes_on_there() {
    let mut two = two(sizes(64, 64));
    let data = bytes(0, 100);
    let slices = [&data[..30], &data[30..70], &data[70..]].map(IoSlice::new);
    let mut pieces = Pieces::new(&slices);
    let mut got = Vec::new();
    for sent in [Ok(64), Ok(36)] {
        assert_eq!(two.near.send_pieces(&mut two.here, &mut pieces), sent);
        two.settle();
        got.extend(two.recv(100).unwrap());
        two.settle();
    }
    assert_eq!((pieces.left(), got), (0, data));
}

#[test]
fn without_a_completion_the_staging_ring_and_the_send_queue_are_not_used_again() {
    let mut two = two(PairSizes {
        staging: 64,
        ..sizes(4096, 64)
    });
    assert_eq!(two.near.send(&mut two.here, &bytes(0, 100)), Ok(64));
    // The peer has everything, but the acknowledgement is on its way: the adapter may have to send it again.
    for _ in 0..2 {
        two.fabric.take(Step::Arrive(two.near.number()));
        two.fabric.take(Step::Place);
    }
    assert_eq!(
        two.near.send(&mut two.here, &[1]),
        Err(PairError::WouldBlock)
    );
    two.settle();
    two.send(&bytes(64, 36));
    two.settle();
    assert_eq!(two.recv(100).unwrap(), bytes(0, 100));

    let mut two = self::two(PairSizes {
        depth: 2,
        ..sizes(4096, 64)
    });
    two.send(&[1]);
    two.send(&[2]);
    assert_eq!(
        two.near.send(&mut two.here, &[3]),
        Err(PairError::WouldBlock)
    );
    two.settle();
    two.send(&[3]);
}

#[test]
fn what_the_adapters_have_done_says_nothing_about_the_peer() {
    let mut two = two(sizes(4096, 64));
    two.send(&bytes(0, 4000));
    two.fabric.run();
    two.near.progress(&mut two.here);
    assert!(
        !two.near.work.will_report(),
        "the local completion has come"
    );
    assert_eq!((two.near.sent(), two.near.recorded_by_peer()), (4000, 0));
    // The peer's software looks, and says so on the next occasion.
    two.far.progress(&mut two.there);
    assert!(two.far.owes_count());
    two.far.tell_count(&mut two.there);
    assert!(!two.far.owes_count());
    two.settle();
    assert_eq!(two.near.recorded_by_peer(), 4000);
}

#[test]
fn a_lost_local_completion_does_no_harm() {
    let mut two = two(PairSizes {
        depth: 4,
        ..sizes(4096, 64)
    });
    for n in 0..100 {
        two.send(&[n]);
        two.fabric.take(Step::Arrive(two.near.number()));
        two.fabric.take(Step::Acknowledge(two.near.number()));
        if n % 3 == 0 {
            two.fabric.take(Step::LoseCompletion(two.near.number()));
        }
        two.settle();
        assert_eq!(two.recv(2).unwrap(), [n]);
    }
}

#[test]
fn a_suspended_pair_keeps_what_was_recorded_and_takes_nothing_more() {
    let mut two = two(sizes(4096, 64));
    two.send(&bytes(0, 10));
    two.settle();
    // Completed, but nobody has looked yet.
    two.send(&bytes(10, 10));
    two.fabric.run();
    // Accepted by the adapter, and not in memory yet.
    two.send(&bytes(20, 10));
    two.fabric.take(Step::Arrive(two.near.number()));
    // On its way.
    two.send(&bytes(30, 10));
    assert_eq!(two.far.suspend(&mut two.there), 20);
    assert_eq!(two.fabric.tallies().fenced, 1);
    two.fabric.run();
    assert_eq!(
        (
            two.fabric.tallies().strayed,
            two.far.suspend(&mut two.there)
        ),
        (1, 20)
    );
    assert_eq!(two.recv(15).unwrap(), bytes(0, 15));
    assert_eq!(two.recv(15).unwrap(), bytes(15, 5));
    assert_eq!(two.recv(15), Err(PairError::Broken(Break::Suspended)));
    two.release();
}

/// The peer's adapter still has the address of the old ring. Numbers, keys and memory of the old pair belong to a new one.
#[test]
fn writes_of_an_old_pair_do_not_land_in_the_memory_of_the_next() {
    let fabric = Fabric::new(1);
    for round in 0..50 {
        let mut old = connected(&fabric, sizes(64, 8));
        old.send(&[0xbb; 40]);
        fabric.take(Step::Arrive(old.near.number()));
        old.send(&[0xbb; 20]);
        // Its sender fails, and its last message stays on its way.
        fabric.take(Step::Fail(old.near.number()));
        assert_eq!(old.far.suspend(&mut old.there), 0);
        old.release_all();
        let mut new = connected(&fabric, sizes(64, 8));
        new.send(&bytes(0, 60));
        new.settle();
        fabric.take(Step::ArriveLate);
        fabric.run();
        assert_eq!(new.recv(100).unwrap(), bytes(0, 60), "round {round}");
        new.release_all();
    }
    let tallies = fabric.tallies();
    assert!(tallies.fenced == 50 && tallies.strayed >= 50, "{tallies:?}");
    assert!(fabric.is_empty());
}

impl Two {
    fn release_all(mut self) {
        self.near.release(&mut self.here);
        self.far.release(&mut self.there);
    }
}

#[test]
fn the_end_comes_behind_all_bytes() {
    let mut two = two(sizes(64, 4));
    two.send(&bytes(0, 60));
    two.near.end(&mut two.here);
    assert_eq!(two.near.send(&mut two.here, &[1]), Err(PairError::Ended));
    two.settle();
    assert!(two.far.peer_has_ended());
    assert_eq!(two.near.recorded_by_peer(), 60, "told at once");
    assert_eq!(two.recv(100).unwrap(), bytes(0, 60));
    assert_eq!(two.recv(100), Ok(Vec::new()));
    // The other direction goes on.
    assert_eq!(two.far.send(&mut two.there, b"back"), Ok(4));
    two.settle();
    let mut buf = [0; 8];
    assert_eq!(two.near.recv(&mut two.here, &mut buf), Ok(4));
    two.release();
}

#[test]
fn an_end_waits_for_a_slot() {
    let mut two = two(sizes(64, 4));
    while two.near.send(&mut two.here, &[7]).is_ok() {}
    two.near.end(&mut two.here);
    assert!(!two.near.outgoing.has_ended());
    two.settle();
    assert!(two.far.peer_has_ended() && two.far.unread() == 3);
}

#[test]
fn a_waiting_side_is_told_of_the_next_completion_once() {
    let mut two = two(sizes(64, 4));
    // Nothing is reported that was not asked for.
    two.send(&[1]);
    two.fabric.run();
    assert_eq!(two.there.reported(), None);
    // What has come before is found at once.
    assert!(!two.far.arm(&mut two.there));
    assert!(two.far.arm(&mut two.there));
    two.send(&[2]);
    two.send(&[3]);
    two.fabric.run();
    assert_eq!(two.there.reported(), Some(two.far.number()));
    assert_eq!((two.there.reported(), two.here.reported()), (None, None));
    assert!(two.far.progress(&mut two.there));
    assert_eq!(two.recv(9).unwrap(), [1, 2, 3]);
    two.far.suspend(&mut two.there);
    assert!(!two.far.arm(&mut two.there), "there is nothing to wait for");
}

#[test]
fn nothing_is_left_behind_where_the_adapter_has_no_more_queue_pairs() {
    let fabric = Fabric::new(1);
    let mut adapter = fabric.adapter(0);
    let mut halves = Vec::new();
    let refused = loop {
        match HalfPair::open(&mut adapter, sizes(64, 4)) {
            Ok(half) => halves.push(half),
            Err(e) => break e,
        }
    };
    assert!(refused.errno == 12 && !halves.is_empty());
    let sizes = sizes(64, 4);
    for wrong in [
        PairSizes { depth: 0, ..sizes },
        PairSizes {
            staging: 0,
            ..sizes
        },
        PairSizes {
            message: 0,
            ..sizes
        },
    ] {
        assert_eq!(
            HalfPair::open(&mut adapter, wrong).unwrap_err(),
            VerbsError::new("sizes of a queue pair", 22)
        );
    }
    for half in halves {
        half.abandon(&mut adapter);
    }
    assert!(fabric.is_empty());
}
