//! The addresses where peers can reach this process.

use std::net::{IpAddr, SocketAddr};

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
        let (mut announced, networks) = self.addresses.clone();
        announced.truncate(MAX_ADDRS);
        let (control, tasks) = (&mut self.control, &mut self.tasks);
        announced.retain(|ip| control.serve_at(SocketAddr::new(*ip, 0), tasks));
        let others = self.addresses.0.iter().skip(MAX_ADDRS);
        announced.extend(others);
        self.endpoint.set_addrs(announced, networks);
    }

    /// The own addresses have been read again.
    pub(crate) fn set_addresses(&mut self, addresses: Addresses) {
        if self.addresses != addresses {
            self.log
                .info(|| format!("own addresses are now {:?}", addresses.0));
            self.addresses.clone_from(&addresses);
            self.endpoint.set_addrs(addresses.0, addresses.1);
            let (endpoint, announced) = (&self.endpoint, &self.addresses.0);
            if self.control.is_networked() {
                let has =
                    |ip: IpAddr| announced.contains(&ip) || endpoint.has_flow_at(|at| at == ip);
                self.control.leave(has);
                self.serve_announced();
            }
        }
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
