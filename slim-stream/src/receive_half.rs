//! The receiving direction: the stash, and the state of the transport that bytes arrive on.

use libc::c_int;
use slim_core::saved::Saved;
use slim_core::stash::Stash;
use slim_sys as sys;

use crate::start::Start;

/// The receiving half of a stream. It changes with the transport, and the front end's control lock protects it.
#[derive(Default)]
pub struct ReceiveHalf {
    /// Bytes taken from a transport that the application has not read yet.
    pub stash: Stash,
    /// Both counts when the present transport was installed; `None` for the first transport.
    start: Option<Box<Start>>,
    /// This end made the flow's first connection.
    dialled: bool,
    /// The peer has closed the flow, and all that it sent has been read.
    pub peer_closed: bool,
    /// The present transport is not the flow's first.
    moved: bool,
    /// The peer's direction of the transport has ended unannounced. Our direction may still work.
    ended: bool,
    /// That end was the first sign of the outage.
    end_came_first: bool,
    /// The transport has been drained: read until empty, finally.
    drained: bool,
    /// We have shut the transport down in both directions, so it cannot be used again.
    cut: bool,
    /// The kernel has given the transport up: its state is final.
    over: bool,
}

impl ReceiveHalf {
    /// The half of a new flow with its first transport; `dialled` says whether this end connected.
    pub const fn new(dialled: bool) -> Self {
        Self {
            stash: Stash::new(),
            start: None,
            dialled,
            peer_closed: false,
            moved: false,
            ended: false,
            end_came_first: false,
            drained: false,
            cut: false,
            over: false,
        }
    }

    /// A copy of the half, whose transport has not failed.
    pub(crate) fn handed(&self) -> Self {
        let mut stash = vec![0; self.stash.len()];
        self.stash.peek(0, &mut stash);
        Self::of(
            stash,
            self.start.as_deref().copied(),
            [self.dialled, self.peer_closed, self.moved],
        )
    }

    fn of(stash: Vec<u8>, start: Option<Start>, marks: [bool; 3]) -> Self {
        let [dialled, peer_closed, moved] = marks;
        Self {
            stash: Stash::of(stash),
            start: start.map(Box::new),
            peer_closed,
            moved,
            ..Self::new(dialled)
        }
    }

    /// Both counts when the present transport was installed.
    pub fn start(&self) -> Start {
        match self.start.as_deref() {
            Some(start) => *start,
            None => Start::of_first(self.dialled),
        }
    }

    /// Whether this end made the flow's first connection.
    pub fn dialled(&self) -> bool {
        self.dialled
    }

    /// Whether the stream has had an earlier transport.
    pub fn has_moved(&self) -> bool {
        self.moved
    }

    /// The transport has broken. `ended`: the only sign of that is an unannounced end of the peer's direction.
    pub fn set_ended(&mut self, ended: bool) {
        (self.ended, self.end_came_first) = (ended, ended);
    }

    /// Whether an unannounced end of the peer's direction was the first sign that the transport has broken.
    pub fn end_came_first(&self) -> bool {
        self.end_came_first
    }

    /// Whether bytes can still be sent on the transport of a suspended flow. The replay buffer keeps them, and is not trimmed
    /// meanwhile, so no bytes are lost if the transport turns out to be dead.
    pub fn is_half_open(&self) -> bool {
        self.ended && !self.drained && !self.cut
    }

    /// Whether the transport has been drained.
    pub fn is_drained(&self) -> bool {
        self.drained
    }

    pub(crate) fn set_drained(&mut self) {
        self.drained = true;
    }

    /// Shuts the transport `fd` down in both directions, once. This wakes all calls that are blocked on it.
    pub fn shut_down(&mut self, fd: c_int) {
        if !self.cut {
            self.cut = true;
            self.over |= sys::try_shutdown(fd, libc::SHUT_RDWR) == Err(libc::ENOTCONN);
        }
    }

    /// Whether we have shut the transport down.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// The kernel has given the transport up.
    pub fn set_over(&mut self) {
        self.over = true;
    }

    /// The transport will not be used again. Returns whether the kernel has given it up.
    pub fn retire(&mut self) -> bool {
        self.ended = false;
        std::mem::take(&mut self.over)
    }

    /// The transport is used again: clears the marks of its failure.
    pub fn reinstate(&mut self) {
        (self.ended, self.cut, self.over) = (false, false, false);
        self.end_came_first = false;
    }

    /// A new transport carries the stream; `start` holds both counts at this moment.
    pub(crate) fn carry(&mut self, start: Option<Start>) {
        self.start = start.map(Box::new);
        self.moved = true;
        self.drained = false;
        self.reinstate();
    }
}

impl Saved for ReceiveHalf {
    fn save(&self, out: &mut Vec<u8>) {
        let mut stash = vec![0; self.stash.len()];
        self.stash.peek(0, &mut stash);
        stash.save(out);
        self.start.as_deref().copied().save(out);
        let marks = [self.dialled, self.peer_closed, self.moved];
        marks.map(u8::from).save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let stash = Saved::load(from)?;
        let start = Saved::load(from)?;
        let marks = <[u8; 3]>::load(from)?;
        Some(Self::of(stash, start, marks.map(|mark| mark != 0)))
    }
}
