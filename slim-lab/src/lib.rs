//! The lab: several "hosts" on one machine, faults between them, and real MPI jobs that run on
//! them.
//!
//! A [`Lab`] is a set of [`Node`]s. Each node has its own network, mount, UTS and IPC namespace
//! and is joined to the others by one or more paths (veth pairs). Namespaces have no names: a
//! namespace lives as long as the process that holds it. So any number of labs can exist side by
//! side, and nothing is left behind when a program ends, however it ends.
//!
//! ```text
//!   nodeA  path0 10.77.0.1 ───────── 10.77.0.2 path0  nodeB
//!          path1 10.78.0.1 ───────── 10.78.0.2 path1
//! ```
//!
//! Faults are in [`faults`]. Each is either a function that acts once and returns a report, or a
//! guard that removes the fault when it is dropped.
//!
//! ```no_run
//! use slim_lab::{Lab, SeededRng, faults::destroy::{self, Amount, Selector}};
//!
//! let lab = Lab::builder().nodes(2).paths(1).build()?;
//! let mut server = lab.node(1).command("iperf3").arg("-s").spawn().unwrap();
//! // ... and later: lose every connection that nodeA has with nodeB.
//! let report = destroy::destroy(lab.node(0).net(), &Selector::between_hosts(), Amount::All, &mut SeededRng::new(1))?;
//! println!("{report}");
//! # server.kill().unwrap();
//! # Ok::<(), slim_lab::Error>(())
//! ```
//!
//! The lab needs root (`CAP_NET_ADMIN` and `CAP_SYS_ADMIN`), `ip`, and for some faults `nft` and
//! `tc`.

pub mod artifacts;
pub mod error;
pub mod faults;
pub mod lab;
pub mod launch;
pub mod mpi;
pub mod netns;
pub mod node;
pub mod output;
pub mod rng;
pub mod skip;
pub mod standstill;

pub use error::{Error, Result};
pub use lab::{Lab, LabBuilder};
pub use netns::{Netns, Process};
pub use node::Node;
pub use rng::SeededRng;
