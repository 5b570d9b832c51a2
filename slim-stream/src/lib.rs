//! The data half of one flow, for any front end.
//!
//! A front end has the descriptors and the application's calls; the agent (crate `slim-agent`) has the session. Between them
//! lies the stream. It counts the bytes of both directions, keeps those that the peer may not have, controls access to the
//! transport, and compares its counts with the kernel's.
//!
//! This crate knows nothing of the session, and uses a descriptor number only within the call that it is passed to. Where a
//! call needs its front end, it takes a closure: to check that a number still belongs to the flow, or to tell the agent of
//! unacknowledged bytes. Work that is left for the front end is returned as the call's result.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`stream`] | [`Stream`]: both counters, the final positions, the gate with its pass, the sending half under its lock |
//! | [`control`] | the control operations: drain, replay, trim, probe |
//! | [`carrier`] | [`Carrier`]: a transport that is no socket, and the control operations for it |
//! | [`data`] | ready-made data calls, for a front end that needs no special ones |
//! | [`handed`] | a stream as the next program of the process gets it |
//! | [`receive_half`] | [`ReceiveHalf`]: the stash, and the state of the present transport |
//! | [`send_half`] | [`SendHalf`]: the replay buffer, and when it is trimmed |
//! | [`start`] | [`Start`]: whether our counts and the kernel's agree |
//! | [`answers`] | result types of the control operations |
//!
//! ```text
//!            pass_to_*, enter, count          bar, idle, drain, replay, probe
//!   data calls ──────────────► Stream ◄────────────────────── control
//!                              │    │
//!              half, account   │    │   stash, start
//!                              ▼    ▼
//!                       SendHalf    ReceiveHalf
//! ```

pub mod answers;
pub mod carrier;
pub mod control;
pub mod data;
pub mod handed;
pub mod receive_half;
pub mod send_half;
pub mod start;
pub mod stream;

pub use answers::{Delivery, Drained, Probe, Undelivered};
pub use carrier::Carrier;
pub use control::DrainError;
pub use handed::HandedStream;
pub use receive_half::ReceiveHalf;
pub use send_half::SendHalf;
pub use start::Start;
pub use stream::{Inside, Stream, forget_marks};
