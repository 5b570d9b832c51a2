//! `slim demo`: shows in a minute or two what SLIM does.
//!
//! An MPI program that checks every byte runs on two nodes of a lab on this machine, bare, under `slim run`, and under `slim run --btl`,
//! while its connections are killed at random moments.

mod events;
mod one_run;
mod summary;

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use slim_lab::mpi::{Flavor, Mpi};
use slim_lab::{Lab, SeededRng};
use tempfile::TempDir;

use crate::failure::{CliError, FAILED};
use crate::run::component;
use crate::run::entry::OpenMpi;
use crate::run::preload;
use events::EventTotals;
use one_run::{DemoMode, Setting};
use summary::Summary;

/// Show an MPI program whose connections are killed, bare, under SLIM, and with SLIM's native component.
///
/// Needs root (network namespaces) and Open MPI. Status 0 means that every run
/// under SLIM finished with all data right.
#[derive(Args, Debug)]
pub struct DemoOptions {
    /// Runs of each kind.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub runs: u32,
    /// Seconds that the program works in each run.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=3600))]
    pub seconds: u32,
    /// Ranks, spread over the two nodes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub ranks: u32,
    /// Seed of the random moments (default: from the clock; it is printed).
    #[arg(long)]
    pub seed: Option<u64>,
    /// Directory for the event logs (default: a new one for temporary files).
    #[arg(long, value_name = "DIR")]
    pub events: Option<PathBuf>,
    /// Skip the bare runs.
    #[arg(long)]
    pub no_bare: bool,
}

/// Runs the demonstration.
pub fn main(options: &DemoOptions) -> Result<ExitCode, CliError> {
    let input = |e: slim_lab::Error| CliError::input(e.to_string());
    Lab::check().map_err(input)?;
    let library = preload::find(None)?;
    let mpi = Mpi::find(Flavor::OpenMpi4).map_err(input)?;
    let program = mpi.build_program("slim_pp.c").map_err(input)?;
    let events = event_directory(options)?;
    let seed = options.seed.unwrap_or_else(SeededRng::seed_from_env);
    let lab = Lab::builder()
        .nodes(2)
        .name("demo")
        .build()
        .map_err(input)?;

    println!(
        "Two nodes on this machine, {} MPI ranks exchanging checked data for {} s a run;\n\
         a TCP connection between them is killed every 0.15 to 0.6 s (seed {seed}).",
        options.ranks, options.seconds
    );
    let setting = Setting {
        lab: &lab,
        mpirun: mpi.mpirun(),
        program: &program,
        library: &library,
        events: &events,
        ranks: options.ranks as usize,
        time: Duration::from_secs(options.seconds.into()),
    };
    let mut rng = SeededRng::new(seed);
    let mut modes = vec![DemoMode::Bare, DemoMode::Slim, DemoMode::Component];
    if options.no_bare {
        modes.remove(0);
    }
    if let Err(reason) = component::arguments(OpenMpi::V4, mpi.mpirun(), &[]) {
        println!("No runs with the native component: {reason}.");
        modes.retain(|mode| *mode != DemoMode::Component);
    }
    let mut summaries = Vec::new();
    for mode in &modes {
        let mut summary = Summary::new(*mode);
        for n in 1..=options.runs {
            let title = format!("{mode} {n}/{}", options.runs);
            let run = setting.run(*mode, n, &mut rng, |line| {
                progress(&format!("{title}: {line}"))
            })?;
            finish_line(&format!("{title}: {run}"));
            summary.add(run);
        }
        summaries.push(summary);
    }
    println!("\n{}", summary::table(&summaries));
    println!("event log of the runs under SLIM: {}", events.display());
    println!("in total: {}", EventTotals::read(&events));
    let perfect = summaries
        .iter()
        .filter(|s| s.mode() != DemoMode::Bare)
        .all(Summary::is_perfect);
    if !perfect {
        println!("NOT every run under SLIM was perfect");
        return Ok(ExitCode::from(FAILED));
    }
    println!("every run under SLIM finished, with all data right");
    Ok(ExitCode::SUCCESS)
}

fn event_directory(options: &DemoOptions) -> Result<PathBuf, CliError> {
    let Some(dir) = &options.events else {
        let made = tempfile::Builder::new().prefix("slim-demo-").tempdir();
        return made
            .map(TempDir::keep)
            .map_err(|e| CliError::input(format!("make a temporary directory: {e}")));
    };
    fs::create_dir_all(dir)
        .and_then(|()| dir.canonicalize())
        .map_err(|e| CliError::input(format!("{}: {e}", dir.display())))
}

/// On a terminal, overwrites the current line with `line`; elsewhere only finished lines are printed.
fn progress(line: &str) {
    let mut out = io::stdout();
    if out.is_terminal() {
        // A failure to write must not end the demonstration.
        let _ = write!(out, "\r\x1b[K  {line}").and_then(|()| out.flush());
    }
}

fn finish_line(line: &str) {
    if io::stdout().is_terminal() {
        print!("\r\x1b[K");
    }
    println!("  {line}");
}
