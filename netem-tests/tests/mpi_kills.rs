//! MPI jobs whose connections are killed: under SLIM they finish with every byte right, without it they do not finish.

mod common;

use std::{fs, time::Duration};

use common::{
    events::Events,
    jobs::{Bench, Slim, assert_finished, given_up},
    kills::{Killed, Kills, Tally},
    soak,
};
use slim_lab::{
    Lab, SeededRng,
    faults::destroy::{Amount, Selector},
    mpi::{Flavor, JobVerdict, Outcome},
};

/// The least seconds of work in a run, and the time limit for the run after the kills.
const WORK: u64 = 3;
const LIMIT: Duration = Duration::from_secs(90);

/// The number of runs, all of which must finish: `few`, or fifty in the long version.
fn runs(few: usize) -> usize {
    if soak() { 50 } else { few }
}

fn survives(test: &str, flavor: Flavor, ranks: usize, few: usize, kills: &Kills) {
    let Some(bench) = Bench::shared(&format!("{test}-{ranks}"), flavor) else {
        return;
    };
    let mut tally = Tally::new(&bench.test);
    for run in 0..runs(few) {
        let seed = SeededRng::seed_from_env() + run as u64;
        let lab = bench.lab(1);
        let mut killed = Killed::default();
        let go_on = lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        let job = bench.job(&lab, Slim::Everywhere, ranks, WORK).arg(&go_on);
        let outcome = bench.run(&lab, &job, LIMIT, |job| {
            killed = kills.while_working(&lab, job, &go_on, seed);
            format!("SLIM_LAB_SEED={seed}, {killed}")
        });
        let result = judge(&lab, &outcome, killed, kills);
        tally.add(lab, &outcome, killed, result);
    }
    tally.assert_all_right();
}

/// Checks a run: all data arrived, connections were killed, and no flow was escalated except those whose peer had left after
/// all work was done.
fn judge(lab: &Lab, outcome: &Outcome, killed: Killed, kills: &Kills) -> Result<(), String> {
    let verdict = outcome.verdict();
    if !matches!(verdict, JobVerdict::Finished(_)) {
        return Err(verdict.to_string());
    }
    if killed.times < kills.times {
        return Err(format!("only {killed}"));
    }
    let events = Events::read(lab);
    if events.count("resume") == 0 {
        return Err(format!("no resume: {events}"));
    }
    given_up(lab, outcome)
}

fn one_by_one(flavor: Flavor, ranks: usize, few: usize) {
    survives("one-by-one", flavor, ranks, few, &Kills::one_by_one());
}

#[test]
fn open_mpi_4_two_ranks_one_by_one() {
    one_by_one(Flavor::OpenMpi4, 2, 2);
}

#[test]
fn open_mpi_4_four_ranks_one_by_one() {
    one_by_one(Flavor::OpenMpi4, 4, 1);
}

#[test]
fn open_mpi_5_two_ranks_one_by_one() {
    one_by_one(Flavor::OpenMpi5, 2, 2);
}

#[test]
fn open_mpi_5_four_ranks_one_by_one() {
    one_by_one(Flavor::OpenMpi5, 4, 1);
}

#[test]
fn mpich_4_one_by_one() {
    one_by_one(Flavor::Mpich4, 4, 1);
}

#[test]
fn mpich_5_one_by_one() {
    one_by_one(Flavor::Mpich5, 4, 1);
}

#[test]
fn intel_mpi_one_by_one() {
    one_by_one(Flavor::Intel, 4, 1);
}

/// Kills all connections of the ranks at once, many times.
fn all_at_once(flavor: Flavor, ranks: usize, few: usize) {
    let ms = Duration::from_millis;
    let kills = Kills {
        amount: Amount::All,
        gap: (ms(80), ms(220)),
        ..Kills::one_by_one()
    };
    survives("all-at-once", flavor, ranks, few, &kills);
}

#[test]
fn open_mpi_4_two_ranks_all_at_once() {
    all_at_once(Flavor::OpenMpi4, 2, 1);
}

#[test]
fn open_mpi_4_four_ranks_all_at_once() {
    all_at_once(Flavor::OpenMpi4, 4, 1);
}

#[test]
fn open_mpi_5_two_ranks_all_at_once() {
    all_at_once(Flavor::OpenMpi5, 2, 1);
}

#[test]
fn open_mpi_5_four_ranks_all_at_once() {
    all_at_once(Flavor::OpenMpi5, 4, 1);
}

#[test]
fn mpich_4_all_at_once() {
    all_at_once(Flavor::Mpich4, 4, 1);
}

#[test]
fn mpich_5_all_at_once() {
    all_at_once(Flavor::Mpich5, 4, 1);
}

