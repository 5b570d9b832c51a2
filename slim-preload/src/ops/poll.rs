//! poll, select and epoll_wait: readiness of flows.
//!
//! A transport that dies makes its descriptor ready before SLIM knows of it. So the kernel's answer is searched for errors and
//! hang-ups of flows (other answers cost nothing). These flows are suspended, and the call goes on waiting without them, because
//! their dead transports are still under their numbers. It waits until a swap, which signals the thread's alarm. (From epoll
//! instances a flow is removed when it is suspended.)

use super::limit::{Given, Limit, Wait};
use super::sockets;
use crate::flow::{Flow, Mode};
use crate::sleep::with_alarm;
use crate::table::{self, Entry};
use crate::transport::{self, Fault, SWAPS, swapped, unswapped};
use crate::{direct, sys};
use crate::{epoll, runtime};
use libc::{c_int, epoll_event, pollfd};
use slim_core::Cause;
use smallvec::SmallVec;
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SUSPICIOUS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP;
const SUSPICIOUS_EPOLL: u32 = (libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLRDHUP) as u32;

/// How often a call whose time is over asks again, because files were swapped while the kernel answered.
const LAST_LOOKS: u32 = 8;

/// Why a call that sleeps may return with nothing ready before its time is over.
#[derive(Default)]
pub(super) struct Early {
    /// The alarm was signalled. The swap may be one that the call has taken into account already, or one that occurred during
    /// an earlier call, which a signal handler left by a jump.
    pub(super) rang: Cell<bool>,
    /// The call has no alarm, and checks now and then.
    pub(super) cut_short: Cell<bool>,
}

impl Early {
    /// Whether the last call returned early.
    pub(super) fn has_come(&self) -> bool {
        self.rang.get() || self.cut_short.get()
    }
}

