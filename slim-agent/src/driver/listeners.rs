//! The application's listeners: which process has the control socket, and for how long.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use slim_core::endpoint::State;
use slim_core::{FlowToken, Time};

use super::{Driver, Notice};
use crate::commands::done::Done;
use crate::control::socket::answering;
use crate::listeners::claims::{self, Found};
use crate::listeners::listened::is_listened_on;
use crate::listeners::listening::{LOOK_AGAIN, NEVER, Served};
use crate::listeners::neighbour::Neighbour;
use crate::listeners::notes::{Note, Which};
use crate::tasks::Task;

impl Driver {
    /// The owner of the control socket of `addr` is gone. The next connection that is accepted finds another owner, and
    /// so do flows that still wait for HELLO.
    pub(crate) fn owner_lost(&mut self, addr: SocketAddr, link: &Rc<Neighbour>) {
        if !self.claims.owner_lost(addr, link) {
            return;
        }
        self.together.elsewhere.lock().remove(&addr);
        for (token, tuple) in self.claims.orphans() {
            if self.endpoint.state(token) == Some(State::Negotiating) {
                self.claim(token, tuple);
            }
        }
    }

    /// Ensures that HELLO for a connection reaches this process. The application thread that accepted the connection
    /// has found or become the owner, but that owner may be gone since.
    pub(crate) fn claim(&mut self, token: FlowToken, tuple: (SocketAddr, SocketAddr)) {
        self.find_owner(tuple.0);
        let owned = self.control.owns(tuple.0);
        let which = self.survivor.io(token).map(|io| Which {
            age: io.age().unwrap_or(Duration::MAX),
            connection: io.connection(),
        });
        self.claims
            .accepted(token, tuple, which.unwrap_or_default(), owned);
    }

    fn find_owner(&mut self, local: SocketAddr) {
        if self.control.owns(local) || self.claims.knows_owner(local) {
            return;
        }
        let (listeners, elsewhere) = (
            self.together.listeners.clone(),
            self.together.elsewhere.clone(),
        );
        let mut listeners = listeners.lock();
        if answering(listeners.keys().copied(), local).is_some() {
            // An application thread has bound the socket already; its command is on the way.
            return;
        }
        let mut elsewhere = elsewhere.lock();
        let known = answering(elsewhere.keys().copied(), local);
        if let Some(Some(until)) = known.and_then(|known| elsewhere.get(&known))
            && Instant::now() < *until
        {
            return;
        }
        match claims::find_or_own(local) {
            Found::Ours(socket, claims) => {
                listeners.insert(local, Served::Listeners(1));
                self.control.add(local, socket, &mut self.tasks);
                if let Some(claims) = claims {
                    self.claims.open(local, claims, &mut self.tasks);
                }
            }
            Found::Elsewhere(owner) => {
                elsewhere.insert(local, None);
                self.claims.found(local, owner, &mut self.tasks);
            }
            Found::Nobody(_) => {
                elsewhere.insert(local, Instant::now().checked_add(LOOK_AGAIN));
            }
        }
    }

    /// The application has closed its last listener on `addr`. The control socket is closed, too, unless it is still
    /// needed: HELLO may be on its way for connections that were accepted there, and other processes may accept from a
    /// copy of the listener. In that case this is checked again later.
    pub(crate) fn unlistened(&mut self, now: Time, addr: SocketAddr) {
        let listeners = self.together.listeners.lock();
        let again = listeners.get(&addr) != Some(&Served::Listeners(0));
        drop(listeners);
        if again {
            return self.watch.unlistened_no_more(addr);
        }
        let here = |local| answering([addr].into_iter(), local).is_some();
        if self.endpoint.negotiates_at(here) || is_listened_on(addr) {
            self.watch.unlistened(now, addr);
            return;
        }
        // Pending connections cannot be accepted any more: answer their HELLOs now, so that the peers need not wait for
        // a refusal.
        self.endpoint.refuse_pending(here);
        self.notices.push_back(Notice::Unlistened(addr));
    }

    /// Closes a listener's control socket, unless the application listens there again.
    pub(crate) fn close_listener(&mut self, addr: SocketAddr, done: Option<Done>) {
        self.watch.unlistened_no_more(addr);
        let mut listeners = self.together.listeners.lock();
        if let Some(served @ Served::Listeners(0)) = listeners.get_mut(&addr) {
            *served = Served::Closing;
            let socket = self.control.stop(addr);
            self.tasks
                .start_and_forget(Task::Close { addr, socket, done });
        }
    }

    /// The control socket is closed, and so is the socket on which other processes claim connections.
    pub(crate) fn listener_closed(&mut self, addr: SocketAddr) {
        self.together.listeners.lock().remove(&addr);
    }

    /// Another process wants the UDP port of our listener's address `addr`, and may have it. Connections to `addr` are
    /// plain TCP from now on. False if this process does not have the port.
    pub(crate) fn give_way(&mut self, addr: SocketAddr) -> bool {
        let mut listeners = self.together.listeners.lock();
        let Some(Served::Listeners(count)) = listeners.get_mut(&addr) else {
            return false;
        };
        *count = 0;
        drop(listeners);
        self.never_again(addr);
        self.claims.tell_guests(addr, &Note::Given(addr));
        self.close_listener(addr, None);
        true
    }

    /// The UDP port of `addr` was released: this process must not become the owner again.
    pub(crate) fn never_again(&mut self, addr: SocketAddr) {
        let mut elsewhere = self.together.elsewhere.lock();
        elsewhere.insert(addr, Instant::now().checked_add(NEVER));
    }

    /// Whether a process of user `user` may have the UDP port of our listener. Without a job key the process that has
    /// the port could answer HELLO in our place.
    pub(crate) fn may_have(&self, user: Option<libc::uid_t>) -> bool {
        self.keyed || user.is_some_and(|user| user == 0 || user == slim_sys::user())
    }
}
