//! Registrations by a number that the application has closed, while it has the connection by other numbers.
//!
//! The kernel keeps such a registration for as long as the file is open, and nothing but the file's end takes it out: the
//! number by which it would have to be named is gone. So before the number is closed, the registration goes over to a
//! number of ours, which is one of the flow's from then on and takes part in every swap. The application cannot tell:
//! events carry the data that it gave, not the number. When it gets the closed number for the connection again, the
//! registration is named by that again.

use super::INSTANCES;
use crate::flow::{Ctl, Flow, is_closed};
use crate::mirror::Instance;
use crate::{rings, sys, table};
use libc::c_int;
use smallvec::SmallVec;

/// The application is about to close `fd`, and has the flow by other numbers. `fd` is none of the flow's any more.
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

/// The flow has got the number `fd`, perhaps once more.
pub fn take_back(flow: &Flow, ctl: &mut Ctl, fd: c_int) {
    // What is known by that number was another file, which was no flow: nobody told when it was closed.
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

/// The flow needs no numbers of ours any more. Where the application has others, the kernel keeps what is registered by ours.
pub fn drop_closed(flow: &Flow, ctl: &mut Ctl) {
    drop_each(flow, ctl, Instance::forget);
}

/// Likewise, and the kernel is to keep nothing: the application has closed its last number, and the file may stay open here.
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
