//! The mirror of one epoll instance: the registrations that the application has made, and which of them the kernel has.
//!
//! The kernel keys a registration by file *and* number, so every swap of a transport loses it. Each swap is enclosed by
//! [`Instance::detach`] and [`Instance::attach`].

pub mod kernel;

use crate::sys;
use kernel::{any_unseen, registered};
use libc::{c_int, epoll_event};
use slim_sys::lock::{Guard, SignalSafeMutex};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// One epoll instance. Never freed, only reused: the table points to it.
pub struct Instance(SignalSafeMutex<Mirror>);

pub struct Mirror {
    /// The numbers of the instance: more than one after a `dup`, none when it is closed.
    pub numbers: SmallVec<[c_int; 2]>,
    /// By descriptor number: the application's registrations.
    pub registered: BTreeMap<c_int, Registration>,
    /// By descriptor number: rarely used data of registrations.
    asides: BTreeMap<c_int, Aside>,
}

#[derive(Clone, Copy)]
pub struct Registration {
    pub events: u32,
    pub data: u64,
    /// Whether the kernel has the registration now (not while a flow's transport is away).
    pub attached: bool,
}

/// Registrations by descriptor number.
pub type ByNumber = SmallVec<[(c_int, Registration); 4]>;

/// Kept small: idle flows are many, and each has a registration.
const _: () = assert!(size_of::<Registration>() <= 16);

/// Data that few registrations have.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Aside {
    /// The number by which the application registered, and which it has closed. The registration uses a number of ours now.
    pub closed: Option<c_int>,
    /// The file to which the registration was not attached, see [`Instance::attach`].
    pub left_out: Option<u64>,
    /// The events that the application had asked for, if the registration is EPOLLONESHOT and had fired when it was removed
    /// from the kernel. The event may still be kept from the application ([`Instance::rearm`]).
    pub asked: Option<u32>,
}

/// Whether the kernel takes this combination of events (epoll_ctl(2), EPOLLEXCLUSIVE).
fn is_allowed(op: c_int, event: epoll_event) -> bool {
    let with_exclusive = libc::EPOLLIN
        | libc::EPOLLOUT
        | libc::EPOLLERR
        | libc::EPOLLHUP
        | libc::EPOLLWAKEUP
        | libc::EPOLLET
        | libc::EPOLLEXCLUSIVE;
    let events = event.events;
    events & libc::EPOLLEXCLUSIVE as u32 == 0
        || (op == libc::EPOLL_CTL_ADD && events & !(with_exclusive as u32) == 0)
}

