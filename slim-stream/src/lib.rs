//! What a flow is per byte, under whatever front end.
//!
//! A front end has the descriptors and the application's calls; the agent (crate `slim-agent`) has the session. Between them
//! lies the stream: how many bytes went each way, which of them the peer may not have, who may touch the transport just now,
//! and whether the kernel has counted the same.
//!
//! Nothing here knows of descriptor numbers beyond the call they are passed to, of the session, or of time. Where a call needs
//! its front end (is this number still the flow's? who is told that there is something to be acknowledged?) it takes a
//! closure, and what is left to do after it comes back as its result.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`stream`] | [`Stream`]: both counters, the ends, the gate with its pass, the sending half under its lock |
//! | [`control`] | what control does: draining, replaying, trimming, probing |
//! | [`data`] | data calls for a front end that has no need to make them by itself |
//! | [`receive_half`] | [`ReceiveHalf`]: the stash, and what is known of the present transport |
//! | [`send_half`] | [`SendHalf`]: the replay buffer, and when it is trimmed |
//! | [`start`] | [`Start`]: whether we and the kernel have counted the same bytes |
//! | [`answers`] | what control is told |
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
pub mod control;
pub mod data;
pub mod receive_half;
pub mod send_half;
pub mod start;
pub mod stream;

pub use answers::{Delivery, Drained, Owed, Probe};
pub use control::Unsound;
pub use receive_half::ReceiveHalf;
pub use send_half::SendHalf;
pub use start::Start;
pub use stream::{Inside, Stream, forget_marks};
