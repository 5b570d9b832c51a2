//! One run: starts the job, kills its connections while it works, and reads how it ends.

use std::env;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use slim_lab::faults::destroy::{self, Amount, Selector};
use slim_lab::mpi::{JobVerdict, Outcome, Progress, component_placement, placement};
use slim_lab::output::Running;
use slim_lab::{Lab, SeededRng};
use strum::Display;

use crate::failure::CliError;
use crate::lab::launcher_environment;

/// Time from one kill to the next.
const PAUSE: (Duration, Duration) = (Duration::from_millis(150), Duration::from_millis(600));
/// How long a job may take to start.
const START: Duration = Duration::from_secs(30);
/// How long a bare run may exceed its time before it counts as hung.
const BARE_GRACE: Duration = Duration::from_secs(6);
/// The same for a run under SLIM: longer than all three attempts of a resume.
const SLIM_GRACE: Duration = Duration::from_secs(75);
/// One kill in this many hits all connections at once, the others hit one.
const ALL_AT_ONCE: usize = 4;

/// With or without SLIM, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub enum DemoMode {
    /// Without SLIM.
    #[strum(to_string = "bare")]
    Bare,
    /// Under `slim run`.
    #[strum(to_string = "SLIM")]
    Slim,
    /// Under `slim run --btl`: the ranks use the native component.
    #[strum(to_string = "SLIM component")]
    Component,
}

/// What all runs have in common.
#[derive(Debug)]
pub struct Setting<'a> {
    pub lab: &'a Lab,
    pub mpirun: &'a Path,
    pub program: &'a Path,
    pub library: &'a Path,
    pub events: &'a Path,
    pub ranks: usize,
    /// How long the program works.
    pub time: Duration,
}

/// Result of a run.
#[derive(Debug)]
pub struct DemoRun {
    /// How the run ended.
    pub verdict: JobVerdict,
    /// The last progress line.
    pub last: Option<Progress>,
    /// Exit status of the whole command; `None` if it hung and was killed.
    pub status: Option<i32>,
    /// Number of connections killed.
    pub killed: usize,
}

impl Setting<'_> {
    /// Does run number `n`; `told` gets a line for each kill and each stage.
    pub fn run(
        &self,
        mode: DemoMode,
        n: u32,
        rng: &mut SeededRng,
        told: impl Fn(&str),
    ) -> Result<DemoRun, CliError> {
        let failed = |e: slim_lab::Error| CliError::failed(e.to_string());
        told("starting");
        let mut job = Running::start(self.command(mode, n)?).map_err(failed)?;
        let mut killed = 0;
        if job.wait_line(START, |line| Progress::parse(line).is_some()) {
            let begin = Instant::now();
            // The program has run for a second when it prints its first progress line.
            let end = self.time.saturating_sub(Duration::from_millis(1500));
            while begin.elapsed() < end {
                if job.wait(rng.between(PAUSE.0, PAUSE.1)).is_some() {
                    break;
                }
                killed += self.kill(rng).map_err(failed)?;
                let at = begin.elapsed().as_secs_f64() + 1.0;
                told(&format!("{at:4.1} s, {killed} connections killed"));
            }
        }
        told(&format!("{killed} connections killed, waiting for the end"));
        let grace = match mode {
            DemoMode::Bare => BARE_GRACE,
            DemoMode::Slim | DemoMode::Component => SLIM_GRACE,
        };
        let limit = (START + self.time + grace)
            .saturating_sub(job.elapsed())
            .min(self.time + grace);
        let status = job.wait(limit);
        let took = job.elapsed();
        job.kill();
        let left = self
            .lab
            .nodes()
            .iter()
            .flat_map(|node| node.kill_all())
            .map(|p| p.name)
            .collect();
        let outcome = Outcome {
            status,
            took,
            lines: job.lines(),
            left,
        };
        self.keep_output(mode, n, &outcome)?;
        Ok(DemoRun {
            verdict: outcome.verdict(),
            last: outcome
                .lines
                .iter()
                .rev()
                .find_map(|l| Progress::parse(&l.text)),
            status: status.map(|s| s.code().unwrap_or(-1)),
            killed,
        })
    }

    fn command(&self, mode: DemoMode, n: u32) -> Result<Command, CliError> {
        let nodes = self.lab.nodes();
        let mut command = match mode {
            DemoMode::Bare => nodes[0].command(self.mpirun),
            DemoMode::Slim | DemoMode::Component => {
                let slim = env::current_exe()
                    .map_err(|e| CliError::failed(format!("find this program: {e}")))?;
                let name = file_name(mode);
                let log = self.events.join(format!("{name}{n}.%h.%p.jsonl"));
                let mut command = nodes[0].command(slim);
                command
                    .arg("run")
                    .arg("--preload")
                    .arg(self.library)
                    .arg("--events")
                    .arg(log);
                if mode == DemoMode::Component {
                    command.arg("--btl");
                }
                command.arg("--").arg(self.mpirun);
                command
            }
        };
        match mode {
            DemoMode::Bare | DemoMode::Slim => command.args(placement(self.lab, self.ranks)),
            DemoMode::Component => command.args(component_placement(self.lab, self.ranks)),
        };
        command
            .arg(self.program)
            .arg(self.time.as_secs().to_string());
        command
            .env_remove("LD_PRELOAD")
            .envs(launcher_environment(self.lab)?);
        Ok(command)
    }

    fn kill(&self, rng: &mut SeededRng) -> Result<usize, slim_lab::Error> {
        let node = self.lab.node(rng.below(self.lab.nodes().len()));
        let amount = if rng.below(ALL_AT_ONCE) == 0 {
            Amount::All
        } else {
            Amount::One
        };
        let ranks = Selector::between_hosts().process("slim_pp");
        Ok(destroy::destroy(node.net(), &ranks, amount, rng)?
            .connections
            .len())
    }

    /// Writes the job's output to a file beside its event log, to examine a run that was not perfect.
    fn keep_output(&self, mode: DemoMode, n: u32, outcome: &Outcome) -> Result<(), CliError> {
        let path = self.events.join(format!("{}{n}.out", file_name(mode)));
        fs::write(&path, outcome.tail(usize::MAX))
            .map_err(|e| CliError::failed(format!("{}: {e}", path.display())))
    }
}

/// The start of the names of a run's files.
fn file_name(mode: DemoMode) -> String {
    mode.to_string().to_lowercase().replace(' ', "-")
}

impl DemoRun {
    /// Whether the run has finished with status 0 and all data right.
    pub fn is_perfect(&self) -> bool {
        matches!(self.verdict, JobVerdict::Finished(p) if p.errors == 0)
    }
}

impl fmt::Display for DemoRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} connections killed; {}", self.killed, self.verdict)
    }
}
