//! One flow as the hooks see it: its stream ([`slim_stream`]), and what is under its descriptor numbers.
//!
//! A data call loads a pointer from the [`crate::table`], enters the gate, and reads the table again. So a
//! `Flow` must stay readable after its last descriptor is closed: flows are never freed, only used again,
//! when neither the table nor the agent has them ([`Flow::drop_ref`]) and nobody is inside the gate.

mod inside;
mod numbers;
pub mod waits;

use crate::addr::{Name, RawAddr};
use crate::epoll::{self, Instance};
use crate::options::Receives;
use crate::sys;
use crate::{stand_in, table};
use libc::c_int;
use slim_agent::Opened;
use slim_core::replay::Replay;
use slim_core::{FlowToken, Role, memory};
use slim_stream::{ReceiveHalf, SendHalf, Stream};
use slim_sys::lock::{Guard, Lock, Undisturbed};
use smallvec::{SmallVec, smallvec};
use std::net::SocketAddr;
use std::num::NonZeroI32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

pub use numbers::given_out;

/// A flow. All fields but those under a lock may be touched from any thread.
pub struct Flow {
    /// Its bytes; barred while no transport is under the descriptor numbers.
    pub stream: Stream,
    /// Both sides know that this is a SLIM flow.
    pub live: AtomicBool,
    /// How many of the next calls are suspected to write more than is given to the kernel at once.
    pub writes_much: AtomicU8,
    /// The application shut its reading side: an end of stream is its own doing.
    pub read_shut: AtomicBool,
    /// The application was shown an end of the stream while the flow negotiated, when nobody could be asked about it.
    pub end_shown: AtomicBool,
    /// A fork happened while the flow existed: a child may hold its descriptors.
    pub forked: AtomicBool,
    /// Which file is under the numbers ([`sys::identity`]).
    under: AtomicU64,
    /// [`Ctl::exposed`], for a forked child, where the lock may be held for ever.
    pub exposed: AtomicBool,
    /// Calls on the connection are known not to wait (O_NONBLOCK). That some do may be unknown.
    nonblocking: AtomicBool,
    /// The connection is known to have stood; ask [`Flow::was_established`].
    pub established: AtomicBool,
    /// The slot that a forked child marks when it uses the connection ([`crate::process`]).
    pub slot: u32,
    token: AtomicU64,
    refs: AtomicU32,
    ctl: Undisturbed<Ctl>,
}

/// Ten thousand of them, most of them idle, are usual.
const _: () = assert!(size_of::<Flow>() <= 328);

/// What is under the descriptor numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The transport.
    Open,
    /// The old transport, which data calls, poll, select and epoll do not see; or a placeholder ([`Ctl::veil`]).
    Suspended,
    /// A stand-in: the stash is read first, then `then` happens.
    Stashed {
        /// What follows the last stashed byte.
        then: Then,
    },
    /// Something dead that still owes the application this errno.
    Dead(c_int),
    /// Nothing: the application has closed its last number; the agent delivers what is left.
    Lingering,
}

/// What a flow becomes when its stash is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The waiting transport takes the numbers.
    Open,
    /// The flow is given up, with this errno, which we owe.
    Owed(c_int),
    /// The flow is given up, and what is under the numbers speaks for itself.
    Over,
}

/// The part of a flow that changes when its transport does.
pub struct Ctl {
    /// What is under the numbers.
    pub mode: Mode,
    /// The application's descriptor numbers for this flow; mostly one.
    pub fds: SmallVec<[c_int; 4]>,
    /// A descriptor of ours: the old transport (suspended and veiled, lingering), or the new one (stashed).
    pub transport: Option<c_int>,
    /// Suspended, and a placeholder that is never ready is under the numbers: its other end, a descriptor of ours.
    pub veil: Option<NonZeroI32>,
    /// ... and epoll instances have it.
    pub registered: bool,
    /// The error that somebody of us took from the transport: owed if the transport is put back.
    pub taken: Option<NonZeroI32>,
    /// The application has closed the last number unseen: what it wrote to the flow, and what to the number's next file,
    /// cannot be told apart.
    pub lost: bool,
    /// The agent has let go of the flow: it is plain TCP as soon as nothing is stashed.
    pub plain: bool,
    /// What has come and is not read yet, and what is known of the transport that brings it.
    pub receiving: ReceiveHalf,
    /// Epoll instances that know one of the numbers; mostly one.
    pub epolls: SmallVec<[&'static Instance; 2]>,
    /// What `getsockname` said first.
    pub local: Option<Name>,
    /// What `getpeername` said first.
    pub peer: Option<Name>,
    /// Of the present transport.
    pub receives: Receives,
    /// The application has set an option while the transport was away, perhaps after the next one got its options.
    pub options_set: bool,
    /// The peer was told of the flow by OPEN.
    pub opened: Option<Arc<Opened>>,
}

impl Ctl {
    const fn new() -> Self {
        Self {
            mode: Mode::Lingering,
            fds: SmallVec::new_const(),
            transport: None,
            veil: None,
            registered: false,
            taken: None,
            lost: false,
            plain: false,
            receiving: ReceiveHalf::new(false),
            epolls: SmallVec::new_const(),
            local: None,
            peer: None,
            receives: 0,
            options_set: false,
            opened: None,
        }
    }