/// Whether these are the events of an EPOLLONESHOT registration that has fired: it reports nothing until it is armed again.
fn has_fired(events: u32) -> bool {
    let how =
        (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;
    events & libc::EPOLLONESHOT as u32 != 0 && events & !how == 0
}

/// The new [`Aside::asked`] of a registration for which the kernel has the events `now`. `None` if these are armed. Otherwise the
/// value that it has `already`, or the events that were `known` to be armed before.
pub fn asked(now: u32, known: u32, already: Option<u32>) -> Option<u32> {
    if !has_fired(now) {
        return None;
    }
    already.or((!has_fired(known)).then_some(known))
}

impl Registration {
    /// Whether the registration is EPOLLONESHOT.
    pub fn fires_once(&self) -> bool {
        self.events & libc::EPOLLONESHOT as u32 != 0
    }

    /// Whether an event that was reported is not reported again by itself, although the file is still ready.
    fn stays_silent(&self) -> bool {
        self.events & (libc::EPOLLET | libc::EPOLLONESHOT) as u32 != 0
    }

    /// Whether the registration stays out of the kernel until it is armed: it is EPOLLONESHOT, and has fired. If it were added
    /// again, the kernel would report the end of the file, which it does not do for a registration that has fired.
    fn stays_out(&self) -> bool {
        has_fired(self.events) && !any_unseen()
    }
}

impl Instance {
    pub fn new(fd: c_int) -> Self {
        let mut numbers = SmallVec::new();
        numbers.push(fd);
        Self(SignalSafeMutex::new(Mirror {
            numbers,
            registered: BTreeMap::new(),
            asides: BTreeMap::new(),
        }))
    }

    /// Reuses a closed instance for this number; false if the instance is not closed.
    pub fn take(&self, fd: c_int) -> bool {
        let mut mirror = self.lock();
        let free = mirror.numbers.is_empty();
        if free {
            mirror.numbers.push(fd);
        }
        free
    }

    /// Whether the next program gets the instance, if the process executes one.
    pub fn survives_exec(&self) -> bool {
        self.lock().numbers.iter().any(|fd| sys::survives_exec(*fd))
    }

    /// The instance has got another number.
    pub fn duplicated(&self, fd: c_int) {
        let mut mirror = self.lock();
        if !mirror.numbers.contains(&fd) {
            mirror.numbers.push(fd);
        }
    }

    /// A number of the instance is closed.
    pub fn closed(&self, fd: c_int) {
        let mut mirror = self.lock();
        mirror.numbers.retain(|n| *n != fd);
        if mirror.numbers.is_empty() {
            mirror.registered.clear();
            mirror.asides.clear();
        }
    }

    pub fn lock(&self) -> Guard<'_, Mirror> {
        self.0.lock()
    }

    /// `epoll_ctl` on one descriptor. If the kernel has the file (`present`) its answer counts. Otherwise the mirror
    /// answers as the kernel would.
    pub fn control(
        &self,
        op: c_int,
        fd: c_int,
        event: *const epoll_event,
        present: bool,
        real: impl Fn() -> c_int,
    ) -> c_int {
        let mut mirror = self.lock();
        let known = mirror.registered.contains_key(&fd);
        let left_out = mirror.aside(fd).left_out;
        let left_out = present && left_out.is_some() && left_out == sys::identity(fd);
        // The kernel reads the event first, so a bad pointer is the first error to report.
        let bad = || {
            op != libc::EPOLL_CTL_DEL && !sys::is_readable(event.cast(), size_of::<epoll_event>())
        };
        let refused = match op {
            _ if present && !left_out => {
                let r = real();
                if r != 0 {
                    return r;
                }
                None
            }
            _ if bad() => Some(libc::EFAULT),
            // SAFETY: `bad` has just found it readable.
            _ if op != libc::EPOLL_CTL_DEL
                && !is_allowed(op, unsafe { event.read_unaligned() }) =>
            {
                Some(libc::EINVAL)
            }
            libc::EPOLL_CTL_ADD if known => Some(libc::EEXIST),
            libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL if !known => Some(libc::ENOENT),
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL => None,
            _ => Some(libc::EINVAL),
        };
        if let Some(errno) = refused {
            sys::set_errno(errno);
            return -1;
        }
        let event = if op == libc::EPOLL_CTL_DEL {
            None
        } else {
            // SAFETY: the kernel has just read it, or `bad` has found it readable.
            Some(unsafe { event.read_unaligned() })
        };
        match event {
            Some(e) => {
                let r = Registration {
                    events: e.events,
                    data: e.u64,
                    attached: present,
                };
                mirror.asides.remove(&fd);
                mirror.registered.insert(fd, r);
                if left_out {
                    let _ = mirror.ctl(libc::EPOLL_CTL_ADD, fd, r);
                }
            }
            None => {
                mirror.remove(fd);
            }
        }
        0
    }

    /// Before the file under `fd` is replaced: removes the registration from the kernel.
    pub fn detach(&self, fd: c_int) {
        let mut mirror = self.lock();
        let Some(mut r) = mirror.registered.get(&fd).copied().filter(|r| r.attached) else {
            return;
        };
        let mut aside = mirror.aside(fd);
        if mirror.take_out(fd, &mut r, &mut aside) {
            mirror.registered.insert(fd, r);
            mirror.set_aside(fd, aside);
        } else {
            // The registration belonged to an earlier file with this number, and ended with it.
            mirror.remove(fd);
        }
    }

    /// Moves a registration from one number of a flow to another number of the same file; false if there is none.
    /// `closed` is the number by which the application made the registration, if the application has closed that number.
    pub fn rename(&self, from: c_int, to: c_int, closed: Option<c_int>) -> bool {
        let mut mirror = self.lock();
        let Some((mut r, mut aside)) = mirror.remove(from) else {
            return false;
        };
        aside.closed = closed;
        if r.attached {
            if !mirror.take_out(from, &mut r, &mut aside) {
                return false;
            }
            if r.stays_out() {
                aside.left_out = sys::identity(to);
            } else {
                r.attached = mirror.ctl(libc::EPOLL_CTL_ADD, to, r).is_ok();
            }
        }
        mirror.registered.insert(to, r);
        mirror.set_aside(to, aside);
        true
    }

    /// Whether a number is registered.
    pub fn has(&self, fd: c_int) -> bool {
        self.lock().registered.contains_key(&fd)
    }

    /// Whether the registration by our number `fd` was made by `number`, which was closed later.
    pub fn was_closed(&self, fd: c_int, number: c_int) -> bool {
        self.lock().aside(fd).closed == Some(number)
    }

    /// After another file was put under `fd`: adds the registration again, which also re-arms edge triggers.
    pub fn attach(&self, fd: c_int) {
        let mut mirror = self.lock();
        let Some(r) = mirror.registered.get_mut(&fd).filter(|r| !r.attached) else {
            return;
        };
        if r.stays_out() {
            let left_out = sys::identity(fd);
            let aside = mirror.aside(fd);
            return mirror.set_aside(fd, Aside { left_out, ..aside });
        }
        r.attached = true;
        let r = *r;
        let _ = mirror.ctl(libc::EPOLL_CTL_ADD, fd, r);
    }

    /// Removes a registration from the kernel, if the kernel has it.
    pub fn unregister(&self, fd: c_int) {
        if let Some(number) = self.lock().numbers.first() {
            let none = epoll_event { events: 0, u64: 0 };
            let _ = sys::epoll_ctl(*number, libc::EPOLL_CTL_DEL, fd, &none);
        }
    }

    /// Forgets the registration of a descriptor that is closed.
    pub fn forget(&self, fd: c_int) {
        self.lock().remove(fd);
    }

    /// Forgets the registration of a descriptor that is no flow any more. The kernel keeps it, if the kernel has it.
    pub fn leave(&self, fd: c_int) {
        let mut mirror = self.lock();
        if mirror.aside(fd).left_out.is_none() {
            mirror.remove(fd);
        }
    }

    /// The registrations with this user data, with the events that the application has asked for.
    pub fn by_data(&self, data: u64) -> ByNumber {
        let mirror = self.lock();
        let asked = |(fd, r): (c_int, Registration)| {
            let events = mirror.aside(fd).asked.unwrap_or(r.events);
            (fd, Registration { events, ..r })
        };
        let low = data as u32 as c_int;
        if let Some(r) = mirror.registered.get(&low).filter(|r| r.data == data) {
            return smallvec![asked((low, *r))];
        }
        let all = mirror.registered.iter().map(|(fd, r)| (*fd, *r));
        all.filter(|(_, r)| r.data == data).map(asked).collect()
    }
}

