//! The part of a flow that changes when its transport does: its [state](Mode), and what belongs to each.

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

/// Whether a number of a flow is SLIM's own. Such a number holds registrations by numbers that the application has closed
/// ([`crate::epoll`]).
pub fn is_closed(fd: c_int) -> bool {
    slim_sys::fds::is_internal(fd)
}

/// [`Mode`], with what belongs to each. Private, so that nobody sets it past the table.
#[derive(Debug)]
enum CtlState {
    Open,
    Suspended(Away),
    StashedThenOpen {
        /// It waits; a descriptor of ours.
        transport: Option<c_int>,
        /// The agent has let go of the flow: it is plain TCP as soon as nothing is stashed.
        plain: bool,
    },
    StashedThenOwed(c_int),
    StashedThenOver,
    Dead(c_int),
    Lingering {
        /// The one that the kernel delivers on what is left; a descriptor of ours.
        transport: Option<c_int>,
        /// The application has closed the last number unseen: what it wrote to the flow, and what to the number's next file,
        /// cannot be told apart.
        lost: bool,
    },
}

/// Of a suspended flow.
#[derive(Debug, Default)]
struct Away {
    /// The old transport if the numbers do not have it, or the new one that is about to take them; a descriptor of ours.
    transport: Option<c_int>,
    /// A placeholder that is never ready is under the numbers: its other end, a descriptor of ours.
    veil: Option<NonZeroI32>,
    /// ... and epoll instances have it.
    registered: bool,
    /// The error that somebody of us took from the transport: owed if the transport is put back.
    taken: Option<NonZeroI32>,
}

/// The part of a flow that changes when its transport does.
pub struct Ctl {
    state: CtlState,
    /// The application's descriptor numbers for this flow; mostly one.
    pub fds: SmallVec<[c_int; 4]>,
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
    /// Of a flow that is not in use.
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
            opened: None,
        }
    }

    /// Of a flow with its first transport under `fd`, between the ends `local` and `peer`.
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

    /// What is under the numbers.
    pub fn mode(&self) -> Mode {
        let stashed = |then| Mode::Stashed { then };
        match self.state {
            CtlState::Open => Mode::Open,
            CtlState::Suspended(_) => Mode::Suspended,
            CtlState::StashedThenOpen { .. } => stashed(Then::Open),
            CtlState::StashedThenOwed(errno) => stashed(Then::Owed(errno)),
            CtlState::StashedThenOver => stashed(Then::Over),
            CtlState::Dead(errno) => Mode::Dead(errno),
            CtlState::Lingering { .. } => Mode::Lingering,
        }
    }

    /// A descriptor of ours: the old transport (suspended and veiled, lingering), or the new one (stashed).
    pub fn transport(&self) -> Option<c_int> {
        match &self.state {
            CtlState::Suspended(away) => away.transport,
            CtlState::StashedThenOpen { transport, .. } | CtlState::Lingering { transport, .. } => {
                *transport
            }
            _ => None,
        }
    }

    /// The error that somebody of us took from the transport.
    pub fn taken(&self) -> Option<c_int> {
        Some(self.away()?.taken?.get())
    }

    /// Whether the application has closed the last number unseen.
    pub fn is_lost(&self) -> bool {
        matches!(self.state, CtlState::Lingering { lost: true, .. })
    }

    /// Whether the flow is plain TCP as soon as nothing is stashed.
    pub fn is_plain(&self) -> bool {
        matches!(self.state, CtlState::StashedThenOpen { plain: true, .. })
    }

    /// Whether a placeholder that is never ready is under the numbers.
    pub fn is_veiled(&self) -> bool {
        self.away().is_some_and(|away| away.veil.is_some())
    }

    /// Whether the stand-in of a stash is under the numbers: it stays there while the flow is suspended again, if there is no
    /// descriptor for a placeholder.
    pub fn shows_stash(&self) -> bool {
        match self.mode() {
            Mode::Stashed { .. } => true,
            Mode::Suspended => self.transport().is_some() && !self.is_veiled(),
            _ => false,
        }
    }

    /// Whether epoll instances have what is under the numbers.
    pub fn is_registered(&self) -> bool {
        self.away().is_none_or(|away| away.registered)
    }

    /// Whether the application has a number of the flow.
    pub fn is_held(&self) -> bool {
        self.fds.first().is_some_and(|fd| !is_closed(*fd))
    }

    /// The descriptor on which the kernel's view of the flow's present transport can be asked.
    pub fn probe_fd(&self) -> Option<c_int> {
        match self.mode() {
            Mode::Open => self.fds.first().copied(),
            _ => self.old(),
        }
    }

    /// The number of a suspended flow under which its old transport still is.
    pub fn exposed(&self) -> Option<c_int> {
        let away = self.away()?;
        let exposed = away.veil.is_none() && away.transport.is_none();
        self.fds.first().copied().filter(|_| exposed)
    }

    /// The transport that is away, or waits.
    pub fn old(&self) -> Option<c_int> {
        self.transport().or_else(|| self.exposed())
    }

    /// Where bytes can still be sent while the flow is suspended. They are kept as all others are, and nothing is
    /// forgotten meanwhile, so it does no harm if the old transport turns out to be of no use.
    pub fn half_open(&self) -> Option<c_int> {
        let open = self.receiving.is_half_open() && self.taken().is_none();
        self.old().filter(|_| open && self.away().is_some())
    }

    /// The descriptor that has the status flags of the flow's number `fd`: the always-ready stand-in is one file for
    /// all flows, so a flow that shows it has those of its waiting transport.
    pub fn flags_of(&self, fd: c_int) -> c_int {
        match self.mode() {
            Mode::Stashed { .. } => self.transport().unwrap_or(fd),
            Mode::Suspended if !self.is_veiled() => self.transport().unwrap_or(fd),
            _ => fd,
        }
    }

    /// Whether calls on the flow's number `fd` must not wait.
    pub fn is_nonblocking(&self, fd: c_int) -> bool {
        sys::is_nonblocking(self.flags_of(fd))
    }

    /// The descriptor of the transport whose state a new one takes over: mostly the flow's number `fd` itself.
    pub fn kept_under(&self, fd: c_int) -> c_int {
        match self.mode() {
            Mode::Suspended | Mode::Stashed { .. } => self.old().unwrap_or(fd),
            Mode::Open | Mode::Dead(_) | Mode::Lingering => fd,
        }
    }

    /// Both ends of the connection, ours first.
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

