//! TCP as a kind of transport.

pub(crate) mod socket;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use slim_core::canonical;
use slim_core::transport::{Locator, OtherLocator, Path, TransportKind};
use slim_sys::reserve::{self, For};
use slim_sys::{AckWait, OwnFd, fds};
use socket2::{Domain, SockRef, Socket};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Connection, Listener, Provider, Wanted};
use crate::FlowIo;
use crate::handover::{Transport, TransportRef};
use crate::kernel::readiness;
use crate::kernel::sys;
use socket::{mapped, new_stream, set_nodelay, stream_kind};

/// Descriptors that connecting leaves for accepting. The peer may be as short of descriptors as we are: if all were
/// spent on connecting, both would wait to be accepted for ever.
const FOR_ACCEPTING: usize = 8;

/// Most bytes of a segment that every path carries: RFC 9293, section 3.7.1 (a packet of 576 bytes), and for IPv6 a packet of 1280 bytes
/// (RFC 8200, section 5).
const SMALL: libc::c_int = 536;
const SMALL_V6: libc::c_int = 1220;

/// As what a front end sees a socket.
#[derive(Clone, Copy)]
pub(crate) enum Shown {
    Direct,
    Relayed,
}

impl Shown {
    fn of(self, fd: BorrowedFd<'_>) -> TransportRef<'_> {
        match self {
            Self::Direct => TransportRef::Descriptor(fd),
            Self::Relayed => TransportRef::Relayed(fd),
        }
    }
}

/// Makes TCP connections.
pub(crate) struct Tcp;

impl Provider for Tcp {
    fn kind(&self) -> TransportKind {
        TransportKind::TCP
    }

    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let remote = wanted.path.to.tcp().ok_or(io::ErrorKind::InvalidInput)?;
        let fd = connect(&wanted, remote, Shown::Direct)?;
        Ok(Box::new(TcpConnection::new(fd, false)?))
    }
}

/// Begins to connect to `remote`, for the path that is wanted.
pub(crate) fn connect(wanted: &Wanted<'_>, remote: SocketAddr, shown: Shown) -> io::Result<OwnFd> {
    let Path { local, .. } = wanted.path;
    let maps = remote.is_ipv4() && wanted.flow.is_some_and(FlowIo::maps_v4);
    let domain = match maps {
        true => Domain::IPV6,
        false => Domain::for_address(remote),
    };
    let fd = stream_for_flow(domain, wanted.scarce)?;
    if maps {
        SockRef::from(&fd).set_only_v6(false)?;
    }
    let as_socket = |addr| {
        if sys::is_v6(fd.raw()) {
            mapped(addr)
        } else {
            addr
        }
    };
    if let Some(flow) = wanted.flow {
        flow.before_connect(shown.of(fd.as_fd()))?;
    }
    let socket = SockRef::from(&fd);
    if let Some(local) = local {
        // The port is chosen at connect, so that one port can serve several destinations.
        let no_port = libc::IP_BIND_ADDRESS_NO_PORT;
        sys::set_option(fd.raw(), libc::IPPROTO_IP, no_port, 1)?;
        socket.bind(&as_socket(SocketAddr::new(local, 0)).into())?;
    }
    if wanted.small_segments {
        let most = match remote {
            SocketAddr::V4(_) => SMALL,
            SocketAddr::V6(_) => SMALL_V6,
        };
        // It holds for both directions: the peer learns it from SYN.
        sys::set_option(fd.raw(), libc::IPPROTO_TCP, libc::TCP_MAXSEG, most)?;
    }
    match socket.connect(&as_socket(remote).into()) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => return Err(e),
        _ => {}
    }
    set_nodelay(&fd)?;
    Ok(fd)
}

/// Makes a socket if that leaves some descriptors for accepting; otherwise uses the reserved descriptor.
fn stream_for_flow(domain: Domain, scarce: bool) -> io::Result<OwnFd> {
    let made = match scarce {
        true => None,
        false => new_stream(domain)
            .map(Some)
            .or_else(|e| match e.raw_os_error() {
                Some(libc::EMFILE) => Ok(None),
                _ => Err(e),
            })?,
    };
    match made.filter(|fd| fds::are_left(fd, FOR_ACCEPTING)) {
        Some(fd) => Ok(fd),
        None => OwnFd::make(|| {
            reserve::in_need(For::Connecting, || {
                Socket::new_raw(domain, stream_kind(), None)
            })
        }),
    }
}

/// A resume listener, watched by the runtime.
pub(crate) struct TcpListener(AsyncFd<Rc<OwnFd>>);

