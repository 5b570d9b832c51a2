//! The data path: what is read and written on a flow.
//!
//! Budget of a small send: one table load, one atomic read-modify-write to enter and one to leave, an
//! uncontended lock, a copy. No allocation, no system call, no log.

use super::{Next, Way, enter, fail, sleep};
use crate::flow::{Flow, Mode, SendHalf, TRIM_FLOOR, UNKNOWN};
use crate::sys;
use crate::transport::{self, Fault};
use libc::{c_int, iovec, msghdr};
use slim_core::Cause;
use std::sync::atomic::Ordering;

/// Sends of at least this many bytes ask the kernel first what is worth copying.
const LARGE: usize = 64 << 10;

/// Looks whether there is anything, without waiting and without taking it.
const PROBE: c_int = libc::MSG_PEEK | libc::MSG_DONTWAIT;
/// Reads that take nothing from the stream.
const ASIDE: c_int = libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE;

/// The application's buffers. Nothing of them is looked at before the kernel has found them good, for a bad
/// pointer is an `EFAULT`, not a crash.
#[derive(Clone, Copy)]
pub enum Buffers {
    /// As `readv(2)` has them.
    List(*const iovec, usize),
    /// As `recvmsg(2)` has them.
    Message(*const msghdr),
}

impl Buffers {
    /// # Safety
    /// `list` points to `count` iovecs, as `readv(2)` asks; the pointer and the memory that they name may be bad
    /// as long as the kernel then refuses the call.
    pub unsafe fn new(list: *const iovec, count: usize) -> Self {
        Self::List(list, count)
    }

    /// # Safety
    /// Likewise, as `recvmsg(2)` asks.
    pub unsafe fn message(message: *const msghdr) -> Self {
        Self::Message(message)
    }

    /// # Safety
    /// `one` stays where it is for as long as the buffers are used.
    pub unsafe fn one(one: &iovec) -> Self {
        Self::List(one, 1)
    }

    fn slices(&self) -> impl Iterator<Item = (*mut u8, usize)> + use<> {
        let (list, count) = match *self {
            Self::List(list, count) => (list, count),
            // SAFETY: the contract of `message`, and the kernel has accepted it.
            Self::Message(m) if !m.is_null() => unsafe {
                ((*m).msg_iov.cast_const(), (*m).msg_iovlen)
            },
            Self::Message(_) => (std::ptr::null(), 0),
        };
        let count = if list.is_null() { 0 } else { count };
        // SAFETY: the contract of `new`.
        (0..count)
            .map(move |i| unsafe { &*list.add(i) })
            .map(|v| (v.iov_base.cast(), v.iov_len))
    }

    /// All their bytes.
    pub fn len(&self) -> usize {
        self.slices().map(|(_, n)| n).sum()
    }

    /// Calls `f` with the pieces of bytes `[from, to)`.
    fn range(&self, from: usize, to: usize, mut f: impl FnMut(&[u8])) {
        let mut at = 0;
        for (base, len) in self.slices() {
            let (lo, hi) = (from.clamp(at, at + len), to.clamp(at, at + len));
            if lo < hi {
                // SAFETY: the kernel has just read these bytes from there.
                f(unsafe { std::slice::from_raw_parts(base.add(lo - at), hi - lo) });
            }
            at += len;
        }
    }

    /// Fills them from byte `from` on by calling `f` for each piece, until it fills less than offered.
    fn fill(&self, from: usize, mut f: impl FnMut(&mut [u8]) -> usize) -> usize {
        let (mut at, mut filled) = (0, 0);
        for (base, len) in self.slices() {
            let lo = from.clamp(at, at + len);
            if lo < at + len {
                // SAFETY: the application's buffer, that it asked to have filled.
                let piece =
                    unsafe { std::slice::from_raw_parts_mut(base.add(lo - at), at + len - lo) };
                let n = f(piece);
                filled += n;
                if n < piece.len() {
                    break;
                }
            }
            at += len;
        }
        filled
    }
}

