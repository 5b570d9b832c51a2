//! Owned descriptors of ours.

use crate::fds::{adopt, release, unwatched};
use crate::reserve::close_or_keep;
use crate::{at, numbers};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// A descriptor of the agent: above the floor and registered for as long as it is owned.
#[derive(Debug)]
pub struct OwnFd(ManuallyDrop<OwnedFd>);

impl OwnFd {
    /// Runs `create` and registers its descriptor before the application can use the number.
    pub fn make<T: Into<OwnedFd>>(create: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        numbers::make(|| create().map(OwnFd::new))
    }

    /// Takes a descriptor that the process has kept over an exec. No other program gets it.
    ///
    /// # Safety
    /// Nothing else owns it.
    pub unsafe fn inherited(fd: RawFd) -> Self {
        let _ = rustix::io::fcntl_setfd(at(fd), rustix::io::FdFlags::CLOEXEC);
        // SAFETY: the caller's contract.
        numbers::make(|| OwnFd::new(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn new(fd: impl Into<OwnedFd>) -> Self {
        OwnFd(ManuallyDrop::new(adopt(fd.into())))
    }

    /// Gives the descriptor away: it is no longer the agent's.
    pub fn into_owned(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        unwatched(this.raw());
        release(this.raw());
        // SAFETY: `this` is not used again, and its destructor does not run.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }

    /// Gives up ownership and returns the number. It stays registered as ours. The caller [closes](crate::close) it, or leaves
    /// it open for good.
    pub fn leak(self) -> RawFd {
        unwatched(self.raw());
        ManuallyDrop::new(self).raw()
    }

    /// The descriptor number.
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for OwnFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for OwnFd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw()
    }
}

impl Drop for OwnFd {
    fn drop(&mut self) {
        unwatched(self.raw());
        // SAFETY: taken here and nowhere else; `into_owned` keeps this destructor from running.
        close_or_keep(unsafe { ManuallyDrop::take(&mut self.0) });
    }
}
