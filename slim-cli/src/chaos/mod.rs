//! `slim chaos`: makes the faults of a plan, for a new command or for a running job.

pub mod active;
pub mod engine;
pub mod matrix;
pub mod message;
pub mod netem;
pub mod plan;
pub mod report;
pub mod scene;
pub mod schedule;
pub mod shared;
pub mod shrink;
pub mod stopped;
pub mod strike;
pub mod times;
pub mod trial;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, ExitStatus};
use std::thread;

use clap::{Args, Subcommand};
use slim_lab::{Error, Lab, SeededRng};

use crate::failure::{CliError, NOT_EXECUTABLE, print};
use crate::lab;
use crate::run::launcher;
use engine::Engine;
use plan::Plan;
use report::ChaosReport;
use scene::Scene;

/// Break connections under a command, by a plan (TOML).
///
/// With a command: makes a lab of nodes on this machine (nodeA, nodeB, …), runs the
/// command on nodeA and makes the faults of the plan; mpirun reaches the other nodes.
/// The exit status is that of the command. With --pid: makes the faults on a running
/// job; the exit status is 1 if one could not be made or ended. Needs root.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(subcommand_value_name = "ACTION", subcommand_help_heading = "Actions")]
pub struct ChaosOptions {
    #[command(subcommand)]
    action: Option<ChaosAction>,
    #[command(flatten)]
    run: PlanOptions,
}

#[derive(Debug, Subcommand)]
enum ChaosAction {
    Matrix(matrix::MatrixOptions),
    Shrink(shrink::ShrinkOptions),
}

/// Options of a lab.
#[derive(Args, Clone, Copy, Debug)]
pub struct LabOptions {
    /// Nodes of the lab.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=26))]
    pub nodes: u8,
    /// Paths between the nodes of the lab.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub paths: u8,
}

/// Options of a run under a plan.
#[derive(Args, Debug)]
pub struct PlanOptions {
    /// The fault plan; see examples/chaos.
    #[arg(value_name = "PLAN", required = true)]
    pub plan: Option<PathBuf>,
    /// Seed of all times and choices (instead of the plan's).
    #[arg(long)]
    pub seed: Option<u64>,
    /// Break connections of this process and its descendants.
    #[arg(long, value_name = "PID", conflicts_with = "command")]
    pub pid: Option<u32>,
    /// With --pid: break connections of everything in the network namespace of that process.
    #[arg(long, requires = "pid")]
    pub whole_namespace: bool,
    /// The lab.
    #[command(flatten)]
    pub lab: LabOptions,
    /// Print the report as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// The command and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Carries out what the options ask for.
pub fn main(options: &ChaosOptions) -> Result<ExitCode, CliError> {
    match (&options.action, &options.run.plan) {
        (Some(ChaosAction::Matrix(matrix)), _) => matrix::main(matrix),
        (Some(ChaosAction::Shrink(shrink)), _) => shrink::main(shrink),
        (None, Some(path)) => run_plan(&options.run, path),
        (None, None) => Err(CliError::input("no plan")),
    }
}

/// Runs the plan and prints the report.
fn run_plan(options: &PlanOptions, path: &Path) -> Result<ExitCode, CliError> {
    if options.pid.is_none() && options.command.is_empty() {
        return Err(CliError::input(
            "nothing to hit: give a command for the lab (behind --), or the --pid of a running job",
        ));
    }
    let plan = Plan::read(path)?;
    let seed = options
        .seed
        .or(plan.seed)
        .unwrap_or_else(SeededRng::seed_from_env);
    if let Some(command) = options.command.first() {
        launcher::resolve(&command.to_string_lossy())?;
    }
    let bad = |line: String| CliError::input(format!("{}: {line}", path.display()));
    Lab::check().map_err(|e| CliError::input(e.to_string()))?;
    plan.check_kernel().map_err(bad)?;
    let scene = scene(options).map_err(|e| CliError::input(e.to_string()))?;
    scene.admits(&plan).map_err(bad)?;

    let child = match (&scene, options.command.split_first()) {
        (Scene::Lab(lab), Some((program, args))) => Some(start(lab, program, args)?),
        _ => None,
    };
    let report = run(&plan, seed, &scene, child)?;
    // Before the report: remaining processes of the command must not write into it.
    drop(scene);
    print(&match options.json {
        true => report.json() + "\n",
        false => report.text(),
    })?;
    Ok(ExitCode::from(
        u8::try_from(report.exit_status()).unwrap_or(1),
    ))
}

fn scene(options: &PlanOptions) -> Result<Scene, Error> {
    match options.pid {
        Some(pid) => Scene::of_process(pid, options.whole_namespace),
        None => {
            let (nodes, paths) = (
                usize::from(options.lab.nodes),
                usize::from(options.lab.paths),
            );
            Ok(Scene::Lab(Box::new(
                Lab::builder()
                    .nodes(nodes)
                    .paths(paths)
                    .name("chaos")
                    .build()?,
            )))
        }
    }
}

fn start(lab: &Lab, program: &OsString, args: &[OsString]) -> Result<Child, CliError> {
    let mut command = lab.node(0).command(program);
    command.args(args).envs(lab::launcher_environment(lab)?);
    command.spawn().map_err(|e| {
        CliError::new(
            NOT_EXECUTABLE,
            format!("{}: {e}", program.to_string_lossy()),
        )
    })
}

/// Makes the faults until the command, the job or the plan ends.
fn run(
    plan: &Plan,
    seed: u64,
    scene: &Scene,
    mut child: Option<Child>,
) -> Result<ChaosReport, CliError> {
    let mut engine = Engine::new(plan, seed, scene);
    let mut status = None;
    loop {
        if let Some(child) = &mut child {
            status = child
                .try_wait()
                .map_err(|e| CliError::failed(format!("wait for the command: {e}")))?
                .map(status_number);
            if status.is_some() {
                break;
            }
        } else if !scene.is_alive() || engine.is_over() {
            break;
        }
        engine.step();
        thread::sleep(engine.pause());
    }
    let mut report = engine.finish();
    report.status = status;
    Ok(report)
}

/// The exit status as a shell reports it: 128 plus the number of a signal.
pub fn status_number(status: ExitStatus) -> i32 {
    status
        .code()
        .or(status.signal().map(|s| 128 + s))
        .unwrap_or(1)
}
