//! The addresses where peers can reach this process, and its locators of other kinds of transport.

use std::mem;
use std::net::{IpAddr, SocketAddr};

use slim_core::Time;
use slim_core::transport::OtherLocator;
use slim_core::wire::MAX_ADDRS;

use super::Driver;
use crate::host::addresses::Addresses;

impl Driver {
    /// A flow has this address. False if peers cannot reach this process there: they would take it for dead, because
    /// its host refuses their questions.
    pub(crate) fn serve_at(&mut self, local: SocketAddr) -> bool {
        let was_networked = self.control.is_networked();
        let served = self.control.serve_at(local, &mut self.tasks);
        if !was_networked && self.control.is_networked() {
            self.serve_announced();
        }
        served
    }

    /// Peers on other hosts may use any address that is announced to them. So all announced addresses are served, and
    /// one that cannot be served is not announced.
    fn serve_announced(&mut self) {
        let (all, networks) = self.addresses.clone();
        let (control, tasks) = (&mut self.control, &mut self.tasks);
        let serve = |ip| control.serve_at(SocketAddr::new(ip, 0), tasks);
        let served = served_first(all, serve);
        self.endpoint.set_addrs(self.now(), served, networks);
    }

    /// The own addresses have been read again.
    pub(crate) fn set_addresses(&mut self, addresses: Addresses) {
        if self.addresses != addresses {
            self.log
                .info(|| format!("own addresses are now {:?}", addresses.0));
            let before = mem::replace(&mut self.addresses, addresses.clone());
            self.endpoint
                .set_addrs(self.now(), addresses.0, addresses.1);
            let (endpoint, announced) = (&self.endpoint, &self.addresses.0);
            if self.control.is_networked() {
                let has =
                    |ip: IpAddr| announced.contains(&ip) || endpoint.has_flow_at(|at| at == ip);
                self.control.leave(has);
                self.serve_announced();
            }
            let now = self.now();
            let gone = before.0.into_iter();
            for ip in gone
                .filter(|ip| !self.addresses.0.contains(ip))
                .collect::<Vec<_>>()
            {
                self.endpoint.address_gone(now, ip);
            }
        }
    }

    /// The `nth` listener has another locator, or none: its port went down, or came up.
    pub(crate) fn set_locator(&mut self, now: Time, nth: usize, locator: Option<OtherLocator>) {
        if let Some(known) = self.locators.get_mut(nth) {
            *known = locator;
        }
        let all: Vec<_> = self.locators.iter().flatten().copied().collect();
        self.log.debug(|| format!("own locators are now {all:?}"));
        self.endpoint.set_locators(now, all);
    }

    /// Called when no record is left that a peer may ask about. Stops serving addresses for other hosts if no flow
    /// needs them.
    pub(crate) fn leave_unused(&mut self) {
        let elsewhere = |ip: IpAddr| !ip.is_loopback();
        if self.control.is_networked() && !self.endpoint.has_flow_at(elsewhere) {
            self.control.leave(|_| false);
        }
    }
}

/// The own addresses, without those that cannot be served. The first [`MAX_ADDRS`], which are announced, are served.
fn served_first(all: Vec<IpAddr>, mut serve: impl FnMut(IpAddr) -> bool) -> Vec<IpAddr> {
    let mut rest = all.into_iter();
    let mut addrs = Vec::new();
    while addrs.len() < MAX_ADDRS
        && let Some(ip) = rest.next()
    {
        if serve(ip) {
            addrs.push(ip);
        }
    }
    addrs.extend(rest);
    addrs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn only_served_addresses_are_announced_however_many_there_are() {
        let ip = |n| IpAddr::V4(Ipv4Addr::new(10, 0, 0, n));
        let all: Vec<_> = (1..=MAX_ADDRS as u8 + 3).map(ip).collect();
        let mut tried = Vec::new();
        let addrs = served_first(all.clone(), |at| {
            tried.push(at);
            at != ip(2)
        });
        assert_eq!(tried, all[..=MAX_ADDRS]);
        let served: Vec<_> = all.into_iter().filter(|at| *at != ip(2)).collect();
        assert_eq!(addrs, served);
        assert_eq!(served_first(vec![ip(1), ip(2)], |at| at == ip(2)), [ip(2)]);
    }
}
