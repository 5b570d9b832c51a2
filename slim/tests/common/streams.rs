//! Streams whose bytes are all checked.

#![allow(dead_code, reason = "each test program uses only a part")]

use std::thread;
use std::time::Duration;

use slim::Flow;

/// Time limit of every wait; far longer than any should take.
const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

/// Sends so many bytes of a pattern.
pub fn send(flow: &Flow, seed: u64, len: usize) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut left = len;
    while left > 0 {
        let piece: Vec<u8> = (0..left.min(rng.usize(1..20_000)))
            .map(|_| rng.u8(..))
            .collect();
        flow.send_all(&piece, LIMIT).unwrap();
        left -= piece.len();
    }
}

/// Receives them, and calls `at` after each 100,000 bytes.
pub fn receive(flow: &Flow, seed: u64, len: usize, mut at: impl FnMut(usize)) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut left = len;
    let mut calls = 0;
    while left > 0 {
        let piece: Vec<u8> = (0..left.min(rng.usize(1..20_000)))
            .map(|_| rng.u8(..))
            .collect();
        let mut got = vec![0; piece.len()];
        flow.recv_exact(&mut got, LIMIT).unwrap();
        assert!(got == piece, "wrong bytes, {left} left");
        left -= piece.len();
        if (len - left) / 100_000 > calls {
            at(calls);
            calls += 1;
        }
    }
}

/// Both directions at once, one thread for each end of each; calls `at` after each 100,000 bytes.
pub fn exchange(near: &Flow, far: &Flow, len: usize, at: impl FnMut(usize) + Send) {
    thread::scope(|scope| {
        scope.spawn(|| send(near, 1, len));
        scope.spawn(|| receive(far, 1, len, at));
        scope.spawn(|| send(far, 2, len));
        scope.spawn(|| receive(near, 2, len, |_| ()));
    });
}
