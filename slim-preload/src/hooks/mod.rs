//! The hooked names. A hook marshals its arguments and calls [`crate::ops`]; nothing else.
//!
//! redhook makes each an exported function of the C name, with `real!` for libc's own.

// A hook of `__read` is `slim___read`: the name says what it stands for.
#![allow(non_snake_case)]

mod data;
mod descriptors;
mod looked_up;
mod numbers;
mod readiness;
mod sockets;
mod syscall;
mod variadic;

pub use looked_up::all as look_up;
pub use readiness::real_poll;
