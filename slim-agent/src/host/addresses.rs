//! The host's own addresses, as the kernel reports them (rtnetlink(7)). libc's `getifaddrs` would allocate from the
//! program's heap, on which the agent must not wait.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use slim_core::config::Net;

use crate::events::Log;
use crate::kernel::netlink::{HEADER, attribute, first, ip, u32_at};
use crate::kernel::sys;

// Offsets in messages, from linux/netlink.h, linux/rtnetlink.h and linux/if_addr.h.
const LINK_INDEX: usize = 4;
const LINK_FLAGS: usize = 8;
const ADDRESS_BITS: usize = 1;
const ADDRESS_INDEX: usize = 4;
const ADDRESS_ATTRIBUTES: usize = 8;
/// Larger than what the kernel sends at a time.
const REPLY: usize = 32 << 10;

/// The addresses under which others can reach this host, and the networks of these addresses.
pub(crate) type Addresses = (Vec<IpAddr>, Vec<Net>);

/// The current addresses; none if the kernel does not answer.
pub(crate) fn now(log: Log) -> Addresses {
    let all = own().unwrap_or_else(|e| {
        log.warn(|| format!("own addresses unknown: {e}"));
        Vec::new()
    });
    let nets = all.iter().map(|(ip, bits)| Net::new(*ip, *bits)).collect();
    (all.into_iter().map(|(ip, _)| ip).collect(), nets)
}

/// Addresses of this host that others can use to reach it: interfaces that are up, no loopback, no link-local ones
/// (they mean nothing without an interface). Each comes with the prefix length of its network.
fn own() -> io::Result<Vec<(IpAddr, u8)>> {
    let mut up = BTreeSet::new();
    ask(libc::RTM_GETLINK, |link| {
        if u32_at(link, LINK_FLAGS)? & libc::IFF_UP as u32 != 0 {
            up.insert(u32_at(link, LINK_INDEX)?);
        }
        Some(())
    })?;
    let mut found = Vec::new();
    ask(libc::RTM_GETADDR, |address| {
        let ip = ip_of(address.get(ADDRESS_ATTRIBUTES..)?)?;
        let usable = up.contains(&u32_at(address, ADDRESS_INDEX)?) && is_reachable(&ip);
        if usable && !found.iter().any(|(known, _)| *known == ip) {
            found.push((ip, *address.get(ADDRESS_BITS)?));
        }
        Some(())
    })?;
    Ok(found)
}

/// Asks for all objects of one kind, and calls `f` with each message, without its header. Messages that are cut short
/// are skipped.
fn ask(kind: u16, mut f: impl FnMut(&[u8]) -> Option<()>) -> io::Result<()> {
    let socket = sys::route_socket()?;
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    // The header, and the family: any.
    let mut request = [0; HEADER + 4];
    request[..4].copy_from_slice(&(HEADER as u32 + 4).to_ne_bytes());
    request[4..6].copy_from_slice(&kind.to_ne_bytes());
    request[6..8].copy_from_slice(&flags.to_ne_bytes());
    sys::send(socket.raw(), &request)?;
    let mut reply = vec![0; REPLY];
    loop {
        let n = sys::recv(socket.raw(), &mut reply)?;
        let mut rest = &reply[..n];
        if rest.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        while let Some((kind, body, next)) = first(rest) {
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(()),
                libc::NLMSG_ERROR => {
                    let errno = u32_at(body, 0).unwrap_or(0) as i32;
                    return Err(io::Error::from_raw_os_error(-errno));
                }
                _ => drop(f(body)),
            }
            rest = next;
        }
    }
}

/// The address among the attributes. `IFA_LOCAL` comes first: on a point-to-point interface `IFA_ADDRESS` is the
/// address of the other end.
fn ip_of(mut attributes: &[u8]) -> Option<IpAddr> {
    let (mut own, mut address) = (None, None);
    while let Some((kind, value, next)) = attribute(attributes) {
        match kind {
            libc::IFA_LOCAL => own = ip(value),
            libc::IFA_ADDRESS => address = ip(value),
            _ => {}
        }
        attributes = next;
    }
    own.or(address)
}

pub(crate) fn is_reachable(ip: &IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !(ip.is_loopback() || ip.is_unspecified() || link_local)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use super::*;

    #[test]
    fn only_addresses_that_others_can_use_are_announced() {
        for (ip, usable) in [
            ("127.0.0.1", false),
            ("169.254.1.1", false),
            ("::1", false),
            ("fe80::1", false),
            ("10.0.0.1", true),
            ("2001:db8::1", true),
        ] {
            assert_eq!(is_reachable(&ip.parse().unwrap()), usable, "{ip}");
        }
    }

    #[test]
    fn the_address_that_packets_leave_from_is_known() {
        let found = own().unwrap();
        assert!(found.iter().all(|(ip, _)| is_reachable(ip)));
        // Where there is a route, packets leave from one of these addresses.
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        if socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).is_ok() {
            let from = socket.local_addr().unwrap().ip();
            let own = found.iter().find(|(ip, _)| *ip == from);
            let (_, bits) = own.unwrap_or_else(|| panic!("{from} is not among {found:?}"));
            assert!((8..=128).contains(bits), "{found:?}");
        }
    }
}
