//! Registrations by a number that the application has closed, while it has the connection by other numbers.
//!
//! The kernel keeps such a registration for as long as the file is open. It cannot be removed before, because the number that
//! identifies it is gone. So before the number is closed, the registration is moved to a number of ours. That number belongs to
//! the flow from then on, and takes part in every swap. The application cannot notice: events carry the data that it gave, not
//! the number. When the application gets the closed number for the same connection again, the registration is moved back.

use super::INSTANCES;
use crate::flow::{Ctl, Flow, is_closed};
use crate::mirror::Instance;
use crate::{rings, sys, table};
use libc::c_int;
use smallvec::SmallVec;

/// Moves the registrations of `fd` to a number of ours. The application is about to close `fd`, and has other numbers of the
/// flow. `fd` has been removed from the flow's numbers already.
pub fn keep_closed(flow: &'static Flow, ctl: &mut Ctl, fd: c_int) {
    if !ctl.epolls.iter().any(|e| e.has(fd)) {
        return;
    }
    let ours = sys::keep_errno(|| sys::dup_high(fd)).ok();
    let Some(ours) = ours.filter(|ours| table::set_flow(*ours, flow)) else {
        return ours.into_iter().for_each(sys::close);
    };
    sys::keep_errno(|| {
        rings::swapping(|| {
            for e in &ctl.epolls {
                e.rename(fd, ours, Some(fd));
            }
        });
    });
    ctl.fds.push(ours);
}

/// The flow has got the number `fd`, perhaps again: moves registrations that were made by that number back to it.
pub fn take_back(flow: &Flow, ctl: &mut Ctl, fd: c_int) {
    // An entry under this number belongs to an earlier file, which was no flow: its close was not reported to the mirrors.
    INSTANCES.with(|all| all.iter().for_each(|e| e.forget(fd)));
    let ours: SmallVec<[c_int; 4]> = ctl.fds.iter().copied().filter(|n| is_closed(*n)).collect();
    for number in ours {
        let mut left = false;
        rings::swapping(|| {
            for e in &ctl.epolls {
                if e.was_closed(number, fd) {
                    e.rename(number, fd, None);
                }
                left |= e.has(number);
            }
        });
        if !left {
            drop_number(flow, ctl, number);
        }
    }
}

/// Closes the flow's numbers that are ours: it needs them no more. If the file stays open, the kernel keeps the registrations by
/// these numbers.
pub fn drop_closed(flow: &Flow, ctl: &mut Ctl) {
    drop_each(flow, ctl, Instance::forget);
}

/// Likewise, but removes the registrations from the kernel: the application has closed its last number, and the file may stay
/// open in SLIM.
pub fn end_closed(flow: &Flow, ctl: &mut Ctl) {
    drop_each(flow, ctl, |e, number| {
        if e.has(number) {
            e.unregister(number);
        }
        e.forget(number);
    });
}

fn drop_each(flow: &Flow, ctl: &mut Ctl, leave: impl Fn(&Instance, c_int)) {
    while let Some(number) = ctl.fds.iter().copied().find(|n| is_closed(*n)) {
        for e in &ctl.epolls {
            leave(e, number);
        }
        drop_number(flow, ctl, number);
    }
}

fn drop_number(flow: &Flow, ctl: &mut Ctl, number: c_int) {
    table::release(number, flow);
    ctl.fds.retain(|n| *n != number);
    sys::close(number);
}
