//! Real MPI jobs on a lab: build a program with an MPI's own compiler, run it over the nodes, read
//! what it says.

mod install;
mod job;
mod outcome;

pub use install::{Flavor, Mpi, cache_dir};
pub use job::{Job, Started, by_tcp, component_path, placement};
pub use outcome::{JobVerdict, Outcome, Progress};
