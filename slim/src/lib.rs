//! SLIM as a library: byte streams between processes. A stream outlives the TCP connection that carries it.
//!
//! A program that links this crate gets what `slim run` gives to unmodified programs, without `LD_PRELOAD`. A broken connection is
//! replaced, lost bytes are replayed, and the program notices only a pause. A peer without SLIM sees plain TCP.
//!
//! # Objects
//!
//! | object | what it is |
//! | --- | --- |
//! | [`Session`] | all endpoints and flows of one job in this process, with its settings; has one descriptor to poll |
//! | [`Endpoint`] | an address at which the session accepts flows |
//! | [`Flow`] | one byte stream in both directions |
//!
//! ```text
//!      program ── try_send, try_recv, progress ──► Flow, Session
//!                                                    │  bytes: straight to the kernel
//!                                                    ▼
//!      agent (one thread) ── negotiates, resumes ──► flow::control
//! ```
//!
//! # Example
//!
//! A process opens two flows to its own endpoint:
//!
//! ```
//! use slim::{Session, SessionOptions};
//! use std::time::Duration;
//!
//! let limit = Some(Duration::from_secs(10));
//! let session = Session::open(SessionOptions::new("example"))?;
//! let endpoint = session.listen("127.0.0.1:0".parse()?)?;
//! for text in ["first", "second"] {
//!     let near = session.connect(endpoint.local_addr(), limit)?;
//!     let far = endpoint.accept(limit)?;
//!     near.send_all(text.as_bytes(), limit)?;
//!     let mut buf = vec![0; text.len()];
//!     far.recv_exact(&mut buf, limit)?;
//!     assert_eq!(buf, text.as_bytes());
//!     near.close();
//! }
//! session.close(Duration::from_secs(10))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Without blocking
//!
//! [`Session::descriptor`] is readable when a flow may have changed; [`Session::progress`] says which flow. As with edge-triggered
//! epoll, each [`Update`] is reported once: receive until [`TransferError::WouldBlock`], or remember that there is more. Sending is
//! reported as possible when a flow opens, after a resume, and after a `try_` send that took fewer bytes than it was offered.
//! The `try_` methods never wait. The others take a time limit; `None` means no limit.
//!
//! # Promises
//!
//! - Each end receives the bytes that the other end has sent, in order and once, or the flow ends in an error.
//! - Nothing is printed by default: settings that print ([`Config::log`]) are off.
//! - After [`Session::close`] no thread and no descriptor of the session is left. Sessions with equal settings share one agent thread;
//!   the last session ends it.
//!
//! The library must not be called from signal handlers. A forked child must not use a session of its parent. The child may drop
//! that session, exec, or open its own session.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | `session` | [`Session`]: opening, progress, events, statistics, closing |
//! | `endpoint` | [`Endpoint`] |
//! | `door` | listener for peers that have an endpoint's blob |
//! | `accept_set` | poll set of an endpoint: listeners, guests of the door, time limits |
//! | `flow` | [`Flow`]: data calls, blocking calls, and the agent's control calls |
//! | `blob` | the blob that an endpoint publishes, and the messages that open a flow with it |
//! | `hub` | state shared by the flows of a session: the poll set, updates, events |
//! | [`table`] | what layers above can ask: peers, flows, escalations |
//! | `agents` | the agents of this process |
//! | `forks` | what a fork waits for |
//! | `event` | states, events and statistics |
//! | `error` | one type for each family of operations |
//! | `socket` | system calls for sockets |

mod accept_set;
mod agents;
mod blob;
mod door;
mod endpoint;
mod error;
mod event;
mod flow;
mod forks;
mod hub;
mod session;
mod socket;

pub mod table;

pub use agents::AgentThread;
pub use blob::BlobError;
pub use endpoint::SessionEndpoint as Endpoint;
pub use error::{AcceptError, ConnectError, SessionError, TransferError};
pub use event::{FlowChange, FlowDelivery, FlowStats, SessionEvent, SessionStats, StreamState};
pub use flow::SessionFlow as Flow;
pub use hub::Update;
pub use session::{Session, SessionOptions, read_job_key};
pub use slim_core::auth::JobKey;
pub use slim_core::config::{Config, LogLevel, Peers, Policy, Problem};
pub use slim_stream::Carrier;
