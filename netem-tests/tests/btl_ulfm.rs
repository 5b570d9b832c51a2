//! The native component in jobs that go on without failed ranks (ULFM, Open MPI 5.0): lost connections cost no rank, and a rank that
//! has died is reported as soon as with btl/tcp.

mod common;

use std::{
    path::PathBuf,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{
    component::ComponentBench,
    events::Events,
    jobs::assert_finished,
    kills::{Kills, Tally},
    soak,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Lab, SeededRng,
    faults::{
        destroy::{self, Amount, Selector},
        nft,
    },
    mpi::{Flavor, Job, JobVerdict, Outcome, ULFM_OPTIONS},
};

const PROGRAM: &str = "slim_ulfm";
const LIMIT: Duration = Duration::from_secs(60);

/// Words of the longest message in jobs that lose a rank: rounds are short, so that the times of the reports can be compared. Frames of
/// long messages that come too late are in slim-btl/tests/sends.rs.
const SHORT: &str = "2000";

/// How the ranks communicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Component,
    Tcp,
}

struct UlfmBench {
    component: ComponentBench,
    program: PathBuf,
}

impl UlfmBench {
    fn new(test: &str) -> Option<Self> {
        let component = ComponentBench::new(&format!("ulfm-{test}"), Flavor::OpenMpi5Components)?;
        let program = component.bench.mpi.build_program("slim_ulfm.c");
        Some(Self {
            component,
            program: program.expect("build a test program"),
        })
    }

    fn job<'a>(&'a self, lab: &'a Lab, carrier: Carrier, ranks: usize, seconds: u32) -> Job<'a> {
        let program = self.program.clone();
        let job = match carrier {
            Carrier::Component => self.component.job_of(lab, program, ranks),
            Carrier::Tcp => Job::new(lab, &self.component.bench.mpi, program).ranks(ranks),
        };
        let job = ULFM_OPTIONS.iter().fold(job, |job, word| job.option(*word));
        job.arg(seconds.to_string())
    }
}

/// The value of `name=` in a line.
fn value<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

fn lines<'a>(outcome: &'a Outcome, start: &'a str) -> impl Iterator<Item = &'a str> {
    let lines = outcome.lines.iter().map(|line| &*line.text);
    lines.filter(move |text| text.starts_with(start))
}

/// Ranks at the end, if the job got there with all data right.
fn ranks_left(outcome: &Outcome) -> Option<usize> {
    let done = lines(outcome, "DONE ").last()?;
    if outcome.done()?.errors > 0 {
        return None;
    }
    value(done, "ranks")?.parse().ok()
}

fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("a clock after 1970").as_secs_f64()
}

#[test]
fn killed_connections_cost_no_rank() {
    let Some(bench) = UlfmBench::new("kills") else {
        return;
    };
    let kills = Kills {
        pick: Selector::between_hosts().process(PROGRAM),
        amount: Amount::All,
        times: 10,
        ..Kills::one_by_one()
    };
    let mut tally = Tally::new(&bench.component.bench.test);
    for run in 0..if soak() { 20 } else { 2 } {
        let seed = SeededRng::seed_from_env() + run;
        let lab = bench.component.lab();
        let job = bench.job(&lab, Carrier::Component, 4, 4);
        let mut killed = common::kills::Killed::default();
        let outcome = bench.component.bench.run(&lab, &job, LIMIT, |job| {
            killed = kills.carry_out(&lab, job, &mut SeededRng::new(seed));
            format!("SLIM_LAB_SEED={seed}, {killed}")
        });
        let failed = lines(&outcome, "FAILED").count();
        let result = match (outcome.verdict(), ranks_left(&outcome), failed) {
            (JobVerdict::Finished(_), Some(4), 0) if killed.times > 0 => Ok(()),
            (verdict, ranks, failed) => Err(format!("{verdict}, {ranks:?} ranks, {failed} failed")),
        };
        tally.add(lab, &outcome, killed, result);
    }
    tally.assert_all_right();
}

/// A rank on `node` is killed; how many seconds later the last of the others has heard of it.
fn after_a_killed_rank(bench: &UlfmBench, carrier: Carrier, node: usize) -> Result<f64, String> {
    let lab = bench.component.lab();
    let job = bench.job(&lab, carrier, 4, 3);
    let job = job.arg(SHORT);
    let mut at = 0.0;
    let outcome = bench
        .component
        .bench
        .run(&lab, &job, Duration::from_secs(15), |_| {
            let ranks = lab.node(node).processes();
            let ranks = ranks.iter().filter(|p| p.name == PROGRAM);
            let rank = ranks.max_by_key(|p| p.pid).expect("a rank");
            at = now();
            kill(Pid::from_raw(rank.pid as i32), Signal::SIGKILL).expect("kill a rank");
            format!("{carrier:?}: a rank killed")
        });
    let heard = lines(&outcome, "FAILED").filter_map(|l| value(l, "at")?.parse::<f64>().ok());
    let heard: Vec<f64> = heard.map(|heard| heard - at).collect();
    let shrunk = lines(&outcome, "SHRUNK").filter(|l| value(l, "ranks") == Some("3"));
    let told = lines(&outcome, "slim: ").count();
    let states = (heard.len(), shrunk.count(), ranks_left(&outcome));
    println!("{carrier:?}: heard after {heard:.4?} s, lines of the component: {told}");
    // A rank may meet the failure twice: in its own call, and when the others revoke the communicator that it has made.
    if states.0 < 3 || states.1 < 3 || states.2 != Some(3) {
        return Err(format!(
            "{states:?}, {}\n{}",
            outcome.verdict(),
            outcome.tail(30)
        ));
    }
    Ok(heard.iter().copied().fold(0.0, f64::max))
}

