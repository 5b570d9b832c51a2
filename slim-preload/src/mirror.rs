//! The mirror of one epoll instance: what the application has registered, and what of that the kernel has.
//!
//! The kernel keys a registration by file *and* number, so every swap of a transport loses it. [`Instance::detach`] and
//! [`Instance::attach`] frame each swap.

pub mod kernel;

use crate::sys;
use kernel::{any_unseen, registered};
use libc::{c_int, epoll_event};
use slim_sys::lock::{Guard, Undisturbed};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// One epoll instance. Never freed, only used again: the table points to it.
pub struct Instance(Undisturbed<Mirror>);

pub struct Mirror {
    /// The numbers of the instance: more than one after a `dup`, none when it is closed.
    pub numbers: SmallVec<[c_int; 2]>,
    /// By descriptor number: what the application asked for.
    pub registered: BTreeMap<c_int, Registration>,
    /// By descriptor number: what few registrations have besides.
    asides: BTreeMap<c_int, Aside>,
}

#[derive(Clone, Copy)]
pub struct Registration {
    pub events: u32,
    pub data: u64,
    /// Whether the kernel has it now (not while a flow's transport is away).
    pub attached: bool,
}

/// Idle flows are many, and each has a registration.
const _: () = assert!(size_of::<Registration>() <= 16);

/// What few registrations have.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Aside {
    /// The application's number, which it has closed: the registration hangs on a number of ours.
    pub closed: Option<c_int>,
    /// The file that it was not attached to, see [`Instance::attach`].
    pub left_out: Option<u64>,
    /// It fires once, and had when it was taken out of the kernel: what the application had asked for. The event may still
    /// be kept from it ([`Instance::rearm`]).
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

/// Whether a registration reports nothing until it is armed again.
fn has_fired(events: u32) -> bool {
    let how =
        (libc::EPOLLONESHOT | libc::EPOLLET | libc::EPOLLWAKEUP | libc::EPOLLEXCLUSIVE) as u32;
    events & libc::EPOLLONESHOT as u32 != 0 && events & !how == 0
}

/// What the application had asked for, if the kernel has the events `now`: that is over when they are armed, and else what
/// was `known` to be armed before, or asked for `already`.
pub fn asked(now: u32, known: u32, already: Option<u32>) -> Option<u32> {
    if !has_fired(now) {
        return None;
    }
    already.or((!has_fired(known)).then_some(known))
}

impl Registration {
    /// Whether it is not to be made again until it is armed: it fires once, and has. The kernel would report the end of the
    /// file, as it does not of a registration that has fired since it was made.
    fn stays_out(&self) -> bool {
        has_fired(self.events) && !any_unseen()
    }
}

impl Instance {
    pub fn new(fd: c_int) -> Self {
        let mut numbers = SmallVec::new();
        numbers.push(fd);
        Self(Undisturbed::new(Mirror {
            numbers,
            registered: BTreeMap::new(),
            asides: BTreeMap::new(),
        }))
    }