/// [`enter`], with `None` for what is no flow's.
#[inline]
fn entered(fd: c_int) -> Option<Way> {
    match enter(fd) {
        Way::Plain => None,
        way => Some(way),
    }
}

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

    /// Runs the call: `real` asks the kernel for the whole of it.
    #[inline]
    pub fn run(self, real: impl Fn() -> isize) -> isize {
        let Some(first) = entered(self.fd) else {
            return real();
        };
        let errno = sys::errno();
        let (mut way, mut retried) = (first, false);
        loop {
            let next = match way {
                Way::Plain => return real(),
                Way::In(flow) => {
                    let n = real();
                    if n > 0 && !self.has(libc::MSG_WAITALL) {
                        if !self.has(ASIDE) {
                            flow.received.fetch_add(n as u64, Ordering::Relaxed);
                        }
                        flow.leave();
                        if retried {
                            sys::set_errno(errno);
                        }
                        return n;
                    }
                    self.unusual(flow, n)
                }
                Way::Barred(flow) => self.barred(flow),
            };
            if let Next::Return(n) = next {
                if n >= 0 {
                    sys::set_errno(errno);
                }
                return n;
            }
            (way, retried) = (enter(self.fd), true);
        }
    }

    /// After the kernel's answer to anything but a plain successful read. Leaves the gate.
    #[cold]
    #[inline(never)]
    fn unusual(self, flow: &'static Flow, n: isize) -> Next {
        let errno = sys::errno();
        if n > 0 {
            if !self.has(libc::MSG_PEEK) {
                flow.received.fetch_add(n as u64, Ordering::Relaxed);
            }
            flow.leave();
            return Next::Return(self.complete(n as usize, false));
        }
        let cause = if n == 0 {
            let at = flow.received.load(Ordering::SeqCst);
            let orderly = flow.peer_final.load(Ordering::Acquire) == at
                || flow.read_shut.load(Ordering::Relaxed);
            if orderly || self.buffers.len() == 0 || self.has(libc::MSG_OOB) {
                flow.leave();
                return Next::Return(0);
            }
            Cause::Eof { received: at }
        } else {
            // Asked before the gate, and that before leaving it: only so is it the transport of this call that
            // was looked at.
            let dead = broken(self.fd, errno);
            if flow.gate.is_barred() {
                // The transport was shut under the call, or it met a placeholder.
                flow.leave();
                return Next::Again;
            }
            if !dead {
                flow.leave();
                return Next::Return(fail(errno));
            }
            Cause::Errno(errno)
        };
        flow.leave();
        match transport::fault(flow, self.fd, cause) {
            Fault::Suspended => Next::Again,
            Fault::Plain if n == 0 => Next::Return(0),
            Fault::Plain => Next::Return(fail(errno)),
        }
    }

    /// MSG_WAITALL goes on where the kernel stopped, if it stopped for a broken transport (`broke`: it is known
    /// to have been broken, and nothing has been asked of the kernel since).
    fn complete(self, mut have: usize, mut broke: bool) -> isize {
        let want = self.buffers.len();
        let short = |have: usize| have as isize;
        if self.has(libc::MSG_PEEK | libc::MSG_DONTWAIT) {
            return short(have);
        }
        while have < want {
            match enter(self.fd) {
                Way::Plain => return short(have),
                Way::In(flow) => {
                    if sys::is_nonblocking(self.fd) {
                        flow.leave();
                        return short(have);
                    }
                    let mut stopped = None;
                    if broke {
                        let got = self.buffers.fill(have, |piece| {
                            match sys::recv(self.fd, piece, libc::MSG_WAITALL) {
                                Ok(n) => n,
                                Err(e) => {
                                    stopped = Some(e);
                                    0
                                }
                            }
                        });
                        flow.received.fetch_add(got as u64, Ordering::Relaxed);
                        have += got;
                    }
                    // Why did the kernel stop? A signal, a time limit, or the end of the transport.
                    let at = flow.received.load(Ordering::SeqCst);
                    let cause =
                        match stopped.map_or_else(|| sys::recv(self.fd, &mut [0], PROBE), Err) {
                            _ if have >= want => None,
                            Ok(0) if flow.peer_final.load(Ordering::Acquire) != at => {
                                Some(Cause::Eof { received: at })
                            }
                            Err(e) if broken(self.fd, e) => Some(Cause::Errno(e)),
                            _ => None,
                        };
                    let barred = flow.gate.is_barred();
                    flow.leave();
                    match cause {
                        _ if barred => {}
                        None => return short(have),
                        Some(cause) => {
                            if let Fault::Plain = transport::fault(flow, self.fd, cause) {
                                return short(have);
                            }
                        }
                    }
                    broke = true;
                }
                Way::Barred(flow) => {
                    broke = true;
                    let Some(mut ctl) = flow.ctl_of(self.fd) else {
                        return short(have);
                    };
                    let got = self.buffers.fill(have, |piece| ctl.stash.read(piece));
                    have += got;
                    if got > 0 {
                        transport::after_stash(flow, ctl);
                    } else if ctl.mode != Mode::Suspended
                        || matches!(
                            super::wait(flow, ctl, self.fd, false, libc::SO_RCVTIMEO),
                            Next::Return(_)
                        )
                    {
                        return short(have);
                    }
                }
            }
        }
        short(have)
    }

    /// The transport is away: from the stash, or later.
    #[cold]
    #[inline(never)]
    fn barred(self, flow: &'static Flow) -> Next {
        let Some(mut ctl) = flow.ctl_of(self.fd) else {
            return Next::Again;
        };
        if !flow.gate.is_barred() {
            return Next::Again;
        }
        if !ctl.stash.is_empty() && !self.has(libc::MSG_OOB) {
            let n = if self.has(libc::MSG_TRUNC) && !self.has(libc::MSG_PEEK) {
                // TCP throws the bytes away and touches no buffer (tcp(7)).
                let n = self.buffers.len().min(ctl.stash.len());
                ctl.stash.consume(n);
                n
            } else if self.has(libc::MSG_PEEK) {
                let mut copy = vec![0; self.buffers.len().min(ctl.stash.len())];
                let n = ctl.stash.peek(&mut copy);
                let mut at = 0;
                self.buffers.fill(0, |piece| {
                    let k = piece.len().min(n - at);
                    piece[..k].copy_from_slice(&copy[at..at + k]);
                    at += k;
                    k
                })
            } else {
                self.buffers.fill(0, |piece| ctl.stash.read(piece))
            };
            transport::after_stash(flow, ctl);
            if self.has(libc::MSG_WAITALL) && !self.has(libc::MSG_PEEK) {
                return Next::Return(self.complete(n, true));
            }
            return Next::Return(n as isize);
        }
        match ctl.mode {
            // The peer had ended its stream before it refused ours.
            Mode::Dead(libc::EPIPE) => Next::Return(0),
            Mode::Dead(_) => super::paid(flow, ctl).map_or(Next::Again, |e| Next::Return(fail(e))),
            Mode::Stashed { .. } => {
                transport::after_stash(flow, ctl);
                Next::Again
            }
            _ if self.buffers.len() == 0 => Next::Return(0),
            _ => super::wait(
                flow,
                ctl,
                self.fd,
                self.has(libc::MSG_DONTWAIT),
                libc::SO_RCVTIMEO,
            ),
        }
    }
}

