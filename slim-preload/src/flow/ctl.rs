//! The part of a flow that changes when its transport does: its [state](Mode), and the data of each state.

use super::Flow;
use super::mode::{Mode, Then};
use crate::addr::Name;
use crate::mirror::Instance;
use crate::options::Receives;
use crate::{stand_in, sys};
use libc::c_int;
use slim_agent::Opened;
use slim_stream::ReceiveHalf;
use smallvec::{SmallVec, smallvec};
use std::net::SocketAddr;
use std::num::NonZeroI32;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Whether a number of a flow is SLIM's own. Such a number carries epoll registrations that the application made by a number that
/// it has closed since ([`crate::epoll`]).
pub fn is_closed(fd: c_int) -> bool {
    slim_sys::fds::is_internal(fd)
}

/// [`Mode`], with the data of each state. Private, so that it changes only by the moves of the transition table.
#[derive(Debug)]
enum CtlState {
    Open,
    Suspended(Away),
    StashedThenOpen {
        /// The waiting transport; a descriptor of ours.
        transport: Option<c_int>,
        /// The agent has dropped the flow: it becomes plain TCP as soon as nothing is stashed.
        plain: bool,
    },
    StashedThenError(c_int),
    StashedThenOver,
    Dead(c_int),
    Lingering {
        /// The transport on which the kernel delivers the remaining bytes; a descriptor of ours.
        transport: Option<c_int>,
        /// The application has closed the last number unseen. Bytes written to the flow cannot be told from bytes written to
        /// the number's next file.
        lost: bool,
    },
}

/// Data of a suspended flow.
#[derive(Debug, Default)]
struct Away {
    /// The old transport if it is not under the numbers, or the new one that is about to take them; a descriptor of ours.
    transport: Option<c_int>,
    /// The other end of the placeholder that is under the numbers, if there is one; a descriptor of ours.
    placeholder: Option<NonZeroI32>,
    /// Epoll instances have the placeholder registered.
    registered: bool,
    /// The error that one of SLIM's calls took from the transport. It becomes pending if the transport is put back.
    taken: Option<NonZeroI32>,
    /// Whether a non-blocking call that receives, and one that sends, has met the suspension ([`crate::ops::told`]).
    met: [bool; 2],
}

/// The part of a flow that changes when its transport does.
pub struct Ctl {
    state: CtlState,
    /// The descriptor numbers of this flow, the application's first; usually one. Signals of the flow report the first.
    pub fds: SmallVec<[c_int; 4]>,
    /// The receiving half: the stash, and the state of the present transport.
    pub receiving: ReceiveHalf,
    /// Epoll instances with which one of the numbers is registered; usually one.
    pub epolls: SmallVec<[&'static Instance; 2]>,
    /// The `getsockname` address of the first transport.
    pub local: Option<Name>,
    /// The `getpeername` address of the first transport.
    pub peer: Option<Name>,
    /// The application's SO_RCVBUF, if the present transport has a larger one.
    pub receives: Receives,
    /// The application has set an option while the transport was away, perhaps after the next transport got its options.
    pub options_set: bool,
    /// The private transport gets `O_ASYNC` when it has the application's numbers: the kernel's signals report the number through which the
    /// flag was set.
    pub asynchronous: bool,
    /// The peer was told of the flow by OPEN.
    pub opened: Option<Arc<Opened>>,
    /// The thread that has handed the flow over to the next program and is about to execute that; 0 if there is none.
    pub handed_by: c_int,
}

impl Ctl {
    /// The control part of a flow that is not in use.
    pub(super) const fn new() -> Self {
        Self {
            state: CtlState::Lingering {
                transport: None,
                lost: false,
            },
            fds: SmallVec::new_const(),
            receiving: ReceiveHalf::new(false),
            epolls: SmallVec::new_const(),
            local: None,
            peer: None,
            receives: 0,
            options_set: false,
            asynchronous: false,
            opened: None,
            handed_by: 0,
        }
    }

    /// The control part of a flow with its first transport under `fd`, between the addresses `local` and `peer`.
    pub(super) fn of(
        fd: c_int,
        (local, peer): (Option<Name>, Option<Name>),
        receiving: ReceiveHalf,
    ) -> Self {
        Self {
            state: CtlState::Open,
            fds: smallvec![fd],
            local,
            peer,
            receiving,
            ..Self::new()
        }
    }

    /// The state.
    pub fn mode(&self) -> Mode {
        let stashed = |then| Mode::Stashed { then };
        match self.state {
            CtlState::Open => Mode::Open,
            CtlState::Suspended(_) => Mode::Suspended,
            CtlState::StashedThenOpen { .. } => stashed(Then::Open),
            CtlState::StashedThenError(errno) => stashed(Then::Error(errno)),
            CtlState::StashedThenOver => stashed(Then::Over),
            CtlState::Dead(errno) => Mode::Dead(errno),
            CtlState::Lingering { .. } => Mode::Lingering,
        }
    }

