//! The receiving direction: what has come and is not read yet, and what is known of the transport that brings it.

use libc::c_int;
use slim_core::stash::Stash;
use slim_sys as sys;

use crate::start::Start;

/// The receiving half of a stream, which changes with the transport. It lies under the front end's control lock.
#[derive(Default)]
pub struct ReceiveHalf {
    /// Bytes taken from a transport that the application has not read yet.
    pub stash: Stash,
    /// Where the present transport began; the first one began with nothing.
    start: Option<Box<Start>>,
    /// We connected.
    dialled: bool,
    /// The peer has closed the flow, and all that it sent has been read.
    pub peer_closed: bool,
    /// The present transport is not the first.
    moved: bool,
    /// The peer's direction of it has ended unannounced: ours may be as well as it was.
    ended: bool,
    /// It has been read dry for good.
    drained: bool,
    /// We have ended it, so that it cannot be put back.
    cut: bool,
    /// The kernel has given it up: nothing of it changes any more.
    over: bool,
}

impl ReceiveHalf {
    /// With the flow's first transport, which this end has `dialled` or not.
    pub const fn new(dialled: bool) -> Self {
        Self {
            stash: Stash::new(),
            start: None,
            dialled,
            peer_closed: false,
            moved: false,
            ended: false,
            drained: false,
            cut: false,
            over: false,
        }
    }

    /// Where the present transport began.
    pub fn start(&self) -> Start {
        match self.start.as_deref() {
            Some(start) => *start,
            None => Start::of_first(self.dialled),
        }
    }

    /// Whether this end connected.
    pub fn dialled(&self) -> bool {
        self.dialled
    }

    /// Whether the stream has had another transport.
    pub fn has_moved(&self) -> bool {
        self.moved
    }

    /// The transport has broken; `ended` says that all that is known of it is an unannounced end of the peer's direction.
    pub fn set_ended(&mut self, ended: bool) {
        self.ended = ended;
    }

    /// Whether bytes can still be sent on a transport that is suspended. They are kept as all others are, and nothing is
    /// forgotten meanwhile, so it does no harm if it turns out to be of no use.
    pub fn is_half_open(&self) -> bool {
        self.ended && !self.drained && !self.cut
    }

    /// Whether the transport has been read dry for good.
    pub fn is_drained(&self) -> bool {
        self.drained
    }

    pub(crate) fn set_drained(&mut self) {
        self.drained = true;
    }

    /// Ends the transport `fd`, if it has not ended yet; wakes whoever is blocked in a call on it.
    pub fn cut(&mut self, fd: c_int) {
        if !self.cut {
            self.cut = true;
            self.over |= sys::try_shutdown(fd, libc::SHUT_RDWR) == Err(libc::ENOTCONN);
        }
    }

    /// Whether we have ended the transport.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// The kernel has given the transport up.
    pub fn set_over(&mut self) {
        self.over = true;
    }

    /// The transport is of no use any more; whether the kernel has given it up, too.
    pub fn dismiss(&mut self) -> bool {
        self.ended = false;
        std::mem::take(&mut self.over)
    }

    /// The transport is put back: nothing has happened to it.
    pub fn put_back(&mut self) {
        (self.ended, self.cut, self.over) = (false, false, false);
    }

    /// Another transport, which began there.
    pub(crate) fn carry(&mut self, start: Option<Start>) {
        self.start = start.map(Box::new);
        self.moved = true;
        self.drained = false;
        self.put_back();
    }
}
