//! `slim chaos shrink`: the few faults of a plan that make a command fail.

mod concrete;
mod reduce;

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use slim_lab::{Lab, SeededRng};
use toml::Table;

use super::plan::Plan;
use super::trial::{self, RunLimit, TrialEnd};
use super::{LabOptions, status_number};
use crate::failure::{CliError, FAILED, print, say, visible};
use crate::page::write;
use crate::run::launcher;
use crate::shell::line;

/// A result of more faults is said to be one.
const FEW: usize = 3;

/// Find the few faults of a plan that make a command fail, and print a plan with them.
///
/// Runs the command under the plan until it fails, makes a list of the faults of that run, and leaves out more and more of them
/// (delta debugging). Each list is tried in a new lab. Needs root.
#[derive(Args, Debug)]
pub struct ShrinkOptions {
    /// The fault plan.
    #[arg(value_name = "PLAN")]
    plan: PathBuf,
    /// What a failure is: `fail` (the exit status is not 0, or the command does not end within --limit), `hang`, or an exit status.
    #[arg(long, default_value = "fail", value_name = "END")]
    expect: FailureKind,
    /// How often a list of faults is run before it counts as one that does not fail.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    tries: u32,
    /// Seconds after which a run counts as one that hangs.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86400))]
    limit: u32,
    /// Seed of all times and choices of the first run (instead of the plan's).
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    lab: LabOptions,
    /// Write the plan to this file (default: standard output).
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// What counts as a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailureKind {
    /// Every end but exit status 0.
    Any,
    /// No end in time.
    Hang,
    /// This exit status.
    Status(i32),
}

impl FromStr for FailureKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.parse()) {
            ("fail", _) => Ok(Self::Any),
            ("hang", _) => Ok(Self::Hang),
            (_, Ok(status @ 1..=255)) => Ok(Self::Status(status)),
            _ => Err("not `fail`, `hang`, or an exit status (1 to 255)".into()),
        }
    }
}

impl FailureKind {
    /// Whether a run that ended with this status, or hung, is such a failure.
    fn is(self, status: Option<i32>) -> bool {
        match self {
            Self::Any => status != Some(0),
            Self::Hang => status.is_none(),
            Self::Status(wanted) => status == Some(wanted),
        }
    }
}

/// Shrinks the plan.
pub fn main(options: &ShrinkOptions) -> Result<ExitCode, CliError> {
    Lab::check().map_err(|e| CliError::input(e.to_string()))?;
    let path = options.plan.display();
    let text =
        fs::read_to_string(&options.plan).map_err(|e| CliError::input(format!("{path}: {e}")))?;
    let bad = |line: String| CliError::input(format!("{path}: {line}"));
    let plan = Plan::parse(&text).map_err(bad)?;
    plan.check_kernel().map_err(bad)?;
    launcher::resolve(&options.command[0].to_string_lossy())?;
    let seed = options.seed.or(plan.seed);
    let seed = seed.unwrap_or_else(SeededRng::seed_from_env);
    // A seed that the user has given stays the same in all runs.
    let is_fixed = options.seed.or(plan.seed).is_some();

    let end = options.run(&Plan::without_faults(), seed, "without faults")?;
    if options.expect.is(status(&end)) {
        let last = end.lines.last().map_or("", |line| &line.text);
        return Err(CliError::failed(format!(
            "the command fails without faults, too ({}): {last}",
            described(&end)
        )));
    }
    let mut failing = None;
    for n in 0..options.tries {
        let seed = if is_fixed {
            seed
        } else {
            seed.wrapping_add(n.into())
        };
        let end = options.run(&plan, seed, &format!("the plan, seed {seed}"))?;
        if options.expect.is(status(&end)) {
            failing = Some((seed, end));
            break;
        }
    }
    let Some((seed, end)) = failing else {
        return Err(CliError::failed(format!(
            "the command did not fail in {} runs of the plan",
            options.tries
        )));
    };
    let all = concrete::faults(&text, &end.report).map_err(|e| bad(e.to_string()))?;
    if all.is_empty() {
        return Err(CliError::failed(
            "the command failed, but no fault of that run met a connection, a process or a packet",
        ));
    }
    let mut fails = |faults: &[Table]| options.fails(seed, faults);
    let (left, is_sure) = match fails(&all)? {
        true => (reduce::ddmin(all.clone(), &mut fails)?, true),
        false => (all.clone(), false),
    };
    options.conclude(seed, &all, &left, is_sure)
}

