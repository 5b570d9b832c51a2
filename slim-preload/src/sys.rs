//! The kernel, asked directly: [`slim_sys`], and the data path's own calls.

pub mod direct;

pub use slim_sys::*;
