//! Mirrors of epoll registrations.
//!
//! The kernel keys a registration by file *and* number, so every swap of a transport loses it. The mirror
//! holds what the application registered; [`Instance::detach`] and [`Instance::attach`] frame each swap.

use crate::flow::{Ctl, Mode};
use crate::lock::{Guard, Undisturbed};
use crate::ops::sockets::waits_on;
use crate::table::{self, Entry};
use crate::{runtime, sys};
use libc::{c_int, epoll_event};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, Ordering};

/// One epoll instance. Never freed, only used again: the table points to it.
pub struct Instance {
    /// The number it is known by; -1 when closed.
    fd: AtomicI32,
    /// By descriptor number: what the application asked for.
    mirror: Undisturbed<BTreeMap<c_int, Registration>>,
}

#[derive(Clone, Copy)]
struct Registration {
    events: u32,
    data: u64,
    /// Whether the kernel has it now (not while a flow's transport is away).
    attached: bool,
    /// An event was taken from the kernel and not given to the application: EPOLLONESHOT is still armed.
    keep_armed: bool,
}

static INSTANCES: Undisturbed<Vec<&'static Instance>> = Undisturbed::new(Vec::new());

/// The instance behind an epoll descriptor, known from the first `epoll_ctl` on.
pub fn instance(epfd: c_int) -> Option<&'static Instance> {
    match table::entry(epfd) {
        Entry::Epoll(i) => Some(i),
        Entry::None => {
            let mut all = INSTANCES.lock();
            let reused = all.iter().find(|i| {
                i.fd.compare_exchange(-1, epfd, Ordering::SeqCst, Ordering::SeqCst)
                    .is_ok()
            });
            let instance = reused.copied().unwrap_or_else(|| {
                let new: &Instance = Box::leak(Box::new(Instance {
                    fd: AtomicI32::new(epfd),
                    mirror: Undisturbed::new(BTreeMap::new()),
                }));
                all.push(new);
                new
            });
            table::set_epoll(epfd, instance);
            Some(instance)
        }
        _ => None,
    }
}

/// A socket that becomes a flow may have been registered before.
pub fn adopt(fd: c_int, ctl: &mut Ctl) {
    let all = INSTANCES.lock();
    ctl.epolls
        .extend(all.iter().copied().filter(|i| i.lock().contains_key(&fd)));
}

/// A forked child waits on `epfd`, for the first time perhaps: listeners may have been registered before the fork.
pub fn inherited(epfd: c_int) {
    if !matches!(table::entry(epfd), Entry::None) || !runtime::in_own_process() {
        return;
    }
    let registered = registered(epfd);
    if !registered.is_empty() {
        instance(epfd);
        registered.iter().for_each(|(fd, _)| waits_on(*fd));
    }
}

