//! Pairs: keys of processes that know each other. `docs/PROTOCOL.md`, section "Pairs".
//!
//! Two processes that have negotiated more than one flow share a key, the *pair*, from which the keys of later flows
//! are derived: the connector sends OPEN, which needs no answer. The tables are shared with the application threads that
//! connect and read, so that these need not wait for the endpoint. [`Pairs::dial`] makes an OPEN;
//! [`Pairs::receive`] stores the messages of a mailbox, and [`Endpoint::take_arrivals`] handles them.

mod acceptor;
mod connector;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(super) use acceptor::Arrival;
pub use connector::Opened;

use acceptor::{AcceptorPairs, MailboxNews};
use connector::ConnectorPairs;

use super::aged::Aged;
use super::ends::Ends;
use super::flow::State;
use super::locators::features_of;
use super::record::{FlowRecord, Peer};
use super::rng::Rng;
use super::{Action, Endpoint, plain};
use crate::addr::at_port;
use crate::auth::{FlowKey, Fresh};
use crate::config::Policy;
use crate::ids::{EndpointId, FinHow, FlowId, FlowToken, Role, Time};
use crate::wire::{self, Message, Open, Pair, PairId, Parsed, Seen, feature};

/// How long a connector keeps a pair without SEEN. The acceptor keeps it longer, so that no OPEN comes too late.
const PAIR_AGE: Duration = Duration::from_secs(100);
/// Maximum number of pairs of each role.
const PAIRS: usize = 1024;
/// Shortest time between two PAIRs to one process for one address.
const PAUSE: Duration = Duration::from_millis(50);
/// Flows that ended a short time ago, for which PAIR may still come: maximum number, and maximum delay.
const ENDED: usize = 64;
const LATE_PAIR: Duration = Duration::from_secs(5);

/// The pairs of a process. Application threads must block signals while they call these methods.
pub struct Pairs {
    connectors: Mutex<ConnectorPairs>,
    acceptors: Mutex<AcceptorPairs>,
}

impl Pairs {
    pub(super) fn new(rng: Rng) -> Self {
        Pairs {
            connectors: Mutex::new(ConnectorPairs::new(rng)),
            acceptors: Mutex::new(AcceptorPairs::new()),
        }
    }

    /// The OPEN for a connection from `local` to `remote`, if there is a pair for `remote`.
    pub fn dial(&self, now: Time, local: SocketAddr, remote: SocketAddr) -> Option<Opened> {
        self.connectors().dial(now, plain(local), plain(remote))
    }

    /// A datagram came from `from` to the mailbox at `local`.
    pub fn receive(&self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        self.acceptors()
            .receive(now, plain(from), plain(local), data);
    }

    /// What the mailbox has received for an accepted connection.
    pub fn read_mailboxes(&self, now: Time, local: SocketAddr, remote: SocketAddr) -> MailboxState {
        let ends = Ends::new(plain(local), plain(remote));
        self.acceptors().read_mailboxes(now, &ends)
    }

    fn connectors(&self) -> MutexGuard<'_, ConnectorPairs> {
        self.connectors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn acceptors(&self) -> MutexGuard<'_, AcceptorPairs> {
        self.acceptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection has been made from this port.
    pub(super) fn note(&self, port: u16) {
        self.connectors().note(port);
    }

    pub(super) fn forget(&self, now: Time, flow: &FlowId) {
        self.acceptors().forget(now, flow);
    }

    /// Forgets the pairs with hosts for which `may` does not hold.
    pub(super) fn keep(&self, may: impl Fn(IpAddr) -> bool) {
        self.connectors().keep(&may);
        self.acceptors().keep(&may);
    }

    pub(super) fn expire(&self, now: Time) {
        self.connectors().expire(now);
        self.acceptors().expire(now);
    }

    pub(super) fn len(&self) -> usize {
        self.connectors().len() + self.acceptors().len()
    }
}

/// The messages that the mailbox has received for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MailboxState {
    /// None, or too long ago.
    Nothing,
    /// OPEN.
    Open,
    /// OPEN and FIN: the peer has closed the flow after sending this many bytes.
    Closed(u64),
}

/// The endpoint's own state of pairs, which no other thread uses.
pub(super) struct Offers {
    /// Connector: the addresses of flows that have just ended.
    ended: Aged<FlowId, Ends, ENDED>,
    /// Our mailboxes, by address. Port 0: the driver has not made the mailbox yet.
    mailboxes: Vec<(IpAddr, u16)>,
    /// Processes that have negotiated at a local address, and when each last got a PAIR for it.
    met: Aged<(EndpointId, SocketAddr), Option<Time>, PAIRS>,
    /// Other processes accept connections at our addresses, too.
    shared: bool,
}

/// Maximum number of mailboxes.
const MAILBOXES: usize = 8;

impl Default for Offers {
    fn default() -> Self {
        Offers {
            ended: Aged::new(LATE_PAIR),
            mailboxes: Vec::new(),
            met: Aged::new(PAIR_AGE),
            shared: false,
        }
    }
}

impl Offers {
    pub(super) fn expire(&mut self, now: Time) {
        self.met.expire(now);
        self.ended.expire(now);
    }

