//! A lab for jobs with recovery, and what happens to them.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::common::Scratch;
use slim_cli::lab::launcher_environment;
use slim_lab::faults::destroy::{self, Amount, Selector};
use slim_lab::faults::nft::{Rule, RuleGuard};
use slim_lab::mpi::{Flavor, Mpi, ULFM_OPTIONS, by_tcp};
use slim_lab::{Lab, Node, SeededRng, artifacts, skip::skip};

pub const PROGRAM: &str = "slim_ulfm";
/// Longer than everything that a job here may need.
const LIMIT: Duration = Duration::from_secs(90);

/// The file with the hosts whose daemons a signal has ended.
const CRASHES: &str = "crashes";

/// Length of messages at most, in jobs in which a rank dies: with longer ones under way `btl/tcp` itself crashes now and then (docs/ULFM.md).
pub const SHORT: &str = "2000";
/// The longest messages of the program.
pub const LONG: &str = "131072";

/// How the ranks talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// By `btl/tcp`, without SLIM.
    Bare,
    /// By `btl/tcp`, under the preload library.
    Tcp,
    Component,
}

/// The shape of a job.
#[derive(Clone, Copy)]
pub struct Shape {
    /// The last nodes of the lab have ranks. `mpirun` is on the first node.
    pub nodes: usize,
    /// Ranks on each of them.
    pub each: usize,
    pub seconds: u32,
    /// The length of messages at most.
    pub words: &'static str,
    pub carrier: Carrier,
    /// Whether the ranks spawn further ones, on the last node of the lab.
    pub more: More,
    /// Whether ranks may go on through the witness.
    pub relay: bool,
}

impl Shape {
    /// A rank on each of two hosts, under the preload library, which must not go on through the witness.
    pub const PAIR: Shape = Shape {
        nodes: 2,
        each: 1,
        seconds: 6,
        words: LONG,
        carrier: Carrier::Tcp,
        more: More::None,
        relay: false,
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum More {
    None,
    /// One at the start.
    Spawn,
    /// One for each that has died.
    Replace,
}

/// One job at a time: otherwise each waits for the processors.
static ALONE: Mutex<()> = Mutex::new(());

pub struct UlfmLab {
    pub lab: Lab,
    pub mpi: Mpi,
    program: PathBuf,
    scratch: Scratch,
    _alone: MutexGuard<'static, ()>,
}

/// A job under way.
pub struct UlfmJob<'a> {
    of: &'a UlfmLab,
    child: Child,
    started: Instant,
}

/// What is left of a job.
pub struct Ended {
    /// Exit status of `mpirun`; none if it did not end in time.
    pub status: Option<i32>,
    pub text: String,
}

impl UlfmLab {
    pub fn new(test: &str, flavor: Flavor, nodes: usize) -> Option<Self> {
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
    pub fn start(&self, shape: Shape) -> UlfmJob<'_> {
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
        command.env("PRTE_MCA_plm_ssh_agent", self.watching_agent());
        command.env("SLIM_JOB_KEY_FILE", key);
        command.env("SLIM_EVENTS", self.scratch.path("events.%h.%p"));
        command.env("SLIM_RELAY", if shape.relay { "on" } else { "off" });
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
        command.arg(shape.words);
        let last = nodes[nodes.len() - 1].name();
        match shape.more {
            More::None => {}
            More::Spawn => drop(command.args(["spawn", last])),
            More::Replace => drop(command.args(["replace", last])),
        }
        command.stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        UlfmJob {
            of: self,
            child: command.spawn().unwrap(),
            started: Instant::now(),
        }
    }

    /// An agent that starts daemons as the lab's own does, and writes down which of them a signal has ended: a daemon is in the
    /// background, and its parent ends with status 255 in this case, and else with the daemon's own.
    fn watching_agent(&self) -> PathBuf {
        let agent = artifacts::program("slim-lab-agent").unwrap();
        let crashes = self.scratch.path(CRASHES);
        let _ = fs::remove_file(&crashes);
        // The launcher kills the group of an agent when it gives the job up, so the part that writes is not in it.
        let watch = self.scratch.script(
            "watch",
            &format!(
                "'{}' \"$@\"\nstatus=$?\n[ $status != 255 ] || echo \"$1\" >> '{}'\nexit $status",
                agent.display(),
                crashes.display()
            ),
        );
        let text = format!("setsid '{}' \"$@\"", watch.display());
        self.scratch.script("agent", &text)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path("log")).unwrap_or_default()
    }

