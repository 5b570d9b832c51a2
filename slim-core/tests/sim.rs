//! A simulation of two processes, byte for byte, with faults of all kinds.
//!
//! Each seed is one schedule: applications that write, read, half-close and close at random; a
//! network that loses, doubles and delays datagrams and cuts paths; connections that are killed at
//! either end, or ended by a third party, also while a resume is under way; processes that crash.
//! Some tests give the processes a second kind of transport beside TCP (one of them through a witness), and the networks of either kind
//! may fail for longer than all attempts take. In one, flows live for minutes, and the kind that they prefer comes and goes. The real `Endpoint`, `Replay` and `Stash` run in it.
//!
//! What must hold, in every schedule:
//!
//! * the bytes that an application has read are a prefix of those that the other one wrote;
//! * an end of stream comes where the other application ended the stream, nowhere else;
//! * no flow hangs once the network works again, and without a crash no flow is escalated;
//! * messages of an attacker who cannot read the traffic make no connection plain TCP;
//! * after some minutes no state of ended flows is left.
//!
//! `SLIM_SIM_SEEDS` is the number of seeds to run, from `SLIM_SIM_FIRST` (0) on. `SLIM_SIM_SEED` runs one seed and prints what
//! happens.

#[path = "sim/app.rs"]
mod app;
#[path = "sim/dice.rs"]
mod dice;
#[path = "sim/event.rs"]
mod event;
#[path = "sim/failback.rs"]
mod failback;
#[path = "sim/front.rs"]
mod front;
#[path = "sim/harm.rs"]
mod harm;
#[path = "sim/kinds.rs"]
mod kinds;
#[path = "sim/net.rs"]
mod net;
#[path = "sim/node.rs"]
mod node;
#[path = "sim/number.rs"]
mod number;
#[path = "sim/offset.rs"]
mod offset;
#[path = "sim/outage.rs"]
mod outage;
#[path = "sim/stats.rs"]
mod stats;
#[path = "sim/tcp.rs"]
mod tcp;
#[path = "sim/world.rs"]
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use dice::mix;
use kinds::Kinds;
use number::number;
use outage::Course;
use stats::Stats;
use world::{Mutation, World};

fn run(seed: u64, mutation: Option<Mutation>, kinds: Kinds) -> (Stats, Result<(), String>) {
    run_world(|| World::new(seed, mutation, kinds))
}

fn run_world(world: impl FnOnce() -> World) -> (Stats, Result<(), String>) {
    run_world_by(world, World::run)
}

fn run_world_by(
    world: impl FnOnce() -> World,
    run: impl FnOnce(&mut World) -> Result<(), String>,
) -> (Stats, Result<(), String>) {
    let mut stats = Stats::default();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut world = world();
        world.trace = world.mutation.is_none() && number("SLIM_SIM_SEED").is_some();
        let outcome = run(&mut world);
        stats = world.stats;
        outcome
    }));
    let outcome = outcome.unwrap_or_else(|_| Err("panic".to_owned()));
    (stats, outcome)
}

/// Runs all seeds, and returns their number and what they contained; or runs the one that `SLIM_SIM_SEED` names.
fn run_all(kinds: impl Fn(u64) -> Kinds) -> Option<(u64, Stats)> {
    run_worlds(1, |seed| World::new(seed, None, kinds(seed)))
}

/// `share`: the worlds take so many times longer than usual, so that fewer are run.
fn run_worlds(share: u64, world: impl Fn(u64) -> World) -> Option<(u64, Stats)> {
    run_worlds_by(share, world, World::run)
}

