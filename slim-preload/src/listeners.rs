//! The listening sockets of the application: numbers, and the addresses whose questions are answered for them.
//!
//! A listener's address is kept, for the number may have something else under it by the time its end is noticed.

use crate::{runtime, sys, table};
use libc::c_int;
use slim_sys::lock::Lock;
use std::collections::BTreeMap;
use std::net::SocketAddr;

static LISTENERS: Lock<BTreeMap<c_int, SocketAddr>> = Lock::new(BTreeMap::new());

/// The socket under `fd` listens at `at`.
pub fn add(fd: c_int, at: SocketAddr) {
    LISTENERS.with(|all| all.insert(fd, at));
    table::set_listener(fd);
}

/// A listener has got another number.
pub fn duplicated(from: c_int, to: c_int) {
    LISTENERS.with(|all| {
        if let Some(at) = all.get(&from).copied() {
            all.insert(to, at);
        }
    });
    table::set_listener(to);
}

/// The number is closed, or is about to be. Gives the address for [`unlisten`].
pub fn remove(fd: c_int) -> Option<SocketAddr> {
    table::clear(fd);
    LISTENERS.with(|all| all.remove(&fd))
}

/// Questions to the address are answered no more once the other listeners there are closed, too.
pub fn unlisten(at: Option<SocketAddr>) {
    if let Some(at) = at {
        sys::keep_errno(|| runtime::with_agent(|a| a.unlisten(at)));
    }
}

/// Around a fork: holds the list.
pub fn before_fork() {
    LISTENERS.lock();
}

/// After a fork, on either side. A child has none of its own yet.
pub fn after_fork(child: bool) {
    // SAFETY: taken by `before_fork`.
    unsafe { LISTENERS.unlock_after_fork(child) };
}
