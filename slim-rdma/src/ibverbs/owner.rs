//! Whether a process is the one that has opened a port, or a child of a fork of it.

use std::ptr;

use super::failed;
use crate::verbs::VerbsError;

/// A page that a child of a fork finds empty. A process id would not do: a child in a process id namespace of its own may have the same one.
pub(super) struct PortOwner(*mut u8);

impl PortOwner {
    /// The calling process.
    pub(super) fn new() -> Result<Self, VerbsError> {
        // SAFETY: a new mapping, which nothing else uses.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                1,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(failed("mmap"));
        }
        let owner = PortOwner(page.cast());
        // SAFETY: the mapping is ours, and nobody reads it yet.
        unsafe {
            if libc::madvise(page, 1, libc::MADV_WIPEONFORK) != 0 {
                return Err(failed("madvise"));
            }
            owner.0.write(1);
        }
        Ok(owner)
    }

    /// Whether the calling process is the owner.
    #[inline]
    pub(super) fn is_here(&self) -> bool {
        // SAFETY: the page is mapped as long as `self` lives, and nobody writes to it any more. The compiler knows nothing of forks.
        unsafe { self.0.read_volatile() != 0 }
    }
}

impl Drop for PortOwner {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours. A child of a fork has it, too.
        unsafe { libc::munmap(self.0.cast(), 1) };
    }
}
