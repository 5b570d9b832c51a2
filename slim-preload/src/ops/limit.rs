//! The time limit of a call, and what is left of it when the call is repeated.

use crate::sys;
use libc::{c_int, timespec, timeval};
use std::cell::Cell;
use std::time::{Duration, Instant};

/// A time limit as the application gives it. A pointer in it may be bad: then the kernel must report that.
#[derive(Clone, Copy)]
pub enum Given {
    /// `poll(2)`, `epoll_wait(2)`: negative means for ever.
    Millis(c_int),
    /// `ppoll(2)`, `pselect(2)`, `epoll_pwait2(2)`: null means for ever.
    Spec(*const timespec),
    /// `select(2)`, likewise.
    Val(*const timeval),
}

impl Given {
    /// The limit; `None` if it cannot be read, or has a value that is not allowed.
    pub fn read(self) -> Option<Limit> {
        let (secs, nanos) = match self {
            Self::Millis(ms) => {
                let whole = u64::try_from(ms).ok().map(Duration::from_millis);
                return Some(Limit::new(whole));
            }
            Self::Spec(at) if !at.is_null() => {
                // SAFETY: the application's two integers.
                let t = unsafe { sys::copy_of(at) }.filter(|t| t.tv_nsec < 1_000_000_000)?;
                (t.tv_sec, t.tv_nsec)
            }
            Self::Val(at) if !at.is_null() => {
                // SAFETY: the application's two integers.
                let t = unsafe { sys::copy_of(at) }?;
                (t.tv_sec, t.tv_usec.checked_mul(1000)?)
            }
            _ => return Some(Limit::new(None)),
        };
        let (secs, nanos) = (u64::try_from(secs).ok()?, u64::try_from(nanos).ok()?);
        let whole = Duration::from_secs(secs).checked_add(Duration::from_nanos(nanos))?;
        Some(Limit::new(Some(whole)))
    }
}

/// A time limit that shrinks when a call is repeated.
#[derive(Clone, Copy)]
pub struct Limit {
    whole: Option<Duration>,
    until: Option<Instant>,
}

impl Limit {
    /// `None` waits for ever.
    pub fn new(whole: Option<Duration>) -> Self {
        Self { whole, until: None }
    }

    /// Whether the call may sleep.
    #[inline]
    pub(super) fn sleeps(&self) -> bool {
        self.whole != Some(Duration::ZERO)
    }

    /// Starts the clock, unless that has been done. A call that does not wait needs no clock.
    pub(super) fn begin(&mut self) {
        if self.until.is_some() {
            return;
        }
        if let Some(whole) = self.whole.filter(|w| !w.is_zero()) {
            self.until = Instant::now().checked_add(whole);
        }
    }

    /// The same limit, with the clock started.
    pub fn begun(mut self) -> Self {
        self.begin();
        self
    }

    /// The time that is left; `None` means for ever.
    pub fn left(&self) -> Option<Duration> {
        self.until.map_or(self.whole, |u| {
            Some(u.saturating_duration_since(Instant::now()))
        })
    }
}

/// Writes the time that is left to the application's structure, if that is writable (recvmmsg(2), `poll_select_finish` in the
/// kernel).
///
/// # Safety
/// The memory is the application's.
pub unsafe fn write_left(at: *mut timespec, left: Duration) {
    if sys::keep_errno(|| sys::is_writable(at.cast(), size_of::<timespec>())) {
        let left = timespec {
            tv_sec: left.as_secs() as libc::time_t,
            tv_nsec: left.subsec_nanos().into(),
        };
        // SAFETY: writable, and the application's.
        unsafe { at.write_unaligned(left) };
    }
}

/// The time that is left, in the forms that the calls want.
#[derive(Clone, Copy)]
pub enum Wait {
    /// As the application gave it.
    AsGiven,
    /// For ever, or this long.
    For(Option<Duration>),
}

impl Wait {
    /// Milliseconds, rounded up; `given` is the application's own value.
    pub fn millis(self, given: c_int) -> c_int {
        match self {
            Wait::AsGiven => given,
            Wait::For(None) => -1,
            Wait::For(Some(d)) => {
                c_int::try_from(d.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
            }
        }
    }

    /// Shortens the wait of a call that is to be `cut_short`: it leaves numbers out, and has no alarm that signals when they are
    /// back.
    pub(super) fn unless(self, cut_short: &Cell<bool>, limit: Limit) -> Self {
        if !cut_short.get() {
            return self;
        }
        let left = limit.left().unwrap_or(UNALARMED);
        Wait::For(Some(left.min(UNALARMED)))
    }

    /// A timespec to point to; `None` for the application's own, and for ever.
    pub fn timespec(self) -> Option<libc::timespec> {
        match self {
            Wait::For(Some(d)) => Some(libc::timespec {
                tv_sec: d.as_secs() as i64,
                tv_nsec: i64::from(d.subsec_nanos()),
            }),
            _ => None,
        }
    }
}

/// The longest sleep of a call that leaves numbers out and has no alarm, for lack of a descriptor.
const UNALARMED: Duration = Duration::from_millis(10);
