//! A switch is reset, and a whole cluster resumes at once.
//!
//! ```sh
//! cargo run --release -p slim-core --example storm -- --flows 1000000 --endpoints 100000 storm.csv storm.svg
//! ```
//!
//! The endpoints are real: every flow is negotiated and resumed by `slim_core::endpoint::Endpoint`,
//! with its messages, proofs and timers. Everything around them is a model: a network with one
//! latency and no loss except the hole; agents that do one thing after the other, each of which takes
//! some microseconds (`world::cost`); listeners with a backlog, and kernels that send a dropped SYN
//! again after 1, 3 and 7 s; applications that notice at random within `--notice` milliseconds.
//!
//! Endpoint 0 is a server with `--hot` flows. All other flows are between endpoints chosen at random.
//! With `--hole 0` all connections are reset at once, and both ends notice. Otherwise the network
//! drops everything for that many milliseconds, and one end of every flow finds that it is stalled.
//!
//! The first file gets the figures of each 10 ms, the second a picture of them.

mod report;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use fastrand::Rng;
use slim_core::{Cause, FlowToken, Time};

use world::{Event, Work, World};

const ECONNRESET: i32 = 104;

/// Resets a switch: a cluster of real endpoints resumes all its flows at once.
#[derive(Parser)]
struct Options {
    /// Flows in all.
    #[arg(long, default_value_t = 100_000)]
    flows: usize,
    /// Processes in all.
    #[arg(long, default_value_t = 10_000, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(3..))]
    endpoints: usize,
    /// Flows with the one server.
    #[arg(long, default_value_t = 5000)]
    hot: usize,
    /// How long the network drops everything, in milliseconds. With 0 all connections are reset.
    #[arg(long, default_value_t = 0)]
    hole: u64,
    /// Time within which the applications notice, in milliseconds.
    #[arg(long, default_value_t = 10)]
    notice: u64,
    /// File for the figures of each 10 ms.
    table: Option<PathBuf>,
    /// File for a picture of the figures.
    picture: Option<PathBuf>,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    options.hot = options.hot.min(options.flows);
    let mut world = World::new(options.endpoints, Time(options.hole * 1000));
    let mut rng = Rng::with_seed(0x5eed_5eed_5eed);
    let pairs: Vec<_> = (0..options.flows)
        .map(|n| pair(&options, n, &mut rng))
        .collect();
    for (n, (a, b)) in pairs.iter().enumerate() {
        world.flow(n, *a, *b);
    }
    for (n, (a, b)) in pairs.into_iter().enumerate() {
        let token = FlowToken(n as u64);
        let mut within = || rng.u64(0..(options.notice * 1000).max(1));
        if options.hole == 0 {
            for end in [a, b] {
                let fault = Work::Fault(token, Cause::Errno(ECONNRESET));
                world.at(Time(within()), Event::Arrive(end, fault));
            }
        } else {
            let at = Time(1_000_000 + within());
            let end = if rng.bool() { a } else { b };
            let fault = Work::Fault(token, Cause::Stall);
            world.at(at, Event::Arrive(end, fault));
        }
    }
    world.run(2 * options.flows as u64);
    report::print(&world, &options);
    match report::write(&world, &options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("storm: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// The two endpoints of flow number `n`. Endpoint 0 is the server.
fn pair(options: &Options, n: usize, rng: &mut Rng) -> (usize, usize) {
    let others = options.endpoints - 1;
    if n < options.hot {
        return (1 + n % others, 0);
    }
    let a = rng.usize(1..=others);
    let distance = rng.usize(1..others);
    (a, 1 + (a - 1 + distance) % others)
}
