//! poll, select and epoll_wait: readiness of flows.
//!
//! A transport that dies makes its descriptor ready before any of our code knows. What the kernel reports is
//! therefore looked through for errors and hang-ups of flows (nothing else costs anything), these flows are
//! suspended, and the call goes on waiting: without them, for their dead transports are still under their numbers, and
//! until a swap, which sounds the thread's alarm. (From epoll they are taken when they are suspended.)

use super::sleep::with_alarm;
use super::{descriptors, sockets};
use crate::epoll;
use crate::flow::{Flow, Mode, UNKNOWN};
use crate::sys::{self, direct};
use crate::table::{self, Entry};
use crate::transport::{self, Fault, SWAPS};
use libc::{c_int, epoll_event, fd_set, pollfd};
use slim_core::Cause;
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SUSPICIOUS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP;
const SUSPICIOUS_EPOLL: u32 = (libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLRDHUP) as u32;

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

    /// From milliseconds, negative ones for ever.
    pub fn from_millis(ms: c_int) -> Self {
        Self::new(u64::try_from(ms).ok().map(Duration::from_millis))
    }

    /// Whether the call may sleep.
    #[inline]
    fn sleeps(&self) -> bool {
        self.whole != Some(Duration::ZERO)
    }

    /// Begins to count, unless that has been done. A call that does not wait needs no clock.
    fn begin(&mut self) {
        if self.until.is_some() {
            return;
        }
        if let Some(whole) = self.whole.filter(|w| !w.is_zero()) {
            self.until = Instant::now().checked_add(whole);
        }
    }

    fn left(&self) -> Option<Duration> {
        self.until.map_or(self.whole, |u| {
            Some(u.saturating_duration_since(Instant::now()))
        })
    }
}

/// What is left of a limit, in the forms that the calls want.
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

    /// The call leaves numbers out, and if it is to be `cut_short`, nothing tells it that they are back.
    fn unless(self, cut_short: &Cell<bool>) -> Self {
        match self {
            wait if !cut_short.get() => wait,
            Wait::For(Some(left)) => Wait::For(Some(left.min(UNALARMED))),
            _ => Wait::For(Some(UNALARMED)),
        }
    }

    /// A timespec to point to, unless the application's own serves.
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

/// Runs a waiting call until its answer stands. `real` asks the kernel; `sift` looks through an answer and
/// gives what is left of it.
#[inline(always)]
fn until_true(
    limit: Limit,
    first: impl FnOnce() -> c_int,
    real: impl Fn(Wait) -> c_int,
    clean: impl Fn(c_int) -> bool,
    sift: impl FnMut(c_int, u64) -> c_int,
) -> c_int {
    let swaps = SWAPS.load(Ordering::Acquire);
    let n = first();
    // An alarm ends the call as a time limit does: with nothing ready.
    if n < 0 || (clean(n) && SWAPS.load(Ordering::Acquire) == swaps) {
        return n;
    }
    again(limit, n, real, clean, swaps, sift)
}

#[cold]
#[inline(never)]
fn again(
    mut limit: Limit,
    mut n: c_int,
    real: impl Fn(Wait) -> c_int,
    clean: impl Fn(c_int) -> bool,
    mut swaps: u64,
    mut sift: impl FnMut(c_int, u64) -> c_int,
) -> c_int {
    let errno = sys::errno();
    limit.begin();
    loop {
        let left = if n > 0 { sift(n, swaps) } else { 0 };
        if left > 0 {
            sys::set_errno(errno);
            return left;
        }
        let wait = limit.left();
        swaps = SWAPS.load(Ordering::Acquire);
        n = real(Wait::For(wait));
        let settled = SWAPS.load(Ordering::Acquire) == swaps;
        if n < 0 || (n > 0 && clean(n) && settled) || (n == 0 && wait == Some(Duration::ZERO)) {
            return n;
        }
    }
}

/// Whether what the kernel says of a flow's number is to be kept from the application, because the
/// transport, not the flow, is broken or away. Suspends the flow if need be. `swaps` is from before the kernel was
/// asked.
fn hidden(flow: &'static Flow, fd: c_int, swaps: u64) -> bool {
    // What is now under the number may be fine, and not be what the kernel spoke of.
    is_broken(flow, fd)
        || (flow.live.load(Ordering::Acquire) && SWAPS.load(Ordering::Acquire) != swaps)
}