    /// The private transport, a descriptor of ours: the old one (suspended behind a placeholder, lingering), or the new one
    /// (stashed).
    pub fn transport(&self) -> Option<c_int> {
        match &self.state {
            CtlState::Suspended(away) => away.transport,
            CtlState::StashedThenOpen { transport, .. } | CtlState::Lingering { transport, .. } => {
                *transport
            }
            _ => None,
        }
    }

    /// The error that one of SLIM's calls took from the transport.
    pub fn taken(&self) -> Option<c_int> {
        Some(self.away()?.taken?.get())
    }

    /// Whether the application has closed the last number unseen.
    pub fn is_lost(&self) -> bool {
        matches!(self.state, CtlState::Lingering { lost: true, .. })
    }

    /// Whether the flow becomes plain TCP as soon as nothing is stashed.
    pub fn is_plain(&self) -> bool {
        matches!(self.state, CtlState::StashedThenOpen { plain: true, .. })
    }

    /// Whether a placeholder is under the numbers.
    pub fn has_placeholder(&self) -> bool {
        self.away().is_some_and(|away| away.placeholder.is_some())
    }

    /// Whether the always-ready stand-in is under the numbers. It also stays there when the flow is suspended again and there is
    /// no descriptor for a placeholder.
    pub fn shows_stash(&self) -> bool {
        match self.mode() {
            Mode::Stashed { .. } => true,
            Mode::Suspended => self.transport().is_some() && !self.has_placeholder(),
            _ => false,
        }
    }

    /// Whether epoll instances have the file under the numbers registered.
    pub fn is_registered(&self) -> bool {
        self.away().is_none_or(|away| away.registered)
    }

    /// Whether the application holds a number of the flow.
    pub fn is_exclusive(&self) -> bool {
        self.fds.first().is_some_and(|fd| !is_closed(*fd))
    }

    /// The descriptor of the flow's present transport, for questions to the kernel.
    pub fn probe_fd(&self) -> Option<c_int> {
        match self.mode() {
            Mode::Open => self.fds.first().copied(),
            _ => self.old(),
        }
    }

    /// A number of a suspended flow whose old transport is still under its numbers.
    pub fn exposed(&self) -> Option<c_int> {
        let away = self.away()?;
        let exposed = away.placeholder.is_none() && away.transport.is_none();
        self.fds.first().copied().filter(|_| exposed)
    }

    /// The descriptor of the transport that is away, or waits.
    pub fn old(&self) -> Option<c_int> {
        self.transport().or_else(|| self.exposed())
    }

    /// The transport on which bytes can still be sent while the flow is suspended. They go into the replay buffer like all
    /// others, and it is not trimmed meanwhile. So nothing is lost if the old transport turns out to be dead.
    pub fn half_open(&self) -> Option<c_int> {
        let open = self.receiving.is_half_open() && self.taken().is_none();
        self.old().filter(|_| open && self.away().is_some())
    }

    /// The descriptor that has the status flags of the flow's number `fd`. The always-ready stand-in is one file for all
    /// flows, so while it is under the numbers the flags are those of the private transport.
    pub fn flags_of(&self, fd: c_int) -> c_int {
        match self.mode() {
            Mode::Stashed { .. } => self.transport().unwrap_or(fd),
            Mode::Suspended if !self.has_placeholder() => self.transport().unwrap_or(fd),
            _ => fd,
        }
    }

    /// Whether calls on the flow's number `fd` must not block.
    pub fn is_nonblocking(&self, fd: c_int) -> bool {
        sys::is_nonblocking(self.flags_of(fd))
    }

    /// The descriptor of the transport whose options and owner a new one takes over: usually the flow's number `fd` itself.
    pub fn kept_under(&self, fd: c_int) -> c_int {
        match self.mode() {
            Mode::Suspended | Mode::Stashed { .. } => self.old().unwrap_or(fd),
            Mode::Open | Mode::Dead(_) | Mode::Lingering => fd,
        }
    }

    /// Both addresses of the connection, ours first.
    pub fn ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((
            self.local.as_ref()?.internet(),
            self.peer.as_ref()?.internet(),
        ))
    }

    fn away(&self) -> Option<&Away> {
        match &self.state {
            CtlState::Suspended(away) => Some(away),
            _ => None,
        }
    }

    fn away_mut(&mut self) -> Option<&mut Away> {
        match &mut self.state {
            CtlState::Suspended(away) => Some(away),
            _ => None,
        }
    }