impl ShrinkOptions {
    /// Runs the command once, in a lab of its own.
    fn run(&self, plan: &Plan, seed: u64, what: &str) -> Result<TrialEnd, CliError> {
        let scene = trial::new_lab("shrink", self.lab.nodes, self.lab.paths.into())?;
        let lab = scene.lab().map_err(|e| CliError::failed(e.to_string()))?;
        let admitted = scene.admits(plan);
        admitted.map_err(|line| CliError::input(format!("{}: {line}", self.plan.display())))?;
        let program = trial::start(lab, &self.command)?;
        let limit = RunLimit::Total(Duration::from_secs(self.limit.into()));
        let end = trial::carry_out(&scene, plan, seed, program, limit, || Ok(()))?;
        let met = end.report.faults.iter().filter(|row| row.effect).count();
        say(&format!(
            "{what}: {} after {:.1} s; faults that met something: {met}",
            described(&end),
            end.took.as_secs_f64()
        ));
        Ok(end)
    }

    /// Whether the command fails under these faults, in one of the tries.
    fn fails(&self, seed: u64, faults: &[Table]) -> Result<bool, CliError> {
        for n in 1..=self.tries {
            if self.fails_once(seed, faults, n)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn fails_once(&self, seed: u64, faults: &[Table], n: u32) -> Result<bool, CliError> {
        let plan = Plan::parse(&concrete::plan(seed, faults)).map_err(CliError::failed)?;
        let what = format!("list of {}, try {n}", faults.len());
        let end = self.run(&plan, seed, &what)?;
        Ok(self.expect.is(status(&end)))
    }

    /// Prints the plan, and says how sure it is.
    fn conclude(
        &self,
        seed: u64,
        all: &[Table],
        left: &[Table],
        is_sure: bool,
    ) -> Result<ExitCode, CliError> {
        let mut failed = 0;
        for n in 1..=self.tries {
            failed += u32::from(self.fails_once(seed, left, n)?);
        }
        let found = format!(
            "faults left: {} of {}; with them the command failed in {failed} of {} runs",
            left.len(),
            all.len(),
            self.tries
        );
        let doubt = match (is_sure, left.len()) {
            (false, _) => {
                "\n# The list of all faults of the run that failed did not fail again: the failure depends on more than these faults."
            }
            (true, FEW..) if left.len() > FEW => "\n# No part of these that was tried failed.",
            _ => "",
        };
        let mut again: Vec<OsString> = vec!["slim".into(), "chaos".into(), "THIS-FILE".into()];
        if self.lab.nodes != 2 {
            again.extend(["--nodes".into(), self.lab.nodes.to_string().into()]);
        }
        if self.lab.paths != 1 {
            again.extend(["--paths".into(), self.lab.paths.to_string().into()]);
        }
        again.push("--".into());
        again.extend(self.command.iter().cloned());
        let text = format!(
            "# From {} (seed {seed}): {found}.{doubt}\n# {}\n{}",
            visible(&line([self.plan.clone().into()])),
            visible(&line(again)),
            concrete::plan(seed, left)
        );
        match &self.output {
            Some(path) => write(path, &text)?,
            None => print(&text)?,
        }
        say(&found);
        Ok(match is_sure {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(FAILED),
        })
    }
}

fn status(end: &TrialEnd) -> Option<i32> {
    end.status.map(status_number)
}

fn described(end: &TrialEnd) -> String {
    match status(end) {
        Some(status) => format!("exit status {status}"),
        None => "no end".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expectation_is_a_word_or_a_status() {
        assert_eq!("fail".parse(), Ok(FailureKind::Any));
        assert_eq!("hang".parse(), Ok(FailureKind::Hang));
        assert_eq!("139".parse(), Ok(FailureKind::Status(139)));
        for bad in ["0", "256", "-1", "crash", ""] {
            assert!(bad.parse::<FailureKind>().is_err(), "{bad}");
        }
        assert!(FailureKind::Any.is(None) && FailureKind::Any.is(Some(9)));
        assert!(!FailureKind::Any.is(Some(0)) && !FailureKind::Hang.is(Some(9)));
        assert!(FailureKind::Status(9).is(Some(9)) && !FailureKind::Status(9).is(None));
    }
}
