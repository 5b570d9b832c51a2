//! A flow: what data calls and control share.
//!
//! Data calls are inside of the stream until they have counted, and none waits there, so that the descriptor they use is the
//! present transport's. All else lies under the lock of [`FlowCtl`], which is never held over a call that waits.

use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use slim_agent::{Agent, FlowIo, Heard};
use slim_core::replay::Replay;
use slim_core::{Cause, FinHow, FlowToken, Role, Verdict};
use slim_stream::{Inside, ReceiveHalf, SendHalf, Stream};
use slim_sys::{Errno, KeepAlive, OwnFd, SignalsBlocked};

use super::posts::Posts;
use crate::error::TransferError;
use crate::event::{FlowChange, FlowStats, StreamState};
use crate::hub::{Hub, Member, Update, bits, next_id};
use crate::socket;

/// One end of a flow.
pub(crate) struct FlowCore {
    pub(super) hub: Arc<Hub>,
    pub(super) token: FlowToken,
    role: Role,
    remote: SocketAddr,
    pub(super) stream: Stream,
    /// The transport, for who is inside.
    pub(super) fd: AtomicI32,
    /// There are bytes in the stash. It changes only while nobody is inside, or by who takes them.
    pub(super) stashed: AtomicBool,
    connecting: AtomicBool,
    pub(super) plain: AtomicBool,
    pub(super) live: AtomicBool,
    closed: AtomicBool,
    /// A send found no room, or none was tried yet: that there is room again is told.
    pub(super) blocked: AtomicBool,
    /// What has changed, in [`bits`].
    news: AtomicU32,
    pub(super) sent: AtomicU64,
    received: AtomicU64,
    /// Something is posted that the kernel has not taken: other sends wait for it.
    pub(super) queued: AtomicBool,
    pub(super) posts: Mutex<Posts>,
    ctl: Mutex<FlowCtl>,
}

/// The part of a flow that changes with its transport.
pub(super) struct FlowCtl {
    /// Shared with threads that wait for it, so that its number stays its own.
    pub(super) sock: Option<Arc<OwnFd>>,
    pub(super) receiving: ReceiveHalf,
    /// Our end of the first connection.
    pub(super) local: Option<SocketAddr>,
    /// What was met on the transport, which says it once; and whether the agent has heard it.
    pub(super) fault: Option<(Cause, bool)>,
    /// An error that another call met, when the flow was suspended for the end of the peer's stream.
    pub(super) taken: Option<Errno>,
    /// Given up; the verdict counts when everything has been read that the transport had.
    pub(super) given_up: Option<Verdict>,
    pub(super) verdict: Option<Verdict>,
    /// The agent knows the flow.
    pub(super) known: bool,
    pub(super) closed: bool,
    /// Closed, and counted as lingering.
    pub(super) lingers: bool,
    /// An end of the stream was passed on before anybody could be asked about it.
    pub(super) end_shown: bool,
    /// Of an accepted connection: since when it stands, and the kernel's number of it.
    pub(super) accepted: Option<(Instant, Option<u64>)>,
    /// As it was before the kernel was asked about the peer.
    pub(super) asking: Option<KeepAlive>,
    pub(super) suspended: Option<Instant>,
    /// The suspension has been told.
    pub(super) told: bool,
    pub(super) resumes: u64,
    pub(super) replayed: u64,
    pub(super) away: Duration,
}

