//! The session library for C: `include/slim.h`, `libslim.so` and `libslim.a`.
//!
//! The functions are those of the crate `slim`, with handles, error codes and time limits as C programs have them. cbindgen makes
//! `include/slim.h` of this crate; `tests/header.rs` compares. `slim-c/build` makes the libraries, with `panic = "unwind"`.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | `session` | sessions: opening, updates, events, counters, closing |
//! | `endpoint` | endpoints and their blobs |
//! | `transfer` | send, receive, post |
//! | `flow` | flows: state, waiting, end |
//! | `shared` | state that a session shares with its flows and endpoints |
//! | `posts` | posted buffers, from the post to the completion |
//! | `table` | the table that layers above ask: `include/slim_table.h` |
//! | `types` | structures and constants that the program sees |
//! | `address` | addresses of the socket calls |
//! | `guard` | the way into the library: a panic becomes an error code |
//! | `codes` | error codes and their texts |

mod address;
mod posts;
mod shared;
mod table;

// The header has what these modules define in this order, so each stands alone.

mod codes;

mod guard;

mod types;

mod session;

mod endpoint;

mod flow;

mod transfer;

pub use codes::*;
pub use endpoint::*;
pub use flow::*;
pub use guard::slim_error_detail;
pub use session::*;
pub use table::slim_table;
pub use transfer::*;
pub use types::*;
