//! A peer that keeps to nothing, and adapters that refuse.

#[path = "hostile/adapters.rs"]
mod adapters;

use std::io::IoSlice;

use adapters::{BadAdapter, shuffled};
use slim_rdma::in_memory::{Fabric, MemoryAdapter};
use slim_rdma::{
    Access, AdapterEvent, Break, Completed, HalfPair, PairAddress, PairError, PairSizes, Payload,
    Pieces, QpNumber, QueuePair, RegionId, RemoteKey, RingShape, Verbs, Violation, WriteWork,
};

fn sizes(ring: u64, slots: u64) -> PairSizes {
    PairSizes {
        shape: RingShape::new(ring, slots).unwrap(),
        depth: 16,
        staging: ring,
        inline: 8,
        message: ring,
    }
}

/// A queue pair, and a peer that uses the adapter as it likes.
struct Raw {
    fabric: Fabric,
    here: MemoryAdapter,
    there: MemoryAdapter,
    pair: QueuePair,
    /// The peer's own.
    number: QpNumber,
    ring: RegionId,
    /// Ours.
    to: RemoteKey,
    posted: u64,
}

fn raw(ours: PairSizes, theirs: RingShape, fabric: &Fabric) -> Raw {
    let (mut here, mut there) = (fabric.adapter(0), fabric.adapter(1));
    let half = HalfPair::open(&mut here, ours).unwrap();
    let address = half.address();
    let ring = there
        .register(theirs.ring() as usize, Access::Remote)
        .unwrap();
    // Whatever it writes is passed by value.
    let sizes = PairSizes {
        shape: theirs,
        depth: 64,
        staging: 1,
        inline: usize::MAX,
        message: 1,
    };
    let mut own = there.create(&sizes).unwrap().address;
    own.ring = there.remote_key(ring);
    there.connect(own.number, &address).unwrap();
    for id in 0..theirs.slots() {
        there.post_receive(own.number, id).unwrap();
    }
    Raw {
        fabric: fabric.clone(),
        pair: half.connect(&mut here, &own).unwrap(),
        here,
        there,
        number: own.number,
        ring,
        to: address.ring,
        posted: 0,
    }
}

impl Raw {
    /// The peer writes these bytes at this place of the ring.
    fn write(&mut self, at: u64, bytes: &[u8], immediate: Option<u32>) -> bool {
        while let Some(done) = self.there.poll(self.number) {
            if matches!(done.how, Completed::Received { .. }) {
                let _ = self.there.post_receive(self.number, done.id);
            }
        }
        let work = WriteWork {
            id: self.posted,
            payload: Payload::Inline(bytes),
            to: RemoteKey {
                addr: self.to.addr + at,
                key: self.to.key,
            },
            immediate,
            signaled: true,
        };
        self.posted += 1;
        let posted = self.there.post_write(self.number, &work).is_ok();
        self.fabric.run();
        posted
    }

    fn release(mut self) {
        self.pair.release(&mut self.here);
        self.there.destroy(self.number);
        self.there.invalidate(self.ring);
        self.there.release(self.ring);
        assert!(self.fabric.is_empty());
    }
}

