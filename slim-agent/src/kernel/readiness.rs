//! Our sockets, watched by the runtime.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use slim_sys::fds;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::kernel::sys;

/// Registers something that owns a descriptor with the runtime, inside which this must run.
pub(crate) fn watch<T: AsFd + AsRawFd>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    let number = inner.as_raw_fd();
    // SAFETY: `AsFd` ties the descriptor to `inner`, which both our types own for good: it is the
    // same one, and open, until `inner` is dropped or taken out, and `AsyncFd` deregisters before.
    let watched = unsafe { AsyncFd::register_with_interest(inner, interest) }?;
    fds::watched(number);
    Ok(watched)
}

/// To be called right after the kernel said `EAGAIN`, so that waiting waits.
pub(crate) fn forget_ready<T: AsRawFd>(fd: &AsyncFd<T>, interest: Interest) {
    // The error is what does it; nothing is tried.
    let _ = fd.try_io(interest, |_| Err::<(), _>(io::ErrorKind::WouldBlock.into()));
}

/// Ends everything that this thread's sockets are for, as if they were closed: who connects or asks
/// there is refused. They stay open, for their owners never end.
pub(crate) fn shut_watched() {
    fds::for_each_watched(sys::shut);
}
