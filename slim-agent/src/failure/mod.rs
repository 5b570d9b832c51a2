//! What the agent does after a panic of its thread, or when memory runs out.

pub(crate) mod memory;
pub(crate) mod panic;
pub(crate) mod report;
