//! The ports of the agent's own sockets.

use std::io;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;

use crate::kernel::sys;
use slim_sys::{OwnFd, proc};

/// Most draws of a port that must be free for both address families.
const TRIES: usize = 16;
/// A range with fewer ports than this is too crowded.
const ENOUGH: u16 = 1000;

/// Sockets bound to one port, with what each is bound to.
pub(crate) type BoundSockets = (Vec<(OwnFd, SocketAddr)>, u16);

/// Binds with `bind` to a port that is free in both families, or in IPv4 alone if the host has no IPv6. Tries `ports`,
/// then ports that the kernel chooses.
///
/// # Errors
/// That of the last attempt.
pub(crate) fn on_one_port(
    ports: impl Iterator<Item = u16>,
    bind: impl Fn(SocketAddr) -> io::Result<OwnFd>,
) -> io::Result<BoundSockets> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for port in ports.chain(iter::repeat_n(0, TRIES)) {
        let v4 = match bind((Ipv4Addr::UNSPECIFIED, port).into()) {
            Ok(fd) => fd,
            Err(e) => {
                last = e;
                continue;
            }
        };
        let port = sys::local_addr(v4.raw())?.port();
        let v4 = (v4, (Ipv4Addr::UNSPECIFIED, port).into());
        let v6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        match bind(v6) {
            Ok(fd) => return Ok((vec![v4, (fd, v6)], port)),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => last = e,
            Err(_) => return Ok((vec![v4], port)),
        }
    }
    Err(last)
}

/// Binds with `bind` to `at` on a [quiet port](quiet_ports), or on one that the kernel chooses if all those are taken.
///
/// # Errors
/// That of the last attempt.
pub(crate) fn on_quiet_port<T>(
    at: IpAddr,
    bind: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    on_one_of(quiet_ports(), at, bind)
}

fn on_one_of<T>(
    ports: impl Iterator<Item = u16>,
    at: IpAddr,
    mut bind: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for port in ports.chain(iter::once(0)) {
        match bind(SocketAddr::new(at, port)) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => last = e,
            bound => return bound,
        }
    }
    Err(last)
}

/// UDP ports that no TCP listener gets by chance, in random order. A listener on a port chosen by the kernel needs the
/// UDP port of the same number. If our own sockets were in the range that the kernel chooses from, the processes of a
/// large job would take these ports from each other.
pub(crate) fn quiet_ports() -> impl Iterator<Item = u16> {
    let text = proc::read(format_args!("sys/net/ipv4/ip_local_port_range"));
    let range = text.and_then(|text| parse(str::from_utf8(&text).ok()?));
    let quiet = range.and_then(outside);
    iter::repeat_with(move || draw(quiet.clone()?))
        .map_while(|port| port)
        .take(TRIES)
}

fn parse(text: &str) -> Option<RangeInclusive<u16>> {
    let mut numbers = text.split_whitespace().map(str::parse);
    Some(numbers.next()?.ok()?..=numbers.next()?.ok()?)
}

/// The ports above the kernel's range; those below are full of well-known services and come second.
fn outside(range: RangeInclusive<u16>) -> Option<RangeInclusive<u16>> {
    let above = range.end().saturating_add(1)..=u16::MAX;
    let below = 20_000..=range.start().saturating_sub(1);
    [above, below]
        .into_iter()
        .find(|r| r.end().saturating_sub(*r.start()) >= ENOUGH)
}

fn draw(range: RangeInclusive<u16>) -> Option<u16> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).ok()?;
    let count = u32::from(range.end() - range.start()) + 1;
    let n = u32::from_ne_bytes(random) % count;
    range.start().checked_add(u16::try_from(n).ok()?)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn quiet_ports_lie_outside_the_kernels_range() {
        assert_eq!(parse("32768\t60999\n"), Some(32768..=60999));
        assert_eq!(outside(32768..=60999), Some(61000..=65535));
        assert_eq!(outside(32768..=65535), Some(20000..=32767));
        assert_eq!(outside(1024..=65000), None);
        assert_eq!(outside(1024..=65535), None);
        for range in [61000..=65535, 7..=7, 0..=65535] {
            for _ in 0..100 {
                assert!(range.contains(&draw(range.clone()).unwrap()));
            }
        }
    }

    #[test]
    fn a_quiet_port_is_bound_or_the_kernel_chooses() {
        let at = Ipv4Addr::LOCALHOST.into();
        let taken = |all: &'static [u16]| {
            move |addr: SocketAddr| match all.contains(&addr.port()) {
                true => Err(io::ErrorKind::AddrInUse.into()),
                false => Ok(addr),
            }
        };
        let bind = |all| on_one_of([1, 2].into_iter(), at, taken(all)).map(|addr| addr.port());
        assert_eq!(bind(&[]).unwrap(), 1);
        assert_eq!(bind(&[1]).unwrap(), 2);
        assert_eq!(bind(&[1, 2]).unwrap(), 0);
        let none = bind(&[0, 1, 2]).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::AddrInUse);
        // An error of the address would be the same on every port.
        let refused = |addr: SocketAddr| -> io::Result<()> {
            assert_eq!(addr.port(), 1);
            Err(io::ErrorKind::AddrNotAvailable.into())
        };
        let refused = on_one_of([1, 2].into_iter(), at, refused).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrNotAvailable);
    }

    #[test]
    fn a_port_that_is_taken_is_skipped() {
        let tried = Cell::new(0);
        let bind = |addr: SocketAddr| {
            tried.set(tried.get() + 1);
            match addr {
                SocketAddr::V4(a) if (1..=3).contains(&a.port()) => {
                    Err(io::ErrorKind::AddrInUse.into())
                }
                SocketAddr::V4(_) => OwnFd::make(|| UdpSocket::bind(addr)),
                // A host without IPv6.
                SocketAddr::V6(_) => Err(io::ErrorKind::Unsupported.into()),
            }
        };
        let (sockets, port) = on_one_port([1, 2, 3].into_iter(), bind).unwrap();
        assert!(port > 3);
        assert_eq!((sockets.len(), tried.get()), (1, 5));
    }
}
