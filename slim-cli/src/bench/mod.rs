//! `slim bench`: what SLIM costs, measured against bare sockets in the same run.
//!
//! Figures of a loaded or shared machine lie. So every kind of run has its turn in every round, ranks
//! stay on their cores, and a difference that is smaller than that between two runs of the same kind
//! is not called one. What is counted and not timed ([`instructions`]) holds on any machine.

pub mod callgrind;
pub mod contender;
pub mod flows;
pub mod instructions;
pub mod memory;
pub mod messages;
pub mod plot;
pub mod report;
pub mod resume;
pub mod stats;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use netem_tests::mpi::Flavor;

use crate::failure::Failure;
use crate::run::preload;
use contender::{Contender, Ready};
use messages::Test;
use report::{Machine, Report};

/// Load from which on a warning is due: somebody else uses the machine.
const BUSY: f64 = 0.5;

/// Measure what SLIM costs, against bare sockets in the same run.
///
/// Without --instructions, --resume or --memory the speed of MPI's messages is
/// measured. Needs root (network namespaces), and an otherwise idle machine for
/// everything but --instructions.
#[derive(Args, Debug)]
pub struct Options {
    /// Which MPI.
    #[arg(long, value_enum, default_value_t = MpiName::Ompi4)]
    pub mpi: MpiName,
    /// Speed of the line between the nodes (default: not limited).
    #[arg(long, value_enum)]
    pub rate: Option<Rate>,
    /// How often each kind of run has its turn.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Milliseconds for each figure.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub each: u32,
    /// Only these tests.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "TESTS")]
    pub only: Vec<Test>,
    /// What is measured against bare (default: SLIM, and MPTCP where there is one).
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KINDS")]
    pub against: Vec<Contender>,
    /// A short form, to see that all works: its figures mean little.
    #[arg(long)]
    pub quick: bool,
    /// Count the instructions of a small message.
    #[arg(long)]
    pub instructions: bool,
    /// Measure interruptions: killed connections, a hole, a dead peer.
    #[arg(long)]
    pub resume: bool,
    /// Measure memory, descriptors and start-up.
    #[arg(long)]
    pub memory: bool,
    /// Numbers of connections killed at once, for --resume.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,100,1000,10000",
        value_name = "NUMBERS",
        value_parser = clap::value_parser!(u32).range(1..=20_000)
    )]
    pub flows: Vec<u32>,
    /// How often a single connection is killed, for --resume.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub kills: u32,
    /// Seconds that the hole lasts, for --resume.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub hole: u32,
    /// Write the figures as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with tables and plots.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// An MPI, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MpiName {
    /// Open MPI 4.1
    Ompi4,
    /// Open MPI 5.0
    Ompi5,
    /// MPICH (not yet)
    Mpich,
}

impl MpiName {
    fn flavor(self) -> Result<Flavor, Failure> {
        match self {
            Self::Ompi4 => Ok(Flavor::OpenMpi4),
            Self::Ompi5 => Ok(Flavor::OpenMpi5),
            Self::Mpich => Err(Failure::input(
                "MPICH is not measured yet: the lab cannot start its hydra daemons on other nodes",
            )),
        }
    }
}

/// The speed of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rate {
    /// 1 Gb/s
    #[value(name = "1gbit")]
    One,
    /// 10 Gb/s
    #[value(name = "10gbit")]
    Ten,
}

impl Rate {
    fn kbit(self) -> u64 {
        match self {
            Self::One => 1_000_000,
            Self::Ten => 10_000_000,
        }
    }
}

/// Measures, and reports.
pub fn main(options: &Options) -> Result<ExitCode, Failure> {
    let report = measure(options)?;
    let sections = report.sections()?;
    print!("{}", report.text(&sections));
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    if let Some(path) = &options.html {
        report.write_html(path, &sections)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn told(line: &str) {
    eprintln!("bench: {line}");
}

fn measure(options: &Options) -> Result<Report, Failure> {
    let library = preload::find(None)?;
    let messages = match options.instructions || options.resume || options.memory {
        true => None,
        false => Some(message_plan(options)?),
    };
    let machine = Machine::here();
    let timed = !options.instructions || options.resume || options.memory;
    if timed && machine.load > BUSY {
        told(&format!(
            "the machine is not idle (load {:.2}): expect noise",
            machine.load
        ));
    }
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        machine,
        messages: None,
        instructions: None,
        resume: None,
        memory: None,
    };
    if options.instructions {
        report.instructions = Some(instructions::measure(&library, told)?);
    }
    if options.resume {
        report.resume = Some(resume_plan(options).measure(&library, told)?);
    }
    if options.memory {
        report.memory = Some(memory_plan(options).measure(&library, told)?);
    }
    if let Some(plan) = messages {
        report.messages = Some(plan.measure(told)?);
    }
    Ok(report)
}

fn message_plan(options: &Options) -> Result<messages::Plan, Failure> {
    let tests = match &options.only[..] {
        [] => Test::ALL.to_vec(),
        only => only.to_vec(),
    };
    Ok(messages::Plan {
        flavor: options.mpi.flavor()?,
        against: contenders(options)?,
        tests,
        rounds: match options.quick {
            true => options.rounds.min(2) as usize,
            false => options.rounds as usize,
        },
        each: Duration::from_millis(match options.quick {
            true => options.each.min(50).into(),
            false => options.each.into(),
        }),
        quick: options.quick,
        rate_kbit: options.rate.map(Rate::kbit),
    })
}

/// Bare, and what is measured against it. What was asked for must be there; of the usual ones, those
/// that are.
fn contenders(options: &Options) -> Result<Vec<Ready>, Failure> {
    let mut ready = vec![Contender::Bare.ready()?];
    if options.against.is_empty() {
        ready.push(Contender::Slim.ready()?);
        match Contender::Mptcp.ready() {
            Ok(mptcp) => ready.push(mptcp),
            Err(missing) => told(&missing.to_string()),
        }
        return Ok(ready);
    }
    for contender in &options.against {
        if ready.iter().all(|r| r.contender != *contender) {
            ready.push(contender.ready()?);
        }
    }
    Ok(ready)
}

fn resume_plan(options: &Options) -> resume::Plan {
    let flows = options.flows.iter().map(|n| *n as usize);
    if options.quick {
        return resume::Plan {
            flows: flows.filter(|n| *n <= 100).collect(),
            kills: options.kills.min(10) as usize,
            hole: Duration::from_secs(1),
            rounds: 1,
        };
    }
    resume::Plan {
        flows: flows.collect(),
        kills: options.kills as usize,
        hole: Duration::from_secs(options.hole.into()),
        rounds: options.rounds as usize,
    }
}

fn memory_plan(options: &Options) -> memory::Plan {
    match options.quick {
        true => memory::Plan {
            rounds: 5,
            short: 200,
        },
        false => memory::Plan {
            rounds: (10 * options.rounds) as usize,
            short: 1000,
        },
    }
}
