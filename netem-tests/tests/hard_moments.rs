//! MPI jobs under SLIM that lose their connections at the worst moments: while they start, while they end, and while SLIM is busy with an
//! earlier fault.

mod common;

use std::{
    collections::HashMap,
    fs,
    net::SocketAddr,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use common::{
    events::Events,
    jobs::{Bench, PROGRAM, Slim, given_up},
    kills::{Killed, Kills, Tally},
    soak,
};
use slim_lab::{
    Lab, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        diag::Direction,
        flush::{self, Forgotten},
        link, nft,
    },
    mpi::{Flavor, JobVerdict, Outcome, Progress, Started},
};

const LIMIT: Duration = Duration::from_secs(90);
const MS: Duration = Duration::from_millis(1);

/// The number of runs: `few`, or fifty in the long version.
fn runs(few: usize) -> usize {
    if soak() { 50 } else { few }
}

fn finished(outcome: &Outcome) -> Result<Progress, String> {
    match outcome.verdict() {
        JobVerdict::Finished(progress) => Ok(progress),
        other => Err(other.to_string()),
    }
}

/// A connection is protected once both ends have agreed on a session (README, "New connections"). That takes about a millisecond, and longer where
/// many processes start at once.
const AGREED: Duration = Duration::from_millis(25);

/// Kills one connection after the other, of those that `pick` selects, until `enough` says so. Each has been seen for
/// `age` when it is killed.
fn kill_until(
    lab: &Lab,
    rng: &mut SeededRng,
    gap: (Duration, Duration),
    (pick, age): (Selector, Duration),
    mut enough: impl FnMut() -> bool,
) -> Killed {
    let (mut killed, start) = (Killed::default(), Instant::now());
    let mut seen: HashMap<(SocketAddr, SocketAddr), Instant> = HashMap::new();
    while !enough() && start.elapsed() < LIMIT {
        let node = lab.node(rng.below(lab.nodes().len()));
        let mut old = Vec::new();
        for c in destroy::list(node.net(), &pick).expect("list connections") {
            if seen
                .entry((c.local, c.remote))
                .or_insert_with(Instant::now)
                .elapsed()
                >= age
            {
                // The port of the end that has connected names the connection.
                old.push(match c.direction {
                    Direction::Outgoing => c.local.port(),
                    Direction::Incoming => c.remote.port(),
                });
            }
        }
        if !old.is_empty() {
            let pick = pick.clone().port(old[rng.below(old.len())]);
            let report = destroy::destroy(node.net(), &pick, Amount::One, rng);
            let connections = report.expect("destroy connections").connections.len();
            killed.times += usize::from(connections > 0);
            killed.connections += connections;
        }
        thread::sleep(rng.between(gap.0, gap.1));
    }
    killed
}