/// Arbitrary messages: no panic, no byte counted that was not written, and nothing changes after the break.
#[test]
fn arbitrary_messages_of_a_peer_do_no_harm() {
    let rounds = if cfg!(debug_assertions) { 300 } else { 20_000 };
    let (mut breaks, mut survived) = (0, 0);
    for seed in 0..rounds {
        let mut random = fastrand::Rng::with_seed(seed);
        let shape = |random: &mut fastrand::Rng| {
            RingShape::new(1 << random.u32(6..=10), 1 << random.u32(2..=5)).unwrap()
        };
        let ours = PairSizes {
            shape: shape(&mut random),
            depth: random.u32(1..8),
            staging: random.u64(1..200),
            inline: random.usize(0..2000),
            message: random.u64(1..300),
        };
        let theirs = shape(&mut random);
        let mut raw = raw(ours, theirs, &Fabric::new(seed));
        let ring = ours.shape.ring();
        let (mut written, mut read, mut last) = (0, 0, None);
        for _ in 0..random.u32(1..200) {
            match random.u32(0..8) {
                0..=2 => {
                    let len = random.u64(0..=ring);
                    let at = random.u64(0..=ring - len);
                    // Mostly what could be right, else anything.
                    let immediate = match random.u32(0..4) {
                        0 => random.u32(..),
                        1 => random.u32(0..200) | random.u32(0..8) << 28,
                        _ => 0,
                    };
                    let immediate = (random.u32(0..8) > 0).then_some(immediate);
                    if raw.write(at, &vec![7; len as usize], immediate) && immediate.is_some() {
                        written += len;
                    }
                }
                3 => drop(raw.write(0, &[], Some(random.u32(0..2) << 31))),
                4 => {
                    let mut into = vec![0; random.usize(0..400)];
                    if let Ok(n) = raw.pair.recv(&mut raw.here, &mut into) {
                        read += n as u64;
                    }
                }
                5 => drop(raw.pair.send(&mut raw.here, &vec![1; random.usize(0..400)])),
                6 => raw.pair.tell_count(&mut raw.here),
                _ => {
                    raw.pair.progress(&mut raw.here);
                    if random.u32(0..10) == 0 {
                        raw.pair.end(&mut raw.here);
                    }
                    raw.pair.ping(&mut raw.here);
                }
            }
            let pair = &raw.pair;
            assert!(pair.received() <= written, "seed {seed}");
            assert_eq!(read + pair.unread(), pair.received(), "seed {seed}");
            assert!(pair.unread() <= ring, "seed {seed}");
            assert!(pair.recorded_by_peer() <= pair.sent(), "seed {seed}");
            if let Some(Break::Violation(_)) = pair.broken() {
                let now = (pair.received(), pair.recorded_by_peer());
                assert_eq!(*last.get_or_insert(now), now, "seed {seed}");
            }
        }
        breaks += u32::from(last.is_some());
        survived += u32::from(raw.pair.broken().is_none());
        let received = raw.pair.suspend(&mut raw.here);
        assert_eq!(raw.pair.suspend(&mut raw.here), received);
        raw.release();
    }
    println!("{breaks} violations, {survived} survived");
    assert!(breaks > rounds as u32 / 4 && survived > rounds as u32 / 50);
}

/// A peer that sends messages without bytes as fast as they are taken, for ever, does not hold this side in one call.
#[test]
fn a_flood_of_empty_messages_does_not_hold_a_call_for_ever() {
    for slots in [4, 32] {
        let Raw {
            fabric,
            mut here,
            mut there,
            mut pair,
            number,
            ring,
            to,
            ..
        } = raw(
            sizes(64, slots),
            RingShape::new(64, 4).unwrap(),
            &Fabric::new(1),
        );
        let mut polls = 0;
        let mut flood = || {
            polls += 1;
            assert!(polls < 1000, "the call does not return");
            let work = WriteWork {
                id: 0,
                payload: Payload::Inline(&[]),
                to,
                immediate: Some(0),
                signaled: true,
            };
            let _ = there.post_write(number, &work);
            fabric.run();
        };
        let mut verbs = BadAdapter::polling(&mut here, |inner, pair| {
            flood();
            inner.poll(pair)
        });
        pair.progress(&mut verbs);
        drop(verbs);
        assert_eq!(pair.broken(), Some(Break::Violation(Violation::Flood)));
        pair.release(&mut here);
        there.destroy(number);
        there.invalidate(ring);
        there.release(ring);
        assert!(fabric.is_empty());
    }
}

/// An address whose ring lies at the end of the address space.
#[test]
fn a_ring_that_the_address_space_does_not_hold_is_refused() {
    let fabric = Fabric::new(1);
    let mut here = fabric.adapter(0);
    let shape = RingShape::new(4096, 4).unwrap();
    for addr in [u64::MAX, u64::MAX - 4094] {
        let half = HalfPair::open(&mut here, sizes(64, 4)).unwrap();
        let mut peer = half.address();
        (peer.shape, peer.ring.addr) = (shape, addr);
        assert_eq!(PairAddress::decode(&peer.encode()), None);
        // Nor is it of use where it was not decoded.
        assert!(half.connect(&mut here, &peer).is_err());
        assert!(fabric.is_empty());
    }
    let half = HalfPair::open(&mut here, sizes(64, 4)).unwrap();
    let mut peer = half.address();
    (peer.shape, peer.ring.addr) = (shape, u64::MAX - 4095);
    assert_eq!(PairAddress::decode(&peer.encode()), Some(peer));
    half.abandon(&mut here);
}

