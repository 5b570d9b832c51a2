//! What the rest of SLIM stands on in somebody else's process: system calls, descriptors, threads and locks that the
//! program does not notice.
//!
//! Nothing here knows what a flow is. All of it must never reach the program's or our own hooks, and must work before the
//! library's constructor, in a vforked child and in signal context. So system calls are made without libc: they are no
//! cancellation points, and give `Err(errno)` instead of touching the caller's `errno`.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`raw`] | the system call instruction |
//! | `errno`, `process`, `descriptors`, `sockets`, `tcp`, `owner`, `wake`, `memory`, `open`, [`proc`] | system calls by what they are about; all of them are at the root of the crate |
//! | `identity` | which socket a descriptor is |
//! | `fence` | a fence in all threads |
//! | [`fds`], [`numbers`], `own` | our descriptors, out of the application's way |
//! | [`limit`], [`reserve`] | the limit on open files, and numbers kept for when the program has used it up |
//! | `inside`, `handler` | which code is ours; whether it runs in a signal handler |
//! | [`cancel`], `threads`, [`lock`] | threads that are cancelled, interrupted, or real-time |

/// A system call that rustix does not have: its number and its arguments. Unsafe: the arguments must be valid for it.
macro_rules! call {
    ($nr:expr $(, $arg:expr)*) => {
        $crate::raw::result($crate::raw::syscall(
            $nr,
            $crate::raw::padded([$($crate::raw::Word::word($arg)),*]),
        ))
    };
}

mod descriptors;
mod errno;
mod fence;
mod handler;
mod identity;
mod inside;
mod memory;
mod open;
mod own;
mod owner;
mod process;
mod sockets;
mod tcp;
mod threads;
mod wake;

pub mod cancel;
pub mod fds;
pub mod limit;
pub mod lock;
pub mod numbers;
pub mod proc;
pub mod raw;
pub mod reserve;

pub use descriptors::*;
pub use errno::*;
pub use fence::{can_fence, fence, register_fence};
pub use handler::in_handler;
pub use identity::{identity, identity_of};
pub use inside::{as_agent, be_agent_thread, in_agent, is_agent_thread};
pub use memory::*;
pub use open::for_each_open;
pub use own::OwnFd;
pub use owner::{copy_owner, tell_owner};
pub use process::*;
pub use sockets::*;
pub use tcp::*;
pub use threads::*;
pub use wake::*;
