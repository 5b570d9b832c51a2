//! MPI jobs under faults: how they are run and judged.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use netem_tests::{
    Error, Lab, Rng, artifacts,
    faults::destroy::{self, Amount, Pick},
    mpi::{Flavor, Job, Mpi, Outcome, Started, Verdict},
    skip::skip,
};

/// The ranks' program.
pub const PROGRAM: &str = "slim_pp";

/// Whether SLIM is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slim {
    /// Nowhere.
    Bare,
    /// Under mpirun, daemons and ranks of all nodes.
    Everywhere,
    /// Only on the node where mpirun runs.
    FirstNode,
}

/// What a test needs to run jobs. One test of a program at a time has it: two jobs at once on a
/// small machine would disturb each other's timing.
pub struct Bench {
    pub test: String,
    pub mpi: Mpi,
    program: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Bench {
    /// Everything for jobs of `flavor`, or a skip with its reason.
    pub fn new(test: &str, flavor: Flavor) -> Option<Bench> {
        static TURN: Mutex<()> = Mutex::new(());
        let test = format!("{test}-{}", flavor.word());
        if let Err(error) = Lab::check() {
            skip(&test, error);
            return None;
        }
        let mpi = match Mpi::find(flavor) {
            Ok(mpi) => mpi,
            Err(error @ Error::Missing { .. }) => {
                skip(&test, error);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let program = mpi
            .build_program("slim_pp.c")
            .expect("build the test program");
        let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        Some(Bench {
            test,
            mpi,
            program,
            _turn: turn,
        })
    }

    /// A lab for one run.
    pub fn lab(&self, paths: usize) -> Lab {
        Lab::builder()
            .paths(paths)
            .name(&*self.test)
            .build()
            .expect("make a lab")
    }

    /// The job on `lab`: `seconds` of work on `ranks` ranks.
    pub fn job<'a>(&'a self, lab: &'a Lab, slim: Slim, ranks: usize, seconds: u64) -> Job<'a> {
        let mut job = Job::new(lab, &self.mpi, &self.program)
            .ranks(ranks)
            .arg(seconds.to_string());
        if slim != Slim::Bare {
            job = job.preload(artifacts::preload().expect("the preload library"));
            job = job.env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"));
        }
        if slim == Slim::FirstNode {
            job = job.first_node_only();
        }
        job
    }

    /// Runs the job with `fault` happening from its second second on, and waits for its end. `grace`
    /// is how long it may take beyond its work. Says on standard output how it went.
    pub fn run(
        &self,
        lab: &Lab,
        job: &Job<'_>,
        limit: Duration,
        fault: impl FnOnce(&mut Started<'_>) -> String,
    ) -> Outcome {
        let mut started = job.start().expect("start mpirun");
        let working = started.wait_working(Duration::from_secs(30));
        let what = if working {
            fault(&mut started)
        } else {
            "it never began to work".into()
        };
        let outcome = started.wait(limit);
        let events = Events::read(lab);
        println!("{}: {what}; {}; {events}", self.test, outcome.verdict());
        outcome
    }
}

/// Asserts that the job finished with all data right; shows what there is to see otherwise.
pub fn assert_finished(test: &str, lab: &Lab, outcome: &Outcome) {
    if !matches!(outcome.verdict(), Verdict::Finished(_)) {
        let events = Events::read(lab);
        panic!(
            "{test}: {}
{}  {events}",
            outcome.verdict(),
            outcome.tail(40)
        );
    }
}

/// Where the processes of a lab write their event logs.
pub fn events_dir(lab: &Lab) -> PathBuf {
    let dir = lab.dir().join("events");
    fs::create_dir_all(&dir).expect("a directory for the event logs");
    dir
}

/// What the event logs of a lab's processes say, counted.
#[derive(Clone, Debug, Default)]
pub struct Events {
    pub suspended: usize,
    pub resumed: usize,
    pub escalated: usize,
    pub lines: Vec<serde_json::Value>,
}

impl Events {
    /// Reads all event logs of `lab`.
    pub fn read(lab: &Lab) -> Self {
        let mut events = Events::default();
        for entry in fs::read_dir(events_dir(lab))
            .into_iter()
            .flatten()
            .flatten()
        {
            events.add(&entry.path());
        }
        events
    }

    fn add(&mut self, file: &Path) {
        let text = fs::read_to_string(file).unwrap_or_default();
        for line in text.lines() {
            // A killed process may leave half a line.
            let Ok(value) = serde_json::from_str::<serde_json::Value>(line) else {
                continue;
            };
            match kind(&value).as_str() {
                "suspend" => self.suspended += 1,
                "resume" => self.resumed += 1,
                "escalate" => self.escalated += 1,
                _ => {}
            }
            self.lines.push(value);
        }
    }
}

fn kind(value: &serde_json::Value) -> String {
    value
        .get("kind")
        .and_then(|k| k.as_str())
        .unwrap_or_default()
        .to_ascii_lowercase()
}

impl std::fmt::Display for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} suspended, {} resumed, {} escalated",
            self.suspended, self.resumed, self.escalated
        )
    }
}

/// How connections are killed during a run.
#[derive(Clone, Debug)]
pub struct Kills {
    /// Which connections.
    pub pick: Pick,
    /// One or all of them at each time.
    pub amount: Amount,
    /// At least so many connections are killed.
    pub at_least: usize,
    /// Time between two kills.
    pub gap: (Duration, Duration),
    /// For how long at most.
    pub window: Duration,
    /// Further kills in quick succession after each: resumes under way are hit.
    pub again: usize,
}

impl Kills {
    /// Of the ranks' connections with the other node, one at a time.
    pub fn one_by_one() -> Self {
        let ms = Duration::from_millis;
        Kills {
            pick: Pick::between_hosts().process(PROGRAM),
            amount: Amount::One,
            at_least: 20,
            gap: (ms(100), ms(400)),
            window: Duration::from_secs(40),
            again: 0,
        }
    }

    /// Carries it out on `lab` while `job` runs, from a random end each time. Gives the number of
    /// killed connections.
    pub fn carry_out(&self, lab: &Lab, job: &mut Started<'_>, rng: &mut Rng) -> usize {
        let (mut killed, start) = (0, Instant::now());
        while killed < self.at_least && start.elapsed() < self.window && job.running().is_running()
        {
            thread::sleep(rng.between(self.gap.0, self.gap.1));
            for round in 0..=self.again {
                if round > 0 {
                    // From the first moments of a resume to well after it.
                    thread::sleep(
                        rng.between(Duration::from_micros(200), Duration::from_millis(30)),
                    );
                }
                let end = lab.node(usize::from(rng.coin()));
                let report = destroy::destroy(end.net(), &self.pick, self.amount, rng);
                killed += report.expect("destroy connections").connections.len();
            }
        }
        killed
    }
}
