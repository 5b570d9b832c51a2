//! `slim`: see the library of this crate.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use slim_cli::failure::say;
use slim_cli::{bench, chaos, demo, run};

/// Keeps programs running while their TCP connections break.
#[derive(Parser)]
#[command(name = "slim", version, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Invocation,
}

#[derive(Subcommand)]
enum Invocation {
    Bench(bench::BenchOptions),
    Chaos(chaos::ChaosOptions),
    Demo(demo::DemoOptions),
    Run(run::RunOptions),
    #[command(hide = true)]
    WatchComponent(run::watch::WatchOptions),
    #[command(hide = true)]
    Witness(run::witness::WitnessOptions),
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Invocation::Bench(options) => bench::main(&options),
        Invocation::Chaos(options) => chaos::main(&options),
        Invocation::Demo(options) => demo::main(&options),
        Invocation::Run(options) => Err(run::main(&options)),
        Invocation::WatchComponent(options) => run::watch::main(&options),
        Invocation::Witness(options) => run::witness::main(&options),
    };
    match result {
        Ok(code) => code,
        Err(failure) => {
            for line in failure.lines() {
                say(&format!("slim: {line}"));
            }
            ExitCode::from(failure.status())
        }
    }
}
