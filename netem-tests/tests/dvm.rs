//! PRRTE's virtual machine (DVM): `prte` starts its daemons once, and `prun` starts jobs on it, while connections are being killed.

mod common;

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use common::{
    events::{Events, events_dir},
    jobs::{Bench, given_up},
    kills::{Killed, Kills},
};
use slim_lab::{
    Lab, SeededRng, artifacts,
    faults::destroy::{self, Amount, Selector},
    launch,
    mpi::{Flavor, JobVerdict, Outcome, Started, tcp_environment},
    skip::skip,
};

const LIMIT: Duration = Duration::from_secs(30);
/// The limit for a job that is expected to hang. Its work is done long before.
const SHORT: Duration = Duration::from_secs(4);

/// Everything for jobs, or `None` with the skip and its reason printed.
fn bench(test: &str) -> Option<Bench> {
    let bench = Bench::new(test, Flavor::OpenMpi5Components)?;
    let prun = bench.mpi.mpirun().with_file_name("prun");
    if prun.exists() {
        return Some(bench);
    }
    skip(
        test,
        format!("{} not found; run scripts/setup", prun.display()),
    );
    None
}

/// A virtual machine on both nodes of a lab.
struct Machine<'a> {
    bench: &'a Bench,
    lab: &'a Lab,
    with_slim: bool,
    uri: PathBuf,
}

impl<'a> Machine<'a> {
    /// Starts `prte`, which goes to the background as soon as its daemons run.
    fn start(bench: &'a Bench, lab: &'a Lab, with_slim: bool) -> Self {
        let uri = lab.dir().join("dvm.uri");
        let machine = Machine {
            bench,
            lab,
            with_slim,
            uri,
        };
        let mut command = machine.command("prte");
        let agent = artifacts::program("slim-lab-agent").expect("the lab's agent");
        command.args(["--daemonize", "--host", "nodeA:2,nodeB:2"]);
        command.arg("--report-uri").arg(&machine.uri);
        command.env("PRTE_MCA_plm_ssh_agent", agent);
        let null = Stdio::null;
        let status = command.stdin(null()).stdout(null()).stderr(null()).status();
        assert!(status.expect("start prte").success(), "prte failed");
        machine
    }

    /// A program of PRRTE on the first node, by `slim run`.
    fn command(&self, name: &str) -> Command {
        let program = self.bench.mpi.mpirun().with_file_name(name);
        let node = self.lab.node(0);
        let mut command = match self.with_slim {
            false => node.command(program),
            true => {
                let mut command = node.command(artifacts::program("slim").expect("slim"));
                let events = events_dir(self.lab).join("%h.%p.jsonl");
                command.args(["run", "--preload"]);
                command.arg(artifacts::preload().expect("the preload library"));
                command.arg("--events").arg(events).arg("--").arg(program);
                command
            }
        };
        command.arg("--allow-run-as-root");
        command.envs(launch::environment(self.lab));
        command.envs(tcp_environment(self.lab, &self.bench.mpi));
        command
            .env_remove("LD_PRELOAD")
            .env_remove(artifacts::PRELOAD_VAR);
        command
    }

    /// Runs a job on it, and kills all connections between the nodes meanwhile.
    fn run(&self, kills: &Kills, limit: Duration) -> (Outcome, Killed) {
        let go_on = self.lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        let mut command = self.command("prun");
        let uri = format!("file:{}", self.uri.display());
        command.args(["--dvm-uri", &uri, "-n", "4", "--bind-to", "none"]);
        command.arg(&self.bench.program).arg("1").arg(&go_on);
        let seed = SeededRng::seed_from_env();
        let mut started = Started::of(self.lab, command).expect("start prun");
        let working = started.wait_working(Duration::from_secs(20));
        assert!(working, "no work: {:?}", started.running().lines());
        let killed = kills.while_working(self.lab, &mut started, &go_on, seed);
        let outcome = started.wait(limit);
        let (test, verdict) = (&self.bench.test, outcome.verdict());
        let events = Events::read(self.lab);
        println!("{test}: SLIM_LAB_SEED={seed}, {killed}; {verdict}; {events}");
        (outcome, killed)
    }
}

fn all_between_hosts() -> Kills {
    Kills {
        pick: Selector::between_hosts(),
        amount: Amount::All,
        gap: (Duration::from_millis(80), Duration::from_millis(220)),
        window: Duration::from_secs(20),
        ..Kills::one_by_one()
    }
}

#[test]
fn ranks_and_daemons_survive() {
    let Some(bench) = bench("dvm") else {
        return;
    };
    let lab = bench.lab(1);
    let machine = Machine::start(&bench, &lab, true);
    let kills = all_between_hosts();
    // The connections of a machine that has no job.
    let mut rng = SeededRng::new(SeededRng::seed_from_env());
    let node = lab.node(1).net();
    let idle = destroy::destroy(node, &kills.pick, Amount::All, &mut rng).expect("kill");
    assert!(!idle.connections.is_empty(), "{idle}");
    let (outcome, killed) = machine.run(&kills, LIMIT);
    let finished = matches!(outcome.verdict(), JobVerdict::Finished(_));
    assert!(finished, "{}\n{}", outcome.verdict(), outcome.tail(40));
    assert_eq!(killed.times, kills.times, "{killed}");
    let events = Events::read(&lab);
    for host in ["nodeA", "nodeB"] {
        let resumed = events.of_kind("resume").any(|e| e["host"] == host);
        assert!(resumed, "no resume on {host}");
    }
    given_up(&lab, &outcome).expect("no flow is given up");
}

/// The counterpart, which shows that the test above can fail.
#[test]
fn a_bare_machine_does_not() {
    let Some(bench) = bench("dvm-bare") else {
        return;
    };
    let lab = bench.lab(1);
    let machine = Machine::start(&bench, &lab, false);
    let kills = Kills {
        window: Duration::from_secs(4),
        ..all_between_hosts()
    };
    let (outcome, killed) = machine.run(&kills, SHORT);
    assert!(killed.times > 0);
    let finished = matches!(outcome.verdict(), JobVerdict::Finished(_));
    assert!(!finished, "a bare run finished: the faults are not real");
}
