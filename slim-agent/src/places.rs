//! Where peers reach this process: at each address in use, a control socket and a listener for resumes, all on the same two
//! ports.
//!
//! An address is in use when a flow has it. Peers may come back by any other path, too, so as soon as one flow is not over
//! loopback all addresses that are announced to its peer are in use. What is bound to none of them does not exist for the
//! network: a process whose connections are all on this host cannot be found from another one.
//!
//! A port must be free at addresses that are not in use yet. So ports are drawn that nobody has at any address, and held at
//! the loopback addresses, where every process has sockets: no two of them have the same ports. Should a program take one
//! at another address meanwhile, there is no way to us by that address.

use std::io;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;

use slim_core::wire::MAX_ADDRS;
use socket2::{Domain, SockRef, Socket, Type};

use crate::address_watch::Addresses;
use crate::control;
use crate::driver::Driver;
use crate::fds::OwnFd;
use crate::ports::{on_one_port, quiet_ports};
use crate::resume_listener;
use crate::shared::Shared;
use crate::sys;

/// How often ports are drawn.
const TRIES: usize = 16;

/// The ports of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    /// UDP.
    pub(crate) control: u16,
    /// TCP.
    pub(crate) resume: u16,
}

/// The sockets at one address before the runtime has them.
pub(crate) struct Place {
    /// With port 0.
    pub(crate) at: SocketAddr,
    pub(crate) control: OwnFd,
    /// Without it peers resume at another address, or by themselves.
    pub(crate) resume: Option<OwnFd>,
}

impl Place {
    /// # Errors
    /// The address is not ours, or somebody has the control port there.
    pub(crate) fn open(at: SocketAddr, ports: Ports, maps: bool) -> io::Result<Place> {
        let with = |port| {
            let mut addr = at;
            addr.set_port(port);
            addr
        };
        Ok(Place {
            at,
            control: control::bind_alone(with(ports.control))?,
            resume: match maps && at.is_ipv4() {
                true => resume_listener::listen(with(ports.resume), true).ok(),
                false => None,
            }
            .or_else(|| resume_listener::listen(with(ports.resume), false).ok()),
        })
    }
}

/// Draws ports, and opens the places on loopback, as far as the host has them.
pub(crate) fn take() -> io::Result<(Ports, Vec<Place>)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for _ in 0..TRIES {
        let ports = Ports {
            control: on_one_port(quiet_ports(), control::bind_alone)?.1,
            resume: on_one_port(iter::empty(), resume_listener::bind)?.1,
        };
        match on_loopback(ports) {
            Ok(places) => return Ok((ports, places)),
            // Since it was drawn.
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

fn on_loopback(ports: Ports) -> io::Result<Vec<Place>> {
    let loopback = [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::from(Ipv6Addr::LOCALHOST),
    ];
    let mut places = Vec::new();
    for ip in loopback {
        match Place::open(SocketAddr::new(ip, 0), ports, false) {
            Ok(place) if place.resume.is_none() => return Err(io::ErrorKind::AddrInUse.into()),
            Ok(place) => places.push(place),
            Err(e) if is_none_of_ours(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(places)
}

fn is_none_of_ours(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT)
    )
}

impl Driver {
    /// A flow has this address; false if peers cannot come there. They would take the process for dead, since its host
    /// refuses what they ask.
    pub(crate) fn serve_at(&mut self, local: SocketAddr, shared: &Rc<Shared>) -> bool {
        let was_networked = self.control.is_networked();
        let served = self.control.serve_at(local, shared);
        if !was_networked && self.control.is_networked() {
            self.serve_announced(shared);
        }
        served
    }

    /// Peers on other hosts may come to any address that they are told, and are told no other.
    fn serve_announced(&mut self, shared: &Rc<Shared>) {
        let (mut announced, networks) = self.addresses.clone();
        announced.truncate(MAX_ADDRS);
        announced.retain(|ip| self.control.serve_at(SocketAddr::new(*ip, 0), shared));
        let others = self.addresses.0.iter().skip(MAX_ADDRS);
        announced.extend(others);
        self.endpoint.set_addrs(announced, networks);
    }

    /// These are our addresses now.
    pub(crate) fn set_addresses(&mut self, addresses: Addresses, shared: &Rc<Shared>) {
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
                self.serve_announced(shared);
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

/// Where the kernel would send from. Nothing is sent.
pub(crate) fn source_towards(to: SocketAddr) -> io::Result<SocketAddr> {
    let kind = Type::DGRAM.cloexec();
    let fd = OwnFd::make(|| Socket::new_raw(Domain::for_address(to), kind, None))?;
    SockRef::from(&fd).connect(&to.into())?;
    sys::local_addr(fd.raw())
}

/// Whether two addresses are the same but for their ports. Field by field: a comparison of the whole may look at bytes that the
/// variant does not have, which tools that watch memory report.
pub(crate) fn is_same_host(a: SocketAddr, b: SocketAddr) -> bool {
    match (a, b) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => a.ip() == b.ip(),
        (SocketAddr::V6(a), SocketAddr::V6(b)) => a.ip() == b.ip() && a.scope_id() == b.scope_id(),
        _ => false,
    }
}

/// The address alone.
pub(crate) fn without_port(mut addr: SocketAddr) -> SocketAddr {
    addr.set_port(0);
    addr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_processes_never_have_the_same_ports() {
        let (first, held) = take().unwrap();
        for _ in 0..50 {
            let (other, _held) = take().unwrap();
            assert_ne!(other.control, first.control);
            assert_ne!(other.resume, first.resume);
        }
        assert!(!held.is_empty());
        let again = Place::open(held[0].at, first, false);
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }
}
