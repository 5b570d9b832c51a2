//! Messages between the processes of a job and its witness: `docs/PROTOCOL.md`, section "The witness".

use super::ParseError;
use super::field::*;
use super::layout::{accuse, fenced, lost, relay};
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
    /// From LOST: shows that the accuser hears the witness. 0 before that.
    pub cookie: u64,
}

/// How far a verdict is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// The accusation counts when it comes with the cookie.
    Heard,
    /// The process is lost.
    Fallen,
    /// The process is lost, and has said that it is fenced, or has had the time in which it fences itself.
    Settled,
}

/// Which process is lost, or is about to be: the accused, or the accuser. From the witness to one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The process that this is for.
    pub to: EndpointId,
    /// The lost process.
    pub lost: EndpointId,
    /// How far the verdict is.
    pub ruling: Ruling,
    /// What ACCUSE has to bring back; 0 if there is nothing to bring back.
    pub cookie: u64,
}

/// The sender is lost, knows it, and is fenced. To the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced {
    /// The sender.
    pub endpoint: EndpointId,
}

/// The sender wants to be connected to a process that the witness may reach. The first message of a connection to the witness by TCP; what
/// follows is for that process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Relay {
    /// The process's TCP port for relayed connections.
    pub port: u16,
    /// Its addresses.
    pub addrs: AddrList,
}

impl Accuse {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Accuse {
            accuser: read_endpoint(b, accuse::ACCUSER),
            accused: read_endpoint(b, accuse::ACCUSED),
            control_port: read_u16(b, accuse::CONTROL_PORT),
            addrs: read_addrs(b, accuse::ADDR_LIST)?,
            cookie: read_u64(b, accuse::COOKIE),
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, accuse::ACCUSER, &self.accuser);
        put_endpoint(b, accuse::ACCUSED, &self.accused);
        put_u16(b, accuse::CONTROL_PORT, self.control_port);
        put_addrs(b, accuse::ADDR_LIST, &self.addrs);
        put_u64(b, accuse::COOKIE, self.cookie);
    }
}

impl Lost {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        let ruling = match b[lost::STATE] {
            0 => Ruling::Heard,
            1 => Ruling::Fallen,
            2 => Ruling::Settled,
            _ => return Err(ParseError::Value("state of a verdict")),
        };
        Ok(Lost {
            to: read_endpoint(b, lost::TO),
            lost: read_endpoint(b, lost::LOST),
            ruling,
            cookie: read_u64(b, lost::COOKIE),
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, lost::TO, &self.to);
        put_endpoint(b, lost::LOST, &self.lost);
        b[lost::STATE] = match self.ruling {
            Ruling::Heard => 0,
            Ruling::Fallen => 1,
            Ruling::Settled => 2,
        };
        put_u64(b, lost::COOKIE, self.cookie);
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

impl Relay {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Relay {
            port: read_u16(b, relay::PORT),
            addrs: read_addrs(b, relay::ADDR_LIST)?,
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_u16(b, relay::PORT, self.port);
        put_addrs(b, relay::ADDR_LIST, &self.addrs);
    }
}
