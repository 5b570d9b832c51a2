//! Resume: `docs/PROTOCOL.md`, section "Resume".
//!
//! These messages travel on the connection that is to become the flow's transport, so a reader must
//! take exactly one message and not a byte more: stream bytes may follow.

use super::ParseError;
use super::field::*;
use super::layout::{challenge, confirm, refuse, resume, resume_ok};
use crate::ids::{EndpointId, FlowId, Nonce};

/// First message of the responder on every connection to its resume listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// The endpoint that listens.
    pub endpoint: EndpointId,
    /// Fresh; the initiator's authentication code covers it.
    pub nonce_r: Nonce,
}

/// Asks that this connection become the transport of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resume {
    /// Which flow.
    pub flow: FlowId,
    /// Number of the new transport.
    pub epoch: u64,
    /// Fresh; the responder's authentication code covers it.
    pub nonce_i: Nonce,
}

/// Agrees to a RESUME, and tells how far the responder got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumeOk {
    /// From the RESUME.
    pub flow: FlowId,
    /// From the RESUME.
    pub epoch: u64,
    /// Bytes that the responder has received; final for all earlier transports.
    pub received: u64,
    /// Bytes that the responder has sent.
    pub sent: u64,
    /// How the responder's application has finished, if it has.
    pub end: Option<End>,
}

/// Tells how far the initiator got. The initiator's stream bytes follow directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirm {
    /// Bytes that the initiator has received; final for all earlier transports.
    pub received: u64,
    /// Bytes that the initiator has sent.
    pub sent: u64,
    /// How the initiator's application has finished, if it has.
    pub end: Option<End>,
}

/// Refuses a RESUME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refuse {
    /// From the RESUME.
    pub flow: FlowId,
    /// From the RESUME.
    pub nonce_i: Nonce,
    /// Reason of the refusal.
    pub reason: RefuseReason,
}

/// Why a RESUME was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefuseReason {
    /// The responder has never known the flow, or has forgotten it.
    UnknownFlow,
    /// A transport of this epoch or a later one was answered already.
    OldEpoch,
    /// The responder is resuming the flow itself, and has precedence.
    Busy,
    /// The application closed the flow after sending this many bytes, and all are delivered.
    Closed(u64),
    /// The application reset the flow.
    Reset,
    /// The flow is plain TCP.
    Legacy,
    /// The authentication code does not verify.
    BadProof,
}

impl Challenge {
    pub(super) fn read(b: &[u8]) -> Self {
        Challenge {
            endpoint: read_endpoint(b, challenge::ENDPOINT_ID),
            nonce_r: Nonce(array(b, challenge::NONCE_R)),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, challenge::ENDPOINT_ID, &self.endpoint);
        put(b, challenge::NONCE_R, &self.nonce_r.0);
    }
}

impl Resume {
    pub(super) fn read(b: &[u8]) -> Self {
        Resume {
            flow: FlowId(array(b, resume::FLOW)),
            epoch: read_u64(b, resume::EPOCH),
            nonce_i: Nonce(array(b, resume::NONCE_I)),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, resume::FLOW, &self.flow.0);
        put_u64(b, resume::EPOCH, self.epoch);
        put(b, resume::NONCE_I, &self.nonce_i.0);
    }
}

impl ResumeOk {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(ResumeOk {
            flow: FlowId(array(b, resume_ok::FLOW)),
            epoch: read_u64(b, resume_ok::EPOCH),
            received: read_u64(b, resume_ok::RECEIVED),
            sent: read_u64(b, resume_ok::SENT),
            end: read_end(b, resume_ok::END)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, resume_ok::FLOW, &self.flow.0);
        put_u64(b, resume_ok::EPOCH, self.epoch);
        put_u64(b, resume_ok::RECEIVED, self.received);
        put_u64(b, resume_ok::SENT, self.sent);
        put_end(b, resume_ok::END, self.end);
    }
}

impl Confirm {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Confirm {
            received: read_u64(b, confirm::RECEIVED),
            sent: read_u64(b, confirm::SENT),
            end: read_end(b, confirm::END)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_u64(b, confirm::RECEIVED, self.received);
        put_u64(b, confirm::SENT, self.sent);
        put_end(b, confirm::END, self.end);
    }
}

impl Refuse {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let number = read_u64(b, refuse::FINAL_SEQ);
        let reason = match b[refuse::REASON] {
            1 => RefuseReason::UnknownFlow,
            2 => RefuseReason::OldEpoch,
            3 => RefuseReason::Busy,
            4 => RefuseReason::Closed(number),
            5 => RefuseReason::Reset,
            6 => RefuseReason::Legacy,
            7 => RefuseReason::BadProof,
            _ => return Err(ParseError::Value("reason")),
        };
        if !matches!(reason, RefuseReason::Closed(_)) {
            expect_zero(number)?;
        }
        let flow = FlowId(array(b, refuse::FLOW));
        Ok(Refuse {
            flow,
            nonce_i: Nonce(array(b, refuse::NONCE_I)),
            reason,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put(b, refuse::FLOW, &self.flow.0);
        put(b, refuse::NONCE_I, &self.nonce_i.0);
        let (reason, number) = match self.reason {
            RefuseReason::UnknownFlow => (1, 0),
            RefuseReason::OldEpoch => (2, 0),
            RefuseReason::Busy => (3, 0),
            RefuseReason::Closed(number) => (4, number),
            RefuseReason::Reset => (5, 0),
            RefuseReason::Legacy => (6, 0),
            RefuseReason::BadProof => (7, 0),
        };
        b[refuse::REASON] = reason;
        put_u64(b, refuse::FINAL_SEQ, number);
    }
}
