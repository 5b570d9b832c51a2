//! Queue pairs of verbs as a kind of transport.
//!
//! [`VerbsProvider`] implements the agent's traits [`Provider`](slim_agent::transport::Provider), `Listener` and `Connection` on the queue pairs of
//! [`slim_rdma`], and hands them to front ends as [`Carrier`](slim_stream::Carrier)s. `docs/VERBS.md` has the design.
//!
//! ```text
//!   connect: PairExchange::ask ──► connected queue pair ──► PairConnection ── resume ──► PairCarrier ──► front end
//!   accept:  unproved queue pair ── first message ────────► PairConnection ── resume ──► …
//! ```
//!
//! A queue pair has a lock of its own, and data calls of any thread drive it under that lock. What happens between the calls is the work of the port's task, which
//! is the listener that the agent polls: it takes the adapter's reports, wakes those who wait, tells peers what was recorded, and pings.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`in_memory`] | a network in memory with providers on it, for tests |
//! | `host` | the ports of this host |
//! | `kinds` | [`TransportKinds`]: the kinds of transport that settings name |
//! | `provider` | [`VerbsProvider`] |
//! | `listener` | the task of a port |
//! | `connection` | a queue pair that carries a resume |
//! | `carrier` | a queue pair as a flow's transport |
//! | `port` | [`VerbsPort`], and all that a port has |
//! | `mail` | datagrams to neighbours that may not answer, without keeping the agent |
//! | `paths` | which paths from a port have failed |
//! | `pair` | a queue pair that several threads use, and what is noticed about it |
//! | `reads` | [`PairReads`]: RDMA READs beside a flow |
//! | `settings` | [`VerbsSettings`] |

mod carrier;
mod connection;
mod host;
pub mod in_memory;
mod kinds;
mod listener;
mod mail;
mod pair;
mod paths;
mod port;
mod provider;
mod reads;
mod settings;

pub use host::{HostPorts, PortNames};
pub use kinds::{NamedSetting, TransportKinds};
pub use port::{PortMail, VerbsPort};
pub use provider::VerbsProvider;
pub use reads::{KEYS_LEN, MemoryAtPorts, MemoryKeys, MemoryPorts, PairReads};
pub use settings::VerbsSettings;
