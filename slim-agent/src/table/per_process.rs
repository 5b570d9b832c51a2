//! Statics that a forked child begins anew.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value for each process. Values are never freed, so a child makes its own without its parent's locks, which other threads may have
/// held at the fork. Not for vforked children.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(i32, T)>);

impl<T: Default + Send + Sync> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// This process's value.
    pub(crate) fn get(&self) -> &'static T {
        let pid = slim_sys::pid();
        loop {
            let present = self.0.load(Ordering::Acquire);
            // SAFETY: null, or a value that was leaked below.
            if let Some((owner, value)) = unsafe { present.as_ref() }
                && *owner == pid
            {
                return value;
            }
            let own = Box::into_raw(Box::new((pid, T::default())));
            let first = self
                .0
                .compare_exchange(present, own, Ordering::AcqRel, Ordering::Relaxed);
            if first.is_err() {
                // SAFETY: made above, and seen by no other thread.
                drop(unsafe { Box::from_raw(own) });
            }
        }
    }
}
