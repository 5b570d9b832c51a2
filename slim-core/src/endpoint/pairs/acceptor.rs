//! The acceptor's pairs, by pair id, and the flows that came by OPEN.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::super::aged::Aged;
use super::super::ends::Ends;
use super::super::processes::PeerProcess;
use super::super::record::Peer;
use super::{MailboxState, PAIR_AGE, PAIRS, key_of, parse};
use crate::addr::on_link_of;
use crate::auth::{FlowKey, Fresh, Prepared};
use crate::ids::{FinHow, FlowId, Role, Time};
use crate::wire::{Message, PairId, Parsed, Seen};

/// Flows whose FIN an application thread can handle by itself: maximum number, and age. The endpoint handles the FIN of an
/// older flow.
const FLOWS: usize = 4096;
const FLOW_AGE: Duration = Duration::from_secs(60);
/// Maximum number of received messages that the endpoint has not taken.
const HEARD: usize = 8192;

/// A pair at the acceptor: its peer may send OPEN.
pub(super) struct AcceptorPair {
    key: Prepared,
    process: Arc<PeerProcess>,
    /// The peer's control address, and the local address that messages to it come from.
    control: SocketAddr,
    local: SocketAddr,
    window: Window,
    /// Highest counter whose flow is live.
    live: u64,
    /// SEEN has not been sent for `live` yet.
    news: bool,
}

impl AcceptorPair {
    pub(super) fn new(
        key: &FlowKey,
        process: Arc<PeerProcess>,
        control: SocketAddr,
        local: SocketAddr,
    ) -> Self {
        AcceptorPair {
            key: key.prepare(),
            process,
            control,
            local,
            window: Window::default(),
            live: 0,
            news: false,
        }
    }
}

/// The counters that have come. A counter is accepted only once, and only if it is not far below the highest (RFC 4303, 3.4.3).
#[derive(Default)]
struct Window {
    /// The highest counter plus 1. Counters below `next - 64` are too old.
    next: u64,
    /// Bit `i` is the counter `next - 1 - i`.
    taken: u64,
}

impl Window {
    fn take(&mut self, counter: u64) -> bool {
        if counter == u64::MAX {
            return false;
        }
        if counter >= self.next {
            let by = counter - self.next + 1;
            self.taken = if by < 64 { self.taken << by | 1 } else { 1 };
            self.next = counter + 1;
            return true;
        }
        let back = self.next - 1 - counter;
        let bit = if back < 64 { 1 << back } else { 0 };
        let fresh = bit != 0 && self.taken & bit == 0;
        self.taken |= bit;
        fresh
    }
}

/// An authentic OPEN.
pub(in super::super) struct Arrival {
    pub(in super::super) flow: FlowId,
    /// Local and remote address of the connection.
    pub(in super::super) ends: Ends,
    pub(in super::super) key: FlowKey,
    pub(in super::super) process: Arc<PeerProcess>,
    pub(super) pair: PairId,
    pub(super) counter: u64,
}

impl Arrival {
    /// The sender of the OPEN.
    pub(in super::super) fn into_peer(self) -> Peer {
        Peer {
            process: self.process,
            key: self.key,
            random_s: [0; 32],
        }
    }
}

/// A message that has come to a mailbox.
pub(super) enum MailboxNews {
    Opened(Arrival),
    /// FIN of a flow that came by OPEN.
    Ended(FlowId, u64, FinHow),
    Other {
        from: SocketAddr,
        local: SocketAddr,
        data: Vec<u8>,
    },
}

/// A flow that came by OPEN.
struct KnownFlow {
    flow: FlowId,
    key: FlowKey,
    end: Option<(u64, FinHow)>,
}

/// The acceptor's pairs and the flows that came by them.
pub(super) struct AcceptorPairs {
    of: Aged<PairId, AcceptorPair, PAIRS>,
    flows: Aged<Ends, KnownFlow, FLOWS>,
    names: Aged<FlowId, Ends, FLOWS>,
    /// Flows for which UNKNOWN was sent: an OPEN that comes later does not count.
    refused: Aged<FlowId, (), FLOWS>,
    heard: Vec<MailboxNews>,
    /// Pairs for which SEEN is to be sent.
    to_tell: Vec<PairId>,
}

impl AcceptorPairs {
    pub(super) fn new() -> Self {
        AcceptorPairs {
            // Longer than the connector keeps a pair.
            of: Aged::new(PAIR_AGE * 2),
            flows: Aged::new(FLOW_AGE),
            names: Aged::new(FLOW_AGE),
            refused: Aged::new(FLOW_AGE),
            heard: Vec::new(),
            to_tell: Vec::new(),
        }
    }

    pub(super) fn put(&mut self, now: Time, pair: PairId, acceptor: AcceptorPair) {
        self.of.put(now, pair, acceptor);
    }

    pub(super) fn receive(&mut self, now: Time, from: SocketAddr, local: SocketAddr, data: &[u8]) {
        // More messages are dropped, as by a socket whose buffer is full.
        if self.heard.len() >= HEARD {
            return;
        }
        let Some(parsed) = parse(data) else { return };
        let heard = match &parsed.message {
            Message::Open(_) => self.opened(now, from, &parsed),
            Message::Fin(fin) => {
                let ends = self.names.get(now, &fin.flow);
                match ends.and_then(|ends| self.flows.get_mut(now, ends)) {
                    Some(known) if known.flow == fin.flow => {
                        if !known.key.verify(Role::Connector, Fresh::None, &parsed) {
                            return;
                        }
                        known.end = Some((fin.final_seq, fin.how));
                        Some(MailboxNews::Ended(fin.flow, fin.final_seq, fin.how))
                    }
                    _ => Some(MailboxNews::Other {
                        from,
                        local,
                        data: data.into(),
                    }),
                }
            }
            // Other messages do not belong in a mailbox.
            _ => None,
        };
        self.heard.extend(heard);
    }

