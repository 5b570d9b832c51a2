//! Descriptors that the runtime watches.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use slim_sys::{OwnFd, fds};
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

/// Ends the registration, before another owner gets the descriptor.
pub(crate) fn unwatch(fd: AsyncFd<OwnFd>) -> OwnFd {
    let fd = fd.into_inner();
    fds::unwatched(fd.raw());
    fd
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

#[cfg(test)]
mod tests {
    use tokio::runtime;

    use super::*;

    /// Otherwise the agent would shut it when it ends, or whatever file has its number by then.
    #[test]
    fn a_descriptor_that_another_owner_gets_is_not_watched_any_more() {
        let runtime = runtime::Builder::new_current_thread().enable_io().build();
        let _inside = runtime.as_ref().unwrap().enter();
        let counter = slim_sys::eventfd().unwrap();
        let number = counter.raw();
        let is_watched = || {
            let mut found = false;
            fds::for_each_watched(|fd| found |= fd == number);
            found
        };
        let watched = watch(counter, Interest::READABLE).unwrap();
        assert!(is_watched());
        let counter = unwatch(watched);
        assert!(!is_watched());
        assert_eq!(counter.raw(), number);
    }
}
