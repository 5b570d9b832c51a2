//! `slim bench`: measures the cost of SLIM against bare sockets in the same run.
//!
//! Times measured on a loaded or shared machine mislead. Therefore the kinds of runs take turns of some milliseconds,
//! ranks stay on their cores, and a difference is reported only if its 95 % interval excludes 1. Counts of
//! [`instructions`] do not depend on the load.

pub mod callgrind;
pub mod contender;
pub mod flows;
pub mod goals;
pub mod instructions;
pub mod memory;
pub mod messages;
pub mod options;
pub mod page;
pub mod pairs;
pub mod plot;
pub mod report;
pub mod resume;
pub mod round;
pub mod section;
pub mod site;
pub mod stats;
pub mod turns;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use slim_lab::Lab;
use slim_lab::mpi::{Flavor, Mpi, RankAdapters};

use crate::failure::{CliError, FAILED, print, say};
use crate::run::preload;
use contender::{Contender, Ready};
use messages::Test;
pub use options::BenchOptions;
use options::Rate;
use report::{BenchReport, Machine};

/// A higher load gives a warning: something else uses the machine.
const BUSY: f64 = 0.5;
/// Approximate duration of counting instructions, under valgrind.
const COUNTING: Duration = Duration::from_secs(60);

/// Runs the measurements and prints the report.
pub fn main(options: &BenchOptions) -> Result<ExitCode, CliError> {
    if let Some(directory) = &options.all {
        fs::create_dir_all(directory)
            .map_err(|e| CliError::input(format!("{}: {e}", directory.display())))?;
    }
    let report = measure(options)?;
    let sections = report.sections()?;
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    if let Some(path) = &options.html {
        report.write_html(path, &sections)?;
    }
    if let Some(directory) = &options.all {
        let (page, figures) = (directory.join("bench.html"), directory.join("bench.json"));
        report.write_json(&figures)?;
        report.write_html(&page, &sections)?;
        told(&format!(
            "wrote {} and {}",
            page.display(),
            figures.display()
        ));
    }
    // Last: nothing is lost if nobody reads it.
    print(&report.text(&sections))?;
    Ok(match report.missing.is_empty() {
        true => ExitCode::SUCCESS,
        false => FAILED.into(),
    })
}

fn told(line: &str) {
    say(&format!("bench: {line}"));
}

fn measure(options: &BenchOptions) -> Result<BenchReport, CliError> {
    let all = options.all.is_some();
    // No part that is possible with adapters uses it.
    let library = match options.adapters {
        Some(_) => PathBuf::new(),
        None => preload::find(None)?,
    };
    let messages = match (all, options.messages_only()) {
        (true, _) => all_messages(options)?,
        (_, true) => vec![message_plan(options)?],
        _ => Vec::new(),
    };
    let counted = all || options.instructions;
    let resume = (all || options.resume).then(|| options.resume_plan());
    let memory = (all || options.memory).then(|| options.memory_plan());
    let in_lab = options.adapters.is_none();
    if in_lab && (!messages.is_empty() || resume.is_some() || memory.is_some()) {
        Lab::check().map_err(|e| CliError::input(e.to_string()))?;
    }
    if counted && !options.quick {
        callgrind::valgrind()?;
    }
    let machine = Machine::here();
    let timed = !messages.is_empty() || resume.is_some() || memory.is_some();
    if timed && machine.load > BUSY {
        told(&format!(
            "the machine is not idle (load {:.2}): expect noise",
            machine.load
        ));
    }
    let parts = messages.iter().map(messages::MessagePlan::estimate);
    let parts = parts
        .chain(resume.iter().map(resume::ResumePlan::estimate))
        .chain(memory.iter().map(memory::MemoryPlan::estimate))
        .chain(counted.then_some(COUNTING));
    told(&about(parts.sum()));

    let mut report = BenchReport::new(machine);
    // With --all, a part that fails must not lose the figures of the others.
    let mut missing = Vec::new();
    let mut note = |part: &str, failure: CliError| {
        if !all {
            return Err(failure);
        }
        told(&format!("{part}: {failure}"));
        missing.push(format!("{part}: {failure}"));
        Ok(())
    };
    if counted {
        match count(&library, options.quick) {
            Ok(figures) => report.instructions = figures,
            Err(failure) => note("instructions", failure)?,
        }
    }
    if let Some(plan) = resume {
        match plan.measure(&library, told) {
            Ok(figures) => report.resume = Some(figures),
            Err(failure) => note("interruptions", failure)?,
        }
    }
    if let Some(plan) = memory {
        match plan.measure(&library, told) {
            Ok(figures) => report.memory = Some(figures),
            Err(failure) => note("memory", failure)?,
        }
    }
    for plan in messages {
        let name = format!("messages of {}", plan.name());
        told(&name);
        match plan.measure(told) {
            Ok(figures) => report.messages.push(figures),
            Err(failure) => note(&name, failure)?,
        }
    }
    report.missing = missing;
    Ok(report)
}

/// An estimate, rounded up so that it does not look exact.
fn about(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..90 => format!("this takes about {} seconds", seconds.next_multiple_of(5)),
        seconds => format!("this takes about {} minutes", seconds.div_ceil(60)),
    }
}

