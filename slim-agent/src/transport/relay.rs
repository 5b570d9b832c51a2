//! TCP connections through the witness of the job (`docs/PROTOCOL.md`, section "The witness"): for two processes that both reach the witness,
//! but not each other.
//!
//! The witness passes the bytes on. Its kernel acknowledges bytes that may never reach the peer, so front ends keep everything that they send on
//! such a transport until a resume tells what the peer has ([`Transport::Relayed`]).

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use slim_core::auth::{JobKey, seal_with_job};
use slim_core::config::Config;
use slim_core::transport::{Locator, OtherLocator, TransportKind};
use slim_core::wire::{AddrList, Message, Relay};

use super::tcp::{Shown, TcpConnection, TcpListener, connect, socket};
use super::{Connection, Listener, Provider, Wanted};
use crate::FlowIo;
use crate::events::Log;
use crate::handover::Transport;
use crate::host::addresses;
use crate::kernel::sys;

/// Most addresses in a locator: they must fit into it.
const MAX_PLACES: usize = 3;

/// Makes connections through the witness.
pub(crate) struct Relays {
    key: JobKey,
    /// All of one address family: IPv4 if the witness has both.
    witness: Vec<SocketAddr>,
    /// Which address of the witness comes next. One at which it was reached is used again.
    next: Arc<AtomicUsize>,
    log: Log,
}

impl Relays {
    /// `None` if the process has no witness, or must not use it as a relay.
    pub(crate) fn of(config: &Config) -> Option<Self> {
        let key = config.job_key.clone()?;
        let v4 = config.witness.iter().any(SocketAddr::is_ipv4);
        let all = config.witness.iter().copied();
        let witness: Vec<_> = all.filter(|addr| addr.is_ipv4() == v4).collect();
        (config.relay && !witness.is_empty()).then(|| Relays {
            key,
            witness,
            next: Arc::default(),
            log: Log::new(config.log),
        })
    }
}

impl Provider for Relays {
    fn kind(&self) -> TransportKind {
        TransportKind::RELAY
    }

    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let Locator::Other(to) = wanted.path.to else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let relay = places(&to).ok_or(io::ErrorKind::InvalidInput)?;
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        let witness = self.witness[at % self.witness.len()];
        let fd = connect(&wanted, witness, Shown::Relayed)?;
        Ok(Box::new(RelayConnection {
            tcp: TcpConnection::new(fd, false)?,
            asks: Cell::new(Some(Asks {
                request: seal_with_job(Some(&self.key), &Message::Relay(relay)),
                next: self.next.clone(),
                at,
            })),
        }))
    }

    fn listeners(&self) -> io::Result<Vec<Box<dyn Listener>>> {
        match RelayListener::new(&self.witness, self.log) {
            Ok(listener) => Ok(vec![Box::new(listener)]),
            // Others cannot reach this process through the witness; everything else works.
            Err(e) => {
                self.log
                    .warn(|| format!("no listener for connections through the witness: {e}"));
                Ok(Vec::new())
            }
        }
    }
}

/// The bytes of a locator: the port, and up to [`MAX_PLACES`] addresses, as IPv6 addresses.
fn locator(port: u16, addrs: impl Iterator<Item = IpAddr>) -> Option<OtherLocator> {
    let mut bytes = port.to_be_bytes().to_vec();
    for ip in addrs.take(MAX_PLACES) {
        let ip = match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes.extend(ip.octets());
    }
    OtherLocator::new(TransportKind::RELAY, &bytes)
}

/// What a locator says; `None` if it is none of this kind.
fn places(locator: &OtherLocator) -> Option<Relay> {
    let (port, ips) = locator.bytes().split_first_chunk()?;
    let (ips, rest) = ips.as_chunks::<16>();
    let ips = ips.iter().map(|ip| Ipv6Addr::from(*ip).to_canonical());
    let right = rest.is_empty() && (1..=MAX_PLACES).contains(&ips.len());
    right.then(|| Relay {
        port: u16::from_be_bytes(*port),
        addrs: AddrList::new(ips),
    })
}

