//! A queue pair that carries a stream against a bare one of the same kind, in the same run. One thread drives both ends.

use std::{
    cell::RefCell,
    hint::black_box,
    time::{Duration, Instant},
};

use slim_rdma::{
    Access, Completed, PairError, PairSizes, Payload, QpNumber, QueuePair, RegionId, RemoteKey,
    RingShape, Verbs, WriteWork,
    ibverbs::{ProgramAccess, VerbsAdapter},
};

use super::{common::soak, connect, release, rivals::NOT_NOW, rxe};

/// Runs of each kind, one kind after the other; the median counts.
const RUNS: usize = 9;
const ROUND_TRIPS: u32 = 2000;
/// Bytes of one run.
pub(super) const TOTAL: usize = 32 << 20;

fn sizes() -> PairSizes {
    PairSizes {
        depth: DEPTH as u32,
        message: 64 << 10,
        ..super::sizes(1 << 20, 256)
    }
}

/// A queue pair without a protocol: writes with immediate data, into a region of the peer.
struct Bare {
    number: QpNumber,
    region: RegionId,
    peer: RemoteKey,
    /// Numbers of the next write and the next receive.
    next: [u64; 2],
    received: u64,
}

/// Bytes of the region of a bare queue pair.
const REGION: usize = 4 << 20;
const DEPTH: u64 = 64;

impl Bare {
    fn pair(adapters: &mut [VerbsAdapter; 2]) -> [Self; 2] {
        let mut made = adapters.each_mut().map(|adapter| {
            let region = adapter.register(REGION, Access::Remote).unwrap();
            let sizes = PairSizes {
                shape: RingShape::new(1 << 20, DEPTH).unwrap(),
                ..sizes()
            };
            let mut address = adapter.create(&sizes).unwrap().address;
            address.ring = adapter.remote_key(region);
            for id in 0..DEPTH {
                adapter.post_receive(address.number, id).unwrap();
            }
            (address, region)
        });
        let addresses = made.each_mut().map(|(address, _)| *address);
        [0, 1].map(|s| {
            let (own, peer) = (addresses[s], addresses[1 - s]);
            adapters[s].connect(own.number, &peer).unwrap();
            Bare {
                number: own.number,
                region: made[s].1,
                peer: peer.ring,
                next: [0, DEPTH],
                received: 0,
            }
        })
    }

    fn post(&mut self, adapter: &mut VerbsAdapter, payload: Payload<'_>, at: usize) {
        // A completion completes all writes before it. Fewer than half of the queue are on their way.
        let signaled = self.next[0].is_multiple_of(16);
        let RemoteKey { addr, key } = self.peer;
        let work = WriteWork {
            id: self.next[0],
            payload,
            to: RemoteKey {
                addr: addr + at as u64,
                key,
            },
            immediate: Some(0),
            signaled,
        };
        adapter.post_write(self.number, &work).unwrap();
        self.next[0] += 1;
    }

    /// Takes the completions that are there.
    fn progress(&mut self, adapter: &mut VerbsAdapter) {
        while let Some(done) = adapter.poll(self.number) {
            match done.how {
                Completed::Written | Completed::Read => {}
                Completed::Received { .. } => {
                    self.received += 1;
                    adapter.post_receive(self.number, self.next[1]).unwrap();
                    self.next[1] += 1;
                }
                Completed::Failed(why) => panic!("{why:?}"),
            }
        }
    }

    fn release(self, adapter: &mut VerbsAdapter) {
        adapter.destroy(self.number);
        adapter.invalidate(self.region);
        adapter.release(self.region);
    }
}

/// Half of a round trip of 8 bytes, of so many.
pub(super) fn bare_latency(adapters: &mut [VerbsAdapter; 2], round_trips: u32) -> Duration {
    let mut pairs = Bare::pair(adapters);
    let mut buf = [0; 8];
    let begin = Instant::now();
    for n in 1..=u64::from(round_trips) {
        for s in [0, 1] {
            let (from, to) = (s, 1 - s);
            pairs[from].post(&mut adapters[from], Payload::Inline(&[1; 8]), 0);
            while pairs[to].received < n {
                pairs[to].progress(&mut adapters[to]);
            }
            adapters[to].read(pairs[to].region, 0, &mut buf);
        }
    }
    let half = begin.elapsed() / round_trips / 2;
    release_bare(pairs, adapters);
    half
}