/// What the kernel has registered: numbers, and what it would report of each (proc(5), fdinfo).
fn registered(epfd: c_int) -> Vec<(c_int, u32)> {
    let path = format!("/proc/self/fdinfo/{epfd}");
    let text = runtime::quietly(|| std::fs::read_to_string(path)).unwrap_or_default();
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next()? == "tfd:").then_some(())?;
        let fd = words.next()?.parse().ok()?;
        (words.next()? == "events:").then_some(())?;
        Some((fd, u32::from_str_radix(words.next()?, 16).ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// `epoll_ctl`; `event` is null or the application's.
pub fn control(
    epfd: c_int,
    op: c_int,
    fd: c_int,
    event: *const epoll_event,
    real: impl Fn() -> c_int,
) -> c_int {
    if !runtime::possible() || runtime::is_our_call() || !runtime::in_own_process() {
        return real();
    }
    waits_on(fd);
    let flow = match table::entry(fd) {
        Entry::Flow(f) => f.ctl_of(fd),
        _ => None,
    };
    let Some(instance) = instance(epfd) else {
        return real();
    };
    match flow {
        Some(mut ctl) => {
            let r = instance.control(op, fd, event, ctl.mode != Mode::Suspended, real);
            if r == 0 && !ctl.epolls.iter().any(|i| std::ptr::eq(*i, instance)) {
                ctl.epolls.push(instance);
            }
            r
        }
        None => instance.control(op, fd, event, true, real),
    }
}

impl Instance {
    /// The epoll descriptor is closed.
    pub fn closed(&self, fd: c_int) {
        // Duplicates of an epoll descriptor share the instance; the first number stands for it.
        if self.fd.load(Ordering::Relaxed) == fd {
            self.lock().clear();
            self.fd.store(-1, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> Guard<'_, BTreeMap<c_int, Registration>> {
        self.mirror.lock()
    }

    fn ctl(&self, op: c_int, fd: c_int, r: Registration) -> Result<(), sys::Errno> {
        let mut e = epoll_event {
            events: r.events,
            u64: r.data,
        };
        sys::epoll_ctl(self.fd.load(Ordering::Relaxed), op, fd, &raw mut e)
    }

    /// `epoll_ctl` on one descriptor. Where the kernel can see it (`present`) its answer counts; else the mirror
    /// answers as the kernel would.
    fn control(
        &self,
        op: c_int,
        fd: c_int,
        event: *const epoll_event,
        present: bool,
        real: impl Fn() -> c_int,
    ) -> c_int {
        let mut mirror = self.lock();
        let known = mirror.contains_key(&fd);
        let refused = match op {
            _ if present => {
                let r = real();
                if r != 0 {
                    return r;
                }
                None
            }
            libc::EPOLL_CTL_ADD if known => Some(libc::EEXIST),
            libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL if !known => Some(libc::ENOENT),
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD if event.is_null() => Some(libc::EFAULT),
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
            // SAFETY: the kernel has just read it; or, while it is not asked, the application says it is there.
            unsafe { event.as_ref() }.copied()
        };
        match event {
            Some(e) => {
                let r = Registration {
                    events: e.events,
                    data: e.u64,
                    attached: present,
                    keep_armed: false,
                };
                mirror.insert(fd, r);
            }
            None => {
                mirror.remove(&fd);
            }
        }
        0
    }

    /// Whether an event of `fd` is being kept from the application.
    pub fn keep_armed(&self, fd: c_int, keep: bool) {
        if let Some(r) = self.lock().get_mut(&fd) {
            r.keep_armed = keep;
        }
    }

    /// An event of `fd` was kept back from the application, though the transport that it spoke of may be the present
    /// one: an edge or a one-shot registration that fired must fire again.
    pub fn rearm(&self, fd: c_int) {
        let mirror = self.lock();
        if let Some(r) = mirror.get(&fd).filter(|r| r.attached) {
            let _ = self.ctl(libc::EPOLL_CTL_MOD, fd, *r);
        }
    }

    /// Before the file under `fd` is swapped away: takes the registration out of the kernel.
    pub fn detach(&self, fd: c_int) {
        let mut mirror = self.lock();
        let Some(r) = mirror.get_mut(&fd).filter(|r| r.attached) else {
            return;
        };
        if r.events & libc::EPOLLONESHOT as u32 != 0 && !std::mem::take(&mut r.keep_armed) {
            r.events = self.kernel_events(fd).unwrap_or(r.events);
        }
        r.attached = false;
        let r = *r;
        if self.ctl(libc::EPOLL_CTL_DEL, fd, r).is_err() {
            // Of an earlier file with this number, which took its registration along.
            mirror.remove(&fd);
        }
    }

    /// After another file came under `fd`: registers it again, which also re-arms edge triggers.
    pub fn attach(&self, fd: c_int) {
        let mut mirror = self.lock();
        let Some(r) = mirror.get_mut(&fd).filter(|r| !r.attached) else {
            return;
        };
        r.attached = true;
        let r = *r;
        let _ = self.ctl(libc::EPOLL_CTL_ADD, fd, r);
    }

    /// The descriptor is closed, or no flow any more (the kernel keeps its registration then).
    pub fn forget(&self, fd: c_int) {
        self.lock().remove(&fd);
    }

    /// Numbers registered with this user data.
    pub fn by_data(&self, data: u64) -> Vec<c_int> {
        let mirror = self.lock();
        let low = data as u32 as c_int;
        if mirror.get(&low).is_some_and(|r| r.data == data) {
            return vec![low];
        }
        mirror
            .iter()
            .filter(|(_, r)| r.data == data)
            .map(|(fd, _)| *fd)
            .collect()
    }

    /// What the kernel would report `fd` for right now: a fired EPOLLONESHOT registration reports nothing
    /// until it is armed again, and must stay so over a swap.
    fn kernel_events(&self, fd: c_int) -> Option<u32> {
        let all = registered(self.fd.load(Ordering::Relaxed));
        all.iter()
            .find(|(n, _)| *n == fd)
            .map(|(_, events)| *events)
    }
}
