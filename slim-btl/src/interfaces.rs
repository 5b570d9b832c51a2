//! The addresses of this host at which a process listens.

use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage};

use crate::proc::in_network;

/// An address of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAddress {
    /// Name of its interface.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Bits of its network.
    pub prefix: u8,
}

/// A word of `if_include` or `if_exclude`: a name, or a network.
#[derive(Clone, Debug, PartialEq, Eq)]
enum InterfaceRule {
    Name(String),
    Network(IpAddr, u8),
}

impl InterfaceRule {
    fn list(text: &str) -> Vec<Self> {
        let words = text.split(',').map(str::trim).filter(|w| !w.is_empty());
        words.map(Self::parse).collect()
    }

    fn parse(word: &str) -> Self {
        let network = word.split_once('/').and_then(|(ip, prefix)| {
            let network = (ip.parse().ok()?, prefix.parse().ok()?);
            Some(Self::Network(network.0, network.1))
        });
        network.unwrap_or_else(|| Self::Name(word.to_owned()))
    }

    fn matches(&self, address: &HostAddress) -> bool {
        match self {
            Self::Name(name) => *name == address.interface,
            Self::Network(ip, prefix) => in_network(*ip, *prefix, address.ip),
        }
    }
}

/// The addresses to listen at. `include` and `exclude` are lists of interfaces and networks; without an `include`, all that are
/// up are used, but for those of `exclude`. If that leaves none, loopback is used: the job may be on one host.
pub fn choose(all: &[HostAddress], include: &str, exclude: &str) -> Vec<HostAddress> {
    let (include, exclude) = (InterfaceRule::list(include), InterfaceRule::list(exclude));
    let any = |rules: &[InterfaceRule], a: &HostAddress| rules.iter().any(|r| r.matches(a));
    let chosen = |a: &&HostAddress| match include.is_empty() {
        true => !any(&exclude, a),
        false => any(&include, a),
    };
    let mut found: Vec<_> = all.iter().filter(chosen).cloned().collect();
    if found.is_empty() && include.is_empty() {
        let loopback = all.iter().filter(|a| a.ip.is_loopback() && a.ip.is_ipv4());
        found.extend(loopback.take(1).cloned());
    }
    found
}

/// The addresses of this host whose interfaces are up. Link-local ones are left out: they mean nothing without their interface.
pub fn of_this_host() -> Vec<HostAddress> {
    let Ok(all) = getifaddrs() else {
        return Vec::new();
    };
    let up = all.filter(|i| i.flags.contains(InterfaceFlags::IFF_UP));
    let usable = up.filter_map(|i| {
        let ip = ip_of(i.address?)?;
        let is_local = match ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        };
        let prefix = match ip_of(i.netmask?)? {
            IpAddr::V4(mask) => mask.to_bits().leading_ones(),
            IpAddr::V6(mask) => mask.to_bits().leading_ones(),
        };
        (!is_local).then_some(HostAddress {
            interface: i.interface_name,
            ip,
            prefix: prefix as u8,
        })
    });
    usable.collect()
}

fn ip_of(address: SockaddrStorage) -> Option<IpAddr> {
    match address.family()? {
        AddressFamily::Inet => Some(address.as_sockaddr_in()?.ip().into()),
        AddressFamily::Inet6 => Some(address.as_sockaddr_in6()?.ip().into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<HostAddress> {
        let one = |interface: &str, ip: &str, prefix| HostAddress {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
            prefix,
        };
        vec![
            one("lo", "127.0.0.1", 8),
            one("path0", "10.77.0.1", 24),
            one("path1", "10.78.0.1", 24),
        ]
    }

    fn names(include: &str, exclude: &str) -> Vec<String> {
        let chosen = choose(&host(), include, exclude);
        chosen.into_iter().map(|a| a.interface).collect()
    }

    #[test]
    fn interfaces_are_chosen_by_name_and_by_network() {
        assert_eq!(names("", "127.0.0.0/8"), ["path0", "path1"]);
        assert_eq!(names("path1", ""), ["path1"]);
        assert_eq!(names(" 10.77.0.0/16 , lo", ""), ["lo", "path0"]);
        assert_eq!(names("", "lo,10.78.0.0/24"), ["path0"]);
        assert!(names("no-such", "").is_empty());
    }

    #[test]
    fn loopback_is_used_where_nothing_else_is_left() {
        assert_eq!(names("", "lo,path0,path1"), ["lo"]);
    }

    #[test]
    fn this_host_has_loopback() {
        let all = of_this_host();
        assert!(all.iter().any(|a| a.ip.is_loopback()), "{all:?}");
    }
}