/// Runs jobs, whose connections `trouble` kills from their start on.
fn survives(
    test: &str,
    flavor: Flavor,
    trouble: fn(&Lab, &mut Started<'_>, &mut SeededRng) -> Killed,
) {
    let Some(bench) = Bench::shared(test, flavor) else {
        return;
    };
    let mut tally = Tally::new(&bench.test);
    for run in 0..runs(1) {
        let seed = SeededRng::seed_from_env() + run as u64;
        let lab = bench.lab(1);
        let during = go_on(&lab);
        fs::write(&during, "").expect("write a file");
        let job = bench.job(&lab, Slim::Everywhere, 2, 1).arg(during);
        let mut started = job.start().expect("start mpirun");
        let killed = trouble(&lab, &mut started, &mut SeededRng::new(seed));
        let outcome = started.wait(LIMIT);
        let verdict = outcome.verdict();
        let events = Events::read(&lab);
        println!(
            "{}: SLIM_LAB_SEED={seed}, {killed}; {verdict}; {events}",
            bench.test
        );
        let result = match killed.times {
            0 => Err("no connection was killed".into()),
            _ => finished(&outcome).and_then(|_| given_up(&lab, &outcome)),
        };
        tally.add(lab, &outcome, killed, result);
    }
    tally.assert_all_right();
}

/// From the start of the launcher until the ranks work: daemons start, ranks start, and all of them connect.
fn during_init(lab: &Lab, job: &mut Started<'_>, rng: &mut SeededRng) -> Killed {
    let works = |line: &str| Progress::parse(line).is_some();
    let killed = kill_until(
        lab,
        rng,
        (5 * MS, 30 * MS),
        (Selector::between_hosts(), AGREED),
        || job.running().wait_line(Duration::ZERO, works) || !job.running().is_running(),
    );
    fs::remove_file(go_on(lab)).expect("remove a file");
    killed
}

/// From the last rounds of the program to the end of the job: ranks leave MPI. That takes only some milliseconds, so the kills begin a
/// little before.
fn during_finalize(lab: &Lab, job: &mut Started<'_>, rng: &mut SeededRng) -> Killed {
    let works = job.wait_working(Duration::from_secs(30));
    assert!(works, "{:?}", job.running().lines());
    // All connections exist for long. The launcher's are left alone: when the daemons have ended, nobody is left to resume with.
    let ranks = Selector::between_hosts().process(PROGRAM);
    let mut kills = 0;
    kill_until(lab, rng, (MS, 5 * MS), (ranks, Duration::ZERO), || {
        kills += 1;
        if kills == 4 {
            fs::remove_file(go_on(lab)).expect("remove a file");
        }
        !job.running().is_running()
    })
}

/// The program works as long as this file exists.
fn go_on(lab: &Lab) -> PathBuf {
    lab.dir().join("go-on")
}

#[test]
fn open_mpi_4_during_init() {
    survives("during-init", Flavor::OpenMpi4, during_init);
}

#[test]
fn open_mpi_5_during_init() {
    survives("during-init", Flavor::OpenMpi5, during_init);
}

#[test]
fn mpich_4_during_init() {
    survives("during-init", Flavor::Mpich4, during_init);
}

#[test]
fn mpich_5_during_init() {
    survives("during-init", Flavor::Mpich5, during_init);
}

#[test]
fn open_mpi_4_during_finalize() {
    survives("during-finalize", Flavor::OpenMpi4, during_finalize);
}

#[test]
fn open_mpi_5_during_finalize() {
    survives("during-finalize", Flavor::OpenMpi5, during_finalize);
}

#[test]
fn mpich_4_during_finalize() {
    survives("during-finalize", Flavor::Mpich4, during_finalize);
}

#[test]
fn mpich_5_during_finalize() {
    survives("during-finalize", Flavor::Mpich5, during_finalize);
}

/// A network fault while the job works: makes it and ends it.
type Moment = fn(&Lab);

/// The job stands still for at most `longest`.
fn survives_moment(test: &str, longest: Duration, moment: Moment) {
    let Some(bench) = Bench::shared(test, Flavor::OpenMpi4) else {
        return;
    };
    let mut tally = Tally::new(&bench.test);
    for _ in 0..runs(1) {
        let lab = bench.lab(1);
        let job = bench.job(&lab, Slim::Everywhere, 2, 3);
        let outcome = bench.run(&lab, &job, LIMIT, |_| {
            moment(&lab);
            test.to_owned()
        });
        let result = finished(&outcome).and_then(|progress| {
            match Duration::from_secs_f64(progress.max_stall) > longest {
                true => Err(format!("stood still for {} s", progress.max_stall)),
                false => given_up(&lab, &outcome),
            }
        });
        tally.add(lab, &outcome, Killed::default(), result);
    }
    tally.assert_all_right();
}

fn kill_all(lab: &Lab, node: usize) {
    let pick = Kills::one_by_one().pick;
    let rng = &mut SeededRng::new(1);
    let report = destroy::destroy(lab.node(node).net(), &pick, Amount::All, rng);
    report.expect("destroy connections");
}

/// The new connection is reset as soon as it exists, and dropped, and the one after it, too.
#[test]
fn faults_during_a_resume() {
    survives_moment("during-resume", Duration::from_secs(8), |lab| {
        for round in 0..6 {
            kill_all(lab, round % 2);
            thread::sleep(2 * MS);
            let net = lab.node(round % 2).net();
            let answer = match round % 3 {
                0 => Forgotten::Dropped,
                _ => Forgotten::Reset,
            };
            let flushed = flush::flush(net, None, answer).expect("lay the rules");
            kill_all(lab, (round + 1) % 2);
            thread::sleep(100 * MS);
            drop(flushed);
        }
    });
}

/// No connection can be made for a second. In that time come three more faults, each while SLIM waits for its next attempt.
#[test]
fn three_faults_within_one_backoff() {
    survives_moment("within-backoff", Duration::from_secs(8), |lab| {
        let refused = nft::Rule::reset().apply_to(lab.nodes()).expect("lay rules");
        kill_all(lab, 0);
        thread::sleep(300 * MS);
        let down = link::down(lab.node(1), 0).expect("take the link down");
        thread::sleep(200 * MS);
        let gone = link::remove_address(lab.node(0), 0).expect("remove the address");
        thread::sleep(200 * MS);
        down.lift().expect("lift");
        gone.lift().expect("lift");
        thread::sleep(300 * MS);
        refused.lift().expect("lift");
    });
}
