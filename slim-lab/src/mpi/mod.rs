//! Real MPI jobs on a lab, or on this host with an adapter for each rank: builds a program with an MPI's own compiler, runs it on the
//! nodes, and reads its output.

mod adapters;
mod install;
mod job;
mod outcome;

pub use adapters::RankAdapters;
pub use install::{Flavor, Mpi, cache_dir};
pub use job::{
    Job, Started, ULFM_OPTIONS, by_tcp, component_arguments, component_path, component_placement,
    placement, tcp_environment,
};
pub use outcome::{JobVerdict, Outcome, Progress};