impl FlowCore {
    /// With its first transport, which need not stand yet.
    pub(super) fn create(
        hub: &Arc<Hub>,
        fd: OwnFd,
        role: Role,
        remote: SocketAddr,
    ) -> Result<Arc<Self>, Errno> {
        let (id, fd) = (next_id(), Arc::new(fd));
        let accepted = (role == Role::Acceptor).then(|| {
            let age = slim_sys::age_of_accepted(fd.raw()).unwrap_or_default();
            let now = Instant::now();
            let since = now.checked_sub(age).unwrap_or(now);
            (since, slim_sys::cookie(fd.raw()))
        });
        let core = Arc::new(Self {
            hub: hub.clone(),
            token: FlowToken(id),
            role,
            remote,
            stream: Stream::new(),
            fd: AtomicI32::new(fd.raw()),
            stashed: AtomicBool::new(false),
            connecting: AtomicBool::new(role == Role::Connector),
            plain: AtomicBool::new(false),
            live: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            blocked: AtomicBool::new(true),
            news: AtomicU32::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            queued: AtomicBool::new(false),
            posts: Mutex::default(),
            ctl: Mutex::new(FlowCtl {
                sock: Some(fd.clone()),
                receiving: ReceiveHalf::new(role == Role::Connector),
                local: None,
                fault: None,
                taken: None,
                given_up: None,
                verdict: None,
                known: false,
                closed: false,
                lingers: false,
                end_shown: false,
                accepted,
                asking: None,
                suspended: None,
                told: false,
                resumes: 0,
                replayed: 0,
                away: Duration::ZERO,
            }),
        });
        let weak: Weak<Self> = Arc::downgrade(&core);
        hub.add(id, weak, true);
        hub.watch_flow(&fd, id)?;
        Ok(core)
    }

    pub(super) fn id(&self) -> u64 {
        self.token.0
    }

    pub(super) fn agent(&self) -> &Agent {
        &self.hub.agent
    }

    pub(super) fn ctl(&self) -> MutexGuard<'_, FlowCtl> {
        self.ctl.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn remote(&self) -> SocketAddr {
        self.remote
    }

    pub(super) fn first_local(&self) -> Option<SocketAddr> {
        self.ctl().local
    }

