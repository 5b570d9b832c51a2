//! Waiting and waking: event counters, timers, poll, futexes.

use crate::errno::number;
use crate::{OwnFd, at};
use libc::c_int;
use rustix::event::{self, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::thread::futex;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::Errno;

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// A non-blocking event counter (eventfd(2)) of ours.
///
/// # Errors
/// The kernel's.
pub fn eventfd() -> io::Result<OwnFd> {
    OwnFd::make(|| {
        Ok(event::eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)
    })
}

/// Makes an event counter readable.
pub fn signal_eventfd(fd: c_int) {
    let _ = rustix::io::write(at(fd), &1u64.to_ne_bytes());
}

/// Makes an event counter or a timer unreadable until its next event.
pub fn reset_eventfd(fd: c_int) {
    let _ = rustix::io::read(at(fd), &mut [0; 8]);
}

/// A non-blocking timer (timerfd_create(2)) of ours on `CLOCK_MONOTONIC`.
///
/// # Errors
/// The kernel's.
pub fn timerfd() -> io::Result<OwnFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    OwnFd::make(|| {
        Ok(rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            flags,
        )?)
    })
}

/// Sets the timer to expire after `delay`; `None` stops it.
pub fn set_timerfd(fd: c_int, delay: Option<Duration>) {
    // A delay of zero would stop the timer.
    let delay = delay.map(|d| d.max(Duration::from_nanos(1)));
    let spec = Itimerspec {
        it_interval: timespec(Duration::ZERO),
        it_value: timespec(delay.unwrap_or_default()),
    };
    let _ = rustix::time::timerfd_settime(at(fd), TimerfdTimerFlags::empty(), &spec);
}

/// Waits for one descriptor, for `limit` at most, or until a signal arrives. Returns the events of poll(2), or 0.
pub fn poll(fd: c_int, events: i16, limit: Option<Duration>) -> i16 {
    try_poll(fd, events, limit).unwrap_or(0)
}

/// [`poll`], with the error.
///
/// # Errors
/// `EINTR` if a signal has arrived.
pub fn try_poll(fd: c_int, events: i16, limit: Option<Duration>) -> Result<i16, Errno> {
    let events = PollFlags::from_bits_retain(events as _);
    let mut entry = [PollFd::from_borrowed_fd(at(fd), events)];
    let limit = limit.map(timespec);
    match event::poll(&mut entry, limit.as_ref()) {
        Ok(1..) => Ok(entry[0].revents().bits() as i16),
        Ok(_) => Ok(0),
        Err(e) => Err(number(e)),
    }
}

/// Waits for either of two descriptors, for `limit` at most, or until a signal arrives. Returns which of them have events.
pub fn poll_two(one: (c_int, i16), other: (c_int, i16), limit: Duration) -> (bool, bool) {
    let mut entries = [one, other].map(|(fd, events)| {
        PollFd::from_borrowed_fd(at(fd), PollFlags::from_bits_retain(events as _))
    });
    let ready = event::poll(&mut entries, Some(&timespec(limit))).is_ok_and(|n| n > 0);
    let has = |entry: &PollFd<'_>| ready && !entry.revents().is_empty();
    (has(&entries[0]), has(&entries[1]))
}

/// The events of poll(2) that a descriptor has now: those of `events`, and those that are always reported.
pub fn ready(fd: c_int, events: i16) -> i16 {
    poll(fd, events, Some(Duration::ZERO))
}

/// Sleeps while `*word == value`. Without a time limit, a signal restarts or interrupts the wait just as it does a blocking
/// `recv` (futex(2), signal(7)).
///
/// # Errors
/// `EAGAIN` if `*word` has another value, `ETIMEDOUT`, `EINTR`.
pub fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) -> Result<(), Errno> {
    let limit = limit.map(timespec);
    let waited = futex::wait(word, futex::Flags::PRIVATE, value, limit.as_ref());
    waited.map_err(number)
}

/// Wakes up to `n` sleepers on `word`.
pub fn futex_wake(word: &AtomicU32, n: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, n);
}

/// Wakes all sleepers on `word`.
pub fn futex_wake_all(word: &AtomicU32) {
    futex_wake(word, i32::MAX as u32);
}

/// Sleeps. Not a cancellation point. A signal may end the sleep early, and never makes it longer.
pub fn nap(time: Duration) {
    let _ = futex_wait(&AtomicU32::new(0), 0, Some(time));
}

/// Nanoseconds of the monotonic clock. By libc, which has found the kernel's vDSO already: rustix looks for it by itself, which crashes a
/// program under valgrind. Async-signal-safe.
pub fn now() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes to `now` only.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_open_poll_as_invalid() {
        for fd in [-1, i32::MAX] {
            assert_eq!(ready(fd, libc::POLLIN), libc::POLLNVAL);
        }
    }

    #[test]
    fn a_timer_expires_once_and_can_be_stopped() {
        let alarm = timerfd().unwrap();
        let readable = |ms| {
            let limit = Duration::from_millis(ms);
            poll(alarm.raw(), libc::POLLIN, Some(limit)) != 0
        };
        assert!(!readable(0));
        set_timerfd(alarm.raw(), Some(Duration::ZERO));
        assert!(readable(1000));
        reset_eventfd(alarm.raw());
        set_timerfd(alarm.raw(), Some(Duration::from_millis(20)));
        set_timerfd(alarm.raw(), None);
        assert!(!readable(50));
    }
}
