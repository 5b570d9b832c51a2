//! Whether the flow's numbers are still the flow's.
//!
//! A program can close a number where no hook sees it: by a raw system call, through io_uring, in a vforked child. The
//! kernel then gives the number to the next file that the program opens. Data calls trust the table; an error there affects
//! only a flow whose close has not been noticed yet. All other code (which answers in the kernel's place, puts a file under
//! a number, or tells the peer something) first checks that the file under the number is the one that was put there. If it
//! is not, the application has closed the number.

use super::flags::set_flags;
use super::unmanage;
use crate::flow::{Ctl, Flow, Mode};
use crate::{epoll, runtime, sys, table};
use libc::c_int;
use slim_sys::lock::Guard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long an exec of another thread is waited for. It ends this thread, unless it fails.
pub const OTHER_EXEC: Duration = Duration::from_secs(10);

impl Flow {
    /// The control part, if the flow is still the one behind `fd`. Unless the flow is open, the file under the number is
    /// checked first.
    pub fn ctl_of(&'static self, fd: c_int) -> Option<Guard<'static, Ctl>> {
        let ctl = self.ctl_after_exec();
        if !ctl.fds.contains(&fd) {
            return None;
        }
        match ctl.mode() {
            Mode::Open => Some(ctl),
            _ => self.checked(ctl).filter(|ctl| ctl.fds.contains(&fd)),
        }
    }

    /// The control part, when no other thread executes a program that gets the flow as it is now. That exec ends this thread, unless it
    /// fails.
    fn ctl_after_exec(&'static self) -> Guard<'static, Ctl> {
        let ctl = self.ctl();
        match ctl.handed_by {
            0 => ctl,
            _ => self.wait_for_exec(ctl),
        }
    }

    #[cold]
    fn wait_for_exec(&'static self, mut ctl: Guard<'static, Ctl>) -> Guard<'static, Ctl> {
        let begun = Instant::now();
        let is_others = |ctl: &Ctl| ctl.handed_by != 0 && ctl.handed_by != sys::tid();
        // A vforked child would wait for an exec of its parent's.
        while is_others(&ctl) && begun.elapsed() < OTHER_EXEC && runtime::in_own_process() {
            let seen = self.stream.signal();
            drop(ctl);
            let _ = sys::keep_errno(|| self.stream.wait(seen, Some(OTHER_EXEC)));
            ctl = self.ctl();
        }
        ctl
    }

    /// [`own_at`](Self::own_at), when no other thread executes a program that gets the flow as it is now.
    pub fn own_after_exec(&'static self, fd: c_int) -> Option<Guard<'static, Ctl>> {
        let ctl = self.checked(self.ctl_after_exec())?;
        ctl.fds.contains(&fd).then_some(ctl)
    }

    /// The control part, if the file under `fd` is the flow's.
    pub fn own_at(&'static self, fd: c_int) -> Option<Guard<'static, Ctl>> {
        self.own().filter(|ctl| ctl.fds.contains(&fd))
    }

    /// The control part, without the numbers that the application has closed. `None` if no number is left: then the flow
    /// has been ended.
    pub fn own(&'static self) -> Option<Guard<'static, Ctl>> {
        self.checked(self.ctl())
    }

    fn checked(&'static self, mut ctl: Guard<'static, Ctl>) -> Option<Guard<'static, Ctl>> {
        self.drop_lost(&mut ctl);
        if ctl.is_exclusive() || ctl.mode() == Mode::Lingering {
            return Some(ctl);
        }
        epoll::drop_closed(self, &mut ctl);
        // The peer must believe its kernel: the number of bytes written before the close is not known.
        let token = self.token();
        ctl.clear_suspension(self);
        ctl.linger();
        ctl.mark_lost();
        unmanage(self, ctl);
        sys::keep_errno(|| runtime::with_agent(|a| a.demote(token)));
        None
    }

    /// Forgets the numbers under which there is another file now.
    pub fn drop_lost(&self, ctl: &mut Ctl) {
        let whole = ctl.fds.iter().all(|fd| self.is_under(*fd));
        // A vforked child may have any file under its numbers.
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

    /// Runs `set`, which changes status flags of the flow's number `fd`, perhaps whether calls on it block.
    pub fn set_mode(&'static self, fd: c_int, set: impl Fn(c_int) -> c_int) -> c_int {
        let Some(mut ctl) = self.ctl_of(fd) else {
            return set(fd);
        };
        self.set_never_waits(false);
        let r = set_flags(&mut ctl, fd, set);
        let known =
            !self.forked.load(Ordering::SeqCst) && sys::keep_errno(|| ctl.is_nonblocking(fd));
        self.set_never_waits(known);
        r
    }
}
