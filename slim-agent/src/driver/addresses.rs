//! At which addresses peers can come to us.

use std::net::{IpAddr, SocketAddr};

use slim_core::wire::MAX_ADDRS;

use super::Driver;
use crate::host::addresses::Addresses;

impl Driver {
    /// A flow has this address; false if peers cannot come there. They would take the process for dead, since its host
    /// refuses what they ask.
    pub(crate) fn serve_at(&mut self, local: SocketAddr) -> bool {
        let was_networked = self.control.is_networked();
        let served = self.control.serve_at(local, &mut self.tasks);
        if !was_networked && self.control.is_networked() {
            self.serve_announced();
        }
        served
    }

    /// Peers on other hosts may come to any address that they are told, and are told no other.
    fn serve_announced(&mut self) {
        let (mut announced, networks) = self.addresses.clone();
        announced.truncate(MAX_ADDRS);
        let (control, tasks) = (&mut self.control, &mut self.tasks);
        announced.retain(|ip| control.serve_at(SocketAddr::new(*ip, 0), tasks));
        let others = self.addresses.0.iter().skip(MAX_ADDRS);
        announced.extend(others);
        self.endpoint.set_addrs(announced, networks);
    }

    /// These are our addresses now.
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

    /// No flow is left that peers on other hosts could come for, nor anything that they could ask about.
    pub(crate) fn leave_unused(&mut self) {
        let elsewhere = |ip: IpAddr| !ip.is_loopback();
        if self.control.is_networked() && !self.endpoint.has_flow_at(elsewhere) {
            self.control.leave(|_| false);
        }
    }
}
