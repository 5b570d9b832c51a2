//! What runs in the cells: a checking program under each MPI, or the user's command.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slim_lab::Error;
use slim_lab::mpi::{Flavor, Job, JobVerdict, Mpi, Outcome, Progress};
use slim_lab::output::Running;
use strum::Display;

use super::super::plan::Plan;
use super::super::report::{ChaosReport, seconds};
use super::super::trial::{self, RunLimit, TrialEnd};
use super::MatrixOptions;
use super::cells::{MatrixMode, MatrixRun, RunEnd};
use super::plans::MatrixFault;
use crate::failure::CliError;
use crate::run::preload;

/// How long a job may take to begin its work.
const START: Duration = Duration::from_secs(30);
/// How long the program works after the last fault.
const AFTER: Duration = Duration::from_millis(500);

/// The MPIs that the matrix knows.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, clap::ValueEnum)]
#[strum(serialize_all = "kebab-case")]
pub enum MatrixMpi {
    /// Intel MPI 2021
    Impi,
    /// MPICH 4.0
    Mpich4,
    /// MPICH 5.0
    Mpich5,
    /// Open MPI 4.1
    Openmpi4,
    /// Open MPI 4.1 whose ranks use the native component with SLIM, and btl/tcp without
    Openmpi4Btl,
    /// Open MPI 5.0
    Openmpi5,
    /// The same with the native component
    Openmpi5Btl,
}

/// What runs in a cell.
#[derive(Debug)]
pub enum MatrixJob {
    /// The user's command.
    Command {
        /// The name of its program.
        name: String,
        /// The program and its arguments.
        words: Vec<OsString>,
    },
    /// The checking program.
    Mpi {
        /// The MPI's name.
        name: String,
        /// The MPI.
        mpi: Mpi,
        /// The directory of the native component, if the ranks use it.
        component: Option<PathBuf>,
        /// The program, built with it.
        program: PathBuf,
    },
}

/// What all runs have in common.
pub struct Workshop<'a> {
    options: &'a MatrixOptions,
    library: Option<PathBuf>,
}

impl MatrixMpi {
    const ALL: [Self; 7] = [
        Self::Openmpi4,
        Self::Openmpi5,
        Self::Openmpi4Btl,
        Self::Openmpi5Btl,
        Self::Mpich4,
        Self::Mpich5,
        Self::Impi,
    ];

    fn flavor(self) -> Flavor {
        match self {
            Self::Impi => Flavor::Intel,
            Self::Mpich4 => Flavor::Mpich4,
            Self::Mpich5 => Flavor::Mpich5,
            Self::Openmpi4 | Self::Openmpi4Btl => Flavor::OpenMpi4,
            Self::Openmpi5 => Flavor::OpenMpi5,
            Self::Openmpi5Btl => Flavor::OpenMpi5Components,
        }
    }

    fn has_component(self) -> bool {
        matches!(self, Self::Openmpi4Btl | Self::Openmpi5Btl)
    }
}

impl MatrixJob {
    /// Its name in the table.
    pub fn name(&self) -> &str {
        match self {
            Self::Command { name, .. } | Self::Mpi { name, .. } => name,
        }
    }
}

/// The jobs: the command, the MPIs that the user names, or all that are installed. Returns the reasons for which MPIs are left out, too.
pub fn jobs(
    mpis: &[MatrixMpi],
    command: &[OsString],
) -> Result<(Vec<MatrixJob>, Vec<String>), CliError> {
    if let Some(program) = command.first() {
        let name = Path::new(program).file_name().unwrap_or(program);
        let job = MatrixJob::Command {
            name: name.to_string_lossy().into_owned(),
            words: command.to_vec(),
        };
        return Ok((vec![job], Vec::new()));
    }
    let wanted = match mpis {
        [] => &MatrixMpi::ALL[..],
        some => some,
    };
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in wanted {
        match mpi_job(*name) {
            Ok(job) => found.push(job),
            Err(error @ Error::Missing { .. }) if mpis.is_empty() => {
                missing.push(format!("no {name}: {error}"));
            }
            Err(error) => return Err(CliError::input(format!("{name}: {error}"))),
        }
    }
    match found.is_empty() {
        true => Err(CliError::input("no MPI is installed: run scripts/setup")),
        false => Ok((found, missing)),
    }
}

fn mpi_job(name: MatrixMpi) -> Result<MatrixJob, Error> {
    let mpi = Mpi::find(name.flavor())?;
    let program = mpi.build_program("slim_pp.c")?;
    let component = name.has_component().then(|| mpi.component()).transpose()?;
    Ok(MatrixJob::Mpi {
        name: name.to_string(),
        mpi,
        component,
        program,
    })
}

impl<'a> Workshop<'a> {
    /// Finds the library, if it is needed.
    pub fn new(options: &'a MatrixOptions) -> Result<Self, CliError> {
        let slim = options.with.contains(&MatrixMode::Slim);
        let library = slim.then(|| preload::find(None)).transpose()?;
        Ok(Self { options, library })
    }