/// Each call in turn is refused, once or from then on. Nothing is left behind, and each byte is counted once.
#[test]
fn adapters_that_refuse_a_call_leave_nothing_behind() {
    for (often, inline, message) in [(1, 8, 64), (1000, 8, 64), (1, 0, 5), (1, 300, 7)] {
        let sizes = PairSizes {
            inline,
            message,
            ..sizes(64, 4)
        };
        let mut opened = 0;
        for first in 1..120 {
            let fabric = Fabric::new(1);
            let (mut a, mut there) = (fabric.adapter(0), fabric.adapter(1));
            let mut here = BadAdapter::refusing(&mut a, first..first + often);
            let far = HalfPair::open(&mut there, sizes).unwrap();
            let Ok(near) = HalfPair::open(&mut here, sizes) else {
                far.abandon(&mut there);
                assert!(fabric.is_empty(), "{first}");
                continue;
            };
            let to = near.address();
            let Ok(mut near) = near.connect(&mut here, &far.address()) else {
                far.abandon(&mut there);
                assert!(fabric.is_empty(), "{first}");
                continue;
            };
            opened += 1;
            let mut far = far.connect(&mut there, &to).unwrap();
            let (mut sent, mut read) = ([0u64; 2], [0u64; 2]);
            for round in 0..60u64 {
                let data: Vec<u8> = (sent[0]..sent[0] + 1 + round % 20)
                    .map(|n| n as u8)
                    .collect();
                let (first_piece, rest) = data.split_at(data.len() / 3);
                let slices = [first_piece, &[], &rest[..1], &rest[1..]].map(IoSlice::new);
                let mut pieces = Pieces::new(&slices);
                let taken = near.send_pieces(&mut here, &mut pieces).unwrap_or(0);
                assert_eq!(pieces.left(), data.len() - taken);
                sent[0] += taken as u64;
                let data: Vec<u8> = (sent[1]..sent[1] + 1 + round % 30)
                    .map(|n| n as u8)
                    .collect();
                if let Ok(n) = far.send(&mut there, &data) {
                    sent[1] += n as u64;
                }
                fabric.run();
                let mut into = [0; 40];
                let got = [
                    far.recv(&mut there, &mut into).unwrap_or(0),
                    near.recv(&mut here, &mut [0; 40]).unwrap_or(0),
                ];
                for byte in &into[..got[0]] {
                    assert_eq!(*byte, read[0] as u8);
                    read[0] += 1;
                }
                read[1] += got[1] as u64;
                if round % 7 == 0 {
                    near.tell_count(&mut here);
                    near.ping(&mut here);
                    near.arm(&mut here);
                }
                assert_eq!(near.sent(), sent[0]);
                assert!(far.received() <= sent[0] && near.received() <= sent[1]);
            }
            let refused = here.calls >= first;
            assert_eq!(near.broken().is_some(), refused, "{first}");
            let received = near.suspend(&mut here);
            while let Ok(n) = near.recv(&mut here, &mut [0; 7]) {
                read[1] += n as u64;
            }
            assert_eq!(received, read[1], "{first}");
            near.release(&mut here);
            far.release(&mut there);
            assert!(fabric.is_empty(), "{first}");
        }
        assert!(opened > 100);
    }
}

