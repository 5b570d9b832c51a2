//! Both addresses of a connection, in few bytes: every flow has them, and nearly all are IPv4.

use std::net::{SocketAddr, SocketAddrV4};

/// The local and the remote address of a connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Ends(EndsState);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum EndsState {
    V4(SocketAddrV4, SocketAddrV4),
    Other(Box<(SocketAddr, SocketAddr)>),
}

impl Ends {
    pub(super) fn new(local: SocketAddr, remote: SocketAddr) -> Self {
        Ends(match (local, remote) {
            (SocketAddr::V4(local), SocketAddr::V4(remote)) => EndsState::V4(local, remote),
            other => EndsState::Other(Box::new(other)),
        })
    }

    pub(super) fn both(&self) -> (SocketAddr, SocketAddr) {
        match &self.0 {
            EndsState::V4(local, remote) => ((*local).into(), (*remote).into()),
            EndsState::Other(both) => **both,
        }
    }

    pub(super) fn local(&self) -> SocketAddr {
        self.both().0
    }

    pub(super) fn remote(&self) -> SocketAddr {
        self.both().1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_addresses_are_returned_unchanged() {
        let v4 = ["10.0.0.1:80", "10.0.0.2:5000"];
        let v6 = ["[fd00::1]:80", "[fe80::1%3]:5000"];
        for text in [v4, v6, [v4[0], v6[1]]] {
            let [local, remote] = text.map(|text| text.parse().unwrap());
            let ends = Ends::new(local, remote);
            assert_eq!(ends.both(), (local, remote));
            assert_eq!((ends.local(), ends.remote()), (local, remote));
        }
        assert_eq!(size_of::<Ends>(), 16);
    }
}
