//! The hooked names. A hook only marshals its arguments and calls [`crate::ops`].
//!
//! redhook makes each hook an exported function with the C name; `real!` calls libc's own function.

// The hook of `__read` is called `slim___read`: the name must show the hooked name.
#![allow(non_snake_case)]

mod data;
mod descriptors;
mod lists;
mod looked_up;
mod numbers;
mod readiness;
mod sockets;
mod syscall;
mod variadic;

pub use looked_up::all as look_up;
pub use readiness::real_poll;
