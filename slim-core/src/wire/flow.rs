//! Messages about the end and the state of a flow: `docs/PROTOCOL.md`, section "End of a flow, and questions about it".

use super::ParseError;
use super::field::*;
use super::layout::{demote, fin, query, status, unknown};
use crate::ids::{EndpointId, FinHow, FlowId, Nonce};

/// Tells the peer that the sender's application has finished. Not retransmitted: it only saves a QUERY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fin {
    /// Which flow.
    pub flow: FlowId,
    /// Bytes sent in all.
    pub final_seq: u64,
    /// How the application finished.
    pub how: FinHow,
}

/// Asks for the state of a flow at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// Which flow.
    pub flow: FlowId,
    /// Echoed in the answer.
    pub nonce: Nonce,
}

/// Answer to QUERY from an endpoint that knows the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Which flow.
    pub flow: FlowId,
    /// From the QUERY.
    pub nonce: Nonce,
    /// State of the flow.
    pub state: FlowStatus,
}

/// The state of a flow at the endpoint that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowStatus {
    /// Neither closed nor half-closed.
    Open,
    /// The application has sent this many bytes in all, and still reads.
    HalfClosed(u64),
    /// The application has sent this many bytes in all, and closed.
    Closed(u64),
    /// The application reset the flow.
    Reset,
    /// Plain TCP.
    Legacy,
}

/// Answer to QUERY from an endpoint that has never known the flow, or has forgotten it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// Which flow.
    pub flow: FlowId,
    /// From the QUERY.
    pub nonce: Nonce,
    /// The endpoint that answers.
    pub endpoint: EndpointId,
}

/// Tells the peer that the flow is plain TCP from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demote {
    /// Which flow.
    pub flow: FlowId,
}

impl Fin {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let how = match b[fin::HOW] {
            1 => FinHow::HalfClose,
            2 => FinHow::Close,
            3 => FinHow::Reset,
            _ => return Err(ParseError::Value("how")),
        };
        let flow = FlowId(array(b, fin::FLOW));
        Ok(Fin {
            flow,
            final_seq: read_u64(b, fin::FINAL_SEQ),
            how,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, fin::FLOW, &self.flow.0);
        put_u64(b, fin::FINAL_SEQ, self.final_seq);
        b[fin::HOW] = match self.how {
            FinHow::HalfClose => 1,
            FinHow::Close => 2,
            FinHow::Reset => 3,
        };
    }
}

impl Query {
    pub(super) fn read(b: &[u8]) -> Self {
        Query {
            flow: FlowId(array(b, query::FLOW)),
            nonce: Nonce(array(b, query::NONCE_Q)),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, query::FLOW, &self.flow.0);
        put(b, query::NONCE_Q, &self.nonce.0);
    }
}

impl Status {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let number = read_u64(b, status::FINAL_SEQ);
        let state = match b[status::STATE] {
            1 => FlowStatus::Open,
            2 => FlowStatus::HalfClosed(number),
            3 => FlowStatus::Closed(number),
            4 => FlowStatus::Reset,
            5 => FlowStatus::Legacy,
            _ => return Err(ParseError::Value("state")),
        };
        if !matches!(state, FlowStatus::HalfClosed(_) | FlowStatus::Closed(_)) {
            expect_zero(number)?;
        }
        let flow = FlowId(array(b, status::FLOW));
        Ok(Status {
            flow,
            nonce: Nonce(array(b, status::NONCE_Q)),
            state,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, status::FLOW, &self.flow.0);
        put(b, status::NONCE_Q, &self.nonce.0);
        let (state, number) = match self.state {
            FlowStatus::Open => (1, 0),
            FlowStatus::HalfClosed(number) => (2, number),
            FlowStatus::Closed(number) => (3, number),
            FlowStatus::Reset => (4, 0),
            FlowStatus::Legacy => (5, 0),
        };
        b[status::STATE] = state;
        put_u64(b, status::FINAL_SEQ, number);
    }
}

impl Unknown {
    pub(super) fn read(b: &[u8]) -> Self {
        Unknown {
            flow: FlowId(array(b, unknown::FLOW)),
            nonce: Nonce(array(b, unknown::NONCE_Q)),
            endpoint: read_endpoint(b, unknown::ENDPOINT_ID),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, unknown::FLOW, &self.flow.0);
        put(b, unknown::NONCE_Q, &self.nonce.0);
        put_endpoint(b, unknown::ENDPOINT_ID, &self.endpoint);
    }
}

impl Demote {
    pub(super) fn read(b: &[u8]) -> Self {
        Demote {
            flow: FlowId(array(b, demote::FLOW)),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, demote::FLOW, &self.flow.0);
    }
}
