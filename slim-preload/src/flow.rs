//! One flow as the hooks see it: its stream ([`slim_stream`]), and the state of its descriptor numbers.
//!
//! A data call loads a pointer from the [`crate::table`], enters the gate, and reads the table again. So a
//! `Flow` must stay readable after its last descriptor is closed: flows are never freed, only reused,
//! when neither the table nor the agent refers to them ([`Flow::drop_ref`]) and no call is inside the gate.

mod ctl;
mod mode;
pub mod waits;

use crate::addr::RawAddr;
use crate::{marks, sys};
use libc::c_int;
use slim_core::replay::Replay;
use slim_core::{FlowToken, Role, memory};
use slim_stream::{ReceiveHalf, SendHalf, Stream};
use slim_sys::lock::{Guard, Lock, SignalSafeMutex};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

pub use ctl::{Ctl, is_closed};
pub use mode::{Mode, Then};

/// A flow. All fields but those under a lock may be touched from any thread.
pub struct Flow {
    /// The stream of bytes. Its gate is barred while no transport is under the descriptor numbers.
    pub stream: Stream,
    /// Both sides know that this is a SLIM flow.
    pub live: AtomicBool,
    /// How many of the next calls may write more than is given to the kernel at once.
    pub writes_much: AtomicU8,
    /// The application shut its reading side: it has caused an end of stream itself.
    pub read_shut: AtomicBool,
    /// The application has seen an end of the stream while the flow negotiated, when no peer could be asked about the end.
    pub end_shown: AtomicBool,
    /// A fork happened while the flow existed: a child may hold its descriptors.
    pub forked: AtomicBool,
    /// The file under the numbers ([`sys::identity`]).
    under: AtomicU64,
    /// [`Ctl::exposed`], for a forked child, in which the control lock may be held for ever.
    pub exposed: AtomicBool,
    /// Calls on the connection are known not to block (O_NONBLOCK). False if that is unknown.
    nonblocking: AtomicBool,
    /// The connection is known to have been established; call [`Flow::was_established`].
    pub established: AtomicBool,
    /// The slot that a forked child marks when it uses the connection ([`crate::marks`]).
    pub slot: u32,
    token: AtomicU64,
    refs: AtomicU32,
    ctl: SignalSafeMutex<Ctl>,
}

/// Kept small: ten thousand flows, most of them idle, are usual.
const _: () = assert!(size_of::<Flow>() <= 328);

static FREE: Lock<Vec<&'static Flow>> = Lock::new(Vec::new());
/// How many flows are allocated together: they fit into a page.
const BLOCK: usize = 12;
/// How many free flows keep a chunk of their replay buffer for the next use.
const KEPT_CHUNKS: usize = 256;
static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);
static NEXT_SLOT: AtomicU32 = AtomicU32::new(0);

/// Before a fork: takes the lock, so that the child inherits a consistent state.
pub fn before_fork() {
    FREE.lock();
}

/// After a fork, on either side. A child starts without the parent's flows.
pub fn after_fork(child: bool) {
    // SAFETY: taken by `before_fork`.
    unsafe { FREE.unlock_after_fork(child) };
}

impl Flow {
    /// A flow for the connection under `fd`, with one reference for the table and one for the agent.
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
        marks::clear_mark(flow.slot);
        flow.set_under(fd);
        flow.refs.store(2, Ordering::Relaxed);
        let ends = (local.name(), peer.and_then(|a| a.name()));
        *flow.ctl() = Ctl::of(fd, ends, ReceiveHalf::new(role == Role::Connector));
        flow.token
            .store(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed), Ordering::SeqCst);
        flow.stream.begin();
        Some(flow)
    }

    /// Allocates a flow that is never freed; `None` when there is no memory for it. Allocates a block of flows, because the
    /// allocator adds some bytes to each piece.
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
            ctl: SignalSafeMutex::new(Ctl::new()),
        }
    }

    /// The agent's name for this life of the flow.
    pub fn token(&self) -> FlowToken {
        FlowToken(self.token.load(Ordering::SeqCst))
    }

    /// The control part. Never held over a call that may block.
    pub fn ctl(&self) -> Guard<'_, Ctl> {
        self.ctl.lock()
    }

    /// Drops the reference of the table, or of the agent.
    pub fn drop_ref(&'static self) {
        if self.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.stream.close();
            self.try_recycle();
        }
    }

    /// Frees the replay buffer, if the last reference is about to be dropped while a call is inside the gate. Such a call waits
    /// for bytes of a connection that is plain TCP by now. It keeps the flow from being reused, but needs no replay buffer.
    pub fn forget_copy(&self) {
        if self.refs.load(Ordering::Acquire) == 1 && !self.stream.idle() {
            self.stream
                .try_with_half(|half| half.replay = Replay::new());
        }
    }

    /// Makes the flow reusable, if no reference is left and no call is inside the gate. Called when either has become true.
    pub fn try_recycle(&'static self) {
        if self.refs.load(Ordering::Acquire) != 0 || !self.stream.idle() {
            return;
        }
        // Two threads may get here at once (the last call inside, the last reference); one of them gets the token.
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

    /// Whether the connection was ever established. The application must see a non-blocking `connect` fail.
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

    /// Whether calls on the flow are known not to block.
    #[inline]
    pub fn never_waits(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Whether the file under `fd` is the one that all numbers of the flow have. Costs a system call.
    pub fn is_under(&self, fd: c_int) -> bool {
        sys::identity(fd) == Some(self.under.load(Ordering::SeqCst))
    }

    /// Whether a file of another process, given by device and inode, is the one that all numbers of the flow have.
    pub fn is_file(&self, (device, inode): (u64, u64)) -> bool {
        sys::identity_of(device, inode) == self.under.load(Ordering::SeqCst)
    }

    /// Whether the file that all numbers of the flow have has this inode. Compares 32 bits: sockets have no longer inodes.
    pub fn is_inode(&self, inode: u64) -> bool {
        self.under.load(Ordering::SeqCst) as u32 == inode as u32
    }

    /// Notes which file is under all numbers of the flow from now on.
    pub fn set_under(&self, file: c_int) {
        let file = sys::identity(file).unwrap_or_default();
        self.under.store(file, Ordering::SeqCst);
    }

    /// The file under all numbers of the flow ([`sys::identity`]).
    pub fn file(&self) -> u64 {
        self.under.load(Ordering::SeqCst)
    }

    /// Notes whether calls on the flow are known not to block.
    pub fn set_never_waits(&self, known: bool) {
        self.nonblocking.store(known, Ordering::SeqCst);
    }

    /// Notes that another process may have the connection from now on, and may change O_NONBLOCK.
    pub fn mark_forked(&self) {
        self.forked.store(true, Ordering::SeqCst);
        self.nonblocking.store(false, Ordering::SeqCst);
    }

    /// Whether a forked child has read from or written to the connection, so that our counters are wrong.
    pub fn used_by_child(&self) -> bool {
        self.forked.load(Ordering::Relaxed) && marks::child_used(self.slot)
    }
}