/// What belongs to a state.
impl Ctl {
    /// Takes a number up. Those that the application has come first.
    pub fn add_number(&mut self, fd: c_int) {
        let at = self.fds.iter().position(|n| is_closed(*n));
        self.fds.insert(at.unwrap_or(self.fds.len()), fd);
    }

    /// Sets the private transport and closes the one that was there.
    pub fn set_transport(&mut self, fd: Option<c_int>) {
        let old = self.take_transport();
        if let Some(place) = self.place() {
            *place = fd;
        } else {
            debug_assert_eq!(fd, None, "there is no place for it while {:?}", self.mode());
        }
        old.into_iter().for_each(sys::close);
    }

    /// The private transport is the caller's.
    pub fn take_transport(&mut self) -> Option<c_int> {
        self.place()?.take()
    }

    /// An error was taken from the transport of a suspended flow: the last one counts.
    pub fn set_taken(&mut self, errno: c_int) {
        if let Some(away) = self.away_mut() {
            away.taken = NonZeroI32::new(errno);
        }
    }

    /// Likewise; the first one counts.
    pub fn remember_taken(&mut self, errno: c_int) {
        if let Some(away) = self.away_mut() {
            away.taken = away.taken.or(NonZeroI32::new(errno));
        }
    }

    /// What is put under the numbers of a suspended flow next is a placeholder, and epoll instances are to have it, or not.
    pub fn register_veil(&mut self, registered: bool) {
        if let Some(away) = self.away_mut() {
            away.registered = registered;
        }
    }

    /// A placeholder is under the numbers, whose other end, a descriptor of ours, is `far`.
    pub fn veil(&mut self, far: c_int) {
        if let Some(away) = self.away_mut() {
            // A number of ours is never 0.
            away.veil = NonZeroI32::new(far);
        }
    }

    /// The placeholder, if there is one, is under no number any more. Whoever got it from us without our seeing it is
    /// not to wait for ever.
    pub fn lift_veil(&mut self) {
        if let Some(far) = self.away_mut().and_then(|away| away.veil.take()) {
            stand_in::lift(far.get());
        }
    }

    /// Something else is under the numbers than while the flow was suspended, or is about to be.
    pub fn uncover(&mut self, flow: &Flow) {
        self.lift_veil();
        self.register_veil(false);
        flow.exposed.store(false, Ordering::SeqCst);
    }

