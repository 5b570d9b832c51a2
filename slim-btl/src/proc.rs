//! Processes: their names, and what each publishes about itself (the modex blob).

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// The name of a process in its universe: job in the high half, rank in that job in the low half. Names are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcName(pub u64);

impl fmt::Display for ProcName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:08x},{}]", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}

/// An address at which a process listens, with the length of its network's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcAddress {
    /// Where it listens.
    pub addr: SocketAddr,
    /// Bits of the network.
    pub prefix: u8,
}

impl ProcAddress {
    /// Whether `ip` is in the same network.
    pub fn shares_network(&self, ip: IpAddr) -> bool {
        in_network(self.addr.ip(), self.prefix, ip)
    }
}

/// Whether the first `prefix` bits of both are the same.
pub fn in_network(network: IpAddr, prefix: u8, ip: IpAddr) -> bool {
    let (a, b, bits) = match (network, ip) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    let differing: u128 = a ^ b;
    prefix >= 128 && differing == 0
        || differing.checked_shr((bits - u32::from(prefix).min(bits)).min(127)) == Some(0)
}

/// What a process publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcBlob {
    /// A connector says it in its hello.
    pub token: u64,
    /// Where the process listens.
    pub addresses: Vec<ProcAddress>,
}

impl ProcBlob {
    /// As bytes: token (8), then for each address length of the IP address (1), prefix (1), port (2), IP address.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.token.to_le_bytes().to_vec();
        for address in &self.addresses {
            let ip = match address.addr.ip() {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            };
            bytes.extend([ip.len() as u8, address.prefix]);
            bytes.extend(address.addr.port().to_le_bytes());
            bytes.extend(ip);
        }
        bytes
    }

    /// `None`: this is no blob.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (token, mut rest) = bytes.split_first_chunk::<8>()?;
        let mut blob = ProcBlob {
            token: u64::from_le_bytes(*token),
            addresses: Vec::new(),
        };
        while let Some((&[len, prefix, low, high], after)) = rest.split_first_chunk::<4>() {
            let (ip, after) = after.split_at_checked(len.into())?;
            let ip = match len {
                4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
                16 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
                _ => return None,
            };
            let addr = SocketAddr::new(ip, u16::from_le_bytes([low, high]));
            blob.addresses.push(ProcAddress { addr, prefix });
            rest = after;
        }
        rest.is_empty().then_some(blob)
    }

    /// The addresses to try, those in a network of ours first. A loopback address is of use to a process that has one only.
    pub fn candidates(&self, own: &[ProcAddress]) -> Vec<SocketAddr> {
        let is_near = |a: &&ProcAddress| own.iter().any(|o| o.shares_network(a.addr.ip()));
        let all: Vec<&ProcAddress> = self.addresses.iter().collect();
        let (near, far): (Vec<_>, Vec<_>) = all.into_iter().partition(is_near);
        let far = far
            .into_iter()
            .filter(|a: &&ProcAddress| !a.addr.ip().is_loopback());
        near.into_iter().chain(far).map(|a| a.addr).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str, prefix: u8) -> ProcAddress {
        let addr = text.parse().unwrap();
        ProcAddress { addr, prefix }
    }

    #[test]
    fn a_blob_survives_the_exchange() {
        let blob = ProcBlob {
            token: u64::MAX - 1,
            addresses: vec![
                address("10.77.0.1:40001", 24),
                address("[2001:db8::1]:40002", 64),
            ],
        };
        let bytes = blob.encode();
        assert_eq!(ProcBlob::parse(&bytes), Some(blob));
        for cut in 1..bytes.len() {
            let parsed = ProcBlob::parse(&bytes[..cut]);
            assert!(parsed.is_none_or(|b| b.addresses.len() < 2), "{cut}");
        }
    }

    #[test]
    fn addresses_in_a_common_network_come_first() {
        let blob = ProcBlob {
            token: 0,
            addresses: vec![
                address("127.0.0.1:1", 8),
                address("192.168.1.2:2", 24),
                address("10.77.0.2:3", 24),
            ],
        };
        let own = [address("10.77.0.1:9", 24)];
        let ports: Vec<_> = blob.candidates(&own).iter().map(|a| a.port()).collect();
        assert_eq!(ports, [3, 2]);
    }

    #[test]
    fn networks_are_compared_by_their_prefix() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(in_network(ip("10.77.0.0"), 24, ip("10.77.0.9")));
        assert!(!in_network(ip("10.77.0.0"), 24, ip("10.77.1.9")));
        assert!(in_network(ip("10.0.0.1"), 0, ip("192.0.2.1")));
        assert!(in_network(ip("::1"), 128, ip("::1")));
        assert!(!in_network(ip("::1"), 128, ip("::2")));
        assert!(!in_network(ip("::1"), 0, ip("127.0.0.1")));
    }
}
