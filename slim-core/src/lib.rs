//! The session layer of SLIM, without I/O.
//!
//! SLIM keeps a byte stream between two processes alive while the TCP connections that carry it
//! come and go. This crate decides *what* has to happen; it never does it. It opens no socket,
//! starts no thread, reads no clock and draws no random number: time, random seeds and all input
//! are arguments, and everything to be done comes back as an [`Action`](endpoint::Action).
//! So the crate can be simulated, model-checked and fuzzed.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`ids`] | identifiers of endpoints, flows and connections; points in time |
//! | [`transport`] | kinds of transport, and how a peer is reached by each |
//! | [`wire`] | the control messages, byte by byte (`docs/PROTOCOL.md`) |
//! | [`auth`] | job key, flow keys, message authentication codes |
//! | [`witness`] | the decision who is lost when two processes cannot reach each other |
//! | [`replay`] | copy of the bytes sent that the peer is not yet known to hold |
//! | [`stash`] | bytes taken out of a dead transport that the application has not read yet |
//! | [`memory`] | memory requests that may fail |
//! | [`gate`] | lets data calls in, and keeps them out while a flow is suspended |
//! | [`config`] | the user's settings, checked once |
//! | [`event`] | the event log: what happened to each flow |
//! | [`endpoint`] | all flows of one process: the state machine |
//! | `meeting` | where processes find each other after their addresses have changed; a part of the witness |
//! | [`saved`] | values as bytes, for the next program of a process that executes one |
//! | `addr` | addresses in canonical form, the same at both ends |
//! | `sync` | atomics of the standard library or of loom |
//!
//! ```text
//!             front end (fd table, hooks)          driver (sockets, timers)
//!                │ replay, stash, gate                  │ handle_*, commands
//!                ▼                                      ▼
//!   bytes of one flow: never seen here      endpoint ──► poll_action, poll_event, poll_timeout
//!                                              │
//!                                              ├── wire   (bytes of control messages)
//!                                              └── auth   (keys and authentication codes)
//! ```
//!
//! # What it is not
//!
//! It does not carry data. After negotiation the bytes of a flow travel over a plain TCP
//! connection with nothing of ours in between; this crate only counts them.
//!
//! # Example
//!
//! A control message goes out as bytes and comes back as the same message:
//!
//! ```
//! use slim_core::ids::FlowId;
//! use slim_core::wire::{self, Demote, Message};
//!
//! let message = Message::Demote(Demote { flow: FlowId([7; 16]) });
//! let bytes = wire::encode(&message, |_covered| [0; wire::MAC_LEN]);
//! let parsed = wire::parse(&bytes)?;
//! assert_eq!(parsed.message, message);
//! # Ok::<(), slim_core::wire::ParseError>(())
//! ```

#![forbid(unsafe_code)]

mod addr;
pub mod auth;
pub mod config;
pub mod endpoint;
pub mod event;
pub mod gate;
pub mod ids;
mod meeting;
pub mod memory;
pub mod replay;
pub mod saved;
pub mod stash;
mod sync;
pub mod transport;
pub mod wire;
pub mod witness;

pub use addr::{canonical, network_distance};
pub use ids::{
    Cause, ConnId, Counted, EndpointId, FinHow, FlowId, FlowToken, Nonce, Role, Time, Verdict,
};
