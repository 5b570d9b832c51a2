//! Flows that go from one queue pair to the next, or to a pipe and back, while everything breaks: seeded schedules.
//!
//! `SLIM_SIM_SEEDS` is the number of schedules, `SLIM_SIM_FIRST` the first one; `SLIM_SIM_SEED` repeats one.

#[path = "sim/carrier.rs"]
mod carrier;
#[path = "../../slim-core/tests/sim/number.rs"]
mod number;
#[path = "sim/pipe.rs"]
mod pipe;
#[path = "sim/resume.rs"]
mod resume;
#[path = "sim/world.rs"]
mod world;

use std::time::Instant;

use number::number;
use world::{Mutation, Stats, World};

#[test]
fn every_schedule_is_byte_exact_and_ends() {
    if let Some(seed) = number("SLIM_SIM_SEED") {
        let mut world = World::new(seed, None);
        let outcome = world.run();
        println!("seed {seed}: {outcome:?}, {:?}", world.stats());
        return outcome.unwrap();
    }
    let seeds =
        number("SLIM_SIM_SEEDS").unwrap_or(if cfg!(debug_assertions) { 500 } else { 5_000 });
    let first = number("SLIM_SIM_FIRST").unwrap_or(0);
    let (begun, mut total) = (Instant::now(), Stats::default());
    for seed in first..first + seeds {
        let mut world = World::new(seed, None);
        let outcome = world.run();
        total.add(world.stats());
        if let Err(problem) = outcome {
            panic!("{problem}\nrun it again with SLIM_SIM_SEED={seed}");
        }
    }
    println!("{seeds} seeds in {:.1?}: {total:?}", begun.elapsed());
    // A simulation in which nothing happens finds nothing.
    let often = [
        total.resumes,
        total.to_pair,
        total.from_pair_to_pair,
        total.to_pipe,
        total.failed,
        total.parts,
    ];
    assert!(often.iter().all(|n| *n > seeds / 4), "{total:?}");
    let seldom = [
        total.lost_completions,
        total.fenced,
        total.late,
        total.strayed,
        total.unknown_to_one,
        total.ended,
        total.replayed,
    ];
    assert!(seldom.iter().all(|n| *n > seeds / 20), "{total:?}");
}

fn is_found(mutation: Mutation) {
    let found = (0..50_000).find_map(|seed| {
        let problem = World::new(seed, Some(mutation)).run().err()?;
        // Only wrong or missing bytes count.
        let loss = problem.contains("byte");
        loss.then_some((seed, problem))
    });
    let (seed, problem) = found.unwrap_or_else(|| panic!("{mutation:?} was not noticed"));
    println!("{mutation:?}: seed {seed}: {problem}");
}

#[test]
fn trimming_what_only_the_adapters_have_is_noticed() {
    is_found(Mutation::TrimPosted);
}

#[test]
fn a_count_that_is_told_before_the_suspension_is_noticed() {
    is_found(Mutation::CountEarly);
}

#[test]
fn regions_that_stay_valid_are_noticed() {
    is_found(Mutation::KeepKeys);
}

#[test]
fn replaying_from_where_the_adapter_stopped_is_noticed() {
    is_found(Mutation::ReplayFromKnown);
}
