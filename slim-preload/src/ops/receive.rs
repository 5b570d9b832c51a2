//! Reading from a flow.
//!
//! Budget of a small receive: one table load, a mark to enter the gate and one to leave it. (A thread other than the one that
//! sends on the flow needs an atomic read-modify-write for each mark, and one to count.) No allocation, no system call of
//! SLIM's own, no log. [`Receive::run`] does only that; all other cases go on in [`Receive::go_on`].

use super::buffers::Buffers;
use super::limit::Limit;
use super::{Next, Way, broken, demoting, enter, fail};
use crate::flow::{Ctl, Flow, Mode, Then};
use crate::kept_names;
use crate::table;
use crate::transport::{self, CtlGuard, Fault};
use crate::{direct, sys};
use libc::c_int;
use slim_core::Cause;
use slim_core::gate::Left;
use slim_stream::Inside;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Flags of a read that checks for data, without waiting and without consuming any.
const PROBE: c_int = libc::MSG_PEEK | libc::MSG_DONTWAIT;
/// Flags of reads that consume no bytes of the stream.
const ASIDE: c_int = libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE;
/// How long a call waits at a time for a transport that waits behind stashed bytes.
const SLICE: Duration = Duration::from_millis(10);

/// How a call reads.
#[derive(Clone, Copy)]
pub struct Receive {
    /// The descriptor.
    pub fd: c_int,
    /// Where the bytes go.
    pub buffers: Buffers,
    /// The call's MSG_ flags.
    pub flags: c_int,
}

impl Receive {
    fn has(&self, flag: c_int) -> bool {
        self.flags & flag != 0
    }