    /// Whether a signal has ended a daemon of the last job. Its agent says so in a moment: it may live longer than the job.
    pub fn a_daemon_crashed(&self) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) {
            if self.scratch.path(CRASHES).exists() {
                return true;
            }
            thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// The events of all processes.
    pub fn events(&self) -> String {
        let dir = fs::read_dir(self.scratch.path("")).unwrap().flatten();
        let logs = dir.filter(|file| file.file_name().to_string_lossy().starts_with("events"));
        logs.filter_map(|file| fs::read_to_string(file.path()).ok())
            .collect()
    }
}

impl UlfmJob<'_> {
    pub fn wait_working(&self) {
        while lines(&self.of.log(), "t=").next().is_none() {
            assert!(self.started.elapsed() < LIMIT, "{}", self.of.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills a rank on this node; when that was, in seconds since 1970.
    pub fn kill_a_rank(&self, node: &Node) -> f64 {
        let ranks = node.processes();
        let rank = ranks.iter().find(|process| process.name == PROGRAM);
        let pid = rustix::process::Pid::from_raw(rank.expect("a rank").pid as i32).expect("a pid");
        let at = SystemTime::now().duration_since(UNIX_EPOCH).expect("later");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        at.as_secs_f64()
    }

    /// Waits until the job has ended.
    pub fn wait(self) -> Ended {
        self.wait_for(|| false)
    }

    /// Waits until the job has ended, or this holds. Then, or if it takes too long, kills what is left of the job.
    pub fn wait_for(mut self, over: impl Fn() -> bool) -> Ended {
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
pub fn kill_connections(nodes: &[Node]) -> usize {
    let pick = Selector::between_hosts().process(PROGRAM);
    let kill = |node: &Node| {
        destroy::destroy(node.net(), &pick, Amount::All, &mut SeededRng::new(1)).unwrap()
    };
    nodes.iter().map(|node| kill(node).connections.len()).sum()
}

/// Destroys all connections of this node with others, also those of the launcher and its daemons; how many there were.
pub fn kill_all_connections(node: &Node) -> usize {
    let pick = Selector::between_hosts();
    let killed = destroy::destroy(node.net(), &pick, Amount::All, &mut SeededRng::new(1));
    killed.unwrap().connections.len()
}

/// Nothing passes between these nodes any more, in either direction, and all connections between them break.
pub fn part(one: &[Node], other: &[Node]) -> Vec<RuleGuard> {
    let guards = silence(one, other);
    kill_connections(one);
    kill_connections(other);
    guards
}

/// As [`part`], but firewalls refuse what they stop.
pub fn refuse(one: &[Node], other: &[Node]) -> Vec<RuleGuard> {
    let guards = Rule::refuse().apply_between(one, other).unwrap();
    kill_connections(one);
    kill_connections(other);
    guards
}

/// Nothing passes between these nodes any more, in either direction.
pub fn silence(one: &[Node], other: &[Node]) -> Vec<RuleGuard> {
    Rule::drop().apply_between(one, other).unwrap()
}

/// The lines of a job that begin with this.
pub fn lines<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter(move |line| line.starts_with(start))
}

/// Whether the job has ended well, with that many ranks and right data.
pub fn has_finished(ended: &Ended, ranks: usize) -> bool {
    ended.status == Some(0) && is_done(ended, ranks)
}

/// Whether that many ranks have done all their work, with right data; however `mpirun` ended after that.
pub fn is_done(ended: &Ended, ranks: usize) -> bool {
    let done = lines(&ended.text, "DONE ").last().unwrap_or_default();
    done.contains(" errs=0 ") && done.ends_with(&format!(" ranks={ranks}"))
}

/// Asserts that the job has ended well, and that no rank has heard of a failed one.
pub fn assert_all_kept(ended: &Ended, ranks: usize) {
    assert!(has_finished(ended, ranks), "{}", ended.text);
    assert!(!ended.text.contains("FAILED"), "{}", ended.text);
}

pub fn runs() -> u32 {
    match std::env::var_os("SLIM_SOAK").is_some() {
        true => 20,
        false => 2,
    }
}
