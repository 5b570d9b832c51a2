//! Two programs make random calls on connections that break at random points: `tests/c/random_breaks.c`. Needs root.
//!
//! `SLIM_BREAKS` is the number of rounds, `SLIM_BREAKS_SEED` the first seed. A failure is printed with its seed. Where a call
//! meets a break is up to the kernel, so it may take several runs of a seed to see the failure again.

mod common;

use common::{NEGOTIATED_MS, Program, compile, own_network, pair_started};
use std::time::Duration;

/// How many pairs of programs run at a time, each in its own network namespace.
const PAIRS: u32 = 3;

/// Runs these seeds. Each entry is the first seed, the number of seeds, and how often to run each of them.
fn play(test: &str, breaks: bool, all: &[[u32; 3]]) {
    let binary = compile("random_breaks", &[]);
    let mut running = Vec::new();
    for [first, seeds, times] in all {
        if !own_network(test) {
            return;
        }
        let one = || {
            Program::new(&binary)
                .env(
                    "T_ARGS",
                    format!("{first} {seeds} {} {times}", u8::from(breaks)),
                )
                .env("T_OWN_NETWORK", "1")
                .preloaded(breaks)
                .negotiation_ms(if breaks { NEGOTIATED_MS } else { 0 })
        };
        running.push((first, pair_started(one(), one())));
    }
    let mut bad = String::new();
    for (first, (server, client)) in running {
        let limit = Duration::from_secs(3600);
        for outcome in [server, client].map(|one| one.finish_within(limit)) {
            if !outcome.ok() {
                bad += &format!("seeds from {first}:\n{}", outcome.transcript());
            }
        }
    }
    assert!(bad.is_empty(), "{bad}");
}

fn variable(name: &str, default: u32) -> u32 {
    let given = std::env::var(name).ok().and_then(|n| n.parse().ok());
    given.unwrap_or(default)
}

#[test]
fn random_calls_on_connections_that_break() {
    let rounds = variable("SLIM_BREAKS", 360).div_ceil(PAIRS);
    let first = variable("SLIM_BREAKS_SEED", 1);
    println!("seeds {first} to {}", first + rounds * PAIRS - 1);
    let all: Vec<_> = (0..PAIRS)
        .map(|i| [first + i * rounds, rounds, 1])
        .collect();
    play("random_calls_on_connections_that_break", true, &all);
}

/// Seeds that once failed: the earlier ones in one of three to eight runs, the rare one in one of some hundred, the others in each run.
#[test]
fn random_calls_that_went_wrong() {
    // The meaning of an end of the stream was decided while a call met an error behind it; a closed number stayed registered.
    let earlier = [[1147, 1, 50], [41328, 1, 30]];
    // A number was registered with epoll for a plain descriptor, and then given to a suspended connection. Failed each time.
    let once = [[1131141, 1, 1], [5951229, 1, 1]];
    // A connection became plain TCP while an EPOLLONESHOT event of it was kept back.
    let rare = [[219, 1, 60]];
    let all = [&earlier[..], &once, &rare].concat();
    play("random_calls_that_went_wrong", true, &all);
}

/// The programs find nothing wrong in a bare run without breaks.
#[test]
fn random_calls_without_slim() {
    play("random_calls_without_slim", false, &[[1, 300, 1]]);
}
