//! `slim`: see the library of this crate.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use slim_cli::{bench, chaos, demo, run};

/// Keeps programs running while their TCP connections break.
#[derive(Parser)]
#[command(name = "slim", version, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    Bench(bench::Options),
    Chaos(chaos::Options),
    Demo(demo::Options),
    Run(run::Options),
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Task::Bench(options) => bench::main(&options),
        Task::Chaos(options) => chaos::main(&options),
        Task::Demo(options) => demo::main(&options),
        Task::Run(options) => Err(run::main(&options)),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            for line in failure.lines() {
                eprintln!("slim: {line}");
            }
            ExitCode::from(failure.status())
        }
    }
}
