//! Messages between the processes of a job and its witness: `docs/PROTOCOL.md`, section "The witness".

use super::ParseError;
use super::field::*;
use super::layout::{accuse, fenced, lost};
use crate::ids::EndpointId;

/// All attempts to reach a process have failed: one of the two must be lost. To the witness, repeated until LOST is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accuse {
    /// The sender.
    pub accuser: EndpointId,
    /// The process that it cannot reach.
    pub accused: EndpointId,
    /// The accused's UDP port for control messages.
    pub control_port: u16,
    /// The accused's addresses.
    pub addrs: AddrList,
}

/// Which process is lost: the accused, or the accuser. From the witness to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The process that this is for.
    pub to: EndpointId,
    /// The lost process.
    pub lost: EndpointId,
    /// The lost process has said that it is fenced, or has had the time in which it fences itself.
    pub settled: bool,
}

/// The sender is lost, knows it, and is fenced. To the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced {
    /// The sender.
    pub endpoint: EndpointId,
}

impl Accuse {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Accuse {
            accuser: read_endpoint(b, accuse::ACCUSER),
            accused: read_endpoint(b, accuse::ACCUSED),
            control_port: read_u16(b, accuse::CONTROL_PORT),
            addrs: read_addrs(b, accuse::ADDR_LIST)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, accuse::ACCUSER, &self.accuser);
        put_endpoint(b, accuse::ACCUSED, &self.accused);
        put_u16(b, accuse::CONTROL_PORT, self.control_port);
        put_addrs(b, accuse::ADDR_LIST, &self.addrs);
    }
}

impl Lost {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let settled = match b[lost::SETTLED] {
            0 => false,
            1 => true,
            _ => return Err(ParseError::Value("settled")),
        };
        Ok(Lost {
            to: read_endpoint(b, lost::TO),
            lost: read_endpoint(b, lost::LOST),
            settled,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, lost::TO, &self.to);
        put_endpoint(b, lost::LOST, &self.lost);
        b[lost::SETTLED] = u8::from(self.settled);
    }
}

impl Fenced {
    pub(super) fn read(b: &[u8]) -> Self {
        Fenced {
            endpoint: read_endpoint(b, fenced::ENDPOINT_ID),
        }
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, fenced::ENDPOINT_ID, &self.endpoint);
    }
}
