//! `slim bench` with the adapters of this host.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Error, Netns, Process, artifacts,
    mpi::{Flavor, Mpi},
    skip::skip,
};

use super::{
    common::{rxe::Rxe, soak},
    openmpi::{component, queue_pairs},
    rxe, shell, wait,
};

const SOON: Duration = Duration::from_secs(20);
/// How often to look.
const LOOK: Duration = Duration::from_millis(50);

/// The program, the component, and two adapters.
struct Bench {
    slim: PathBuf,
    component: PathBuf,
    _rxe: Rxe,
}

impl Bench {
    /// `None`, with the skip printed: something is missing, or the test runs in the guest.
    fn make(test: &str) -> Option<Self> {
        let found = Mpi::find(Flavor::OpenMpi4).and_then(|mpi| {
            mpi.build_program("slim_bench.c")?;
            Ok((component(&mpi)?, artifacts::program("slim")?))
        });
        let (component, slim) = match found {
            Ok(found) => found,
            Err(error @ Error::Missing { .. }) => {
                skip(test, error);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let _rxe = rxe(test)?;
        shell("hostname guest");
        Some(Bench {
            slim,
            component,
            _rxe,
        })
    }

    fn command(&self, adapters: &str, how: &[&str]) -> Command {
        let mut command = Command::new(&self.slim);
        command
            .args(["bench", "--adapters", adapters, "--component"])
            .arg(&self.component)
            .args(how);
        command
    }

    /// The exit status, and what was said.
    fn run(&self, adapters: &str, how: &[&str]) -> (Option<i32>, String) {
        let output = self.command(adapters, how).output().unwrap();
        let text = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        let text = text.concat();
        println!("{text}");
        (output.status.code(), text)
    }
}

/// The processes of jobs.
fn processes() -> Vec<Process> {
    let mut all = Netns::current().unwrap().processes();
    let names = ["slim_bench", "mpirun", "mpirun.openmpi", "orterun", "orted"];
    all.retain(|process| names.contains(&process.name.as_str()));
    all
}

/// The directories of benchmarks.
fn directories() -> Vec<PathBuf> {
    let all = fs::read_dir(std::env::temp_dir()).unwrap().flatten();
    let is_own = |path: &PathBuf| path.to_string_lossy().contains("/slim-bench-");
    all.map(|entry| entry.path()).filter(is_own).collect()
}

const QUICK: [&str; 5] = ["--quick", "--rounds", "1", "--only", "latency"];

/// A short run compares Open MPI over verbs with the same component over TCP and with `btl/tcp`. If the flows do not get to queue pairs there are no figures.
#[test]
fn open_mpi_over_verbs_is_a_contender() {
    let test = "bench::open_mpi_over_verbs_is_a_contender";
    let Some(bench) = Bench::make(test) else {
        return;
    };
    let json = ["--json", "/run/tmp/bench.json"];
    // With SLIM_SOAK=1 it is a measurement, for which nothing else may run.
    let how = match soak() {
        true => &["--rounds", "7", "--only", "latency,bandwidth"][..],
        false => &QUICK,
    };
    let (status, text) = bench.run("rx1,rx2", &[how, &json].concat());
    assert_eq!(status, Some(0), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(json[1]).unwrap()).unwrap();
    let measured = &report["messages"][0];
    let names = serde_json::json!(["bare", "component", "verbs"]);
    assert_eq!(measured["contenders"], names);
    for run in measured["points"][0]["runs"].as_array().unwrap() {
        assert!(run["median"].as_f64().unwrap() > 0.0, "{run}");
    }
    let (status, text) = bench.run("rx1,rx9", &QUICK);
    assert_eq!(status, Some(2), "{text}");
    assert!(text.contains("no adapter rx9 (rx1, rx2)"), "{text}");

    // Nothing of RoCE passes. TCP does.
    shell(
        "nft add table inet no; nft add chain inet no in '{ type filter hook input priority 0; }'; \
         nft add rule inet no in udp dport 4791 drop",
    );
    let (status, text) = bench.run("rx1,rx2", &QUICK);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("does not get to queue pairs"), "{text}");
}

/// The user's environment does not change what is compared, and nothing is left of a run that is killed, also if a rank hangs.
#[test]
fn a_benchmark_is_what_it_says_and_leaves_nothing() {
    let test = "bench::a_benchmark_is_what_it_says_and_leaves_nothing";
    let Some(bench) = Bench::make(test) else {
        return;
    };
    let mut running = bench
        .command(
            "rx1,rx2",
            &[&QUICK[..], &["--against", "component"]].concat(),
        )
        .env("OMPI_MCA_btl_slim_transports", "verbs,tcp")
        .spawn()
        .unwrap();
    let mut pairs = 0;
    let status = wait("the end", 3 * SOON, || {
        thread::sleep(LOOK);
        pairs = pairs.max(queue_pairs());
        running.try_wait().unwrap()
    });
    assert!(status.success(), "{status}");
    assert_eq!(pairs, 0, "the component over TCP used queue pairs");

    let mut running = bench
        .command("rx1,rx2", &["--rounds", "2", "--only", "latency"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ranks = || {
        let mut all = processes();
        all.retain(|process| process.name == "slim_bench");
        all
    };
    let all = wait("all ranks", 3 * SOON, || {
        thread::sleep(LOOK);
        Some(ranks()).filter(|all| all.len() == 6 && queue_pairs() == 2)
    });
    kill(Pid::from_raw(all[5].pid.cast_signed()), Signal::SIGSTOP).unwrap();
    running.kill().unwrap();
    running.wait().unwrap();
    let begun = Instant::now();
    while !(processes().is_empty() && directories().is_empty()) {
        let left = (processes(), directories());
        assert!(begun.elapsed() < SOON, "left: {left:?}");
        thread::sleep(LOOK);
    }
}
