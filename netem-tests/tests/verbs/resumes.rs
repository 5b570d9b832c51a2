//! Streams in both directions go from one queue pair to the next, at breaks of all kinds.

use std::time::{Duration, Instant};

use slim_rdma::{PairError, PairSizes, QueuePair, Verbs, ibverbs::VerbsAdapter};

use super::{Rxe, bytes, connect, release, rxe, sizes};

const BREAKS: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The queue pair of a side goes into its error state.
    Fail(usize),
    /// The process of a side is gone, as far as the other one can see.
    Destroy(usize),
    BlackHole,
    NoLink(usize),
}

/// Two streams, and the queue pairs that carry them now.
struct Flow {
    adapters: [VerbsAdapter; 2],
    pairs: Option<[QueuePair; 2]>,
    sizes: [PairSizes; 2],
    /// Position in the stream of each side at which its queue pair began.
    begins: [u64; 2],
    read: [u64; 2],
    random: fastrand::Rng,
}

impl Flow {
    /// One call, at random. Returns whether the queue pair of a side is known to be broken.
    fn step(&mut self) -> bool {
        let pairs = self.pairs.as_mut().expect("connected");
        let s = self.random.usize(0..2);
        let (pair, adapter) = (&mut pairs[s], &mut self.adapters[s]);
        match self.random.u32(0..10) {
            0..4 => {
                let data = bytes(s, self.begins[s] + pair.sent(), self.random.usize(1..5000));
                let _ = pair.send(adapter, &data);
            }
            4..8 => {
                let mut buf = vec![0; self.random.usize(1..5000)];
                if let Ok(n) = pair.recv(adapter, &mut buf) {
                    assert!(
                        buf[..n] == bytes(1 - s, self.read[s], n),
                        "at {}",
                        self.read[s]
                    );
                    self.read[s] += n as u64;
                }
            }
            8 => pair.tell_count(adapter),
            _ => pair.ping(adapter),
        }
        while let Some(event) = adapter.event() {
            pair.handle_event(event);
        }
        pair.broken().is_some()
    }

    fn apply(&mut self, rxe: &Rxe, fault: Fault) {
        let pairs = self.pairs.as_ref().expect("connected");
        match fault {
            Fault::Fail(s) => self.adapters[s].fail(pairs[s].number()),
            Fault::Destroy(s) => self.adapters[s].destroy(pairs[s].number()),
            Fault::BlackHole => rxe.line("loss 100%"),
            Fault::NoLink(s) => rxe.down(s),
        }
    }

    fn heal(&mut self, rxe: &Rxe, fault: Fault) {
        match fault {
            Fault::BlackHole => rxe.plain(),
            Fault::NoLink(s) => rxe.up(s),
            _ => {}
        }
        for adapter in &mut self.adapters {
            super::wait("address", super::DETECTION, || {
                adapter.is_up().then_some(())
            });
            while adapter.event().is_some() {}
        }
    }

    /// Both sides suspend, read what they have recorded, and go on with new queue pairs. Returns the bytes that had to be sent again.
    fn resume(&mut self) -> u64 {
        let mut pairs = self.pairs.take().expect("connected");
        let first = self.random.usize(0..2);
        let mut received = [0; 2];
        for s in [first, 1 - first] {
            received[s] = pairs[s].suspend(&mut self.adapters[s]);
            // The other side may send still.
            let data = bytes(1 - s, self.begins[1 - s] + pairs[1 - s].sent(), 100);
            let _ = pairs[1 - s].send(&mut self.adapters[1 - s], &data);
        }
        let mut again = 0;
        for s in [0, 1] {
            assert!(pairs[s].recorded_by_peer() <= received[1 - s]);
            assert!(received[1 - s] <= pairs[s].sent());
            again += pairs[s].sent() - received[1 - s];
            let mut buf = vec![0; 10_000];
            while let Ok(n) = pairs[s].recv(&mut self.adapters[s], &mut buf) {
                assert!(n > 0 && buf[..n] == bytes(1 - s, self.read[s], n));
                self.read[s] += n as u64;
            }
            assert_eq!(self.read[s], self.begins[1 - s] + received[s]);
        }
        for s in [0, 1] {
            self.begins[s] += received[1 - s];
        }
        release(pairs, &mut self.adapters);
        self.pairs = Some(connect(&mut self.adapters, self.sizes));
        again
    }
}

#[test]
fn nothing_is_lost_or_repeated_over_fifty_breaks() {
    let Some(rxe) = rxe("resumes::nothing_is_lost_or_repeated_over_fifty_breaks") else {
        return;
    };
    let seed = std::env::var("SLIM_LAB_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut adapters = rxe.open();
    let sizes = [sizes(1 << 14, 32), sizes(1 << 12, 16)];
    let mut flow = Flow {
        pairs: Some(connect(&mut adapters, sizes)),
        adapters,
        sizes,
        begins: [0; 2],
        read: [0; 2],
        random: fastrand::Rng::with_seed(seed),
    };
    let begin = Instant::now();
    let mut again = 0;
    for n in 0..BREAKS {
        for _ in 0..flow.random.u32(1..400) {
            assert!(!flow.step(), "before break {n}: {:?}", flow.pairs);
        }
        let side = flow.random.usize(0..2);
        let fault = match n % 10 {
            0..4 => Fault::Fail(side),
            4..8 => Fault::Destroy(side),
            8 => Fault::BlackHole,
            _ => Fault::NoLink(side),
        };
        flow.apply(&rxe, fault);
        let noticed = Instant::now();
        while !flow.step() {
            let silent = noticed.elapsed();
            assert!(silent < Duration::from_secs(2), "{fault:?} is not noticed");
        }
        // Sometimes the other side learns of it by itself.
        for _ in 0..flow.random.u32(0..50) {
            flow.step();
        }
        let before = flow.random.bool();
        if before {
            flow.heal(&rxe, fault);
        }
        // Whoever is suspended must not depend on the line.
        if before || matches!(fault, Fault::Fail(_) | Fault::Destroy(_)) {
            again += flow.resume();
        } else {
            let pairs = flow.pairs.as_mut().expect("connected");
            for (pair, adapter) in pairs.iter_mut().zip(&mut flow.adapters) {
                pair.suspend(adapter);
            }
            flow.heal(&rxe, fault);
            again += flow.resume();
        }
    }
    // The rest arrives.
    let ends = [0, 1].map(|s| {
        let pairs = flow.pairs.as_ref().expect("connected");
        flow.begins[s] + pairs[s].sent()
    });
    let pairs = flow.pairs.as_mut().expect("connected");
    let mut buf = vec![0; 10_000];
    while flow.read != [ends[1], ends[0]] {
        for s in [0, 1] {
            match pairs[s].recv(&mut flow.adapters[s], &mut buf) {
                Ok(n) => {
                    assert!(buf[..n] == bytes(1 - s, flow.read[s], n));
                    flow.read[s] += n as u64;
                }
                Err(e) => assert_eq!(e, PairError::WouldBlock),
            }
        }
    }
    println!(
        "seed {seed}: {BREAKS} breaks in {:.1?}; {ends:?} bytes, {again} sent again",
        begin.elapsed()
    );
    let pairs = flow.pairs.take().expect("connected");
    release(pairs, &mut flow.adapters);
    assert!(again > 0 && ends[0] > 100_000 && ends[1] > 100_000);
}
