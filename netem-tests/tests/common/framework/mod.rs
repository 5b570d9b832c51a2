//! Runs a job of a framework on two nodes, and compares its results with and without SLIM and killed connections.

pub mod disturbed;
pub mod jobs;
pub mod turns;

use std::{
    collections::BTreeSet,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use slim_lab::{
    Lab, Node, SeededRng, artifacts,
    faults::{
        destroy::{self, Selector},
        diag::{self, DestroyOutcome},
    },
    launch,
    mpi::cache_dir,
    output::Running,
    skip::skip,
};

use super::{events::events_dir, eventually};

/// Shortest and longest pause between two kills.
const GAP: (Duration, Duration) = (Duration::from_millis(60), Duration::from_millis(200));

/// One process of a job.
pub struct Part {
    node: usize,
    command: Vec<OsString>,
    /// The part is a server: it does not end by itself, and later parts are started when it listens at this port.
    listens: Option<u16>,
}

impl Part {
    /// A process of this program on this node.
    pub fn new(node: usize, program: &Path) -> Self {
        Part {
            node,
            command: vec![program.into()],
            listens: None,
        }
    }

    /// Adds arguments, with blanks between.
    pub fn words(mut self, words: &str) -> Self {
        let words = words.split_whitespace().map(OsString::from);
        self.command.extend(words);
        self
    }

    /// Adds a path, which may have blanks.
    pub fn path(mut self, path: impl Into<OsString>) -> Self {
        self.command.push(path.into());
        self
    }

    /// It is a server that listens at this port.
    pub fn server(mut self, port: u16) -> Self {
        self.listens = Some(port);
        self
    }
}

/// A framework, with a job whose result is a digest.
#[derive(Clone, Copy)]
pub struct Framework {
    pub name: &'static str,
    /// The module by which its presence is checked.
    module: &'static str,
    /// Whether it is one of Debian's packages.
    of_debian: bool,
    /// Whether the framework itself repeats work that is lost. Otherwise a job without SLIM must fail.
    repeats: bool,
}

impl Framework {
    /// A framework for which `scripts/setup` has installed wheels.
    pub const fn wheel(name: &'static str, module: &'static str) -> Self {
        Framework {
            name,
            module,
            of_debian: false,
            repeats: false,
        }
    }

    /// A framework of a Debian package.
    pub const fn debian(name: &'static str, module: &'static str) -> Self {
        Framework {
            of_debian: true,
            ..Self::wheel(name, module)
        }
    }

    /// The framework itself repeats work that is lost.
    pub const fn repeats(mut self) -> Self {
        self.repeats = true;
        self
    }

    /// The interpreter that has it.
    pub fn python(&self) -> PathBuf {
        match self.of_debian {
            true => "/usr/bin/python3".into(),
            false => cache_dir().join("frameworks/bin/python"),
        }
    }
}

/// A program of `programs/frameworks`.
pub fn script(name: &str) -> PathBuf {
    let source = artifacts::source(&format!("frameworks/{name}"));
    source.expect("the program")
}

/// How a job is run.
#[derive(Clone, Copy)]
struct How {
    slim: bool,
    kills: bool,
    /// Between two kills, the pauses are shorter by this factor.
    haste: u32,
    limit: Duration,
}

/// How a run ended.
struct Outcome {
    /// The digests that were printed, if all parts ended well and in time.
    digests: Result<BTreeSet<String>, String>,
    took: Duration,
    /// When the first result was there, in seconds since 1970. From then on a process may leave before its peers do.
    done: f64,
    /// When connections were killed, in seconds since 1970.
    kills: Vec<f64>,
}

impl Framework {
    pub fn is_there(&self, test: &str) -> bool {
        let mut import = Command::new(self.python());
        import.args(["-c", &format!("import {}", self.module)]);
        let there = import.output().is_ok_and(|o| o.status.success());
        if !there {
            skip(test, format!("{} is not installed", self.name));
        }
        there
    }

    /// Starts the parts on a lab, with these variables in their environment: the servers, and the others.
    fn start(
        &self,
        lab: &Lab,
        parts: Vec<Part>,
        slim: bool,
        variables: &[(&str, &OsStr)],
    ) -> (Vec<Running>, Vec<Running>) {
        let (mut servers, mut running) = (Vec::new(), Vec::new());
        for part in parts {
            let mut command = command(lab, &part, slim);
            command.envs(variables.iter().copied());
            let mut process = Running::start(command).expect("start a process");
            let Some(port) = part.listens else {
                running.push(process);
                continue;
            };
            let net = lab.node(part.node).net();
            let listens = || diag::listening(net).is_ok_and(|ports| ports.contains(&port));
            let ready = eventually(Duration::from_secs(30), listens) && process.is_running();
            assert!(ready, "{}: {:#?}", self.name, process.lines());
            servers.push(process);
        }
        (servers, running)
    }

    /// Runs the parts on a lab, waits for them, and kills connections meanwhile if wanted.
    fn run(&self, lab: &Lab, parts: Vec<Part>, how: How) -> Outcome {
        let start = Instant::now();
        let (mut servers, mut running) = self.start(lab, parts, how.slim, &[]);
        let (mut rng, mut kills) = (SeededRng::new(SeededRng::seed_from_env()), Vec::new());
        let ended_badly = |running: &mut [Running]| {
            running
                .iter_mut()
                .any(|p| p.wait(Duration::ZERO).is_some_and(|s| !s.success()))
        };
        while running.iter_mut().any(Running::is_running) && start.elapsed() < how.limit {
            thread::sleep(rng.between(GAP.0, GAP.1) / how.haste);
            if how.kills {
                kills.extend(kill_one(lab.node(usize::from(rng.coin())), &mut rng));
            }
            if ended_badly(&mut running) {
                break;
            }
        }
        let took = start.elapsed();
        let done = first_result(&running);
        let digests = digests(&mut running).map_err(|e| format!("after {took:.1?}: {e}"));
        for process in running.iter_mut().chain(servers.iter_mut().rev()) {
            process.kill();
        }
        for node in lab.nodes() {
            node.kill_all();
        }
        Outcome {
            digests,
            took,
            done,
            kills,
        }
    }
}

/// What stands before a digest in a line of output.
const DIGEST: &str = " digest ";

/// Kills one of the node's connections with the other node, chosen at random. Returns when.
fn kill_one(node: &Node, rng: &mut SeededRng) -> Option<f64> {
    let found = destroy::list(node.net(), &Selector::between_hosts());
    let mut found = found.expect("list connections");
    if found.is_empty() {
        return None;
    }
    let chosen = found.swap_remove(rng.below(found.len()));
    let now = since_1970();
    let fates = diag::destroy(node.net(), &[chosen]).expect("destroy a connection");
    fates.contains(&DestroyOutcome::Destroyed).then_some(now)
}

/// The time, in seconds since 1970.
fn since_1970() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

/// When the first digest was printed, in seconds since 1970.
fn first_result(running: &[Running]) -> f64 {
    let now = since_1970();
    let printed = running.iter().flat_map(|process| {
        let started = now - process.elapsed().as_secs_f64();
        let results = process
            .lines()
            .into_iter()
            .filter(|l| l.text.contains(DIGEST));
        results.map(move |line| started + line.at.as_secs_f64())
    });
    printed.fold(f64::INFINITY, f64::min)
}

/// What the processes have printed, if all of them have ended well; else, the end of the output of one that failed or still runs.
fn digests(running: &mut [Running]) -> Result<BTreeSet<String>, String> {
    let mut ended: Vec<_> = running
        .iter_mut()
        .map(|process| {
            let status = process.wait(Duration::ZERO);
            let lines = process.lines().into_iter().map(|l| l.text);
            (status, lines.collect::<Vec<_>>())
        })
        .collect();
    // A process that failed first: others may hang because of it.
    ended.sort_by_key(|(status, _)| match status {
        Some(status) => u8::from(status.success()) * 2,
        None => 1,
    });
    if let Some((status, lines)) = ended.first()
        && !status.is_some_and(|s| s.success())
    {
        let tail = lines[lines.len().saturating_sub(12)..].join("\n");
        let how = status.map_or("still runs".into(), |s| s.to_string());
        return Err(format!("{how}: {tail}"));
    }
    let lines = ended.iter().flat_map(|(_, lines)| lines);
    let found = lines.filter_map(|line| Some(line.split_once(DIGEST)?.1.to_owned()));
    Ok(found.collect())
}

/// The command of a part on its node: under `slim run`, or bare.
fn command(lab: &Lab, part: &Part, slim: bool) -> Command {
    let (program, args) = part.command.split_first().expect("a program");
    let node = lab.node(part.node);
    let mut command = match slim {
        true => {
            let mut run = node.command(artifacts::program("slim").expect("slim"));
            run.args(["run", "--"]).arg(program);
            run.env(
                artifacts::PRELOAD_VAR,
                artifacts::preload().expect("the library"),
            );
            run.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
            run
        }
        false => node.command(program),
    };
    command
        .args(args)
        .envs(launch::environment(lab))
        .env_remove("LD_PRELOAD")
        .env("PYTHONUNBUFFERED", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("OMP_NUM_THREADS", "1")
        .env("RAY_USAGE_STATS_ENABLED", "0");
    command
}
