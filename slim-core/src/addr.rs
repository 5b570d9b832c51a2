//! Addresses in canonical form, so that both ends write them alike.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The canonical form of an address. An IPv4-mapped IPv6 address becomes the IPv4 address. The scope is kept for link-local
/// addresses only, which are valid on one link. The flow label is dropped.
pub fn canonical(addr: SocketAddr) -> SocketAddr {
    match (addr.ip().to_canonical(), addr) {
        (IpAddr::V6(ip), SocketAddr::V6(addr)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, addr.port(), 0, addr.scope_id()).into()
        }
        (ip, _) => SocketAddr::new(ip, addr.port()),
    }
}

/// How many bits of two addresses differ, from the first one that does; IPv4 addresses are mapped to IPv6. The last 8 bits of IPv4 addresses and the last 64 of
/// others count for nothing: addresses of one network are equally near. So it is with the global identifiers of InfiniBand, whose first half is the subnet.
pub fn network_distance(one: Ipv6Addr, other: Ipv6Addr) -> u32 {
    let bits = u128::BITS - (one.to_bits() ^ other.to_bits()).leading_zeros();
    let both_ipv4 = [one, other].iter().all(|ip| ip.to_ipv4_mapped().is_some());
    bits.max(if both_ipv4 { 8 } else { 64 })
}

/// The same address with another port.
pub(crate) fn at_port(mut addr: SocketAddr, port: u16) -> SocketAddr {
    addr.set_port(port);
    addr
}

/// The address `named` in a message that came from `heard`. Messages carry no scope, so a link-local address gets that of `heard`.
pub(crate) fn on_link_of(named: SocketAddr, heard: SocketAddr) -> SocketAddr {
    match (named, heard) {
        (SocketAddr::V6(mut named), SocketAddr::V6(heard))
            if named.ip().is_unicast_link_local() =>
        {
            named.set_scope_id(heard.scope_id());
            named.into()
        }
        _ => named,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_link_local_addresses_keep_a_scope() {
        let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (given, want) in [
            ("10.0.0.1:7", "10.0.0.1:7"),
            ("[::ffff:10.0.0.1]:7", "10.0.0.1:7"),
            ("[fd00::1%3]:7", "[fd00::1]:7"),
            ("[fe80::1%3]:7", "[fe80::1%3]:7"),
        ] {
            assert_eq!(canonical(addr(given)), addr(want));
        }
        let heard = addr("[fe80::2%3]:9");
        assert_eq!(
            on_link_of(addr("[fe80::1]:7"), heard),
            addr("[fe80::1%3]:7")
        );
        assert_eq!(on_link_of(addr("[fd00::1]:7"), heard), addr("[fd00::1]:7"));
        assert_eq!(at_port(heard, 1), addr("[fe80::2%3]:1"));
    }
}
