//! `slim chaos` with netem: nothing is left behind, disciplines of the user are left alone, and an MPI job survives a bad line on which its
//! connections are killed all the time. On a kernel without netem the tests run in a guest.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use common::{eventually, guest::here};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use slim_lab::{
    Lab, Netns, artifacts,
    faults::{
        lines::NetemLines,
        netem::{Delay, Netem},
    },
    mpi::{self, Flavor, Mpi, Progress},
    skip::skip,
};

const MS: Duration = Duration::from_millis(1);
/// Limit of the job under SLIM, in seconds. It takes 10 to 20.
const LIMIT: &str = "100";
/// Limit of the bare job, which may hang.
const BARE_LIMIT: &str = "15";

fn lab(test: &str) -> Lab {
    common::lab(test, 2, 1).expect("root has been checked")
}

/// The queueing disciplines of all interfaces of a namespace, in words.
fn disciplines(net: &Netns) -> String {
    net.exec("tc", &["qdisc", "show"]).unwrap()
}

/// `slim` without the settings of the tests.
fn slim() -> Command {
    let slim = artifacts::program("slim").expect("cargo build --release -p slim-cli");
    let mut command = Command::new(slim);
    command.env_remove("SLIM_LAB_SEED").env_remove("SLIM_SOAK");
    command
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{}: {out}{err}", output.status)
}

/// A plan in a file of the lab.
fn plan(lab: &Lab, text: &str) -> PathBuf {
    let path = lab.dir().join("plan.toml");
    fs::write(&path, text).unwrap();
    path
}

/// Two overlapping faults, for longer than the test.
const LONG: &str = "[[fault]]\nkind = \"netem\"\nstart = 0\nlasts = 60\nnetem = { delay = \"5ms\" }\n\
                    [[fault]]\nkind = \"netem\"\nstart = 0.2\nlasts = 60\nnetem = { loss = \"2%\" }\n";

/// The faults hit the network namespace of a process, which outlives `slim`.
#[test]
fn nothing_is_left_behind() {
    let test = "nothing_is_left_behind";
    if !here(test) {
        return;
    }
    let lab = lab(test);
    let net = lab.node(0).net();
    let before = disciplines(net);
    let mut job = lab.node(0).command("sleep").arg("60").spawn().unwrap();
    let on_job = |text: &str| {
        let mut command = slim();
        command.arg("chaos").arg(plan(&lab, text));
        command.args(["--whole-namespace", "--pid", &job.id().to_string()]);
        command.stdout(Stdio::null());
        command
    };
    let short = LONG.replace("60", "0.5");
    assert!(on_job(&short).status().unwrap().success());
    assert_eq!(disciplines(net), before, "after the end of the plan");
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let mut chaos = on_job(LONG).spawn().unwrap();
        let both = || disciplines(net).contains("delay 5ms loss 2%");
        assert!(eventually(5000 * MS, both), "{}", disciplines(net));
        kill(Pid::from_raw(chaos.id().cast_signed()), signal).unwrap();
        chaos.wait().unwrap();
        assert!(
            eventually(2000 * MS, || disciplines(net) == before),
            "{signal}: {}",
            disciplines(net)
        );
    }
    job.kill().unwrap();
    job.wait().unwrap();
}

/// netem would replace a discipline of the user's, so the plan is refused.
#[test]
fn a_discipline_of_the_user_is_left_alone() {
    let test = "a_discipline_of_the_user_is_left_alone";
    if !here(test) {
        return;
    }
    let lab = lab(test);
    let (net, interface) = (lab.node(0).net(), lab.node(0).interface(0));
    let own = [
        "qdisc", "add", "dev", &interface, "root", "tbf", "rate", "1gbit", "burst", "100k",
        "latency", "50ms",
    ];
    net.exec("tc", &own).unwrap();
    let before = disciplines(net);
    let mut job = lab.node(0).command("sleep").arg("60").spawn().unwrap();
    let output = slim()
        .arg("chaos")
        .arg(plan(&lab, LONG))
        .args(["--whole-namespace", "--pid", &job.id().to_string()])
        .output()
        .unwrap();
    let said = text(&output);
    job.kill().unwrap();
    job.wait().unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    let delay = Delay {
        mean: MS,
        ..Delay::default()
    };
    let late = Netem {
        delay: Some(delay),
        ..Netem::default()
    };
    assert!(said.contains("discipline of its own (tbf"), "{said}");
    assert_eq!(disciplines(net), before);
    assert!(NetemLines::default().apply(net, &interface, &late).is_err());
    assert_eq!(disciplines(net), before);
}