/// An adapter whose completions come out of order, twice, or not at all. What counts as received is always a beginning of what was sent.
#[test]
fn completions_in_any_order_never_count_wrong_bytes() {
    let rounds = if cfg!(debug_assertions) { 300 } else { 20_000 };
    let mut wrong = 0;
    for seed in 0..rounds {
        let mut random = fastrand::Rng::with_seed(seed);
        let fabric = Fabric::new(seed);
        let (mut here, mut there) = (fabric.adapter(0), fabric.adapter(1));
        let polls = shuffled(fastrand::Rng::with_seed(!seed));
        let mut here = BadAdapter::polling(&mut here, polls);
        let sizes = sizes(256, 8);
        let near = HalfPair::open(&mut here, sizes).unwrap();
        let far = HalfPair::open(&mut there, sizes).unwrap();
        let (a, b) = (near.address(), far.address());
        let mut near = near.connect(&mut here, &b).unwrap();
        let mut far = far.connect(&mut there, &a).unwrap();
        let (mut sent, mut read) = (0u64, 0u64);
        let mut sent_here = 0u64;
        for n in 0..100 {
            let data: Vec<u8> = (sent..sent + random.u64(1..30)).map(|n| n as u8).collect();
            sent += far.send(&mut there, &data).unwrap_or(0) as u64;
            sent_here += near.send(&mut here, &data).unwrap_or(0) as u64;
            fabric.run();
            if n == 90 {
                assert_eq!(near.suspend(&mut here), near.received());
            }
            let mut into = vec![0; random.usize(1..60)];
            let got = near.recv(&mut here, &mut into).unwrap_or(0);
            for byte in &into[..got] {
                assert_eq!(*byte, read as u8, "seed {seed}");
                read += 1;
            }
            let _ = far.recv(&mut there, &mut into);
            assert!(near.received() <= sent && far.received() <= sent_here);
            assert!(near.recorded_by_peer() <= far.received());
            assert!(far.recorded_by_peer() <= near.received());
        }
        wrong += u32::from(near.broken() == Some(Break::WrongCompletion));
        near.release(&mut here);
        far.release(&mut there);
        assert!(fabric.is_empty());
    }
    println!("{wrong} wrong");
    assert!(wrong > rounds as u32 / 2);
}

/// The smallest and the largest sizes, different at both ends, and streams that go around every counter.
#[test]
fn streams_go_around_all_counters_at_all_sizes() {
    let shapes = [(64, 4), (1 << 20, 4), (64, 1 << 15), (1 << 20, 1 << 15)];
    for (n, (ring, slots)) in shapes.into_iter().enumerate() {
        for (m, (other, others)) in shapes.into_iter().enumerate() {
            for tight in [false, true] {
                let fabric = Fabric::new(1);
                let mut random = fastrand::Rng::with_seed((n * 4 + m) as u64);
                let mut adapters = [fabric.adapter(0), fabric.adapter(1)];
                let sizes = [(ring, slots), (other, others)].map(|(ring, slots)| {
                    let tight = tight && ring * slots < 1 << 20;
                    PairSizes {
                        shape: RingShape::new(ring, slots).unwrap(),
                        depth: if tight { 1 } else { 40 },
                        staging: if tight { 1 } else { 100_003 },
                        inline: random.usize(0..300),
                        message: if tight { 1 } else { 70_001 },
                    }
                });
                // Twice around the counter of recorded bytes, where messages are large enough for that.
                let long = sizes.iter().all(|s| s.shape.ring() > 64) && !tight;
                let each = if long && !cfg!(debug_assertions) {
                    5 << 20
                } else {
                    1 << 13
                };
                let [a, b] =
                    [0, 1].map(|n: usize| HalfPair::open(&mut adapters[n], sizes[n]).unwrap());
                let (to_a, to_b) = (a.address(), b.address());
                let mut pairs = [
                    a.connect(&mut adapters[0], &to_b).unwrap(),
                    b.connect(&mut adapters[1], &to_a).unwrap(),
                ];
                let (mut sent, mut read) = ([0u64; 2], [0u64; 2]);
                // No more than fits, so that the test is fast.
                let most_at_once = (2 * ring.max(other)).min(70_000);
                let mut data = vec![0; 70_000];
                let mut idle = 0;
                while read != [each; 2] {
                    let before = (sent, read);
                    for s in [0, 1] {
                        let len = random.u64(1..most_at_once).min(each - sent[s]);
                        for (i, byte) in data[..len as usize].iter_mut().enumerate() {
                            *byte = ((sent[s] + i as u64) % 251) as u8;
                        }
                        match pairs[s].send(&mut adapters[s], &data[..len as usize]) {
                            Ok(n) => sent[s] += n as u64,
                            Err(e) => assert_eq!(e, PairError::WouldBlock),
                        }
                        fabric.run();
                        let most = random.usize(1..most_at_once as usize);
                        match pairs[1 - s].recv(&mut adapters[1 - s], &mut data[..most]) {
                            Ok(n) => {
                                for byte in &data[..n] {
                                    assert_eq!(*byte, (read[s] % 251) as u8);
                                    read[s] += 1;
                                }
                            }
                            Err(e) => assert_eq!(e, PairError::WouldBlock),
                        }
                    }
                    idle = if before == (sent, read) { idle + 1 } else { 0 };
                    assert!(idle < 10, "nobody can move: {sizes:?} {sent:?} {read:?}");
                }
                // Once everything is told, no message goes back and forth.
                for _ in 0..8 {
                    for s in [0, 1] {
                        pairs[s].progress(&mut adapters[s]);
                        pairs[s].tell_count(&mut adapters[s]);
                    }
                    fabric.run();
                }
                let placed = fabric.tallies().placed;
                for _ in 0..8 {
                    for s in [0, 1] {
                        assert!(!pairs[s].progress(&mut adapters[s]));
                    }
                    fabric.run();
                }
                assert_eq!(fabric.tallies().placed, placed);
                assert_eq!(fabric.tallies().not_ready, 0);
                for s in [0, 1] {
                    assert_eq!(pairs[s].recorded_by_peer(), each, "{sizes:?}");
                }
            }
        }
    }
}

