//! SLIM under unmodified programs: `LD_PRELOAD=libslim_preload.so`.
//!
//! The hooks ([`hooks`]) take the place of libc's socket calls. They look the descriptor up in the
//! [`table`]; what is no flow goes straight to libc. For a flow, [`ops`] does what the call says and
//! counts the bytes (crate `slim-stream`); when its transport dies, [`transport`] puts something else under the
//! descriptor number until the agent (crate `slim-agent`) has resumed the flow.
//!
//! ```text
//! application ── hooks ── ops ── table ── flow ── transport ── stand_in, epoll
//!                                           │        ▲
//!                                           └─ front ┘  called by slim-agent's thread
//! ```
//!
//! What it is not: it draws no conclusions about peers and networks; that is `slim-core`'s, driven by
//! `slim-agent`.

mod addr;
mod epoll;
mod flow;
mod front;
mod heap;
mod hooks;
mod listeners;
mod ops;
mod options;
mod process;
mod rings;
mod runtime;
mod stand_in;
mod sys;
mod table;
mod transport;
