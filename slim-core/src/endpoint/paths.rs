//! The paths on which new connections are tried: kinds of transport, and pairs of addresses.

use std::net::{IpAddr, SocketAddr};

use super::record::FlowRecord;
use crate::addr::{at_port, network_distance};
use crate::ids::EndpointId;
use crate::transport::{Locator, OtherLocator, Path, TransportKind, Transports};

/// The paths of a flow.
pub(super) struct Paths {
    /// The paths of each kind of transport, preferred kind first. Kinds without a path are left out.
    by_kind: Vec<Vec<Path>>,
    /// By TCP, to the address that the application had connected to.
    home: Option<Path>,
    /// Through the witness.
    relay: Option<Path>,
}

/// From when on connections through the witness take their turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RelayTurns {
    /// From the second window on: other paths have been tried for a whole window.
    Late,
    /// From the third connection on. The flow is relayed and may stay so, but the others come first: the network may be well again.
    Third,
    /// From the first connection on: the flow was relayed until now.
    First,
}

impl Paths {
    /// All paths to try. `others`: the peer's locators of other kinds than TCP. `id`: this endpoint. `own`: our transports.
    pub(super) fn of(
        flow: &FlowRecord,
        others: &[OtherLocator],
        id: &EndpointId,
        own: &Transports,
    ) -> Paths {
        let tcp = tcp_paths(flow, &id.host, &own.addrs);
        let home = tcp.first().copied();
        let first = first_locator(flow, id);
        let of_kind = |kind| match kind {
            TransportKind::TCP => tcp.clone(),
            _ => {
                let others = others.iter().filter(|locator| locator.kind() == kind);
                let mut paths: Vec<_> = others.map(|locator| Path::to(*locator)).collect();
                let len = paths.len().max(1);
                paths.rotate_left(first % len);
                paths.sort_by_key(|path| distance(path.to, flow.ends.remote().ip()));
                paths
            }
        };
        let (relays, kinds): (Vec<_>, Vec<_>) =
            own.order().partition(|kind| *kind == TransportKind::RELAY);
        let by_kind = kinds.into_iter().map(of_kind);
        Paths {
            by_kind: by_kind.filter(|paths| !paths.is_empty()).collect(),
            home,
            relay: relays.into_iter().flat_map(of_kind).next(),
        }
    }

    /// Bad locators come behind the others of their kind, and kinds that have no others behind the other kinds. They keep their turns: what is known of them
    /// may be out of date.
    pub(super) fn put_back(&mut self, is_bad: impl Fn(Locator) -> bool) {
        for paths in &mut self.by_kind {
            paths.sort_by_key(|path| is_bad(path.to));
        }
        self.by_kind
            .sort_by_key(|paths| paths.iter().all(|path| is_bad(path.to)));
    }

    /// The path of connection `turn` in window `n`. Every fourth connection goes through the witness, as `relay` says. Of the others, every
    /// second one takes the `home` path, and for the rest the kinds take turns, however many paths a kind has.
    pub(super) fn choose(&self, n: u32, turn: u32, relay: RelayTurns) -> Option<Path> {
        let relay_at = match relay {
            RelayTurns::First => Some(0),
            _ if n > 0 => Some(0),
            RelayTurns::Third => Some(2),
            RelayTurns::Late => None,
        };
        if self.relay.is_some() && relay_at == Some(turn % 4) {
            return self.relay;
        }
        if turn % 2 == 1 {
            return self.home;
        }
        let at = n as usize + turn as usize / 2;
        let kinds = self.by_kind.len();
        let paths = self.by_kind.get(at.checked_rem(kinds)?)?;
        paths.get(at / kinds % paths.len()).copied()
    }

    /// The paths of the kinds for which `wanted` holds, preferred kind first; none through the witness.
    pub(super) fn of_kinds(&self, wanted: impl Fn(TransportKind) -> bool) -> Vec<Path> {
        let all = self.by_kind.iter().flatten();
        all.filter(|path| wanted(path.kind())).copied().collect()
    }

    /// Whether there is a path of another kind than TCP.
    pub(super) fn has_others(&self) -> bool {
        let mut all = self.by_kind.iter().flatten();
        all.any(|path| path.kind() != TransportKind::TCP)
    }