    /// A new transport has come for a suspended flow, or for one that lingers. The old one is gone.
    pub fn install(&mut self, new: c_int) {
        debug_assert_eq!(self.transport(), None);
        self.set_transport(Some(new));
        if let Some(away) = self.away_mut() {
            away.taken = None;
        }
    }

    /// The flow is plain TCP as soon as nothing is stashed.
    pub fn become_plain(&mut self) {
        if let CtlState::StashedThenOpen { plain, .. } = &mut self.state {
            *plain = true;
        }
    }

    /// The application has closed the last number of a flow that lingers unseen.
    pub fn lose(&mut self) {
        if let CtlState::Lingering { lost, .. } = &mut self.state {
            *lost = true;
        }
    }
}

/// The moves.
impl Ctl {
    /// The move must be in the table. A release build goes on: what is under the numbers is there by then.
    fn go(&mut self, next: CtlState) {
        let from = self.mode();
        debug_assert!(!self.is_veiled(), "a veil is lifted first");
        self.state = next;
        let to = self.mode();
        debug_assert!(from.allows(to), "no move from {from:?} to {to:?}");
    }

    /// Data calls are kept out. A transport that is under the numbers stays there; one that waits waits on.
    pub fn suspend(&mut self) {
        let transport = self.take_transport();
        self.go(CtlState::Suspended(Away {
            transport,
            ..Away::default()
        }));
    }

    /// The transport is under the numbers, where [`take_transport`](Self::take_transport) has brought it.
    pub fn open(&mut self) {
        debug_assert_eq!(self.transport(), None);
        self.go(CtlState::Open);
        self.receiving.put_back();
    }

    /// The transport of a suspended flow waits until the stash is read.
    pub fn show_stash(&mut self) {
        let transport = self.take_transport();
        self.go(CtlState::StashedThenOpen {
            transport,
            plain: false,
        });
    }

    /// The flow is given up. What is stashed is read first; then the application gets the errno that is `owed`, or what the
    /// kernel says.
    pub fn escalate(&mut self, owed: Option<c_int>) {
        debug_assert_eq!(self.transport(), None);
        self.go(match (owed, self.receiving.stash.is_empty()) {
            (None, _) => CtlState::StashedThenOver,
            (Some(errno), true) => CtlState::Dead(errno),
            (Some(errno), false) => CtlState::StashedThenOwed(errno),
        });
    }

    /// The stash of a flow that owes an errno is read.
    pub fn die(&mut self) {
        if let CtlState::StashedThenOwed(errno) = self.state {
            self.go(CtlState::Dead(errno));
        }
    }

    /// Nothing is owed any more; the stash is not read yet.
    pub fn pay(&mut self) {
        self.go(CtlState::StashedThenOver);
    }

    /// The application has no number of the flow any more. A transport of ours stays.
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
    const OWED: Mode = Mode::Stashed {
        then: Then::Owed(libc::ETIMEDOUT),
    };
    const DEAD: Mode = Mode::Dead(libc::ETIMEDOUT);

    fn open() -> Ctl {
        Ctl::of(0, (None, None), ReceiveHalf::new(true))
    }

    #[test]
    fn what_belongs_to_a_state_goes_with_it() {
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
        ctl.become_plain();
        assert!(ctl.is_plain() && ctl.is_registered());
        ctl.suspend();
        assert_eq!((ctl.transport(), ctl.is_plain()), (Some(99), false));
        assert_eq!(ctl.take_transport(), Some(99));
        ctl.open();
        assert_eq!((ctl.mode(), ctl.probe_fd()), (Mode::Open, Some(0)));
        ctl.lose();
        assert!(!ctl.is_lost());
        ctl.linger();
        ctl.lose();
        ctl.linger();
        assert!(ctl.is_lost());
    }

    #[test]
    fn what_is_given_up_with_a_stash_dies_when_that_is_read() {
        let mut ctl = open();
        ctl.suspend();
        ctl.receiving.stash.push(b"left").unwrap();
        ctl.escalate(Some(libc::ETIMEDOUT));
        assert_eq!(ctl.mode(), OWED);
        ctl.die();
        assert_eq!(ctl.mode(), DEAD);
        ctl.die();
        assert_eq!(ctl.mode(), DEAD);
    }

    #[test]
    #[should_panic(expected = "no move from Dead")]
    #[cfg(debug_assertions)]
    fn a_move_that_is_not_in_the_table_is_a_bug() {
        let mut ctl = open();
        ctl.escalate(Some(libc::ETIMEDOUT));
        ctl.suspend();
    }
}