    /// Uses a closed instance again, under this number; false if it is not closed.
    pub fn take(&self, fd: c_int) -> bool {
        let mut mirror = self.lock();
        let free = mirror.numbers.is_empty();
        if free {
            mirror.numbers.push(fd);
        }
        free
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

    /// `epoll_ctl` on one descriptor. Where the kernel can see it (`present`) its answer counts; else the mirror
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
        // The kernel would read it first.
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
            // SAFETY: readable, as was just found out.
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
            // SAFETY: the kernel has just read it, or it was found to be readable.
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

    /// Before the file under `fd` is swapped away: takes the registration out of the kernel.
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
            // Of an earlier file with this number, which took its registration along.
            mirror.remove(fd);
        }
    }

    /// A registration goes from one number of a flow to another, under which the same file is; false if there is none.
    /// `closed` is the number by which the application made it, if it has closed that.
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

    /// Whether what is registered by our number `fd` was registered by `number`, which was closed then.
    pub fn was_closed(&self, fd: c_int, number: c_int) -> bool {
        self.lock().aside(fd).closed == Some(number)
    }

    /// After another file came under `fd`: registers it again, which also re-arms edge triggers.
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

    /// Takes a registration out of the kernel, if it has it.
    pub fn unregister(&self, fd: c_int) {
        if let Some(number) = self.lock().numbers.first() {
            let none = epoll_event { events: 0, u64: 0 };
            let _ = sys::epoll_ctl(*number, libc::EPOLL_CTL_DEL, fd, &none);
        }
    }

    /// The descriptor is closed.
    pub fn forget(&self, fd: c_int) {
        self.lock().remove(fd);
    }

    /// The descriptor is no flow any more: the kernel keeps its registration, if it has it.
    pub fn leave(&self, fd: c_int) {
        let mut mirror = self.lock();
        if mirror.aside(fd).left_out.is_none() {
            mirror.remove(fd);
        }
    }

    /// Numbers registered with this user data.
    pub fn by_data(&self, data: u64) -> SmallVec<[c_int; 4]> {
        let registered = &self.lock().registered;
        let low = data as u32 as c_int;
        if registered.get(&low).is_some_and(|r| r.data == data) {
            return smallvec![low];
        }
        registered
            .iter()
            .filter(|(_, r)| r.data == data)
            .map(|(fd, _)| *fd)
            .collect()
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

    /// Takes a registration out of the kernel, as far as it is one, and learns what is left of it.
    fn take_out(&self, fd: c_int, r: &mut Registration, aside: &mut Aside) -> bool {
        if r.events & libc::EPOLLONESHOT as u32 != 0 {
            let now = self.kernel_events(fd).unwrap_or(r.events);
            aside.asked = asked(now, r.events, aside.asked);
            r.events = now;
        }
        r.attached = false;
        self.ctl(libc::EPOLL_CTL_DEL, fd, *r).is_ok()
    }

    /// What was reported was kept back: what fires once, or at an edge, is to fire again. `present`: the kernel is to have it
    /// now.
    pub fn rearm(&mut self, fd: c_int, present: bool) {
        let Some(mut r) = self.registered.get(&fd).copied() else {
            return;
        };
        let mut aside = self.aside(fd);
        let asked = aside.asked.take();
        let fires_again = (libc::EPOLLET | libc::EPOLLONESHOT) as u32;
        r.events = asked.unwrap_or(r.events);
        if r.attached && r.events & fires_again != 0 {
            let _ = self.ctl(libc::EPOLL_CTL_MOD, fd, r);
        } else if asked.is_some() && present {
            aside.left_out = None;
            r.attached = self.ctl(libc::EPOLL_CTL_ADD, fd, r).is_ok();
        }
        self.registered.insert(fd, r);
        self.set_aside(fd, aside);
    }

    /// `epoll_ctl`, by any of the numbers.
    fn ctl(&self, op: c_int, fd: c_int, r: Registration) -> Result<(), sys::Errno> {
        let e = epoll_event {
            events: r.events,
            u64: r.data,
        };
        let number = self.numbers.first().copied().unwrap_or(-1);
        sys::epoll_ctl(number, op, fd, &e)
    }

    /// What the kernel would report `fd` for right now: a fired EPOLLONESHOT registration reports nothing
    /// until it is armed again, and must stay so over a swap.
    fn kernel_events(&self, fd: c_int) -> Option<u32> {
        let all = registered(*self.numbers.first()?)?;
        all.iter().find(|r| r.fd == fd).map(|r| r.events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONCE: u32 = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;

    /// An instance, a socket that is registered with it to fire once and is ready, and the other end.
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

    /// How many events the kernel has.
    fn events(epfd: c_int) -> c_int {
        let mut event = epoll_event { events: 0, u64: 0 };
        // SAFETY: there is room for one.
        unsafe { libc::epoll_wait(epfd, &mut event, 1, 0) }
    }

    #[test]
    fn what_fires_once_and_was_kept_back_fires_again_after_a_swap() {
        // Before the swap, while the file is away, and after it.
        for kept_back in 0..4 {
            let (instance, [epfd, a, b]) = ready_once();
            assert_eq!(events(epfd), 1);
            let rearm = |at, present| {
                if kept_back == at {
                    instance.lock().rearm(a, present);
                }
            };
            rearm(0, true);
            instance.detach(a);
            rearm(1, false);
            assert_eq!(events(epfd), 0, "{kept_back}");
            instance.attach(a);
            rearm(2, true);
            // Unless what was reported was given to the application.
            assert_eq!(events(epfd), i32::from(kept_back < 3), "{kept_back}");
            [epfd, a, b].into_iter().for_each(sys::close);
        }
    }
}