/// Counts instructions. The short form counts the C program only, and nothing without valgrind.
fn count(
    library: &Path,
    quick: bool,
) -> Result<Option<instructions::InstructionFigures>, CliError> {
    if !quick {
        told("instructions");
        return instructions::measure(library, told).map(Some);
    }
    if let Err(missing) = callgrind::valgrind() {
        told(&missing.to_string());
        return Ok(None);
    }
    let pair = instructions::pair(library)?;
    let mpi = Vec::new();
    Ok(Some(instructions::InstructionFigures { pair, mpi }))
}

fn message_plan(options: &BenchOptions) -> Result<messages::MessagePlan, CliError> {
    let mut tests = match &options.only[..] {
        [] => Test::usual(),
        only => only.to_vec(),
    };
    if options.adapters.is_some() {
        tests.retain(|test| test.ranks() == 2);
    }
    check_adapters(options, &tests)?;
    let flavor = options.mpi.flavor();
    Ok(messages::MessagePlan {
        flavor,
        against: contenders(options)?,
        tests: possible(flavor, tests)?,
        adapters: options.adapters.clone(),
        rounds: options.rounds(),
        each: options.each(),
        quick: options.quick,
        rate_kbit: options.rate.map(Rate::kbit),
    })
}

/// What is to be compared is possible with adapters, or needs none, and the adapters are there.
fn check_adapters(options: &BenchOptions, tests: &[Test]) -> Result<(), CliError> {
    let Some(names) = &options.adapters else {
        return match options.against.contains(&Contender::Verbs) {
            true => Err(CliError::input(
                "--against verbs needs the adapters of the two ranks: --adapters ADAPTER,ADAPTER (`rdma link` lists them)",
            )),
            false => Ok(()),
        };
    };
    if let Some(other) = options.against.iter().find(|c| !c.is_of_open_mpi()) {
        return Err(CliError::input(format!(
            "--adapters: {other} cannot be compared there, only component and verbs"
        )));
    }
    if tests.is_empty() {
        return Err(CliError::input(
            "--adapters: only latency, bandwidth and rate have two ranks, one for each adapter",
        ));
    }
    let found = RankAdapters::find(names);
    found.map(drop).map_err(|e| CliError::input(e.to_string()))
}

/// Plans for every installed MPI, and for the first of them the tests that depend on the line, on slower lines.
fn all_messages(options: &BenchOptions) -> Result<Vec<messages::MessagePlan>, CliError> {
    let mut plans = Vec::new();
    let base = message_plan(options)?;
    for flavor in [Flavor::OpenMpi4, Flavor::OpenMpi5, Flavor::Mpich] {
        match Mpi::find(flavor) {
            Ok(_) => plans.push(messages::MessagePlan {
                flavor,
                tests: possible(flavor, base.tests.clone())?,
                ..base.clone()
            }),
            Err(missing) => told(&format!("{flavor} is left out: {missing}")),
        }
    }
    let Some(first) = plans.first().cloned() else {
        return Err(CliError::input("no MPI is installed: run scripts/setup"));
    };
    let mut rates = vec![Rate::Ten, Rate::One];
    if options.quick {
        plans.truncate(1);
        rates.truncate(1);
    }
    for rate in rates {
        plans.push(messages::MessagePlan {
            tests: vec![Test::Latency, Test::Bandwidth],
            rate_kbit: Some(rate.kbit()),
            ..first.clone()
        });
    }
    Ok(plans)
}

/// The tests that end reliably with this MPI. Jobs of four ranks with Debian's MPICH 4.0 (UCX over TCP) often hang
/// after their last result, without SLIM as well.
fn possible(flavor: Flavor, mut tests: Vec<Test>) -> Result<Vec<Test>, CliError> {
    if flavor != Flavor::Mpich || tests.iter().all(|test| test.ranks() == 2) {
        return Ok(tests);
    }
    let why = "allreduce and alltoall are left out with MPICH: its jobs of four ranks over TCP do not always end, with or without SLIM";
    tests.retain(|test| test.ranks() == 2);
    if tests.is_empty() {
        return Err(CliError::input(why));
    }
    told(why);
    Ok(tests)
}

/// Bare, and what is measured against it: everything that --against names, or whatever of the default is installed.
fn contenders(options: &BenchOptions) -> Result<Vec<Ready>, CliError> {
    let made =
        |contender: Contender| contender.ready(options.mpi.flavor(), options.component.as_deref());
    let mut ready = vec![made(Contender::Bare)?];
    let named = match (&options.against[..], &options.adapters) {
        ([], Some(_)) => &[Contender::Component, Contender::Verbs],
        (named, _) => named,
    };
    if named.is_empty() {
        ready.push(made(Contender::Slim)?);
        for usual in [Contender::Mptcp, Contender::Framed] {
            match made(usual) {
                Ok(found) => ready.push(found),
                Err(missing) => told(&missing.to_string()),
            }
        }
    }
    for contender in named {
        if ready.iter().all(|r| r.contender != *contender) {
            ready.push(made(*contender)?);
        }
    }
    if ready.len() == 1 {
        return Err(CliError::input(
            "--against bare: there is nothing to compare bare with",
        ));
    }
    if options.component.is_some() && ready.iter().all(|r| r.component.is_none()) {
        return Err(CliError::input(
            "--component has no effect: neither component nor verbs is compared",
        ));
    }
    Ok(ready)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimated_times_are_rounded() {
        assert_eq!(
            about(Duration::from_secs(41)),
            "this takes about 45 seconds"
        );
        assert_eq!(
            about(Duration::from_secs(601)),
            "this takes about 11 minutes"
        );
    }
}
