//! One run of a command or a job under a plan, with a limit.

use std::ffi::OsString;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use slim_lab::output::{Line, Running};
use slim_lab::{Error, Lab};

use super::engine::Engine;
use super::plan::Plan;
use super::report::ChaosReport;
use super::scene::Scene;
use crate::failure::CliError;
use crate::lab::launcher_environment;

/// How a run ended.
#[derive(Debug)]
pub struct TrialEnd {
    /// None: it hung and was ended.
    pub status: Option<ExitStatus>,
    /// How long it ran.
    pub took: Duration,
    /// Its output.
    pub lines: Vec<Line>,
    /// The faults.
    pub report: ChaosReport,
}

/// When a run counts as one that hangs.
#[derive(Clone, Copy, Debug)]
pub enum RunLimit {
    /// So long after its last fault has begun or ended.
    AfterFaults(Duration),
    /// So long after its start.
    Total(Duration),
}

/// A new lab for a run.
pub fn new_lab(name: &str, nodes: u8, paths: usize) -> Result<Scene, CliError> {
    let builder = Lab::builder().nodes(nodes.into()).paths(paths).name(name);
    let lab = builder
        .build()
        .map_err(|e| CliError::failed(e.to_string()))?;
    Ok(Scene::Lab(Box::new(lab)))
}

/// Runs a command on the first node of the lab.
pub fn start(lab: &Lab, words: &[OsString]) -> Result<Running, CliError> {
    let (program, args) = words
        .split_first()
        .ok_or_else(|| CliError::input("no command"))?;
    let mut command = lab.node(0).command(program);
    command.args(args).envs(launcher_environment(lab)?);
    Running::start(command).map_err(|e| CliError::failed(e.to_string()))
}

/// Makes the faults of the plan until the program ends. When no fault will begin or end any more, but for those that last to the end of the
/// run, `quiet` is called. Ends what is left of the program.
pub fn carry_out(
    scene: &Scene,
    plan: &Plan,
    seed: u64,
    mut program: Running,
    limit: RunLimit,
    quiet: impl FnOnce() -> Result<(), Error>,
) -> Result<TrialEnd, CliError> {
    let failed = |e: Error| CliError::failed(e.to_string());
    let mut engine = Engine::new(plan, seed, scene);
    let (mut quiet, mut since) = (Some(quiet), None::<Instant>);
    let status = loop {
        engine.step();
        if let Some(status) = program.wait_end(engine.pause()) {
            break Some(status);
        }
        if let Some(quiet) = quiet.take_if(|_| engine.is_quiet()) {
            quiet().map_err(failed)?;
            since = Some(Instant::now());
        }
        let is_late = match limit {
            RunLimit::AfterFaults(limit) => since.is_some_and(|since| since.elapsed() > limit),
            RunLimit::Total(limit) => program.elapsed() > limit,
        };
        if is_late {
            break None;
        }
    };
    let report = engine.finish();
    let took = program.elapsed();
    // Collects the last lines.
    let _ = program.wait(Duration::ZERO);
    program.kill();
    if let Scene::Lab(lab) = scene {
        lab.nodes().iter().for_each(|node| drop(node.kill_all()));
    }
    Ok(TrialEnd {
        status,
        took,
        lines: program.lines(),
        report,
    })
}
