//! Encoding of the fields. Everything is big-endian.
//!
//! A value has exactly one encoding. Unused bytes are zero, and a reader refuses any other value in
//! them. So two different messages never mean the same, and nothing can be hidden in a gap.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;

use super::ParseError;
use super::layout::{IP_ADDR, MAX_ADDRS};
use crate::ids::EndpointId;

const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;

/// Up to [`MAX_ADDRS`] addresses of an endpoint, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddrList {
    len: usize,
    places: [IpAddr; MAX_ADDRS],
}

impl AddrList {
    /// The first [`MAX_ADDRS`] of `addrs`; the rest are left out. An IPv4-mapped IPv6 address
    /// counts as the IPv4 address it stands for.
    pub fn new(addrs: impl IntoIterator<Item = IpAddr>) -> Self {
        let mut list = AddrList {
            len: 0,
            places: [IpAddr::V4(Ipv4Addr::UNSPECIFIED); MAX_ADDRS],
        };
        for addr in addrs.into_iter().take(MAX_ADDRS) {
            list.places[list.len] = addr.to_canonical();
            list.len += 1;
        }
        list
    }
}

impl Deref for AddrList {
    type Target = [IpAddr];

    fn deref(&self) -> &[IpAddr] {
        &self.places[..self.len]
    }
}

pub(super) fn array<const N: usize>(b: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&b[at..at + N]);
    out
}

pub(super) fn read_u16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(b, at))
}

pub(super) fn read_u64(b: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(b, at))
}

pub(super) fn put(b: &mut [u8], at: usize, value: &[u8]) {
    b[at..at + value.len()].copy_from_slice(value);
}

pub(super) fn put_u16(b: &mut [u8], at: usize, value: u16) {
    put(b, at, &value.to_be_bytes());
}

pub(super) fn put_u64(b: &mut [u8], at: usize, value: u64) {
    put(b, at, &value.to_be_bytes());
}

/// How an application has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Bytes that it has sent in all.
    pub seq: u64,
    /// It has closed the flow, so it does not read any more, either.
    pub closed: bool,
}

pub(super) fn read_endpoint(b: &[u8], at: usize) -> EndpointId {
    EndpointId {
        host: array(b, at),
        pid: u32::from_be_bytes(array(b, at + 16)),
        incarnation: read_u64(b, at + 20),
    }
}

pub(super) fn put_endpoint(b: &mut [u8], at: usize, id: &EndpointId) {
    put(b, at, &id.host);
    put(b, at + 16, &id.pid.to_be_bytes());
    put_u64(b, at + 20, id.incarnation);
}

pub(super) fn read_end(b: &[u8], at: usize) -> Result<Option<End>, ParseError> {
    let end = |seq, closed| Ok(Some(End { seq, closed }));
    match (b[at], read_u64(b, at + 1)) {
        (0, 0) => Ok(None),
        (1, seq) => end(seq, false),
        (2, seq) => end(seq, true),
        _ => Err(ParseError::Value("end")),
    }
}

pub(super) fn put_end(b: &mut [u8], at: usize, end: Option<End>) {
    if let Some(end) = end {
        b[at] = if end.closed { 2 } else { 1 };
        put_u64(b, at + 1, end.seq);
    }
}

/// Checks a number that only some values of an enum carry: it is zero for the others.
pub(super) fn expect_zero(value: u64) -> Result<(), ParseError> {
    if value == 0 {
        Ok(())
    } else {
        Err(ParseError::Value("unused number"))
    }
}

fn read_ip(family: u8, b: [u8; 16]) -> Result<IpAddr, ParseError> {
    let refused = Err(ParseError::Value("address"));
    match family {
        FAMILY_V4 if b[4..].iter().all(|&x| x == 0) => {
            Ok(IpAddr::V4(Ipv4Addr::new(b[0], b[1], b[2], b[3])))
        }
        FAMILY_V6 => {
            let addr = Ipv6Addr::from(b);
            // A mapped address would be a second encoding of an IPv4 address.
            if addr.to_ipv4_mapped().is_some() {
                refused
            } else {
                Ok(IpAddr::V6(addr))
            }
        }
        _ => refused,
    }
}

