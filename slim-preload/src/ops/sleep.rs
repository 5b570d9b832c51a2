//! Waking threads that sleep in poll or select when something else comes under a number they wait for.
//!
//! The kernel looks a number up again on each wake-up, but registers the sleeper only with the file that it found
//! first. So whoever sleeps on a transport, or on a placeholder, would sleep on for ever after a swap. A call that
//! is going to sleep on a flow therefore waits for one more descriptor, its thread's alarm, which every swap sounds.
//! (epoll needs none of this: adding a registration wakes its sleepers.)

use crate::lock::Lock;
use crate::sys::{self, Errno};
use libc::{c_int, pollfd};
use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The alarms of the threads that are in a call now.
static SLEEPERS: Lock<Vec<c_int>> = Lock::new(Vec::new());
/// How many forks lie between this process and the first: an alarm from before one is not ours.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// An event counter of one thread.
struct Alarm {
    fd: c_int,
    forks: u32,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if self.forks == FORKS.load(Ordering::Relaxed) {
            // A thread that was cancelled in its call has not left the list.
            SLEEPERS.with(|all| all.retain(|fd| *fd != self.fd));
            sys::close(self.fd);
        }
    }
}

thread_local! {
    static ALARM: RefCell<Option<Alarm>> = const { RefCell::new(None) };
}

/// This thread's alarm, made at its first sleep; `None` when there is no descriptor to be had.
fn own() -> Option<c_int> {
    let forks = FORKS.load(Ordering::Relaxed);
    let get = |slot: &RefCell<Option<Alarm>>| {
        let mut slot = slot.try_borrow_mut().ok()?;
        if slot.as_ref().is_none_or(|a| a.forks != forks) {
            *slot = Some(Alarm {
                fd: sys::eventfd().ok()?,
                forks,
            });
        }
        slot.as_ref().map(|a| a.fd)
    };
    ALARM.try_with(get).ok().flatten()
}

/// Runs a call that may sleep, with the number of a descriptor that it is to wait for too (readable).
pub fn with_alarm(call: impl FnOnce(Option<c_int>) -> c_int) -> c_int {
    let Some(fd) = sys::keep_errno(own) else {
        return call(None);
    };
    sys::keep_errno(|| SLEEPERS.with(|all| all.push(fd)));
    let r = call(Some(fd));
    sys::keep_errno(|| {
        SLEEPERS.with(|all| {
            if let Some(i) = all.iter().position(|other| *other == fd) {
                all.swap_remove(i);
            }
        });
        sys::reset_eventfd(fd);
    });
    r
}

/// Waits until a flow's number can be written to, or something else has come under it. A cancellation point.
pub fn until_writable(fd: c_int, limit: Option<Duration>) -> Result<(), Errno> {
    let timeout = limit.map_or(-1, |l| {
        c_int::try_from(l.as_millis()).unwrap_or(c_int::MAX).max(1)
    });
    let n = with_alarm(|alarm| {
        let entry = |fd, events| pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut fds = [
            entry(fd, libc::POLLOUT),
            entry(alarm.unwrap_or(-1), libc::POLLIN),
        ];
        // SAFETY: two entries.
        unsafe { crate::hooks::real_poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) }
    });
    match n {
        0 => Err(libc::EAGAIN),
        n if n < 0 => Err(sys::errno()),
        _ => Ok(()),
    }
}

/// After a swap.
pub fn wake_all() {
    SLEEPERS.with(|all| all.iter().for_each(|fd| sys::signal_eventfd(*fd)));
}

/// Around a fork: holds the list.
pub fn before_fork() {
    SLEEPERS.lock();
}

/// After a fork, on either side. No other thread sleeps in a child, and its alarms are closed.
pub fn after_fork(child: bool) {
    if child {
        FORKS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: locked by `before_fork`.
        unsafe { SLEEPERS.get() }.clear();
    }
    SLEEPERS.unlock();
}
