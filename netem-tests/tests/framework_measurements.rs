//! Measurements of frameworks: speed without faults against bare, and pauses when connections are killed (`scripts/frameworks`).
//!
//! `MEASURED_FRAMEWORKS` names those that are measured (default: all).

mod common;

use std::{env, time::Duration};

use common::framework::{
    disturbed,
    jobs::{self, Job},
    turns::{self, Measured},
};

/// The jobs to measure.
fn wanted() -> Vec<Job> {
    let names = env::var("MEASURED_FRAMEWORKS")
        .unwrap_or_default()
        .to_lowercase();
    let names: Vec<&str> = names.split_whitespace().collect();
    let named = |job: &Job| names.contains(&&*job.framework.name.to_lowercase());
    let mut all = jobs::ALL.to_vec();
    all.retain(|job| names.is_empty() || named(job));
    assert!(
        !all.is_empty(),
        "no framework has one of these names: {names:?}"
    );
    all.retain(|job| job.framework.is_there("framework_measurements"));
    all
}

/// A number from the environment.
fn number(variable: &str, default: usize) -> usize {
    let given = env::var(variable).ok().map(|v| v.parse());
    given.map_or(default, |n| n.unwrap_or_else(|e| panic!("{variable}: {e}")))
}

#[test]
#[ignore = "a measurement of many minutes"]
fn speed() {
    let how = Measured {
        per_node: number("MEASURED_PER_NODE", 2),
        rounds: number("MEASURED_ROUNDS", 6),
        pairs: number("MEASURED_PAIRS", 60),
        turn: Duration::from_millis(number("MEASURED_TURN_MS", 50) as u64),
        another: env::var_os("MEASURED_FLOOR").is_some(),
    };
    println!("{how:?}");
    println!("| framework | bare step | steps per second | processor time |");
    for job in wanted() {
        let Some(f) = turns::compare(&job, how) else {
            return;
        };
        let with = |c: &slim_cli::bench::stats::Comparison| {
            format!("{:.3} ({:.3} to {:.3})", c.ratio, c.low, c.high)
        };
        println!(
            "| {} | {:.2} ms | {} | {} |",
            job.framework.name,
            f.step.as_secs_f64() * 1e3,
            with(&f.speed),
            with(&f.processor)
        );
    }
}

#[test]
#[ignore = "a measurement of many minutes"]
fn pauses() {
    let per_node = number("MEASURED_PER_NODE", 2);
    let (kills, haste) = (number("MEASURED_KILLS", 200), number("MEASURED_HASTE", 1));
    println!(
        "| framework | killed | outages | head starts | pause: half, 99 of 100, longest | outage | since the kill |"
    );
    let long = Duration::from_millis(number("MEASURED_LONG_MS", 5) as u64);
    for job in wanted() {
        let Some(seen) = disturbed::measure(&job, per_node, (kills, haste as u32), long) else {
            return;
        };
        let with = |all: &[f64]| {
            let of_100 = [50, 99, 100].map(|n| disturbed::within(all, n));
            of_100.map(|ms| format!("{ms:.2} ms")).join(", ")
        };
        println!(
            "| {} | {} | {} | {} | {} | {} | {} |",
            job.framework.name,
            seen.kills,
            seen.outages.len(),
            seen.head_starts,
            with(&seen.pauses),
            with(&seen.outages),
            with(&seen.since_kill)
        );
    }
}
