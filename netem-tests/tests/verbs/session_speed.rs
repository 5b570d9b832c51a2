//! Flows of sessions over queue pairs of soft RoCE against bare queue pairs, and against flows over TCP on the same line, in the same run.
//!
//! One thread drives both ends, and polls: the guest has one processor, so two threads would measure how it switches between them. The agents' threads run when
//! something is due, as always.

use std::{
    cell::Cell,
    hint::black_box,
    time::{Duration, Instant},
};

use slim::{Endpoint, Flow, Session, SessionOptions, StreamState, TransferError};
use slim_verbs::VerbsPort;

use super::{
    rxe,
    sessions::round_trip,
    shell,
    speed::{Kind, TOTAL, bare_latency, bare_stream, compare, measure},
    two_sessions::{LIMIT, TwoSessions, of_port, wait_for},
};

/// So many that the first of them do not count much: a flow that was idle has each message reported for some milliseconds.
pub(super) const ROUND_TRIPS: u32 = 8000;

/// The ends of a flow.
pub(super) struct PolledEnds {
    pub(super) near: Flow,
    pub(super) far: Flow,
    /// Bytes of the pattern that were sent, over all measurements.
    at: Cell<usize>,
}

/// An end of the line. Packets between them go over it, also those of TCP.
const OVER_LINE: &str = "10.1.0.2:0";

/// A byte of the pattern, which has no period that a ring or a piece has.
fn byte(at: usize) -> u8 {
    (at % 251) as u8
}

/// What a call that never waits has moved.
fn moved(answer: Result<usize, TransferError>) -> usize {
    match answer {
        Ok(n) => n,
        Err(TransferError::WouldBlock) => 0,
        Err(e) => panic!("{e}"),
    }
}

impl PolledEnds {
    pub(super) fn new((near, far): (Flow, Flow)) -> Self {
        let at = Cell::new(0);
        PolledEnds { near, far, at }
    }

    /// Half of a round trip of 8 bytes.
    pub(super) fn latency(&self) -> Duration {
        let begin = Instant::now();
        for n in 0..u64::from(ROUND_TRIPS) {
            for (from, to) in [(&self.near, &self.far), (&self.far, &self.near)] {
                assert_eq!(from.try_send(&n.to_ne_bytes()), Ok(8));
                let (mut buf, mut at) = ([0; 8], 0);
                while at < buf.len() {
                    at += moved(to.try_recv(&mut buf[at..]));
                }
                assert_eq!(u64::from_ne_bytes(buf), n);
            }
        }
        begin.elapsed() / ROUND_TRIPS / 2
    }

    /// Time for [`TOTAL`] bytes in pieces of `len`. The bytes are looked at, but not all of them: that would take longer than all else.
    pub(super) fn stream(&self, len: usize) -> Duration {
        let start = self.at.get();
        // A piece begins with the byte that is due.
        let data: Vec<u8> = (0..len + 251).map(byte).collect();
        let mut buf = vec![0; len];
        let (mut sent, mut read) = (0, 0);
        let begin = Instant::now();
        while read < TOTAL {
            if sent < TOTAL {
                let from = (start + sent) % 251;
                let end = from + (len - sent % len);
                sent += moved(self.near.try_send(&data[from..end]));
            }
            let n = moved(self.far.try_recv(&mut buf));
            if n > 0 {
                let ends = [buf[0], buf[n - 1]];
                let right = [start + read, start + read + n - 1].map(byte);
                assert_eq!(ends, right, "wrong bytes behind {read}");
                read += n;
            }
        }
        let took = begin.elapsed();
        black_box(&buf);
        self.at.set(start + TOTAL);
        took
    }
}

/// A flow of two sessions over TCP, on the same line.
struct OverTcp {
    _sessions: [Session; 2],
    _endpoint: Endpoint,
    ends: PolledEnds,
}

impl OverTcp {
    fn open() -> Self {
        let sessions = [0, 1].map(|_| Session::open(SessionOptions::new("test")).unwrap());
        let endpoint = sessions[1].listen(OVER_LINE.parse().unwrap()).unwrap();
        let near = sessions[0].connect(endpoint.local_addr(), LIMIT).unwrap();
        let far = endpoint.accept(LIMIT).unwrap();
        for flow in [&near, &far] {
            assert_eq!(flow.wait_negotiated(LIMIT), StreamState::Protected);
        }
        OverTcp {
            _sessions: sessions,
            _endpoint: endpoint,
            ends: PolledEnds::new((near, far)),
        }
    }
}

/// They copy the bytes once more than a bare stream with copies, for the case that the queue pair breaks; but they send no more messages, and do not wait.
#[test]
fn flows_of_sessions_are_as_fast_as_bare_writes() {
    let test = "session_speed::flows_of_sessions_are_as_fast_as_bare_writes";
    let Some(rxe) = rxe(test) else {
        return;
    };
    shell("ip link set lo up");
    let mut adapters = rxe.open();
    let ports = adapters
        .each_ref()
        .map(|adapter| VerbsPort::new(adapter.clone()).unwrap());
    let two = TwoSessions::open(ports.map(of_port));
    let verbs = PolledEnds::new(two.pair());
    let tcp = OverTcp::open();
    println!("half a round trip of 8 bytes:");
    let kinds: [Kind<'_>; 3] = [
        ("bare", &|a| bare_latency(a, ROUND_TRIPS)),
        ("slim over verbs", &|_| verbs.latency()),
        ("slim over TCP", &|_| tcp.ends.latency()),
    ];
    let [bare, ours, _] = measure(&mut adapters, kinds);
    compare("slim", &ours, &bare);
    for len in [64 << 10, 1 << 20] {
        println!("{} MiB in pieces of {} KiB:", TOTAL >> 20, len >> 10);
        let kinds: [Kind<'_>; 4] = [
            ("bare, no copy", &|a| bare_stream(a, len, false)),
            ("bare, two copies", &|a| bare_stream(a, len, true)),
            ("slim over verbs", &|_| verbs.stream(len)),
            ("slim over TCP", &|_| tcp.ends.stream(len)),
        ];
        let [_, bare, ours, _] = measure(&mut adapters, kinds);
        compare("slim", &ours, &bare);
    }
    println!("a round trip of 8 bytes between threads that sleep:");
    let kinds: [Kind<'_>; 2] = [
        ("slim over verbs", &|_| round_trip(&verbs.near, &verbs.far)),
        ("slim over TCP", &|_| {
            round_trip(&tcp.ends.near, &tcp.ends.far)
        }),
    ];
    let [verbs_times, tcp_times] = measure(&mut adapters, kinds);
    let ratio = verbs_times[0].as_secs_f64() / tcp_times[0].as_secs_f64();
    println!("  over verbs it takes {ratio:.3} times as long as over TCP");
    assert!(verbs.near.connection().is_none() && verbs.far.connection().is_none());
    wait_for(&verbs.near, &verbs.far, true);
}
