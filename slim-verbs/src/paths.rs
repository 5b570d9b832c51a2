//! Which of a host's ports a question goes out by: which paths to the ports of peers have failed, which port is in the peer's network, and which is used least.
//!
//! A port may have a link, and a path from it be dead all the same: a cable between two switches is enough. Nothing but attempts that fail shows that. So
//! each port keeps in mind when they have failed, and questions go out by a port whose path to the peer has not.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use slim_core::transport::OtherLocator;

/// So long after a failure another port is preferred.
const COUNTS: Duration = Duration::from_secs(60);

/// The path from a port to a peer's port.
#[derive(Debug, Default)]
pub(crate) struct PairPath(Mutex<LastOutcome>);

/// What the path has done last.
#[derive(Clone, Copy, Debug, Default)]
enum LastOutcome {
    #[default]
    Unknown,
    Failed(Instant),
    Worked(Instant),
}

impl PairPath {
    fn set(&self, outcome: LastOutcome) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = outcome;
    }

    fn last(&self) -> LastOutcome {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No queue pair has come of a question, or the attempts of an adapter are used up.
    pub(crate) fn fails(&self) {
        self.set(LastOutcome::Failed(Instant::now()));
    }

    /// An answer has come.
    pub(crate) fn works(&self) {
        self.set(LastOutcome::Worked(Instant::now()));
    }

    /// When it failed last, if that counts still and it has not worked since.
    fn failed_at(&self, now: Instant) -> Option<Instant> {
        match self.last() {
            LastOutcome::Failed(at) if now.saturating_duration_since(at) < COUNTS => Some(at),
            _ => None,
        }
    }

    fn worked_at(&self) -> Option<Instant> {
        match self.last() {
            LastOutcome::Worked(at) => Some(at),
            _ => None,
        }
    }
}

/// The paths from a port.
#[derive(Debug, Default)]
pub(crate) struct PortPaths(BTreeMap<OtherLocator, Arc<PairPath>>);

impl PortPaths {
    /// The path to this locator. Those of which nothing is known and that nobody uses are forgotten.
    pub(crate) fn to(&mut self, locator: &OtherLocator) -> Arc<PairPath> {
        if let Some(path) = self.0.get(locator) {
            return path.clone();
        }
        let now = Instant::now();
        self.0
            .retain(|_, path| Arc::strong_count(path) > 1 || path.failed_at(now).is_some());
        self.0.entry(*locator).or_default().clone()
    }

    /// What speaks against a question to this locator; the port with the least is the best.
    pub(crate) fn doubts(&self, locator: &OtherLocator, now: Instant) -> PathDoubts {
        let path = self.0.get(locator);
        let worked = self.0.values().filter_map(|path| path.worked_at()).max();
        let failed = self.0.values().filter_map(|path| path.failed_at(now)).max();
        PathDoubts {
            path: path.and_then(|path| path.failed_at(now)),
            port: failed.filter(|at| worked.is_none_or(|worked| worked < *at)),
        }
    }
}

/// Failures that count still. None is better than an old one, and an old one better than a new one: the paths take turns if all fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PathDoubts {
    /// Of the path.
    path: Option<Instant>,
    /// Of the port's paths: all of them end in the same cable. If one has worked since, the peer has failed, and not the cable.
    port: Option<Instant>,
}