fn release_bare(pairs: [Bare; 2], adapters: &mut [VerbsAdapter; 2]) {
    for (pair, adapter) in pairs.into_iter().zip(adapters) {
        pair.release(adapter);
    }
}

fn latency(adapters: &mut [VerbsAdapter; 2]) -> Duration {
    let mut pairs = connect(adapters, [sizes(); 2]);
    let mut buf = [0; 8];
    let begin = Instant::now();
    for _ in 0..ROUND_TRIPS {
        for s in [0, 1] {
            let (from, to) = (s, 1 - s);
            assert_eq!(pairs[from].send(&mut adapters[from], &[1; 8]), Ok(8));
            receive(&mut pairs[to], &mut adapters[to], &mut buf);
        }
    }
    let half = begin.elapsed() / ROUND_TRIPS / 2;
    release(pairs, adapters);
    half
}

fn receive(pair: &mut QueuePair, adapter: &mut VerbsAdapter, buf: &mut [u8]) {
    let mut at = 0;
    while at < buf.len() {
        match pair.recv(adapter, &mut buf[at..]) {
            Ok(n) => at += n,
            Err(e) => assert_eq!(e, PairError::WouldBlock),
        }
    }
}

/// Time for [`TOTAL`] bytes in messages of `len`, several on their way. With `copies`, the bytes are copied into the region of the one side
/// and out of that of the other, as a stream must; without, they stay there.
pub(super) fn bare_stream(adapters: &mut [VerbsAdapter; 2], len: usize, copies: bool) -> Duration {
    let mut pairs = Bare::pair(adapters);
    let (data, mut buf) = (vec![1; len], vec![0; len]);
    let places = (REGION / len).min(16) as u64;
    let [here, there] = adapters;
    let [near, far] = &mut pairs;
    let all = (TOTAL / len) as u64;
    let begin = Instant::now();
    let mut read = 0;
    while read < all {
        near.progress(here);
        // A place is used again when the peer has read it.
        while near.next[0] < all && near.next[0] - read < places {
            let at = (near.next[0] % places) as usize * len;
            if copies {
                here.write(near.region, at, &data);
            }
            let region = near.region;
            near.post(here, Payload::Staged { region, at, len }, at);
        }
        far.progress(there);
        while read < far.received {
            if copies {
                there.read(far.region, (read % places) as usize * len, &mut buf);
            }
            read += 1;
        }
    }
    let took = begin.elapsed();
    release_bare(pairs, adapters);
    took
}

fn stream(adapters: &mut [VerbsAdapter; 2], len: usize) -> Duration {
    let mut pairs = connect(adapters, [sizes(); 2]);
    let (data, mut buf) = (vec![1; len], vec![0; len]);
    let (mut sent, mut read) = (0, 0);
    let begin = Instant::now();
    while read < TOTAL {
        for s in [0, 1] {
            let moved = match s {
                0 if sent < TOTAL => {
                    let from = sent % len;
                    let moved = pairs[0].send(&mut adapters[0], &data[from..]);
                    sent += moved.unwrap_or(0);
                    moved
                }
                0 => continue,
                _ => {
                    let moved = pairs[1].recv(&mut adapters[1], &mut buf);
                    read += moved.unwrap_or(0);
                    moved
                }
            };
            assert!(matches!(moved, Ok(_) | Err(PairError::WouldBlock)));
        }
    }
    let took = begin.elapsed();
    release(pairs, adapters);
    took
}

/// A name, and a way to measure.
pub(super) type Kind<'a> = (&'a str, &'a dyn Fn(&mut [VerbsAdapter; 2]) -> Duration);

