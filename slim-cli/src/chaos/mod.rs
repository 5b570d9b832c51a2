//! `slim chaos`: makes the faults of a plan, for a new command or for a running job.

pub mod active;
pub mod netem;
pub mod plan;
pub mod report;
pub mod scene;
pub mod schedule;
pub mod stopped;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitCode, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use slim_lab::{Error, Lab, SeededRng};

use crate::failure::{CliError, NOT_EXECUTABLE};
use crate::lab;
use crate::run::launcher;
use active::{ActiveFault, Ongoing};
use plan::Plan;
use report::{ChaosReport, FaultRow, seconds};
use scene::Scene;
use schedule::Schedule;

/// How often to check whether the command or the job has ended.
const TICK: Duration = Duration::from_millis(20);

/// Break connections under a command, by a plan (TOML).
///
/// With a command: makes a lab of nodes on this machine (nodeA, nodeB, …), runs the
/// command on nodeA and makes the faults of the plan; mpirun reaches the other nodes.
/// The exit status is that of the command. With --pid: makes the faults on a running
/// job. Needs root.
#[derive(Args, Debug)]
pub struct ChaosOptions {
    /// The fault plan; see examples/chaos.
    #[arg(value_name = "PLAN")]
    pub plan: PathBuf,
    /// Seed of all times and choices (instead of the plan's).
    #[arg(long)]
    pub seed: Option<u64>,
    /// Break connections of this process and its descendants.
    #[arg(long, value_name = "PID", conflicts_with = "command")]
    pub pid: Option<u32>,
    /// With --pid: break connections of everything in the network namespace of that process.
    #[arg(long, requires = "pid")]
    pub whole_namespace: bool,
    /// Nodes of the lab.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=26))]
    pub nodes: u8,
    /// Paths between the nodes of the lab.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub paths: u8,
    /// Print the report as JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// The command and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Runs the plan and prints the report.
pub fn main(options: &ChaosOptions) -> Result<ExitCode, CliError> {
    if options.pid.is_none() && options.command.is_empty() {
        return Err(CliError::input(
            "nothing to hit: give a command for the lab (behind --), or the --pid of a running job",
        ));
    }
    let plan = Plan::read(&options.plan)?;
    let seed = options
        .seed
        .or(plan.seed)
        .unwrap_or_else(SeededRng::seed_from_env);
    if let Some(command) = options.command.first() {
        launcher::resolve(&command.to_string_lossy())?;
    }
    let bad = |line: String| CliError::input(format!("{}: {line}", options.plan.display()));
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
    if options.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::from(
        u8::try_from(report.status.unwrap_or(0)).unwrap_or(1),
    ))
}

fn scene(options: &ChaosOptions) -> Result<Scene, Error> {
    match options.pid {
        Some(pid) => Scene::of_process(pid, options.whole_namespace),
        None => {
            let (nodes, paths) = (usize::from(options.nodes), usize::from(options.paths));
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

/// A fault in force, and its row in the report.
struct Active {
    until: Duration,
    row: usize,
    guard: ActiveFault,
}

/// Makes the faults until the command, the job or the plan ends. A fault that cannot be made is
/// reported and does not stop the others.
fn run(
    plan: &Plan,
    seed: u64,
    scene: &Scene,
    mut child: Option<Child>,
) -> Result<ChaosReport, CliError> {
    let mut report = ChaosReport {
        seed,
        ..ChaosReport::default()
    };
    let mut schedule = Schedule::new(plan, seed);
    let mut rng = SeededRng::new(seed);
    let ongoing = Ongoing::default();
    let mut active: Vec<Active> = Vec::new();
    let begin = Instant::now();
    loop {
        let now = begin.elapsed();
        for over in active.extract_if(.., |a| a.until <= now) {
            end(over, now, &mut report);
        }
        if let Some(child) = &mut child {
            let ended = child
                .try_wait()
                .map_err(|e| CliError::failed(format!("wait for the command: {e}")))?;
            if let Some(status) = ended {
                report.status = Some(status_number(status));
                break;
            }
        } else if !scene.is_alive() || (schedule.peek().is_none() && active.is_empty()) {
            break;
        }
        while schedule.peek().is_some_and(|at| at <= now) {
            let Some(due) = schedule.next() else { break };
            let fault = &plan.faults[due.fault];
            let at = begin.elapsed();
            let mut row = FaultRow {
                at: seconds(at),
                kind: fault.kind.name(),
                node: "-".into(),
                lasted: None,
                hit: None,
                detail: String::new(),
                failed: false,
            };
            match scene.strike(fault, &mut rng, &ongoing) {
                Ok(strike) => {
                    row.node = strike.node;
                    row.detail = strike.detail;
                    row.hit = strike.guard.is_none().then_some(strike.hit);
                    if let Some(guard) = strike.guard {
                        let until = at + due.lasts.unwrap_or_default();
                        active.push(Active {
                            until,
                            row: report.faults.len(),
                            guard,
                        });
                    }
                }
                Err(error) => {
                    row.failed = true;
                    row.detail = error.to_string();
                }
            }
            report.faults.push(row);
        }
        let next = active.iter().map(|a| a.until).chain(schedule.peek()).min();
        let pause = next.map_or(TICK, |at| at.saturating_sub(begin.elapsed()).min(TICK));
        thread::sleep(pause);
    }
    let now = begin.elapsed();
    for rest in active {
        end(rest, now, &mut report);
    }
    report.seconds = seconds(now);
    Ok(report)
}

fn end(over: Active, now: Duration, report: &mut ChaosReport) {
    let row = &mut report.faults[over.row];
    row.lasted = Some(seconds(now - Duration::from_secs_f64(row.at).min(now)));
    match over.guard.lift() {
        Ok(None) => {}
        Ok(Some(what)) => row.detail = what,
        Err(error) => {
            row.failed = true;
            row.detail = format!("could not be ended: {error}");
        }
    }
}

/// The exit status as a shell reports it: 128 plus the number of a signal.
fn status_number(status: ExitStatus) -> i32 {
    status
        .code()
        .or(status.signal().map(|s| 128 + s))
        .unwrap_or(1)
}
