//! MPI jobs that Slurm starts, by `srun` and by launchers within an allocation, while connections are being killed.

mod common;

use std::{ffi::OsStr, fs, process::Command, thread, time::Duration};

use common::{
    events::{Events, events_dir},
    jobs::{Bench, given_up},
    kills::{Killed, Kills},
    slurm::{self, Slurm},
    soak,
};
use slim_lab::{
    Lab, SeededRng, artifacts,
    faults::destroy::{Amount, Selector},
    mpi::{Flavor, JobVerdict, Outcome, Started, tcp_environment},
    skip::skip,
};

/// The least seconds of work in a run, and the time limit for the run after the kills.
const WORK: u64 = 1;
const LIMIT: Duration = Duration::from_secs(30);
/// The limit for a job that is expected to hang. Its work is done long before.
const SHORT: Duration = Duration::from_secs(2);
const SALLOC: [&str; 6] = ["salloc", "--quiet", "-N2", "-n4", "--immediate=10", "--"];
const SRUN: [&str; 3] = ["srun", "-N2", "-n4"];

/// Everything for jobs of `flavor`, or `None` with the skip and its reason printed.
fn bench(test: &str, flavor: Flavor) -> Option<Bench> {
    match slurm::missing() {
        Some(reason) => {
            skip(test, reason);
            None
        }
        None => Bench::shared(test, flavor),
    }
}

/// `words`, of which `slim run` stands for itself with its options.
fn command(slurm: &Slurm<'_>, lab: &Lab, bench: &Bench, words: &[&OsStr]) -> Command {
    let slim = artifacts::program("slim").expect("slim");
    let library = artifacts::preload().expect("the preload library");
    let events = events_dir(lab).join("%h.%p.jsonl");
    let mut all = Vec::new();
    for word in words {
        match word.to_str() {
            Some("slim run") => {
                let options = ["run".as_ref(), "--preload".as_ref(), library.as_os_str()];
                all.extend([slim.as_os_str()].into_iter().chain(options));
                all.extend(["--events".as_ref(), events.as_os_str(), "--".as_ref()]);
            }
            _ => all.push(word),
        }
    }
    let mut command = slurm.command(all[0]);
    command
        .args(&all[1..])
        .envs(tcp_environment(lab, &bench.mpi));
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] {
        command.env(name, "1");
    }
    command.env_remove(artifacts::PRELOAD_VAR);
    command
}

/// A job that Slurm starts.
struct SlurmJob<'a> {
    /// The daemons of Slurm have the library.
    daemons_too: bool,
    /// The command up to the program.
    words: &'a [&'a OsStr],
    kills: Kills,
    limit: Duration,
}

impl SlurmJob<'_> {
    /// Runs it, and kills connections until all are killed or the job has ended.
    fn run(&self, bench: &Bench, lab: &Lab) -> (Outcome, Killed) {
        let slurm = Slurm::start(lab, self.daemons_too);
        let seed = SeededRng::seed_from_env();
        let go_on = lab.dir().join("go-on");
        fs::write(&go_on, "").expect("write a file");
        let work = WORK.to_string();
        let program = [bench.program.as_os_str(), work.as_ref(), go_on.as_os_str()];
        let words = [self.words, &program].concat();
        let command = command(&slurm, lab, bench, &words);
        let mut started = Started::of(lab, command).expect("start a job");
        let working = started.wait_working(Duration::from_secs(20));
        assert!(working, "no work: {:?}\n{slurm}", started.running().lines());
        let killed = self.kills.while_working(lab, &mut started, &go_on, seed);
        let outcome = started.wait(self.limit);
        let events = Events::read(lab);
        let verdict = outcome.verdict();
        println!(
            "{}: SLIM_LAB_SEED={seed}, {killed}; {verdict}; {events}",
            bench.test
        );
        (outcome, killed)
    }

    /// All kills are carried out, and the job finishes with every byte right.
    fn survives(&self, test: &str, flavor: Flavor) {
        let Some(bench) = bench(test, flavor) else {
            return;
        };
        let lab = bench.lab(1);
        let (outcome, killed) = self.run(&bench, &lab);
        let finished = matches!(outcome.verdict(), JobVerdict::Finished(_));
        assert!(finished, "{}\n{}", outcome.verdict(), outcome.tail(40));
        assert_eq!(killed.times, self.kills.times, "{killed}");
        assert!(Events::read(&lab).count("resume") > 0, "no resume");
        given_up(&lab, &outcome).expect("no flow is given up");
    }
}

/// Kills connections of the ranks, one at a time.
fn one_by_one() -> Kills {
    Kills {
        gap: (Duration::from_millis(50), Duration::from_millis(120)),
        times: if soak() { 200 } else { 12 },
        ..Kills::one_by_one()
    }
}

/// Kills all connections between the nodes, whoever has them.
fn everything() -> Kills {
    Kills {
        pick: Selector::between_hosts(),
        amount: Amount::All,
        ..one_by_one()
    }
}