/// Whether the number is one whose transport is away, of which the kernel is not to be asked.
fn is_away(fd: c_int) -> bool {
    table::flow(fd).is_some_and(|flow| {
        flow.gate.is_barred()
            && flow
                .ctl_of(fd)
                .is_some_and(|ctl| ctl.mode == Mode::Suspended)
    })
}

/// How long a call sleeps at most that leaves numbers out and has no alarm, for want of a descriptor.
const UNALARMED: Duration = Duration::from_millis(10);

fn is_broken(flow: &'static Flow, fd: c_int) -> bool {
    let Some(ctl) = flow.ctl_of(fd) else {
        return false;
    };
    match ctl.mode {
        Mode::Suspended => return true,
        Mode::Open => {}
        _ => return false,
    }
    let Some(info) = sys::tcp_info(fd) else {
        return true;
    };
    let peer_ended = flow.peer_final.load(Ordering::Acquire) != UNKNOWN;
    let closed = info.tcpi_state == sys::TCP_CLOSE;
    let we_ended = flow.local_final.load(Ordering::Acquire) != UNKNOWN;
    if closed && (!flow.was_established(fd) || (peer_ended && we_ended)) {
        return false;
    }
    let fault = if closed && sys::has_error(fd) {
        // Which one is asked for when the flow is suspended, for asking takes it away.
        transport::found_dead(flow, ctl, fd, Cause::Errno(transport::TO_BE_ASKED))
    } else {
        // An end of both directions, or of the peer's, that it has not announced (yet).
        let shut_by_us = flow.read_shut.load(Ordering::Relaxed);
        let unread = sys::readable(fd) > 0;
        if peer_ended || shut_by_us || unread || !flow.live.load(Ordering::Acquire) {
            return false;
        }
        drop(ctl);
        let received = flow.received();
        transport::fault(flow, fd, Cause::Eof { received })
    };
    matches!(fault, Fault::Suspended)
}

/// A call that does not wait, past libc if that is allowed.
#[inline(always)]
fn at_once(direct: impl FnOnce() -> isize, real: impl FnOnce() -> c_int) -> c_int {
    if !direct::is_allowed() {
        return real();
    }
    direct::as_libc(direct()) as c_int
}

/// `poll` that does not wait; `direct` asks the kernel past libc.
///
/// # Safety
/// `fds` points to `count` entries, as `poll(2)` asks.
#[inline(always)]
pub unsafe fn poll_now(
    fds: *mut pollfd,
    count: usize,
    direct: impl FnOnce() -> isize,
    real: impl Fn(*mut pollfd, usize, Wait) -> c_int + Copy,
) -> c_int {
    let limit = Limit::new(Some(Duration::ZERO));
    if !table::any_inherited_listener() {
        let swaps = SWAPS.load(Ordering::Acquire);
        let n = at_once(direct, || real(fds, count, Wait::AsGiven));
        // SAFETY: the kernel has just looked at these entries, and filled them.
        let clean = || (0..count).all(|i| unsafe { (*fds.add(i)).revents } & SUSPICIOUS == 0);
        if n < 0 || ((n == 0 || clean()) && SWAPS.load(Ordering::Acquire) == swaps) {
            return n;
        }
        // SAFETY: the caller's contract.
        return unsafe { poll_asked(fds, count, limit, Some((n, swaps)), real) };
    }
    // SAFETY: the caller's contract.
    unsafe { poll(fds, count, limit, real) }
}

/// `poll` and `ppoll`; `real` asks the kernel about the entries it is given.
///
/// # Safety
/// `fds` points to `count` entries, as `poll(2)` asks.
pub unsafe fn poll(
    fds: *mut pollfd,
    count: usize,
    limit: Limit,
    real: impl Fn(*mut pollfd, usize, Wait) -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { poll_asked(fds, count, limit, None, real) }
}

