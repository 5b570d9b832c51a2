//! Processes that meet while the job runs, by the native component: MPI_Comm_spawn, MPI_Comm_connect and MPI_Comm_accept between two jobs,
//! MPI_Comm_disconnect. Their connections are killed, and all data is right.

mod common;

use std::{
    fs,
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use common::{
    component::ComponentBench,
    events::Events,
    jobs::{assert_finished, given_up, given_up_by_component},
    kills::{Killed, Kills, Tally},
    launcher::{LauncherHangs, with_poll},
    soak,
};
use slim_lab::{
    Lab, SeededRng,
    faults::destroy::{Amount, Selector},
    mpi::{Flavor, Job, JobVerdict, Outcome},
    skip::skip,
};

use Flavor::{OpenMpi4, OpenMpi5Components};

const PROGRAM: &str = "slim_dynamic";
const LIMIT: Duration = Duration::from_secs(60);
/// Number of kills of a run.
const KILLS: usize = 30;
const MS: Duration = Duration::from_millis(1);

struct DynamicBench {
    component: ComponentBench,
    program: PathBuf,
    /// Number of nodes with processes, 1 or 2.
    nodes: usize,
}

impl DynamicBench {
    fn new(test: &str, flavor: Flavor, nodes: usize) -> Option<Self> {
        let component = ComponentBench::new(&format!("dynamic-{test}"), flavor)?;
        let program = component.bench.mpi.build_program("slim_dynamic.c");
        Some(Self {
            component,
            program: program.expect("build a test program"),
            nodes,
        })
    }

    fn job<'a>(&'a self, lab: &'a Lab, args: &[&str]) -> Job<'a> {
        let job = self.component.job_of(lab, self.program.clone(), 2);
        // All processes share this machine's cores: one that waits must let others run.
        let job = ["--mca", "mpi_yield_when_idle", "1"]
            .into_iter()
            .fold(job, Job::option)
            .nodes(self.nodes);
        let flavor = self.component.bench.mpi.flavor();
        let job = match flavor {
            // The launcher's own connections are not to be killed.
            OpenMpi5Components => ["--pmixmca", "ptl_base_if_include", "127.0.0.0/8"]
                .into_iter()
                .fold(job, Job::option),
            _ => with_poll(job),
        };
        args.iter().fold(job, |job, arg| job.arg(*arg))
    }

    /// Runs a job, kills its connections, and lets it end after that.
    fn run(&self, lab: &Lab, job: &Job<'_>, kills: Option<&Kills>, seed: u64) -> (Outcome, Killed) {
        let mut killed = Killed::default();
        let outcome = self.component.bench.run(lab, job, LIMIT, |job| {
            if let Some(kills) = kills {
                killed = kills.carry_out(lab, job, &mut SeededRng::new(seed));
            }
            fs::remove_file(go_on(lab)).expect("remove a file");
            format!("SLIM_LAB_SEED={seed}, {killed}")
        });
        (outcome, killed)
    }
}

/// The file whose removal ends the job.
fn go_on(lab: &Lab) -> PathBuf {
    lab.dir().join("go-on")
}

/// What the processes of a job do.
#[derive(Clone, Copy, Debug)]
enum Meeting {
    /// Half of the ranks accept the others.
    Halves,
    /// They spawn one process at a time, on each node in turn: Open MPI 4.1 cannot spawn processes on two hosts with one call.
    Spawn,
}

impl Meeting {
    fn job<'a>(self, bench: &'a DynamicBench, lab: &'a Lab) -> Job<'a> {
        fs::write(go_on(lab), "").expect("write a file");
        let file = go_on(lab);
        let file = file.to_string_lossy();
        match self {
            Meeting::Halves => bench.job(lab, &["halves", "3", &file]),
            Meeting::Spawn => {
                let nodes = lab.nodes()[..bench.nodes].iter().map(|node| node.name());
                let args: Vec<&str> = ["spawn", "3", &file].into_iter().chain(nodes).collect();
                bench.job(lab, &args)
            }
        }
    }
}

/// Connections live for a few rounds at most, so all of them are killed, often. On a single node those with itself are.
fn kills(lab: &Lab, nodes: usize) -> Kills {
    let pick = Selector::between_hosts().process(PROGRAM);
    let pick = match nodes {
        // Not those with the launcher, by 127.0.0.1.
        1 => pick.and_local().peer(lab.node(0).address(0)),
        _ => pick,
    };
    Kills {
        pick,
        amount: Amount::All,
        times: KILLS,
        gap: (20 * MS, 120 * MS),
        ..Kills::one_by_one()
    }
}

fn judge(lab: &Lab, outcome: &Outcome, killed: Killed) -> Result<(), String> {
    let verdict = outcome.verdict();
    if !matches!(verdict, JobVerdict::Finished(_)) {
        return Err(verdict.to_string());
    }
    if killed.times < KILLS {
        return Err(format!("only {killed}"));
    }
    if Events::read(lab).count("resume") == 0 {
        return Err("no resume".into());
    }
    given_up_by_component(lab, outcome)
}

/// Runs a job; see [`LauncherHangs::replace`].
fn run_job(
    bench: &DynamicBench,
    meeting: Meeting,
    with_kills: bool,
    seed: u64,
    hangs: &mut LauncherHangs,
) -> (Lab, Outcome, Killed) {
    hangs.replace(PROGRAM, || {
        let lab = bench.component.lab();
        let job = meeting.job(bench, &lab);
        let kills = with_kills.then(|| kills(&lab, bench.nodes));
        let (outcome, killed) = bench.run(&lab, &job, kills.as_ref(), seed);
        drop(job);
        (lab, outcome, killed)
    })
}

fn undisturbed(test: &str, flavor: Flavor, meeting: Meeting, nodes: usize) {
    let Some(bench) = DynamicBench::new(test, flavor, nodes) else {
        return;
    };
    let (lab, outcome, _) = run_job(&bench, meeting, false, 0, &mut LauncherHangs::default());
    assert_finished(test, &lab, &outcome);
    assert_eq!(given_up(&lab, &outcome), Ok(()));
}

fn survives(test: &str, flavor: Flavor, meeting: Meeting, nodes: usize) {
    let Some(bench) = DynamicBench::new(test, flavor, nodes) else {
        return;
    };
    let mut tally = Tally::new(&bench.component.bench.test);
    let mut hangs = LauncherHangs::default();
    for run in 0..if soak() { 50 } else { 2 } {
        let seed = SeededRng::seed_from_env() + run;
        let (lab, outcome, killed) = run_job(&bench, meeting, true, seed, &mut hangs);
        let result = judge(&lab, &outcome, killed);
        tally.add(lab, &outcome, killed, result);
    }
    tally.assert_all_right();
}

#[test]
fn spawned_processes_are_reached_by_all() {
    undisturbed("spawn", OpenMpi4, Meeting::Spawn, 2);
}

#[test]
fn spawned_processes_survive_kills() {
    survives("spawn-kills", OpenMpi4, Meeting::Spawn, 2);
}

#[test]
fn the_halves_of_a_job_connect() {
    undisturbed("halves", OpenMpi4, Meeting::Halves, 2);
}

#[test]
fn the_halves_of_a_job_survive_kills() {
    survives("halves-kills", OpenMpi4, Meeting::Halves, 2);
}

/// Open MPI's server for the names of ports, by which two jobs of 4.1 find each other. Ends when dropped.
struct PortServer(Child);

impl PortServer {
    /// `None`, with the reason printed: it is not installed.
    fn start(lab: &Lab) -> Option<(Self, String)> {
        let server = PathBuf::from("/usr/bin/ompi-server");
        if !server.exists() {
            skip("connect", "no ompi-server here");
            return None;
        }
        let uri = lab.dir().join("server");
        let mut command = lab.node(0).command(server);
        command.args(["--no-daemonize", "-r"]).arg(&uri);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let server = Self(command.spawn().expect("start ompi-server"));
        let begun = Instant::now();
        while !fs::read_to_string(&uri).is_ok_and(|text| text.contains("tcp://")) {
            assert!(
                begun.elapsed() < LIMIT,
                "ompi-server does not say where it is"
            );
            thread::sleep(10 * MS);
        }
        Some((server, format!("file:{}", uri.display())))
    }
}

impl Drop for PortServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two jobs with two ranks each, on one node: `mpirun` of 4.1.4 crashes when the jobs have ranks on two nodes. Returns the outcome of the
/// job that accepts, or why the other one did not end well.
fn two_jobs(
    bench: &DynamicBench,
    lab: &Lab,
    kills: Option<&Kills>,
    seed: u64,
) -> Option<Result<(Outcome, Killed), String>> {
    let (_server, uri) = PortServer::start(lab)?;
    fs::write(go_on(lab), "").expect("write a file");
    let (port, file) = (lab.dir().join("port"), go_on(lab));
    let (port, file) = (port.to_string_lossy(), file.to_string_lossy());
    let job = |args: &[&str]| bench.job(lab, args).option("--ompi-server").option(&*uri);
    let mut connecting = job(&["connect", &port]).start().expect("start mpirun");
    let accepting = job(&["accept", &port, "3", &file]);
    let mut ended = None;
    let mut killed = Killed::default();
    let outcome = bench.component.bench.run(lab, &accepting, LIMIT, |job| {
        if let Some(kills) = kills {
            killed = kills.carry_out(lab, job, &mut SeededRng::new(seed));
        }
        fs::remove_file(go_on(lab)).expect("remove a file");
        // Before the end of the other job is waited for, after which all processes of the lab are killed.
        ended = connecting.running().wait_end(LIMIT);
        format!("two jobs, SLIM_LAB_SEED={seed}, {killed}")
    });
    Some(match ended {
        Some(status) if status.success() => Ok((outcome, killed)),
        ended => Err(format!(
            "the job that connects: {ended:?}\n{}",
            connecting.wait(MS).tail(20)
        )),
    })
}

#[test]
fn two_jobs_connect() {
    let Some(bench) = DynamicBench::new("connect", OpenMpi4, 1) else {
        return;
    };
    let lab = bench.component.lab();
    let Some(ended) = two_jobs(&bench, &lab, None, 0) else {
        return;
    };
    let (outcome, _) = ended.expect("both jobs end well");
    assert_finished("connect", &lab, &outcome);
    assert_eq!(given_up(&lab, &outcome), Ok(()));
}

#[test]
fn two_jobs_that_connect_survive_kills() {
    let Some(bench) = DynamicBench::new("connect-kills", OpenMpi4, 1) else {
        return;
    };
    let mut tally = Tally::new(&bench.component.bench.test);
    for run in 0..if soak() { 50 } else { 2 } {
        let seed = SeededRng::seed_from_env() + run;
        let lab = bench.component.lab();
        match two_jobs(&bench, &lab, Some(&kills(&lab, bench.nodes)), seed) {
            None => return,
            Some(Ok((outcome, killed))) => {
                let result = judge(&lab, &outcome, killed);
                tally.add(lab, &outcome, killed, result);
            }
            Some(Err(what)) => panic!("run {run}: {what}"),
        }
    }
    tally.assert_all_right();
}

/// Spawned processes on one node only: docs/OPENMPI.md says what 5.0.7 cannot do without the component, either.
mod open_mpi_5 {
    use super::*;

    #[test]
    fn spawned_processes_are_reached_by_all() {
        undisturbed("spawn", OpenMpi5Components, Meeting::Spawn, 1);
    }

    #[test]
    fn spawned_processes_survive_kills() {
        survives("spawn-kills", OpenMpi5Components, Meeting::Spawn, 1);
    }
}
