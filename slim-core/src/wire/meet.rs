//! Messages by which two processes find each other after both have changed their addresses: `docs/PROTOCOL.md`, section "Held flows".

use super::ParseError;
use super::field::*;
use super::layout::{asking, here};
use crate::ids::EndpointId;

/// Where a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessPlace {
    /// The process counts its places; a later one has a higher number.
    pub serial: u64,
    /// TCP port of the resume listener.
    pub resume_port: u16,
    /// UDP port for control messages.
    pub control_port: u16,
    /// Addresses at which the two ports can be reached.
    pub addrs: AddrList,
}

/// "I am here. Where is that process?" To the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Where {
    /// The sender.
    pub sender: EndpointId,
    /// The process that it looks for.
    pub wanted: EndpointId,
    /// Serial number of the newest place of that process that the sender knows from the witness, or 0.
    pub known: u64,
    /// Where the sender is.
    pub place: ProcessPlace,
}

/// "That process is here." From the witness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Here {
    /// The process that this is for.
    pub to: EndpointId,
    /// The process that is there.
    pub endpoint: EndpointId,
    /// Where it is.
    pub place: ProcessPlace,
}

impl Where {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Where {
            sender: read_endpoint(b, asking::SENDER),
            wanted: read_endpoint(b, asking::WANTED),
            known: read_u64(b, asking::KNOWN),
            place: ProcessPlace {
                serial: read_u64(b, asking::SERIAL),
                resume_port: read_u16(b, asking::RESUME_PORT),
                control_port: read_u16(b, asking::CONTROL_PORT),
                addrs: read_addrs(b, asking::ADDR_LIST)?,
            },
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, asking::SENDER, &self.sender);
        put_endpoint(b, asking::WANTED, &self.wanted);
        put_u64(b, asking::KNOWN, self.known);
        put_u64(b, asking::SERIAL, self.place.serial);
        put_u16(b, asking::RESUME_PORT, self.place.resume_port);
        put_u16(b, asking::CONTROL_PORT, self.place.control_port);
        put_addrs(b, asking::ADDR_LIST, &self.place.addrs);
    }
}

impl Here {
    pub(super) fn read(b: &[u8]) -> Result<Self, ParseError> {
        Ok(Here {
            to: read_endpoint(b, here::TO),
            endpoint: read_endpoint(b, here::ENDPOINT_ID),
            place: ProcessPlace {
                serial: read_u64(b, here::SERIAL),
                resume_port: read_u16(b, here::RESUME_PORT),
                control_port: read_u16(b, here::CONTROL_PORT),
                addrs: read_addrs(b, here::ADDR_LIST)?,
            },
        })
    }

    pub(super) fn write(&self, b: &mut [u8]) {
        put_endpoint(b, here::TO, &self.to);
        put_endpoint(b, here::ENDPOINT_ID, &self.endpoint);
        put_u64(b, here::SERIAL, self.place.serial);
        put_u16(b, here::RESUME_PORT, self.place.resume_port);
        put_u16(b, here::CONTROL_PORT, self.place.control_port);
        put_addrs(b, here::ADDR_LIST, &self.place.addrs);
    }
}
