//! The hooked names. A hook marshals its arguments and calls [`crate::ops`]; nothing else.
//!
//! redhook makes each an exported function of the C name, with `real!` for libc's own.

// redhook's macro expands to calls of unsafe functions inside an unsafe function; every hook's contract is
// that of the libc function of its name, passed on unchanged.
// A hook of `__read` is `slim___read`: the name says what it stands for.
#![allow(non_snake_case)]
#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    missing_docs
)]

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
