//! Writing to a flow.
//!
//! Budget of a small send: one table load, a mark to enter the gate and one to leave it, a copy. (A thread other than the flow's
//! usual sender needs two atomic read-modify-writes for each mark, which includes the lock.) No allocation, no system call of
//! SLIM's own, no log. [`Transmit::run`] does only that; all other cases go on in [`Transmit::go_on`].

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

/// Flags of a call that neither blocks nor raises a signal.
pub(super) const AT_ONCE: c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
/// Flags of calls that make the flow plain TCP: the position of an urgent byte and the notices about sends that are not copied
/// belong to one connection.
const PLAIN_ONLY: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY;
/// How long a call waits before it checks again under which number the transport is.
const MOMENT: Duration = Duration::from_millis(10);

/// How a call writes.
#[derive(Clone, Copy)]
pub struct Transmit<S> {
    /// The descriptor.
    pub fd: c_int,
    /// The bytes.
    pub source: S,
    /// The call's MSG_ flags.
    pub flags: c_int,
}

impl<S: Source> Transmit<S> {
    /// Runs the call. `plain` is the application's own call, for a descriptor that is no flow's. The other two make the system
    /// call with the given descriptor and flags: `real` through libc, `direct` past it.
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
        if self.flags & PLAIN_ONLY != 0 {
            return self
                .anew()
                .plain_only(move || plain(), move |fd, flags| real(fd, flags));
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

    /// A copy for functions that are not inlined, so that the original need not be in memory.
    #[inline(always)]
    fn anew(&self) -> Self {
        let Self { fd, source, flags } = *self;
        Self { fd, source, flags }
    }

    /// The usual path of a thread without a pass.
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

    /// Makes the system call, inside the gate and with the sending half.
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

    /// The whole call, in the cases that the usual path does not finish. `tried` is a flow that the usual path has entered to send,
    /// how it was entered, and the kernel's answer if the system call was made.
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
                        // A call that blocks takes the lock instead of the pass, so that control detects a cancelled holder.
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
                    // An earlier round may have waited, and changed errno.
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

    /// Sends an urgent byte, or bytes that are not copied. The flow becomes plain TCP first. With an urgent byte, the reader decides
    /// whether it is part of the stream (SO_OOBINLINE), and only the kernel knows its position.
    #[cold]
    #[inline(never)]
    fn plain_only(
        self,
        plain: impl Fn() -> isize + Copy,
        real: impl Fn(c_int, c_int) -> isize + Copy,
    ) -> isize {
        loop {
            let next = match enter(self.fd) {
                Way::Plain => return plain(),
                Way::In(flow) => {
                    flow.leave(Inside::Counted);
                    let urgent = self.flags & libc::MSG_OOB != 0;
                    if !urgent && !sys::keep_errno(|| is_without_copies(self.fd)) {
                        return self.go_on(None, plain, real);
                    }
                    sys::keep_errno(|| {
                        // A connection that has died unnoticed is resumed first.
                        transport::notice(flow, self.fd);
                        match urgent {
                            true => demoting::demote_for_urgent(flow, self.fd, self.flags),
                            false => demoting::demote_if_open(flow, self.fd),
                        }
                    });
                    Next::Again
                }
                Way::Barred(flow) => self.barred(flow, &real),
            };
            if let Next::Return(n) = next {
                return n;
            }
        }
    }

    /// Enters the flow and takes the sending half. An error says how far it got: `Way::In` means that the call would have to
    /// wait for the sending half.
    fn attempt(&self) -> Result<(&'static Flow, Inside, Option<isize>), Way> {
        match enter(self.fd) {
            Way::In(flow) if self.take_half(flow) => Ok((flow, Inside::Counted, None)),
            way => Err(way),
        }
    }

    /// Takes the sending half. False if the call must not block, and would have to wait for another thread's blocking
    /// send.
    fn take_half(&self, flow: &'static Flow) -> bool {
        if flow.stream.try_take_half() {
            return true;
        }
        if self.flags & libc::MSG_DONTWAIT != 0 && !sys::keep_errno(|| sys::is_nonblocking(self.fd))
        {
            return flow.stream.try_take_half();
        }
        if flow.stream.waits_with_half() || flow.stream.is_sending_here() {
            // This is a handler that has interrupted its own thread's send: how much the kernel has taken is unknown.
            sys::keep_errno(|| demoting::demote_if_open(flow, self.fd));
            return false;
        }
        sys::keep_errno(|| flow.stream.lock_half());
        true
    }

    /// Whether this is a blocking call of which the kernel took nothing when it was made without blocking.
    fn would_wait(&self, answer: isize) -> bool {
        answer < 0
            && direct::errno_in(answer) == libc::EAGAIN
            && self.flags & libc::MSG_DONTWAIT == 0
            && !sys::is_nonblocking(self.fd)
    }

    /// A blocking call waits in the kernel, with the lock held, so that threads write one after the other.
    fn wait_for_room(&self, flow: &'static Flow, real: &impl Fn(c_int, c_int) -> isize) -> isize {
        flow.stream.holder_may_be_cancelled(true);
        let n = flow.wait_inside(true, || real(self.fd, self.flags | libc::MSG_NOSIGNAL));
        flow.stream.holder_may_be_cancelled(false);
        direct::answer(n)
    }

    /// Copies the bytes that the kernel took and that are not acknowledged. The caller has the sending half.
    pub(super) fn account(&self, flow: &'static Flow, fd: c_int, from: usize, n: usize) {
        // SAFETY: all callers have the sending half.
        let half = unsafe { flow.stream.half() };
        let copy = |at, replay: &mut Replay| {
            let push = |bytes: &[u8]| replay.push(bytes);
            self.source.copy(from + at, from + n, push);
        };
        half.account(n, copy, || flow.stream.unacked(fd));
    }

    /// Handles an answer by which the kernel took nothing. Leaves the gate.
    fn unusual(&self, flow: &'static Flow, inside: Inside, n: isize) -> Next {
        let errno = direct::errno_in(n);
        // Order matters, see `Receive::handle_answer`.
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

    /// Fails with an errno; with `EPIPE` raises SIGPIPE, too.
    fn refuse(&self, errno: c_int) -> isize {
        if errno == libc::EPIPE && self.flags & libc::MSG_NOSIGNAL == 0 {
            sys::raise_sigpipe();
        }
        fail(errno)
    }

    /// Handles a call while the gate is barred: the transport is away, or waits behind stashed bytes.
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
                if self.flags & PLAIN_ONLY != 0 && !ctl.is_plain() {
                    drop(ctl);
                    sys::keep_errno(|| demoting::demote_if_open(flow, self.fd));
                    return Next::Again;
                }
                fd
            }
            (Mode::Suspended, Some(fd)) if half_open.is_some() => fd,
            (Mode::Stashed { then: Then::Over }, _) => {
                // The flow is given up: the kernel answers, and the bytes need no copy.
                let n = real(self.fd, self.flags | libc::MSG_NOSIGNAL);
                return Next::Return(if n < 0 { self.refuse(sys::errno()) } else { n });
            }
            (Mode::Dead(_) | Mode::Stashed { .. }, _) => {
                return transport::take_pending_error(flow, ctl)
                    .map_or(Next::Again, |e| Next::Return(self.refuse(e)));
            }
            _ => return super::wait(flow, ctl, self.fd, dontwait, libc::SO_SNDTIMEO),
        };
        // There is a transport, but it is not under the number: the stand-in for the stash is, or a placeholder while the end of
        // the peer's stream is inquired into. Never wait with the control lock held: the reader of the stash and the agent
        // need it.
        if half_open.is_none() && flow.stream.waits_with_half() {
            // A handler has interrupted the thread that executes a program, which gets the flow as it is now.
            return Next::Return(fail(libc::EAGAIN));
        } else if half_open.is_none() {
            flow.stream.lock_half();
        } else if !flow.stream.try_lock_half() {
            // A call from before the suspension is still inside, and waits for room.
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
            // Check again after a moment, because the transport may leave this number meanwhile.
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

/// Whether MSG_ZEROCOPY has an effect on this socket. The kernel ignores it where SO_ZEROCOPY is off.
fn is_without_copies(fd: c_int) -> bool {
    sys::option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY).is_some_and(|on| on != 0)
}
