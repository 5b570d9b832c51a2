//! Adapters of libibverbs.
//!
//! The library is loaded when it is used for the first time, and nothing is linked to it. [`devices()`] lists what a host has, and
//! [`VerbsAdapter`] is an open port of it.
//!
//! An adapter must have RDMA WRITE with immediate data: InfiniBand and RoCE have it, iWARP has not.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `abi` | types and constants of the header |
//! | `library` | the functions, loaded at run time |
//! | `devices` | [`DeviceInfo`], [`PortInfo`]: what there is, and the choice of a GID |
//! | `port` | [`PortSettings`], and an open port: events, completions that are reported |
//! | `owner` | whether a process is a child of the one that has opened a port |
//! | `memory` | registered memory |
//! | `program` | memory of the program: [`ProgramPort`], [`ProgramMemory`] |
//! | `queues` | a queue pair of any kind with its completion queue |
//! | `objects` | a reliable connected queue pair |
//! | `datagrams` | [`VerbsDatagrams`]: a queue pair for unreliable datagrams |
//! | `grh` | the header that an adapter puts before a datagram |
//! | `adapter` | [`VerbsAdapter`]: the trait [`Verbs`](crate::Verbs) |

mod abi;
mod adapter;
mod datagrams;
mod devices;
mod error;
mod grh;
mod library;
mod memory;
mod objects;
mod owner;
mod port;
mod program;
mod queues;

pub use adapter::VerbsAdapter;
pub use datagrams::{DatagramWay, DatagramWays, VerbsDatagrams};
pub use devices::{DeviceInfo, GidInfo, GidKind, PortInfo, devices};
pub use error::AdapterError;
pub use port::PortSettings;
pub use program::{ProgramAccess, ProgramMemory, ProgramPort};

use crate::verbs::VerbsError;

/// The error that a call of the library has left in errno.
fn failed(call: &'static str) -> VerbsError {
    let errno = std::io::Error::last_os_error().raw_os_error();
    VerbsError::new(call, errno.unwrap_or(libc::EIO))
}

/// The result of a call that returns a number of errno, or -1 and leaves it in errno.
fn result(call: &'static str, status: i32) -> Result<(), VerbsError> {
    match status {
        0 => Ok(()),
        -1 => Err(failed(call)),
        errno => Err(VerbsError::new(call, errno.abs())),
    }
}
