//! Runs MPI jobs under faults and judges their outcomes.

use std::{
    path::PathBuf,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::Duration,
};

use nix::unistd::Pid;
use slim_lab::{
    Error, Lab, Node, artifacts,
    mpi::{Flavor, Job, JobVerdict, Mpi, Outcome, Started},
    skip::skip,
};

use super::events::{Events, events_dir};

/// The ranks' program.
pub const PROGRAM: &str = "slim_pp";

/// Where SLIM is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slim {
    /// In no process.
    Bare,
    /// In mpirun, and in the daemons and ranks of all nodes.
    Everywhere,
    /// Only on the node where mpirun runs.
    FirstNode,
}

/// What a test needs to run jobs.
pub struct Bench {
    pub test: String,
    pub mpi: Mpi,
    pub program: PathBuf,
    _turn: Turn,
}

/// A test's right to run a job.
enum Turn {
    /// No other test of the test program runs a job meanwhile: two jobs at once on a small machine disturb each other's timing.
    Alone {
        _guard: RwLockWriteGuard<'static, ()>,
    },
    /// Tests of which the timing does not matter much.
    Shared {
        _guard: RwLockReadGuard<'static, ()>,
    },
}

/// The lock behind the turns of a test program.
static TURN: RwLock<()> = RwLock::new(());

impl Turn {
    fn alone() -> Self {
        Turn::Alone {
            _guard: TURN.write().unwrap_or_else(PoisonError::into_inner),
        }
    }

    fn shared() -> Self {
        Turn::Shared {
            _guard: TURN.read().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl Bench {
    /// Everything for jobs of `flavor` that run alone, or `None` with the skip and its reason printed.
    pub fn new(test: &str, flavor: Flavor) -> Option<Bench> {
        Self::find(test, flavor, Turn::alone)
    }

    /// The same for jobs that may run at the same time as others, because their timing does not matter much.
    pub fn shared(test: &str, flavor: Flavor) -> Option<Bench> {
        Self::find(test, flavor, Turn::shared)
    }

    fn find(test: &str, flavor: Flavor, wait: fn() -> Turn) -> Option<Bench> {
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
        Some(Bench {
            test,
            mpi,
            program,
            _turn: wait(),
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

    /// A job on `lab`: `seconds` of work on `ranks` ranks.
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

    /// Runs the job, calls `fault` once the job has begun to work, and then waits for the end of the job for at most `limit`.
    /// Prints a summary on standard output.
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
            "the job never began to work".into()
        };
        let outcome = started.wait(limit);
        let events = Events::read(lab);
        println!("{}: {what}; {}; {events}", self.test, outcome.verdict());
        outcome
    }
}

/// Asserts that the job finished with all data right. The failure message has its output and events.
pub fn assert_finished(test: &str, lab: &Lab, outcome: &Outcome) {
    if !matches!(outcome.verdict(), JobVerdict::Finished(_)) {
        let events = Events::read(lab);
        panic!(
            "{test}: {}
{}  {events}",
            outcome.verdict(),
            outcome.tail(40)
        );
    }
}

/// The process of a rank on this node.
pub fn a_rank(node: &Node) -> Pid {
    let ranks = node.processes().into_iter();
    let rank = ranks.filter(|p| p.name == PROGRAM).min_by_key(|p| p.pid);
    Pid::from_raw(rank.expect("a rank runs on the node").pid.cast_signed())
}

/// Checks that a finished job had no flows escalated, except those whose peer had left after all work was done.
pub fn given_up(lab: &Lab, outcome: &Outcome) -> Result<(), String> {
    none_given_up(lab, outcome, Events::wrongly_given_up)
}

/// As [`given_up`], for a job with the native component.
pub fn given_up_by_component(lab: &Lab, outcome: &Outcome) -> Result<(), String> {
    none_given_up(lab, outcome, Events::wrongly_given_up_by_component)
}

/// Checks a finished job by `find`, which gets the time when all work was done.
fn none_given_up(
    lab: &Lab,
    outcome: &Outcome,
    find: for<'a> fn(&'a Events, f64) -> Vec<&'a serde_json::Value>,
) -> Result<(), String> {
    let done = outcome.done_at().ok_or("it did not finish")?;
    match &*find(&Events::read(lab), done) {
        [] => Ok(()),
        wrong => Err(format!("all done at {done}, given up: {wrong:?}")),
    }
}
