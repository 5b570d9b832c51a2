//! Registrations that no hook has seen: made through io_uring, or by raw system calls.
//!
//! The kernel lists the registrations of an instance (proc(5), fdinfo). The cost of reading the list grows with its length, so it
//! is read only if there is a reason: the process has a ring, or a non-blocking flow is in no mirror. After such a registration
//! was found, the list is read before every swap. And the number of a flow whose transport is away stays registered, with a
//! placeholder under it, because the program may change at any moment what it believes to be registered.

use super::{INSTANCES, instance};
use crate::flow::{Ctl, Flow};
use crate::mirror::kernel::{Registered, any_unseen, found_unseen, registered};
use crate::mirror::{Aside, ByNumber, Instance, Registration, asked};
use crate::table::{self, Entry};
use crate::{descriptors, rings, sys};
use libc::c_int;
use slim_sys::numbers::make;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Until this time, in microseconds from [`BEGUN`], the next search is not made.
static LOOK_AGAIN: AtomicU64 = AtomicU64::new(0);
static BEGUN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
/// After a search the next one is not made for this many times the search's duration.
const PART: u32 = 20;

/// Before the file under a flow's numbers changes, or the flow is suspended: updates the mirrors from the kernel.
pub fn read_back(flow: &Flow, ctl: &mut Ctl) {
    let unknown = || ctl.epolls.is_empty() && flow.never_waits() && is_registered(flow, ctl);
    if any_unseen() || unknown() {
        learn(flow, ctl);
    }
}

fn learn(flow: &Flow, ctl: &mut Ctl) {
    let all = INSTANCES.with(|all| all.clone());
    for instance in all {
        if instance.learn(flow, &ctl.fds) && !ctl.epolls.iter().any(|i| std::ptr::eq(*i, instance))
        {
            ctl.epolls.push(instance);
        }
    }
}

/// Whether the kernel has a registration of this flow that no mirror has. A search soon after the last one gives false.
#[cold]
fn is_registered(flow: &Flow, ctl: &Ctl) -> bool {
    let begun = BEGUN.get_or_init(Instant::now);
    let now = |ago: Instant| u64::try_from(ago.elapsed().as_micros()).unwrap_or(u64::MAX);
    if now(*begun) < LOOK_AGAIN.load(Ordering::Relaxed) {
        return false;
    }
    let looks = Instant::now();
    let found = sys::keep_errno(|| {
        find_instances();
        let all = INSTANCES.with(|all| all.clone());
        all.iter().any(|i| {
            let number = i.lock().numbers.first().copied();
            let all = number.and_then(registered).unwrap_or_default();
            all.iter()
                .any(|r| is_of(r, flow) && ctl.fds.contains(&r.fd))
        })
    });
    if found {
        found_unseen();
    }
    let pause = (looks.elapsed() * PART).max(Duration::from_millis(1));
    let until = now(*begun).saturating_add(pause.as_micros() as u64);
    LOOK_AGAIN.store(until, Ordering::Relaxed);
    found
}

/// Adds epoll instances that no hook has seen to the table.
fn find_instances() {
    for fd in make(descriptors::open_numbers) {
        if descriptors::is_internal(fd) || !matches!(table::entry(fd), Entry::None) {
            continue;
        }
        if sys::proc::links_to(format_args!("self/fd/{fd}"), c"anon_inode:[eventpoll]") {
            instance(fd);
        }
    }
}

/// Whether a registration is of the flow's present file.
fn is_of(r: &Registered, flow: &Flow) -> bool {
    flow.is_inode(r.inode)
}

impl From<&Registered> for Registration {
    fn from(r: &Registered) -> Self {
        Self {
            events: r.events,
            data: r.data,
            attached: true,
        }
    }
}

impl Instance {
    /// An event of `fd` was kept from the application, although it may concern the present transport: an EPOLLET or
    /// EPOLLONESHOT registration must fire again. Any other fires again by itself. `known` is the registration from before the event
    /// was examined. If registrations are changed unseen, the mirror may be out of date, and is updated first: it must not undo
    /// such a change.
    pub fn rearm(&self, flow: &Flow, ctl: &Ctl, fd: c_int, known: Registration) {
        // If the flow has become plain TCP meanwhile, `fd` is a plain descriptor, and `ctl` may already be another flow's.
        let present = !ctl.fds.contains(&fd) || ctl.is_registered();
        rings::swapping(|| {
            if any_unseen() {
                self.learn(flow, &[fd]);
            }
            self.lock().rearm(fd, known, present);
        });
    }

    /// Copies the kernel's registrations of these numbers of a flow into the mirror; true if there are any, or were.
    pub(super) fn learn(&self, flow: &Flow, fds: &[c_int]) -> bool {
        let mut mirror = self.lock();
        let Some(number) = mirror.numbers.first().copied() else {
            return false;
        };
        let Some(all) = registered(number) else {
            // The mirror may still be correct.
            return fds.iter().any(|fd| mirror.registered.contains_key(fd));
        };
        let mut known = false;
        for fd in fds {
            let now = all.iter().find(|r| r.fd == *fd && is_of(r, flow));
            let before = mirror.registered.get(fd).copied();
            match (now, before) {
                (Some(now), before) => {
                    // The registration may have been changed since it was copied.
                    mirror.registered.insert(*fd, now.into());
                    let aside = mirror.aside(*fd);
                    let was = before.map_or(now.events, |before| before.events);
                    let aside = Aside {
                        left_out: None,
                        asked: asked(now.events, was, aside.asked),
                        ..aside
                    };
                    mirror.set_aside(*fd, aside);
                    known = true;
                }
                (None, Some(before)) if before.attached => {
                    mirror.remove(*fd);
                }
                (None, before) => known |= before.is_some(),
            }
        }
        known
    }

    /// The registrations of flows that the kernel has with this user data, without those that are EPOLLONESHOT: when one has
    /// fired, the kernel has forgotten its events.
    pub fn by_data_unseen(&self, data: u64) -> ByNumber {
        let number = self.lock().numbers.first().copied();
        let all = number.and_then(registered).unwrap_or_default();
        let flows = all.iter().filter(|r| table::is_flow(r.fd));
        let registrations = flows.map(|r| (r.fd, Registration::from(r)));
        let wanted = |r: &Registration| r.data == data && !r.fires_once();
        registrations.filter(|(_, r)| wanted(r)).collect()
    }
}