    fn place(&mut self) -> Option<&mut Option<c_int>> {
        match &mut self.state {
            CtlState::Suspended(away) => Some(&mut away.transport),
            CtlState::StashedThenOpen { transport, .. } | CtlState::Lingering { transport, .. } => {
                Some(transport)
            }
            _ => None,
        }
    }
}

/// Changes within a state.
impl Ctl {
    /// Adds a number of the application, before SLIM's own numbers.
    pub fn add_number(&mut self, fd: c_int) {
        let at = self.fds.iter().position(|n| is_closed(*n));
        self.fds.insert(at.unwrap_or(self.fds.len()), fd);
    }

    /// Makes signals report the number `fd`.
    pub fn put_first(&mut self, fd: c_int) {
        if let Some(at) = self.fds.iter().position(|n| *n == fd) {
            self.fds[..=at].rotate_right(1);
        }
    }

    /// Sets the private transport, and closes the previous one.
    pub fn set_transport(&mut self, fd: Option<c_int>) {
        let old = self.take_transport();
        if let Some(place) = self.place() {
            *place = fd;
        } else {
            debug_assert_eq!(fd, None, "there is no place for it while {:?}", self.mode());
        }
        old.into_iter().for_each(sys::close);
    }

    /// Gives the private transport to the caller.
    pub fn take_transport(&mut self) -> Option<c_int> {
        self.place()?.take()
    }

    /// Notes an error that was taken from the transport of a suspended flow, in place of an earlier one.
    pub fn set_taken(&mut self, errno: c_int) {
        if let Some(away) = self.away_mut() {
            away.taken = NonZeroI32::new(errno);
        }
    }

    /// Notes such an error, unless there is an earlier one.
    pub fn remember_taken(&mut self, errno: c_int) {
        if let Some(away) = self.away_mut() {
            away.taken = away.taken.or(NonZeroI32::new(errno));
        }
    }

    /// Whether no non-blocking call of this direction has met the suspension before. Notes that one has.
    pub fn is_first_call(&mut self, sends: bool) -> bool {
        let met = self
            .away_mut()
            .map(|away| &mut away.met[usize::from(sends)]);
        met.is_some_and(|met| !std::mem::replace(met, true))
    }

    /// Notes whether epoll instances have the placeholder of a suspended flow registered. Called before the swap.
    pub fn register_placeholder(&mut self, registered: bool) {
        if let Some(away) = self.away_mut() {
            away.registered = registered;
        }
    }

    /// Notes that a placeholder is under the numbers. `far` is its other end, a descriptor of ours.
    pub fn set_placeholder(&mut self, far: c_int) {
        if let Some(away) = self.away_mut() {
            // A number of ours is never 0.
            away.placeholder = NonZeroI32::new(far);
        }
    }

    /// Ends the placeholder, if there is one: it is under no number any more. A process that got it unseen must not wait on it
    /// for ever.
    pub fn end_placeholder(&mut self) {
        if let Some(far) = self.away_mut().and_then(|away| away.placeholder.take()) {
            stand_in::end_placeholder(far.get());
        }
    }

    /// Clears the state of a suspension: another file is under the numbers, or is about to be.
    pub fn clear_suspension(&mut self, flow: &Flow) {
        self.end_placeholder();
        self.register_placeholder(false);
        flow.exposed.store(false, Ordering::SeqCst);
    }

    /// Sets the new transport of a suspended flow, or of one that lingers. The old transport is gone.
    pub fn install(&mut self, new: c_int) {
        debug_assert_eq!(self.transport(), None);
        self.set_transport(Some(new));
        if let Some(away) = self.away_mut() {
            away.taken = None;
        }
    }

    /// Notes that the flow becomes plain TCP as soon as nothing is stashed.
    pub fn become_plain(&mut self) {
        if let CtlState::StashedThenOpen { plain, .. } = &mut self.state {
            *plain = true;
        }
    }

    /// Notes that the application has closed the last number of a lingering flow unseen.
    pub fn mark_lost(&mut self) {
        if let CtlState::Lingering { lost, .. } = &mut self.state {
            *lost = true;
        }
    }
}

/// The transitions.
impl Ctl {
    /// Changes the state. The move must be in the transition table. A release build goes on in any case: the file is under
    /// the numbers by then.
    fn go(&mut self, next: CtlState) {
        let from = self.mode();
        debug_assert!(!self.has_placeholder(), "a placeholder is ended first");
        self.state = next;
        let to = self.mode();
        debug_assert!(from.allows(to), "no move from {from:?} to {to:?}");
    }

    /// Suspends the flow. A transport under the numbers stays there; a waiting transport goes on waiting.
    pub fn suspend(&mut self) {
        let transport = self.take_transport();
        self.go(CtlState::Suspended(Away {
            transport,
            ..Away::default()
        }));
    }

