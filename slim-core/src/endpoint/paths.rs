//! Between which addresses new connections are tried.

use std::net::{IpAddr, SocketAddr};

use super::outage::Path;
use super::record::Flow;
use crate::addr::at_port;

/// Every (local, remote) pair to try, the one the application used first. `own` are the addresses
/// of this host.
pub(super) fn paths(flow: &Flow, host: &[u8; 16], own: &[IpAddr]) -> Vec<Path> {
    let Some(peer) = &flow.peer else {
        return Vec::new();
    };
    let first = flow.ends.remote().ip();
    let loopback = first.is_loopback();
    let usable =
        |ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast() && ip.is_loopback() == loopback;
    let mut paths = vec![(None, first)];
    // An address that both hosts have, such as that of a bridge for containers, leads to ourselves.
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
    // The kernel chooses the local address by its routes; another one may lead out of another port.
    // The one of the flow's own connection may not be its choice.
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
        .map(|(local, ip)| (local, remote(ip)))
        .collect()
}

/// Which path connection `turn` of window `n` takes.
pub(super) fn choose(n: u32, turn: u32, paths: usize) -> usize {
    if turn % 2 == 1 {
        return 0;
    }
    (n as usize + turn as usize / 2) % paths.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_window_starts_elsewhere_and_comes_back_to_the_first_path() {
        let order = |n| (0..6).map(|turn| choose(n, turn, 3)).collect::<Vec<_>>();
        assert_eq!(order(0), [0, 0, 1, 0, 2, 0]);
        assert_eq!(order(1), [1, 0, 2, 0, 0, 0]);
        assert_eq!(order(2), [2, 0, 0, 0, 1, 0]);
        assert_eq!(choose(5, 4, 1), 0);
        assert_eq!(choose(5, 4, 0), 0, "no path is no reason to divide by it");
    }
}
