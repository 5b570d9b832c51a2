//! HELLOs and OPENs that come before the application accepts their connection: `docs/PROTOCOL.md`, section "Negotiation".

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::candidates::CANDIDATES;
use super::pairs::Arrival;
use crate::ids::{FlowId, Time};
use crate::wire::Hello;

/// Maximum number of unaccepted connections for which HELLOs are kept. For each connection, as many HELLOs are kept as
/// there can be [candidates](super::candidates).
const PENDING: usize = 4096;
/// How long such a HELLO is kept; a connector that still waits repeats it every second.
const PENDING_AGE: Duration = Duration::from_secs(60);

/// A HELLO that came before its connection was accepted. See
/// [`Endpoint::take_pending`](super::Endpoint::take_pending).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingHello {
    /// The flow id in the message.
    pub flow: FlowId,
    /// The sender's address.
    pub from: SocketAddr,
    /// The local address that the HELLO was sent to.
    pub local: SocketAddr,
    /// The message.
    pub data: Vec<u8>,
}

/// HELLOs and OPENs that came before the application accepted their connection, by (local, remote) address.
#[derive(Default)]
pub(super) struct Pending {
    by_tuple: HashMap<(SocketAddr, SocketAddr), (Time, Vec<WaitingRequest>)>,
    /// Connections by the time of their first request, oldest first. Entries whose time differs from `by_tuple` are stale.
    order: VecDeque<(Time, (SocketAddr, SocketAddr))>,
}

pub(super) struct WaitingRequest {
    /// When the request came last.
    pub(super) at: Time,
    pub(super) request: Request,
    pub(super) from: SocketAddr,
    pub(super) local: SocketAddr,
}

/// The message of a connector for a connection.
pub(super) enum Request {
    Hello(Box<Hello>),
    Open(Box<Arrival>),
}

impl Request {
    fn flow(&self) -> FlowId {
        match self {
            Request::Hello(hello) => hello.flow,
            Request::Open(arrival) => arrival.flow,
        }
    }
}

impl Pending {
    pub(super) fn put(
        &mut self,
        now: Time,
        tuple: (SocketAddr, SocketAddr),
        waiting: WaitingRequest,
    ) {
        self.expire(now);
        if self.order.len() >= 2 * PENDING {
            let by_tuple = &self.by_tuple;
            self.order.retain(|entry| is_known(by_tuple, entry));
        }
        if let Some((since, known)) = self.by_tuple.get_mut(&tuple) {
            // Renew the time only after half of the age: a request that is repeated all the time would fill `order` otherwise.
            // Half of the age remains for the next repetition.
            if now.since(*since) >= PENDING_AGE / 2 {
                *since = now;
                self.order.push_back((now, tuple));
            }
            known.retain(|other| other.request.flow() != waiting.request.flow());
            if known.len() >= CANDIDATES {
                // As for candidates: HELLO can be forged, and comes again; OPEN does neither.
                let is_hello = |w: &WaitingRequest| matches!(w.request, Request::Hello(_));
                known.remove(known.iter().position(is_hello).unwrap_or(0));
            }
            known.push(waiting);
            return;
        }
        while self.by_tuple.len() >= PENDING {
            let Some(oldest) = self.order.pop_front() else {
                break;
            };
            if is_known(&self.by_tuple, &oldest) {
                self.by_tuple.remove(&oldest.1);
            }
        }
        self.by_tuple.insert(tuple, (now, vec![waiting]));
        self.order.push_back((now, tuple));
    }

    /// Takes the oldest request for a connection.
    pub(super) fn take(
        &mut self,
        now: Time,
        tuple: (SocketAddr, SocketAddr),
    ) -> Option<WaitingRequest> {
        self.expire(now);
        let (_, waiting) = self.by_tuple.get_mut(&tuple)?;
        let oldest = waiting.remove(0);
        if waiting.is_empty() {
            self.by_tuple.remove(&tuple);
        }
        Some(oldest)
    }

    /// Whether the request for `flow` waits, and the connection's first request came at least `time` ago.
    pub(super) fn has_waited(
        &self,
        now: Time,
        tuple: (SocketAddr, SocketAddr),
        flow: FlowId,
        time: Duration,
    ) -> bool {
        let is_it = |w: &WaitingRequest| w.request.flow() == flow;
        let waiting = self.by_tuple.get(&tuple);
        waiting.is_some_and(|(since, known)| now.since(*since) >= time && known.iter().any(is_it))
    }

    /// Whether only HELLOs wait for the connection, and one of them says that its addresses were in use before.
    pub(super) fn has_again(&self, tuple: (SocketAddr, SocketAddr)) -> bool {
        let is_hello = |w: &WaitingRequest| matches!(w.request, Request::Hello(_));
        let waiting = self.by_tuple.get(&tuple);
        waiting.is_some_and(|(_, known)| {
            known.iter().all(is_hello) && known.iter().any(|w| w.request.flow().is_again())
        })
    }

    /// Whether any request waits for the connection.
    pub(super) fn has(&self, tuple: (SocketAddr, SocketAddr)) -> bool {
        self.by_tuple.contains_key(&tuple)
    }

    /// Forgets requests that last came longer than `age` ago.
    pub(super) fn forget_older(
        &mut self,
        now: Time,
        tuple: (SocketAddr, SocketAddr),
        age: Duration,
    ) {
        self.forget_unless(tuple, |waiting| now.since(waiting.at) <= age);
    }

    /// Forgets the OPEN for `flow`.
    pub(super) fn forget_open(&mut self, tuple: (SocketAddr, SocketAddr), flow: FlowId) {
        self.forget_unless(tuple, |other| match &other.request {
            Request::Open(arrival) => arrival.flow != flow,
            Request::Hello(_) => true,
        });
    }

    fn forget_unless(
        &mut self,
        tuple: (SocketAddr, SocketAddr),
        keep: impl FnMut(&WaitingRequest) -> bool,
    ) {
        if let Some((_, waiting)) = self.by_tuple.get_mut(&tuple) {
            waiting.retain(keep);
            if waiting.is_empty() {
                self.by_tuple.remove(&tuple);
            }
        }
    }

    /// Takes all requests that wait at local addresses for which `fits` holds.
    pub(super) fn take_all(&mut self, fits: impl Fn(SocketAddr) -> bool) -> Vec<WaitingRequest> {
        self.order.retain(|(_, tuple)| !fits(tuple.0));
        self.by_tuple
            .extract_if(|tuple, _| fits(tuple.0))
            .flat_map(|(_, (_, waiting))| waiting)
            .collect()
    }

    /// Forgets requests that are too old, and gives the memory back if none are left.
    pub(super) fn tidy(&mut self, now: Time) {
        self.expire(now);
        if self.by_tuple.is_empty() {
            *self = Self::default();
        }
    }

    fn expire(&mut self, now: Time) {
        while let Some((at, tuple)) = self.order.front().copied() {
            if now.since(at) < PENDING_AGE {
                break;
            }
            self.order.pop_front();
            if is_known(&self.by_tuple, &(at, tuple)) {
                self.by_tuple.remove(&tuple);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        debug_assert!(self.by_tuple.len() <= self.order.len());
        debug_assert!(self.order.len() <= 2 * PENDING);
        self.by_tuple.len()
    }
}

/// Whether an entry of `order` is not stale.
fn is_known(
    by_tuple: &HashMap<(SocketAddr, SocketAddr), (Time, Vec<WaitingRequest>)>,
    (at, tuple): &(Time, (SocketAddr, SocketAddr)),
) -> bool {
    by_tuple.get(tuple).is_some_and(|(since, _)| since == at)
}