/// Runs a call that may wait, until its answer is valid. `real` asks the kernel. `clean` says whether an answer needs no further
/// look. `sift` removes entries from an answer, and gives the number that is left.
#[inline(always)]
pub(super) fn until_true(
    limit: Limit,
    first: impl FnOnce() -> c_int,
    real: impl Fn(Wait) -> c_int,
    clean: impl Fn(c_int) -> bool,
    sift: impl FnMut(c_int, u64) -> c_int,
) -> c_int {
    let swaps = SWAPS.load(Ordering::Acquire);
    let n = first();
    if n < 0 || (clean(n) && unswapped(swaps)) {
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
    let mut looks = LAST_LOOKS;
    loop {
        let left = if n > 0 { sift(n, swaps) } else { 0 };
        if left > 0 || looks == 0 {
            sys::set_errno(errno);
            return left;
        }
        let wait = limit.left();
        // Events that are kept from the application do not extend the call beyond its limit, but an answer about other files does not count.
        let is_over = wait == Some(Duration::ZERO);
        swaps = SWAPS.load(Ordering::Acquire);
        n = real(Wait::For(wait));
        let unswapped = unswapped(swaps);
        if is_over {
            looks = if unswapped { 0 } else { looks - 1 };
        }
        if n < 0 || (n > 0 && clean(n) && unswapped) || (n == 0 && looks == 0) {
            return n;
        }
    }
}

/// Whether the kernel's report on a flow's number is to be kept from the application, because the transport, not
/// the flow, is broken or away. Suspends the flow if necessary. `swaps` is the value of `SWAPS` from before the kernel
/// was asked.
pub(super) fn hidden(flow: &'static Flow, fd: c_int, swaps: u64) -> bool {
    // After a swap the file under the number may be sound, and not the one that the kernel reported on.
    is_broken(flow, fd) || (flow.live.load(Ordering::Acquire) && swapped(swaps))
}

/// Whether the kernel's report that there is something to read may concern the transport and not the flow: its stream has ended. A
/// read of a descriptor that blocks would wait then, and the program with it. A read that does not block only fails, so these are
/// not looked at.
pub(super) fn may_wait(flow: &'static Flow, fd: c_int) -> bool {
    !flow.never_waits() && (flow.stream.is_barred() || sys::keep_errno(|| sys::peer_has_ended(fd)))
}

/// Whether an answer about a number needs a look.
fn needs_look(p: &pollfd) -> bool {
    let reads =
        || p.revents & libc::POLLIN != 0 && table::flow(p.fd).is_some_and(|f| may_wait(f, p.fd));
    p.revents & SUSPICIOUS != 0 || reads()
}

/// Whether the number's transport is away, so that the kernel must not be asked about the number.
pub(super) fn is_away(fd: c_int) -> bool {
    table::flow(fd).is_some_and(|flow| {
        flow.stream.is_barred()
            && flow
                .ctl_of(fd)
                .is_some_and(|ctl| ctl.mode() == Mode::Suspended)
    })
}

/// Whether the flow's transport is away, or is dead or has ended unannounced; in the latter cases the flow is suspended. An error
/// that the kernel reports on an established connection is for the application: it is transient, or a message in the error
/// queue.
pub(super) fn is_broken(flow: &'static Flow, fd: c_int) -> bool {
    let Some(ctl) = flow.own_at(fd) else {
        return false;
    };
    match ctl.mode() {
        Mode::Suspended => return true,
        Mode::Open => {}
        _ => return false,
    }
    let Some(state) = sys::stable_state(fd).filter(|state| sys::is_state_of_end(*state)) else {
        return false;
    };
    let peer_ended = flow.stream.peer_final().is_some();
    let closed = state == sys::TCP_CLOSE;
    let we_ended = flow.stream.local_final().is_some();
    // The kernel closes a connection that both sides have ended when all bytes have arrived. It may also have failed before.
    let shut_by_us = flow.read_shut.load(Ordering::Relaxed);
    let has_all = || {
        let received = flow.stream.received();
        shut_by_us || flow.stream.ends_at(received + sys::readable(fd))
    };
    if closed && (!flow.was_established(fd) || (peer_ended && we_ended && has_all())) {
        return false;
    }
    let fault = if closed && transport::has_failed(flow, fd) {
        // The errno is read when the flow is suspended, because reading clears it.
        transport::found_dead(flow, ctl, fd, Cause::Errno(transport::TO_BE_ASKED))
    } else {
        // Both directions have ended, or the peer's, and the peer has not announced the end (yet).
        let unread = sys::readable(fd) > 0;
        if peer_ended || shut_by_us || unread {
            return false;
        }
        if !flow.live.load(Ordering::Acquire) {
            flow.end_shown.store(true, Ordering::Release);
            return false;
        }
        drop(ctl);
        let received = flow.stream.received();
        transport::fault(flow, fd, Cause::Eof { received })
    };
    matches!(fault, Fault::Suspended)
}

/// Makes a non-blocking call, past libc if that is allowed.
#[inline(always)]
fn at_once(direct: impl FnOnce() -> isize, real: impl FnOnce() -> c_int) -> c_int {
    if !direct::is_allowed() {
        return real();
    }
    direct::as_libc(direct()) as c_int
}

/// `poll` without waiting; `direct` asks the kernel past libc.
///
/// # Safety
/// As [`poll`].
#[inline(always)]
pub unsafe fn poll_now(
    fds: *mut pollfd,
    count: usize,
    direct: impl FnOnce() -> isize,
    real: impl Fn(*mut pollfd, usize, Wait) -> c_int + Copy,
) -> c_int {
    let swaps = SWAPS.load(Ordering::Acquire);
    let n = at_once(direct, || real(fds, count, Wait::AsGiven));
    // SAFETY: the kernel has just looked at these entries, and filled them.
    let clean = || !(0..count).any(|i| needs_look(unsafe { &*fds.add(i) }));
    if n < 0 || ((n == 0 || clean()) && unswapped(swaps) && !table::any_inherited_listener()) {
        if n == 0 {
            super::came_back_empty();
        }
        return n;
    }
    let limit = Limit::new(Some(Duration::ZERO));
    // SAFETY: the kernel has accepted the entries.
    let n = unsafe { poll_asked(fds, count, limit, (n, swaps), real) };
    if n == 0 {
        super::came_back_empty();
    }
    n
}

/// `poll` and `ppoll`; `real` asks the kernel about the entries it is given.
///
/// # Safety
/// `fds` and `count` are the application's, as `poll(2)` asks; they may be bad as long as the kernel then refuses the call.
pub unsafe fn poll(
    fds: *mut pollfd,
    count: usize,
    given: Given,
    real: impl Fn(*mut pollfd, usize, Wait) -> c_int,
) -> c_int {
    let limit = given.read().filter(|_| table::any());
    let Some(limit) = limit else {
        return real(fds, count, Wait::AsGiven);
    };
    // First ask without waiting, so that the kernel has accepted the entries, and written to them, before we access them.
    let swaps = SWAPS.load(Ordering::Acquire);
    let n = real(fds, count, Wait::For(Some(Duration::ZERO)));
    let plain = || unswapped(swaps) && !table::any_inherited_listener();
    if n < 0 || (n == 0 && !limit.sleeps() && plain()) {
        return n;
    }
    // SAFETY: the kernel has accepted the entries.
    unsafe { poll_asked(fds, count, limit, (n, swaps), real) }
}

/// [`poll`], after the kernel has answered without waiting. `swaps` is the value of `SWAPS` from before that.
///
/// # Safety
/// The kernel has accepted the entries.
unsafe fn poll_asked(
    fds: *mut pollfd,
    count: usize,
    mut limit: Limit,
    (n, swaps): (c_int, u64),
    real: impl Fn(*mut pollfd, usize, Wait) -> c_int,
) -> c_int {
    let entries = || match count {
        0 => &mut [][..],
        // SAFETY: the caller's contract.
        _ => unsafe { std::slice::from_raw_parts_mut(fds, count) },
    };
    if table::any_inherited_listener() {
        entries().iter().for_each(|p| sockets::waits_on(p.fd));
    }
    let early = Early::default();
    let clean = |n| match n {
        0 => !early.has_come(),
        _ => !entries().iter().any(needs_look),
    };
    let sift = |_, swaps| {
        let swapped = swapped(swaps);
        // A dead transport that has the number for a moment is not the flow.
        let shown = |p: &pollfd| p.revents & SUSPICIOUS != 0 && !unswapped(swaps);
        let mut n = 0;
        for p in entries().iter_mut().filter(|p| p.revents != 0) {
            if let Some(flow) = table::flow(p.fd)
                && (swapped || flow.stream.is_barred() || needs_look(p))
                && sys::keep_errno(|| {
                    hidden(flow, p.fd, swaps) || (flow.stream.is_barred() && shown(p))
                })
            {
                p.revents = 0;
                continue;
            }
            n += 1;
        }
        n
    };
    limit.begin();
    let ask = |alarm, wait| poll_with(entries(), alarm, (wait, limit), &early, &real);
    let at_once = |wait| ask(None, wait);
    let asleep = |wait| with_alarm(|alarm| ask(alarm, wait));
    let sleeps = limit.sleeps() && entries().iter().any(|p| table::is_flow(p.fd));
    match n {
        0 if sleeps => until_true(limit, || asleep(Wait::AsGiven), asleep, clean, sift),
        // Without a flow no event is kept back, but a number may become a flow's meanwhile.
        0 if limit.sleeps() => {
            let plainly = || real(fds, count, Wait::AsGiven);
            until_true(limit, plainly, at_once, clean, sift)
        }
        _ if clean(n) && unswapped(swaps) => n,
        _ if sleeps => again(limit, n, asleep, clean, swaps, sift),
        _ => again(limit, n, at_once, clean, swaps, sift),
    }
}

/// Polls the entries, except those whose transport is away, and the alarm, which is not counted in the result.
fn poll_with(
    entries: &mut [pollfd],
    alarm: Option<c_int>,
    (wait, limit): (Wait, Limit),
    early: &Early,
    real: impl FnOnce(*mut pollfd, usize, Wait) -> c_int,
) -> c_int {
    let mut away = false;
    let mut all = SmallVec::<[pollfd; 16]>::with_capacity(entries.len() + 1);
    all.extend(entries.iter().map(|p| {
        let hide = is_away(p.fd);
        away |= hide;
        // The kernel ignores entries with a negative number.
        let fd = if hide { -1 } else { p.fd };
        pollfd { fd, ..*p }
    }));
    all.extend(alarm.map(|fd| pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    }));
    early.cut_short.set(away && alarm.is_none());
    let wait = wait.unless(&early.cut_short, limit);
    let n = real(all.as_mut_ptr(), all.len(), wait);
    for (entry, polled) in entries.iter_mut().zip(&all) {
        entry.revents = polled.revents;
    }
    let rang = n > 0 && alarm.is_some() && all.last().is_some_and(|a| a.revents != 0);
    early.rang.set(rang);
    n - c_int::from(rang)
}

