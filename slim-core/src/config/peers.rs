//! The hosts that are asked for SLIM, and answered. All other hosts learn nothing from us.

use std::net::IpAddr;

use super::value::Bad;

/// A network: an address and a prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Net {
    bits: u128,
    len: u8,
}

impl Net {
    /// The network with the first `len` bits of `ip`, all of them if it has fewer.
    pub fn new(ip: IpAddr, len: u8) -> Net {
        // IPv4 addresses are stored as IPv4-mapped IPv6 addresses, so that one comparison is enough. If the text has a mapped
        // address, its length counts the bits of IPv6.
        let (bits, len) = match ip {
            IpAddr::V4(v4) => (v4.to_ipv6_mapped().to_bits(), 96 + len.min(32)),
            IpAddr::V6(v6) => (v6.to_bits(), len.min(128)),
        };
        Net { bits, len }
    }

    /// Whether an address is in this network.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let other = Net::new(ip, 128);
        // A shift by all 128 bits would overflow.
        let shift = 128 - u32::from(self.len);
        (self.bits ^ other.bits).checked_shr(shift).unwrap_or(0) == 0
            // A network of IPv6 that is wide enough to hold the mapped addresses does not match IPv4.
            && (self.len >= 96 || ip.to_canonical().is_ipv6())
    }

    fn parse(text: &str) -> Option<Net> {
        let (ip, len) = match text.split_once('/') {
            Some((ip, len)) => (ip, Some(len)),
            None => (text, None),
        };
        let ip: IpAddr = ip.parse().ok()?;
        let most = if ip.is_ipv4() { 32 } else { 128 };
        let len = match len {
            Some(len) => len.parse().ok().filter(|len| *len <= most)?,
            None => most,
        };
        Some(Net::new(ip, len))
    }
}

/// Which hosts are asked for SLIM, and answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    all: bool,
    /// Loopback, private and link-local networks.
    private: bool,
    /// Networks that this host has an address in.
    local: bool,
    nets: Vec<Net>,
}

impl Default for Peers {
    fn default() -> Self {
        Peers {
            private: true,
            local: true,
            ..Peers::NONE
        }
    }
}

impl Peers {
    const NONE: Peers = Peers {
        all: false,
        private: false,
        local: false,
        nets: Vec::new(),
    };

    /// Whether `ip` is a peer of a host that has addresses in the networks `own`.
    pub fn contains(&self, ip: IpAddr, own: &[Net]) -> bool {
        let within = |nets: &[Net]| nets.iter().any(|net| net.contains(ip));
        self.all
            || self.private && is_private(ip.to_canonical())
            || self.local && within(own)
            || within(&self.nets)
    }

    pub(super) fn parse(value: &str) -> Result<Peers, Bad> {
        let mut peers = Peers::NONE;
        for word in value.split(',').map(str::trim) {
            match &*word.to_ascii_lowercase() {
                "all" => peers.all = true,
                "private" => peers.private = true,
                "local" => peers.local = true,
                // Allowed only on its own.
                "none" if value.trim().len() == word.len() => {}
                _ => peers.nets.push(Net::parse(word).ok_or(Bad::Value)?),
            }
        }
        Ok(peers)
    }
}

fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_private() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unique_local() || ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn strangers_are_left_alone_by_default() {
        let peers = Peers::default();
        let own = [
            Net::new(ip("203.0.113.9"), 24),
            Net::new(ip("2001:db8::1"), 64),
        ];
        for (text, is_peer) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("10.1.2.3", true),
            ("::ffff:10.1.2.3", true),
            ("172.31.0.1", true),
            ("172.32.0.1", false),
            ("192.168.7.7", true),
            ("169.254.1.1", true),
            ("fd12::1", true),
            ("fe80::1", true),
            ("203.0.113.200", true),
            ("203.0.114.1", false),
            ("2001:db8::ffff", true),
            ("2001:db8:0:1::1", false),
            ("8.8.8.8", false),
        ] {
            assert_eq!(peers.contains(ip(text), &own), is_peer, "{text}");
        }
        assert!(!peers.contains(ip("203.0.113.200"), &[]));
    }

    #[test]
    fn networks_match_the_addresses_that_they_are_written_for() {
        let peers = |text: &str| Peers::parse(text).unwrap();
        let all = peers("all");
        let none = peers("none");
        for text in ["8.8.8.8", "2001:db8::1", "127.0.0.1"] {
            assert!(all.contains(ip(text), &[]));
            assert!(!none.contains(ip(text), &[Net::new(ip(text), 8)]));
        }
        let some = peers("192.0.2.0/25, 2001:db8::/32,198.51.100.7,private");
        for (text, is_peer) in [
            ("192.0.2.127", true),
            ("192.0.2.128", false),
            ("2001:db8:1::1", true),
            ("2001:db9::1", false),
            ("198.51.100.7", true),
            ("198.51.100.8", false),
            ("10.0.0.1", true),
        ] {
            assert_eq!(some.contains(ip(text), &[]), is_peer, "{text}");
        }
        for mapped in ["::ffff:127.0.0.0/104", "::ffff:127.0.0.1"] {
            let peers = peers(mapped);
            for (text, is_peer) in [
                ("127.0.0.1", true),
                ("::ffff:127.0.0.1", true),
                ("127.200.0.1", mapped.contains('/')),
                ("128.0.0.1", false),
            ] {
                assert_eq!(peers.contains(ip(text), &[]), is_peer, "{mapped} {text}");
            }
        }
        assert!(peers("0.0.0.0/0").contains(ip("8.8.8.8"), &[]));
        assert!(!peers("0.0.0.0/0").contains(ip("2001:db8::1"), &[]));
        assert!(peers("::/0").contains(ip("2001:db8::1"), &[]));
        assert!(!peers("::/0").contains(ip("8.8.8.8"), &[]));
        for bad in [
            "",
            "x",
            "10.0.0.0/33",
            "::/129",
            "10.0.0/8",
            "none,all",
            "all,",
        ] {
            assert!(Peers::parse(bad).is_err(), "{bad}");
        }
    }
}
