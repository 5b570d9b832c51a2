//! Epoll instances: `epoll_create`, `epoll_ctl`.

use super::sockets::waits_on;
use crate::epoll::instance;
use crate::mirror::kernel::registered;
use crate::table::{self, Entry};
use crate::{runtime, sys};
use libc::{c_int, epoll_event};

/// Adds the number of a new instance to the table at once, because it may be duplicated before anything is registered.
pub fn created(epfd: c_int) -> c_int {
    if epfd >= 0
        && runtime::possible()
        && !runtime::is_our_call()
        && sys::keep_errno(runtime::in_own_process)
    {
        if let Entry::Epoll(old) = table::entry(epfd) {
            // An earlier instance with this number was closed where no hook saw it.
            old.closed(epfd);
            table::clear(epfd);
        }
        instance(epfd);
    }
    epfd
}

/// A forked child waits on `epfd`, perhaps for the first time: listeners may have been registered before the fork.
pub fn inherited(epfd: c_int) {
    if !matches!(table::entry(epfd), Entry::None) || !runtime::in_own_process() {
        return;
    }
    let registered = registered(epfd).unwrap_or_default();
    if !registered.is_empty() {
        instance(epfd);
        registered.iter().for_each(|r| waits_on(r.fd));
    }
}

/// `epoll_ctl`; `event` is null or the application's.
pub fn control(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *const epoll_event,
    real: impl Fn() -> c_int,
) -> c_int {
    if !runtime::possible() || runtime::is_our_call() || !runtime::in_own_process() {
        return real();
    }
    waits_on(fd);
    let flow = match table::entry(fd) {
        // The file under the number may be another one than the flow's.
        Entry::Flow(f) if op == libc::EPOLL_CTL_ADD => f.own_at(fd),
        Entry::Flow(f) => f.ctl_of(fd),
        _ => None,
    };
    let Some(instance) = instance(epfd) else {
        return real();
    };
    match flow {
        Some(mut ctl) => {
            let r = instance.control(op, fd, event, ctl.is_registered(), real);
            if r == 0 && !ctl.epolls.iter().any(|i| std::ptr::eq(*i, instance)) {
                ctl.epolls.push(instance);
            }
            r
        }
        None => instance.control(op, fd, event, true, real),
    }
}
