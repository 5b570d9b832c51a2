//! Descriptors that the runtime watches.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use slim_sys::fds;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::kernel::sys;

/// Registers the owner of a descriptor with the runtime. Must run inside the runtime.
pub(crate) fn watch<T: AsFd + AsRawFd>(inner: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    let number = inner.as_raw_fd();
    // SAFETY: `AsFd` ties the descriptor to `inner`. All our types own their descriptor for good: it is the same one,
    // and open, until `inner` is dropped or taken out, and `AsyncFd` deregisters it before that.
    let watched = unsafe { AsyncFd::register_with_interest(inner, interest) }?;
    fds::watched(number);
    Ok(watched)
}

/// Clears the readiness, so that the next wait sleeps. To be called right after the kernel has returned `EAGAIN`.
pub(crate) fn forget_ready<T: AsRawFd>(fd: &AsyncFd<T>, interest: Interest) {
    // The error clears the readiness; no operation is tried.
    let _ = fd.try_io(interest, |_| Err::<(), _>(io::ErrorKind::WouldBlock.into()));
}

/// Makes this thread's sockets look closed: connections and datagrams to them are refused. They stay open, because
/// their owners are never dropped.
pub(crate) fn shut_watched() {
    fds::for_each_watched(sys::shut);
}
