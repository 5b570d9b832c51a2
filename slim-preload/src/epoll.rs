//! The epoll instances of the process.
//!
//! Each instance has a mirror of the application's registrations ([`crate::mirror`]), because the kernel loses a registration when
//! another file is put under its number. Two kinds of registration need more: those by a number that the application has closed
//! ([`closed`]), and those that no hook has seen ([`unseen`]).

mod closed;
mod unseen;

use crate::flow::Ctl;
use crate::mirror::Instance;
pub use crate::mirror::kernel::any_unseen;
use crate::table::{self, Entry};
pub use closed::{drop_closed, end_closed, keep_closed, take_back};
use libc::c_int;
use slim_sys::lock::Lock;
pub use unseen::read_back;

static INSTANCES: Lock<Vec<&'static Instance>> = Lock::new(Vec::new());

/// Before a fork: takes the lock, so that the child inherits a consistent state.
pub fn before_fork() {
    INSTANCES.lock();
}

/// After a fork, on either side. A child begins without the parent's instances: their registrations are the parent's, and a
/// number that the child closes may become another instance's. The child does not touch them, because another thread may
/// have held the lock of one.
pub fn after_fork(child: bool) {
    // SAFETY: taken by `before_fork`.
    unsafe { INSTANCES.unlock_after_fork(child) };
}

/// The instance behind an epoll descriptor. An inherited descriptor gets a new instance at its first `epoll_ctl`.
pub fn instance(epfd: c_int) -> Option<&'static Instance> {
    match table::entry(epfd) {
        Entry::Epoll(i) => Some(i),
        Entry::None => {
            let instance = INSTANCES.with(|all| {
                let reused = all.iter().copied().find(|i| i.take(epfd));
                reused.unwrap_or_else(|| {
                    let new: &Instance = Box::leak(Box::new(Instance::new(epfd)));
                    all.push(new);
                    new
                })
            });
            table::set_epoll(epfd, instance);
            Some(instance)
        }
        _ => None,
    }
}

/// Takes over the registrations of a socket that becomes a flow: it may have been registered before.
pub fn adopt(fd: c_int, ctl: &mut Ctl) {
    INSTANCES.with(|all| {
        let know = |i: &&Instance| i.lock().registered.contains_key(&fd);
        ctl.epolls.extend(all.iter().copied().filter(know));
    });
}

/// Removes the registrations of `fd`, which is about to be closed while its file stays open in SLIM: the kernel would go on
/// reporting events of the file.
pub fn outlived(fd: c_int, instances: &[&'static Instance]) {
    if any_unseen() {
        INSTANCES.with(|all| all.iter().for_each(|i| i.unregister(fd)));
    } else {
        instances.iter().for_each(|i| i.unregister(fd));
    }
}