    /// Takes a number up. Those that the application has come first.
    pub fn add_number(&mut self, fd: c_int) {
        let at = self.fds.iter().position(|n| epoll::is_closed(*n));
        self.fds.insert(at.unwrap_or(self.fds.len()), fd);
    }

    /// Whether the application has a number of the flow.
    pub fn is_held(&self) -> bool {
        self.fds.first().is_some_and(|fd| !epoll::is_closed(*fd))
    }

    /// The descriptor on which the kernel's view of the flow's present transport can be asked.
    pub fn probe_fd(&self) -> Option<c_int> {
        match self.mode {
            Mode::Open => self.fds.first().copied(),
            _ => self.old(),
        }
    }

    /// The number of a suspended flow under which its old transport still is.
    pub fn exposed(&self) -> Option<c_int> {
        let exposed =
            self.mode == Mode::Suspended && self.veil.is_none() && self.transport.is_none();
        self.fds.first().copied().filter(|_| exposed)
    }

    /// The transport that is away, or waits.
    pub fn old(&self) -> Option<c_int> {
        self.transport.or_else(|| self.exposed())
    }

    /// Where bytes can still be sent while the flow is suspended. They are kept as all others are, and nothing is
    /// forgotten meanwhile, so it does no harm if the old transport turns out to be of no use.
    pub fn half_open(&self) -> Option<c_int> {
        let open = self.receiving.is_half_open() && self.taken.is_none();
        self.old().filter(|_| open && self.mode == Mode::Suspended)
    }

    /// The descriptor that has the status flags of the flow's number `fd`: the always-ready stand-in is one file for
    /// all flows, so a flow that shows it has those of its waiting transport.
    pub fn flags_of(&self, fd: c_int) -> c_int {
        match self.mode {
            Mode::Stashed { .. } => self.transport.unwrap_or(fd),
            Mode::Suspended if self.veil.is_none() => self.transport.unwrap_or(fd),
            _ => fd,
        }
    }

    /// Nothing has happened yet to the transport that is now the flow's.
    pub fn is_new(&mut self) {
        self.taken = None;
        self.receiving.put_back();
    }

    /// Something else is under the numbers than while the flow was suspended.
    pub fn uncover(&mut self, flow: &Flow) {
        self.lift_veil();
        self.registered = false;
        flow.exposed.store(false, Ordering::SeqCst);
    }

    /// The placeholder, if there is one, is under no number any more. Whoever got it from us without our seeing it is
    /// not to wait for ever.
    pub fn lift_veil(&mut self) {
        if let Some(far) = self.veil.take() {
            stand_in::lift(far.get());
        }
    }

    /// Both ends of the connection, ours first.
    pub fn ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((
            self.local.as_ref()?.internet(),
            self.peer.as_ref()?.internet(),
        ))
    }

    /// Sets the private transport and closes the one that was there.
    pub fn set_transport(&mut self, fd: Option<c_int>) {
        if let Some(old) = std::mem::replace(&mut self.transport, fd) {
            sys::close(old);
        }
    }
}

static FREE: Lock<Vec<&'static Flow>> = Lock::new(Vec::new());
/// Flows that are made at once: they fit into a page.
const BLOCK: usize = 12;
/// As many free flows keep a chunk for what is sent first.
const KEPT_CHUNKS: usize = 256;
static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);
static NEXT_SLOT: AtomicU32 = AtomicU32::new(0);

/// Around a fork: holds what the child must inherit in one piece.
pub fn before_fork() {
    FREE.lock();
}

/// After a fork, on either side. A child starts without the parent's flows.
pub fn after_fork(child: bool) {
    // SAFETY: taken by `before_fork`.
    unsafe { FREE.unlock_after_fork(child) };
}

