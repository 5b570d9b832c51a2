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
    /// The address.
    pub addr: SocketAddr,
    /// Bits of the network.
    pub prefix: u8,
    /// The line: addresses of one interface have the same number.
    pub line: u8,
}

/// Addresses of one line of a peer, the best one first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineAddresses {
    /// The peer's number of the line.
    pub line: u8,
    /// Addresses in a network of this process.
    pub addrs: Vec<SocketAddr>,
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

/// The version of the blob.
const VERSION: u8 = 4;
/// The bit of a process that can read a peer's memory.
const READS: u8 = 1;

/// The blob that a process publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcBlob {
    /// A connector repeats it in its hello.
    pub token: u64,
    /// It can read the memory of peers, so long messages may be offered to it.
    pub reads: bool,
    /// The addresses at which the process listens.
    pub addresses: Vec<ProcAddress>,
}

impl ProcBlob {
    /// As bytes: version (1), token (8), 1 if it reads, else 0 (1), then for each address: length of the IP address (1), prefix (1), port (2), line (1), IP address.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend(self.token.to_le_bytes());
        bytes.push(if self.reads { READS } else { 0 });
        for address in &self.addresses {
            let ip = match address.addr.ip() {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            };
            bytes.extend([ip.len() as u8, address.prefix]);
            bytes.extend(address.addr.port().to_le_bytes());
            bytes.push(address.line);
            bytes.extend(ip);
        }
        bytes
    }

    /// `None`: not a blob of this version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (version, bytes) = bytes.split_first()?;
        let (token, rest) = bytes.split_first_chunk::<8>()?;
        let (what, mut rest) = rest.split_first()?;
        let mut blob = ProcBlob {
            token: u64::from_le_bytes(*token),
            reads: *what == READS,
            addresses: Vec::new(),
        };
        while let Some((&[len, prefix, low, high, line], after)) = rest.split_first_chunk::<5>() {
            let (ip, after) = after.split_at_checked(len.into())?;
            let ip = match len {
                4 => IpAddr::from(<[u8; 4]>::try_from(ip).ok()?),
                16 => IpAddr::from(<[u8; 16]>::try_from(ip).ok()?),
                _ => return None,
            };
            blob.addresses.push(ProcAddress {
                addr: SocketAddr::new(ip, u16::from_le_bytes([low, high])),
                prefix,
                line,
            });
            rest = after;
        }
        (rest.is_empty() && *version == VERSION && *what <= READS).then_some(blob)
    }

    /// The addresses to try with their lines, those in a network of this process first. A loopback address is of use only to a
    /// process that has one itself.
    pub fn candidates(&self, own: &[ProcAddress]) -> Vec<(u8, SocketAddr)> {
        let is_near = |a: &&ProcAddress| own.iter().any(|o| o.shares_network(a.addr.ip()));
        let all: Vec<&ProcAddress> = self.addresses.iter().collect();
        let (near, far): (Vec<_>, Vec<_>) = all.into_iter().partition(is_near);
        let far = far
            .into_iter()
            .filter(|a: &&ProcAddress| !a.addr.ip().is_loopback());
        near.into_iter()
            .chain(far)
            .map(|a| (a.line, a.addr))
            .collect()
    }

    /// The peer's lines that get a rail: each forms a pair with another line of this process, in a common network.
    pub fn lines(&self, own: &[ProcAddress]) -> Vec<LineAddresses> {
        let mut own_used = Vec::new();
        let mut lines: Vec<LineAddresses> = Vec::new();
        for theirs in &self.addresses {
            if let Some(line) = lines.iter_mut().find(|l| l.line == theirs.line) {
                if own.iter().any(|o| o.shares_network(theirs.addr.ip())) {
                    line.addrs.push(theirs.addr);
                }
                continue;
            }
            let is_free = |o: &&ProcAddress| !own_used.contains(&o.line);
            let mut free = own.iter().filter(is_free);
            if let Some(ours) = free.find(|o| o.shares_network(theirs.addr.ip())) {
                own_used.push(ours.line);
                lines.push(LineAddresses {
                    line: theirs.line,
                    addrs: vec![theirs.addr],
                });
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str, prefix: u8, line: u8) -> ProcAddress {
        let addr = text.parse().unwrap();
        ProcAddress { addr, prefix, line }
    }

    #[test]
    fn a_blob_survives_the_exchange() {
        let blob = ProcBlob {
            token: u64::MAX - 1,
            reads: true,
            addresses: vec![
                address("10.77.0.1:40001", 24, 0),
                address("[2001:db8::1]:40002", 64, 1),
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
            reads: false,
            addresses: vec![
                address("127.0.0.1:1", 8, 0),
                address("192.168.1.2:2", 24, 1),
                address("10.77.0.2:3", 24, 2),
            ],
        };
        let own = [address("10.77.0.1:9", 24, 0)];
        let ports: Vec<_> = blob.candidates(&own).iter().map(|a| a.1.port()).collect();
        assert_eq!(ports, [3, 2]);
    }

    #[test]
    fn each_line_of_a_process_is_paired_once() {
        let peer = ProcBlob {
            token: 0,
            reads: false,
            addresses: vec![
                address("10.77.0.2:1", 24, 0),
                address("[2001:db8::2]:2", 64, 0),
                address("10.78.0.2:3", 24, 1),
                address("10.77.0.3:4", 24, 2),
                address("192.168.1.2:5", 24, 3),
            ],
        };
        let own = [
            address("10.77.0.1:9", 24, 4),
            address("[2001:db8::1]:9", 64, 4),
            address("10.78.0.1:9", 24, 5),
        ];
        let lines = peer.lines(&own);
        let ports = |line: &LineAddresses| line.addrs.iter().map(|a| a.port()).collect::<Vec<_>>();
        let found: Vec<_> = lines.iter().map(|line| (line.line, ports(line))).collect();
        assert_eq!(found, [(0, vec![1, 2]), (1, vec![3])]);
        assert!(peer.lines(&[]).is_empty());
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
