//! Parses netlink messages (netlink(7)). A message or attribute that is cut short is taken for none.

use std::net::IpAddr;

/// Length of the header of a message.
pub(crate) const HEADER: usize = 16;
/// Length of the header of an attribute.
const ATTRIBUTE: usize = 4;

/// The first message of a datagram: its kind, its body, and the bytes after it.
pub(crate) fn first(data: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = u32_at(data, 0)? as usize;
    let kind = u16_at(data, 4)?;
    let body = data.get(HEADER..len)?;
    let next = data.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body, next))
}

/// The first attribute: its kind, its value, and the bytes after it.
pub(crate) fn attribute(data: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let len = usize::from(u16_at(data, 0)?);
    let kind = u16_at(data, 2)?;
    let value = data.get(ATTRIBUTE..len)?;
    let next = data.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, value, next))
}

/// The IP address that an attribute's value consists of.
pub(crate) fn ip(value: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(value).ok().map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(value).ok().map(IpAddr::from);
    v4().or_else(v6)
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}
