//! What application threads share with the agent thread.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `command` | the commands of application threads |
//! | `queue` | the queue of commands, into which threads put without waiting |
//! | `done` | how a thread waits until its command is carried out |
//! | `short` | what application threads do for short connections by themselves |

pub(crate) mod command;
pub(crate) mod done;
pub(crate) mod queue;
pub(crate) mod short;