/// Kills connections again while they resume from the last kill, from either end.
fn while_resuming(flavor: Flavor, ranks: usize, few: usize) {
    let ms = Duration::from_millis;
    let kills = Kills {
        amount: Amount::All,
        again: 4,
        gap: (ms(120), ms(300)),
        times: 30,
        ..Kills::one_by_one()
    };
    survives("while-resuming", flavor, ranks, few, &kills);
}

#[test]
fn open_mpi_4_two_ranks_while_resuming() {
    while_resuming(Flavor::OpenMpi4, 2, 1);
}

#[test]
fn open_mpi_4_four_ranks_while_resuming() {
    while_resuming(Flavor::OpenMpi4, 4, 1);
}

#[test]
fn open_mpi_5_two_ranks_while_resuming() {
    while_resuming(Flavor::OpenMpi5, 2, 1);
}

#[test]
fn open_mpi_5_four_ranks_while_resuming() {
    while_resuming(Flavor::OpenMpi5, 4, 1);
}

#[test]
fn mpich_4_while_resuming() {
    while_resuming(Flavor::Mpich4, 4, 1);
}

#[test]
fn mpich_5_while_resuming() {
    while_resuming(Flavor::Mpich5, 4, 1);
}

/// Kills the launcher's own connections too: the loss of one ends a bare job of any MPI.
fn everything(flavor: Flavor) {
    let ms = Duration::from_millis;
    let kills = Kills {
        pick: Selector::between_hosts(),
        amount: Amount::All,
        gap: (ms(80), ms(220)),
        ..Kills::one_by_one()
    };
    survives("daemons-too", flavor, 4, 1, &kills);
}

#[test]
fn open_mpi_4_with_its_daemons() {
    everything(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_with_its_daemons() {
    everything(Flavor::OpenMpi5);
}

#[test]
fn mpich_4_with_its_daemons() {
    everything(Flavor::Mpich4);
}

#[test]
fn mpich_5_with_its_daemons() {
    everything(Flavor::Mpich5);
}

/// A daemon of Intel MPI connects to the launcher and then executes another program, which goes on with the connection.
#[test]
fn intel_mpi_with_its_daemons() {
    everything(Flavor::Intel);
}

/// Seconds of work of a bare run, enough for all kills.
const BARE_WORK: u64 = 6;

/// The counterpart, which shows that the tests above can fail: without SLIM such a run does not finish.
fn bare_does_not(flavor: Flavor) {
    let Some(bench) = Bench::new("bare", flavor) else {
        return;
    };
    let runs = runs(2);
    let mut finished = 0;
    for run in 0..runs {
        let seed = SeededRng::seed_from_env() + run as u64;
        let lab = bench.lab(1);
        let job = bench.job(&lab, Slim::Bare, 2, BARE_WORK);
        // A short limit is enough to detect a hang: by then the work would be long done.
        let outcome = bench.run(&lab, &job, Duration::from_secs(6), |job| {
            let kills = Kills {
                window: Duration::from_secs(BARE_WORK),
                ..Kills::one_by_one()
            };
            let killed = kills.carry_out(&lab, job, &mut SeededRng::new(seed));
            format!("without SLIM, SLIM_LAB_SEED={seed}, {killed} connections killed")
        });
        finished += usize::from(matches!(outcome.verdict(), JobVerdict::Finished(_)));
    }
    assert!(
        finished * 2 < runs,
        "{finished} of {runs} bare runs finished: the faults are not real"
    );
}

#[test]
fn open_mpi_4_without_slim_does_not_finish() {
    bare_does_not(Flavor::OpenMpi4);
}

#[test]
fn open_mpi_5_without_slim_does_not_finish() {
    bare_does_not(Flavor::OpenMpi5);
}

#[test]
fn mpich_4_without_slim_does_not_finish() {
    bare_does_not(Flavor::Mpich4);
}

#[test]
fn mpich_5_without_slim_does_not_finish() {
    bare_does_not(Flavor::Mpich5);
}

#[test]
fn intel_mpi_without_slim_does_not_finish() {
    bare_does_not(Flavor::Intel);
}

/// Without faults a bare run finishes, so the faults are what ends it.
#[test]
fn a_bare_job_without_faults_finishes() {
    for flavor in Flavor::ALL {
        let Some(bench) = Bench::new("no-fault", flavor) else {
            continue;
        };
        for ranks in [2, 4] {
            let lab = bench.lab(1);
            let job = bench.job(&lab, Slim::Bare, ranks, 2);
            let outcome = bench.run(&lab, &job, LIMIT, |_| format!("{ranks} ranks, no fault"));
            assert_finished(&bench.test, &lab, &outcome);
        }
    }
}
