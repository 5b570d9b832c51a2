//! MPI jobs in which something is really dead: SLIM must not stand in the way of the news.

mod common;

use std::time::{Duration, Instant};

use common::jobs::{Bench, PROGRAM, Slim, assert_finished};
use netem_tests::{
    Lab,
    faults::nft,
    mpi::{Flavor, Started, Verdict},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Long enough not to end by itself.
const WORK: u64 = 60;

/// SIGKILLs a rank on the second node; gives the moment.
fn kill_a_rank(lab: &Lab) -> Instant {
    let ranks = lab
        .node(1)
        .processes()
        .into_iter()
        .filter(|p| p.name == PROGRAM);
    let rank = ranks
        .min_by_key(|p| p.pid)
        .expect("a rank runs on the second node");
    kill(Pid::from_raw(rank.pid as i32), Signal::SIGKILL).expect("kill a rank");
    Instant::now()
}

/// How mpirun ended, and how long after the kill.
fn after_a_killed_rank(bench: &Bench, slim: Slim) -> (String, Duration) {
    let lab = bench.lab(1);
    let job = bench.job(&lab, slim, 2, WORK);
    let mut took = Duration::MAX;
    let outcome = bench.run(&lab, &job, Duration::from_secs(30), |job| {
        let start = kill_a_rank(&lab);
        job.running().wait(Duration::from_secs(30));
        took = start.elapsed();
        format!(
            "{slim:?}: rank killed, mpirun ended {:.2} s later",
            took.as_secs_f64()
        )
    });
    match outcome.verdict() {
        Verdict::Failed(how) => (how, took),
        other => panic!("{}: {other}\n{}", bench.test, outcome.tail(20)),
    }
}

fn killed_rank(flavor: Flavor) {
    let Some(bench) = Bench::new("killed-rank", flavor) else {
        return;
    };
    let three = |slim| {
        (0..3)
            .map(|_| after_a_killed_rank(&bench, slim))
            .collect::<Vec<_>>()
    };
    let (bare, slim) = (three(Slim::Bare), three(Slim::Everywhere));
    // mpirun gives the status of whichever it hears of first: the killed rank, or the peer that
    // stops (with status 14 in Open MPI 5) because of it.
    for (how, _) in &slim {
        let known =
            bare.iter().any(|b| b.0 == *how) || how.ends_with(" 137") || how.ends_with(" 14");
        assert!(known, "{how}, bare {bare:?}");
    }
    // The best of three: the machine may be busy with something else.
    let best = |ends: &[(String, Duration)]| ends.iter().map(|(_, took)| *took).min().unwrap();
    assert!(
        best(&slim) <= best(&bare) + Duration::from_millis(500),
        "{slim:?}, bare {bare:?}"
    );
}

#[test]
fn open_mpi_4_killed_rank() {
    killed_rank(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_killed_rank() {
    killed_rank(Flavor::OpenMpi5);
}

/// Connections reset, then silence for ever.
fn host_gone(flavor: Flavor) {
    let Some(bench) = Bench::new("host-gone", flavor) else {
        return;
    };
    let lab = bench.lab(1);
    let job = bench
        .job(&lab, Slim::Everywhere, 2, WORK)
        .env("SLIM_ATTEMPT_TIMEOUTS", "0.5,1,1.5");
    let mut guards = Vec::new();
    let mut took = None;
    let outcome = bench.run(&lab, &job, Duration::from_secs(10), |job| {
        let reset = nft::Rule::reset()
            .apply_to(lab.nodes())
            .expect("lay the rule");
        std::thread::sleep(Duration::from_millis(300));
        guards.push(
            nft::Rule::drop()
                .apply_to(lab.nodes())
                .expect("lay the rule"),
        );
        drop(reset);
        let start = Instant::now();
        took = job
            .running()
            .wait(Duration::from_secs(30))
            .map(|_| start.elapsed());
        format!("host gone, mpirun ended after {took:?}")
    });
    assert!(
        !matches!(outcome.verdict(), Verdict::Finished(_) | Verdict::Wrong(_)),
        "{}",
        outcome.tail(20)
    );
    // Open MPI says of itself that it may hang once it has reported the loss; what SLIM owes is that it is told.
    let Some(took) = took else {
        let told = outcome.tail(40);
        assert!(
            told.contains("unexpectedly disconnected"),
            "nothing was reported: {told}"
        );
        return;
    };
    // Three windows of 3 s together, and what mpirun takes to clean up what it can still reach.
    assert!(
        took > Duration::from_secs(2),
        "{took:?}: before the attempts were made"
    );
    assert!(took < Duration::from_secs(12), "{took:?}");
}

#[test]
fn open_mpi_4_host_gone() {
    host_gone(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_host_gone() {
    host_gone(Flavor::OpenMpi5);
}

/// SLIM on one node only: every connection is plain TCP, and the job as good as bare.
fn one_side(flavor: Flavor) {
    let Some(bench) = Bench::new("one-side", flavor) else {
        return;
    };
    let lab = bench.lab(1);
    let job = bench.job(&lab, Slim::FirstNode, 4, 3);
    let outcome = bench.run(
        &lab,
        &job,
        Duration::from_secs(60),
        |_: &mut Started<'_>| "SLIM on one node".into(),
    );
    assert_finished(&bench.test, &lab, &outcome);
}

#[test]
fn open_mpi_4_with_slim_on_one_node() {
    one_side(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_with_slim_on_one_node() {
    one_side(Flavor::OpenMpi5);
}
