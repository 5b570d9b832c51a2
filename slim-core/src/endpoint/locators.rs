//! The exchange of locators of other kinds of transport than TCP: `docs/PROTOCOL.md`, section "Kinds of transport".
//!
//! HELLO and HELLO_ACK carry addresses for TCP only, and one bit that says that a process has other kinds. When the first flow
//! between two such processes is live, they tell each other their other locators by OFFER, under the key of that
//! flow. A process with TCP only neither sends nor gets OFFER.
//!
//! Locators told under the key of one flow hold for all flows with the same process at the same address, and are
//! kept once ([`ToldLocators`]). A process that only claims the same identity, at another address, cannot change them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::Endpoint;
use super::flow::State;
use super::processes::ToldLocators;
use super::timer::TimerOwner;
use crate::auth::Fresh;
use crate::config::Config;
use crate::ids::{EndpointId, FlowId, FlowToken, Role, Time};
use crate::transport::{OtherLocator, Transports};
use crate::wire::{LocatorList, Message, Offer, Parsed, feature};

/// First wait for the answer to OFFER; doubles each time.
const RETRY: Duration = Duration::from_millis(50);
/// Longest wait. When it is over, OFFER is sent only as long as a flow with the process is live. A flow that is live again begins anew.
const LONGEST: Duration = Duration::from_secs(60);

/// OFFERs that have not been answered yet.
pub(super) struct Exchanges {
    /// Serial number of our locators.
    serial: u64,
    open: BTreeMap<EndpointId, Exchange>,
}

impl Default for Exchanges {
    fn default() -> Self {
        Exchanges {
            serial: 1,
            open: BTreeMap::new(),
        }
    }
}

impl Exchanges {
    pub(super) fn continue_serial(&mut self, before: u64) {
        self.serial = self.serial.max(before.saturating_add(1));
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }
}

/// The exchange with one process.
struct Exchange {
    /// The addresses of the process that OFFER goes to, and for each the flow whose key is used.
    ways: Vec<(IpAddr, FlowToken)>,
    /// The wait for the answer to the last OFFER.
    wait: Duration,
}

/// The optional parts of the protocol that an endpoint with these transports and settings speaks.
pub(super) fn features_of(own: &Transports, config: &Config) -> u64 {
    let transports = own.has_others().then_some(feature::TRANSPORTS);
    let witness = (!config.witness.is_empty()).then_some(feature::WITNESS);
    let ties = config.job_key.is_some() && config.when_lost.is_some();
    let ties = ties.then_some(feature::TIE_BREAK);
    let all = [Some(feature::PAIRS), transports, witness, ties];
    all.into_iter().flatten().fold(0, |all, bit| all | bit)
}

impl Endpoint {
    /// The peer's locators of other kinds of transport than TCP, as far as it has told them.
    pub fn locators(&self, token: FlowToken) -> &[OtherLocator] {
        let flow = self.flows.get(&token);
        let peer = flow.and_then(|flow| Some((flow.peer_id()?, flow.ends.remote().ip())));
        peer.map_or(&[], |(peer, at)| self.processes.locators(peer, at))
    }

    /// Sets our locators of other kinds of transport than TCP. Peers that know older ones are told. Has no effect if TCP is
    /// the only kind.
    pub fn set_locators(&mut self, now: Time, locators: Vec<OtherLocator>) {
        if self.own.locators == locators {
            return;
        }
        self.own.locators = locators;
        self.exchanges.serial += 1;
        // Open exchanges may have told the old locators already, so they start anew.
        let open: Vec<EndpointId> = self.exchanges.open.keys().copied().collect();
        open.into_iter().for_each(|peer| self.exchange_over(peer));
        let tokens: Vec<FlowToken> = self.flows.keys().copied().collect();
        for token in tokens {
            if self.carries(token) {
                self.offer(now, token);
                self.prefer_later(now, token);
            }
        }
    }

    /// A flow is live, for the first time or again: its connector starts the exchange of locators. Its acceptor does so if it has changed
    /// its locators: the peer may not have heard of that.
    pub(super) fn offer_later(&mut self, now: Time, token: FlowToken) {
        if self.flows[&token].role == Role::Connector || self.exchanges.serial > 1 {
            self.offer(now, token);
        }
    }

    /// Tells the peer of a flow our locators, unless it has confirmed that it knows them.
    fn offer(&mut self, now: Time, token: FlowToken) {
        let flow = &self.flows[&token];
        let Some(peer) = flow.peer.as_ref().map(|peer| &peer.process) else {
            return;
        };
        if self.features & peer.features & feature::TRANSPORTS == 0 {
            return;
        }
        let (peer, at) = (peer.id, flow.ends.remote().ip());
        if self.processes.has_heard(peer, at, self.exchanges.serial) {
            return;
        }
        let exchange = self.exchanges.open.entry(peer).or_insert(Exchange {
            ways: Vec::new(),
            wait: RETRY,
        });
        if exchange.ways.iter().any(|(ip, _)| *ip == at) {
            return;
        }
        exchange.ways.push((at, token));
        exchange.wait = RETRY;
        self.send_offer(token);
        self.timers.set(TimerOwner::Offer(peer), now + RETRY);
    }

