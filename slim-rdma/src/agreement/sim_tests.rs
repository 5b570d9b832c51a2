//! Agreements while datagrams are lost, late, doubled and forged: seeded schedules.
//!
//! `SLIM_SIM_SEEDS` is the number of schedules, `SLIM_SIM_FIRST` the first one; `SLIM_SIM_SEED` repeats one.

mod world;

use std::time::Instant;

use super::mistakes::Mistake;
use world::{Stats, World};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text}: not a whole number")))
}

#[test]
fn both_sides_agree_or_nothing_is_left() {
    if let Some(seed) = number("SLIM_SIM_SEED") {
        let (outcome, stats) = World::new(seed, None).run();
        println!("seed {seed}: {outcome:?}, {stats:?}");
        return outcome.unwrap();
    }
    let seeds =
        number("SLIM_SIM_SEEDS").unwrap_or(if cfg!(debug_assertions) { 300 } else { 3_000 });
    let first = number("SLIM_SIM_FIRST").unwrap_or(0);
    let (begun, mut total) = (Instant::now(), Stats::default());
    for seed in first..first + seeds {
        let (outcome, stats) = World::new(seed, None).run();
        total.add(stats);
        if let Err(problem) = outcome {
            panic!("{problem}\nrun it again with SLIM_SIM_SEED={seed}");
        }
    }
    println!("{seeds} seeds in {:.1?}: {total:?}", begun.elapsed());
    // A simulation in which nothing happens finds nothing.
    let often = [
        total.connected,
        total.accepted,
        total.timed_out,
        total.cancelled,
        total.lost,
        total.doubled,
        total.forged,
        total.made,
    ];
    assert!(often.iter().all(|n| *n > seeds / 2), "{total:?}");
    let seldom = [
        total.refused,
        total.expired,
        total.one_sided,
        total.late,
        total.full,
    ];
    assert!(seldom.iter().all(|n| *n > seeds / 50), "{total:?}");
}

fn is_found(mistake: Mistake, sign: &str) {
    let found = (0..50_000).find_map(|seed| {
        let problem = World::new(seed, Some(mistake)).run().0.err()?;
        problem.contains(sign).then_some((seed, problem))
    });
    let (seed, problem) = found.unwrap_or_else(|| panic!("{mistake:?} was not noticed"));
    println!("{mistake:?}: seed {seed}: {problem}");
}

#[test]
fn queue_pairs_without_a_cookie_are_noticed() {
    is_found(Mistake::NoCookies, "that nobody has asked for");
}

#[test]
fn cookies_of_somebody_else_are_noticed() {
    is_found(Mistake::AnybodysCookies, "that nobody has asked for");
}

#[test]
fn old_cookies_are_noticed() {
    is_found(Mistake::OldCookies, "second queue pair");
}

#[test]
fn a_second_queue_pair_for_a_repetition_is_noticed() {
    is_found(Mistake::ForgetLive, "second queue pair");
}

#[test]
fn a_queue_pair_after_the_end_is_noticed() {
    is_found(Mistake::ForgetEnded, "second queue pair");
}

#[test]
fn queue_pairs_that_never_end_are_noticed() {
    is_found(Mistake::NoExpiry, "is left");
}

#[test]
fn an_answer_for_another_attempt_is_noticed() {
    is_found(Mistake::AnyAttempt, "no queue pair was made");
}

#[test]
fn a_queue_pair_of_a_failed_attempt_that_stays_is_noticed() {
    is_found(Mistake::KeepHalf, "is left");
}