fn run_worlds_by(
    share: u64,
    world: impl Fn(u64) -> World,
    run: impl Fn(&mut World) -> Result<(), String>,
) -> Option<(u64, Stats)> {
    if let Some(seed) = number("SLIM_SIM_SEED") {
        let (stats, outcome) = run_world_by(|| world(seed), &run);
        println!("seed {seed}: {outcome:?}, {stats:?}");
        outcome.unwrap();
        return None;
    }
    let seeds = number("SLIM_SIM_SEEDS").unwrap_or(if cfg!(debug_assertions) {
        2_000
    } else {
        20_000
    });
    let seeds = seeds.div_ceil(share);
    let first = number("SLIM_SIM_FIRST").unwrap_or(0);
    let mut total = Stats::default();
    for seed in first..first + seeds {
        let (stats, outcome) = run_world_by(|| world(seed), &run);
        total.add(&stats);
        if let Err(problem) = outcome {
            panic!("{problem}\nrun it again with SLIM_SIM_SEED={seed}");
        }
    }
    println!("{seeds} seeds: {total:?}");
    Some((seeds, total))
}

#[test]
fn every_schedule_is_byte_exact_and_ends() {
    let Some((seeds, total)) = run_all(|_| Kinds::tcp()) else {
        return;
    };
    // A simulator in which nothing happens finds nothing.
    assert!(
        total.resumes > seeds / 4 && total.ended > seeds / 2 && total.dialled > seeds / 5,
        "{total:?}"
    );
}

/// Flows with a second kind of transport: enough of them use it, and come back.
fn run_two_kinds(kinds: impl Fn(u64) -> Kinds) -> Option<(u64, Stats)> {
    let (seeds, total) = run_all(kinds)?;
    let [to_memory, to_tcp] = [total.to_memory, total.to_tcp];
    assert!(
        to_memory > seeds / 8 && to_tcp > seeds / 16 && total.resumes > seeds / 2,
        "{total:?}"
    );
    // Most of these flows end too soon.
    assert!(total.moves > seeds / 200, "{total:?}");
    Some((seeds, total))
}

#[test]
fn flows_move_from_one_kind_of_transport_to_the_other_and_back() {
    let Some((seeds, total)) = run_two_kinds(|seed| Kinds::some(mix(seed ^ 0x6b69))) else {
        return;
    };
    assert!(
        total.agreed > seeds / 5 && total.blackouts > seeds / 5,
        "{total:?}"
    );
}

#[test]
fn flows_go_to_queue_pairs_and_back() {
    run_two_kinds(|seed| Kinds::queue_pairs(mix(seed ^ 0x6b69)));
}

/// The second kind fails again and again, in the middle of moves, too. In the end each flow is on the kind that it prefers.
#[test]
fn flows_come_back_to_the_kind_that_they_prefer() {
    let world = |seed| World::failback(seed, None);
    let Some((seeds, total)) = run_worlds_by(10, world, World::run_failback) else {
        return;
    };
    let [to_memory, to_tcp] = [total.to_memory, total.to_tcp];
    assert!(
        total.moves > 2 * seeds && to_memory > 4 * seeds && to_tcp > 2 * seeds,
        "{total:?}"
    );
    assert_eq!(total.escalations, 0, "{total:?}");
}

#[test]
fn flows_go_through_the_witness_and_back() {
    let Some((seeds, total)) = run_all(|_| Kinds::relay()) else {
        return;
    };
    let [to_relay, to_tcp] = [total.to_memory, total.to_tcp];
    assert!(
        to_relay > seeds / 8 && to_tcp > seeds / 100 && total.blackouts > seeds / 5,
        "{total:?}"
    );
}

/// `full`: the outage takes 72 hours.
fn run_outages(course: Course, full: bool, share: u64) -> Option<(u64, Stats)> {
    run_worlds(share, |seed| World::outage(seed, course, full))
}

#[test]
fn hosts_that_both_change_their_addresses_in_72_hours_find_each_other() {
    let Some((seeds, total)) = run_outages(Course::BothMove, true, 50) else {
        return;
    };
    let minutes = total.rested / 60;
    assert!(
        total.held > seeds && total.resumes > seeds && total.wakes <= minutes,
        "{total:?}"
    );
    assert!(
        total.wakes > minutes / 2 && minutes > seeds * 70 * 60,
        "{total:?}"
    );
}

