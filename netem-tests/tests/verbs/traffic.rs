//! Streams in both directions of a flow while something happens: every byte is checked, and when it came.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use slim::{Flow, TransferError};

use super::{
    streams::bytes,
    two_sessions::{LIMIT, by_pair},
};

/// Between two pieces, so that the processor is not busy all the time and times mean something.
const PAUSE: Duration = Duration::from_millis(1);

/// Bytes that a receive call has returned.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    pub at: Instant,
    /// Whether the flow was on a queue pair then, or had been when it was suspended.
    pub by_pair: bool,
}

/// What has arrived, and the error that has ended it.
pub struct Arrivals {
    pub all: Vec<Arrival>,
    pub bytes: u64,
    pub error: Option<TransferError>,
}

/// Sends the stream of a side until `over`, and ends its direction. Returns how many bytes it was.
pub fn send_until(flow: &Flow, side: usize, over: &AtomicBool) -> Result<u64, TransferError> {
    let mut random = fastrand::Rng::with_seed(side as u64);
    let mut sent = 0;
    while !over.load(Ordering::Relaxed) {
        let piece = bytes(side, sent, random.usize(1..4000));
        flow.send_all(&piece, LIMIT)?;
        sent += piece.len() as u64;
        thread::sleep(PAUSE);
    }
    flow.finish()?;
    Ok(sent)
}

/// Receives the stream of the other side, to its end or an error.
pub fn receive(flow: &Flow, side: usize) -> Arrivals {
    let mut got = Arrivals {
        all: Vec::new(),
        bytes: 0,
        error: None,
    };
    let mut buf = vec![0; 16 << 10];
    loop {
        match flow.recv(&mut buf, LIMIT) {
            Ok(0) => return got,
            Ok(n) => {
                let right = buf[..n] == bytes(1 - side, got.bytes, n);
                assert!(right, "wrong bytes at side {side}, from {}", got.bytes);
                got.bytes += n as u64;
                let before = got.all.last().is_some_and(|last| last.by_pair);
                got.all.push(Arrival {
                    at: Instant::now(),
                    by_pair: by_pair(flow).unwrap_or(before),
                });
            }
            Err(e) => {
                got.error = Some(e);
                return got;
            }
        }
    }
}

/// Sets a flag at the end, also after a panic.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Streams both ways while `f` runs, and then to an orderly end. All bytes must come.
pub fn while_streaming<R>(flows: [&Flow; 2], f: impl FnOnce() -> R) -> (R, [Vec<Arrival>; 2]) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        let of_side = [0, 1].map(|side| {
            let send = scope.spawn(move || send_until(flows[side], side, over));
            (send, scope.spawn(move || receive(flows[side], side)))
        });
        let ends = SetAtEnd(over);
        let r = f();
        drop(ends);
        let [near, far] = of_side.map(|(send, receive)| {
            let sent = send.join().expect("the sender");
            (sent, receive.join().expect("the receiver"))
        });
        assert_eq!((near.1.error, far.1.error), (None, None));
        assert_eq!((near.0, far.0), (Ok(far.1.bytes), Ok(near.1.bytes)));
        (r, [near.1.all, far.1.all])
    })
}
