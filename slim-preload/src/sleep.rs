//! Waking threads that sleep in poll or select, when another file is put under a number that they wait for.
//!
//! The kernel looks a number up again on each wake-up, but registers the sleeper only with the file that it found
//! first. So a thread that sleeps on a transport, or on a placeholder, would never wake up after a swap. A call that
//! is going to sleep on a flow therefore waits for one more descriptor, its thread's *alarm* (an eventfd), which every swap
//! signals. (epoll needs none of this: adding a registration wakes its sleepers.)

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
/// Fork generation: an alarm from before a fork is not this process's.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// Before a new alarm is made, the threads of up to this many alarms are checked: one that has ended leaves its alarm.
const LOOKS: usize = 8;

struct Alarms {
    /// The alarms of the threads that are in a call now.
    asleep: Vec<c_int>,
    /// All alarms, with the thread ids of their owners.
    all: Vec<(c_int, c_int)>,
    /// The index in `all` that was checked last.
    looked: usize,
}

/// Whether the number still is an alarm: the program may have closed it where no hook saw it.
fn is_alarm(fd: c_int) -> bool {
    Mark::ALARM.is_on(fd)
}

impl Alarms {
    /// Forgets a number that is no alarm any more.
    fn forget(&mut self, fd: c_int) {
        self.asleep.retain(|asleep| *asleep != fd);
        self.all.retain(|(known, _)| *known != fd);
    }

    /// Gives the alarm of a thread that has ended to the thread `me`.
    fn take_over(&mut self, me: c_int) -> Option<c_int> {
        for _ in 0..LOOKS.min(self.all.len()) {
            self.looked = (self.looked + 1) % self.all.len();
            let (fd, owner) = self.all[self.looked];
            if !is_alarm(fd) {
                self.forget(fd);
                return None;
            }
            if owner == me || !sys::thread_lives(owner) {
                self.all[self.looked].1 = me;
                // A thread that was cancelled in its call has not been removed from the list.
                self.asleep.retain(|asleep| *asleep != fd);
                return Some(fd);
            }
        }
        None
    }
}

thread_local! {
    /// This thread's alarm, with the fork generation in which it was made. There is no destructor, for which libc would
    /// allocate memory: when the thread has ended, another thread takes the alarm over.
    static ALARM: Cell<Option<(c_int, u32)>> = const { Cell::new(None) };
}

/// This thread's alarm, made at its first sleep; `None` when no descriptor is available.
fn own() -> Option<c_int> {
    let forks = FORKS.load(Ordering::Relaxed);
    if let Some((fd, _)) = ALARM.get().filter(|(_, of)| *of == forks) {
        if is_alarm(fd) {
            return Some(fd);
        }
        ALARMS.with(|alarms| alarms.forget(fd));
    }
    let me = sys::tid();
    let taken_over = ALARMS.with(|alarms| alarms.take_over(me));
    let fd = match taken_over {
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

/// Runs a call that may sleep. Its argument is the thread's alarm: the call must also wait for that to be readable.
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

/// The type of `poll(2)`.
type Poll = unsafe fn(*mut pollfd, libc::nfds_t, c_int) -> c_int;
/// libc's own `poll`, which is a cancellation point.
static POLL: OnceLock<Poll> = OnceLock::new();

/// Sets libc's own `poll`. Called once, when the library is loaded.
pub fn use_poll(poll: Poll) {
    POLL.get_or_init(|| poll);
}

/// Waits until a flow's number can be written to, or has another file. A cancellation point.
pub fn until_writable(fd: c_int, limit: Option<Duration>) -> Result<(), Errno> {
    // The library is not loaded yet: the caller looks again.
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

/// After a swap: signals the alarms of all threads that sleep.
pub fn wake_all() {
    ALARMS.with(|alarms| {
        let asleep = alarms.asleep.iter().filter(|fd| is_alarm(**fd));
        asleep.for_each(|fd| sys::signal_eventfd(*fd));
    });
}

/// Before a fork: takes the lock of the list.
pub fn before_fork() {
    ALARMS.lock();
}

/// After a fork, on either side. A child has no other threads, and its alarms are closed.
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