    /// Does one run.
    pub fn run(
        &self,
        job: &MatrixJob,
        fault: &MatrixFault,
        mode: MatrixMode,
        seed: u64,
    ) -> Result<MatrixRun, CliError> {
        let paths = fault.paths.max(self.options.lab.paths.into());
        let scene = trial::new_lab("matrix", self.options.lab.nodes, paths)?;
        let failed = |e: Error| CliError::failed(e.to_string());
        let lab = scene.lab().map_err(failed)?;
        let admitted = scene.admits(&fault.plan);
        admitted.map_err(|line| CliError::input(format!("{}: {line}", fault.given)))?;
        match job {
            MatrixJob::Command { words, .. } => {
                let mut line = self.prefix(mode)?;
                line.extend_from_slice(words);
                let program = trial::start(lab, &line)?;
                let limit = self.limit(300);
                let end = trial::carry_out(&scene, &fault.plan, seed, program, limit, || Ok(()))?;
                Ok(of_command(&fault.plan, seed, &end))
            }
            MatrixJob::Mpi {
                mpi,
                component,
                program,
                ..
            } => {
                let go_on = lab.dir().join("go-on");
                fs::write(&go_on, "")
                    .map_err(|e| CliError::failed(format!("{}: {e}", go_on.display())))?;
                let job = Job::new(lab, mpi, program).arg("1").arg(&go_on);
                let running = self
                    .start(job, component.as_deref(), mode)
                    .map_err(failed)?;
                if !running.wait_line(START, |line| Progress::parse(line).is_some()) {
                    return Ok(never_worked(seed, running));
                }
                let quiet = || {
                    std::thread::sleep(AFTER);
                    let removed = fs::remove_file(&go_on);
                    removed.map_err(Error::io(go_on.display().to_string()))
                };
                let limit = match mode {
                    MatrixMode::Bare => self.limit(15),
                    MatrixMode::Slim => self.limit(75),
                };
                let end = trial::carry_out(&scene, &fault.plan, seed, running, limit, quiet)?;
                Ok(of_program(&fault.plan, seed, end))
            }
        }
    }

    fn limit(&self, default: u32) -> RunLimit {
        let seconds = self.options.limit.unwrap_or(default);
        RunLimit::AfterFaults(Duration::from_secs(seconds.into()))
    }

    /// Starts a job that works for a second, and then as long as its file exists.
    fn start(
        &self,
        mut job: Job<'_>,
        component: Option<&Path>,
        mode: MatrixMode,
    ) -> Result<Running, Error> {
        job = job.ranks(self.options.ranks as usize);
        if let (MatrixMode::Slim, Some(library)) = (mode, &self.library) {
            job = job.preload(library);
            if let Some(dir) = component {
                job = job.component(dir);
            }
        }
        Running::start(job.command()?)
    }

    /// The words before the user's command.
    fn prefix(&self, mode: MatrixMode) -> Result<Vec<OsString>, CliError> {
        let (MatrixMode::Slim, Some(library)) = (mode, &self.library) else {
            return Ok(Vec::new());
        };
        let slim =
            env::current_exe().map_err(|e| CliError::failed(format!("find this program: {e}")))?;
        let words: [OsString; 5] = [
            slim.into(),
            "run".into(),
            "--preload".into(),
            library.into(),
            "--".into(),
        ];
        Ok(words.into())
    }
}

fn never_worked(seed: u64, running: Running) -> MatrixRun {
    let last = running.lines().last().map(|line| line.text.clone());
    let what = format!("never began to work: {}", last.unwrap_or_default());
    MatrixRun {
        seed,
        end: RunEnd::Failed(what),
        seconds: seconds(running.elapsed()),
        longest_stall: None,
        faults: 0,
        killed: 0,
    }
}

fn of_command(plan: &Plan, seed: u64, end: &TrialEnd) -> MatrixRun {
    let result = match end.status {
        None => RunEnd::Hung,
        Some(status) if status.success() => finished(plan, &end.report),
        Some(status) => RunEnd::Failed(status.to_string()),
    };
    row(seed, result, end.took, None, &end.report)
}

fn of_program(plan: &Plan, seed: u64, end: TrialEnd) -> MatrixRun {
    let outcome = Outcome {
        status: end.status,
        took: end.took,
        lines: end.lines,
        left: Vec::new(),
    };
    let (result, stall) = match outcome.verdict() {
        JobVerdict::Finished(progress) => (finished(plan, &end.report), Some(progress.max_stall)),
        JobVerdict::Wrong(_) => (RunEnd::WrongData, None),
        JobVerdict::Failed(how) => (RunEnd::Failed(how), None),
        JobVerdict::Hung => (RunEnd::Hung, None),
    };
    row(seed, result, end.took, stall, &end.report)
}

/// The end of a run that has finished with success.
fn finished(plan: &Plan, report: &ChaosReport) -> RunEnd {
    if let Some(row) = report.first_failure() {
        return RunEnd::NotMade(format!("{}: {}", row.kind, row.detail));
    }
    let met = |n: usize| {
        report
            .faults
            .iter()
            .any(|row| row.planned == n && row.effect)
    };
    match (0..plan.faults.len()).find(|n| !met(*n)) {
        Some(n) => RunEnd::NoEffect(format!("fault {} ({})", n + 1, plan.faults[n].kind.name())),
        None => RunEnd::Survived,
    }
}

fn row(
    seed: u64,
    end: RunEnd,
    took: Duration,
    longest_stall: Option<f64>,
    report: &ChaosReport,
) -> MatrixRun {
    MatrixRun {
        seed,
        end,
        seconds: seconds(took),
        longest_stall,
        faults: report.faults.len(),
        killed: report.hit(),
    }
}
