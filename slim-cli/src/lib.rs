//! The `slim` program.
//!
//! - [`run`]: start a command, MPI or not, under the preload library;
//! - [`bench`](mod@bench): measure what that costs, against bare sockets;
//! - [`chaos`]: break connections under a command, by a plan;
//! - [`demo`]: show what SLIM is for, on two nodes in a lab on this machine;
//! - [`agent`]: what `mpirun` calls instead of ssh, so that remote daemons get
//!   the library too (the program `slim-rsh-agent`).
//!
//! Every command ends with a status of [`failure`] or, for `run`, with that of
//! the command itself, because `slim` is replaced by it.

#![forbid(unsafe_code)]

pub mod agent;
pub mod bench;
pub mod chaos;
pub mod demo;
pub mod events;
pub mod failure;
pub mod lab;
pub mod run;
pub mod settings;
pub mod shell;
pub mod table;
