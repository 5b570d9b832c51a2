//! Measures the cost of keeping a sent buffer in the replay buffer, as a copy or as a shared buffer: nanoseconds per send, including
//! the send's share of a trim after every eight sends.
//!
//! usage: `cargo run --release -p slim-core --example kept`

use std::hint::black_box;
use std::time::{Duration, Instant};

use bytes::Bytes;
use slim_core::replay::Replay;

/// Nanoseconds per send: the median of 15 rounds.
fn measure(keep: impl Fn(&mut Replay, &Bytes), size: usize) -> f64 {
    const SENDS: u32 = 20_000;
    const BATCH: u32 = 8;
    // Several buffers in turn, as in a program that sends them; large ones do not all fit into the cache.
    let buffers: Vec<Bytes> = (0..64).map(|n| Bytes::from(vec![n; size])).collect();
    let mut rounds: Vec<Duration> = Vec::new();
    for _ in 0..15 {
        let mut replay = Replay::new();
        let begun = Instant::now();
        for n in 0..SENDS {
            keep(&mut replay, &buffers[n as usize % buffers.len()]);
            if n % BATCH == BATCH - 1 {
                replay.trim(replay.end());
            }
        }
        rounds.push(begun.elapsed());
        black_box(replay.end());
    }
    rounds.sort();
    rounds[rounds.len() / 2].as_nanos() as f64 / f64::from(SENDS)
}

fn main() {
    println!("{:>8} {:>10} {:>10}", "bytes", "copied", "shared");
    for size in [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536] {
        let copied = measure(|replay, buffer| replay.push(buffer), size);
        let shared = measure(|replay, buffer| replay.push_shared(buffer.clone()), size);
        println!("{size:>8} {copied:>8.1}ns {shared:>8.1}ns");
    }
}