/// Runs the MPI program in a lab of `slim chaos`, under the plan of examples/chaos, with these words before `mpirun`.
fn job(program: &Path, mpi: &Mpi, limit: &str, before: &[&str]) -> Output {
    let plan = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/chaos/bad-line.toml");
    let mut command = slim();
    command.arg("chaos").arg(plan).args(["--json", "--"]);
    command.args(["timeout", "--kill-after=5", limit]);
    command.args(before).arg(mpi.mpirun());
    command.args(["--allow-run-as-root", "-H", "nodeA:1,nodeB:1", "-np", "2"]);
    command.args(mpi::by_tcp("10.77.0.0/24"));
    // The guest has one processor.
    command.args(["--mca", "mpi_yield_when_idle", "1"]);
    command.arg(program).arg("5").output().unwrap()
}

/// The same plan for both.
#[test]
fn an_mpi_job_survives_a_bad_line_and_kills() {
    let test = "an_mpi_job_survives_a_bad_line_and_kills";
    let mpi = match Mpi::find(Flavor::OpenMpi4) {
        Ok(mpi) => mpi,
        Err(reason) => return skip(test, reason),
    };
    let program = mpi.build_program("slim_pp.c").unwrap();
    if !here(test) {
        return;
    }
    let word = |path: PathBuf| path.to_str().unwrap().to_owned();
    let slim = word(artifacts::program("slim").unwrap());
    let library = word(artifacts::preload().unwrap());
    let events = std::env::temp_dir().join(format!("{test}-{}", std::process::id()));
    fs::create_dir(&events).unwrap();
    let log = word(events.join("%h.%p.jsonl"));
    let begin = Instant::now();
    let words = [&slim, "run", "--preload", &library, "--events", &log, "--"];
    let output = job(&program, &mpi, LIMIT, &words);
    let said = text(&output);
    let done = said.lines().find(|line| line.contains("DONE "));
    let done = done.and_then(Progress::parse);
    assert!(
        output.status.success() && done.is_some_and(|done| done.errors == 0),
        "{said}"
    );
    let faults = faults(&said);
    let hit: u64 = faults.iter().filter_map(|f| f["hit"].as_u64()).sum();
    let resumed = resumes(&events);
    println!(
        "under SLIM: {done:?}, {hit} connections killed, {resumed} resumes, {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    fs::remove_dir_all(&events).unwrap();
    assert!(hit >= 3 && resumed > 0, "{said}");
    for fault in &faults {
        assert_eq!(fault["failed"], false, "{said}");
    }
    let bare = job(&program, &mpi, BARE_LIMIT, &[]);
    let said = text(&bare);
    println!("bare: {}", bare.status);
    assert!(!bare.status.success() && !said.contains("DONE "), "{said}");
}

/// The number of resumes in the event logs of a directory.
fn resumes(dir: &Path) -> usize {
    let logs = fs::read_dir(dir).unwrap();
    let texts = logs.map(|log| fs::read_to_string(log.unwrap().path()).unwrap());
    let of_one = |text: String| text.matches("\"kind\":\"resume\"").count();
    texts.map(of_one).sum()
}

/// The faults in the report behind the output of a job.
fn faults(said: &str) -> Vec<serde_json::Value> {
    let begin = said.find("\n{\n").expect("a report");
    let mut values = serde_json::Deserializer::from_str(&said[begin..]).into_iter();
    let report: serde_json::Value = values.next().unwrap().unwrap();
    report["faults"].as_array().unwrap().clone()
}
