//! Runs a job of a framework on two nodes, and compares its results with and without SLIM and killed connections.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use slim_lab::{
    Lab, SeededRng, artifacts,
    faults::{
        destroy::{self, Amount, Selector},
        diag,
    },
    launch,
    mpi::cache_dir,
    output::Running,
    skip::skip,
};

use super::{
    events::{Events, events_dir, word},
    eventually, lab,
};

/// Time limit for a run whose result is wanted.
const LIMIT: Duration = Duration::from_secs(120);
/// Time limit for a run without SLIM whose connections are killed: some programs hang.
const BARE_LIMIT: Duration = Duration::from_secs(20);
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
pub struct Framework {
    name: &'static str,
    /// The module by which its presence is checked.
    module: &'static str,
    /// The interpreter that has it.
    python: PathBuf,
    /// Whether the framework itself repeats work that is lost. Otherwise a job without SLIM must fail.
    repeats: bool,
}

impl Framework {
    /// A framework for which `scripts/setup` has installed wheels.
    pub fn wheel(name: &'static str, module: &'static str) -> Self {
        Framework {
            name,
            module,
            python: cache_dir().join("frameworks/bin/python"),
            repeats: false,
        }
    }

    /// A framework of a Debian package.
    pub fn debian(name: &'static str, module: &'static str) -> Self {
        Framework {
            python: "/usr/bin/python3".into(),
            ..Self::wheel(name, module)
        }
    }

    /// The framework itself repeats work that is lost.
    pub fn repeats(mut self) -> Self {
        self.repeats = true;
        self
    }
}

/// A program of `programs/frameworks`.
pub fn script(name: &str) -> PathBuf {
    let source = artifacts::source(&format!("frameworks/{name}"));
    source.expect("the program")
}

/// The address of a node.
pub fn address(lab: &Lab, node: usize) -> String {
    lab.node(node).address(0).to_string()
}

/// Four processes of a program, two on each node. `arguments` gets the number of the process.
pub fn four(python: &Path, program: &str, arguments: impl Fn(usize) -> String) -> Vec<Part> {
    let part = |n| {
        let part = Part::new(n / 2, python).path(script(program));
        part.words(&arguments(n))
    };
    (0..4).map(part).collect()
}

/// How a job is run.
#[derive(Clone, Copy)]
struct How {
    slim: bool,
    kills: bool,
    limit: Duration,
}

/// How a run ended.
struct Outcome {
    /// The digests that were printed, if all parts ended well and in time.
    digests: Result<BTreeSet<String>, String>,
    took: Duration,
    /// When the first result was there, in seconds since 1970. From then on a process may leave before its peers do.
    done: f64,
    killed: usize,
}

impl Framework {
    fn is_there(&self, test: &str) -> bool {
        let mut import = Command::new(&self.python);
        import.args(["-c", &format!("import {}", self.module)]);
        let there = import.output().is_ok_and(|o| o.status.success());
        if !there {
            skip(test, format!("{} is not installed", self.name));
        }
        there
    }

    /// Starts the parts on a lab, waits for them, and kills connections meanwhile if wanted.
    fn run(&self, lab: &Lab, parts: Vec<Part>, how: How) -> Outcome {
        let How { slim, kills, limit } = how;
        let start = Instant::now();
        let (mut servers, mut running) = (Vec::new(), Vec::new());
        for part in parts {
            let mut process = Running::start(command(lab, &part, slim)).expect("start a process");
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
        let (mut rng, mut killed) = (SeededRng::new(SeededRng::seed_from_env()), 0);
        let ended_badly = |running: &mut [Running]| {
            running
                .iter_mut()
                .any(|p| p.wait(Duration::ZERO).is_some_and(|s| !s.success()))
        };
        while running.iter_mut().any(Running::is_running) && start.elapsed() < limit {
            thread::sleep(rng.between(GAP.0, GAP.1));
            if kills {
                let end = lab.node(usize::from(rng.coin())).net();
                let which = Selector::between_hosts();
                let report = destroy::destroy(end, &which, Amount::One, &mut rng);
                killed += report.expect("destroy connections").connections.len();
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
            killed,
        }
    }
}

/// What stands before a digest in a line of output.
const DIGEST: &str = " digest ";

/// When the first digest was printed, in seconds since 1970.
fn first_result(running: &[Running]) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0.0, |now| now.as_secs_f64());
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
        .env("OMP_NUM_THREADS", "1")
        .env("RAY_USAGE_STATS_ENABLED", "0");
    command
}

/// The test of one framework. `parts` are the processes of the job on this lab, whose Python programs need this interpreter.
pub fn rides_through(test: &str, framework: &Framework, parts: impl Fn(&Lab, &Path) -> Vec<Part>) {
    if !framework.is_there(test) {
        return;
    }
    let name = framework.name;
    // A lab for each run: some frameworks cannot listen at a port that the last run has used a moment ago.
    let run = |way: &str, how| {
        let lab = lab(&format!("{name}-{way}"), 2, 1)?;
        let outcome = framework.run(&lab, parts(&lab, &framework.python), how);
        Some((outcome, lab))
    };
    let quiet = How {
        slim: false,
        kills: false,
        limit: LIMIT,
    };
    let Some((undisturbed, _)) = run("quiet", quiet) else {
        return;
    };
    let digests = undisturbed.digests.expect("an undisturbed run");
    assert_eq!(digests.len(), 1, "{name}: {digests:?}");

    let disturbed = How {
        slim: true,
        kills: true,
        ..quiet
    };
    let (slim, lab) = run("killed", disturbed).expect("a second lab");
    let events = Events::read(&lab);
    let resumed: BTreeSet<_> = events.of_kind("resume").map(|e| word(e, "host")).collect();
    let pauses = events.pauses();
    let pause = |percent: usize| pauses.get(pauses.len() * percent / 100).unwrap_or(&0.0) * 1e3;
    println!(
        "{name}: {:.1?} undisturbed; {:.1?} under SLIM with {} connections killed; {events}; half of the resumes within {:.2} ms, \
         90 of 100 within {:.2} ms",
        undisturbed.took,
        slim.took,
        slim.killed,
        pause(50),
        pause(90)
    );
    assert_eq!(slim.digests, Ok(digests.clone()), "{} killed", slim.killed);
    assert!(slim.killed >= 10, "{name}: only {} killed", slim.killed);
    assert_eq!(resumed.len(), 2, "{name}: resumed on {resumed:?}");
    let wrong = events.wrongly_given_up(slim.done);
    assert!(wrong.is_empty(), "{name}: {wrong:#?}");

    if !framework.repeats {
        let bare = How {
            kills: true,
            limit: BARE_LIMIT,
            ..quiet
        };
        let (bare, _) = run("bare", bare).expect("a third lab");
        println!("{name}: bare, {} killed: {:?}", bare.killed, bare.digests);
        assert!(
            bare.digests != Ok(digests),
            "{name}: {} killed",
            bare.killed
        );
    }
}