/// The words of a command.
fn words<'a>(parts: &'a [&[&'a str]]) -> Vec<&'a OsStr> {
    parts
        .iter()
        .flat_map(|part| part.iter().map(OsStr::new))
        .collect()
}

fn ranks_survive(test: &str, flavor: Flavor, pmi: &str) {
    SlurmJob {
        daemons_too: false,
        words: &words(&[&["slim run"], &SRUN, &[pmi]]),
        kills: one_by_one(),
        limit: LIMIT,
    }
    .survives(test, flavor);
}

#[test]
fn open_mpi_4_by_srun() {
    ranks_survive("srun", Flavor::OpenMpi4, "--mpi=pmix");
}

#[test]
fn open_mpi_5_by_srun() {
    ranks_survive("srun", Flavor::OpenMpi5, "--mpi=pmix");
}

#[test]
fn mpich_4_by_srun() {
    ranks_survive("srun", Flavor::Mpich4, "--mpi=pmi2");
}

#[test]
fn mpich_5_by_srun_without_the_environment() {
    SlurmJob {
        daemons_too: false,
        words: &words(&[
            &["slim run"],
            &SRUN,
            // What MPICH needs to talk by TCP, and nothing else.
            &[
                "--mpi=pmi2",
                "--export=UCX_TLS,UCX_NET_DEVICES,MPIR_CVAR_NOLOCAL,HWLOC_XMLFILE",
            ],
        ]),
        kills: one_by_one(),
        limit: LIMIT,
    }
    .survives("srun", Flavor::Mpich5);
}

#[test]
fn srun_of_slim_run() {
    SlurmJob {
        daemons_too: false,
        words: &words(&[&SRUN, &["--mpi=pmix", "slim run"]]),
        kills: one_by_one(),
        limit: LIMIT,
    }
    .survives("srun-of-slim-run", Flavor::OpenMpi4);
}

#[test]
fn everything_by_srun_if_the_daemons_of_slurm_have_the_library() {
    for (flavor, pmi) in [
        (Flavor::OpenMpi4, "--mpi=pmix"),
        (Flavor::Mpich5, "--mpi=pmi2"),
    ] {
        SlurmJob {
            daemons_too: true,
            words: &words(&[&["slim run"], &SRUN, &[pmi]]),
            kills: everything(),
            limit: LIMIT,
        }
        .survives("srun-everything", flavor);
    }
}

/// Slurm ends a step when it loses a connection of `srun`. This is so with and without SLIM in `srun`, as long as the daemons do not have
/// it.
#[test]
fn a_lost_connection_of_srun_ends_the_job_if_the_daemons_are_bare() {
    let Some(bench) = bench("srun-io", Flavor::OpenMpi4) else {
        return;
    };
    let lab = bench.lab(1);
    let job = SlurmJob {
        daemons_too: false,
        words: &words(&[&["slim run"], &SRUN, &["--mpi=pmix"]]),
        kills: Kills {
            pick: Selector::between_hosts().process("srun"),
            ..everything()
        },
        limit: LIMIT,
    };
    let (outcome, killed) = job.run(&bench, &lab);
    assert!(killed.times > 0);
    assert!(
        matches!(outcome.verdict(), JobVerdict::Failed(_)),
        "{}",
        outcome.verdict()
    );
    let why = "io error with slurmstepd";
    let said = outcome.lines.iter().any(|line| line.text.contains(why));
    assert!(said, "{}", outcome.tail(20));
}

/// `before` are words before `salloc`, and `options` those of the launcher.
fn in_an_allocation(flavor: Flavor, before: &[&str], options: &[&str]) {
    let test = "salloc";
    let Some(launcher) = bench(test, flavor).map(|bench| bench.mpi.mpirun().to_owned()) else {
        return;
    };
    let parts = [before, &SALLOC, &["slim run"]];
    let mut all = words(&parts);
    all.push(launcher.as_os_str());
    all.extend(options.iter().map(OsStr::new));
    SlurmJob {
        daemons_too: true,
        words: &all,
        kills: everything(),
        limit: LIMIT,
    }
    .survives(test, flavor);
}

#[test]
fn open_mpi_4_in_an_allocation() {
    in_an_allocation(Flavor::OpenMpi4, &[], &["-n", "4", "--bind-to", "none"]);
}

#[test]
fn open_mpi_5_in_an_allocation() {
    in_an_allocation(Flavor::OpenMpi5, &[], &["-n", "4", "--bind-to", "none"]);
}

#[test]
fn mpich_5_in_an_allocation() {
    // As in a script that sbatch was given with --export=NONE: srun, by which hydra starts its daemons, would pass nothing on.
    let none = ["env", "SLURM_EXPORT_ENV=NONE"];
    in_an_allocation(Flavor::Mpich5, &none, &["-n", "4"]);
}

/// The counterpart, which shows that the tests above can fail.
#[test]
fn a_bare_job_does_not_finish() {
    let Some(bench) = bench("srun-bare", Flavor::OpenMpi4) else {
        return;
    };
    let lab = bench.lab(1);
    let job = SlurmJob {
        daemons_too: false,
        words: &words(&[&SRUN, &["--mpi=pmix"]]),
        kills: Kills {
            amount: Amount::All,
            window: Duration::from_secs(2),
            ..one_by_one()
        },
        limit: SHORT,
    };
    let (outcome, killed) = job.run(&bench, &lab);
    assert!(killed.times > 0);
    let finished = matches!(outcome.verdict(), JobVerdict::Finished(_));
    assert!(!finished, "a bare run finished: the faults are not real");
}

#[test]
fn two_labs_at_the_same_time_have_a_slurm_each() {
    let Some(bench) = bench("two-slurms", Flavor::OpenMpi4) else {
        return;
    };
    let hosts = || {
        let lab = bench.lab(1);
        let slurm = Slurm::start(&lab, false);
        let mut command = slurm.command("srun");
        let output = command.args(["-N2", "--immediate=10", "hostname"]).output();
        let output = output.expect("start srun");
        let text = String::from_utf8_lossy(&output.stdout);
        let mut hosts: Vec<_> = text.lines().map(str::to_owned).collect();
        hosts.sort_unstable();
        hosts
    };
    let both = thread::scope(|scope| {
        let other = scope.spawn(hosts);
        [hosts(), other.join().expect("no panic")]
    });
    for hosts in both {
        assert_eq!(hosts, ["nodeA", "nodeB"]);
    }
}