impl TcpListener {
    pub(crate) fn new(listener: Rc<OwnFd>) -> io::Result<Self> {
        readiness::watch(listener, Interest::READABLE).map(TcpListener)
    }
}

impl Listener for TcpListener {
    fn locator(&self) -> Option<OtherLocator> {
        None
    }

    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)> {
        let (connection, from) = self.accept_tcp()?;
        Ok((Box::new(connection), from.into()))
    }

    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_read_ready(context).map_ok(drop)
    }
}

impl TcpListener {
    /// [`Listener::accept`], with the types of TCP.
    pub(crate) fn accept_tcp(&self) -> io::Result<(TcpConnection, SocketAddr)> {
        let listener = self.0.get_ref().raw();
        let accepted = match sys::accept(listener) {
            Err(e) if e.raw_os_error() == Some(libc::EMFILE) => {
                sys::accept_in_need(listener).map_err(|_| e)
            }
            accepted => accepted,
        };
        if accepted.is_err() {
            readiness::forget_ready(&self.0, Interest::READABLE);
        }
        let (fd, from) = accepted?;
        let maps = canonical(from) != from;
        // Only this connection has failed.
        let aborted = |_| io::Error::from_raw_os_error(libc::ECONNABORTED);
        let connection = TcpConnection::new(fd, maps).map_err(aborted)?;
        Ok((connection, canonical(from)))
    }
}

/// A TCP connection.
pub(crate) struct TcpConnection {
    fd: AsyncFd<OwnFd>,
    /// An IPv6 socket with an IPv4 connection. It is converted for flows of IPv4 sockets.
    maps: bool,
}

impl TcpConnection {
    pub(crate) fn new(fd: OwnFd, maps: bool) -> io::Result<Self> {
        let fd = readiness::watch(fd, Interest::READABLE | Interest::WRITABLE)?;
        Ok(TcpConnection { fd, maps })
    }

    /// [`Connection::prepare`].
    pub(crate) fn prepare_as(&self, flow: &dyn FlowIo, shown: Shown) -> io::Result<()> {
        if self.maps && !flow.maps_v4() {
            sys::unmap(self.fd.get_ref().raw());
        }
        flow.prepare(shown.of(self.fd.get_ref().as_fd()))
    }

    /// The socket. The runtime stops watching it before the application gets it.
    pub(crate) fn into_fd(self) -> OwnFd {
        readiness::unwatch(self.fd)
    }

    /// Returns the kernel's answer. After `EAGAIN` it clears the readiness, so that the next wait sleeps.
    fn answered(&self, moved: io::Result<usize>, interest: Interest) -> io::Result<usize> {
        if let Err(e) = &moved
            && e.kind() == io::ErrorKind::WouldBlock
        {
            readiness::forget_ready(&self.fd, interest);
        }
        moved
    }
}

impl Connection for TcpConnection {
    fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ready = ready!(self.fd.poll_write_ready(context))?;
        // An error can be pending only if the write side is closed.
        if !ready.ready().is_write_closed() {
            return Poll::Ready(Ok(()));
        }
        let error = sys::option(self.fd.get_ref().raw(), libc::SOL_SOCKET, libc::SO_ERROR)?;
        Poll::Ready(match error {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        })
    }

    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let received = sys::recv(self.fd.get_ref().raw(), buf);
        self.answered(received, Interest::READABLE)
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        let sent = sys::send(self.fd.get_ref().raw(), data);
        self.answered(sent, Interest::WRITABLE)
    }

    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.fd.poll_read_ready(context).map_ok(drop)
    }

    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.fd.poll_write_ready(context).map_ok(drop)
    }

    fn expect_nothing(&self) {
        readiness::forget_ready(&self.fd, Interest::READABLE);
    }

    fn ack_wait(&self) -> Option<AckWait> {
        slim_sys::ack_wait(self.fd.get_ref().raw())
    }

    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()> {
        self.prepare_as(flow, Shown::Direct)
    }

    fn shut_write(&self) {
        sys::shutdown_write(self.fd.get_ref().raw());
    }

    fn flush(&self) {
        // Otherwise the kernel would acknowledge the peer's last message, or the end of its replay, 40 ms later. For
        // that time the peer's kernel would hold back what its application sends next (Nagle's algorithm).
        sys::acknowledge(self.fd.get_ref().raw());
    }

    fn into_transport(self: Box<Self>) -> Transport {
        Transport::Descriptor(self.into_fd())
    }
}
