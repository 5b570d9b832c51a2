//! The core of a flow: state that data calls and the agent's control calls share.
//!
//! A data call is *inside* the stream from before its system call until it has counted the bytes, and never waits there. So the
//! descriptor that it uses is the present transport's. All other state is under the lock of [`FlowCtl`], which is never held across a
//! blocking call.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use slim_agent::{Agent, FlowIo};
use slim_core::endpoint::Agreed;
use slim_core::{Cause, FlowToken, Role, Verdict};
use slim_stream::{Inside, ReceiveHalf, SendHalf, Stream};
use slim_sys::{Errno, KeepAlive, OwnFd};

use super::introducing::Introducing;
use super::posts::Posts;
use super::transport::{Carried, DataPath, FlowTransport};
use crate::error::{NotOpened, TransferError};
use crate::event::{FlowChange, FlowDelivery, FlowStats, StreamState};
use crate::hub::{Hub, bits, next_id};
use crate::socket;

/// One end of a flow.
pub(crate) struct FlowCore {
    pub(super) hub: Arc<Hub>,
    pub(super) token: FlowToken,
    pub(super) role: Role,
    /// The peer's end of the first connection. It changes while the doors of a blob are tried.
    remote: Mutex<SocketAddr>,
    pub(super) stream: Stream,
    /// The transport's socket; [`CARRIED`](super::transport::CARRIED) if it is a carrier. Valid only for calls inside the stream.
    pub(super) fd: AtomicI32,
    /// The transport, if it is a carrier. Valid only for calls inside the stream.
    pub(super) carrier: Mutex<Option<Arc<Carried>>>,
    /// The stash is not empty. Changed only while no call is inside, or by the call that takes bytes from the stash.
    pub(super) stashed: AtomicBool,
    pub(super) connecting: AtomicBool,
    pub(super) plain: AtomicBool,
    pub(super) live: AtomicBool,
    pub(super) closed: AtomicBool,
    /// A send found no room, or no send was tried yet: report when the flow becomes writable.
    pub(super) blocked: AtomicBool,
    /// Blocking calls in a row that have not found anything on a carrier before they slept.
    pub(super) vain_looks: AtomicU32,
    /// Changes that the program has not taken yet, in [`bits`].
    pub(super) news: AtomicU32,
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// The kernel has not taken all posts: other sends must wait.
    pub(super) queued: AtomicBool,
    pub(super) posts: Mutex<Posts>,
    ctl: Mutex<FlowCtl>,
}

/// The part of a flow that changes with its transport.
pub(super) struct FlowCtl {
    pub(super) transport: Option<FlowTransport>,
    pub(super) receiving: ReceiveHalf,
    /// Our end of the first connection.
    pub(super) local: Option<SocketAddr>,
    /// The fault that a call met on the transport, which reports it only once; and whether the agent has been told.
    pub(super) fault: Option<(Cause, bool)>,
    /// An error that another call met after an end of the stream had suspended the flow.
    pub(super) taken: Option<Errno>,
    /// The flow is given up. This verdict takes effect once the transport is drained.
    pub(super) given_up: Option<Verdict>,
    pub(super) verdict: Option<Verdict>,
    /// The agent knows the flow.
    pub(super) known: bool,
    /// For a flow opened by blob: the introduction on the first connection, until the flow is open.
    pub(super) introducing: Option<Box<Introducing>>,
    pub(super) closed: bool,
    /// Closed, and the transport is needed no more: it is dropped when no data call is inside.
    pub(super) parted: bool,
    /// Closed, and counted as lingering.
    pub(super) lingers: bool,
    /// The program was shown an end of the stream before the peer could be asked about it.
    pub(super) end_shown: bool,
    /// For an accepted connection: when it was established, and its number in the kernel (`SO_COOKIE`).
    pub(super) accepted: Option<(Instant, Option<NonZeroU64>)>,
    /// The keepalive settings to restore after the kernel has questioned the peer's kernel.
    pub(super) asking: Option<KeepAlive>,
    /// Limit of bytes that the kernel takes and has not sent yet, if the program has set one.
    pub(super) unsent_limit: Option<NonZeroU32>,
    pub(super) suspended: Option<Instant>,
    /// The program was told of the suspension.
    pub(super) told: bool,
    pub(super) resumes: u64,
    pub(super) replayed: u64,
    /// The part of `replayed` that belongs to the present attempt at a resume.
    pub(super) replaying: u64,
    pub(super) away: Duration,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FlowCtl {
    /// The transport's socket, if it has one.
    pub(super) fn socket(&self) -> Option<&Arc<OwnFd>> {
        self.transport.as_ref()?.socket()
    }
}

impl FlowCore {
    /// Makes a flow with its first transport, which may still be connecting.
    pub(super) fn create(
        hub: &Arc<Hub>,
        fd: OwnFd,
        role: Role,
        remote: SocketAddr,
    ) -> Result<Arc<Self>, NotOpened> {
        Self::make(hub, next_id(), fd, role, remote, None)
    }