impl Flow {
    /// A flow for the connection under `fd`, known to the table and to be known to the agent.
    pub fn create(
        fd: c_int,
        role: Role,
        established: bool,
        local: &RawAddr,
        peer: Option<RawAddr>,
    ) -> Option<&'static Self> {
        let recycled = FREE.with(Vec::pop);
        let flow = recycled.or_else(Self::another)?;
        flow.stream.renew();
        for flag in [
            &flow.live,
            &flow.read_shut,
            &flow.end_shown,
            &flow.forked,
            &flow.exposed,
        ] {
            flag.store(false, Ordering::Relaxed);
        }
        flow.established.store(established, Ordering::Relaxed);
        flow.nonblocking
            .store(sys::is_nonblocking(fd), Ordering::Relaxed);
        crate::process::clear_mark(flow.slot);
        flow.set_under(fd);
        flow.refs.store(2, Ordering::Relaxed);
        *flow.ctl() = Ctl {
            mode: Mode::Open,
            fds: smallvec![fd],
            local: local.name(),
            peer: peer.and_then(|a| a.name()),
            receiving: ReceiveHalf::new(role == Role::Connector),
            ..Ctl::new()
        };
        flow.token
            .store(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed), Ordering::SeqCst);
        flow.stream.begin();
        if table::set_flow(fd, flow) {
            return Some(flow);
        }
        flow.drop_ref();
        flow.drop_ref();
        None
    }

    /// A new one, which stays; `None` when there is no memory for it. Some more are made with it, for the allocator adds
    /// to each piece.
    fn another() -> Option<&'static Self> {
        let mut block = Vec::new();
        memory::reserve(&mut block, BLOCK).ok()?;
        block.resize_with(BLOCK, Self::blank);
        let block: &'static [Self] = block.leak();
        let (one, others) = block.split_first()?;
        FREE.with(|free| free.extend(others));
        Some(one)
    }

    fn blank() -> Self {
        Self {
            stream: Stream::new(),
            live: AtomicBool::new(false),
            writes_much: AtomicU8::new(0),
            read_shut: AtomicBool::new(false),
            end_shown: AtomicBool::new(false),
            forked: AtomicBool::new(false),
            exposed: AtomicBool::new(false),
            under: AtomicU64::new(0),
            nonblocking: AtomicBool::new(false),
            established: AtomicBool::new(false),
            slot: NEXT_SLOT.fetch_add(1, Ordering::Relaxed),
            token: AtomicU64::new(0),
            refs: AtomicU32::new(0),
            ctl: Undisturbed::new(Ctl::new()),
        }
    }

    /// The name by which the agent knows this life of the flow.
    pub fn token(&self) -> FlowToken {
        FlowToken(self.token.load(Ordering::SeqCst))
    }

    /// The control part. Never held over a call that may block.
    pub fn ctl(&self) -> Guard<'_, Ctl> {
        self.ctl.lock()
    }

    /// The table, or the agent, lets go of the flow.
    pub fn drop_ref(&'static self) {
        if self.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.stream.close();
            self.try_recycle();
        }
    }

    /// The last who has the flow is about to let go of it. A call that waits inside, for the next bytes of what is plain
    /// TCP by now, keeps the flow from being used again, but needs no copy.
    pub fn forget_copy(&self) {
        if self.refs.load(Ordering::Acquire) == 1 && !self.stream.idle() {
            self.stream
                .try_with_half(|half| half.replay = Replay::new());
        }
    }

    fn try_recycle(&'static self) {
        if self.refs.load(Ordering::Acquire) != 0 || !self.stream.idle() {
            return;
        }
        // Several may come here at once (the last one inside, the last reference); one of them gets the token.
        if self.token.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        {
            let mut ctl = self.ctl();
            ctl.set_transport(None);
            *ctl = Ctl::new();
        }
        FREE.with(|free| {
            self.stream.with_half(|half| match free.len() {
                ..KEPT_CHUNKS => half.renew(),
                _ => *half = SendHalf::new(),
            });
            free.push(self);
        });
    }

    /// From now on the numbers are plain descriptors. `ctl` is this flow's.
    pub fn release_numbers(&'static self, ctl: &mut Ctl) {
        for fd in ctl.fds.drain(..) {
            table::release(fd, self);
            for e in &ctl.epolls {
                e.leave(fd);
            }
        }
        ctl.epolls.clear();
    }

    /// Whether the connection ever stood: a non-blocking `connect` that fails is the application's to see.
    pub fn was_established(&self, fd: c_int) -> bool {
        if !self.established.load(Ordering::Relaxed) {
            // The acknowledged SYN counts as a byte (measured on 6.1 and 6.18).
            let stood = self.stream.received() > 0
                || self.stream.sent_in_time().is_none_or(|sent| sent > 0)
                || sys::counters(fd).is_some_and(|c| c.acked > 0);
            self.established.store(stood, Ordering::Relaxed);
        }
        self.established.load(Ordering::Relaxed)
    }

    /// Whether calls on the flow are known not to wait.
    #[inline]
    pub fn never_waits(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Runs `set`, which may change whether calls on the flow's number `fd` wait.
    pub fn set_mode(&'static self, fd: c_int, set: impl FnOnce() -> c_int) -> c_int {
        let Some(ctl) = self.ctl_of(fd) else {
            return set();
        };
        self.nonblocking.store(false, Ordering::SeqCst);
        let r = set();
        let known = !self.forked.load(Ordering::SeqCst)
            && sys::keep_errno(|| crate::transport::nonblocking(&ctl, fd));
        self.nonblocking.store(known, Ordering::SeqCst);
        r
    }

    /// Another process may have the connection from now on, and set its mode.
    pub fn mark_forked(&self) {
        self.forked.store(true, Ordering::SeqCst);
        self.nonblocking.store(false, Ordering::SeqCst);
    }

    /// Whether a forked child has read from or written to the connection, so that our counters mean nothing.
    pub fn used_by_child(&self) -> bool {
        self.forked.load(Ordering::Relaxed) && crate::process::child_used(self.slot)
    }
}
