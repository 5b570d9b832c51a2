//! What application threads share with the agent's.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `command` | what they ask of it |
//! | `queue` | how that gets there, without waiting |
//! | `done` | how a thread waits until it is done |
//! | `short` | what they do for short connections by themselves |

pub(crate) mod command;
pub(crate) mod done;
pub(crate) mod queue;
pub(crate) mod short;