/// Times of these kinds, which take turns, each from the shortest to the longest.
pub(super) fn measure<const N: usize>(
    adapters: &mut [VerbsAdapter; 2],
    kinds: [Kind<'_>; N],
) -> [Vec<Duration>; N] {
    let mut all = [const { Vec::new() }; N];
    for _ in 0..RUNS {
        for ((_, run), times) in kinds.iter().zip(&mut all) {
            times.push(run(adapters));
        }
    }
    for ((name, _), times) in kinds.iter().zip(&mut all) {
        times.sort();
        let (median, last) = (times[RUNS / 2], times[RUNS - 1]);
        println!(
            "  {name}: {median:.1?} ({:.1?} to {last:.1?}){}",
            times[0],
            rate(median)
        );
    }
    all
}

/// The rate, if it is the time of a stream.
fn rate(took: Duration) -> String {
    match took > Duration::from_millis(5) {
        true => format!(", {:.0} MB/s", TOTAL as f64 / took.as_secs_f64() / 1e6),
        false => String::new(),
    }
}

/// Prints the ratio of the medians. Other work of this machine makes runs longer, never shorter. So the shortest ones are compared, and the
/// limit is against one message too many for each one that is needed, or one wait.
pub(super) fn compare(name: &str, ours: &[Duration], bare: &[Duration]) {
    let ratio = |n: usize| ours[n].as_secs_f64() / bare[n].as_secs_f64();
    let (median, shortest) = (ratio(RUNS / 2), ratio(0));
    println!("  {name} takes {median:.3} times as long (the shortest run: {shortest:.3})");
    assert!(shortest < 1.5, "{ours:?} {bare:?}");
}

/// It copies the bytes twice, as a stream must; but it sends no more messages, and does not wait.
#[test]
fn a_stream_is_as_fast_as_bare_writes() {
    let Some(rxe) = rxe("speed::a_stream_is_as_fast_as_bare_writes") else {
        return;
    };
    let mut adapters = rxe.open();
    println!("half a round trip of 8 bytes:");
    let kinds: [Kind<'_>; 2] = [
        ("bare", &|a| bare_latency(a, ROUND_TRIPS)),
        ("slim-rdma", &latency),
    ];
    let [bare, ours] = measure(&mut adapters, kinds);
    compare("slim-rdma", &ours, &bare);
    for len in [64 << 10, 1 << 20] {
        println!("{} MiB in pieces of {} KiB:", TOTAL >> 20, len >> 10);
        let kinds: [Kind<'_>; 3] = [
            ("bare, no copy", &|a| bare_stream(a, len, false)),
            ("bare, two copies", &|a| bare_stream(a, len, true)),
            ("slim-rdma", &|a| stream(a, len)),
        ];
        let [_, bare, ours] = measure(&mut adapters, kinds);
        compare("slim-rdma", &ours, &bare);
    }
}

/// Time to register [`TOTAL`] bytes in buffers of `len`, one after the other.
fn registrations(adapters: &[VerbsAdapter; 2], len: usize, all: &mut [u8]) -> Duration {
    let port = adapters[0].program_port();
    let begin = Instant::now();
    for buffer in all.chunks_mut(len) {
        // SAFETY: the buffer outlives the registration, and nothing is read into it.
        let memory = unsafe { port.register(buffer.as_mut_ptr(), len, ProgramAccess::Readable) };
        black_box(memory.unwrap());
    }
    begin.elapsed()
}

/// Time to copy them into a ring, as a send does.
fn copies(all: &[u8]) -> Duration {
    let mut ring = vec![0; 256 << 10];
    let begin = Instant::now();
    for piece in all.chunks(ring.len()) {
        ring.copy_from_slice(piece);
        black_box(&mut ring);
    }
    begin.elapsed()
}

/// A send without a copy would register its buffer. A registration that outlives the send is not safe: nothing tells when the buffer's memory goes
/// (docs/VERBS.md, "Posted sends").
#[test]
fn registering_a_buffer_against_copying_it() {
    if !soak() {
        println!("{NOT_NOW}");
        return;
    }
    let Some(rxe) = rxe("speed::registering_a_buffer_against_copying_it") else {
        return;
    };
    let mut adapters = rxe.open();
    let all = RefCell::new(vec![1; TOTAL]);
    for len in [64 << 10, 256 << 10, 1 << 20, 4 << 20] {
        println!("{} MiB in buffers of {} KiB:", TOTAL >> 20, len >> 10);
        let kinds: [Kind<'_>; 2] = [
            ("registered", &|a| {
                registrations(a, len, &mut all.borrow_mut())
            }),
            ("copied", &|_| copies(&all.borrow())),
        ];
        let [registered, copied] = measure(&mut adapters, kinds);
        let ratio = registered[RUNS / 2].as_secs_f64() / copied[RUNS / 2].as_secs_f64();
        println!("  a registration takes {ratio:.1} times as long as a copy");
    }
}
