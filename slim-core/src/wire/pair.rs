//! Flows of two processes that know each other: `docs/PROTOCOL.md`, section "Pairs".

use std::net::SocketAddr;

use super::ParseError;
use super::field::*;
use super::layout::{open, pair, seen};
use crate::ids::FlowId;

/// The name of a pair: random, drawn by the acceptor of the flow that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PairId(pub [u8; 16]);

/// Tells the connector that its later connections to this address need no HELLO. Acceptor to connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The flow whose key the pair's key comes from.
    pub flow: FlowId,
    /// Name of the pair.
    pub pair: PairId,
    /// UDP port of the acceptor's mailbox.
    pub mailbox: u16,
}

/// Announces another connection to the acceptor. Connector to acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Name of the flow, drawn by the connector.
    pub flow: FlowId,
    /// The pair that the flow belongs to.
    pub pair: PairId,
    /// Grows by one with each OPEN of the pair.
    pub counter: u64,
    /// Connector's end of the TCP connection, as the connector sees it.
    pub connector: SocketAddr,
    /// Acceptor's end of the TCP connection, as the connector sees it.
    pub acceptor: SocketAddr,
}

/// Tells the connector that its OPENs arrive. Acceptor to connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which pair.
    pub pair: PairId,
    /// The highest counter of an OPEN whose flow is live.
    pub counter: u64,
}

impl Pair {
    pub(super) fn read(b: &[u8]) -> Self {
        Pair {
            flow: FlowId(array(b, pair::FLOW)),
            pair: PairId(array(b, pair::PAIR)),
            mailbox: read_u16(b, pair::MAILBOX),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, pair::FLOW, &self.flow.0);
        put(b, pair::PAIR, &self.pair.0);
        put_u16(b, pair::MAILBOX, self.mailbox);
    }
}

impl Open {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Open {
            flow: FlowId(array(b, open::FLOW)),
            pair: PairId(array(b, open::PAIR)),
            counter: read_u64(b, open::COUNTER),
            connector: read_socket_addr(b, open::CONNECTOR)?,
            acceptor: read_socket_addr(b, open::ACCEPTOR)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, open::FLOW, &self.flow.0);
        put(b, open::PAIR, &self.pair.0);
        put_u64(b, open::COUNTER, self.counter);
        put_socket_addr(b, open::CONNECTOR, &self.connector);
        put_socket_addr(b, open::ACCEPTOR, &self.acceptor);
    }
}

impl Seen {
    pub(super) fn read(b: &[u8]) -> Self {
        Seen {
            pair: PairId(array(b, seen::PAIR)),
            counter: read_u64(b, seen::COUNTER),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, seen::PAIR, &self.pair.0);
        put_u64(b, seen::COUNTER, self.counter);
    }
}