    /// Where the paths lead, each place once.
    pub(super) fn locators(&self) -> Vec<Locator> {
        let mut all: Vec<Locator> = Vec::new();
        for path in self.by_kind.iter().flatten().chain(&self.relay) {
            if !all.contains(&path.to) {
                all.push(path.to);
            }
        }
        all
    }

    /// The TCP path between two addresses. `local` is `None` if the kernel chooses the local address.
    pub(super) fn between(&self, local: Option<IpAddr>, ip: IpAddr) -> Option<Path> {
        let leads = |to: &Locator| to.tcp().is_some_and(|addr| addr.ip() == ip);
        let mut all = self.by_kind.iter().flatten();
        all.find(|path| path.local == local && leads(&path.to))
            .copied()
    }
}

/// Which of the peer's locators of a kind comes first, modulo their number, if none is nearer than others: each may be an adapter's port, and all shall be used. So the
/// flows of processes with successive process ids begin with different ones, and those to addresses that follow each other.
fn first_locator(flow: &FlowRecord, id: &EndpointId) -> usize {
    let Some(peer) = &flow.peer else {
        return 0;
    };
    let remote = flow.ends.remote().ip();
    let addrs = &peer.process.addrs;
    let line = addrs.iter().position(|ip| *ip == remote).unwrap_or(0);
    let pids = id.pid.wrapping_add(peer.process.id.pid);
    line.wrapping_add(pids as usize)
}

/// How far the peer's locator is from its address `ip`, if the locator begins with an address ([`OtherLocator`]). Otherwise it is a large number that says nothing.
fn distance(to: Locator, ip: IpAddr) -> u32 {
    let Locator::Other(other) = to else {
        return 0;
    };
    let ip = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let there = other.bytes().first_chunk::<16>();
    there.map_or(u128::BITS, |there| network_distance((*there).into(), ip))
}

