//! Jobs that go on without failed ranks (ULFM, Open MPI 5.0) under `slim run`. Lost connections cost no rank. If ranks lose each
//! other for good, the witness of the job decides, and exactly one half goes on.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::Scratch;
use slim_cli::lab::launcher_environment;
use slim_lab::faults::destroy::{self, Amount, Selector};
use slim_lab::faults::nft::{Rule, RuleGuard};
use slim_lab::mpi::{Flavor, Mpi, ULFM_OPTIONS, by_tcp};
use slim_lab::{Lab, Node, SeededRng, artifacts, skip::skip};

const PROGRAM: &str = "slim_ulfm";
/// Longer than everything that a job here may need.
const LIMIT: Duration = Duration::from_secs(90);

/// Length of messages at most, in jobs in which a rank dies: with longer ones under way `btl/tcp` itself crashes now and then (docs/ULFM.md).
const WORDS: &str = "2000";

/// How the ranks talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    /// By `btl/tcp`, without SLIM.
    Bare,
    /// By `btl/tcp`, under the preload library.
    Tcp,
    Component,
}

/// The shape of a job.
#[derive(Clone, Copy)]
struct Shape {
    /// The last nodes of the lab have ranks. `mpirun` is on the first node.
    nodes: usize,
    /// Ranks on each of them.
    each: usize,
    seconds: u32,
    carrier: Carrier,
    /// Whether the ranks spawn further ones, on the last node of the lab.
    more: More,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum More {
    None,
    /// One at the start.
    Spawn,
    /// One for each that has died.
    Replace,
}

/// One job at a time: otherwise each waits for the processors.
static ALONE: Mutex<()> = Mutex::new(());

struct UlfmLab {
    lab: Lab,
    mpi: Mpi,
    program: PathBuf,
    scratch: Scratch,
    _alone: MutexGuard<'static, ()>,
}

/// A job under way.
struct UlfmJob<'a> {
    of: &'a UlfmLab,
    child: Child,
    started: Instant,
}

/// What is left of a job.
struct Ended {
    /// Exit status of `mpirun`; none if it did not end in time.
    status: Option<i32>,
    text: String,
}