/// `epoll_wait` without waiting; `direct` asks the kernel past libc.
///
/// # Safety
/// `events` has room for the events that `direct` and `real` say they filled.
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
            if n == 0 {
                super::came_back_empty();
            }
            return n;
        }
        // SAFETY: the caller's contract.
        return unsafe { epoll_sifted(epfd, events, limit, n, swaps, real) };
    }
    // SAFETY: the caller's contract.
    unsafe { epoll_wait(epfd, events, Given::Millis(0), real) }
}

/// The `epoll_wait` family.
///
/// # Safety
/// `events` has room for the events that `real` says it filled.
pub unsafe fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    given: Given,
    real: impl Fn(Wait) -> c_int,
) -> c_int {
    let limit = given.read().filter(|_| table::any());
    let Some(mut limit) = limit else {
        return real(Wait::AsGiven);
    };
    if table::any_inherited_listener() {
        sys::keep_errno(|| super::epoll::inherited(epfd));
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
    // A swap removes the registration, so the numbers of clean events need no second look.
    let clean = |n: c_int| filled(n).iter().all(|e| e.events & SUSPICIOUS_EPOLL == 0);
    if n <= 0 || clean(n) {
        return n;
    }
    let instance = match table::entry(epfd) {
        Entry::None if table::any() && sys::keep_errno(runtime::in_own_process) => {
            sys::keep_errno(|| epoll::instance(epfd))
        }
        Entry::Epoll(instance) => Some(instance),
        _ => None,
    };
    let Some(instance) = instance else {
        return n;
    };
    let kept_back = |data: u64, swaps: u64| {
        let mut registrations = instance.by_data(data);
        if registrations.is_empty() {
            registrations = instance.by_data_unseen(data);
        } else if epoll::any_unseen() {
            // An EPOLLONESHOT event that was kept back could not be armed again: pass it on, and let the application arm it.
            registrations.retain(|(_, r)| !r.fires_once());
        }
        registrations.into_iter().any(|(fd, known)| {
            let Some(flow) = table::flow(fd) else {
                return false;
            };
            let hidden = hidden(flow, fd, swaps);
            if hidden {
                // Under the control lock, which every swap holds: no swap comes in between.
                instance.rearm(flow, &flow.ctl(), fd, known);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::RawAddr;
    use crate::mirror::Instance;
    use slim_core::Role;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    /// The number of events that the kernel reports.
    fn reported(epfd: c_int) -> c_int {
        let mut event = epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for one.
        unsafe { libc::epoll_wait(epfd, &mut event, 1, 0) }
    }

    #[test]
    fn an_event_that_was_kept_back_is_not_lost_when_its_flow_becomes_plain() {
        for how in [libc::EPOLLONESHOT, libc::EPOLLET, 0] {
            // A number of SLIM's own would be closed when the flow becomes plain.
            let (near, far) = UnixStream::pair().unwrap();
            let fd = near.as_raw_fd();
            let name = RawAddr::local(fd).unwrap();
            let flow = Flow::create(fd, Role::Connector, true, &name, None).unwrap();
            assert!(table::set_flow(fd, flow));
            // SAFETY: no memory is passed.
            let epfd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
            let instance: &'static Instance = Box::leak(Box::new(Instance::new(epfd)));
            let event = epoll_event {
                events: (libc::EPOLLIN | how) as u32,
                u64: 7,
            };
            let add = || sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &event).map_or(-1, |()| 0);
            let registered = instance.control(libc::EPOLL_CTL_ADD, fd, &event, true, add);
            assert_eq!(registered, 0);
            flow.ctl().epolls.push(instance);

            drop(far);
            assert_eq!(reported(epfd), 1);
            let known = instance.by_data(7)[0].1;
            // The event is examined, and is to be kept back. Meanwhile the agent makes the flow plain TCP.
            transport::unmanage(flow, flow.ctl());
            instance.rearm(flow, &flow.ctl(), fd, known);
            assert_eq!(reported(epfd), 1, "{how:x}");
            sys::close(epfd);
        }
    }
}
