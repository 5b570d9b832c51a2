//! The listening sockets of the application: their numbers, and their addresses, at which the agent answers peers' questions.
//!
//! A listener's address is kept, because the number may have another file by the time the close is noticed.

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

/// Removes a number that is closed, or is about to be. Gives the address for [`unlisten`].
pub fn remove(fd: c_int) -> Option<SocketAddr> {
    table::clear(fd);
    LISTENERS.with(|all| all.remove(&fd))
}

/// A listener at this address is closed. The agent stops answering there when the last listener at the address is closed.
pub fn unlisten(at: Option<SocketAddr>) {
    if let Some(at) = at {
        sys::keep_errno(|| runtime::with_agent(|a| a.unlisten(at)));
    }
}

/// Before a fork: takes the lock of the list.
pub fn before_fork() {
    LISTENERS.lock();
}

/// After a fork, on either side. A child has no listeners of its own yet.
pub fn after_fork(child: bool) {
    // SAFETY: taken by `before_fork`.
    unsafe { LISTENERS.unlock_after_fork(child) };
}