/// The listener for connections from the witness.
struct RelayListener {
    tcp: TcpListener,
    at: SocketAddr,
    /// Only the witness may connect.
    witness: Vec<IpAddr>,
    log: Log,
}

impl RelayListener {
    fn new(witness: &[SocketAddr], log: Log) -> io::Result<Self> {
        let witness: Vec<IpAddr> = witness.iter().map(SocketAddr::ip).collect();
        let at = match witness.iter().all(IpAddr::is_ipv4) {
            true => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            false => Ipv6Addr::UNSPECIFIED.into(),
        };
        let fd = socket::listen(SocketAddr::new(at, 0), false)?;
        let at = sys::local_addr(fd.raw())?;
        let tcp = TcpListener::new(Rc::new(fd))?;
        Ok(RelayListener {
            tcp,
            at,
            witness,
            log,
        })
    }
}

impl Listener for RelayListener {
    fn locator(&self) -> Option<OtherLocator> {
        let all = addresses::now(self.log).0.into_iter();
        locator(
            self.at.port(),
            all.filter(|ip| ip.is_ipv4() == self.at.is_ipv4()),
        )
    }

    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)> {
        let (tcp, from) = self.tcp.accept_tcp()?;
        let known = self.witness.contains(&from.ip());
        let from = known.then(|| locator(from.port(), [from.ip()].into_iter()));
        let aborted = io::Error::from_raw_os_error(libc::ECONNABORTED);
        let from = from.flatten().ok_or(aborted)?;
        let asks = Cell::new(None);
        Ok((Box::new(RelayConnection { tcp, asks }), from.into()))
    }

    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_acceptable(context)
    }
}

/// A connection through the witness.
struct RelayConnection {
    tcp: TcpConnection,
    /// What this end tells the witness first, if it has made the connection.
    asks: Cell<Option<Asks>>,
}

struct Asks {
    request: Vec<u8>,
    next: Arc<AtomicUsize>,
    at: usize,
}

impl Connection for RelayConnection {
    fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.tcp.poll_connected(context))?;
        if let Some(asks) = self.asks.take() {
            asks.next.store(asks.at, Ordering::Relaxed);
            // The first bytes of a connection always fit.
            if self.tcp.send(&asks.request)? != asks.request.len() {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
        }
        Poll::Ready(Ok(()))
    }

    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.tcp.recv(buf)
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        self.tcp.send(data)
    }

    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_readable(context)
    }

    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.tcp.poll_writable(context)
    }

    fn expect_nothing(&self) {
        self.tcp.expect_nothing();
    }

    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()> {
        self.tcp.prepare_as(flow, Shown::Relayed)
    }

    fn shut_write(&self) {
        self.tcp.shut_write();
    }

    fn flush(&self) {
        self.tcp.flush();
    }

    fn into_transport(self: Box<Self>) -> Transport {
        Transport::Relayed(self.tcp.into_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locator_is_read_back_and_others_are_refused() {
        let ips: Vec<IpAddr> = ["192.0.2.1", "2001:db8::1", "192.0.2.2", "192.0.2.3"]
            .map(|ip| ip.parse().unwrap())
            .to_vec();
        let made = locator(4711, ips.iter().copied()).unwrap();
        let read = places(&made).unwrap();
        assert_eq!(read.port, 4711);
        assert_eq!(read.addrs, AddrList::new(ips[..MAX_PLACES].iter().copied()));
        let of = |bytes: &[u8]| OtherLocator::new(TransportKind::RELAY, bytes).unwrap();
        for wrong in [&[1][..], &[1, 2], &[0; 17], &[0; 19], &[0; 64]] {
            assert_eq!(places(&of(wrong)), None, "{wrong:?}");
        }
    }
}
