//! Where peers reach this process: at each address in use there is a control socket and a resume listener, all on the
//! same two ports.
//!
//! An address is in use when a flow has it. Peers may also resume by any other path. So as soon as one flow is not over
//! loopback, all addresses that are announced to its peer are in use. Nothing is bound at other addresses: a process
//! whose connections are all on this host cannot be found from another host.
//!
//! A port must also be free at addresses that are not in use yet. So ports are drawn that are free at every address,
//! and they are held at the loopback addresses, where every process has sockets: no two processes have the same ports.
//! If a program later takes one of the ports at another address, peers cannot reach this process at that address.

use std::io;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, SockRef, Socket, Type};

use crate::control::socket::bind_alone;
use crate::exec::{HandedFd, HandedPlace};
use crate::host::ports::{on_one_port, quiet_ports};
use crate::kernel::sys;
use crate::transport::tcp::socket;
use slim_sys::OwnFd;

/// Most draws of ports.
const TRIES: usize = 16;

/// The ports of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    /// UDP.
    pub(crate) control: u16,
    /// TCP.
    pub(crate) resume: u16,
}

/// The sockets at one address, before the runtime watches them.
pub(crate) struct Place {
    /// With port 0.
    pub(crate) at: SocketAddr,
    pub(crate) control: OwnFd,
    /// Without it, peers resume at another address, or this process connects to them.
    pub(crate) resume: Option<OwnFd>,
}

impl Place {
    /// # Errors
    /// The host does not have the address, or another program has the control port there.
    pub(crate) fn open(at: SocketAddr, ports: Ports, maps: bool) -> io::Result<Place> {
        let resume = with_port(at, ports.resume);
        Ok(Place {
            at,
            control: bind_alone(with_port(at, ports.control))?,
            resume: match maps && at.is_ipv4() {
                true => socket::listen(resume, true).ok(),
                false => None,
            }
            .or_else(|| socket::listen(resume, false).ok()),
        })
    }

    /// The sockets that the program before has left. `None` if one of them is not there; the others are closed then.
    pub(crate) fn handed(place: &HandedPlace) -> Option<Place> {
        let control = place.control.take();
        let resume = place.resume.as_ref().map(HandedFd::take);
        Some(Place {
            at: place.at,
            control: control?,
            resume: match resume {
                Some(fd) => Some(fd?),
                None => None,
            },
        })
    }

    /// Like [`open`](Self::open), but fails without a resume listener, too.
    fn open_both(at: SocketAddr, ports: Ports) -> io::Result<Place> {
        Ok(Place {
            at,
            control: bind_alone(with_port(at, ports.control))?,
            resume: Some(socket::listen(with_port(at, ports.resume), false)?),
        })
    }
}

/// Draws ports, and opens the places at the loopback addresses that the host has.
pub(crate) fn take() -> io::Result<(Ports, Vec<Place>)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for _ in 0..TRIES {
        let ports = Ports {
            control: on_one_port(quiet_ports(), bind_alone)?.1,
            resume: on_one_port(iter::empty(), socket::bind)?.1,
        };
        match on_loopback(ports) {
            Ok(places) => return Ok((ports, places)),
            // The port was taken after it was drawn.
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
        match Place::open_both(SocketAddr::new(ip, 0), ports) {
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

/// The address from which the kernel would send to `to`. Nothing is sent.
pub(crate) fn source_towards(to: SocketAddr) -> io::Result<SocketAddr> {
    let kind = Type::DGRAM.cloexec();
    let fd = OwnFd::make(|| Socket::new_raw(Domain::for_address(to), kind, None))?;
    SockRef::from(&fd).connect(&to.into())?;
    sys::local_addr(fd.raw())
}

/// Whether two addresses are equal apart from their ports. They are compared field by field: comparing whole values may
/// read bytes that the variant does not have, which memory checkers report.
pub(crate) fn is_same_host(a: SocketAddr, b: SocketAddr) -> bool {
    match (a, b) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => a.ip() == b.ip(),
        (SocketAddr::V6(a), SocketAddr::V6(b)) => a.ip() == b.ip() && a.scope_id() == b.scope_id(),
        _ => false,
    }
}

/// The address with port 0.
pub(crate) fn without_port(addr: SocketAddr) -> SocketAddr {
    with_port(addr, 0)
}

fn with_port(mut addr: SocketAddr, port: u16) -> SocketAddr {
    addr.set_port(port);
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
