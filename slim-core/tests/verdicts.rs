//! A simulation of verdicts: some processes, a flow between each two, and their witness, in a network that falls apart.
//!
//! Each seed is one schedule: links between two processes, and between a process and the witness, are cut and healed; connections are killed;
//! processes crash, or stand still for a while (SIGSTOP); datagrams are lost, doubled and delayed. Clocks run at different speeds. The real
//! `Endpoint` and `Witness` run in it.
//!
//! What must hold when everything has come to rest:
//!
//! * *Never two verdicts*: a process that goes on has given up a flow only to a process that is fenced, or dead.
//! * *Never none*: of two processes that cannot reach each other, at most one goes on.
//! * *Not without need*: no process is fenced if no outage was longer than the attempts.
//! * These hold without a witness, too, if only connections are cut, and messages pass.
//! * With a witness that both can reach, exactly one of two is lost; none, if the witness passes their bytes on.
//!
//! `SLIM_SIM_SEEDS` is the number of seeds to run, from `SLIM_SIM_FIRST` (0) on. `SLIM_SIM_SEED` runs one seed and prints what happens.

#[path = "sim/dice.rs"]
mod dice;
#[path = "sim/number.rs"]
mod number;
#[path = "verdicts/world.rs"]
mod world;

use dice::mix;
use number::number;
use world::{Mutation, Stats, World};

fn run(seed: u64, mutation: Option<Mutation>) -> (Stats, Result<(), String>) {
    let mut world = World::new(mix(seed), mutation);
    world.trace = mutation.is_none() && number("SLIM_SIM_SEED").is_some();
    let outcome = world.run();
    (world.stats, outcome)
}

#[test]
fn there_is_exactly_one_verdict() {
    if let Some(seed) = number("SLIM_SIM_SEED") {
        let (stats, outcome) = run(seed, None);
        println!("seed {seed}: {outcome:?}, {stats:?}");
        return outcome.unwrap();
    }
    let seeds = number("SLIM_SIM_SEEDS").unwrap_or(2_000);
    let first = number("SLIM_SIM_FIRST").unwrap_or(0);
    let part = |from: u64, to: u64| {
        let mut total = Stats::default();
        for seed in from..to {
            let (stats, outcome) = run(seed, None);
            total.add(&stats);
            if let Err(problem) = outcome {
                panic!("{problem}\nrun it again with SLIM_SIM_SEED={seed}");
            }
        }
        total
    };
    let (half, end) = (first + seeds / 2, first + seeds);
    let total = std::thread::scope(|scope| {
        let other = scope.spawn(|| part(half, end));
        let mut total = part(first, half);
        total.add(&other.join().expect("the other half has failed"));
        total
    });
    println!("{seeds} seeds: {total:?}");
    // A simulator in which nothing happens finds nothing.
    assert!(
        total.resumes > seeds / 2 && total.fenced > seeds / 4 && total.cut_off > seeds / 20,
        "{total:?}"
    );
    assert!(
        total.ties > seeds / 20
            && total.peer_lost > seeds / 4
            && total.healed > seeds / 20
            && total.crashes > seeds / 20
            && total.relayed > seeds / 20
            && total.came_back > seeds / 100,
        "{total:?}"
    );
}

fn is_found(mutation: Mutation) {
    let found = (0..20_000).find_map(|seed| Some((seed, run(seed, Some(mutation)).1.err()?)));
    let (seed, problem) = found.unwrap_or_else(|| panic!("{mutation:?} was not noticed"));
    println!("{mutation:?}: seed {seed}: {problem}");
}

#[test]
fn processes_without_a_witness_are_noticed() {
    is_found(Mutation::NoWitness);
}

#[test]
fn processes_that_break_no_ties_are_noticed() {
    is_found(Mutation::NoTieBreak);
}

#[test]
fn a_lost_process_that_goes_on_is_noticed() {
    is_found(Mutation::LostGoesOn);
}

#[test]
fn a_witness_that_forgets_is_noticed() {
    is_found(Mutation::WitnessForgets);
}

#[test]
fn a_witness_that_passes_nothing_on_is_noticed() {
    is_found(Mutation::NoRelay);
}
