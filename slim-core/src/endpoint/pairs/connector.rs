//! The connector's pairs, by the address that the application connects to.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::super::processes::PeerProcess;
use super::super::rng::Rng;
use super::{PAIR_AGE, PAIRS};
use crate::auth::{FlowKey, Fresh, Prepared};
use crate::ids::{FinHow, FlowId, Role, Time};
use crate::wire::{Fin, Message, Open, PairId, Parsed, Seen};

/// Maximum number of OPENs without SEEN. If they do not arrive, QUERY must be sent for as many flows.
const AHEAD: u64 = 4096;
/// Number of connections whose local ports are remembered, with and without a pair. The OPEN of an older connection has
/// been handled.
const RECENT: usize = 1024;
/// If no SEEN comes for this long after an OPEN, the pair is not used until one comes.
const UNSEEN: Duration = Duration::from_secs(3);

/// A flow for which OPEN is to be sent.
#[derive(Clone)]
pub struct Opened {
    /// The flow id.
    pub flow: FlowId,
    /// The acceptor's end of the connection.
    pub(in super::super) remote: SocketAddr,
    /// The destination of OPEN and FIN.
    pub mailbox: SocketAddr,
    /// The OPEN message.
    pub data: Vec<u8>,
    pub(in super::super) key: FlowKey,
    pub(in super::super) process: Arc<PeerProcess>,
}

impl Opened {
    /// The FIN for the flow.
    pub fn fin(&self, final_seq: u64, how: FinHow) -> Vec<u8> {
        let fin = Message::Fin(Fin {
            flow: self.flow,
            final_seq,
            how,
        });
        self.key.seal(Role::Connector, Fresh::None, &fin)
    }
}

/// A pair at the connector.
pub(super) struct ConnectorPair {
    pair: PairId,
    key: Prepared,
    process: Arc<PeerProcess>,
    mailbox: SocketAddr,
    /// Counter of the next OPEN.
    next: u64,
    /// SEEN has come for counters below this.
    seen: u64,
    /// When the first OPEN since the last SEEN was sent.
    unseen: Option<Time>,
    /// When PAIR or the last new SEEN came.
    since: Time,
}

impl ConnectorPair {
    pub(super) fn new(
        pair: PairId,
        key: &FlowKey,
        process: Arc<PeerProcess>,
        mailbox: SocketAddr,
    ) -> Self {
        ConnectorPair {
            pair,
            key: key.prepare(),
            process,
            mailbox,
            next: 1,
            seen: 0,
            unseen: None,
            since: Time(0),
        }
    }
}

/// The connector's pairs.
pub(super) struct ConnectorPairs {
    to: HashMap<SocketAddr, ConnectorPair>,
    rng: Rng,
    /// The local ports of the last connections, oldest first.
    recent: VecDeque<u16>,
}

impl ConnectorPairs {
    pub(super) fn new(rng: Rng) -> Self {
        ConnectorPairs {
            to: HashMap::new(),
            rng,
            recent: VecDeque::new(),
        }
    }

    /// A connection has been made from this port.
    pub(super) fn note(&mut self, port: u16) {
        if self.recent.len() >= RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(port);
    }

    pub(super) fn put(&mut self, now: Time, remote: SocketAddr, mut dial: ConnectorPair) {
        self.expire(now);
        if self.to.len() >= PAIRS && !self.to.contains_key(&remote) {
            return;
        }
        dial.since = now;
        self.to.insert(remote, dial);
    }

    /// Whether there is a pair for this address that can be used.
    pub(super) fn knows(&self, remote: SocketAddr) -> bool {
        self.to.get(&remote).is_some_and(|dial| dial.seen > 0)
    }

    pub(super) fn dial(
        &mut self,
        now: Time,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Option<Opened> {
        let dial = self.to.get_mut(&remote)?;
        if now.since(dial.since) > PAIR_AGE {
            self.to.remove(&remote);
            return None;
        }
        // No OPEN is made before SEEN has come for the OPEN that answered PAIR (counter 0).
        let unseen = dial.unseen.is_some_and(|at| now.since(at) > UNSEEN);
        if unseen || dial.seen == 0 || dial.next - dial.seen > AHEAD {
            return None;
        }
        // An OPEN names its connection by addresses only. If the port was used a short time ago, the acceptor could take the OPEN
        // for the earlier connection.
        if self.recent.contains(&local.port()) {
            return None;
        }
        let open = Open {
            flow: FlowId::new(self.rng.half(), false),
            pair: dial.pair,
            counter: dial.next,
            connector: local,
            acceptor: remote,
        };
        dial.next += 1;
        dial.unseen.get_or_insert(now);
        let opened = Opened {
            flow: open.flow,
            remote,
            mailbox: dial.mailbox,
            data: dial
                .key
                .seal(Role::Connector, Fresh::None, &Message::Open(open)),
            key: dial.key.of_flow(&open),
            process: dial.process.clone(),
        };
        self.note(local.port());
        Some(opened)
    }

    /// Handles SEEN. False if its pair is not known, or if it does not verify.
    pub(super) fn seen(&mut self, now: Time, parsed: &Parsed<'_>, seen: &Seen) -> bool {
        let Some(dial) = self.to.values_mut().find(|dial| dial.pair == seen.pair) else {
            return false;
        };
        let genuine = dial.key.verify(Role::Acceptor, Fresh::None, parsed);
        // An old SEEN, or a repeated one, has no effect.
        if genuine && seen.counter < dial.next && seen.counter >= dial.seen {
            dial.seen = seen.counter + 1;
            dial.unseen = None;
            // A pair in use does not expire.
            dial.since = now;
        }
        genuine
    }

    pub(super) fn refused(&mut self, mailbox: SocketAddr) {
        self.to.retain(|_, dial| dial.mailbox != mailbox);
    }

    pub(super) fn expire(&mut self, now: Time) {
        self.to.retain(|_, dial| now.since(dial.since) < PAIR_AGE);
        self.to.shrink_to_fit();
    }

    pub(super) fn keep(&mut self, may: impl Fn(IpAddr) -> bool) {
        self.to.retain(|remote, _| may(remote.ip()));
    }

    pub(super) fn len(&self) -> usize {
        self.to.len()
    }
}
