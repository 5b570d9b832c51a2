//! The `slim` program.
//!
//! - [`run`]: starts a command, MPI or not, under the preload library;
//! - [`bench`](mod@bench): measures the cost of SLIM against bare sockets;
//! - [`chaos`]: breaks connections of a command, by a plan;
//! - [`demo`]: shows the use of SLIM, on two nodes in a lab on this machine;
//! - [`agent`]: the program `slim-rsh-agent`, which `mpirun` calls in place of ssh,
//!   so that remote daemons get the library too.
//!
//! Every command ends with a status of [`failure`]; `run` ends with the status of
//! the command, which replaces `slim`.

#![forbid(unsafe_code)]

pub mod agent;
pub mod bench;
pub mod chaos;
pub mod demo;
pub mod events;
pub mod failure;
pub mod lab;
pub mod page;
pub mod run;
pub mod settings;
pub mod shell;
pub mod table;