    pub(super) fn present_ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        let ctl = self.ctl();
        let sock = ctl.sock.as_ref().filter(|_| !self.stream.is_barred())?;
        socket::ends(sock)
    }

    pub(super) fn state(self: &Arc<Self>) -> StreamState {
        self.look_at_connecting();
        let ctl = self.ctl();
        match ctl.verdict {
            _ if ctl.closed => StreamState::Closed,
            Some(Verdict::Errno(errno)) => StreamState::Failed(Some(errno)),
            Some(Verdict::Eof) => StreamState::Failed(None),
            None if !ctl.known => StreamState::Connecting,
            None if self.stream.is_barred() => StreamState::Suspended,
            None if self.plain.load(Ordering::Acquire) => StreamState::Plain,
            None if self.live.load(Ordering::Acquire) => StreamState::Protected,
            None => StreamState::Negotiating,
        }
    }

    pub(super) fn counters(&self) -> FlowStats {
        let ctl = self.ctl();
        let now = ctl
            .suspended
            .map_or(Duration::ZERO, |since| since.elapsed());
        FlowStats {
            sent: self.sent.load(Ordering::Relaxed),
            received: self.received.load(Ordering::Relaxed),
            resumes: ctl.resumes,
            replayed: ctl.replayed,
            suspended: ctl.away + now,
        }
    }

    /// Something has changed that the program is to hear of.
    pub(super) fn note(&self, what: u32) {
        self.note_and(what, true);
        self.stream.wake();
    }

    pub(super) fn note_and(&self, what: u32, wake: bool) {
        let before = self.news.fetch_or(what, Ordering::AcqRel);
        if before == 0 {
            self.hub.change(self.id(), wake);
        }
    }

    /// The first connection may stand by now, or have failed.
    pub(super) fn look_at_connecting(self: &Arc<Self>) {
        if !self.connecting.load(Ordering::Acquire) {
            return;
        }
        let mut ctl = self.ctl();
        let Some(fd) = ctl.sock.as_ref().map(|sock| sock.raw()) else {
            return;
        };
        if slim_sys::ready(fd, libc::POLLOUT) == 0 || !self.connecting.load(Ordering::Acquire) {
            return;
        }
        match socket::error(fd) {
            None => {
                drop(ctl);
                self.begin();
            }
            Some(errno) => {
                ctl.verdict = Some(Verdict::Errno(errno));
                self.stream.bar();
                self.connecting.store(false, Ordering::Release);
                self.unwatch(&mut ctl);
                drop(ctl);
                self.hub.failed();
                self.note(bits::CHANGED | bits::READABLE | bits::WRITABLE | bits::ENDED);
            }
        }
    }

    /// The first connection stands: the agent negotiates.
    pub(super) fn begin(self: &Arc<Self>) {
        let mut ctl = self.ctl();
        let local = ctl.sock.as_ref().and_then(|sock| socket::local(sock));
        let Some(local) = local.filter(|_| !ctl.known && !ctl.closed) else {
            return;
        };
        ctl.local = Some(local);
        ctl.known = true;
        self.stream.renew();
        self.stream.begin();
        let io: Arc<dyn FlowIo> = self.clone();
        self.agent()
            .open(self.token, io, self.role, local, self.remote);
        self.connecting.store(false, Ordering::Release);
        drop(ctl);
        self.hub.tell(self.id(), FlowChange::Connected);
        self.note(bits::CHANGED | bits::READABLE | bits::WRITABLE);
    }

    /// Sends what the kernel takes.
    pub(super) fn send(self: &Arc<Self>, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        let first = self.try_send(data);
        if first != Err(TransferError::WouldBlock) {
            return first;
        }
        // Room that there is from now on is told; what has come in between is found.
        self.blocked.store(true, Ordering::SeqCst);
        self.try_send(data)
    }

    fn try_send(self: &Arc<Self>, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        if self.queued.load(Ordering::SeqCst) {
            return Err(self.refuses_posts().unwrap_or(TransferError::WouldBlock));
        }
        loop {
            if !self.enter()? {
                return self.outside(|verdict| match verdict {
                    Verdict::Errno(errno) => Err(TransferError::Lost(errno)),
                    Verdict::Eof => Err(TransferError::ShutDown),
                });
            }
            let fd = self.fd.load(Ordering::Relaxed);
            let sent = self.send_inside(fd, data);
            let again = match sent {
                Err(TransferError::Lost(errno)) => self.fault(Cause::Errno(errno)),
                _ => false,
            };
            self.leave();
            if !again {
                return sent;
            }
        }
    }

    fn send_inside(&self, fd: RawFd, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        let sent = self.with_half(|half| {
            // Looked at with the half: the end is where the last send was.
            if self.stream.local_final().is_some() {
                return Err(TransferError::ShutDown);
            }
            let n = socket::send(fd, data).map_err(refused)?;
            if !self.plain.load(Ordering::Acquire) {
                let copy = |from, replay: &mut Replay| push_from(data, from, n, replay);
                half.account(n, copy, || self.stream.unacked(fd));
            }
            // In the order of the stream: posts are told by it how far they got.
            self.sent.fetch_add(n as u64, Ordering::Relaxed);
            Ok(n)
        })?;
        if !self.plain.load(Ordering::Relaxed) {
            self.stream.mark_dirty(|| self.agent().dirty(self.token));
        }
        Ok(sent)
    }

    /// Receives what is there.
    pub(super) fn recv(
        self: &Arc<Self>,
        into: &mut [IoSliceMut<'_>],
    ) -> Result<usize, TransferError> {
        let room = into.iter().any(|piece| !piece.is_empty());
        let received = self.try_recv(into, room);
        if let Ok(n) = received {
            self.received.fetch_add(n as u64, Ordering::Relaxed);
        }
        received
    }

    fn try_recv(
        self: &Arc<Self>,
        into: &mut [IoSliceMut<'_>],
        room: bool,
    ) -> Result<usize, TransferError> {
        loop {
            let inside = self.enter()?;
            if self.stashed.load(Ordering::Acquire) {
                let n = self.take_stashed(into);
                if inside {
                    self.leave();
                }
                if n > 0 || !room {
                    return Ok(n);
                }
                continue;
            }
            if !inside {
                return self.outside(|verdict| match verdict {
                    Verdict::Errno(errno) => Err(TransferError::Lost(errno)),
                    Verdict::Eof => Ok(0),
                });
            }
            let fd = self.fd.load(Ordering::Relaxed);
            let got = socket::recv(fd, into).map_err(refused);
            let again = match got {
                Ok(0) if room => self.end_of_stream(),
                Ok(n) => {
                    self.stream.count(&Inside::Counted, n);
                    false
                }
                Err(TransferError::Lost(errno)) => self.fault(Cause::Errno(errno)),
                Err(_) => false,
            };
            self.leave();
            if !again {
                return got;
            }
        }
    }

    /// Whether the caller is inside now; `leave` afterwards.
    pub(super) fn enter(self: &Arc<Self>) -> Result<bool, TransferError> {
        if self.connecting.load(Ordering::Acquire) {
            self.look_at_connecting();
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(TransferError::Closed);
        }
        Ok(!self.connecting.load(Ordering::Acquire) && self.stream.enter())
    }

    pub(super) fn leave(&self) {
        if self.stream.leave(Inside::Counted).last_and_barred {
            self.conclude(&mut self.ctl());
        }
    }

    /// What a call is told while nobody gets inside.
    fn outside<T>(
        &self,
        of: impl FnOnce(Verdict) -> Result<T, TransferError>,
    ) -> Result<T, TransferError> {
        match self.ctl().verdict {
            Some(verdict) => of(verdict),
            None => Err(TransferError::WouldBlock),
        }
    }

    fn take_stashed(&self, into: &mut [IoSliceMut<'_>]) -> usize {
        let mut ctl = self.ctl();
        let stash = &mut ctl.receiving.stash;
        let n = into.iter_mut().map(|piece| stash.read(piece)).sum();
        self.stashed.store(!stash.is_empty(), Ordering::Release);
        n
    }

    /// A call that is inside has met the end of the transport. Whether it is to look again: else that is the end of the stream.
    fn end_of_stream(&self) -> bool {
        let received = self.stream.received();
        if self.plain.load(Ordering::Acquire) || self.stream.ends_at(received) {
            return false;
        }
        if !self.live.load(Ordering::Acquire) && !self.hear() {
            // There is nobody yet who could be asked about it.
            self.ctl().end_shown = true;
            return false;
        }
        self.fault(Cause::Eof { received })
    }

    /// Whether the peer of an accepted flow has said that it has SLIM; that wakes nobody where it was said by OPEN.
    fn hear(&self) -> bool {
        let ctl = self.ctl();
        let local = ctl.local.filter(|_| !ctl.receiving.has_moved());
        let (Some(local), Role::Acceptor) = (local, self.role) else {
            return false;
        };
        drop(ctl);
        let _signals = SignalsBlocked::new();
        self.agent().heard(local, self.remote) != Heard::Nothing
    }

    /// A call that is inside has found the transport dead, or at an end that nobody has announced. Whether it is to look
    /// again: else its error is the program's.
    pub(super) fn fault(&self, cause: Cause) -> bool {
        let mut ctl = self.ctl();
        if self.plain.load(Ordering::Acquire) {
            if let (Cause::Errno(errno), None) = (cause, ctl.given_up) {
                // The kernel says it once.
                self.stream.bar();
                ctl.given_up = Some(Verdict::Errno(errno));
            }
            return false;
        }
        if !self.stream.is_barred() {
            self.stream.bar();
            ctl.fault = Some((cause, false));
            let errno = match cause {
                Cause::Errno(errno) => Some(errno),
                _ => None,
            };
            // Most unannounced ends are announced in the next moment.
            self.suspended(&mut ctl, errno, errno.is_some());
        } else if let (Cause::Errno(errno), Some((Cause::Eof { .. }, _))) = (cause, ctl.fault) {
            ctl.taken.get_or_insert(errno);
        }
        true
    }

    /// Ends our direction.
    pub(super) fn finish(self: &Arc<Self>) -> Result<(), TransferError> {
        self.look_at_connecting();
        match self.finish_after_posts() {
            true => Ok(()),
            false => self.finish_now(),
        }
    }

    /// Why nothing more can be posted, if that is so.
    pub(super) fn refuses_posts(&self) -> Option<TransferError> {
        let ctl = self.ctl();
        match ctl.verdict {
            _ if ctl.closed => Some(TransferError::Closed),
            Some(Verdict::Errno(errno)) => Some(TransferError::Lost(errno)),
            Some(Verdict::Eof) => Some(TransferError::ShutDown),
            None => None,
        }
    }

    /// Where our stream ends, unless it has ended before.
    pub(super) fn end_sending(&self) -> Option<u64> {
        self.with_half(|half| self.stream.end_at(half.sent()).then(|| half.sent()))
    }

    /// The kernel tells the peer's; a transport that is away is not touched, and the next one is shut when it is installed.
    pub(super) fn shut_transport(&self, ctl: &FlowCtl) {
        if let Some(sock) = ctl.sock.as_ref().filter(|_| !self.stream.is_barred()) {
            slim_sys::shutdown(sock.raw(), libc::SHUT_WR);
        }
    }

    /// Closes the flow, behind what is posted. With `reset`, or with bytes that were not received, what is under way is thrown
    /// away.
    pub(super) fn close(&self, reset: bool) {
        if reset || !self.close_after_posts() {
            self.close_now(reset);
        }
    }

    /// Likewise, whatever is posted.
    pub(super) fn close_now(&self, reset: bool) {
        let mut ctl = self.ctl();
        if std::mem::replace(&mut ctl.closed, true) {
            return;
        }
        self.closed.store(true, Ordering::Release);
        if let Some(since) = ctl.suspended.take() {
            ctl.away += since.elapsed();
        }
        if !ctl.known || ctl.verdict.is_some() {
            self.unwatch(&mut ctl);
            drop(ctl);
            return self.hub.remove(self.id(), Some(self.counters()));
        }
        let sock = ctl.sock.clone();
        let in_use = sock.as_ref().filter(|_| !self.stream.is_barred());
        let in_kernel = || in_use.is_some_and(|sock| slim_sys::readable(sock.raw()) > 0);
        let reset = reset || !ctl.receiving.stash.is_empty() || in_kernel();
        let end = self.end_sending().or_else(|| self.stream.local_final());
        let how = if reset { FinHow::Reset } else { FinHow::Close };
        if !self.plain.load(Ordering::Acquire) {
            // Before the kernel sends anything of it: who asks about an end must not be told that the flow is open.
            let end = end.unwrap_or_default();
            self.agent().finish(self.token, end, how);
        }
        if let Some(sock) = &sock {
            self.hub.unwatch(sock);
        }
        ctl.receiving.stash = slim_core::stash::Stash::new();
        if reset {
            if let Some(sock) = ctl.sock.take() {
                let at_once = slim_sys::AT_ONCE;
                slim_sys::set_option(sock.raw(), libc::SOL_SOCKET, libc::SO_LINGER, &at_once);
            }
            self.agent().gone(self.token);
        } else {
            self.shut_transport(&ctl);
            if !self.plain.load(Ordering::Acquire) {
                ctl.lingers = true;
                self.hub.lingers(true);
            }
        }
        drop(ctl);
        self.stream.wake();
        self.hub.remove(self.id(), Some(self.counters()));
    }

    /// The transport is not asked any more.
    pub(super) fn unwatch(&self, ctl: &mut FlowCtl) -> Option<Arc<OwnFd>> {
        let sock = ctl.sock.take()?;
        self.hub.unwatch(&sock);
        Some(sock)
    }

    /// Runs `f` with the sending half. Not in a signal's handler.
    pub(super) fn with_half<R>(&self, f: impl FnOnce(&mut SendHalf) -> R) -> R {
        self.stream.lock_half();
        // SAFETY: taken one line above, given back after `f` has given its reference back.
        let r = f(unsafe { self.stream.half() });
        self.stream.unlock_half();
        r
    }

    /// The kernel says that the transport is dead, or has ended, when no call has met that yet.
    fn look_at_end(self: &Arc<Self>) {
        if !matches!(self.enter(), Ok(true)) {
            return;
        }
        let fd = self.fd.load(Ordering::Relaxed);
        let look = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // What both ends have ended is over in good order. What is plain TCP is received before its error is told.
        let failed = !self.plain.load(Ordering::Acquire)
            && slim_sys::is_over(fd)
            && (self.stream.local_final().is_none() || slim_sys::has_error(fd));
        if failed {
            self.fault(Cause::Errno(socket::error(fd).unwrap_or(libc::ECONNRESET)));
            return self.leave();
        }
        match slim_sys::recv(fd, &mut [0], look) {
            Ok(0) => drop(self.end_of_stream()),
            Err(errno) if socket::is_end(errno) => drop(self.fault(Cause::Errno(errno))),
            _ => {}
        }
        self.leave();
    }
}

/// What a data call is told of an error of the kernel's.
pub(super) fn refused(errno: Errno) -> TransferError {
    match errno {
        libc::EAGAIN => TransferError::WouldBlock,
        errno if socket::is_end(errno) => TransferError::Lost(errno),
        errno => TransferError::Kernel(errno),
    }
}

/// Appends the bytes from the `from`th to the `to`th of all pieces.
fn push_from(data: &[IoSlice<'_>], from: usize, to: usize, replay: &mut Replay) {
    let mut at = 0;
    for piece in data {
        let (first, last) = (from.max(at) - at, to.min(at + piece.len()).max(at) - at);
        if first < last {
            replay.push(&piece[first..last]);
        }
        at += piece.len();
    }
}

/// [`Member`] is for the shared pointer: the agent gets one when the flow begins.
impl Member for FlowCore {
    fn ready(self: Arc<Self>, flags: EventFlags) {
        let connecting = self.connecting.load(Ordering::Acquire);
        self.look_at_connecting();
        if flags.intersects(EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP) {
            self.look_at_end();
        }
        let mut what = 0;
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::ERR | EventFlags::HUP)
        {
            what |= bits::READABLE;
        }
        if flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP)
            && self.blocked.swap(false, Ordering::SeqCst)
        {
            what |= bits::WRITABLE;
        }
        // What is away has nothing to offer, and tells when it is back.
        if what != 0 && !connecting && !self.stream.is_barred() {
            self.note_and(what, false);
        }
    }

    fn take_update(&self) -> Update {
        let news = self.news.swap(0, Ordering::AcqRel);
        Update {
            id: self.id(),
            acceptable: false,
            readable: news & bits::READABLE != 0,
            writable: news & bits::WRITABLE != 0,
            changed: news & bits::CHANGED != 0,
            ended: news & bits::ENDED != 0,
            completed: news & bits::COMPLETED != 0,
        }
    }

    fn close(&self) {
        self.close_now(false);
    }

    fn id(&self) -> u64 {
        self.token.0
    }

    fn is_posting(&self) -> bool {
        self.has_posts()
    }

    fn is_queued(&self) -> bool {
        self.queued.load(Ordering::SeqCst)
    }

    fn pump(self: Arc<Self>) -> bool {
        self.pump_posts(false)
    }

    fn stats(&self) -> Option<FlowStats> {
        Some(self.counters())
    }
}

impl Drop for FlowCore {
    fn drop(&mut self) {
        let mut ctl = self.ctl();
        if std::mem::take(&mut ctl.lingers) {
            self.hub.lingers(false);
        }
        self.unwatch(&mut ctl);
    }
}