/// Whether an errno means that the transport is dead: the kernel's own word for it, for several errnos can
/// also be passing troubles.
pub fn broken(fd: c_int, errno: c_int) -> bool {
    let passing = [
        libc::EAGAIN,
        libc::EINTR,
        libc::EFAULT,
        libc::EINVAL,
        libc::EBADF,
        libc::ENOTSOCK,
        libc::ENOMEM,
    ];
    !passing.contains(&errno) && sys::keep_errno(|| sys::tcp_state(fd)) == Some(sys::TCP_CLOSE)
}

/// Where a send's bytes are to be found again, to be copied.
pub trait Source {
    /// Calls `f` with bytes `[from, to)` of what was sent; false when they cannot be had.
    fn copy(&self, from: usize, to: usize, f: &mut dyn FnMut(&[u8])) -> bool;

    /// How many bytes a blocking call has to write before it returns; 0 when it may always return early.
    fn total(&self) -> usize {
        0
    }
}

impl Source for Buffers {
    #[inline]
    fn copy(&self, from: usize, to: usize, f: &mut dyn FnMut(&[u8])) -> bool {
        self.range(from, to, f);
        true
    }

    #[inline]
    fn total(&self) -> usize {
        self.len()
    }
}

/// How a call writes.
pub struct Transmit<S> {
    /// The descriptor.
    pub fd: c_int,
    /// What it writes.
    pub source: S,
    /// The call's MSG_ flags.
    pub flags: c_int,
}