impl UlfmLab {
    fn new(test: &str, flavor: Flavor, nodes: usize) -> Option<Self> {
        let mpi = match Lab::check().and_then(|()| Mpi::find(flavor)) {
            Ok(mpi) => mpi,
            Err(reason) => {
                skip(test, reason);
                return None;
            }
        };
        let program = mpi.build_program("slim_ulfm.c").unwrap();
        let lab = Lab::builder().nodes(nodes).name("cli-ulfm").build();
        Some(Self {
            lab: lab.unwrap(),
            mpi,
            program,
            scratch: Scratch::new(test),
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// Starts a job, with `mpirun` on the first node.
    fn start(&self, shape: Shape) -> UlfmJob<'_> {
        let key = self.scratch.write("key", "the key of the job in this test");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(&key, mode).unwrap();
        let log = File::create(self.scratch.path("log")).unwrap();
        let nodes = self.lab.nodes();
        // Ranks that are spawned have room on the last node, and in a job that spawns one the last node has no other.
        let first = match shape.more {
            More::Spawn => shape.nodes - 1,
            _ => shape.nodes,
        };
        let ranks = first * shape.each;
        let hosts: Vec<_> = nodes[nodes.len() - shape.nodes..]
            .iter()
            .enumerate()
            .map(
                |(n, node)| match n + 1 == shape.nodes && shape.more != More::None {
                    true => format!("{}:{}", node.name(), shape.each + 1),
                    false => format!("{}:{}", node.name(), shape.each),
                },
            )
            .collect();
        let mut command = match shape.carrier {
            Carrier::Bare => self.lab.node(0).command(self.mpi.mpirun()),
            _ => self.lab.node(0).command(env!("CARGO_BIN_EXE_slim")),
        };
        command.envs(launcher_environment(&self.lab).unwrap());
        command.env("SLIM_JOB_KEY_FILE", key);
        command.env("SLIM_EVENTS", self.scratch.path("events.%h.%p"));
        for name in ["LD_PRELOAD", "SLIM_SOAK", "SLIM_PRELOAD"] {
            command.env_remove(name);
        }
        if shape.carrier != Carrier::Bare {
            command.arg("run");
            command.args((shape.carrier == Carrier::Component).then_some("--btl"));
            command.arg("--preload").arg(artifacts::preload().unwrap());
            command.arg("--").arg(self.mpi.mpirun());
        }
        command.args(["-H", &hosts.join(","), "-np", &ranks.to_string()]);
        // Only the ranks give up soon: the daemons need their connections for longer.
        command.args(["-x", "SLIM_ATTEMPT_TIMEOUTS=0.5,1"]);
        match shape.carrier {
            Carrier::Bare | Carrier::Tcp => command.args(by_tcp(&self.lab.subnet(0))),
            Carrier::Component => command.args(["--bind-to", "none"]),
        };
        command.args(ULFM_OPTIONS);
        command.arg(&self.program).arg(shape.seconds.to_string());
        let last = nodes[nodes.len() - 1].name();
        match shape.more {
            More::None => {}
            More::Spawn => drop(command.args([WORDS, "spawn", last])),
            More::Replace => drop(command.args([WORDS, "replace", last])),
        }
        command.stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        UlfmJob {
            of: self,
            child: command.spawn().unwrap(),
            started: Instant::now(),
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scratch.path("log")).unwrap_or_default()
    }

    /// The events of all processes.
    fn events(&self) -> String {
        let dir = fs::read_dir(self.scratch.path("")).unwrap().flatten();
        let logs = dir.filter(|file| file.file_name().to_string_lossy().starts_with("events"));
        logs.filter_map(|file| fs::read_to_string(file.path()).ok())
            .collect()
    }
}

impl UlfmJob<'_> {
    fn wait_working(&self) {
        while lines(&self.of.log(), "t=").next().is_none() {
            assert!(self.started.elapsed() < LIMIT, "{}", self.of.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the job has ended.
    fn wait(self) -> Ended {
        self.wait_for(|| false)
    }

    /// Waits until the job has ended, or this holds. Then, or if it takes too long, kills what is left of the job.
    fn wait_for(mut self, over: impl Fn() -> bool) -> Ended {
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break Some(status.code().unwrap_or(-1)),
                None if self.started.elapsed() > LIMIT || over() => break None,
                None => thread::sleep(Duration::from_millis(20)),
            }
        };
        let mut text = self.of.log();
        if status.is_none() {
            for node in self.of.lab.nodes() {
                let left = node.processes();
                let left: Vec<_> = left
                    .iter()
                    .map(|p| format!("{} {}", p.pid, p.name))
                    .collect();
                text += &format!("left on {}: {}\n", node.name(), left.join(", "));
                node.kill_all();
            }
            let _ = self.child.wait();
        }
        Ended { status, text }
    }
}

/// Destroys all connections between ranks on different nodes; how many there were.
fn kill_connections(nodes: &[Node]) -> usize {
    let pick = Selector::between_hosts().process(PROGRAM);
    let kill = |node: &Node| {
        destroy::destroy(node.net(), &pick, Amount::All, &mut SeededRng::new(1)).unwrap()
    };
    nodes.iter().map(|node| kill(node).connections.len()).sum()
}

/// Nothing passes between these nodes any more, in either direction, and all connections between them break.
fn part(one: &[Node], other: &[Node]) -> Vec<RuleGuard> {
    let from = |nodes: &[Node]| {
        let all = nodes.iter().flat_map(|node| node.addresses().to_vec());
        Rule::drop().from_addresses(all)
    };
    let guards = vec![
        from(one).apply_to(other).unwrap(),
        from(other).apply_to(one).unwrap(),
    ];
    kill_connections(one);
    kill_connections(other);
    guards
}

/// The lines of a job that begin with this.
fn lines<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter(move |line| line.starts_with(start))
}

/// Whether the job has ended well, with that many ranks and right data.
fn has_finished(ended: &Ended, ranks: usize) -> bool {
    let done = lines(&ended.text, "DONE ").last().unwrap_or_default();
    ended.status == Some(0)
        && done.contains(" errs=0 ")
        && done.ends_with(&format!(" ranks={ranks}"))
}

fn runs() -> u32 {
    match std::env::var_os("SLIM_SOAK").is_some() {
        true => 20,
        false => 2,
    }
}

/// Asserts that one rank is left and has finished its work, and that the other one was fenced.
fn assert_one_is_left(test: &UlfmLab, ended: &Ended, reason: &str) {
    let (text, events) = (&ended.text, test.events());
    assert_eq!(lines(text, "DONE ").count(), 1, "{text}");
    assert!(text.contains(" ranks=1"), "{text}");
    assert!(
        text.contains("errs=0") && !text.contains("is wrong"),
        "{text}"
    );
    // The lost rank has not gone on by itself.
    let failed: BTreeSet<_> = lines(text, "FAILED ")
        .filter_map(|line| line.split(' ').nth(1))
        .collect();
    assert_eq!(failed.len(), 1, "{text}");
    let pid = |line: &str| {
        let rest = line.split("\"pid\":").nth(1)?;
        rest.split(',').next().map(str::to_owned)
    };
    let fenced = events.lines().filter(|line| line.contains(reason));
    let fenced: BTreeSet<_> = fenced.filter_map(pid).collect();
    assert_eq!(fenced.len(), 1, "{text}\n{events}");
    assert!(events.contains("\"reason\":\"peer_lost\""), "{events}");
}

/// All connections of four ranks are killed, again and again.
fn connections_killed(test: &str, flavor: Flavor) {
    let mut bare_kept = 0;
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, flavor, 2) else {
            return;
        };
        for carrier in [Carrier::Bare, Carrier::Tcp] {
            let job = bench.start(Shape {
                nodes: 2,
                each: 2,
                seconds: 3,
                carrier,
                more: More::None,
            });
            job.wait_working();
            let mut killed = 0;
            for _ in 0..6 {
                killed += kill_connections(bench.lab.nodes());
                thread::sleep(Duration::from_millis(250));
            }
            assert!(killed > 0, "no connection was killed");
            let ended = job.wait_for(|| carrier == Carrier::Bare && bench.log().contains("FAILED"));
            let kept = has_finished(&ended, 4) && !ended.text.contains("FAILED");
            println!("run {run}, {carrier:?}: all ranks kept: {kept}");
            match carrier {
                Carrier::Bare => bare_kept += u32::from(kept),
                _ => assert!(kept, "{}", ended.text),
            }
        }
    }
    println!("bare: all ranks kept in {bare_kept} of {} runs", runs());
}