#[test]
fn a_held_flow_goes_on_when_an_address_is_found() {
    for course in [Course::OneMoves, Course::OneReturns, Course::Flaps] {
        let Some((seeds, total)) = run_outages(course, false, 100) else {
            continue;
        };
        assert!(
            total.held > seeds && total.resumes > seeds,
            "{course:?}: {total:?}"
        );
    }
}

#[test]
fn a_held_flow_ends_when_the_user_wants_or_the_peer_process_has_ended() {
    for course in [Course::TooLong, Course::Dies] {
        let Some((seeds, total)) = run_outages(course, false, 100) else {
            continue;
        };
        assert!(
            total.held > seeds && total.escalations > seeds,
            "{course:?}: {total:?}"
        );
    }
}

/// The connection of an exchange of 64 KiB is killed after a given number of arrived bytes, in either direction: every number in the long
/// version (`SLIM_SOAK=1`, some minutes), else one in 127.
#[test]
fn a_kill_at_any_byte_is_survived() {
    const BYTES: usize = 64 << 10;
    let all = std::env::var("SLIM_SOAK").is_ok_and(|v| v == "1");
    let (mut runs, mut killed, mut total) = (0, 0, Stats::default());
    for at in (0..=BYTES).step_by(if all { 1 } else { 127 }) {
        for side in 0..2 {
            let mut world = World::exchange(at as u64, BYTES as u64, side, at);
            if let Err(problem) = world.run() {
                panic!("killed after byte {at} of side {side}: {problem}");
            }
            runs += 1;
            killed += u64::from(world.tcps[0].fatal.is_none());
            total.add(&world.stats);
        }
    }
    println!("{killed} kills in {runs} runs: {total:?}");
    // A process that is very late sees a stall, and moves the flow before the byte arrives.
    assert!(killed * 100 >= runs * 99, "{killed} of {runs}");
    // Nothing is left to resume if a side has closed before it learns of the kill.
    assert!(total.resumes > killed, "{total:?}");
    assert_eq!(total.escalations, 0, "{total:?}");
}

/// Whether bytes are lost or wrong, or a session was prevented. A flow that only makes no progress does not count.
fn is_loss(problem: &str) -> bool {
    ["is forgotten", "ends at", "byte", "made plain"]
        .iter()
        .any(|sign| problem.contains(sign))
}

fn is_found(mutation: Mutation) {
    is_found_with(mutation, Kinds::tcp);
}

fn is_found_with(mutation: Mutation, kinds: impl Fn() -> Kinds) {
    let found = (0..200_000).find_map(|seed| {
        let problem = run(seed, Some(mutation), kinds()).1.err()?;
        is_loss(&problem).then_some((seed, problem))
    });
    let (seed, problem) = found.unwrap_or_else(|| panic!("{mutation:?} was not noticed"));
    println!("{mutation:?}: seed {seed}: {problem}");
}

#[test]
fn draining_at_suspension_is_noticed() {
    is_found(Mutation::DrainEarly);
}

#[test]
fn trimming_while_suspended_is_noticed() {
    is_found(Mutation::TrimSuspended);
}

#[test]
fn trimming_what_only_the_witness_has_is_noticed() {
    is_found_with(Mutation::TrimRelayed, Kinds::relay);
}

#[test]
fn trimming_what_only_adapters_have_is_noticed() {
    is_found_with(Mutation::TrimArrived, || Kinds::queue_pairs(1));
}

#[test]
fn closing_a_transport_that_is_well_without_reading_it_is_noticed() {
    let mutation = Mutation::CloseWell;
    let found = (0..10_000).find_map(|seed| {
        let world = || World::failback(seed, Some(mutation));
        let problem = run_world_by(world, World::run_failback).1.err()?;
        is_loss(&problem).then_some((seed, problem))
    });
    let (seed, problem) = found.unwrap_or_else(|| panic!("{mutation:?} was not noticed"));
    println!("{mutation:?}: seed {seed}: {problem}");
}

#[test]
fn dropping_a_connection_that_may_hold_confirm_is_noticed() {
    is_found(Mutation::DropAwaiting);
}

#[test]
fn an_attacker_who_reads_along_is_noticed() {
    is_found(Mutation::ReadsAlong);
}