    /// Opens the flow: the transport is under the numbers, after [`take_transport`](Self::take_transport).
    pub fn open(&mut self) {
        debug_assert_eq!(self.transport(), None);
        self.go(CtlState::Open);
        self.receiving.reinstate();
    }

    /// Makes the transport of a suspended flow wait until the stash is read.
    pub fn show_stash(&mut self) {
        let transport = self.take_transport();
        self.go(CtlState::StashedThenOpen {
            transport,
            plain: false,
        });
    }

    /// Gives the flow up. Stashed bytes are read first. Then the application gets the `pending` error, or the kernel's answer
    /// if there is none.
    pub fn escalate(&mut self, pending: Option<c_int>) {
        debug_assert_eq!(self.transport(), None);
        self.go(match (pending, self.receiving.stash.is_empty()) {
            (None, _) => CtlState::StashedThenOver,
            (Some(errno), true) => CtlState::Dead(errno),
            (Some(errno), false) => CtlState::StashedThenError(errno),
        });
    }

    /// The stash of a flow with a pending error has been read.
    pub fn mark_dead(&mut self) {
        if let CtlState::StashedThenError(errno) = self.state {
            self.go(CtlState::Dead(errno));
        }
    }

    /// The application has got the pending error; the stash has not been read yet.
    pub fn clear_pending_error(&mut self) {
        self.go(CtlState::StashedThenOver);
    }

    /// The application has no number of the flow any more. A private transport stays.
    pub fn linger(&mut self) {
        if self.mode() != Mode::Lingering {
            let transport = self.take_transport();
            self.go(CtlState::Lingering {
                transport,
                lost: false,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAITS: Mode = Mode::Stashed { then: Then::Open };
    const ERROR: Mode = Mode::Stashed {
        then: Then::Error(libc::ETIMEDOUT),
    };
    const DEAD: Mode = Mode::Dead(libc::ETIMEDOUT);

    fn open() -> Ctl {
        Ctl::of(0, (None, None), ReceiveHalf::new(true))
    }

    #[test]
    fn the_data_of_a_state_ends_with_the_state() {
        let mut ctl = open();
        ctl.set_taken(libc::EPIPE);
        assert_eq!(
            (ctl.mode(), ctl.taken(), ctl.exposed()),
            (Mode::Open, None, None)
        );
        ctl.suspend();
        assert_eq!(
            (ctl.exposed(), ctl.old(), ctl.is_registered()),
            (Some(0), Some(0), false)
        );
        ctl.remember_taken(libc::EPIPE);
        ctl.remember_taken(libc::ECONNRESET);
        assert_eq!(ctl.taken(), Some(libc::EPIPE));
        ctl.install(99);
        assert_eq!(
            (ctl.taken(), ctl.exposed(), ctl.old()),
            (None, None, Some(99))
        );
        ctl.show_stash();
        assert_eq!(
            (ctl.mode(), ctl.transport(), ctl.is_plain()),
            (WAITS, Some(99), false)
        );
        ctl.add_number(1);
        ctl.put_first(1);
        assert_eq!(ctl.fds[..], [1, 0]);
        ctl.put_first(0);
        assert_eq!(ctl.fds[..], [0, 1]);
        ctl.become_plain();
        assert!(ctl.is_plain() && ctl.is_registered());
        ctl.suspend();
        assert_eq!((ctl.transport(), ctl.is_plain()), (Some(99), false));
        assert_eq!(ctl.take_transport(), Some(99));
        ctl.open();
        assert_eq!((ctl.mode(), ctl.probe_fd()), (Mode::Open, Some(0)));
        ctl.mark_lost();
        assert!(!ctl.is_lost());
        ctl.linger();
        ctl.mark_lost();
        ctl.linger();
        assert!(ctl.is_lost());
    }

    #[test]
    fn a_flow_that_is_given_up_is_dead_when_its_stash_has_been_read() {
        let mut ctl = open();
        ctl.suspend();
        ctl.receiving.stash.push(b"left").unwrap();
        ctl.escalate(Some(libc::ETIMEDOUT));
        assert_eq!(ctl.mode(), ERROR);
        ctl.mark_dead();
        assert_eq!(ctl.mode(), DEAD);
        ctl.mark_dead();
        assert_eq!(ctl.mode(), DEAD);
    }

    #[test]
    #[should_panic(expected = "no move from Dead")]
    #[cfg(debug_assertions)]
    fn a_move_that_is_not_in_the_table_panics() {
        let mut ctl = open();
        ctl.escalate(Some(libc::ETIMEDOUT));
        ctl.suspend();
    }
}
