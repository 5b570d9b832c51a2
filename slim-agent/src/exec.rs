//! What goes over to the next program, when this process executes one: the identity of the process, the sockets at which peers reach
//! it, and the flows.
//!
//! The kernel ends the agent thread at the exec. Until then nothing may happen that the next program does not learn of, so the agent
//! thread stops as soon as it has answered. If the exec fails, it goes on where it has stopped.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use slim_core::endpoint::HandedFlow;
use slim_core::saved::Saved;
use slim_core::{EndpointId, FlowToken};

use slim_sys::OwnFd;

/// Why a flow is not handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotHanded {
    /// Not yet, but soon: it negotiates, or a call is sending on it.
    Soon,
    /// Not before its outage is over.
    Busy,
    /// It has no session that another program can go on with.
    Never,
}

/// The agent as the next program gets it.
pub struct HandedAgent {
    pub(crate) identity: Identity,
    /// UDP port of the control sockets, and TCP port of the resume listeners.
    pub(crate) ports: (u16, u16),
    pub(crate) maps: bool,
    pub(crate) places: Vec<HandedPlace>,
    /// The flows, by the tokens that they have had.
    pub flows: Vec<(FlowToken, HandedFlow)>,
}

/// What peers know the process by.
#[derive(Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) id: EndpointId,
    /// Serial number of the locators that peers know.
    pub(crate) serial: u64,
}

/// The sockets at one address.
pub(crate) struct HandedPlace {
    pub(crate) at: SocketAddr,
    pub(crate) control: HandedFd,
    pub(crate) resume: Option<HandedFd>,
}

/// A descriptor that survives the exec, and the socket that is under it.
pub(crate) struct HandedFd {
    number: RawFd,
    socket: u64,
}

impl HandedFd {
    pub(crate) fn of(number: RawFd) -> Option<Self> {
        let socket = slim_sys::identity(number)?;
        Some(HandedFd { number, socket })
    }

    /// The socket, if it is there.
    pub(crate) fn take(&self) -> Option<OwnFd> {
        let is_there = slim_sys::identity(self.number) == Some(self.socket);
        // SAFETY: the program has not run yet, and the program before it has left this socket for us.
        is_there.then(|| unsafe { OwnFd::inherited(self.number) })
    }
}

impl HandedAgent {
    /// The numbers of all descriptors that must survive the exec.
    pub fn numbers(&self) -> Vec<RawFd> {
        let control = self.places.iter().map(|place| place.control.number);
        let resume = self.places.iter().filter_map(|place| place.resume.as_ref());
        control.chain(resume.map(|fd| fd.number)).collect()
    }
}

impl Saved for HandedFd {
    fn save(&self, out: &mut Vec<u8>) {
        (self.number, self.socket).save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (number, socket) = Saved::load(from)?;
        Some(HandedFd { number, socket })
    }
}

impl Saved for HandedPlace {
    fn save(&self, out: &mut Vec<u8>) {
        self.at.save(out);
        self.control.save(out);
        self.resume.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        Some(HandedPlace {
            at: Saved::load(from)?,
            control: Saved::load(from)?,
            resume: Saved::load(from)?,
        })
    }
}

impl Saved for HandedAgent {
    fn save(&self, out: &mut Vec<u8>) {
        (self.identity.id, self.identity.serial).save(out);
        self.ports.save(out);
        self.maps.save(out);
        self.places.save(out);
        self.flows.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let (id, serial) = Saved::load(from)?;
        Some(HandedAgent {
            identity: Identity { id, serial },
            ports: Saved::load(from)?,
            maps: Saved::load(from)?,
            places: Saved::load(from)?,
            flows: Saved::load(from)?,
        })
    }
}

/// No answer yet.
const ASKED: u32 = 0;
/// The agent thread has stopped.
const HELD: u32 = 1;
/// It goes on, or does not stop any more.
const OVER: u32 = 2;

/// Where the agent thread stops.
#[derive(Clone, Default)]
pub(crate) struct AgentPause(Arc<AtomicU32>);

impl AgentPause {
    /// Stops the agent thread until [`end`](Self::end). Calls `stopped` first, unless the pause has ended already.
    pub(crate) fn hold(&self, stopped: impl FnOnce()) {
        let begun = self
            .0
            .compare_exchange(ASKED, HELD, Ordering::SeqCst, Ordering::SeqCst);
        if begun.is_ok() {
            stopped();
            while self.0.load(Ordering::SeqCst) == HELD {
                let _ = slim_sys::futex_wait(&self.0, HELD, None);
            }
        }
    }

    /// Lets the agent thread go on. Returns whether it had stopped.
    fn end(&self) -> bool {
        let was_held = self.0.swap(OVER, Ordering::SeqCst) == HELD;
        slim_sys::futex_wake_all(&self.0);
        was_held
    }
}

/// The agent thread has stopped, and goes on when this is dropped.
pub struct Stopped(AgentPause);

impl Stopped {
    pub(crate) fn new(pause: AgentPause) -> Self {
        Stopped(pause)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_stops_until_the_pause_ends() {
        let pause = AgentPause::default();
        let (tell, told) = mpsc::channel();
        let held = pause.clone();
        let thread = thread::spawn(move || held.hold(|| tell.send(()).unwrap()));
        told.recv().unwrap();
        assert!(!thread.is_finished());
        drop(Stopped::new(pause));
        thread.join().unwrap();
    }

    #[test]
    fn a_pause_that_has_ended_does_not_begin() {
        let pause = AgentPause::default();
        assert!(!pause.end());
        pause.hold(|| panic!("nobody waits for the answer"));
    }

    #[test]
    fn sockets_that_are_not_there_are_not_taken() {
        let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&other);
        let fd = HandedFd {
            number,
            socket: HandedFd::of(number).unwrap().socket + 1,
        };
        assert!(fd.take().is_none());
        assert!(slim_sys::is_open(number));
    }
}
