//! What is left to do should the thread ever panic, or memory run out.

pub(crate) mod memory;
pub(crate) mod panic;
pub(crate) mod report;
