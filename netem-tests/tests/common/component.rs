//! Jobs whose ranks use the native component.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use slim_lab::{
    Error, Lab,
    mpi::{Flavor, Job, JobVerdict, Mpi, Outcome},
    skip::skip,
};

use super::{
    events::{Events, events_dir, word},
    jobs::{Bench, given_up_by_component},
    kills::{Killed, Kills},
};

/// The program with data of many kinds.
pub const KINDS: &str = "slim_kinds";

/// What a job with the component needs: an MPI, its programs, and the directory with the component.
pub struct ComponentBench {
    pub bench: Bench,
    pub dir: PathBuf,
    pp: PathBuf,
    kinds: PathBuf,
}

/// The directory with the component for this MPI, built once; why it cannot be.
fn built(mpi: &Mpi) -> Result<PathBuf, String> {
    static BUILT: Mutex<BTreeMap<&str, Result<PathBuf, String>>> = Mutex::new(BTreeMap::new());
    let build = || match mpi.component() {
        Ok(dir) => Ok(dir),
        Err(error @ Error::Missing { .. }) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    };
    let mut all = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let entry = all.entry(mpi.flavor().word());
    entry.or_insert_with(build).clone()
}

impl ComponentBench {
    /// Everything for jobs of `flavor` that run alone, or `None` with the skip and its reason printed.
    pub fn new(test: &str, flavor: Flavor) -> Option<Self> {
        Self::with(test, Bench::new(&format!("btl-{test}"), flavor)?)
    }

    /// The same for jobs that may run at the same time as others ([`Bench::shared`]).
    pub fn shared(test: &str, flavor: Flavor) -> Option<Self> {
        Self::with(test, Bench::shared(&format!("btl-{test}"), flavor)?)
    }

    fn with(test: &str, bench: Bench) -> Option<Self> {
        let dir = match built(&bench.mpi) {
            Ok(dir) => dir,
            Err(reason) => {
                skip(test, reason);
                return None;
            }
        };
        let program = |name| bench.mpi.build_program(name).expect("build a test program");
        Some(Self {
            dir,
            pp: program("slim_pp.c"),
            kinds: program("slim_kinds.c"),
            bench,
        })
    }

    pub fn lab(&self) -> Lab {
        self.bench.lab(1)
    }

    /// A job of `program` with the component, and an event log.
    pub fn job<'a>(&'a self, lab: &'a Lab, program: &str, ranks: usize) -> Job<'a> {
        let path = if program == KINDS {
            &self.kinds
        } else {
            &self.pp
        };
        self.job_of(lab, path.clone(), ranks)
    }

    /// The same for another program.
    pub fn job_of<'a>(&'a self, lab: &'a Lab, program: PathBuf, ranks: usize) -> Job<'a> {
        Job::new(lab, &self.bench.mpi, program)
            .ranks(ranks)
            .component(&self.dir)
            .option("--oversubscribe")
            .env("SLIM_EVENTS", events_dir(lab).join("%h.%p.jsonl"))
    }
}

/// The ranks' connections between the nodes are protected flows of the component: it alone writes event logs here.
pub fn assert_used(lab: &Lab, ranks: usize) {
    let events = Events::read(lab);
    let live = |from: &str, to: &str| {
        let is_between = |e: &&serde_json::Value| {
            word(e, "sock").starts_with(from) && word(e, "peer").starts_with(to)
        };
        events.of_kind("live").filter(is_between).count()
    };
    let found = (
        live("10.77.0.1", "10.77.0.2"),
        live("10.77.0.2", "10.77.0.1"),
    );
    let wanted = ranks * ranks / 4;
    assert!(
        found.0 >= wanted && found.1 >= wanted,
        "{ranks} ranks, protected flows: {found:?}"
    );
}

/// Checks a run under kills: all data arrived, connections were killed and resumed, and no flow was escalated except those whose peer
/// had left after all work was done.
pub fn judge(lab: &Lab, outcome: &Outcome, killed: Killed, kills: &Kills) -> Result<(), String> {
    let verdict = outcome.verdict();
    if !matches!(verdict, JobVerdict::Finished(_)) {
        return Err(verdict.to_string());
    }
    if killed.times < kills.times {
        return Err(format!("only {killed}"));
    }
    if Events::read(lab).count("resume") == 0 {
        return Err("no resume".into());
    }
    given_up_by_component(lab, outcome)
}
