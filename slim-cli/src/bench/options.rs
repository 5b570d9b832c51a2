//! The options of `slim bench`, and the plans that follow from them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, ValueEnum};
use slim_lab::mpi::Flavor;

use super::contender::Contender;
use super::messages::Test;
use super::{memory, resume};

/// Measure the cost of SLIM against bare sockets in the same run.
///
/// Without --all, --instructions, --resume or --memory the speed of MPI's messages
/// is measured. Needs root (network namespaces), and an otherwise idle machine for
/// everything but --instructions.
#[derive(Args, Debug)]
#[command(
    group = ArgGroup::new("part").args(["all", "instructions", "resume", "memory"]).multiple(true),
    group = ArgGroup::new("interrupts").args(["all", "resume"]).multiple(true)
)]
pub struct BenchOptions {
    /// Measure everything, with every installed MPI, and write bench.html and bench.json into
    /// this directory.
    #[arg(long, value_name = "DIRECTORY", conflicts_with_all = ["instructions", "resume", "memory"])]
    pub all: Option<PathBuf>,
    /// The MPI to measure.
    #[arg(long, value_enum, default_value_t = MpiName::Ompi4, conflicts_with = "part")]
    pub mpi: MpiName,
    /// Speed of the line between the nodes (default: not limited).
    #[arg(long, value_enum, conflicts_with = "part")]
    pub rate: Option<Rate>,
    /// Use these two adapters for RDMA of this host, one for each rank, and no lab. Compares bare, component and
    /// verbs, with Open MPI.
    #[arg(
        long,
        value_name = "ADAPTER,ADAPTER",
        value_parser = two_adapters,
        conflicts_with_all = ["part", "rate"]
    )]
    pub adapters: Option<[String; 2]>,
    /// Directory of the native component, mca_btl_slim.so (default: it is built).
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "part")]
    pub component: Option<PathBuf>,
    /// Number of rounds (default: 25 for messages, 5 for the rest).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Milliseconds for each test and size of messages, in each round.
    #[arg(long, default_value_t = 80, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub each: u32,
    /// Run only these tests.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "TESTS",
        conflicts_with = "part"
    )]
    pub only: Vec<Test>,
    /// The kinds to compare with bare (default: all that can run here).
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KINDS")]
    pub against: Vec<Contender>,
    /// A short run, to check that everything works; its results mean little.
    #[arg(long)]
    pub quick: bool,
    /// Count the instructions of a small message.
    #[arg(long)]
    pub instructions: bool,
    /// Measure interruptions: killed connections, holes, a dead peer.
    #[arg(long)]
    pub resume: bool,
    /// Measure memory, descriptors and start-up.
    #[arg(long)]
    pub memory: bool,
    /// Numbers of connections to kill at once, for --resume and --all.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,100,1000,10000",
        value_name = "NUMBERS",
        value_parser = clap::value_parser!(u32).range(1..=20_000),
        requires = "interrupts"
    )]
    pub flows: Vec<u32>,
    /// How often a single connection is killed, for --resume and --all.
    #[arg(
        long,
        default_value_t = 200,
        value_parser = clap::value_parser!(u32).range(1..=100_000),
        requires = "interrupts"
    )]
    pub kills: u32,
    /// Lengths of holes in seconds, for --resume and --all; bare TCP may need as long again.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "5,60",
        value_name = "SECONDS",
        value_parser = clap::value_parser!(u32).range(1..=60),
        requires = "interrupts"
    )]
    pub hole: Vec<u32>,
    /// Write the results as JSON.
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    pub json: Option<PathBuf>,
    /// Write a page with tables and plots.
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    pub html: Option<PathBuf>,
}

/// Two names with a comma between.
fn two_adapters(text: &str) -> Result<[String; 2], String> {
    let names: Vec<_> = text.split(',').map(str::to_owned).collect();
    <[String; 2]>::try_from(names)
        .ok()
        .filter(|two| two.iter().all(|name| !name.is_empty()))
        .ok_or_else(|| {
            "give two adapters, for example mlx5_0,mlx5_1 (`rdma link` lists them)".into()
        })
}

/// The name of an MPI on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MpiName {
    /// Open MPI 4.1
    Ompi4,
    /// Open MPI 5.0
    Ompi5,
    /// Open MPI 5.0 from Debian's packages, as scripts/openmpi5 makes it: the one that loads the native component
    Ompi5Components,
    /// MPICH
    Mpich,
}

impl MpiName {
    /// The lab's name of this MPI.
    pub fn flavor(self) -> Flavor {
        match self {
            Self::Ompi4 => Flavor::OpenMpi4,
            Self::Ompi5 => Flavor::OpenMpi5,
            Self::Ompi5Components => Flavor::OpenMpi5Components,
            Self::Mpich => Flavor::Mpich,
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
    /// In kilobits a second.
    pub fn kbit(self) -> u64 {
        match self {
            Self::One => 1_000_000,
            Self::Ten => 10_000_000,
        }
    }
}

impl BenchOptions {
    /// Whether only messages are measured.
    pub fn messages_only(&self) -> bool {
        !(self.all.is_some() || self.instructions || self.resume || self.memory)
    }

    /// Rounds of messages. Jobs of the same contender differ more than the turns of one job, so many short rounds are
    /// better than few long ones.
    pub fn rounds(&self) -> usize {
        let rounds = self.rounds.unwrap_or(25) as usize;
        match self.quick {
            true => rounds.min(2),
            false => rounds,
        }
    }

    /// Rounds of everything else.
    fn other_rounds(&self) -> usize {
        self.rounds.unwrap_or(5) as usize
    }

    /// How long each test and size of messages is measured in each round.
    pub fn each(&self) -> Duration {
        Duration::from_millis(match self.quick {
            true => self.each.min(20).into(),
            false => self.each.into(),
        })
    }

    /// The plan for measuring interruptions.
    pub fn resume_plan(&self) -> resume::ResumePlan {
        let flows = self.flows.iter().map(|n| *n as usize);
        if self.quick {
            return resume::ResumePlan {
                flows: flows.filter(|n| *n <= 100).collect(),
                kills: self.kills.min(10) as usize,
                holes: vec![Duration::from_secs(1)],
                rounds: 1,
            };
        }
        let holes = self.hole.iter().map(|s| Duration::from_secs((*s).into()));
        resume::ResumePlan {
            flows: flows.collect(),
            kills: self.kills as usize,
            holes: holes.collect(),
            rounds: self.other_rounds(),
        }
    }

    /// The plan for measuring memory and start-up.
    pub fn memory_plan(&self) -> memory::MemoryPlan {
        match self.quick {
            true => memory::MemoryPlan {
                rounds: 5,
                short_rounds: 2,
                short: 2000,
            },
            false => memory::MemoryPlan {
                rounds: 10 * self.other_rounds(),
                short_rounds: 2 * self.other_rounds(),
                short: 20_000,
            },
        }
    }
}
