//! Application threads set up the control sockets of listeners, so that each exists before the first connection.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};

use slim_sys::lock::Guard;
use slim_sys::{OwnFd, as_agent};

use super::{Agent, OwnAgent};
use crate::commands::command::Command;
use crate::commands::done::{self, Done};
use crate::control::socket::{answering, bind_for_listener};
use crate::listeners::claims::{self, Found};
use crate::listeners::listening::{LOOK_AGAIN, NEVER, Served};

/// How long to wait for the agent thread to close a socket.
const CLOSE_LIMIT: Duration = Duration::from_millis(200);
/// Interval between checks whether the socket is closed.
const CLOSE_LOOK: Duration = Duration::from_micros(50);

impl Agent {
    /// The application listens on `addr` with `fd`: binds a UDP control socket to the same address and port. This
    /// happens in the calling thread, so that the control socket exists before the first connection.
    ///
    /// If the UDP port is taken, connections accepted there stay plain TCP, which is logged at level `info`.
    pub fn listen(&self, fd: BorrowedFd<'_>, addr: SocketAddr) {
        if let Some(guest) = self.guest() {
            return guest.listen(fd, addr);
        }
        let Some(own) = self.own() else {
            return;
        };
        as_agent(|| {
            let mut listeners = own.listeners_at(|other| other == addr);
            if let Some(Served::Listeners(count)) = listeners.get_mut(&addr) {
                *count += 1;
                return;
            }
            let bind = || bind_for_listener(fd, addr);
            match claims::own_or_find(addr, bind) {
                Found::Ours(socket, claims) => {
                    own.together.elsewhere.lock().remove(&addr);
                    self.serve(addr, socket, claims, &mut listeners);
                }
                // Several processes listen there, each with its own listener.
                Found::Elsewhere(owner) => {
                    own.together.elsewhere.lock().insert(addr, None);
                    self.send(Command::Elsewhere { addr, owner });
                }
                Found::Nobody(error) => {
                    self.send(Command::Inform(format!(
                        "no control socket on {addr} ({error}): connections to it are plain TCP"
                    )));
                }
            }
        });
    }

    /// A listener on `addr` was closed.
    pub fn unlisten(&self, addr: SocketAddr) {
        match self.guest() {
            Some(guest) => guest.unlisten(addr),
            None => drop(self.unlisten_with(addr, None)),
        }
    }

    /// Releases the UDP port of a listener's address, because the application wants to bind it. Waits at most 0.2 s
    /// until the control socket is closed. Flows that are already negotiated are not affected. Returns false if no
    /// control socket of this process had the port.
    pub fn release(&self, addr: SocketAddr) -> bool {
        let Some(own) = self.own() else {
            return false;
        };
        // A wildcard address conflicts with every address that has its port.
        let wanted = |other: &SocketAddr| {
            *other == addr || (addr.ip().is_unspecified() && other.port() == addr.port())
        };
        let in_the_way: Vec<SocketAddr> = own
            .together
            .listeners
            .lock()
            .keys()
            .copied()
            .filter(wanted)
            .collect();
        let any = !in_the_way.is_empty();
        for addr in in_the_way {
            let (done, closed) = done::done();
            // Prevents that it is bound again when the next connection is accepted.
            let until = Instant::now().checked_add(NEVER);
            own.together.elsewhere.lock().insert(addr, until);
            if let Some(Served::Listeners(count)) =
                own.listeners_at(|other| other == addr).get_mut(&addr)
            {
                *count = 1;
            }
            if self.unlisten_with(addr, Some(done)) {
                self.wait(closed, CLOSE_LIMIT);
            }
        }
        any
    }

    fn unlisten_with(&self, addr: SocketAddr, done: Option<Done>) -> bool {
        let Some(own) = self.own() else {
            return false;
        };
        let last = match own.together.listeners.lock().get_mut(&addr) {
            Some(Served::Listeners(count)) => {
                *count = count.saturating_sub(1);
                *count == 0
            }
            Some(Served::Closing) | None => false,
        };
        last && self.send(Command::Unlisten { addr, done })
    }

    /// Ensures that HELLO for connections to `local` reaches this process: by a control socket of its own, by the
    /// process that owns the control socket, or by a control socket bound here because no process has one. Signals are
    /// blocked.
    pub(super) fn find_control_socket(&self, local: SocketAddr) {
        // The host of a guest does this for the guest.
        let Some(own) = self.own() else {
            return;
        };
        let mut listeners =
            own.listeners_at(|other| answering([other].into_iter(), local).is_some());
        if answering(listeners.keys().copied(), local).is_some() {
            return;
        }
        let mut elsewhere = own.together.elsewhere.lock();
        let known = answering(elsewhere.keys().copied(), local);
        if let Some(until) = known.and_then(|known| elsewhere.get(&known))
            && until.is_none_or(|until| Instant::now() < until)
        {
            return;
        }
        as_agent(|| match claims::find_or_own(local) {
            Found::Ours(socket, claims) => {
                elsewhere.remove(&local);
                self.serve(local, socket, claims, &mut listeners);
            }
            Found::Elsewhere(owner) => {
                elsewhere.insert(local, None);
                self.send(Command::Elsewhere { addr: local, owner });
            }
            // A program without SLIM has the port.
            Found::Nobody(_) => {
                elsewhere.insert(local, Instant::now().checked_add(LOOK_AGAIN));
            }
        });
    }

    fn serve(
        &self,
        addr: SocketAddr,
        socket: OwnFd,
        claims: Option<OwnFd>,
        listeners: &mut HashMap<SocketAddr, Served>,
    ) {
        if self.send(Command::Listen {
            addr,
            socket,
            claims,
        }) {
            listeners.insert(addr, Served::Listeners(1));
        }
    }
}

impl OwnAgent {
    /// Locks the listeners once no control socket at an address for which `meant` holds is being closed. Closing takes
    /// less than a millisecond; this waits at most [`CLOSE_LIMIT`].
    fn listeners_at(
        &self,
        meant: impl Fn(SocketAddr) -> bool,
    ) -> Guard<'_, HashMap<SocketAddr, Served>> {
        let begun = Instant::now();
        loop {
            let listeners = self.together.listeners.lock();
            let closing =
                |(addr, served): (&SocketAddr, &Served)| *served == Served::Closing && meant(*addr);
            if !listeners.iter().any(closing) || begun.elapsed() > CLOSE_LIMIT {
                return listeners;
            }
            drop(listeners);
            thread::sleep(CLOSE_LOOK);
        }
    }
}