#[test]
fn killed_connections_cost_no_rank() {
    connections_killed("killed_connections_cost_no_rank", Flavor::OpenMpi5);
}

#[test]
fn killed_connections_cost_no_rank_with_5_0_7() {
    let test = "killed_connections_cost_no_rank_with_5_0_7";
    connections_killed(test, Flavor::OpenMpi5Components);
}

fn two_ranks_parted(test: &str, flavor: Flavor, carrier: Carrier) {
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, flavor, 3) else {
            return;
        };
        if carrier == Carrier::Component
            && let Err(reason) = bench.mpi.component()
        {
            return skip(test, reason);
        }
        let job = bench.start(Shape {
            nodes: 2,
            each: 1,
            seconds: 6,
            carrier,
            more: More::None,
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[1..2], &nodes[2..3]);
        let ended = job.wait();
        println!("run {run}: {:?}\n{}", ended.status, ended.text);
        assert_one_is_left(&bench, &ended, "\"reason\":\"fenced\"");
        assert!(ended.status.is_some(), "mpirun did not end: {}", ended.text);
        let told = ended.text.matches("slim: witness: process").count();
        assert_eq!(told, 1, "{}", ended.text);
    }
}

#[test]
fn of_two_ranks_that_cannot_reach_each_other_one_is_lost() {
    let test = "of_two_ranks_that_cannot_reach_each_other_one_is_lost";
    two_ranks_parted(test, Flavor::OpenMpi5, Carrier::Tcp);
}

#[test]
fn of_two_ranks_that_cannot_reach_each_other_one_is_lost_with_5_0_7() {
    let test = "of_two_ranks_that_cannot_reach_each_other_one_is_lost_with_5_0_7";
    two_ranks_parted(test, Flavor::OpenMpi5Components, Carrier::Tcp);
}

/// Here both ends of the lost flow are the component's, which also reports the lost rank to Open MPI.
#[test]
fn of_two_ranks_of_the_component_that_cannot_reach_each_other_one_is_lost() {
    let test = "of_two_ranks_of_the_component_that_cannot_reach_each_other_one_is_lost";
    two_ranks_parted(test, Flavor::OpenMpi5Components, Carrier::Component);
}

/// The spawned rank gets no variable of `-x`, so it knows the witness from its daemon.
#[test]
fn of_a_spawned_rank_and_its_parent_that_cannot_reach_each_other_one_is_lost() {
    let test = "of_a_spawned_rank_and_its_parent_that_cannot_reach_each_other_one_is_lost";
    for run in 0..runs() {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 3) else {
            return;
        };
        let job = bench.start(Shape {
            nodes: 2,
            each: 1,
            seconds: 6,
            carrier: Carrier::Tcp,
            more: More::Spawn,
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[1..2], &nodes[2..3]);
        let ended = job.wait();
        println!(
            "run {run}: {:?}\n{}\n{}",
            ended.status,
            ended.text,
            bench.events()
        );
    }
}

/// The half with the witness goes on. The other half reaches nobody, and ends itself. `mpirun` itself does not end: it waits for its daemon
/// in the other half, as without SLIM.
#[test]
fn of_two_halves_that_are_parted_the_one_with_the_witness_goes_on() {
    let test = "of_two_halves_that_are_parted_the_one_with_the_witness_goes_on";
    for run in 0..runs() / 2 {
        let Some(bench) = UlfmLab::new(test, Flavor::OpenMpi5, 2) else {
            return;
        };
        let job = bench.start(Shape {
            nodes: 2,
            each: 1,
            seconds: 6,
            carrier: Carrier::Tcp,
            more: More::None,
        });
        job.wait_working();
        let nodes = bench.lab.nodes();
        let _parted = part(&nodes[..1], &nodes[1..]);
        let reason = "\"reason\":\"no_witness\"";
        let ended =
            job.wait_for(|| bench.log().contains("DONE ") && bench.events().contains(reason));
        println!("run {run}:\n{}", ended.text);
        assert_one_is_left(&bench, &ended, reason);
    }
}