impl<S: Source> Transmit<S> {
    /// Runs the call: `real(fd, flags)` asks the kernel, on the descriptor and with the flags given; `plain` is
    /// the application's own call, for a descriptor that is no flow's.
    #[inline]
    pub fn run(self, plain: impl Fn() -> isize, real: impl Fn(c_int, c_int) -> isize) -> isize {
        let Some(first) = entered(self.fd) else {
            return plain();
        };
        let errno = sys::errno();
        let (mut way, mut retried) = (first, false);
        loop {
            let next = match way {
                Way::Plain => return plain(),
                Way::In(flow) => {
                    if !self.take_turn(flow) {
                        flow.leave();
                        return fail(libc::EAGAIN);
                    }
                    // Without waiting first: most sends need not, and one that waits may be cancelled.
                    let mut n = real(
                        self.fd,
                        self.flags | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                    );
                    if n < 0 {
                        n = self.wait_for_room(flow, &real);
                    }
                    if n > 0 {
                        let whole = self.account(flow, self.fd, 0, n as usize);
                        flow.send.unlock();
                        flow.mark_dirty();
                        flow.leave();
                        if !whole {
                            self.lost(flow);
                        }
                        if retried {
                            sys::set_errno(errno);
                        }
                        if (n as usize) < self.source.total() {
                            let n = self.rest(n as usize);
                            sys::set_errno(errno);
                            return n;
                        }
                        return n;
                    }
                    flow.send.unlock();
                    self.unusual(flow, n)
                }
                Way::Barred(flow) => self.barred(flow, &real),
            };
            if let Next::Return(n) = next {
                if n >= 0 {
                    sys::set_errno(errno);
                }
                return n;
            }
            (way, retried) = (enter(self.fd), true);
        }
    }

    /// Takes the send lock; false when that would mean to wait for another thread's blocking send in a
    /// call that must not wait.
    #[inline]
    fn take_turn(&self, flow: &'static Flow) -> bool {
        flow.send.try_lock() || self.take_turn_slow(flow)
    }

    #[cold]
    #[inline(never)]
    fn take_turn_slow(&self, flow: &'static Flow) -> bool {
        if self.flags & libc::MSG_DONTWAIT != 0 && !sys::keep_errno(|| sys::is_nonblocking(self.fd))
        {
            return flow.send.try_lock();
        }
        sys::keep_errno(|| flow.send.lock());
        true
    }

    /// After the kernel took nothing without waiting: a blocking call waits now, with the lock held, so that
    /// threads write in turn.
    #[cold]
    #[inline(never)]
    fn wait_for_room(&self, flow: &'static Flow, real: &impl Fn(c_int, c_int) -> isize) -> isize {
        let full = sys::errno() == libc::EAGAIN;
        if !full
            || self.flags & libc::MSG_DONTWAIT != 0
            || sys::keep_errno(|| sys::is_nonblocking(self.fd))
        {
            return -1;
        }
        flow.send.may_die(true);
        let n = real(self.fd, self.flags | libc::MSG_NOSIGNAL);
        flow.send.may_die(false);
        n
    }