/// [`poll`]; `asked` is what the kernel has answered already, and how many swaps there had been before.
unsafe fn poll_asked(
    fds: *mut pollfd,
    count: usize,
    mut limit: Limit,
    asked: Option<(c_int, u64)>,
    real: impl Fn(*mut pollfd, usize, Wait) -> c_int,
) -> c_int {
    let entries = || {
        if count == 0 || fds.is_null() {
            &mut [][..]
        } else {
            // SAFETY: the caller's contract. A bad pointer faults here and not as EFAULT, if the call may sleep.
            unsafe { std::slice::from_raw_parts_mut(fds, count) }
        }
    };
    if table::any_inherited_listener() {
        entries().iter().for_each(|p| sockets::waits_on(p.fd));
    }
    let cut_short = Cell::new(false);
    let clean = |n| match n {
        0 => !cut_short.get(),
        _ => entries().iter().all(|p| p.revents & SUSPICIOUS == 0),
    };
    let sift = |_, swaps| {
        let mut n = 0;
        for p in entries().iter_mut().filter(|p| p.revents != 0) {
            if let Some(flow) = table::flow(p.fd)
                && (p.revents & SUSPICIOUS != 0 || flow.gate.is_barred())
                && sys::keep_errno(|| hidden(flow, p.fd, swaps))
            {
                p.revents = 0;
                continue;
            }
            n += 1;
        }
        n
    };
    let ask = |alarm, wait| poll_with(entries(), alarm, wait, &cut_short, &real);
    let at_once = |wait| ask(None, wait);
    if let Some((n, swaps)) = asked {
        return again(limit, n, at_once, clean, swaps, sift);
    }
    if limit.sleeps() && entries().iter().any(|p| table::is_flow(p.fd)) {
        let asleep = |wait| with_alarm(|alarm| ask(alarm, wait));
        limit.begin();
        return until_true(limit, || asleep(Wait::AsGiven), asleep, clean, sift);
    }
    // Without a flow nothing is kept back; a clock is asked only if one has come under a number meanwhile.
    let plainly = || real(fds, count, Wait::AsGiven);
    until_true(limit, plainly, at_once, clean, sift)
}

/// Polls the entries, but not those whose transport is away, and the alarm, which is not counted.
fn poll_with(
    entries: &mut [pollfd],
    alarm: Option<c_int>,
    wait: Wait,
    cut_short: &Cell<bool>,
    real: impl FnOnce(*mut pollfd, usize, Wait) -> c_int,
) -> c_int {
    let mut away = false;
    let mut all = Vec::with_capacity(entries.len() + 1);
    all.extend(entries.iter().map(|p| {
        let hide = is_away(p.fd);
        away |= hide;
        // The kernel passes over a negative number.
        let fd = if hide { -1 } else { p.fd };
        pollfd { fd, ..*p }
    }));
    all.extend(alarm.map(|fd| pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }));
    cut_short.set(away && alarm.is_none());
    let n = real(all.as_mut_ptr(), all.len(), wait.unless(cut_short));
    for (entry, polled) in entries.iter_mut().zip(&all) {
        entry.revents = polled.revents;
    }
    let rang = n > 0 && alarm.is_some() && all.last().is_some_and(|a| a.revents != 0);
    n - c_int::from(rang)
}

/// The three sets of a `select`.
#[derive(Clone, Copy)]
pub struct Sets {
    /// How many numbers they cover.
    pub count: c_int,
    /// To read, to write, exceptional; each may be null.
    pub sets: [*mut fd_set; 3],
}

impl Sets {
    fn bytes(&self) -> usize {
        // The kernel's own granularity: whole longs, and no more than the application allocated.
        (self.count.max(0) as usize).div_ceil(64) * 8
    }

    /// Copies; `None` when a pointer is bad.
    fn save(&self) -> Option<[Vec<u8>; 3]> {
        let copy = |s: *mut fd_set| match s.is_null() {
            true => Some(Vec::new()),
            false => sys::memory(s.cast(), self.bytes()),
        };
        let [read, write, except] = self.sets;
        Some([copy(read)?, copy(write)?, copy(except)?])
    }

    /// Whether `is` holds for any number in the saved sets.
    fn any(&self, saved: &[Vec<u8>; 3], mut is: impl FnMut(c_int) -> bool) -> bool {
        (0..self.count).any(|fd| {
            let set = |bytes: &Vec<u8>| {
                bytes
                    .get(fd as usize / 8)
                    .is_some_and(|b| b >> (fd % 8) & 1 == 1)
            };
            saved.iter().any(set) && is(fd)
        })
    }

