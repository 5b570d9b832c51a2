//! Where the jobs of a benchmark run: on the nodes of a lab, or on this host with an adapter for each rank.

use std::path::{Path, PathBuf};

use slim_lab::faults::watcher::{Watcher, quoted};
use slim_lab::mpi::{Job, Mpi, RankAdapters, Started};
use slim_lab::{Error, Lab, Netns};
use tempfile::TempDir;

use super::contender::{self, Contender, Ready};
use crate::failure::CliError;

/// The place of the jobs. Its directory lives as long as it.
#[derive(Debug)]
pub enum Site {
    /// Two nodes with a line between them.
    Lab(Lab),
    /// This host: two ranks, each with an adapter.
    Host(HostSite),
}

/// This host, with two adapters.
#[derive(Debug)]
pub struct HostSite {
    adapters: RankAdapters,
    dir: TempDir,
    _watcher: Watcher,
}

/// One job. The MPI outlives it.
#[derive(Clone, Copy, Debug)]
pub struct BenchJob<'a, 'b> {
    /// The MPI implementation.
    pub mpi: &'a Mpi,
    /// The program.
    pub program: &'b Path,
    /// The contender.
    pub ready: &'b Ready,
    /// Number of ranks.
    pub ranks: usize,
    /// Directory for its logs.
    pub logs: &'b Path,
    /// The socket where its ranks wait for their turns.
    pub socket: &'b Path,
}

impl Site {
    /// The adapters of these names, or a lab of two nodes.
    pub fn make(adapters: Option<&[String; 2]>) -> Result<Self, CliError> {
        let input = |e: Error| CliError::input(e.to_string());
        let Some(names) = adapters else {
            let lab = Lab::builder().nodes(2).name("bench").build();
            return lab.map(Self::Lab).map_err(input);
        };
        let failed = |e: Error| CliError::failed(e.to_string());
        let adapters = RankAdapters::find(names).map_err(input)?;
        let dir = tempfile::Builder::new().prefix("slim-bench-").tempdir();
        let dir = dir.map_err(Error::io("make a directory")).map_err(failed)?;
        // It is removed also if this process is killed.
        let files = quoted(&dir.path().display().to_string());
        // A rank may write while it ends.
        let remove = format!("rm -rf {files}; sleep 1; rm -rf {files}");
        let host = Netns::current().map_err(failed)?;
        let watcher = Watcher::start(&host, "the files of a benchmark", &remove);
        Ok(Self::Host(HostSite {
            adapters,
            dir,
            _watcher: watcher.map_err(failed)?,
        }))
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        match self {
            Self::Lab(lab) => lab.dir(),
            Self::Host(host) => host.dir.path(),
        }
    }

    /// The line between the ranks.
    pub fn line(&self) -> String {
        match self {
            Self::Lab(_) => "veth, not limited".into(),
            Self::Host(host) => host.adapters.to_string(),
        }
    }

    /// Starts a job.
    pub fn start<'a>(&'a self, job: BenchJob<'a, '_>) -> Result<Started<'a>, Error> {
        match self {
            Self::Lab(lab) => job.in_lab(lab).start(),
            Self::Host(host) => job.on_host(&host.adapters),
        }
    }
}

impl<'a> BenchJob<'a, '_> {
    /// Ranks that share a core must not spin while they wait for each other.
    fn is_crowded(self) -> bool {
        self.ranks > std::thread::available_parallelism().map_or(1, usize::from)
    }

    fn events(self) -> PathBuf {
        self.logs.join("%h.%p.jsonl")
    }

    fn in_lab(self, lab: &'a Lab) -> Job<'a> {
        let mut job = Job::new(lab, self.mpi, self.program).ranks(self.ranks);
        if self.is_crowded() {
            job = match self.mpi.flavor().is_mpich() {
                true => job.env("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
                false => YIELD.into_iter().fold(job, Job::option),
            };
        }
        if let Some(library) = &self.ready.library {
            job = job.preload(library);
        }
        if let Some(component) = &self.ready.component {
            job = job.component(component);
        }
        job = match self.ready.contender {
            Contender::Bare | Contender::Mptcp => job,
            Contender::Slim | Contender::Component | Contender::Verbs => {
                job.env("SLIM_EVENTS", self.events())
            }
            Contender::Framed => job.env("SLIM_FRAMED_LOG", contender::frames_log(self.logs)),
        };
        job.arg("--turns").arg(self.socket)
    }

    fn on_host(self, adapters: &RankAdapters) -> Result<Started<'static>, Error> {
        let mut command = adapters.mpirun(self.mpi, self.ready.component.as_deref());
        // What the user's environment says does not count.
        let transports = match self.ready.contender {
            Contender::Verbs => "verbs,tcp",
            _ => "tcp",
        };
        command.args(["--mca", "btl_slim_transports", transports]);
        if self.is_crowded() {
            command.args(YIELD);
        }
        command
            .args(adapters.before_program())
            .arg(self.program)
            .arg("--turns")
            .arg(self.socket)
            .env("SLIM_EVENTS", self.events());
        Started::here(command)
    }
}

const YIELD: [&str; 3] = ["--mca", "mpi_yield_when_idle", "1"];