/// In turns with btl/tcp, which may lose more ranks than the killed one. The best of each: the machine may be busy with something
/// else.
#[test]
fn a_killed_rank_is_reported_as_soon_as_with_tcp() {
    let Some(bench) = UlfmBench::new("killed-rank") else {
        return;
    };
    let (mut tcp, mut slim) = (Vec::new(), Vec::new());
    for turn in 0..if soak() { 20 } else { 3 } {
        // Of the last rank and of one that others have higher names than.
        let node = 1 - turn % 2;
        match after_a_killed_rank(&bench, Carrier::Tcp, node) {
            Ok(took) => tcp.push(took),
            Err(what) => println!("turn {turn} by btl/tcp: {what}"),
        }
        match after_a_killed_rank(&bench, Carrier::Component, node) {
            Ok(took) => slim.push(took),
            Err(what) => panic!("turn {turn}: {what}"),
        }
    }
    for (name, times) in [("tcp", &mut tcp), ("component", &mut slim)] {
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: {} of the runs, median {:.4?} s, all {times:.4?}",
            times.len(),
            times.get(times.len() / 2)
        );
    }
    match tcp.first() {
        Some(best) => assert!(slim[0] <= best + 0.01, "{slim:?}, tcp {tcp:?}"),
        None => println!("btl/tcp kept three ranks in no run: nothing to compare with"),
    }
}

/// The port at which mpirun's daemon on the second node is connected to it.
fn launcher_port(lab: &Lab) -> u16 {
    let mut command = lab.node(1).command("ss");
    command.args(["-Htnp", "state", "established"]);
    let output = command.output().expect("run ss");
    let text = String::from_utf8_lossy(&output.stdout);
    let of_daemon = text.lines().filter(|line| line.contains("\"prted\""));
    let mut peers =
        of_daemon.filter_map(|line| line.split_whitespace().nth(3)?.strip_prefix("10.77.0.1:"));
    let port = peers
        .next()
        .unwrap_or_else(|| panic!("no daemon in {text}"));
    port.parse().expect("a port")
}

/// Both ends of a connection that cannot be replaced are alive: one of them has to go, and only one.
#[test]
fn of_two_ranks_that_lose_each_other_one_is_left() {
    let Some(bench) = UlfmBench::new("lost") else {
        return;
    };
    let lab = bench.component.lab();
    let job = bench.job(&lab, Carrier::Component, 2, 6);
    let job = job.env("SLIM_ATTEMPT_TIMEOUTS", "0.5,0.5");
    let mut guards = Vec::new();
    let outcome = bench.component.bench.run(&lab, &job, LIMIT, |_| {
        let nothing = nft::Rule::drop().except_ports([launcher_port(&lab)]);
        guards.push(nothing.apply_to(lab.nodes()).expect("a firewall"));
        let pick = Selector::between_hosts().process(PROGRAM);
        for node in lab.nodes() {
            destroy::destroy(node.net(), &pick, Amount::All, &mut SeededRng::new(1))
                .expect("destroy connections");
        }
        thread::sleep(Duration::from_millis(100));
        "all connections of the ranks killed, no packets of theirs".into()
    });
    let told: Vec<_> = lines(&outcome, "slim: rank 0 has lost rank 1").collect();
    assert!(
        told.len() == 1 && told[0].contains("(nodeB)") && told[0].contains("counts as failed"),
        "{}",
        outcome.tail(30)
    );
    assert_eq!(
        lines(&outcome, "slim: rank 1").count(),
        0,
        "{}",
        outcome.tail(30)
    );
    assert_eq!(ranks_left(&outcome), Some(1), "{}", outcome.tail(30));
    assert!(Events::read(&lab).count("escalate") > 0);
}

/// Without ULFM a lost rank ends the job, as with Open MPI 4.1: that is in btl.rs. With it, a job without faults is as any other.
#[test]
fn a_job_without_faults_keeps_all_ranks() {
    let Some(bench) = UlfmBench::new("quiet") else {
        return;
    };
    let lab = bench.component.lab();
    let job = bench.job(&lab, Carrier::Component, 4, 2);
    let outcome = bench
        .component
        .bench
        .run(&lab, &job, LIMIT, |_| "no fault".into());
    assert_finished("ulfm-quiet", &lab, &outcome);
    assert_eq!(ranks_left(&outcome), Some(4));
}
