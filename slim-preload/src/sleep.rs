//! Waking threads that sleep in poll or select when something else comes under a number they wait for.
//!
//! The kernel looks a number up again on each wake-up, but registers the sleeper only with the file that it found
//! first. So whoever sleeps on a transport, or on a placeholder, would sleep on for ever after a swap. A call that
//! is going to sleep on a flow therefore waits for one more descriptor, its thread's alarm, which every swap sounds.
//! (epoll needs none of this: adding a registration wakes its sleepers.)

use crate::sys::{self, Errno};
use libc::{c_int, pollfd};
use slim_sys::fds::Mark;
use slim_sys::lock::Lock;
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

static ALARMS: Lock<Alarms> = Lock::new(Alarms {
    asleep: Vec::new(),
    all: Vec::new(),
    looked: 0,
});
/// How many forks lie between this process and the first: an alarm from before one is not ours.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// At so many alarms it is looked whether their threads have ended, before a new one is made.
const LOOKS: usize = 8;

struct Alarms {
    /// Those of the threads that are in a call now.
    asleep: Vec<c_int>,
    /// All there are, and whose.
    all: Vec<(c_int, c_int)>,
    /// Where in `all` was looked last.
    looked: usize,
}

/// Whether the number is an alarm still: the program may have closed it where no hook saw it.
fn is_alarm(fd: c_int) -> bool {
    Mark::ALARM.is_on(fd)
}

impl Alarms {
    /// The number has something else under it, or nothing.
    fn forget(&mut self, fd: c_int) {
        self.asleep.retain(|asleep| *asleep != fd);
        self.all.retain(|(known, _)| *known != fd);
    }

    /// The alarm of a thread that has ended, for the thread `me`.
    fn inherit(&mut self, me: c_int) -> Option<c_int> {
        for _ in 0..LOOKS.min(self.all.len()) {
            self.looked = (self.looked + 1) % self.all.len();
            let (fd, owner) = self.all[self.looked];
            if !is_alarm(fd) {
                self.forget(fd);
                return None;
            }
            if owner == me || !sys::thread_lives(owner) {
                self.all[self.looked].1 = me;
                // A thread that was cancelled in its call has not left the list.
                self.asleep.retain(|asleep| *asleep != fd);
                return Some(fd);
            }
        }
        None
    }
}

thread_local! {
    /// This thread's, with the forks before it was made. Without a destructor, for which libc would allocate: when the
    /// thread has ended another one inherits the alarm.
    static ALARM: Cell<Option<(c_int, u32)>> = const { Cell::new(None) };
}

/// This thread's alarm, made at its first sleep; `None` when there is no descriptor to be had.
fn own() -> Option<c_int> {
    let forks = FORKS.load(Ordering::Relaxed);
    if let Some((fd, _)) = ALARM.get().filter(|(_, of)| *of == forks) {
        if is_alarm(fd) {
            return Some(fd);
        }
        ALARMS.with(|alarms| alarms.forget(fd));
    }
    let me = sys::tid();
    let inherited = ALARMS.with(|alarms| alarms.inherit(me));
    let fd = match inherited {
        Some(fd) => {
            sys::reset_eventfd(fd);
            fd
        }
        None => {
            let fd = sys::eventfd().ok()?.leak();
            Mark::ALARM.set(fd);
            ALARMS.with(|alarms| alarms.all.push((fd, me)));
            fd
        }
    };
    ALARM.set(Some((fd, forks)));
    Some(fd)
}

/// Runs a call that may sleep, with the number of a descriptor that it is to wait for too (readable).
pub fn with_alarm(call: impl FnOnce(Option<c_int>) -> c_int) -> c_int {
    let Some(fd) = sys::keep_errno(own) else {
        return call(None);
    };
    sys::keep_errno(|| ALARMS.with(|alarms| alarms.asleep.push(fd)));
    let r = call(Some(fd));
    sys::keep_errno(|| {
        ALARMS.with(|alarms| {
            if let Some(i) = alarms.asleep.iter().position(|other| *other == fd) {
                alarms.asleep.swap_remove(i);
            }
        });
        if is_alarm(fd) {
            sys::reset_eventfd(fd);
        }
    });
    r
}

/// A function as `poll(2)`.
type Poll = unsafe fn(*mut pollfd, libc::nfds_t, c_int) -> c_int;
/// libc's own, which is a cancellation point.
static POLL: OnceLock<Poll> = OnceLock::new();

/// Once, when the library is loaded: libc's own `poll`.
pub fn use_poll(poll: Poll) {
    POLL.get_or_init(|| poll);
}

/// Waits until a flow's number can be written to, or something else has come under it. A cancellation point.
pub fn until_writable(fd: c_int, limit: Option<Duration>) -> Result<(), Errno> {
    // Before the library is loaded: the caller looks again.
    let Some(poll) = POLL.get() else {
        return Ok(());
    };
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
        unsafe { poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) }
    });
    match n {
        0 => Err(libc::EAGAIN),
        n if n < 0 => Err(sys::errno()),
        _ => Ok(()),
    }
}

/// After a swap.
pub fn wake_all() {
    ALARMS.with(|alarms| {
        let asleep = alarms.asleep.iter().filter(|fd| is_alarm(**fd));
        asleep.for_each(|fd| sys::signal_eventfd(*fd));
    });
}

/// Around a fork: holds the list.
pub fn before_fork() {
    ALARMS.lock();
}

/// After a fork, on either side. No other thread sleeps in a child, and its alarms are closed.
pub fn after_fork(child: bool) {
    if child {
        FORKS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: locked by `before_fork`.
        let alarms = unsafe { ALARMS.get() };
        alarms.asleep.clear();
        alarms.all.clear();
    }
    ALARMS.unlock();
}
