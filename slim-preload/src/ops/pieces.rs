//! Writes that are split into pieces, and writes of which the kernel takes only a part.
//!
//! In one call the kernel copies everything that it has room for, perhaps megabytes, without processing acknowledgements
//! meanwhile. So it writes to ever more memory that is in no cache. And when SLIM makes its copy, the written bytes have left
//! the caches, too. With pieces the kernel frees the memory of one before it needs memory for the next.
//! `docs/design/large-writes.md` has the figures.

use super::buffers::Source;
use super::transmit::{AT_ONCE, Transmit};
use super::{Next, Way, broken, enter};
use crate::flow::{Flow, Mode};
use crate::sleep;
use crate::transport::{self, Fault};
use crate::{direct, sys};
use libc::c_int;
use slim_core::Cause;
use slim_stream::Inside;
use std::sync::atomic::Ordering;

/// A call that writes at least this much is split. Less, which the caches and the socket hold, is faster in one call.
const MUCH: usize = 3 << 20;
const PIECE: usize = 128 << 10;
/// After a call that wrote at least `MUCH`, this many calls are checked for their size.
const REMEMBERED: u8 = 8;
/// Flags that can be given with each piece. Some of the others take effect once in each call.
const ANY_NUMBER: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_MORE;

/// An error after a call that has sent some bytes: that call must not report it.
#[derive(Clone, Copy)]
struct LateError {
    errno: Option<sys::Errno>,
    /// The transport is dead.
    dead: bool,
    /// The transport is away.
    barred: bool,
}

impl LateError {
    /// Call inside the gate. The order of the checks matters, see `Receive::handle_answer`.
    fn of(flow: &Flow, fd: c_int, errno: Option<sys::Errno>) -> Self {
        Self {
            errno,
            dead: errno.is_some_and(|e| broken(fd, e)),
            barred: flow.stream.is_suspended(),
        }
    }

    fn is_full(self) -> bool {
        self.errno == Some(libc::EAGAIN) && !self.barred
    }

    /// Whether the rest can be sent, once there is room, or another transport. Call outside the gate. Suspends the flow if that is
    /// necessary; if the rest cannot be sent, the next call gets the error.
    fn is_transient(self, flow: &'static Flow, fd: c_int) -> bool {
        let Some(errno) = self.errno.filter(|_| !self.is_full()) else {
            return true;
        };
        if self.barred {
            transport::remember(flow, fd, errno);
            return true;
        }
        let fault = self
            .dead
            .then(|| transport::fault(flow, fd, Cause::Errno(errno)));
        if let Some(Fault::Plain) = fault {
            transport::set_pending_error(fd, errno);
        }
        matches!(fault, Some(Fault::Suspended))
    }
}

impl<S: Source> Transmit<S> {
    /// Makes the system call, in pieces if it is large. Gives the number of bytes taken in pieces, and the kernel's answer to the
    /// whole call or to the last piece. The caller has the sending half.
    pub(super) fn ask(
        &self,
        flow: &'static Flow,
        real: &impl Fn(c_int, c_int) -> isize,
    ) -> (usize, isize) {
        let splits = self.flags & !ANY_NUMBER == 0;
        let total = match splits && self.source.may_be_large(flow) {
            true => self.source.announced().unwrap_or(0),
            false => 0,
        };
        if total < MUCH {
            let left = flow.writes_much.load(Ordering::Relaxed);
            flow.writes_much
                .store(left.saturating_sub(1), Ordering::Relaxed);
            let whole = || direct::surely(|| real(self.fd, self.flags | AT_ONCE));
            return (0, sys::keep_errno(whole));
        }
        let (sent, errno) = self.push_on(0, libc::MSG_DONTWAIT);
        (sent, errno.map_or(0, |e| -(e as isize)))
    }