    pub(super) fn len(&self) -> usize {
        self.met.len() + self.ended.len()
    }
}

/// For drivers.
impl Endpoint {
    /// The pairs, for the application threads that connect and read.
    pub fn pairs(&self) -> &std::sync::Arc<Pairs> {
        &self.pairs
    }

    /// Answers [`Action::Mailbox`]: the UDP port of the mailbox at `ip`.
    pub fn set_mailbox(&mut self, ip: IpAddr, port: u16) {
        if let Some((_, known)) = self.offers.mailboxes.iter_mut().find(|(at, _)| *at == ip) {
            *known = port;
        }
    }

    /// Other processes accept connections at our addresses, too. One of them may accept a connection whose OPEN comes to us, so
    /// all pairs are forgotten, and no PAIR is sent any more.
    pub fn share_listeners(&mut self) {
        self.offers.shared = true;
        self.pairs.acceptors().clear();
    }

    /// Sets the optional parts of the protocol that this endpoint speaks, as bits of [`feature`].
    pub fn set_features(&mut self, features: u64) {
        self.features = features & features_of(&self.own, &self.config);
    }

    /// As [`open`](Endpoint::open), for a connection for which the OPEN in `opened` has been sent.
    pub fn open_known(&mut self, now: Time, token: FlowToken, local: SocketAddr, opened: &Opened) {
        let (id, remote) = (opened.flow, opened.remote);
        if self.flows.contains_key(&token) {
            debug_assert!(false, "{token:?} is in use");
            return;
        }
        self.add_connector(now, token, Ends::new(plain(local), remote));
        if self.config.policy == Policy::Off {
            return self.start_negotiation(now, token);
        }
        let peer = Peer {
            process: opened.process.clone(),
            key: opened.key.clone(),
            random_s: [0; 32],
        };
        self.add_candidate(now, token, id, peer);
    }

    /// Handles the messages that have come to the mailboxes.
    pub fn take_arrivals(&mut self, now: Time) {
        let heard = self.pairs.acceptors().take();
        for heard in heard {
            match heard {
                MailboxNews::Opened(arrival) => self.opened(now, arrival),
                MailboxNews::Ended(flow, end, how) => self.ended(now, flow, end, how),
                MailboxNews::Other { from, local, data } => {
                    self.handle_datagram(now, from, local, &data)
                }
            }
        }
    }

    /// Sends SEEN to the peers whose OPENs have made flows live.
    pub fn send_seen(&mut self, now: Time) {
        let told = self.pairs.acceptors().take_news(now);
        for (to, from, data) in told {
            self.out.datagram(to, Some(from), data);
        }
    }
}

/// The acceptor's side.
impl Endpoint {
    /// The connector of a flow has proved its identity: sends it PAIR, unless this is its first flow to the address.
    pub(super) fn offer_pair(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        let Some((peer, id)) = flow.peer.as_ref().zip(flow.id) else {
            return;
        };
        let spoken = self.features & peer.process.features & feature::PAIRS;
        if spoken == 0 || self.offers.shared || flow.role == Role::Connector {
            return;
        }
        let (local, remote) = flow.ends.both();
        let who = (peer.process.id, local);
        let mailboxes = &mut self.offers.mailboxes;
        let mailbox = match mailboxes.iter().find(|(at, _)| *at == local.ip()) {
            Some((_, port)) => *port,
            None if mailboxes.len() >= MAILBOXES => return,
            None => {
                // The mailbox will be ready when the process connects again.
                mailboxes.push((local.ip(), 0));
                self.out.push(Action::Mailbox { ip: local.ip() });
                0
            }
        };
        match self.offers.met.get_mut(now, &who) {
            None => return self.offers.met.put(now, who, None),
            Some(Some(last)) if now.since(*last) < PAUSE => return,
            Some(_) if mailbox == 0 => return,
            Some(_) => {}
        }
        let pair = PairId(self.rng.half());
        let key = peer.key.of_pair(pair);
        let control = at_port(remote, peer.process.control_port);
        let acceptor = acceptor::AcceptorPair::new(&key, peer.process.clone(), control, local);
        self.pairs.acceptors().put(now, pair, acceptor);
        self.offers.met.put(now, who, Some(now));
        self.tell(token, None, |_| {
            Message::Pair(Pair {
                flow: id,
                pair,
                mailbox,
            })
        });
    }

    /// OPEN came to a control socket.
    pub(super) fn on_open(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        self.pairs.receive(now, from, local, data);
        self.take_arrivals(now);
        self.send_seen(now);
    }

    fn opened(&mut self, now: Time, arrival: Arrival) {
        let id = arrival.flow;
        if arrival.counter == 0 || self.by_id.contains_key(&(id, Role::Acceptor)) {
            // Counter 0 names the flow of the PAIR, which may be over. This OPEN only shows that the mailbox can be reached.
            return self
                .pairs
                .acceptors()
                .mark_live(now, arrival.pair, arrival.counter);
        }
        let connector = arrival.ends.remote();
        let age = self.config.hello_timeout;
        self.askers.note(now, connector.ip(), age);
        let token = self.by_ends.get(&arrival.ends).copied();
        match token.map(|token| self.flow(token).state()) {
            Some(State::Negotiating) => self.accept_open(now, token.expect("known"), arrival),
            _ => self.keep_open(now, arrival),
        }
    }

