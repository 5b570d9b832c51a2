//! MPI jobs in which a process or a host has really died: SLIM must not hold back the error.

mod common;

use std::time::{Duration, Instant};

use common::{
    events::{Events, at, kind, word},
    jobs::{Bench, Slim, a_rank, assert_finished},
};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use slim_lab::{
    Lab, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        nft,
    },
    mpi::{Flavor, JobVerdict, Started},
};

/// Seconds of work: long enough that a job does not finish by itself.
const WORK: u64 = 60;

/// Kills a rank on the second node with SIGKILL. Returns the moment.
fn kill_a_rank(lab: &Lab) -> Instant {
    kill(a_rank(lab.node(1)), Signal::SIGKILL).expect("kill a rank");
    Instant::now()
}

/// Returns how mpirun ended, and how long after the kill.
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
        JobVerdict::Failed(how) => (how, took),
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
    // mpirun returns the status of the process that it hears of first: the killed rank, or the peer that stops because of it
    // (with status 14 in Open MPI 5).
    for (how, _) in &slim {
        let known =
            bare.iter().any(|b| b.0 == *how) || how.ends_with(" 137") || how.ends_with(" 14");
        assert!(known, "{how}, bare {bare:?}");
    }
    // The best of three, because the machine may be busy.
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

/// Timeouts of the attempts in the test below, and their sum, in seconds.
const ATTEMPTS: [f64; 3] = [0.5, 1.0, 1.5];
const DEADLINE: f64 = 3.0;
/// Seconds that a busy machine may add.
const SLACK: f64 = 1.0;
/// How long Open MPI's launcher sleeps at most while it ends its ranks: a second after SIGCONT and a second after SIGTERM.
/// A SIGCHLD that happens to be delivered to the sleeping thread ends the second sleep early.
const LAUNCHER: Duration = Duration::from_secs(2);

/// Makes a host disappear for good: every connection between the nodes breaks, those of the ranks and of the launcher, and no
/// packet gets through any more. Returns how long after that mpirun ended, if it did.
fn lose_the_host(bench: &Bench, lab: &Lab, slim: Slim) -> Option<Duration> {
    let windows = ATTEMPTS.map(|seconds| seconds.to_string()).join(",");
    let job = bench
        .job(lab, slim, 2, WORK)
        .env("SLIM_ATTEMPT_TIMEOUTS", windows);
    let mut took = None;
    let mut guards = Vec::new();
    let outcome = bench.run(lab, &job, Duration::ZERO, |job| {
        // A firewall resets connections that send. Silent ones are aborted at one end, which resets the other. Meanwhile the
        // firewall prevents new connections.
        let reset = nft::Rule::reset().apply_to(lab.nodes());
        for node in lab.nodes() {
            let all = Selector::between_hosts();
            destroy::destroy(node.net(), &all, Amount::All, &mut SeededRng::new(1))
                .expect("destroy connections");
        }
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(300));
        guards.push(
            nft::Rule::drop()
                .apply_to(lab.nodes())
                .expect("lay the rule"),
        );
        reset.and_then(|rule| rule.lift()).expect("lift the rule");
        // Processes that remain on the lost host may keep the job's output open. The test does not wait for them.
        let ended = job.running().wait_end(Duration::from_secs(20));
        took = ended.map(|_| start.elapsed());
        format!("{slim:?}: host gone, mpirun ended after {took:?}")
    });
    let finished = matches!(
        outcome.verdict(),
        JobVerdict::Finished(_) | JobVerdict::Wrong(_)
    );
    assert!(!finished, "{}", outcome.tail(20));
    println!("{}", outcome.tail(12));
    took
}

/// Asserts that every broken connection with the other node was escalated with the kernel's error, after all three attempts
/// and in their time, and that no flow is left undecided. Whatever still waits then does not wait for SLIM.
fn assert_given_up_in_time(lab: &Lab) {
    let events = Events::read(lab);
    // The launcher that gets the first error ends the ranks that it can reach, in the middle of their attempts.
    let told = events.of_kind("escalate").map(at).next();
    let told = told.expect("at least one flow was escalated");
    let (mut broken, mut given_up) = (0, 0);
    // Connections within a node are not broken, but a process that exits may reset them.
    let between_nodes = |h: &Vec<_>| !word(h[0], "peer").starts_with("127.");
    for history in events.by_flow().into_iter().filter(between_nodes) {
        let suspends = history.iter().filter(|e| kind(e) == "suspend");
        let Some(suspend) = suspends.clone().find(|e| word(e, "cause").starts_with('E')) else {
            assert!(suspends.count() == 0, "{history:#?}");
            continue;
        };
        broken += 1;
        let failed = history.iter().filter(|e| kind(e) == "attempt_failed");
        let failed: Vec<_> = failed.filter_map(|e| e["n"].as_u64()).collect();
        match history.iter().find(|e| kind(e) == "escalate") {
            Some(end) => {
                given_up += 1;
                assert_eq!(failed, [1, 2, 3], "{history:#?}");
                assert_kernels_error_in_time(suspend, end);
            }
            None => {
                assert!([1, 2, 3].starts_with(&failed), "{history:#?}");
                let due = at(suspend) + DEADLINE;
                assert!(due > told, "not given up although due: {history:#?}");
            }
        }
    }
    assert!(
        broken >= 4 && given_up >= 2,
        "{broken} broken, {given_up} given up: ranks and launchers at both ends?"
    );
}

fn assert_kernels_error_in_time(suspend: &Value, given_up: &Value) {
    assert_eq!(word(given_up, "reason"), "attempts", "{given_up}");
    let cause = word(suspend, "cause");
    assert_eq!(word(given_up, "cause"), cause, "{given_up}");
    let errno = match cause {
        "ECONNABORTED" => libc::ECONNABORTED,
        _ => libc::ECONNRESET,
    };
    assert_eq!(given_up["errno"], errno, "{given_up}");
    let after = at(given_up) - at(suspend);
    assert!(
        (DEADLINE - 0.05..DEADLINE + SLACK).contains(&after),
        "after {after} s: {suspend} {given_up}"
    );
}

fn host_gone(flavor: Flavor) {
    let Some(bench) = Bench::new("host-gone", flavor) else {
        return;
    };
    let bare = lose_the_host(&bench, &bench.lab(1), Slim::Bare);
    let lab = bench.lab(1);
    let slim = lose_the_host(&bench, &lab, Slim::Everywhere);
    assert_given_up_in_time(&lab);
    // The MPI's reaction to the error is its own matter, as long as it is the same as without SLIM.
    match (bare, slim) {
        (Some(bare), Some(slim)) => {
            let most = bare.max(LAUNCHER) + Duration::from_secs_f64(DEADLINE + SLACK);
            assert!(slim <= most, "mpirun ended after {slim:?}, bare {bare:?}");
        }
        (Some(bare), None) => panic!("mpirun hangs, and ends bare after {bare:?}"),
        (None, _) => {}
    }
}

#[test]
fn open_mpi_4_host_gone() {
    host_gone(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_host_gone() {
    host_gone(Flavor::OpenMpi5);
}

/// SLIM on one node only: every connection is plain TCP, and the job finishes as a bare one does.
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