impl Mirror {
    /// Forgets a registration.
    pub fn remove(&mut self, fd: c_int) -> Option<(Registration, Aside)> {
        let aside = self.asides.remove(&fd).unwrap_or_default();
        Some((self.registered.remove(&fd)?, aside))
    }

    pub fn aside(&self, fd: c_int) -> Aside {
        self.asides.get(&fd).copied().unwrap_or_default()
    }

    pub fn set_aside(&mut self, fd: c_int, aside: Aside) {
        if aside == Aside::default() {
            self.asides.remove(&fd);
        } else {
            self.asides.insert(fd, aside);
        }
    }

    /// Removes a registration from the kernel, and reads back whether an EPOLLONESHOT registration has fired. False if the kernel did
    /// not have it.
    fn take_out(&self, fd: c_int, r: &mut Registration, aside: &mut Aside) -> bool {
        if r.fires_once() {
            let now = self.kernel_events(fd).unwrap_or(r.events);
            aside.asked = asked(now, r.events, aside.asked);
            r.events = now;
        }
        r.attached = false;
        self.ctl(libc::EPOLL_CTL_DEL, fd, *r).is_ok()
    }

    /// A reported event was kept from the application: an EPOLLONESHOT or EPOLLET registration must fire again. `known` is the
    /// registration from before the event was examined. `present` says that the kernel is to have the registration now.
    pub fn rearm(&mut self, fd: c_int, known: Registration, present: bool) {
        let Some(mut r) = self.registered.get(&fd).copied() else {
            // The flow has become plain TCP meanwhile, so only the kernel has the registration ([`Instance::leave`]). If the application
            // has removed it, the kernel refuses this call.
            if known.stays_silent() {
                let _ = self.ctl(libc::EPOLL_CTL_MOD, fd, known);
            }
            return;
        };
        let mut aside = self.aside(fd);
        let asked = aside.asked.take();
        r.events = asked.unwrap_or(r.events);
        if r.attached && r.stays_silent() {
            let _ = self.ctl(libc::EPOLL_CTL_MOD, fd, r);
        } else if asked.is_some() && present {
            aside.left_out = None;
            r.attached = self.ctl(libc::EPOLL_CTL_ADD, fd, r).is_ok();
        }
        self.registered.insert(fd, r);
        self.set_aside(fd, aside);
    }