    /// Runs a call on `fd` with these MSG_ flags. Two closures make the application's whole system call: `real` through libc,
    /// `direct` past it ([`direct`]). `buffers` says where the bytes go, for cases that the kernel does not handle alone.
    #[inline(always)]
    #[expect(
        clippy::redundant_closure,
        reason = "they are copies, so that the originals need not be in memory"
    )]
    pub fn run(
        fd: c_int,
        flags: c_int,
        buffers: impl Fn() -> Buffers + Copy,
        direct: impl Fn() -> isize + Copy,
        real: impl Fn() -> isize + Copy,
    ) -> isize {
        let Some(flow) = table::flow(fd) else {
            return direct::plainly(direct, real);
        };
        let at_once = || flags & libc::MSG_DONTWAIT != 0 || flow.never_waits();
        if flags & (ASIDE | libc::MSG_WAITALL) != 0 || !direct::is_allowed_if(at_once) {
            return Self::anew(fd, flags, move || buffers(), move || real());
        }
        match flow.pass_to_receive(fd) {
            Ok(inside) => Self::try_inside((fd, flags), (flow, inside), buffers, direct, real),
            Err(left) => Self::counted(
                (fd, flags),
                (flow, left),
                move || buffers(),
                move || direct(),
                move || real(),
            ),
        }
    }

    /// The whole call. A function of its own, so that its arguments are in memory only where it is called.
    #[cold]
    #[inline(never)]
    fn anew(
        fd: c_int,
        flags: c_int,
        buffers: impl Fn() -> Buffers,
        real: impl Fn() -> isize,
    ) -> isize {
        let buffers = buffers();
        Self { fd, buffers, flags }.go_on(None, real)
    }

    /// The usual path of a thread without a pass.
    #[inline(never)]
    fn counted(
        (fd, flags): (c_int, c_int),
        (flow, left): (&'static Flow, Left),
        buffers: impl Fn() -> Buffers + Copy,
        direct: impl Fn() -> isize + Copy,
        real: impl Fn() -> isize + Copy,
    ) -> isize {
        flow.left(left);
        if let Some(inside) = flow.enter_to_receive(fd) {
            return Self::try_inside((fd, flags), (flow, inside), buffers, direct, real);
        }
        let buffers = buffers();
        Self { fd, buffers, flags }.go_on(None, real)
    }

    /// Makes the system call, inside the gate.
    #[inline(always)]
    #[expect(
        clippy::redundant_closure,
        reason = "they are copies, so that the originals need not be in memory"
    )]
    fn try_inside(
        (fd, flags): (c_int, c_int),
        (flow, inside): (&'static Flow, Inside),
        buffers: impl Fn() -> Buffers + Copy,
        direct: impl Fn() -> isize + Copy,
        real: impl Fn() -> isize + Copy,
    ) -> isize {
        let n = direct();
        if n > 0 {
            flow.stream.count(&inside, n as usize);
            flow.leave(inside);
            return n;
        }
        let buffers = buffers();
        Self { fd, buffers, flags }.go_on(Some((flow, inside, n)), move || real())
    }

    /// The whole call, in the cases that the usual path does not finish. `tried` is a flow that the usual path has entered,
    /// how it was entered, and the kernel's answer.
    #[cold]
    #[inline(never)]
    fn go_on(
        self,
        mut tried: Option<(&'static Flow, Inside, isize)>,
        real: impl Fn() -> isize,
    ) -> isize {
        let errno = sys::errno();
        loop {
            let way = || {
                direct::cancellation_point();
                enter(self.fd)
            };
            let next = match tried.take().map_or_else(|| Err(way()), Ok) {
                Ok((flow, inside, n)) => self.handle_answer(flow, inside, n),
                Err(Way::Plain) => {
                    // An earlier round may have waited, and changed errno.
                    sys::set_errno(errno);
                    return real();
                }
                Err(Way::In(flow)) => {
                    let n = if self.has(libc::MSG_DONTWAIT) || flow.never_waits() {
                        direct::surely(&real)
                    } else {
                        direct::answer(flow.wait_inside(false, &real))
                    };
                    self.handle_answer(flow, Inside::Counted, n)
                }
                Err(Way::Barred(flow)) => self.barred(flow),
            };
            if let Next::Return(n) = next {
                if n >= 0 {
                    sys::set_errno(errno);
                }
                return n;
            }
        }
    }

    /// Handles the kernel's answer, which is a negated errno when the call failed. Leaves the gate.
    fn handle_answer(self, flow: &'static Flow, inside: Inside, n: isize) -> Next {
        let errno = direct::errno_in(n);
        if n > 0 {
            if !self.has(ASIDE) {
                flow.stream.count(&inside, n as usize);
            }
            if self.has(libc::MSG_OOB) {
                // The peer sent an urgent byte, and this flow is not plain TCP: the peer has no SLIM, or its message has not come yet.
                flow.leave(inside);
                demoting::demote_if_open(flow, self.fd);
                return Next::Return(n);
            }
            let stopped = (n as usize) < self.buffers.len()
                && self.has(libc::MSG_WAITALL)
                && !self.has(libc::MSG_DONTWAIT)
                && !sys::is_nonblocking(self.fd);
            if !stopped {
                flow.leave(inside);
            } else if self.transport_stopped(flow, inside, None) {
                // A call that only peeks is repeated.
                return match self.has(libc::MSG_PEEK) {
                    true => Next::Again,
                    false => Next::Return(self.complete(n as usize)),
                };
            }
            return Next::Return(n);
        }
        let cause = if n == 0 {
            let at = flow.stream.received();
            let orderly = flow.stream.ends_at(at) || flow.read_shut.load(Ordering::Relaxed);
            if orderly || self.buffers.len() == 0 || self.has(libc::MSG_OOB) {
                flow.leave(inside);
                return Next::Return(0);
            }
            if flow.stream.is_suspended() {
                // The transport was shut down during the call, which is no end of the stream. Checked before the gate is left:
                // afterwards the flow may become plain TCP on another transport.
                flow.leave(inside);
                return Next::Again;
            }
            Cause::Eof { received: at }
        } else {
            // Order matters: first the transport, then the bar, then leaving the gate. Otherwise the transport that is checked
            // may not be the one of this call.
            let dead = broken(self.fd, errno);
            if flow.stream.is_suspended() {
                // The transport was shut down during the call, or the call met a placeholder.
                flow.leave(inside);
                transport::remember(flow, self.fd, errno);
                return Next::Again;
            }
            if !dead {
                flow.leave(inside);
                return match super::is_lost(flow, self.fd, errno) {
                    true => Next::Again,
                    false => Next::Return(fail(errno)),
                };
            }
            Cause::Errno(errno)
        };
        let asked = flow.file();
        flow.leave(inside);
        match transport::fault(flow, self.fd, cause) {
            Fault::Suspended => Next::Again,
            Fault::Plain if is_given_up(self.fd, asked) => Next::Again,
            Fault::Plain if n == 0 => Next::Return(0),
            Fault::Plain => Next::Return(fail(errno)),
        }
    }

    /// After a call with MSG_WAITALL gave less than was asked for (and `error`, if the kernel reported one): whether the
    /// transport was the reason, and not a signal or a time limit. Called inside the gate, where the transport of this call
    /// cannot be replaced. Leaves the gate.
    fn transport_stopped(self, flow: &'static Flow, inside: Inside, error: Option<c_int>) -> bool {
        let at = flow.stream.received();
        // The error is not taken from the kernel, because it may be for the next call.
        let asked = || match sys::has_error(self.fd) {
            true => Err(transport::TO_BE_ASKED),
            false => sys::recv(self.fd, &mut [0], PROBE),
        };
        let cause = match error.map_or_else(asked, Err) {
            Ok(0) if !flow.stream.ends_at(at) => Some(Cause::Eof { received: at }),
            Err(e) if broken(self.fd, e) => Some(Cause::Errno(e)),
            _ => None,
        };
        let barred = flow.stream.is_suspended();
        let asked = flow.file();
        flow.leave(inside);
        let Some(cause) = cause.filter(|_| !barred) else {
            return barred;
        };
        match transport::fault(flow, self.fd, cause) {
            Fault::Suspended => true,
            Fault::Plain if is_given_up(self.fd, asked) => true,
            Fault::Plain => {
                if let Some(errno) = error {
                    transport::set_pending_error(self.fd, errno);
                }
                false
            }
        }
    }

    /// Continues a call with MSG_WAITALL after the first `have` bytes, where the transport stopped it.
    fn complete(self, mut have: usize) -> isize {
        let want = self.buffers.len();
        while have < want {
            match enter(self.fd) {
                Way::Plain => break,
                Way::In(flow) => {
                    if sys::is_nonblocking(self.fd) {
                        flow.leave(Inside::Counted);
                        break;
                    }
                    let mut error = None;
                    let got = self.buffers.fill(have, |piece| {
                        let wait = || sys::recv(self.fd, piece, libc::MSG_WAITALL);
                        match flow.wait_inside(false, wait) {
                            Ok(n) => n,
                            Err(e) => {
                                error = Some(e);
                                0
                            }
                        }
                    });
                    flow.stream.count(&Inside::Counted, got);
                    have += got;
                    if have >= want {
                        flow.leave(Inside::Counted);
                    } else if !self.transport_stopped(flow, Inside::Counted, error) {
                        break;
                    }
                }
                Way::Barred(flow) => {
                    let Some(mut ctl) = flow.ctl_of(self.fd) else {
                        continue;
                    };
                    if !flow.stream.is_barred() {
                        continue;
                    }
                    let got = self
                        .buffers
                        .fill(have, |piece| ctl.receiving.stash.read(piece));
                    have += got;
                    match ctl.mode() {
                        Mode::Stashed { .. } => transport::after_stash(flow, ctl),
                        Mode::Suspended if got == 0 => {
                            let option = libc::SO_RCVTIMEO;
                            if let Next::Return(_) = super::wait(flow, ctl, self.fd, false, option)
                            {
                                break;
                            }
                        }
                        _ if got > 0 => {}
                        _ => break,
                    }
                }
            }
        }
        have as isize
    }

    /// How many bytes must be there before a call returns any: with MSG_PEEK and MSG_WAITALL all that it wants, otherwise
    /// SO_RCVLOWAT. A call with MSG_WAITALL that consumes bytes takes some, and then waits for the rest. 0 if enough are there.
    fn least(self, ctl: &Ctl) -> usize {
        let least = match self.has(libc::MSG_WAITALL) {
            _ if self.has(libc::MSG_DONTWAIT) => 0,
            true if self.has(libc::MSG_PEEK) => self.buffers.len(),
            true => 0,
            false => ctl.old().map_or(0, |old| {
                let least = sys::option::<c_int>(old, libc::SOL_SOCKET, libc::SO_RCVLOWAT);
                least.map_or(0, |n| n.max(0) as usize)
            }),
        };
        let least = least.min(self.buffers.len());
        let is_there = least <= ctl.receiving.stash.len() || ctl.is_nonblocking(self.fd);
        if is_there { 0 } else { least }
    }

    /// Waits until `least` bytes are stashed, or no more can be added to the stash, or the call's time is up. `None` if the
    /// flow must be looked at again.
    #[cold]
    fn wait_for_more(
        self,
        flow: &'static Flow,
        mut ctl: CtlGuard,
        least: usize,
    ) -> Option<CtlGuard> {
        let whole = ctl
            .old()
            .and_then(|old| super::timeout(old, libc::SO_RCVTIMEO));
        let mut limit = Limit::new(whole);
        limit.begin();
        loop {
            transport::stash_more(flow, &mut ctl, self.buffers.len());
            let left = limit.left();
            if ctl.receiving.stash.len() >= least || left == Some(Duration::ZERO) {
                return Some(ctl);
            }
            let seen = flow.stream.signal();
            let interrupted = match (ctl.mode(), ctl.transport()) {
                (Mode::Suspended, _) => {
                    drop(ctl);
                    flow.stream.wait(seen, left) == Err(libc::EINTR)
                }
                (Mode::Stashed { then: Then::Open }, Some(new)) if sys::has_error(new) => {
                    let errno = sys::option(new, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0);
                    let errno = if errno == 0 { libc::ECONNRESET } else { errno };
                    transport::lost_while_barred(flow, ctl, errno);
                    false
                }
                // The end of the stream: the next call handles it.
                (Mode::Stashed { then: Then::Open }, Some(new)) if sys::has_peer_fin(new) => {
                    return Some(ctl);
                }
                (Mode::Stashed { then: Then::Open }, Some(new)) => {
                    drop(ctl);
                    // Check again after a moment, because the transport may leave this number meanwhile.
                    let slice = left.map_or(SLICE, |left| left.min(SLICE));
                    sys::try_poll(new, libc::POLLIN, Some(slice)) == Err(libc::EINTR)
                }
                _ => return Some(ctl),
            };
            ctl = flow.ctl_of(self.fd).filter(|_| flow.stream.is_barred())?;
            if interrupted {
                return Some(ctl);
            }
        }
    }

    /// Handles a call while the gate is barred: reads from the stash, or waits.
    fn barred(self, flow: &'static Flow) -> Next {
        let Some(mut ctl) = flow.ctl_of(self.fd) else {
            return Next::Again;
        };
        if !flow.stream.is_barred() {
            return Next::Again;
        }
        if let Some(errno) = self.buffers.flaw() {
            return Next::Return(fail(errno));
        }
        if self.has(libc::MSG_ERRQUEUE) {
            return Next::Return(fail(libc::EAGAIN));
        }
        if self.has(libc::MSG_OOB) {
            // There is no urgent byte: a flow with one is plain TCP.
            return Next::Return(fail(libc::EINVAL));
        }
        if self.has(libc::MSG_PEEK) && ctl.mode() == Mode::Suspended {
            // More bytes may have arrived than can be seen before the next transport is installed, and the peer may know that.
            return self.wait(flow, ctl);
        }
        transport::stash_more(flow, &mut ctl, self.buffers.len());
        if !ctl.receiving.stash.is_empty() {
            let least = self.least(&ctl);
            if least > 0 {
                match self.wait_for_more(flow, ctl, least) {
                    Some(enough) => ctl = enough,
                    None => return Next::Again,
                }
            }
            let most = self.buffers.len().min(ctl.receiving.stash.len());
            if !self.has(libc::MSG_TRUNC) && !self.buffers.can_take(most) {
                return Next::Return(fail(libc::EFAULT));
            }
            let n = if self.has(libc::MSG_TRUNC) && !self.has(libc::MSG_PEEK) {
                // TCP discards the bytes and touches no buffer (tcp(7)).
                ctl.receiving.stash.consume(most);
                most
            } else if self.has(libc::MSG_PEEK) {
                let mut at = 0;
                self.buffers.fill(0, |piece| {
                    let n = ctl.receiving.stash.peek(at, piece);
                    at += n;
                    n
                })
            } else {
                self.buffers
                    .fill(0, |piece| ctl.receiving.stash.read(piece))
            };
            transport::after_stash(flow, ctl);
            if self.has(libc::MSG_WAITALL) && !self.has(libc::MSG_PEEK | libc::MSG_DONTWAIT) {
                return Next::Return(self.complete(n));
            }
            return Next::Return(n as isize);
        }
        match ctl.mode() {
            Mode::Dead(_) => transport::take_pending_error(flow, ctl)
                .map_or(Next::Again, |e| Next::Return(fail(e))),
            Mode::Stashed { .. } => {
                transport::after_stash(flow, ctl);
                Next::Again
            }
            _ if self.buffers.len() == 0 => Next::Return(0),
            _ => self.wait(flow, ctl),
        }
    }

    fn wait(self, flow: &'static Flow, ctl: CtlGuard) -> Next {
        let dontwait = self.has(libc::MSG_DONTWAIT);
        super::wait(flow, ctl, self.fd, dontwait, libc::SO_RCVTIMEO)
    }
}

/// Whether the flow was given up since a call used the file `asked` under its number `fd`. The file that is there now may hold
/// bytes that have not been read yet.
fn is_given_up(fd: c_int, asked: u64) -> bool {
    sys::keep_errno(|| kept_names::any() && kept_names::stands_in(fd, asked))
}

/// Whether the connection under `fd` has failed and is not resumed, so that the kernel still has its error.
pub fn has_failed(fd: c_int) -> bool {
    sys::keep_errno(|| match enter(fd) {
        Way::In(flow) => {
            let failed = sys::has_error(fd);
            flow.leave(Inside::Counted);
            let cause = Cause::Errno(transport::TO_BE_ASKED);
            failed && matches!(transport::fault(flow, fd, cause), Fault::Plain)
        }
        _ => false,
    })
}

/// A call that has received some messages has met an error. If the connection is over, the next call must report it.
pub fn set_pending_error(fd: c_int, errno: c_int) {
    let passing = [libc::EAGAIN, libc::EINTR, libc::EFAULT];
    if !passing.contains(&errno) && table::flow(fd).is_none() && sys::is_tcp(fd) {
        transport::set_pending_error(fd, errno);
    }
}