    /// An OPEN matches our flow. Only a process that has shown the pair key before can send it, so the flow becomes live; but if
    /// the connection has candidates, the sender becomes one of them.
    pub(super) fn accept_open(&mut self, now: Time, token: FlowToken, arrival: Arrival) {
        let id = arrival.flow;
        let (pair, counter) = (arrival.pair, arrival.counter);
        let peer = arrival.into_peer();
        if self.candidates.any(token) {
            return self.add_candidate(now, token, id, peer);
        }
        let end = self.pairs.acceptors().end_of(now, &id);
        self.pairs.acceptors().mark_live(now, pair, counter);
        self.agree(now, token, id, peer, end);
    }

    fn ended(&mut self, now: Time, id: FlowId, end: u64, how: FinHow) {
        if let Some(&token) = self.by_id.get(&(id, Role::Acceptor))
            && self.flows[&token].peer.is_some()
        {
            self.peer_finished(now, token, end, how, super::close::EndSource::Unasked);
        }
    }

    /// A connector gets UNKNOWN for a flow that we have not accepted: its OPEN does not count any more.
    pub(super) fn forget_open(&mut self, now: Time, id: FlowId, asked: &Parsed<'_>) {
        let mut acceptors = self.pairs.acceptors();
        let ends = acceptors
            .is_from_peer(now, &id, asked)
            .then(|| acceptors.forget(now, &id));
        acceptors.refuse(now, id);
        drop(acceptors);
        if let Some(ends) = ends.flatten() {
            self.pending.forget_open(ends.both(), id);
        }
    }
}

/// The connector's side.
impl Endpoint {
    pub(super) fn on_pair(&mut self, now: Time, parsed: &Parsed<'_>, said: &Pair) {
        let known = match self.genuine(said.flow, parsed) {
            Some(token) => {
                let flow = &self.flows[&token];
                let peer = flow.peer.as_ref().filter(|_| flow.role == Role::Connector);
                peer.map(|peer| (peer, &flow.ends))
            }
            // A short flow may be over.
            None => {
                let tomb = self.tombs.get(now, &(said.flow, Role::Connector));
                let peer = tomb.map(|tomb| &tomb.peer);
                let genuine =
                    peer.filter(|peer| peer.key.verify(Role::Acceptor, Fresh::None, parsed));
                genuine.zip(self.offers.ended.get(now, &said.flow))
            }
        };
        let Some((peer, ends)) = known else {
            return self.drop_one();
        };
        let (local, remote) = ends.both();
        if self.features & feature::PAIRS == 0 || said.mailbox == 0 {
            return self.drop_one();
        }
        let key = peer.key.of_pair(said.pair);
        // OPEN with counter 0 tests whether the mailbox can be reached. The pair is used when SEEN has come.
        let first = Open {
            flow: said.flow,
            pair: said.pair,
            counter: 0,
            connector: local,
            acceptor: remote,
        };
        let mailbox = at_port(remote, said.mailbox);
        let process = peer.process.clone();
        let data = key.seal(Role::Connector, Fresh::None, &Message::Open(first));
        let pair = connector::ConnectorPair::new(said.pair, &key, process, mailbox);
        self.pairs.connectors().put(now, remote, pair);
        let from = at_port(local, self.own.control_port);
        self.out.datagram(mailbox, Some(from), data);
    }

    /// A connector's flow is over: if there is no pair for its address yet, a PAIR for the flow may be on its way.
    pub(super) fn note_ended(&mut self, now: Time, flow: &FlowRecord) {
        if let (Role::Connector, Some(id)) = (flow.role, flow.id)
            && self.features & feature::PAIRS != 0
            && !self.pairs.connectors().knows(flow.ends.remote())
        {
            self.offers.ended.put(now, id, flow.ends.clone());
        }
    }

    pub(super) fn on_seen(&mut self, now: Time, parsed: &Parsed<'_>, seen: &Seen) {
        if !self.pairs.connectors().seen(now, parsed, seen) {
            self.drop_one();
        }
    }

    /// The host at `to` refused an OPEN for the flow `id`: no socket has the port of the mailbox.
    pub(super) fn open_refused(&mut self, now: Time, to: SocketAddr, id: FlowId) {
        let name = (id, Role::Connector);
        if self.by_id.contains_key(&name) || self.tombs.get(now, &name).is_some() {
            self.pairs.connectors().refused(to);
        }
    }
}

/// The flow key that follows from an OPEN, if the OPEN verifies under this pair key.
fn key_of(key: &crate::auth::Prepared, parsed: &Parsed<'_>, open: &Open) -> Option<FlowKey> {
    let genuine = key.verify(Role::Connector, Fresh::None, parsed);
    genuine.then(|| key.of_flow(open))
}

fn parse(data: &[u8]) -> Option<Parsed<'_>> {
    wire::parse(data).ok()
}
