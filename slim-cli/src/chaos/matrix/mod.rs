//! `slim chaos matrix`: which MPI survives which fault, bare and with SLIM.

pub mod cells;
mod jobs;
pub mod plans;
mod report;

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use slim_lab::{Lab, SeededRng};

use super::LabOptions;
use crate::failure::{CliError, FAILED, print, say};
use crate::page;
use crate::run::launcher;
use crate::shell;
use cells::{MatrixCell, MatrixMode};
use jobs::{MatrixJob, MatrixMpi, Workshop};
use plans::MatrixFault;
use report::MatrixReport;

/// Run MPIs under faults, with and without SLIM, and print which survive.
///
/// A program that checks every byte runs on two nodes of a lab on this machine (or with -- COMMAND, that command, whose
/// exit status decides). Needs root. Status 0: all runs with SLIM survived.
#[derive(Args, Debug)]
pub struct MatrixOptions {
    /// Only these MPIs (default: all that are installed).
    #[arg(long, value_delimiter = ',', conflicts_with = "command")]
    mpi: Vec<MatrixMpi>,
    /// Only these faults: plans of examples/chaos/matrix by their names, or files with plans (default: all of the former).
    #[arg(long, value_delimiter = ',', value_name = "FAULT")]
    fault: Vec<String>,
    /// Only runs without or with SLIM.
    #[arg(long, value_delimiter = ',', default_values = ["bare", "slim"])]
    with: Vec<MatrixMode>,
    /// Runs of each cell.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Seed of the first run of each cell (default: from the clock; it is printed).
    #[arg(long)]
    seed: Option<u64>,
    /// Ranks of the program, spread over the nodes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64), conflicts_with = "command")]
    ranks: u32,
    /// How long a plan that has no end makes faults.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86400))]
    seconds: u32,
    /// Seconds that a run may take after its last fault (default: 15, with SLIM 75; with a command 300).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=86400))]
    limit: Option<u32>,
    #[command(flatten)]
    lab: LabOptions,
    /// Write a page (HTML) with the matrix.
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    /// Print the report as JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// A command to run instead of the program. SLIM's runs are under `slim run`.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the matrix and prints it.
pub fn main(options: &MatrixOptions) -> Result<ExitCode, CliError> {
    Lab::check().map_err(|e| CliError::input(e.to_string()))?;
    if let Some(command) = options.command.first() {
        launcher::resolve(&command.to_string_lossy())?;
    }
    let (faults, left_out) = plans::faults(&options.fault, options.seconds)?;
    let (jobs, missing) = jobs::jobs(&options.mpi, &options.command)?;
    for line in left_out.iter().chain(&missing) {
        say(&format!("slim: {line}"));
    }
    let workshop = Workshop::new(options)?;
    let seed = options.seed.unwrap_or_else(SeededRng::seed_from_env);
    let total = faults.len() * jobs.len() * options.with.len() * options.runs as usize;
    if let Some(path) = &options.page {
        page::check(path)?;
    }
    say(&format!("{total} runs, seed {seed}"));
    let mut report = MatrixReport {
        seed,
        command: shell::line(env::args_os()),
        cells: Vec::new(),
    };
    let mut done = 0;
    for fault in &faults {
        for job in &jobs {
            for mode in &options.with {
                let mut cell = MatrixCell {
                    fault: fault.name.clone(),
                    job: job.name().to_owned(),
                    mode: *mode,
                    runs: Vec::new(),
                    repeat: None,
                };
                for n in 0..u64::from(options.runs) {
                    let run = workshop.run(job, fault, *mode, seed.wrapping_add(n))?;
                    done += 1;
                    say(&format!(
                        "{done}/{total} {}, {}, {mode}: {} ({:.1} s, {} faults)",
                        fault.name,
                        job.name(),
                        run.end,
                        run.seconds,
                        run.faults
                    ));
                    cell.runs.push(run);
                }
                cell.repeat = cell
                    .first_bad()
                    .map(|run| options.repeat(job, fault, *mode, run.seed));
                report.cells.push(cell);
            }
        }
    }
    // If one of them cannot be written, the other one holds the results.
    let page = options.page.as_deref().map(|path| report.write_page(path));
    print(&match options.json {
        true => report.json() + "\n",
        false => report.text(),
    })?;
    page.transpose()?;
    Ok(match report.is_good() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(FAILED),
    })
}

impl MatrixOptions {
    /// The command that repeats one run.
    fn repeat(&self, job: &MatrixJob, fault: &MatrixFault, mode: MatrixMode, seed: u64) -> String {
        let mut line: Vec<OsString> = ["slim", "chaos", "matrix"].map(Into::into).into();
        let mut add = |name: &str, value: &dyn std::fmt::Display| {
            line.extend([name.into(), value.to_string().into()]);
        };
        if let MatrixJob::Mpi { name, .. } = job {
            add("--mpi", name);
        }
        add("--fault", &fault.given);
        add("--with", &mode.to_string().to_lowercase());
        add("--runs", &1);
        add("--seed", &seed);
        if self.ranks != 2 {
            add("--ranks", &self.ranks);
        }
        if self.seconds != 10 {
            add("--seconds", &self.seconds);
        }
        if let Some(limit) = &self.limit {
            add("--limit", limit);
        }
        if self.lab.nodes != 2 {
            add("--nodes", &self.lab.nodes);
        }
        if self.lab.paths != 1 {
            add("--paths", &self.lab.paths);
        }
        if !self.command.is_empty() {
            line.push("--".into());
            line.extend(self.command.iter().cloned());
        }
        shell::line(line)
    }
}