    /// Runs `f` on copies that have `alarm` to be read as well, and takes the answer over without it.
    fn with(&self, alarm: c_int, f: impl FnOnce(Sets) -> c_int) -> c_int {
        let count = self.count.max(alarm + 1);
        let bytes = (count as usize).div_ceil(64) * 8;
        let Some(copies) = self.save() else {
            return f(*self);
        };
        let mut copies = copies.map(|mut set| {
            set.resize(bytes, 0);
            set
        });
        let (byte, bit) = (alarm as usize / 8, 1 << (alarm % 8));
        copies[0][byte] |= bit;
        let mut at = |i: usize| copies[i].as_mut_ptr().cast::<fd_set>();
        let absent = |i: usize| i > 0 && self.sets[i].is_null();
        let sets = [0, 1, 2].map(|i| {
            if absent(i) {
                std::ptr::null_mut()
            } else {
                at(i)
            }
        });
        let n = f(Sets { count, sets });
        let rang = n > 0 && copies[0][byte] & bit != 0;
        copies[0][byte] &= !bit;
        if n >= 0 {
            let own = self.bytes();
            self.restore(&copies.map(|mut set| {
                set.truncate(own);
                set
            }));
        }
        n - c_int::from(rang)
    }

    /// Takes the numbers whose transport is away out of the sets, which are as they were saved; whether there are any.
    fn leave_out(&self, saved: &[Vec<u8>; 3]) -> bool {
        let mut away = false;
        self.any(saved, |fd| {
            if is_away(fd) {
                away = true;
                for set in self.sets.iter().filter(|set| !set.is_null()) {
                    // SAFETY: the saved copies are of sets as long, which the kernel is about to write to.
                    unsafe { *set.cast::<u8>().add(fd as usize / 8) &= !(1 << (fd % 8)) };
                }
            }
            false
        });
        away
    }

    /// The numbers that the kernel has left in the sets.
    fn ready(&self) -> impl Iterator<Item = c_int> + use<> {
        let [read, write, except] = self.sets;
        let has = |set: *mut fd_set, fd: c_int| {
            // SAFETY: the kernel has just written `count` bits there.
            !set.is_null() && unsafe { *set.cast::<u8>().add(fd as usize / 8) } >> (fd % 8) & 1 == 1
        };
        (0..self.count).filter(move |fd| [read, write, except].iter().any(|set| has(*set, *fd)))
    }

    fn restore(&self, saved: &[Vec<u8>; 3]) {
        for (s, bytes) in self.sets.iter().zip(saved) {
            if !s.is_null() {
                // SAFETY: as in `save`.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), s.cast::<u8>(), bytes.len())
                };
            }
        }
    }
}

/// `select` and `pselect`; `real` asks the kernel about the sets it is given.
pub fn select(sets: Sets, limit: Limit, real: impl Fn(Sets, Wait) -> c_int) -> c_int {
    let before = sys::errno();
    let n = select_all(sets, limit, &real);
    if n < 0 && sys::errno() == libc::EBADF && sets.count > sys::TABLE_MIN {
        // Numbers beyond its table of descriptors the kernel does not look at; ours have made that larger.
        let count = sys::keep_errno(descriptors::table_size);
        if sets.count > count {
            sys::set_errno(before);
            return select_all(Sets { count, ..sets }, limit, &real);
        }
    }
    n
}

/// A set has no bit for errors, so those of the flows in an answer are asked for by `poll`.
fn select_all(sets: Sets, mut limit: Limit, real: &impl Fn(Sets, Wait) -> c_int) -> c_int {
    let saved = if crate::runtime::possible() {
        sys::keep_errno(|| sets.save())
    } else {
        None
    };
    let Some(saved) = saved else {
        return real(sets, Wait::AsGiven);
    };
    let first = Cell::new(true);
    if table::any_inherited_listener() {
        sets.any(&saved, |fd| {
            sockets::waits_on(fd);
            false
        });
    }
    let flows = sets.any(&saved, table::is_flow);
    let sleeps = limit.sleeps() && flows;
    if flows {
        limit.begin();
    }
    let cut_short = Cell::new(false);
    let ask = |wait: Wait| {
        if !first.replace(false) {
            sets.restore(&saved);
        }
        if !sleeps {
            sets.leave_out(&saved);
            return real(sets, wait);
        }
        with_alarm(|alarm| {
            let away = sets.leave_out(&saved);
            cut_short.set(away && alarm.is_none());
            match alarm {
                Some(alarm) => sets.with(alarm, |sets| real(sets, wait)),
                None => real(sets, wait.unless(&cut_short)),
            }
        })
    };
    let suspicious = || {
        sys::keep_errno(|| {
            sets.ready()
                .filter(|fd| table::is_flow(*fd) && sys::has_ended(*fd))
                .collect::<Vec<_>>()
        })
    };
    until_true(
        limit,
        || ask(Wait::AsGiven),
        ask,
        |n| match n {
            0 => !cut_short.get(),
            _ => !flows || suspicious().is_empty(),
        },
        |n, swaps| {
            let mut hide = SWAPS.load(Ordering::Acquire) != swaps;
            for fd in suspicious() {
                if let Some(flow) = table::flow(fd) {
                    hide |= sys::keep_errno(|| hidden(flow, fd, swaps));
                }
            }
            if !hide {
                return n;
            }
            // The numbers may have been ready for what is no longer under them: ask once more, without waiting.
            sets.restore(&saved);
            sets.leave_out(&saved);
            let n = real(sets, Wait::For(Some(Duration::ZERO))).max(0);
            if suspicious().is_empty() { n } else { 0 }
        },
    )
}

