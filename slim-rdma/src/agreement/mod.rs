//! How two processes agree on a queue pair by unreliable datagrams: `docs/VERBS.md`, section "The agreement on a queue pair".
//!
//! ```text
//!   asking                                  answering
//!     makes a queue pair
//!     ── Ask ─────────────────────────────►   keeps nothing
//!     ◄──────────────────────────── Cookie ──
//!     ── Ask, with the cookie ────────────►   makes a queue pair, connects it
//!     ◄──────────────────────────── Answer ──   again for each repetition
//!     connects its queue pair
//!     ── first message on the queue pair ─►   the queue pair is accepted
//! ```
//!
//! [`PairAsking`] and [`PairAnswering`] decide; they do no I/O, and time is an argument. [`PairExchange`] carries it out for a port: it makes and
//! connects the queue pairs, and takes and sends the datagrams. It is what a provider uses.
//!
//! ```
//! use std::time::Instant;
//!
//! use slim_rdma::agreement::{ASK_LIMIT, PairOutcome, AnswerLimits, PairAttempt, PairExchange};
//! use slim_rdma::in_memory::Fabric;
//! use slim_rdma::{PairSizes, RingShape};
//!
//! let fabric = Fabric::new(1);
//! let sizes = PairSizes {
//!     shape: RingShape::new(4096, 16).unwrap(),
//!     depth: 16,
//!     staging: 4096,
//!     inline: 64,
//!     message: 1024,
//! };
//! // One for each port of a process. The secret and the attempt are random.
//! let [mut here, mut there] = [0, 1].map(|host| {
//!     let adapter = fabric.adapter(host);
//!     let mail = adapter.datagrams();
//!     let limits = AnswerLimits::default();
//!     PairExchange::new(adapter, mail, sizes, limits, [7; 32], Instant::now())
//! });
//! here.ask(PairAttempt(1), there.locator(), Instant::now(), ASK_LIMIT)?;
//! let (mut near, mut far) = (None, None);
//! while near.is_none() || far.is_none() {
//!     near = near.or(here.poll(Instant::now()));
//!     far = far.or(there.poll(Instant::now()));
//!     fabric.run();
//! }
//! assert!(matches!(near, Some(PairOutcome::Connected { .. })));
//! assert!(matches!(far, Some(PairOutcome::Accepted { .. })));
//! # Ok::<(), slim_rdma::VerbsError>(())
//! ```
//!
//! | module | what it holds |
//! | --- | --- |
//! | `exchange` | [`PairExchange`]: both roles at one port |
//! | `asking` | [`PairAsking`]: repetition, deadline |
//! | `answering` | [`PairAnswering`]: cookies, limits, repetitions, expiry |
//! | `cookie` | cookies |
//! | `message` | [`AgreementMessage`]: the bytes |
//! | `mistakes` | what the simulation puts in, and must detect |

mod answering;
mod asking;
mod cookie;
mod exchange;
mod message;
mod mistakes;

pub use answering::{AnswerLimits, AnswerStep, AttemptKey, PairAnswering};
pub use asking::{ASK_LIMIT, AskFailure, PairAsking};
pub use exchange::{PairExchange, PairOutcome};
pub use message::{AgreementMessage, PairAttempt, PairCookie, PairRefusal, PairRequest};

#[cfg(test)]
mod sim_tests;
