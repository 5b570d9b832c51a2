//! Negotiation: `docs/PROTOCOL.md`, section "Negotiation".

use std::net::SocketAddr;

use super::field::*;
use super::layout::{hello, hello_ack, hello_nak, hello_wait};
use super::{AddrList, ParseError};
use crate::ids::{EndpointId, FlowId};

/// Asks whether the process at the other end of a TCP connection has SLIM. Connector to acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Name of the flow, drawn by the connector.
    pub flow: FlowId,
    /// Connector's end of the TCP connection, as the connector sees it.
    pub connector: SocketAddr,
    /// Acceptor's end of the TCP connection, as the connector sees it.
    pub acceptor: SocketAddr,
    /// The connector.
    pub endpoint: EndpointId,
    /// The connector's part of the flow key.
    pub random_c: [u8; 32],
    /// Feature bits; unknown ones are ignored.
    pub features: u64,
    /// TCP port of the connector's resume listener.
    pub resume_port: u16,
    /// UDP port of the connector's control socket.
    pub control_port: u16,
    /// Addresses of the connector.
    pub addrs: AddrList,
}

/// Answer to HELLO: the process has SLIM, but its application has not accepted the connection yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloWait {
    /// From the HELLO.
    pub flow: FlowId,
}

/// Answer to HELLO: the process has SLIM. After this both sides can derive the flow key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloAck {
    /// From the HELLO.
    pub flow: FlowId,
    /// The acceptor.
    pub endpoint: EndpointId,
    /// The acceptor's part of the flow key.
    pub random_s: [u8; 32],
    /// Feature bits; unknown ones are ignored.
    pub features: u64,
    /// TCP port of the acceptor's resume listener.
    pub resume_port: u16,
    /// UDP port of the acceptor's control socket.
    pub control_port: u16,
    /// Addresses of the acceptor.
    pub addrs: AddrList,
}

/// Tells the acceptor that its HELLO_ACK has arrived. Connector to acceptor. It holds the HELLO that was answered,
/// because an acceptor keeps only few HELLOs for which no HELLO_DONE has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloDone(pub Hello);

/// Answer to HELLO: the process has SLIM, but refuses a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloNak {
    /// From the HELLO.
    pub flow: FlowId,
    /// Reason of the refusal.
    pub reason: NakReason,
}

/// Why a flow stays plain TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NakReason {
    /// The acceptor does not speak this version.
    Version,
    /// The acceptor's policy forbids sessions.
    Policy,
    /// The job keys differ.
    Unauthorized,
}

impl Hello {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Hello {
            flow: FlowId(array(b, hello::FLOW)),
            connector: read_socket_addr(b, hello::CONNECTOR)?,
            acceptor: read_socket_addr(b, hello::ACCEPTOR)?,
            endpoint: read_endpoint(b, hello::ENDPOINT_ID),
            random_c: array(b, hello::RANDOM_C),
            features: read_u64(b, hello::FEATURES),
            resume_port: read_u16(b, hello::RESUME_PORT),
            control_port: read_u16(b, hello::CONTROL_PORT),
            addrs: read_addrs(b, hello::ADDR_LIST)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, hello::FLOW, &self.flow.0);
        put_socket_addr(b, hello::CONNECTOR, &self.connector);
        put_socket_addr(b, hello::ACCEPTOR, &self.acceptor);
        put_endpoint(b, hello::ENDPOINT_ID, &self.endpoint);
        put(b, hello::RANDOM_C, &self.random_c);
        put_u64(b, hello::FEATURES, self.features);
        put_u16(b, hello::RESUME_PORT, self.resume_port);
        put_u16(b, hello::CONTROL_PORT, self.control_port);
        put_addrs(b, hello::ADDR_LIST, &self.addrs);
    }
}

impl HelloWait {
    pub(super) fn read(b: &[u8]) -> Self {
        HelloWait {
            flow: FlowId(array(b, hello_wait::FLOW)),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, hello_wait::FLOW, &self.flow.0);
    }
}

impl HelloAck {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(HelloAck {
            flow: FlowId(array(b, hello_ack::FLOW)),
            endpoint: read_endpoint(b, hello_ack::ENDPOINT_ID),
            random_s: array(b, hello_ack::RANDOM_S),
            features: read_u64(b, hello_ack::FEATURES),
            resume_port: read_u16(b, hello_ack::RESUME_PORT),
            control_port: read_u16(b, hello_ack::CONTROL_PORT),
            addrs: read_addrs(b, hello_ack::ADDR_LIST)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, hello_ack::FLOW, &self.flow.0);
        put_endpoint(b, hello_ack::ENDPOINT_ID, &self.endpoint);
        put(b, hello_ack::RANDOM_S, &self.random_s);
        put_u64(b, hello_ack::FEATURES, self.features);
        put_u16(b, hello_ack::RESUME_PORT, self.resume_port);
        put_u16(b, hello_ack::CONTROL_PORT, self.control_port);
        put_addrs(b, hello_ack::ADDR_LIST, &self.addrs);
    }
}

impl HelloDone {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(HelloDone(Hello::read(b)?))
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        self.0.write(b);
    }
}

impl HelloNak {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let reason = match b[hello_nak::REASON] {
            1 => NakReason::Version,
            2 => NakReason::Policy,
            3 => NakReason::Unauthorized,
            _ => return Err(ParseError::Value("reason")),
        };
        Ok(HelloNak {
            flow: FlowId(array(b, hello_nak::FLOW)),
            reason,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, hello_nak::FLOW, &self.flow.0);
        b[hello_nak::REASON] = match self.reason {
            NakReason::Version => 1,
            NakReason::Policy => 2,
            NakReason::Unauthorized => 3,
        };
    }
}