/// `epoll_wait` that does not wait; `direct` asks the kernel past libc.
///
/// # Safety
/// `events` has room for what is said to be filled.
#[inline(always)]
pub unsafe fn epoll_wait_now(
    epfd: c_int,
    events: *mut epoll_event,
    direct: impl FnOnce() -> isize,
    real: impl Fn(Wait) -> c_int + Copy,
) -> c_int {
    let limit = Limit::new(Some(Duration::ZERO));
    if !table::any_inherited_listener() {
        let swaps = SWAPS.load(Ordering::Acquire);
        let n = at_once(direct, || real(Wait::AsGiven));
        // SAFETY: the kernel has just filled `n` events.
        let suspicious = |i| unsafe { (*events.add(i)).events } & SUSPICIOUS_EPOLL != 0;
        if n <= 0 || !(0..n as usize).any(suspicious) {
            return n;
        }
        // SAFETY: the caller's contract.
        return unsafe { epoll_sifted(epfd, events, limit, n, swaps, real) };
    }
    // SAFETY: the caller's contract.
    unsafe { epoll_wait(epfd, events, limit, real) }
}

/// The `epoll_wait` family.
///
/// # Safety
/// `events` has room for what `real` says it filled.
pub unsafe fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    mut limit: Limit,
    real: impl Fn(Wait) -> c_int,
) -> c_int {
    if table::any_inherited_listener() {
        sys::keep_errno(|| epoll::inherited(epfd));
    }
    limit.begin();
    let swaps = SWAPS.load(Ordering::Acquire);
    let n = real(Wait::AsGiven);
    // SAFETY: the caller's contract.
    unsafe { epoll_sifted(epfd, events, limit, n, swaps, real) }
}

/// [`epoll_wait`] after the kernel's first answer.
unsafe fn epoll_sifted(
    epfd: c_int,
    events: *mut epoll_event,
    limit: Limit,
    n: c_int,
    swaps: u64,
    real: impl Fn(Wait) -> c_int,
) -> c_int {
    let filled = |n: c_int| {
        // SAFETY: the kernel has just filled `n` events.
        unsafe { std::slice::from_raw_parts_mut(events, n as usize) }
    };
    // A swap takes the registration with it, so the numbers of clean events need no second look.
    let clean = |n: c_int| filled(n).iter().all(|e| e.events & SUSPICIOUS_EPOLL == 0);
    if n <= 0 || clean(n) {
        return n;
    }
    let Entry::Epoll(instance) = table::entry(epfd) else {
        return n;
    };
    let kept_back = |data: u64, swaps: u64| {
        instance.by_data(data).into_iter().any(|fd| {
            let Some(flow) = table::flow(fd) else {
                return false;
            };
            instance.keep_armed(fd, true);
            let hidden = hidden(flow, fd, swaps);
            instance.keep_armed(fd, false);
            if hidden {
                // Under the lock that swaps are made under: nothing is armed for a number in between.
                let _ctl = flow.ctl();
                instance.rearm(fd);
            }
            hidden
        })
    };
    again(limit, n, real, clean, swaps, |n, swaps| {
        let events = filled(n);
        let mut kept = 0;
        for i in 0..events.len() {
            let event = events[i];
            let suspicious = event.events & SUSPICIOUS_EPOLL != 0;
            if !suspicious || !sys::keep_errno(|| kept_back(event.u64, swaps)) {
                events[kept] = event;
                kept += 1;
            }
        }
        kept as c_int
    })
}
