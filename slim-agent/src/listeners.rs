//! The application's listeners: who has the control socket, and for how long.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::PoisonError;
use std::time::Instant;

use slim_core::endpoint::State;
use slim_core::{FlowToken, Time};
use tokio::task;

use crate::agent::LOOK_AGAIN;
use crate::claims::{self, Found, Link};
use crate::control::{self, answering};
use crate::done::Done;
use crate::driver::{Driver, Notice};
use crate::listened::is_listened_on;
use crate::shared::Shared;

impl Driver {
    /// The process that had the control socket of `addr` has it no more. The next connection that
    /// is accepted finds another one, and so do those that still wait for HELLO.
    pub(crate) fn owner_lost(&mut self, addr: SocketAddr, link: &Rc<Link>, shared: &Rc<Shared>) {
        if !self.claims.owner_lost(addr, link) {
            return;
        }
        self.elsewhere
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&addr);
        for (token, tuple) in self.claims.orphans() {
            if self.endpoint.state(token) == Some(State::Negotiating) {
                self.claim(token, tuple, shared);
            }
        }
    }

    /// Sees to it that HELLO for a connection comes to us. The application thread that accepted it
    /// has done most of it, but the owner that it counted on may have gone since.
    pub(crate) fn claim(
        &mut self,
        token: FlowToken,
        tuple: (SocketAddr, SocketAddr),
        shared: &Rc<Shared>,
    ) {
        self.find_owner(tuple.0, shared);
        let owned = self.control.owns(tuple.0);
        self.claims.accepted(token, tuple, owned);
    }

    fn find_owner(&mut self, local: SocketAddr, shared: &Rc<Shared>) {
        if self.control.owns(local) || self.claims.knows_owner(local) {
            return;
        }
        let (listeners, elsewhere) = (self.listeners.clone(), self.elsewhere.clone());
        let mut listeners = listeners.lock().unwrap_or_else(PoisonError::into_inner);
        if control::answering(listeners.keys().copied(), local).is_some() {
            // An application thread was faster; its command is on the way.
            return;
        }
        let mut elsewhere = elsewhere.lock().unwrap_or_else(PoisonError::into_inner);
        let known = control::answering(elsewhere.keys().copied(), local);
        if let Some(Some(until)) = known.and_then(|known| elsewhere.get(&known))
            && Instant::now() < *until
        {
            return;
        }
        match claims::reach_or_settle(local) {
            Found::Ours(socket, claims) => {
                listeners.insert(local, 1);
                self.control.add(local, socket, shared);
                if let Some(claims) = claims {
                    self.claims.open(local, claims, shared);
                }
            }
            Found::Elsewhere(owner) => {
                elsewhere.insert(local, None);
                self.claims.found(local, owner, shared);
            }
            Found::Nobody(_) => {
                elsewhere.insert(local, Instant::now().checked_add(LOOK_AGAIN));
            }
        }
    }

    /// The application has closed its last listener on `addr`. The control socket goes with it, unless
    /// it is still needed: HELLO may be on its way for connections that were accepted there, and others
    /// may accept from a copy of the listener. Then it is looked at again.
    pub(crate) fn unlistened(&mut self, now: Time, addr: SocketAddr) {
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let again = listeners.get(&addr) != Some(&0);
        drop(listeners);
        if again {
            return self.watch.unlistened_no_more(addr);
        }
        let here = |local| answering([addr].into_iter(), local).is_some();
        if self.endpoint.negotiates_at(here) || is_listened_on(addr) {
            self.watch.unlistened(now, addr);
            return;
        }
        // They cannot be accepted any more, and need not wait to be told by a refusal.
        self.endpoint.refuse_pending(here);
        self.notices.push_back(Notice::Unlistened(addr));
    }

    /// Closes a listener's control socket, unless somebody listens there again.
    pub(crate) fn close_listener(
        &mut self,
        addr: SocketAddr,
        done: Option<Done>,
        shared: &Rc<Shared>,
    ) {
        self.watch.unlistened_no_more(addr);
        let mut listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Somebody may have begun to listen again since.
        if listeners.get(&addr) == Some(&0) {
            listeners.remove(&addr);
            let stopped = self.control.stop(addr);
            let shared = shared.clone();
            task::spawn_local(async move {
                if let Some((socket, receiving)) = stopped {
                    // An error is the cancellation that was asked for.
                    let _ = receiving.await;
                    socket.receive_rest(&shared);
                    shared.with(|d, _| d.control.forget(&socket));
                }
                // Not before the socket is closed: others find the port free when their links end.
                shared.with(|d, _| d.claims.close(addr));
                if let Some(done) = done {
                    done.tell();
                }
            });
        }
    }
}