    /// Makes the flow `id`, which is being introduced at this door.
    pub(super) fn create_introducing(
        hub: &Arc<Hub>,
        id: u64,
        fd: OwnFd,
        door: SocketAddr,
        introducing: Introducing,
    ) -> Result<Arc<Self>, NotOpened> {
        let introducing = Some(Box::new(introducing));
        Self::make(hub, id, fd, Role::Connector, door, introducing)
    }

    fn make(
        hub: &Arc<Hub>,
        id: u64,
        fd: OwnFd,
        role: Role,
        remote: SocketAddr,
        introducing: Option<Box<Introducing>>,
    ) -> Result<Arc<Self>, NotOpened> {
        let fd = Arc::new(fd);
        let accepted = (role == Role::Acceptor).then(|| {
            let age = slim_sys::age_of_accepted(fd.raw()).unwrap_or_default();
            let now = Instant::now();
            let since = now.checked_sub(age).unwrap_or(now);
            (since, slim_sys::cookie(fd.raw()).and_then(NonZeroU64::new))
        });
        let core = Arc::new(Self {
            hub: hub.clone(),
            token: FlowToken(id),
            role,
            remote: Mutex::new(remote),
            stream: Stream::new(),
            fd: AtomicI32::new(fd.raw()),
            carrier: Mutex::default(),
            stashed: AtomicBool::new(false),
            connecting: AtomicBool::new(role == Role::Connector),
            plain: AtomicBool::new(false),
            live: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            blocked: AtomicBool::new(true),
            vain_looks: AtomicU32::new(0),
            news: AtomicU32::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            queued: AtomicBool::new(false),
            posts: Mutex::default(),
            ctl: Mutex::new(FlowCtl {
                transport: Some(FlowTransport::Socket(fd.clone())),
                receiving: ReceiveHalf::new(role == Role::Connector),
                local: None,
                fault: None,
                taken: None,
                given_up: None,
                verdict: None,
                known: false,
                introducing,
                closed: false,
                parted: false,
                lingers: false,
                end_shown: false,
                accepted,
                asking: None,
                unsent_limit: None,
                suspended: None,
                told: false,
                resumes: 0,
                replayed: 0,
                replaying: 0,
                away: Duration::ZERO,
            }),
        });
        let weak: Weak<Self> = Arc::downgrade(&core);
        hub.add(id, weak)?;
        if let Err(errno) = hub.watch_flow(&fd, id) {
            hub.remove(id, None);
            return Err(NotOpened::Kernel(errno));
        }
        hub.opened();
        Ok(core)
    }

    pub(super) fn id(&self) -> u64 {
        self.token.0
    }

    pub(super) fn agent(&self) -> &Agent {
        &self.hub.agent
    }

    pub(super) fn ctl(&self) -> MutexGuard<'_, FlowCtl> {
        locked(&self.ctl)
    }

    pub(super) fn remote(&self) -> SocketAddr {
        *locked(&self.remote)
    }

    pub(super) fn first_local(&self) -> Option<SocketAddr> {
        self.ctl().local
    }

    pub(super) fn present_ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        let ctl = self.ctl();
        let transport = ctl.transport.as_ref();
        let transport = transport.filter(|_| !self.stream.is_barred())?;
        socket::ends(transport.socket()?)
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

    /// Notes a change for the program, and wakes waiting threads.
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

