//! The rules of the protocol, one by one. What they add up to is tested in `tests/sim.rs` and
//! `tests/model.rs`.

mod again;
mod agreed;
mod early;
mod ends;
mod forgotten;
mod hostile;
mod locators;
mod many;
mod negotiation;
mod off_path;
mod pair;
mod pairs;
mod probing;
mod resuming;
mod threats;
