//! Tests of the protocol's rules, one by one. `tests/sim.rs` and `tests/model.rs` test their combination.

mod accusing;
mod again;
mod agreed;
mod dying;
mod early;
mod ends;
mod forgotten;
mod handed;
mod holding;
mod hostile;
mod locators;
mod many;
mod negotiation;
mod off_path;
mod pair;
mod pairs;
mod probing;
mod relayed;
mod resuming;
mod silence;
mod surveying;
mod threats;
mod ties;
mod undecided;
mod unreachable;
