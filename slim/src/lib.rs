//! SLIM as a library: byte streams between processes that outlive the TCP connections which carry them.
//!
//! A program that links this crate gets what `slim run` gives to unmodified programs, without `LD_PRELOAD`: a connection that
//! breaks is replaced, what was lost on it is sent again, and the program notices a pause. A peer without SLIM sees plain TCP.
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
//! Two flows between an endpoint and its own process:
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
//! [`Session::descriptor`] is readable when a flow may have news; [`Session::progress`] says which. As with edge-triggered epoll,
//! an [`Update`] is told once: receive until [`TransferError::WouldBlock`], or remember that there is more.
//! The `try_` methods never wait. The others take a limit, and `None` is for ever.
//!
//! # Promises
//!
//! - What one end receives is what the other has sent, in order, once; or the flow ends in an error.
//! - Nothing is printed. Settings that print ([`Config::log`]) are off unless they are asked for.
//! - After [`Session::close`] no thread and no descriptor of the session is left. Sessions with equal settings share one agent thread;
//!   the last one ends it.
//!
//! It is not for signal handlers. A forked child must not use a session of its parent, but may drop it, exec, or open
//! its own.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | `session` | [`Session`]: opening, progress, events, statistics, closing |
//! | `endpoint` | [`Endpoint`] |
//! | `door` | where peers come to that have an endpoint's blob |
//! | `flow` | [`Flow`]: its data calls, what blocks, and what the agent asks of it |
//! | `blob` | what endpoints publish, and the messages between two ends that know each other by that |
//! | `hub` | what the flows of a session share: the poll set, updates, events |
//! | `agents` | the agents of this process |
//! | `event` | events and statistics |
//! | `error` | one type for each family of operations |
//! | `socket` | system calls for sockets |

mod agents;
mod blob;
mod door;
mod endpoint;
mod error;
mod event;
mod flow;
mod hub;
mod session;
mod socket;

pub use blob::BlobError;
pub use endpoint::SessionEndpoint as Endpoint;
pub use error::{AcceptError, ConnectError, SessionError, TransferError};
pub use event::{FlowChange, FlowStats, SessionEvent, SessionStats, StreamState};
pub use flow::SessionFlow as Flow;
pub use hub::Update;
pub use session::{Session, SessionOptions};
pub use slim_core::auth::JobKey;
pub use slim_core::config::{Config, LogLevel, Peers, Policy};
