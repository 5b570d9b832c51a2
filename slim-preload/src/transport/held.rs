//! Whether the flow's numbers are still the flow's.
//!
//! A program can close a number where no hook sees it: by a system call of its own making, through io_uring, in a
//! vforked child. The number then goes to whatever the program opens next. Data calls trust the table, and what goes
//! wrong by that concerns a flow whose end nobody has noticed yet. All else (what answers in the kernel's place, what
//! puts something under a number, what is told to the peer) asks first whether the file under the number is the one
//! that was put there. If it is not, the application has closed it.

use super::unmanage;
use crate::flow::{Ctl, Flow, Mode};
use crate::{epoll, runtime, sys, table};
use libc::c_int;
use slim_sys::lock::Guard;
use std::sync::atomic::Ordering;

impl Flow {
    /// The control part, if the flow is still the one behind `fd`. A number that may have other things under it than
    /// the transport is looked at first.
    pub fn ctl_of(&'static self, fd: c_int) -> Option<Guard<'static, Ctl>> {
        let ctl = self.ctl();
        if !ctl.fds.contains(&fd) {
            return None;
        }
        match ctl.mode() {
            Mode::Open => Some(ctl),
            _ => self.looked_at(ctl).filter(|ctl| ctl.fds.contains(&fd)),
        }
    }

    /// The control part, if the file behind `fd` is the flow's.
    pub fn own_at(&'static self, fd: c_int) -> Option<Guard<'static, Ctl>> {
        self.own().filter(|ctl| ctl.fds.contains(&fd))
    }

    /// The control part, without the numbers that the application has closed; `None` if those were the last ones, and
    /// the flow is at its end.
    pub fn own(&'static self) -> Option<Guard<'static, Ctl>> {
        self.looked_at(self.ctl())
    }

    fn looked_at(&'static self, mut ctl: Guard<'static, Ctl>) -> Option<Guard<'static, Ctl>> {
        self.drop_lost(&mut ctl);
        if ctl.is_held() || ctl.mode() == Mode::Lingering {
            return Some(ctl);
        }
        epoll::drop_closed(self, &mut ctl);
        // The peer is to believe the kernel: how much was written to the connection before it was closed, is not known.
        let token = self.token();
        ctl.uncover(self);
        ctl.linger();
        ctl.lose();
        unmanage(self, ctl);
        sys::keep_errno(|| runtime::with_agent(|a| a.demote(token)));
        None
    }

    /// Forgets the numbers that have something else under them now.
    pub fn drop_lost(&self, ctl: &mut Ctl) {
        let whole = ctl.fds.iter().all(|fd| self.is_under(*fd));
        // A vforked child has what it likes under its numbers.
        if whole || !runtime::in_own_process() {
            return;
        }
        let mut lost = std::mem::take(&mut ctl.fds);
        ctl.fds
            .extend(lost.iter().copied().filter(|fd| self.is_under(*fd)));
        lost.retain(|fd| !ctl.fds.contains(fd));
        for fd in lost {
            table::release(fd, self);
            for e in &ctl.epolls {
                e.forget(fd);
            }
        }
    }

    /// Runs `set`, which may change whether calls on the flow's number `fd` wait, on the descriptor that has its status flags.
    pub fn set_mode(&'static self, fd: c_int, set: impl FnOnce(c_int) -> c_int) -> c_int {
        let Some(ctl) = self.ctl_of(fd) else {
            return set(fd);
        };
        self.set_never_waits(false);
        let r = set(ctl.flags_of(fd));
        let known =
            !self.forked.load(Ordering::SeqCst) && sys::keep_errno(|| ctl.is_nonblocking(fd));
        self.set_never_waits(known);
        r
    }
}