    /// Checks whether the first connection is established by now, or has failed.
    pub(super) fn look_at_connecting(self: &Arc<Self>) {
        if !self.connecting.load(Ordering::Acquire) {
            return;
        }
        let mut ctl = self.ctl();
        if !self.connecting.load(Ordering::Acquire) {
            return;
        }
        match self.go_on_connecting(&mut ctl) {
            Ok(None) => {}
            Ok(Some(agreed)) => {
                drop(ctl);
                self.begin(agreed.map(|agreed| (agreed, &[][..])));
            }
            Err(errno) => {
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

    /// Goes on with the first connection, and tries the next door if it fails. Returns `Some` once it is established, with the agreement
    /// if it was introduced.
    fn go_on_connecting(&self, ctl: &mut FlowCtl) -> Result<Option<Option<Agreed>>, Errno> {
        loop {
            let Some(fd) = ctl.socket().map(|sock| sock.raw()) else {
                return Ok(None);
            };
            // The kernel reports the error once, so it is not asked before there is an answer.
            let answered = slim_sys::ready(fd, libc::POLLOUT) != 0;
            let failed = match answered.then(|| socket::error(fd)) {
                None => Ok(None),
                Some(Some(errno)) => Err(errno),
                Some(None) => match &mut ctl.introducing {
                    None => return Ok(Some(None)),
                    Some(introducing) => introducing.go_on(fd),
                },
            };
            let late = |i: &Introducing| i.is_late().then_some(libc::ETIMEDOUT);
            let errno = match failed {
                Ok(Some(agreed)) => return Ok(Some(Some(agreed))),
                Ok(None) => ctl.introducing.as_deref().and_then(late),
                Err(errno) => Some(errno),
            };
            let Some(errno) = errno else {
                return Ok(None);
            };
            self.try_next_door(ctl, errno)?;
        }
    }

    /// Connects to the next door of the blob. Fails with `errno` if there is none.
    fn try_next_door(&self, ctl: &mut FlowCtl, errno: Errno) -> Result<(), Errno> {
        let introducing = ctl.introducing.as_mut().ok_or(errno)?;
        let (door, fd) = introducing.next_connection(&self.hub, self.id(), errno)?;
        self.hub.watch_flow(&fd, self.id())?;
        if let Some(old) = self.unwatch(ctl) {
            // Wakes threads that wait on it.
            slim_sys::disconnect(old.as_raw_fd());
        }
        *locked(&self.remote) = door;
        let _ = self.carry_by(&mut ctl.transport, FlowTransport::Socket(Arc::new(fd)));
        self.stream.wake();
        Ok(())
    }

    /// Opens the flow on its first connection, which is established. Without `agreed` the agent negotiates. With it, the agent opens
    /// the flow as agreed, and the message `last`, if not empty, is sent before the flow's first bytes.
    pub(super) fn begin(self: &Arc<Self>, agreed: Option<(Agreed, &[u8])>) {
        let mut ctl = self.ctl();
        let sock = ctl.socket().cloned();
        let Some(sock) = sock.filter(|_| !ctl.known && !ctl.closed) else {
            return;
        };
        let Some(local) = socket::local(&sock) else {
            return;
        };
        ctl.local = Some(local);
        ctl.known = true;
        ctl.introducing = None;
        self.stream.renew();
        let io: Arc<dyn FlowIo> = self.clone();
        let opened = if let Some((agreed, last)) = agreed {
            let ends = (local, self.remote());
            // The peer knows the flow, so it can be asked about an end of the stream.
            self.live.store(true, Ordering::Release);
            let opened = self
                .agent()
                .open_agreed(self.token, io, self.role, ends, agreed);
            if !last.is_empty() {
                // The send buffer has room for it. If the connection is dead, the first data call meets the error.
                let _ = socket::send(sock.raw(), &[IoSlice::new(last)]);
            }
            // The messages of the introduction do not count as bytes of the stream.
            self.stream.install(&mut ctl.receiving, sock.raw(), false);
            opened
        } else {
            self.agent()
                .open(self.token, io, self.role, local, self.remote())
        };
        self.stream.begin();
        self.connecting.store(false, Ordering::Release);
        drop(ctl);
        self.hub.tell(self.id(), FlowChange::Connected);
        if !opened {
            // The agent is gone: the preload library, whose agent it was, has stepped back.
            self.legacy(self.hub.is_required());
        }
        self.note(bits::CHANGED | bits::READABLE | bits::WRITABLE);
    }

    /// Limits the bytes that the kernel takes and has not sent yet, on this transport and on later ones.
    pub(super) fn limit_unsent(&self, bytes: u32) {
        let mut ctl = self.ctl();
        ctl.unsent_limit = NonZeroU32::new(bytes);
        if let Some(sock) = ctl.socket() {
            socket::limit_unsent(sock, bytes);
        }
    }

    /// What the kernel knows of the delivery on the present connection.
    pub(super) fn delivery(self: &Arc<Self>) -> Option<FlowDelivery> {
        if !matches!(self.enter(), Ok(true)) {
            return None;
        }
        let way = self.way();
        // Read while holding the half, so that no send comes between both numbers.
        let (sent, unacked) = self.with_half(|half| {
            let sent = self.sent.load(Ordering::Relaxed);
            match self.stream.is_relayed() {
                true => (sent, half.replay.len() as u64),
                false => (sent, way.unacked(&self.stream)),
            }
        });
        let info = match way {
            DataPath::Socket(fd) => slim_sys::tcp_info(fd),
            DataPath::Carrier(_) | DataPath::Gone => None,
        };
        self.leave();
        Some(FlowDelivery {
            sent,
            acknowledged: sent.saturating_sub(unacked),
            in_flight: info.map_or(0, |info| info.tcpi_unacked),
            cannot_send: info.is_some_and(|info| slim_sys::cannot_send(&info)),
            round_trip: Duration::from_micros(info.map_or(0, |info| info.tcpi_rtt).into()),
        })
    }

    /// Has the agent replace the connection, which stays in use meanwhile.
    pub(super) fn suspect(&self) {
        let usable = !self.plain.load(Ordering::Acquire) && !self.closed.load(Ordering::Acquire);
        if usable && self.live.load(Ordering::Acquire) {
            self.agent().suspect(self.token);
        }
    }

    /// Enters the stream. Returns whether the caller is inside; then it must call `leave`.
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
            self.conclude_unlocked(self.ctl());
        }
    }

    /// [`leave`](Self::leave) for a caller that holds the posts and looks at the verdict itself.
    pub(super) fn leave_with_posts(&self) {
        if self.stream.leave(Inside::Counted).last_and_barred {
            self.conclude(&mut self.ctl());
        }
    }

    /// The reason why nothing more can be posted, if there is one.
    pub(super) fn refuses_posts(&self) -> Option<TransferError> {
        let ctl = self.ctl();
        match ctl.verdict {
            _ if ctl.closed => Some(TransferError::Closed),
            Some(Verdict::Errno(errno)) => Some(TransferError::Lost(errno)),
            Some(Verdict::Eof) => Some(TransferError::ShutDown),
            None => None,
        }
    }

    /// Takes the transport out of the poll set and out of the flow.
    pub(super) fn unwatch(&self, ctl: &mut FlowCtl) -> Option<FlowTransport> {
        let transport = ctl.transport.take()?;
        self.hub.unwatch(transport.descriptor());
        self.forget_carrier();
        Some(transport)
    }

    /// Runs `f` with the sending half. Must not be called in a signal handler.
    pub(super) fn with_half<R>(&self, f: impl FnOnce(&mut SendHalf) -> R) -> R {
        /// Gives the half back, after a panic of `f` as well.
        struct Taken<'a>(&'a Stream);
        impl Drop for Taken<'_> {
            fn drop(&mut self) {
                self.0.unlock_half();
            }
        }
        self.stream.lock_half();
        let _taken = Taken(&self.stream);
        // SAFETY: taken above, given back after `f` has given its reference back.
        f(unsafe { self.stream.half() })
    }
}

impl Drop for FlowCore {
    fn drop(&mut self) {
        let mut ctl = self.ctl();
        if std::mem::take(&mut ctl.lingers) {
            self.hub.lingers(false);
        }
        self.hub.posts_no_more(self.id());
        self.unwatch(&mut ctl);
    }
}
