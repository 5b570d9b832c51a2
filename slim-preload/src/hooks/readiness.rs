//! Waiting for descriptors.

use super::looked_up::hook;
use crate::direct;
use crate::ops::epoll;
use crate::ops::limit::{Given, Wait};
use crate::ops::select::Sets;
use crate::ops::{poll as ops, select as sets_of};
use libc::{c_int, epoll_event, fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use redhook::real;

/// Calls `f` with the application's time limit, or with the time that is left.
fn with_timespec<R>(wait: Wait, given: *const timespec, f: impl FnOnce(*const timespec) -> R) -> R {
    match wait {
        Wait::AsGiven => f(given),
        Wait::For(_) => {
            let left = wait.timespec();
            f(left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref))
        }
    }
}

hook! { unsafe fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int => slim_poll {
    let real = move |fds, n, w: Wait| real!(poll)(fds, n as nfds_t, w.millis(timeout));
    match timeout {
        0 => ops::poll_now(fds, count as usize, || direct::poll(fds, count as usize, 0), real),
        _ => ops::poll(fds, count as usize, Given::Millis(timeout), real),
    }
}}
/// libc's own `poll`, for SLIM's waits in which a thread may be cancelled.
///
/// # Safety
/// As `poll(2)` asks.
pub unsafe fn real_poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { real!(poll)(fds, count, timeout) }
}
hook! { unsafe fn __poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int => slim___poll {
    ops::poll(fds, count as usize, Given::Millis(timeout), |fds, n, w| real!(__poll)(fds, n as nfds_t, w.millis(timeout)))
}}
hook! { unsafe fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, room: size_t) -> c_int => slim___poll_chk {
    if count as usize > room / size_of::<pollfd>() { return real!(__poll_chk)(fds, count, timeout, room); }
    ops::poll(fds, count as usize, Given::Millis(timeout), |fds, n, w| real!(poll)(fds, n as nfds_t, w.millis(timeout)))
}}
hook! { unsafe fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int => slim_ppoll {
    ops::poll(fds, count as usize, Given::Spec(timeout), |fds, n, w| with_timespec(w, timeout, |t| real!(ppoll)(fds, n as nfds_t, t, mask)))
}}
hook! { unsafe fn __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, room: size_t) -> c_int => slim___ppoll_chk {
    if count as usize > room / size_of::<pollfd>() { return real!(__ppoll_chk)(fds, count, timeout, mask, room); }
    ops::poll(fds, count as usize, Given::Spec(timeout), |fds, n, w| with_timespec(w, timeout, |t| real!(ppoll)(fds, n as nfds_t, t, mask)))
}}

/// `select`. A call with the application's own timeval counts it down, as the kernel does.
///
/// # Safety
/// As `select(2)` requires; `real` makes that call.
unsafe fn select_with(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timeval,
    real: impl Fn(Sets, *mut timeval) -> c_int,
) -> c_int {
    sets_of::select(
        Sets { count, sets },
        Given::Val(timeout),
        |sets, w| match w {
            Wait::AsGiven => real(sets, timeout),
            Wait::For(None) => real(sets, std::ptr::null_mut()),
            Wait::For(Some(d)) => {
                let mut left = timeval {
                    tv_sec: d.as_secs() as i64,
                    tv_usec: d.subsec_micros().into(),
                };
                real(sets, &raw mut left)
            }
        },
    )
}

hook! { unsafe fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int => slim_select {
    select_with(count, [read, write, except], timeout, |s, t| real!(select)(s.count, s.sets[0], s.sets[1], s.sets[2], t))
}}
hook! { unsafe fn __select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int => slim___select {
    select_with(count, [read, write, except], timeout, |s, t| real!(__select)(s.count, s.sets[0], s.sets[1], s.sets[2], t))
}}
hook! { unsafe fn pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int => slim_pselect {
    let sets = Sets { count, sets: [read, write, except] };
    sets_of::select(sets, Given::Spec(timeout), |s, w| with_timespec(w, timeout, |t| real!(pselect)(s.count, s.sets[0], s.sets[1], s.sets[2], t, mask)))
}}

hook! { unsafe fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int => slim_epoll_ctl {
    epoll::control(epfd, op, fd, event, || real!(epoll_ctl)(epfd, op, fd, event))
}}
hook! { unsafe fn epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int => slim_epoll_wait {
    let real = move |w: Wait| real!(epoll_wait)(epfd, events, max, w.millis(timeout));
    match timeout {
        0 => ops::epoll_wait_now(epfd, events, || direct::epoll_wait(epfd, events, max, 0), real),
        _ => ops::epoll_wait(epfd, events, Given::Millis(timeout), real),
    }
}}
hook! { unsafe fn epoll_pwait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int => slim_epoll_pwait {
    ops::epoll_wait(epfd, events, Given::Millis(timeout), |w| real!(epoll_pwait)(epfd, events, max, w.millis(timeout), mask))
}}
hook! { unsafe fn epoll_pwait2(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int => slim_epoll_pwait2 {
    ops::epoll_wait(epfd, events, Given::Spec(timeout), |w| with_timespec(w, timeout, |t| real!(epoll_pwait2)(epfd, events, max, t, mask)))
}}