    fn opened(&mut self, now: Time, from: SocketAddr, parsed: &Parsed<'_>) -> Option<MailboxNews> {
        let Message::Open(open) = &parsed.message else {
            return None;
        };
        if self.refused.get(now, &open.flow).is_some() {
            return None;
        }
        let acceptor = self.of.get_mut(now, &open.pair)?;
        if from.ip() != on_link_of(open.connector, from).ip() {
            return None;
        }
        let key = key_of(&acceptor.key, parsed, open)?;
        if !acceptor.window.take(open.counter) {
            return None;
        }
        let ends = Ends::new(
            on_link_of(open.acceptor, from),
            on_link_of(open.connector, from),
        );
        let process = acceptor.process.clone();
        if open.counter > 0 {
            let known = KnownFlow {
                flow: open.flow,
                key: key.clone(),
                end: None,
            };
            self.flows.put(now, ends.clone(), known);
            self.names.put(now, open.flow, ends.clone());
        }
        Some(MailboxNews::Opened(Arrival {
            flow: open.flow,
            ends,
            key,
            process,
            pair: open.pair,
            counter: open.counter,
        }))
    }

    pub(super) fn read_mailboxes(&self, now: Time, ends: &Ends) -> MailboxState {
        match self.flows.get(now, ends).map(|known| known.end) {
            None => MailboxState::Nothing,
            Some(Some((end, FinHow::Close))) => MailboxState::Closed(end),
            Some(_) => MailboxState::Open,
        }
    }

    pub(super) fn end_of(&self, now: Time, flow: &FlowId) -> Option<(u64, FinHow)> {
        let known = self.flows.get(now, self.names.get(now, flow)?)?;
        known.end.filter(|_| known.flow == *flow)
    }

    /// Whether the connector of the flow has sent this message.
    pub(super) fn is_from_peer(&self, now: Time, flow: &FlowId, parsed: &Parsed<'_>) -> bool {
        let ends = self.names.get(now, flow);
        let known = ends.and_then(|ends| self.flows.get(now, ends));
        known.is_some_and(|known| {
            known.flow == *flow && known.key.verify(Role::Connector, Fresh::None, parsed)
        })
    }

    /// UNKNOWN is sent for this flow.
    pub(super) fn refuse(&mut self, now: Time, flow: FlowId) {
        if self.of.len() > 0 {
            self.refused.put(now, flow, ());
        }
    }

    /// Forgets a flow, and returns its addresses.
    pub(super) fn forget(&mut self, now: Time, flow: &FlowId) -> Option<Ends> {
        let ends = self.names.get(now, flow)?.clone();
        self.names.remove(flow);
        // A later connection may have the same addresses.
        if self.flows.get(now, &ends).is_some_and(|k| k.flow == *flow) {
            self.flows.remove(&ends);
        }
        Some(ends)
    }

    /// The flow of the OPEN with this counter is live: SEEN is to be sent.
    pub(super) fn mark_live(&mut self, now: Time, pair: PairId, counter: u64) {
        if let Some(acceptor) = self.of.get_mut(now, &pair) {
            acceptor.live = acceptor.live.max(counter);
            if !std::mem::replace(&mut acceptor.news, true) {
                self.to_tell.push(pair);
                self.of.renew(now, &pair);
            }
        }
    }

    /// SEEN for all pairs that need one: destination, source and message.
    pub(super) fn take_news(&mut self, now: Time) -> Vec<(SocketAddr, SocketAddr, Vec<u8>)> {
        let told = std::mem::take(&mut self.to_tell).into_iter();
        let seen = told.filter_map(|pair| {
            let acceptor = self.of.get_mut(now, &pair)?;
            acceptor.news = false;
            let counter = acceptor.live;
            let seen = Message::Seen(Seen { pair, counter });
            let data = acceptor.key.seal(Role::Acceptor, Fresh::None, &seen);
            Some((acceptor.control, acceptor.local, data))
        });
        seen.collect()
    }

    pub(super) fn take(&mut self) -> Vec<MailboxNews> {
        std::mem::take(&mut self.heard)
    }

    pub(super) fn expire(&mut self, now: Time) {
        self.of.expire(now);
        self.flows.expire(now);
        self.names.expire(now);
        self.refused.expire(now);
    }

    pub(super) fn keep(&mut self, may: impl Fn(IpAddr) -> bool) {
        self.of.retain(|acceptor| may(acceptor.control.ip()));
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new();
    }

    pub(super) fn len(&self) -> usize {
        self.of.len() + self.flows.len() + self.names.len() + self.refused.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_accepted_only_once_and_only_if_it_is_not_too_old() {
        let mut window = Window::default();
        for counter in [0, 1, 5, 3, 100, 64, 99, 37] {
            assert!(window.take(counter), "{counter}");
            assert!(!window.take(counter), "{counter} again");
        }
        for counter in [0, 2, 36] {
            assert!(!window.take(counter), "{counter}");
        }
        assert!(!window.take(u64::MAX));
    }
}