    /// `epoll_ctl`, by any number of the instance.
    fn ctl(&self, op: c_int, fd: c_int, r: Registration) -> Result<(), sys::Errno> {
        let e = epoll_event {
            events: r.events,
            u64: r.data,
        };
        let number = self.numbers.first().copied().unwrap_or(-1);
        sys::epoll_ctl(number, op, fd, &e)
    }

    /// The events for which the kernel would report `fd` now. A fired EPOLLONESHOT registration reports nothing until
    /// it is armed again, and a swap must not change that.
    fn kernel_events(&self, fd: c_int) -> Option<u32> {
        let all = registered(*self.numbers.first()?)?;
        all.iter().find(|r| r.fd == fd).map(|r| r.events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONCE: u32 = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;

    /// An instance, a ready socket that is registered with it as EPOLLONESHOT, and the other end of the socket.
    fn ready_once() -> (Instance, [c_int; 3]) {
        let [a, b] = sys::socketpair(libc::SOCK_STREAM).unwrap();
        // SAFETY: no memory is passed.
        let epfd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let instance = Instance::new(epfd);
        let event = epoll_event {
            events: ONCE,
            u64: 7,
        };
        let add = || sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, a, &event).map_or(-1, |()| 0);
        assert_eq!(
            instance.control(libc::EPOLL_CTL_ADD, a, &event, true, add),
            0
        );
        assert_eq!(sys::send(b, b"x", 0), Ok(1));
        (instance, [epfd, a, b])
    }

    /// The number of events that the kernel reports.
    fn events(epfd: c_int) -> c_int {
        let mut event = epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for one.
        unsafe { libc::epoll_wait(epfd, &mut event, 1, 0) }
    }

    #[test]
    fn a_oneshot_event_that_was_kept_back_fires_again_after_a_swap() {
        // Rearmed before the swap, while the file is away, after the swap, and (3) not at all.
        for kept_back in 0..4 {
            let (instance, [epfd, a, b]) = ready_once();
            assert_eq!(events(epfd), 1);
            let known = instance.by_data(7)[0].1;
            let rearm = |at, present| {
                if kept_back == at {
                    instance.lock().rearm(a, known, present);
                }
            };
            rearm(0, true);
            instance.detach(a);
            rearm(1, false);
            assert_eq!(events(epfd), 0, "{kept_back}");
            instance.attach(a);
            rearm(2, true);
            // No event if the first one was given to the application.
            assert_eq!(events(epfd), i32::from(kept_back < 3), "{kept_back}");
            [epfd, a, b].into_iter().for_each(sys::close);
        }
    }
}