    /// After a call has sent `have` bytes, with `answer` as the kernel's last answer: leaves the gate, and sends the rest of a
    /// blocking call. Gives the number of bytes sent in all.
    pub(super) fn after(
        &self,
        flow: &'static Flow,
        inside: Inside,
        have: usize,
        answer: isize,
    ) -> isize {
        let total = self.source.total();
        if total >= MUCH {
            flow.writes_much.store(REMEMBERED, Ordering::Relaxed);
        }
        let errno = (answer < 0).then(|| direct::errno_in(answer));
        let trouble = LateError::of(flow, self.fd, errno);
        flow.leave_sending(inside);
        match have < total && trouble.is_transient(flow, self.fd) {
            true => self.rest(have),
            false => have as isize,
        }
    }

    /// Sends the rest of a blocking call of which the kernel took only a part. Waits for room, or for another
    /// transport.
    fn rest(&self, mut have: usize) -> isize {
        let short = |have: usize| have as isize;
        if self.flags & libc::MSG_DONTWAIT != 0 || sys::keep_errno(|| sys::is_nonblocking(self.fd))
        {
            return short(have);
        }
        while have < self.source.total() {
            match enter(self.fd) {
                // The transport's error is for the next call, because this one has sent some bytes.
                Way::In(flow) if sys::has_error(self.fd) => {
                    let barred = flow.stream.is_suspended();
                    flow.leave(Inside::Counted);
                    let cause = Cause::Errno(transport::TO_BE_ASKED);
                    if !barred && let Fault::Plain = transport::fault(flow, self.fd, cause) {
                        return short(have);
                    }
                }
                Way::In(flow) => {
                    flow.stream.lock_half();
                    let (sent, errno) = self.push_on(have, libc::MSG_DONTWAIT);
                    if sent > 0 {
                        self.account(flow, self.fd, have, sent);
                        have += sent;
                    }
                    let trouble = LateError::of(flow, self.fd, errno);
                    flow.leave_sending(Inside::Counted);
                    if !trouble.is_transient(flow, self.fd) {
                        return short(have);
                    }
                    // A signal or a time limit ends a call that has sent some bytes, with their number as result.
                    let limit = || super::timeout(self.fd, libc::SO_SNDTIMEO);
                    if trouble.is_full() && sleep::until_writable(self.fd, limit()).is_err() {
                        return short(have);
                    }
                }
                Way::Barred(flow) => {
                    let Some(ctl) = flow.ctl_of(self.fd) else {
                        return short(have);
                    };
                    match ctl.mode() {
                        Mode::Suspended => {
                            if let Next::Return(_) =
                                super::wait(flow, ctl, self.fd, false, libc::SO_SNDTIMEO)
                            {
                                return short(have);
                            }
                        }
                        // Never wait here until the stash is read: this thread itself may have to read it next.
                        _ => return short(have),
                    }
                }
                Way::Plain if sys::has_error(self.fd) => return short(have),
                // The flow has become plain TCP meanwhile, as it does when the peer has no SLIM.
                Way::Plain => {
                    let (sent, errno) = self.push_on(have, 0);
                    have += sent;
                    if sent == 0 || errno.is_some() {
                        return short(have);
                    }
                }
            }
        }
        short(have)
    }

    /// Sends from byte `from` on as much as the kernel takes at once, in pieces if it is large. Gives the number of bytes, and the
    /// error that ended it.
    fn push_on(&self, from: usize, flags: c_int) -> (usize, Option<sys::Errno>) {
        let total = self.source.total();
        let piece = if total < MUCH { total } else { PIECE };
        let (mut at, mut errno) = (from, None);
        while at < total && errno.is_none() {
            let to = total.min(at + piece);
            let flags = match to < total {
                true => self.flags & !libc::MSG_OOB | libc::MSG_MORE | flags,
                false => self.flags | flags,
            };
            let before = at;
            self.source.offer(before, to, |base, len| {
                // SAFETY: the application has asked for these bytes to be sent.
                let sent = unsafe { sys::send_from(self.fd, base, len, flags) };
                at += sent.unwrap_or(0);
                errno = sent.err();
                sent == Ok(len)
            });
            if at < to {
                break;
            }
        }
        (at - from, errno)
    }
}
