//! Queues of actions and events for the driver.
//!
//! A transport that fails because the peer has closed the flow is no fault. The peer's FIN or STATUS mostly arrives within a
//! few milliseconds. So the first events of an outage are held back until it is clear that the outage is a fault.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::{Action, Endpoint};
use crate::event::Event;
use crate::ids::{ConnId, FlowId, FlowToken};

/// [`Out::withdraw`] searches this many of the newest actions.
const RECENT: usize = 8;

/// Capacity that an empty queue may keep.
const KEPT: usize = 128;

/// Actions and events that the driver has not taken yet.
#[derive(Default)]
pub(super) struct Out {
    pub(super) actions: VecDeque<Action>,
    pub(super) events: VecDeque<(FlowToken, FlowId, Event)>,
}

impl Out {
    pub(super) fn push(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    /// Withdraws the request for a connection, if the driver has not taken it yet. False otherwise.
    pub(super) fn withdraw(&mut self, conn: ConnId) -> bool {
        let asked = |a: &Action| matches!(a, Action::Connect { conn: c, .. } if *c == conn);
        let recent = self.actions.len().saturating_sub(RECENT);
        let found = self.actions.range(recent..).position(asked);
        found.is_some_and(|i| self.actions.remove(recent + i).is_some())
    }

    pub(super) fn event(&mut self, token: FlowToken, flow: FlowId, event: Event) {
        self.events.push_back((token, flow, event));
    }

    pub(super) fn datagram(&mut self, to: SocketAddr, from: Option<SocketAddr>, data: Vec<u8>) {
        self.push(Action::Datagram { to, from, data });
    }
}

/// Takes the first entry. An empty queue gives back the memory that a burst needed.
pub(super) fn pop<T>(queue: &mut VecDeque<T>) -> Option<T> {
    let first = queue.pop_front();
    if first.is_none() && queue.capacity() > KEPT {
        *queue = VecDeque::new();
    }
    first
}

impl Endpoint {
    /// Emits an event, after the events that were held back for the flow.
    pub(super) fn emit(&mut self, token: FlowToken, event: Event) {
        self.report(token);
        self.note_event(token, &event);
        if let Some(flow) = self.flows.get(&token) {
            self.out.event(token, flow.name(), event);
        }
    }

    /// Holds an event back until the outage turns out to be a fault.
    pub(super) fn emit_later(&mut self, token: FlowToken, event: Event) {
        let outage = self.flows.get_mut(&token).and_then(|f| f.outage.as_mut());
        match outage.and_then(|outage| outage.kept.as_mut()) {
            Some(kept) => kept.push(event),
            None => self.emit(token, event),
        }
    }

    /// The outage is a fault: emits the events that were held back.
    pub(super) fn report(&mut self, token: FlowToken) {
        let Some(flow) = self.flows.get_mut(&token) else {
            return;
        };
        let kept = flow.outage.as_mut().and_then(|outage| outage.kept.take());
        let name = flow.name();
        for event in kept.into_iter().flatten() {
            self.out.event(token, name, event);
        }
    }
}
