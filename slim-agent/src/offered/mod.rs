//! One agent for several copies of this crate in a process.
//!
//! A program that links SLIM has a copy of its own, also under the preload library ([`slim_sys::copies`]). If its settings are those of
//! the preload library, it uses the preload library's agent. The copies may come from different builds, so only C functions and plain
//! data cross. The name of [`SYMBOL`] ends in the version of the functions.
//!
//! ```text
//!   program's copy                       preload library's copy
//!  ┌───────────────┐  commands          ┌───────────────┐
//!  │ Agent ─ guest ├───────────────────►│ host ─ Agent  │
//!  │ FlowIo ◄──────┼────────────────────┤ HostedFlow    │
//!  └───────────────┘  calls of flows    └───────────────┘
//! ```
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`host`] | the side that has the agent |
//! | `guest` | the side that uses it |
//! | `calls` | the functions, and their arguments |
//! | `plain` | values as C sees them |
//!
//! A flow's token is unique in its copy only. The host adds the number of the guest to it.

pub(crate) mod calls;
pub(crate) mod guest;
pub mod host;
pub(crate) mod plain;

pub use calls::{OfferedAgentCalls, SYMBOL};