/// A message has no more bytes than this side's sizes say, and a count is no reason to take the last slot.
#[test]
fn messages_are_no_larger_than_wanted_and_leave_the_last_slot() {
    let ours = PairSizes {
        message: 10,
        ..sizes(64, 4)
    };
    let mut raw = raw(ours, RingShape::new(64, 4).unwrap(), &Fabric::new(1));
    assert_eq!(raw.pair.send(&mut raw.here, &[1; 25]), Ok(25));
    raw.fabric.run();
    let mut received = Vec::new();
    let mut poll = |there: &mut MemoryAdapter, number| {
        while let Some(done) = there.poll(number) {
            if let Completed::Received { len, .. } = done.how {
                received.push(len);
            }
        }
        received.clone()
    };
    assert_eq!(poll(&mut raw.there, raw.number), [10, 10, 5]);
    assert!(raw.write(0, &[7], Some(0)));
    raw.pair.progress(&mut raw.here);
    raw.pair.tell_count(&mut raw.here);
    raw.fabric.run();
    assert!(raw.pair.owes_count());
    assert_eq!(poll(&mut raw.there, raw.number), [10, 10, 5]);
    // Two slots are announced.
    assert!(raw.write(0, &[], Some(2 << 28 | 25)));
    raw.pair.progress(&mut raw.here);
    raw.fabric.run();
    poll(&mut raw.there, raw.number);
    raw.pair.tell_count(&mut raw.here);
    assert!(!raw.pair.owes_count());
    assert_eq!(raw.pair.recorded_by_peer(), 25);
    raw.release();
}

/// A port without link breaks the queue pair. An end that was recorded stays one.
#[test]
fn an_end_outlives_the_break() {
    for event in [None, Some(AdapterEvent::PortDown)] {
        let mut raw = raw(
            sizes(64, 4),
            RingShape::new(64, 4).unwrap(),
            &Fabric::new(1),
        );
        assert!(raw.write(0, &[7], Some(1 << 31)));
        raw.pair.progress(&mut raw.here);
        if let Some(event) = event {
            raw.pair.handle_event(event);
            assert_eq!(raw.pair.broken(), Some(Break::Event(event)));
        }
        raw.pair.suspend(&mut raw.here);
        assert_eq!(raw.pair.recv(&mut raw.here, &mut [0; 9]), Ok(1));
        assert_eq!(raw.pair.recv(&mut raw.here, &mut [0; 9]), Ok(0));
        raw.release();
    }
}
