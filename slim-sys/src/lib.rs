//! The lowest layer of SLIM. SLIM runs inside a program that it did not write; this crate gives it system calls, descriptors,
//! threads and locks that the program does not notice.
//!
//! This crate knows nothing of flows. Its code must not enter the program's hooks or ours, and it must work before the
//! library's constructor, in a vforked child and in a signal handler. So system calls do not go through libc: they are not
//! cancellation points, and they return `Err(errno)` and leave the caller's `errno` alone.
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`raw`] | the system call instruction |
//! | `errno`, `process`, `descriptors`, `sockets`, `tcp`, `owner`, `wake`, `memory`, `open`, [`proc`] | system calls by subject; all but `proc` are exported at the root of the crate |
//! | `sigio` | the signal that the owner of a descriptor gets |
//! | `identity` | the identity of the socket behind a descriptor |
//! | `fence` | a memory fence in all threads |
//! | [`fds`], [`numbers`], `own` | our descriptors, out of the application's way |
//! | [`limit`], [`reserve`] | the limit on open files, and descriptor numbers reserved for when the program has reached it |
//! | [`handed`] | a file in memory for the next program, when the process executes one |
//! | [`copies`], `offer` | several copies of this crate in one process |
//! | `inside`, `handler` | whether the running code is ours; whether it runs in a signal handler |
//! | [`cancel`], `threads`, [`lock`] | cancellation, signals and real-time scheduling of threads |
//! | `starved` | whether a thread waits for a processor in vain |

/// Makes a system call that rustix does not offer, by number. Unsafe: the arguments must be valid for this call.
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
mod offer;
mod open;
mod own;
mod owner;
mod process;
mod sigio;
mod sockets;
mod starved;
mod tcp;
mod threads;
mod wake;

pub mod cancel;
pub mod copies;
pub mod fds;
pub mod handed;
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
pub use offer::offered;
pub use open::{any_number_of_later_processes, for_each_open, for_each_process};
pub use own::OwnFd;
pub use owner::{copy_owner, set_asynchronous, tell_owner};
pub use process::*;
pub use sockets::*;
pub use starved::RunnableThreads;
pub use tcp::*;
pub use threads::*;
pub use wake::*;