/// What speaks against a port for a question to a locator, the strongest reason first. The port with the least is the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PortChoice {
    pub(crate) doubts: PathDoubts,
    /// How far it is from the peer's port ([`network_distance`](slim_core::network_distance)).
    pub(crate) distance: u32,
    /// Queue pairs that there are at the port, and that it asks for.
    pub(crate) pairs: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use slim_core::network_distance;
    use slim_core::transport::TransportKind;

    #[test]
    fn failures_count_until_the_path_works_and_for_a_while() {
        let locator = |n| OtherLocator::new(TransportKind::VERBS, &[n]).unwrap();
        let mut paths = PortPaths::default();
        let now = Instant::now();
        let doubts = |paths: &PortPaths, n, after| paths.doubts(&locator(n), now + after);
        let none = doubts(&paths, 1, Duration::ZERO);
        paths.to(&locator(1)).fails();
        let used = paths.to(&locator(2));
        let (of_path, of_port) = (
            doubts(&paths, 1, Duration::ZERO),
            doubts(&paths, 2, Duration::ZERO),
        );
        assert!(none < of_port && of_port < of_path);
        assert_eq!(doubts(&paths, 1, 2 * COUNTS), none);
        used.fails();
        assert!(doubts(&paths, 2, Duration::ZERO) >= of_path);
        paths.to(&locator(2)).works();
        assert_eq!(doubts(&paths, 2, Duration::ZERO), none);
        paths.to(&locator(1)).works();
        assert_eq!(doubts(&paths, 1, Duration::ZERO), none);
        drop(used);
        let _ = paths.to(&locator(3));
        assert_eq!(paths.0.len(), 1);
    }

    #[test]
    fn the_port_in_the_peers_network_is_the_nearest() {
        let ip = |text: &str| match text.parse().unwrap() {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(ip) => ip.octets(),
        };
        let nearest = |to: &str, own: &[&'static str]| {
            let best = own
                .iter()
                .min_by_key(|own| network_distance(ip(own).into(), ip(to).into()));
            *best.unwrap()
        };
        for (to, own, first) in [
            ("10.1.1.7", &["10.1.0.1", "10.1.1.1"][..], "10.1.1.1"),
            ("10.1.0.7", &["10.1.0.1", "10.1.1.1"], "10.1.0.1"),
            (
                "fd00:0:0:2::7",
                &["fd00:0:0:1::1", "fd00:0:0:2::1"],
                "fd00:0:0:2::1",
            ),
            // The rest of such an address says nothing.
            ("fd00::7", &["fd00::1", "fd00::6"], "fd00::1"),
            ("10.1.0.7", &["fe80::1", "192.168.0.1"], "192.168.0.1"),
        ] {
            assert_eq!(nearest(to, own), first, "{to}");
        }
    }

    #[test]
    fn ports_of_one_network_are_equally_near() {
        let ip = |n: u8| {
            std::net::Ipv4Addr::new(10, 1, 0, n)
                .to_ipv6_mapped()
                .octets()
        };
        for peer in 3..200 {
            assert_eq!(
                network_distance(ip(1).into(), ip(peer).into()),
                network_distance(ip(2).into(), ip(peer).into()),
                "{peer}"
            );
        }
    }

    /// A process that is dead says nothing about the cable by which others answer.
    #[test]
    fn a_dead_peer_does_not_make_a_port_bad_by_which_another_answers() {
        let locator = |n| OtherLocator::new(TransportKind::VERBS, &[n]).unwrap();
        let mut near = PortPaths::default();
        let (dead, lives) = (near.to(&locator(1)), near.to(&locator(2)));
        dead.fails();
        std::thread::sleep(Duration::from_millis(2));
        lives.works();
        let now = Instant::now();
        let (near, far) = (
            near.doubts(&locator(3), now),
            PortPaths::default().doubts(&locator(3), now),
        );
        assert!(near <= far, "{near:?} {far:?}");
    }

    #[test]
    fn a_path_that_works_is_better_than_a_near_one_and_a_near_port_than_an_idle_one() {
        let now = Instant::now();
        let choice = |path: Option<Instant>, distance, pairs| PortChoice {
            doubts: PathDoubts { path, port: path },
            distance,
            pairs,
        };
        let best_first = [
            choice(None, 8, 0),
            choice(None, 8, 9),
            choice(None, 64, 0),
            choice(Some(now), 8, 0),
        ];
        assert!(best_first.is_sorted());
    }
}