    /// Copies what the kernel took and has not seen acknowledged. The send lock is held.
    #[inline]
    fn account(&self, flow: &'static Flow, fd: c_int, from: usize, n: usize) -> bool {
        // SAFETY: the send lock is held, see `run`.
        let half = unsafe { flow.send.get() };
        if n >= LARGE {
            return self.account_large(flow, half, fd, from, n);
        }
        let whole = self
            .source
            .copy(from, from + n, &mut |bytes| half.replay.push(bytes));
        if half.replay.len() > half.trim_at {
            trim(flow, half, fd);
        }
        whole
    }

    #[cold]
    #[inline(never)]
    fn account_large(
        &self,
        flow: &'static Flow,
        half: &mut SendHalf,
        fd: c_int,
        from: usize,
        n: usize,
    ) -> bool {
        let unacked = unacked(flow, fd).unwrap_or(u64::MAX);
        let tail = (n as u64).min(unacked) as usize;
        if tail < n {
            half.replay.skip_to(half.replay.end() + (n - tail) as u64);
        }
        let whole = self.source.copy(from + n - tail, from + n, &mut |bytes| {
            half.replay.push(bytes)
        });
        if tail == n {
            half.replay.trim(half.replay.end().saturating_sub(unacked));
        }
        half.trim_at = half.replay.len() + (half.replay.len() / 2).max(TRIM_FLOOR);
        whole
    }

    /// What is left of a blocking call when the kernel took only some: it waits for room, or for another
    /// transport.
    #[cold]
    #[inline(never)]
    fn rest(&self, mut have: usize) -> isize {
        let short = |have: usize| have as isize;
        if self.flags & libc::MSG_DONTWAIT != 0 || sys::keep_errno(|| sys::is_nonblocking(self.fd))
        {
            return short(have);
        }
        while have < self.source.total() {
            match enter(self.fd) {
                Way::In(flow) => {
                    flow.send.lock();
                    let sent = self.push_on(have, libc::MSG_DONTWAIT);
                    if let Ok(n) = sent {
                        self.account(flow, self.fd, have, n);
                        have += n;
                    }
                    flow.send.unlock();
                    flow.mark_dirty();
                    let dead = sent.is_err_and(|e| broken(self.fd, e));
                    let barred = flow.gate.is_barred();
                    flow.leave();
                    match sent {
                        Ok(_) => {}
                        Err(_) if barred => {}
                        // A signal or a time limit ends a call that has sent something, with what it has sent.
                        Err(libc::EAGAIN) => {
                            if sleep::until_writable(
                                self.fd,
                                super::timeout(self.fd, libc::SO_SNDTIMEO),
                            )
                            .is_err()
                            {
                                return short(have);
                            }
                        }
                        Err(e) if dead => match transport::fault(flow, self.fd, Cause::Errno(e)) {
                            Fault::Suspended => {}
                            Fault::Plain => return short(have),
                        },
                        Err(_) => return short(have),
                    }
                }
                Way::Barred(flow) => {
                    let Some(ctl) = flow.ctl_of(self.fd) else {
                        return short(have);
                    };
                    match ctl.mode {
                        Mode::Suspended => {
                            if let Next::Return(_) =
                                super::wait(flow, ctl, self.fd, false, libc::SO_SNDTIMEO)
                            {
                                return short(have);
                            }
                        }
                        // Never wait here for the stash to be read: that may be this thread's own next step.
                        _ => return short(have),
                    }
                }
                // The flow has become plain TCP meanwhile, as it does when the peer has no SLIM.
                Way::Plain => match self.push_on(have, 0) {
                    Ok(n) if n > 0 => have += n,
                    _ => return short(have),
                },
            }
        }
        short(have)
    }

    /// Sends on from byte `from`, as much as the kernel takes at once.
    fn push_on(&self, from: usize, flags: c_int) -> Result<usize, sys::Errno> {
        let mut sent = Ok(0);
        self.source.copy(from, self.source.total(), &mut |piece| {
            if sent == Ok(0) {
                sent = sys::send(self.fd, piece, self.flags | flags);
            }
        });
        sent
    }