/// Every (local, remote) pair to try; the first one leads to the address that the application had connected to. `own`: the
/// addresses of this host.
fn tcp_paths(flow: &FlowRecord, host: &[u8; 16], own: &[IpAddr]) -> Vec<Path> {
    let Some(peer) = &flow.peer else {
        return Vec::new();
    };
    let first = flow.ends.remote().ip();
    let loopback = first.is_loopback();
    let usable =
        |ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast() && ip.is_loopback() == loopback;
    let mut paths = vec![(None, first)];
    // If both hosts have the same address, such as that of a container bridge, it leads to ourselves.
    let elsewhere = |ip: &IpAddr| peer.process.id.host == *host || !own.contains(ip);
    for ip in peer
        .process
        .addrs
        .iter()
        .copied()
        .filter(usable)
        .filter(elsewhere)
    {
        if !paths.iter().any(|(_, known)| *known == ip) {
            paths.push((None, ip));
        }
    }
    // The kernel chooses the local address by its routes; with another one, packets may leave by another interface.
    // The kernel may not choose the address of the flow's own connection, so that is tried, too.
    if !loopback {
        let local = flow.ends.local().ip();
        let others = own
            .iter()
            .copied()
            .filter(usable)
            .filter(|ip| *ip != local && ip.is_ipv4() == first.is_ipv4());
        let own_end = own.contains(&local).then_some(local);
        paths.extend(
            own_end
                .into_iter()
                .chain(others)
                .map(|ip| (Some(ip), first)),
        );
    }
    let port = peer.process.resume_port;
    let remote = |ip| match ip {
        ip if ip == first => at_port(flow.ends.remote(), port),
        ip => SocketAddr::new(ip, port),
    };
    paths
        .into_iter()
        .map(|(local, ip)| Path {
            local,
            to: remote(ip).into(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHER: TransportKind = TransportKind::TEST;

    fn tcp(n: u8) -> Path {
        Path::to(SocketAddr::from(([10, 0, 0, n], 700)))
    }

    fn other(n: u8) -> Path {
        Path::to(OtherLocator::new(OTHER, &[n]).unwrap())
    }

    fn order(paths: &Paths, n: u32) -> Vec<Path> {
        let path = |turn| paths.choose(n, turn, RelayTurns::Late);
        (0..8).filter_map(path).collect()
    }

    #[test]
    fn every_window_starts_elsewhere_and_comes_back_to_the_first_path() {
        let of = |paths: Vec<Path>| Paths {
            home: paths.first().copied(),
            by_kind: Vec::from([paths]),
            relay: None,
        };
        let paths = of(vec![tcp(0), tcp(1), tcp(2)]);
        assert_eq!(order(&paths, 0), [0, 0, 1, 0, 2, 0, 0, 0].map(tcp));
        assert_eq!(order(&paths, 1), [1, 0, 2, 0, 0, 0, 1, 0].map(tcp));
        assert_eq!(order(&paths, 2), [2, 0, 0, 0, 1, 0, 2, 0].map(tcp));
        assert_eq!(
            of(vec![tcp(5)]).choose(5, 4, RelayTurns::Late),
            Some(tcp(5))
        );
        let none = Paths {
            home: None,
            by_kind: Vec::new(),
            relay: None,
        };
        assert_eq!(
            none.choose(5, 4, RelayTurns::Late),
            None,
            "no division by a number of paths of zero"
        );
    }

    #[test]
    fn kinds_take_turns_however_many_paths_there_are() {
        let of_tcp = vec![tcp(0), tcp(1), tcp(2)];
        let (home, other) = (tcp(0), other(1));
        let paths = Paths {
            by_kind: vec![vec![other], of_tcp.clone()],
            home: Some(home),
            relay: None,
        };
        let first = [other, home, tcp(0), home, other, home, tcp(1), home];
        assert_eq!(order(&paths, 0), first);
        let second = [tcp(0), home, other, home, tcp(1), home, other, home];
        assert_eq!(order(&paths, 1), second);
        let behind = Paths {
            by_kind: vec![of_tcp, vec![other]],
            home: Some(home),
            relay: None,
        };
        let first = [tcp(0), home, other, home, tcp(1), home, other, home];
        assert_eq!(order(&behind, 0), first);
    }

    #[test]
    fn bad_locators_come_last() {
        let home = tcp(0);
        let first = |bad: &[Path]| {
            let mut paths = Paths {
                by_kind: vec![vec![other(1), other(2)], vec![home]],
                home: Some(home),
                relay: None,
            };
            paths.put_back(|to| bad.iter().any(|path| path.to == to));
            [0, 2, 4, 6].map(|turn| paths.choose(0, turn, RelayTurns::Late).unwrap())
        };
        assert_eq!(first(&[]), [other(1), home, other(2), home]);
        assert_eq!(first(&[other(1)]), [other(2), home, other(1), home]);
        let both = [other(1), other(2)];
        assert_eq!(first(&both), [home, other(1), home, other(2)]);
    }

    #[test]
    fn the_relay_comes_last_unless_the_flow_is_relayed() {
        let relay = Path::to(OtherLocator::new(TransportKind::RELAY, &[1]).unwrap());
        let paths = Paths {
            by_kind: vec![vec![tcp(0), tcp(1)]],
            home: Some(tcp(0)),
            relay: Some(relay),
        };
        let of = |n, turns| [0, 1, 2, 3, 4].map(|turn| paths.choose(n, turn, turns).unwrap());
        let home = tcp(0);
        assert_eq!(of(0, RelayTurns::Late), [home, home, tcp(1), home, home]);
        assert_eq!(of(0, RelayTurns::Third), [home, home, relay, home, home]);
        assert_eq!(of(0, RelayTurns::First), [relay, home, tcp(1), home, relay]);
        for turns in [RelayTurns::Late, RelayTurns::Third, RelayTurns::First] {
            assert_eq!(of(1, turns), [relay, home, home, home, relay]);
        }
        assert!(
            !paths.has_others(),
            "an answer of the peer's host by UDP counts for all paths but the relay"
        );
    }

    #[test]
    fn paths_between_two_addresses_are_tcp_paths_only() {
        let bound = Path {
            local: Some([10, 0, 0, 9].into()),
            ..tcp(1)
        };
        let paths = Paths {
            by_kind: vec![vec![other(1)], vec![tcp(1), bound]],
            home: Some(tcp(1)),
            relay: None,
        };
        let ip = |n: u8| IpAddr::from([10, 0, 0, n]);
        assert_eq!(paths.between(None, ip(1)), Some(tcp(1)));
        assert_eq!(paths.between(Some(ip(9)), ip(1)), Some(bound));
        assert_eq!(paths.between(None, ip(2)), None);
    }
}
