//! Writing to a flow.
//!
//! Budget of a small send: one table load, a mark to enter the gate and one to leave it (by another thread than the
//! flow's usual one two atomic read-modify-writes each, with the lock), a copy. No allocation, no system call of ours, no log. [`Transmit::run`] is that and nothing else;
//! whatever is out of the ordinary goes on in [`Transmit::go_on`].

use super::buffers::Source;
use super::{Next, Way, broken, demoting, enter, fail};
use crate::flow::{Flow, Mode, Then};
use crate::table;
use crate::transport::{self, Fault};
use crate::{direct, sys};
use libc::c_int;
use slim_core::Cause;
use slim_core::gate::Left;
use slim_core::replay::Replay;
use slim_stream::Inside;
use slim_stream::send_half::LARGE;
use std::time::Duration;

/// A call that does not wait, nor raise a signal.
pub(super) const AT_ONCE: c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
/// How long a call waits before it looks again under which number the transport is.
const MOMENT: Duration = Duration::from_millis(10);

/// How a call writes.
#[derive(Clone, Copy)]
pub struct Transmit<S> {
    /// The descriptor.
    pub fd: c_int,
    /// What it writes.
    pub source: S,
    /// The call's MSG_ flags.
    pub flags: c_int,
}

impl<S: Source> Transmit<S> {
    /// Runs the call: `plain` is the application's own call, for a descriptor that is no flow's; the others ask the
    /// kernel, on the descriptor and with the flags given, `real` through libc and `direct` past it.
    #[inline(always)]
    #[expect(
        clippy::redundant_closure,
        reason = "they are copies, so that the originals need not be in memory"
    )]
    pub fn run(
        self,
        plain: impl Fn() -> isize + Copy,
        direct: impl Fn(c_int, c_int) -> isize + Copy,
        real: impl Fn(c_int, c_int) -> isize + Copy,
    ) -> isize {
        let Some(flow) = table::flow(self.fd) else {
            return plain();
        };
        if self.flags & libc::MSG_OOB != 0 {
            return self
                .anew()
                .urgent(move || plain(), move |fd, flags| real(fd, flags));
        }
        if !direct::is_allowed() {
            return self
                .anew()
                .go_on(None, move || plain(), move |fd, flags| real(fd, flags));
        }
        match flow.pass_to_send(self.fd) {
            Ok(inside) => self.try_inside(flow, inside, plain, direct, real),
            Err(left) => self.anew().counted(
                flow,
                left,
                move || plain(),
                move |fd, flags| direct(fd, flags),
                move |fd, flags| real(fd, flags),
            ),
        }
    }

    /// A copy for what is not inlined, so that the original need not be in memory.
    #[inline(always)]
    fn anew(&self) -> Self {
        let Self { fd, source, flags } = *self;
        Self { fd, source, flags }
    }

    /// The usual way of a thread without a pass.
    #[inline(never)]
    fn counted(
        self,
        flow: &'static Flow,
        left: Left,
        plain: impl Fn() -> isize + Copy,
        direct: impl Fn(c_int, c_int) -> isize + Copy,
        real: impl Fn(c_int, c_int) -> isize + Copy,
    ) -> isize {
        flow.left(left);
        match flow.enter_to_send(self.fd) {
            Some(inside) => self.try_inside(flow, inside, plain, direct, real),
            None => self.go_on(None, plain, real),
        }
    }

    /// Asks the kernel, inside and with the sending half.
    #[inline(always)]
    #[expect(
        clippy::redundant_closure,
        reason = "they are copies, so that the originals need not be in memory"
    )]
    fn try_inside(
        self,
        flow: &'static Flow,
        inside: Inside,
        plain: impl Fn() -> isize + Copy,
        direct: impl Fn(c_int, c_int) -> isize + Copy,
        real: impl Fn(c_int, c_int) -> isize + Copy,
    ) -> isize {
        if self.source.may_be_large(flow) {
            return self.anew().go_on(
                Some((flow, inside, None)),
                move || plain(),
                move |fd, flags| real(fd, flags),
            );
        }
        let n = direct(self.fd, self.flags | AT_ONCE);
        if n <= 0 || n as usize != self.source.total() || n as usize >= LARGE {
            return self.anew().go_on(
                Some((flow, inside, Some(n))),
                move || plain(),
                move |fd, flags| real(fd, flags),
            );
        }
        // SAFETY: entered to send.
        let half = unsafe { flow.stream.half() };
        let copy = |_, replay: &mut Replay| self.source.copy_all(|bytes| replay.push(bytes));
        // A copy, so that the original need not be in memory.
        let fd = self.fd;
        half.account(n as usize, copy, move || flow.stream.unacked(fd));
        flow.leave_sending(inside);
        n
    }

    /// The whole of a call of which the usual way is no more than the beginning. `tried` is a flow that has been entered
    /// to send, how, and what the kernel then said if it was asked.
    #[cold]
    #[inline(never)]
    fn go_on(
        self,
        mut tried: Option<(&'static Flow, Inside, Option<isize>)>,
        plain: impl Fn() -> isize + Copy,
        real: impl Fn(c_int, c_int) -> isize + Copy,
    ) -> isize {
        let errno = sys::errno();
        loop {
            let attempt = || {
                direct::cancellation_point();
                self.attempt()
            };
            let next = match tried.take().map_or_else(attempt, Ok) {
                Ok((flow, inside, answer)) => {
                    let (done, mut n) = match answer {
                        Some(n) => (0, n),
                        None => self.ask(flow, &real),
                    };
                    if done == 0 && self.would_wait(n) {
                        // To wait there is the lock: a thread that is cancelled meanwhile is found out.
                        let Inside::Counted = inside else {
                            flow.leave_sending(inside);
                            continue;
                        };
                        n = self.wait_for_room(flow, &real);
                    }
                    match done + n.max(0) as usize {
                        0 => self.unusual(flow, inside, n),
                        have => {
                            self.account(flow, self.fd, 0, have);
                            Next::Return(self.after(flow, inside, have, n))
                        }
                    }
                }
                Err(Way::Plain) => {
                    // It may have been waited for that before.
                    sys::set_errno(errno);
                    return plain();
                }
                Err(Way::In(flow)) => {
                    flow.leave(Inside::Counted);
                    if !table::is_still(self.fd, flow) {
                        continue;
                    }
                    return fail(libc::EAGAIN);
                }
                Err(Way::Barred(flow)) => self.barred(flow, &real),
            };
            if let Next::Return(n) = next {
                if n >= 0 {
                    sys::set_errno(errno);
                }
                return n;
            }
        }
    }

    /// Sends an urgent byte. It is part of the stream, or not, as the reader likes, and where it was is known to the
    /// kernel only: a flow with one becomes plain TCP first.
    #[cold]
    #[inline(never)]
    fn urgent(
        self,
        plain: impl Fn() -> isize + Copy,
        real: impl Fn(c_int, c_int) -> isize + Copy,
    ) -> isize {
        loop {
            let next = match enter(self.fd) {
                Way::Plain => return plain(),
                Way::In(flow) => {
                    flow.leave(Inside::Counted);
                    sys::keep_errno(|| demoting::demote_for_urgent(flow, self.fd, self.flags));
                    Next::Again
                }
                Way::Barred(flow) => self.barred(flow, &real),
            };
            if let Next::Return(n) = next {
                return n;
            }
        }
    }

    /// Enters the flow and takes the send lock. Else how far that went: inside the gate means that the lock would have
    /// to be waited for.
    fn attempt(&self) -> Result<(&'static Flow, Inside, Option<isize>), Way> {
        match enter(self.fd) {
            Way::In(flow) if self.take_turn(flow) => Ok((flow, Inside::Counted, None)),
            way => Err(way),
        }
    }

    /// Takes the sending half; false when that would mean to wait for another thread's blocking send in a
    /// call that must not wait.
    fn take_turn(&self, flow: &'static Flow) -> bool {
        if flow.stream.try_take_half() {
            return true;
        }
        if self.flags & libc::MSG_DONTWAIT != 0 && !sys::keep_errno(|| sys::is_nonblocking(self.fd))
        {
            return flow.stream.try_take_half();
        }
        if flow.stream.waits_with_half() || flow.stream.is_sending_here() {
            // A handler in the middle of the thread's own call, of which nobody knows how much the kernel has taken.
            sys::keep_errno(|| demoting::demote_if_open(flow, self.fd));
            return false;
        }
        sys::keep_errno(|| flow.stream.lock_half());
        true
    }

    /// Whether this is a blocking call of which the kernel took nothing without waiting.
    fn would_wait(&self, answer: isize) -> bool {
        answer < 0
            && direct::errno_in(answer) == libc::EAGAIN
            && self.flags & libc::MSG_DONTWAIT == 0
            && !sys::is_nonblocking(self.fd)
    }

    /// A blocking call waits, with the lock held, so that threads write in turn.
    fn wait_for_room(&self, flow: &'static Flow, real: &impl Fn(c_int, c_int) -> isize) -> isize {
        flow.stream.holder_may_die(true);
        let n = flow.wait_inside(true, || real(self.fd, self.flags | libc::MSG_NOSIGNAL));
        flow.stream.holder_may_die(false);
        direct::answer(n)
    }

    /// Copies what the kernel took and has not seen acknowledged. The caller has the sending half.
    pub(super) fn account(&self, flow: &'static Flow, fd: c_int, from: usize, n: usize) {
        // SAFETY: all callers have it.
        let half = unsafe { flow.stream.half() };
        let copy = |at, replay: &mut Replay| {
            let push = |bytes: &[u8]| replay.push(bytes);
            self.source.copy(from + at, from + n, push);
        };
        half.account(n, copy, || flow.stream.unacked(fd));
    }

    /// After the kernel took nothing, and said why. Leaves the gate.
    fn unusual(&self, flow: &'static Flow, inside: Inside, n: isize) -> Next {
        let errno = direct::errno_in(n);
        // In this order, see `Receive::unusual`.
        let dead = n < 0 && broken(self.fd, errno);
        let barred = flow.stream.is_suspended();
        flow.leave_sending(inside);
        if n == 0 {
            return Next::Return(0);
        }
        if barred || super::is_lost(flow, self.fd, errno) {
            return Next::Again;
        }
        if flow.stream.local_final().is_some() {
            return Next::Return(self.refuse(libc::EPIPE));
        }
        if dead && let Fault::Suspended = transport::fault(flow, self.fd, Cause::Errno(errno)) {
            return Next::Again;
        }
        Next::Return(self.refuse(errno))
    }

    /// Gives an errno, with the signal that belongs to it.
    fn refuse(&self, errno: c_int) -> isize {
        if errno == libc::EPIPE && self.flags & libc::MSG_NOSIGNAL == 0 {
            sys::raise_sigpipe();
        }
        fail(errno)
    }

    /// The transport is away, or waits behind stashed bytes.
    fn barred(&self, flow: &'static Flow, real: &impl Fn(c_int, c_int) -> isize) -> Next {
        let Some(ctl) = flow.ctl_of(self.fd) else {
            return Next::Again;
        };
        if !flow.stream.is_barred() {
            return Next::Again;
        }
        if let Some(errno) = self.source.flaw() {
            return Next::Return(fail(errno));
        }
        let given_up = !matches!(
            ctl.mode(),
            Mode::Suspended | Mode::Stashed { then: Then::Open }
        );
        if !given_up && flow.stream.local_final().is_some() {
            return Next::Return(self.refuse(libc::EPIPE));
        }
        let dontwait = self.flags & libc::MSG_DONTWAIT != 0;
        let half_open = ctl.half_open();
        let fd = match (ctl.mode(), half_open.or(ctl.transport())) {
            (Mode::Stashed { then: Then::Open }, Some(fd)) => {
                if self.flags & libc::MSG_OOB != 0 && !ctl.is_plain() {
                    drop(ctl);
                    sys::keep_errno(|| demoting::demote_if_open(flow, self.fd));
                    return Next::Again;
                }
                fd
            }
            (Mode::Suspended, Some(fd)) if half_open.is_some() => fd,
            (Mode::Stashed { then: Then::Over }, _) => {
                // The kernel says what becomes of it, and nothing of it is worth a copy.
                let n = real(self.fd, self.flags | libc::MSG_NOSIGNAL);
                return Next::Return(if n < 0 { self.refuse(sys::errno()) } else { n });
            }
            (Mode::Dead(_) | Mode::Stashed { .. }, _) => {
                return transport::take_pending_error(flow, ctl)
                    .map_or(Next::Again, |e| Next::Return(self.refuse(e)));
            }
            _ => return super::wait(flow, ctl, self.fd, dontwait, libc::SO_SNDTIMEO),
        };
        // A transport is there, but its number still shows the stash, or nothing while the end of the peer's stream is
        // looked into. Never wait with the control lock held: the reader of the stash needs it, and the agent.
        if half_open.is_none() {
            flow.stream.lock_half();
        } else if !flow.stream.try_lock_half() {
            // A call that was inside before waits for room.
            if dontwait || ctl.is_nonblocking(self.fd) {
                return Next::Return(fail(libc::EAGAIN));
            }
            let seen = flow.stream.signal();
            drop(ctl);
            let _ = flow.stream.wait(seen, Some(MOMENT));
            return Next::Again;
        }
        let n = real(fd, self.flags | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        let errno = sys::errno();
        if n > 0 {
            self.account(flow, fd, 0, n as usize);
        }
        flow.stream.unlock_half();
        if n > 0 {
            drop(ctl);
            flow.mark_dirty();
            return Next::Return(n);
        }
        if n < 0 && errno == libc::EAGAIN && half_open.is_some() {
            return super::wait(flow, ctl, self.fd, dontwait, libc::SO_SNDTIMEO);
        }
        let wait = errno == libc::EAGAIN && !dontwait && !ctl.is_nonblocking(self.fd);
        if n == 0 || wait {
            drop(ctl);
            if n == 0 {
                return Next::Return(0);
            }
            // Looked at again after a moment, because the transport may leave this number meanwhile.
            sys::poll(fd, libc::POLLOUT, Some(MOMENT));
            return Next::Again;
        }
        if broken(fd, errno) {
            transport::lost_while_barred(flow, ctl, errno);
            return Next::Again;
        }
        Next::Return(self.refuse(errno))
    }
}