fn ip_bytes(addr: IpAddr) -> (u8, [u8; 16]) {
    match addr.to_canonical() {
        IpAddr::V4(v4) => {
            let mut b = [0; 16];
            b[..4].copy_from_slice(&v4.octets());
            (FAMILY_V4, b)
        }
        IpAddr::V6(v6) => (FAMILY_V6, v6.octets()),
    }
}

pub(super) fn read_socket_addr(b: &[u8], at: usize) -> Result<SocketAddr, ParseError> {
    if b[at + 1] != 0 {
        return Err(ParseError::Value("address"));
    }
    let ip = read_ip(b[at], array(b, at + 4))?;
    Ok(SocketAddr::new(ip, read_u16(b, at + 2)))
}

/// Leaves out flow label and scope of an IPv6 address, which mean something on one host only.
pub(super) fn put_socket_addr(b: &mut [u8], at: usize, addr: &SocketAddr) {
    let (family, bytes) = ip_bytes(addr.ip());
    b[at] = family;
    put_u16(b, at + 2, addr.port());
    put(b, at + 4, &bytes);
}

pub(super) fn read_addrs(b: &[u8], at: usize) -> Result<AddrList, ParseError> {
    let count = usize::from(b[at]);
    if count > MAX_ADDRS {
        return Err(ParseError::Value("number of addresses"));
    }
    let mut list = AddrList::new([]);
    for i in 0..MAX_ADDRS {
        let place = at + 1 + i * IP_ADDR;
        if i < count {
            list.places[i] = read_ip(b[place], array(b, place + 1))?;
        } else if b[place..place + IP_ADDR].iter().any(|&x| x != 0) {
            return Err(ParseError::Value("unused address"));
        }
    }
    list.len = count;
    Ok(list)
}

pub(super) fn put_addrs(b: &mut [u8], at: usize, addrs: &AddrList) {
    // `AddrList` holds at most MAX_ADDRS, which is 8.
    b[at] = addrs.len as u8;
    for (i, addr) in addrs.iter().enumerate() {
        let place = at + 1 + i * IP_ADDR;
        let (family, bytes) = ip_bytes(*addr);
        b[place] = family;
        put(b, place + 1, &bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ninth_address_is_left_out() {
        let many = (0..20).map(|i| IpAddr::V4(Ipv4Addr::new(10, 0, 0, i)));
        let list = AddrList::new(many.clone());
        assert!(list.iter().copied().eq(many.take(MAX_ADDRS)));
    }

    #[test]
    fn an_ipv4_address_has_one_encoding() {
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        let plain: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(ip_bytes(mapped), ip_bytes(plain));
        let IpAddr::V6(v6) = mapped else {
            unreachable!()
        };
        assert!(read_ip(FAMILY_V6, v6.octets()).is_err());
        assert_eq!(AddrList::new([mapped])[..], [plain]);
    }

    #[test]
    fn garbage_behind_an_ipv4_address_is_refused() {
        let (family, mut bytes) = ip_bytes("10.0.0.1".parse().unwrap());
        assert!(read_ip(family, bytes).is_ok());
        bytes[15] = 1;
        assert!(read_ip(family, bytes).is_err());
    }

    #[test]
    fn an_absent_end_is_zero() {
        let mut b = [0; 9];
        assert_eq!(read_end(&b, 0), Ok(None));
        b[8] = 1;
        assert!(read_end(&b, 0).is_err());
        for closed in [false, true] {
            b[0] += 1;
            assert_eq!(read_end(&b, 0), Ok(Some(End { seq: 1, closed })));
        }
        b[0] = 3;
        assert!(read_end(&b, 0).is_err());
    }
}