    fn send_offer(&mut self, token: FlowToken) {
        let offer = self.own_offer(0);
        self.tell(token, None, |flow| Message::Offer(Offer { flow, ..offer }));
    }

    /// Our OFFER, in answer to the peer's OFFER with the serial number `answers`, or 0 if it is not an answer.
    fn own_offer(&self, answers: u64) -> Offer {
        Offer {
            flow: FlowId([0; 16]),
            serial: self.exchanges.serial,
            answers,
            locators: LocatorList::new(self.own.locators.iter().copied()),
        }
    }

    /// The answer to OFFER has not come in time.
    pub(super) fn on_offer_timer(&mut self, now: Time, peer: EndpointId) {
        let Some(exchange) = self.exchanges.open.get(&peer) else {
            return;
        };
        let (wait, ways) = ((exchange.wait * 2).min(LONGEST), exchange.ways.clone());
        // A flow that is over is replaced by another one with the same process and address.
        let mut left = Vec::new();
        for (at, token) in ways {
            let here = |flow: &FlowToken| {
                let flow = &self.flows[flow];
                flow.peer_id() == Some(peer) && flow.ends.remote().ip() == at
            };
            let is_live = |flow: &FlowToken| self.state(*flow) == Some(State::Live);
            let mut others = self.flows.keys().copied();
            let token = match is_live(&token) {
                true => Some(token),
                // A flow without a transport is a way as long as there is no better one.
                false => others
                    .find(|other| is_live(other) && here(other))
                    .or_else(|| self.carries(token).then_some(token))
                    .or_else(|| {
                        let mut others = self.flows.keys().copied();
                        others.find(|other| self.carries(*other) && here(other))
                    }),
            };
            left.extend(token.map(|token| (at, token)));
        }
        let mut left_flows = left.iter().map(|(_, token)| &self.flows[token]);
        let goes_on = match wait < LONGEST {
            true => left_flows.next().is_some(),
            false => left_flows.any(|flow| flow.state() == State::Live),
        };
        if !goes_on {
            return self.exchange_over(peer);
        }
        for (_, token) in &left {
            self.send_offer(*token);
        }
        if let Some(exchange) = self.exchanges.open.get_mut(&peer) {
            exchange.ways = left;
            exchange.wait = wait;
        }
        self.timers.set(TimerOwner::Offer(peer), now + wait);
    }

    fn exchange_over(&mut self, peer: EndpointId) {
        self.exchanges.open.remove(&peer);
        self.timers.clear(TimerOwner::Offer(peer));
    }

    /// The locators of kinds that we can make connections of.
    pub(super) fn usable_locators<'a>(
        &self,
        all: impl IntoIterator<Item = &'a OtherLocator>,
    ) -> Box<[OtherLocator]> {
        let known = |locator: &&OtherLocator| self.own.kinds.contains(&locator.kind());
        all.into_iter().filter(known).copied().collect()
    }

    /// Serial number of our locators.
    pub(super) fn own_serial(&self) -> u64 {
        self.exchanges.serial
    }

    /// Whether the flow has a session that is not over.
    fn carries(&self, token: FlowToken) -> bool {
        self.flows
            .get(&token)
            .is_some_and(|flow| flow.state().carries())
    }

    pub(super) fn on_offer(
        &mut self,
        now: Time,
        from: SocketAddr,
        local: SocketAddr,
        parsed: &Parsed<'_>,
        offer: &Offer,
    ) {
        if self.features & feature::TRANSPORTS == 0 {
            return self.drop_one();
        }
        self.prove(now, offer.flow, (Fresh::None, parsed), None);
        let token = self.genuine(offer.flow, parsed);
        let Some(token) = token.filter(|token| self.carries(*token)) else {
            return self.drop_one();
        };
        let flow = &self.flows[&token];
        let (Some(peer), at) = (&flow.peer, flow.ends.remote().ip()) else {
            return self.drop_one();
        };
        if peer.process.features & feature::TRANSPORTS == 0 {
            return self.drop_one();
        }
        let id = peer.process.id;
        let locators = self.usable_locators(offer.locators.iter());
        let known = self.exchanges.serial == offer.answers;
        let told = ToldLocators {
            serial: offer.serial,
            heard: if known { offer.answers } else { 0 },
            locators,
        };
        // An answer ends the exchange, even if its contents cannot be kept.
        if known && let Some(exchange) = self.exchanges.open.get_mut(&id) {
            exchange.ways.retain(|(ip, _)| *ip != at);
            if exchange.ways.is_empty() {
                self.exchange_over(id);
            }
        }
        let news = self.processes.locators(id, at) != &*told.locators;
        if !self.processes.tell(id, at, told) {
            // An old OFFER, late or replayed; or the table is full.
            return self.drop_one();
        }
        // OFFER is repeated, and may be replayed. Each flow with the process is looked at only if its locators have changed.
        if news {
            self.locators_told(now, id);
        }
        if offer.answers == 0 {
            let flow = offer.flow;
            let answer = Message::Offer(Offer {
                flow,
                ..self.own_offer(offer.serial)
            });
            let data = self.seal(token, Fresh::None, &answer);
            self.out.datagram(from, Some(local), data);
        }
    }
}