    /// The bytes sent cannot be had again (a file that shrank): the flow goes on as plain TCP.
    #[cold]
    #[inline(never)]
    fn lost(&self, flow: &'static Flow) {
        sys::keep_errno(|| super::descriptors::demote(flow, self.fd));
    }

    /// After the kernel took nothing. Leaves the gate.
    #[cold]
    #[inline(never)]
    fn unusual(&self, flow: &'static Flow, n: isize) -> Next {
        let errno = sys::errno();
        // In this order, see `Receive::unusual`.
        let dead = n < 0 && broken(self.fd, errno);
        let barred = flow.gate.is_barred();
        flow.leave();
        if n == 0 {
            return Next::Return(0);
        }
        if barred {
            return Next::Again;
        }
        if flow.local_final.load(Ordering::Acquire) != UNKNOWN {
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
    #[cold]
    #[inline(never)]
    fn barred(&self, flow: &'static Flow, real: &impl Fn(c_int, c_int) -> isize) -> Next {
        let Some(ctl) = flow.ctl_of(self.fd) else {
            return Next::Again;
        };
        if !flow.gate.is_barred() {
            return Next::Again;
        }
        if flow.local_final.load(Ordering::Acquire) != UNKNOWN {
            return Next::Return(self.refuse(libc::EPIPE));
        }
        let dontwait = self.flags & libc::MSG_DONTWAIT != 0;
        let fd = match (ctl.mode, ctl.transport) {
            (Mode::Dead(_), _) => {
                return super::paid(flow, ctl)
                    .map_or(Next::Again, |e| Next::Return(self.refuse(e)));
            }
            (
                Mode::Stashed {
                    then: crate::flow::Then::Open,
                },
                Some(fd),
            ) => fd,
            (
                Mode::Stashed {
                    then: crate::flow::Then::Eof | crate::flow::Then::Dead(_),
                },
                _,
            ) => {
                return Next::Return(self.refuse(libc::EPIPE));
            }
            _ => return super::wait(flow, ctl, self.fd, dontwait, libc::SO_SNDTIMEO),
        };
        // A transport is there, but its number still shows the stash. Never wait with the control lock held:
        // the reader of the stash needs it.
        flow.send.lock();
        let n = real(fd, self.flags | libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        let errno = sys::errno();
        let whole = n <= 0 || self.account(flow, fd, 0, n as usize);
        flow.send.unlock();
        if n > 0 {
            drop(ctl);
            flow.mark_dirty();
            if !whole {
                self.lost(flow);
            }
            return Next::Return(n);
        }
        let wait = errno == libc::EAGAIN && !dontwait && !transport::nonblocking(&ctl, self.fd);
        if n == 0 || wait {
            drop(ctl);
            if n == 0 {
                return Next::Return(0);
            }
            // Looked at again after a moment, because the transport may leave this number meanwhile.
            sys::wait_ready(fd, libc::POLLOUT, 10);
            return Next::Again;
        }
        if broken(fd, errno) {
            let mut ctl = ctl;
            let _ = transport::suspend(flow, &mut ctl);
            crate::runtime::with_agent(|a| a.fault(flow.token(), Cause::Errno(errno)));
            return Next::Again;
        }
        Next::Return(self.refuse(errno))
    }
}

/// Forgets what the peer's kernel has, and sets when to ask next. The send lock is held.
#[cold]
#[inline(never)]
fn trim(flow: &'static Flow, half: &mut SendHalf, fd: c_int) {
    if let Some(unacked) = unacked(flow, fd) {
        half.replay.trim(half.replay.end().saturating_sub(unacked));
    }
    half.trim_at = half.replay.len() + (half.replay.len() / 2).max(TRIM_FLOOR);
}

/// Bytes of the flow that the peer's kernel may not have; `None` when that cannot be told. The number may have
/// got a placeholder since our bytes were sent, of which the kernel would say that nothing is unacknowledged;
/// but the gate is barred before that.
fn unacked(flow: &'static Flow, fd: c_int) -> Option<u64> {
    let answer = sys::keep_errno(|| sys::unacked(fd)).ok();
    answer.filter(|_| !flow.gate.is_barred())
}
