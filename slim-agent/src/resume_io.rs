//! Resume connections: accepting and making them, and the messages on them.
//!
//! Each connection has a task, which owns the descriptor until it is closed or becomes a flow's
//! transport.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;

use slim_core::ConnId;
use slim_core::transport::Path;
use socket2::{Domain, SockRef, Socket};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::select;

use crate::FlowIo;
use crate::link::Link;
use crate::mailbox::{Ended, Receiver};
use crate::order::{Install, Order};
use crate::pump;
use crate::reader::Read;
use crate::readiness;
use crate::resume_socket::{mapped, new_stream, set_nodelay, stream_kind, watch};
use crate::shared::Shared;
use crate::sys;
use slim_sys::reserve::{self, For};
use slim_sys::{OwnFd, fds};

/// Descriptors that connecting leaves for accepting. The peer may be as short of them as we are;
/// were all spent on connecting, both would wait to be accepted for ever.
const FOR_ACCEPTING: usize = 8;

/// Connects, and then converses.
pub(crate) async fn outgoing(
    conn: ConnId,
    io: Option<Arc<dyn FlowIo>>,
    path: Path,
    orders: Receiver<Order>,
    shared: Rc<Shared>,
) {
    // The peer may have come first since this was asked for.
    if orders.is_closed() {
        return;
    }
    let made = connect(io.as_deref(), path, &shared);
    drop(io);
    let connected = match made {
        Ok(fd) => {
            let mut link = Link::new(conn, fd, orders, shared.clone());
            let outcome = link.established().await;
            outcome.map(|still_wanted| still_wanted.then_some(link))
        }
        Err(e) => Err(e),
    };
    match connected {
        Ok(Some(link)) => {
            shared.with(|d, now| {
                if d.has_conn(conn) {
                    d.endpoint.handle_connected(now, conn);
                }
            });
            link.converse().await;
        }
        Ok(None) => {}
        Err(e) => {
            let errno = errno_of(&e);
            shared.with(|d, now| d.conn_lost(now, conn, errno));
        }
    }
}

fn connect(
    io: Option<&dyn FlowIo>,
    Path { local, to }: Path,
    shared: &Shared,
) -> io::Result<AsyncFd<OwnFd>> {
    let Some(remote) = to.tcp() else {
        return Err(io::Error::from_raw_os_error(libc::EPROTONOSUPPORT));
    };
    let maps = remote.is_ipv4() && io.is_some_and(FlowIo::maps_v4);
    let domain = match maps {
        true => Domain::IPV6,
        false => Domain::for_address(remote),
    };
    let fd = stream_for_flow(domain, shared)?;
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
    if let Some(io) = io {
        io.before_connect(fd.as_fd())?;
    }
    let socket = SockRef::from(&fd);
    if let Some(local) = local {
        // The port is chosen at connect, so that one port can serve several destinations.
        let no_port = libc::IP_BIND_ADDRESS_NO_PORT;
        sys::set_option(fd.raw(), libc::IPPROTO_IP, no_port, 1)?;
        socket.bind(&as_socket(SocketAddr::new(local, 0)).into())?;
    }
    match socket.connect(&as_socket(remote).into()) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => return Err(e),
        _ => {}
    }
    set_nodelay(&fd)?;
    watch(fd)
}

/// Leaves some descriptors for accepting, or takes the one in reserve.
fn stream_for_flow(domain: Domain, shared: &Shared) -> io::Result<OwnFd> {
    let made = match shared.is_starved() {
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

fn errno_of(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

/// What follows from an order.
enum Next {
    Go,
    End,
    Install(Install),
}

impl Link {
    /// Waits until the connection is made; false if nobody wants it any more.
    async fn established(&mut self) -> io::Result<bool> {
        select! {
            biased;
            order = self.orders.recv() => match order {
                // There can be no other order before it is made.
                Some(_) => Err(io::ErrorKind::NotConnected.into()),
                None => Ok(false),
            },
            ready = self.fd.writable() => {
                let mut ready = ready?;
                let ended = ready.ready().is_write_closed();
                ready.retain_ready();
                if !ended {
                    return Ok(true);
                }
                match sys::option(self.fd.get_ref().raw(), libc::SOL_SOCKET, libc::SO_ERROR)? {
                    0 => Ok(true),
                    errno => Err(io::Error::from_raw_os_error(errno)),
                }
            }
        }
    }

    /// Exchanges messages until the connection is closed or becomes a transport.
    pub(crate) async fn converse(mut self) {
        loop {
            let next = match self.step() {
                Next::Go => self.wait().await,
                other => other,
            };
            match next {
                Next::Go => {}
                Next::End => break,
                Next::Install(install) => {
                    if self.flushing {
                        self.flushed();
                    }
                    pump::carry(self, install).await;
                    break;
                }
            }
        }
    }

    /// Everything that can be done now: orders before messages, since an order that follows from a
    /// message says what the bytes after it are.
    fn step(&mut self) -> Next {
        loop {
            match self.orders.try_recv() {
                Ok(Some(order)) => match self.obey(order) {
                    Next::Go => continue,
                    other => return other,
                },
                Err(Ended) => return Next::End,
                Ok(None) => {}
            }
            if !self.readable && !self.flushing {
                return Next::Go;
            }
            match self.reader.step(self.fd.get_ref().raw()) {
                Read::Message(message) => {
                    // The next one comes only after our answer to this one.
                    self.wait_for_more();
                    let conn = self.conn;
                    self.shared.with(|d, now| d.message(now, conn, &message));
                }
                Read::Nothing if self.flushing => self.flushed(),
                Read::Nothing => {
                    self.wait_for_more();
                    return Next::Go;
                }
                Read::Lost(errno) => return self.lost(errno),
            }
        }
    }

    fn wait_for_more(&mut self) {
        self.readable = false;
        readiness::forget_ready(&self.fd, Interest::READABLE);
    }

    /// Sleeps until there is an order or something to read.
    async fn wait(&mut self) -> Next {
        let ready = select! {
            biased;
            order = self.orders.recv() => return match order {
                Some(order) => self.obey(order),
                None => Next::End,
            },
            ready = self.fd.readable(), if !self.reader.is_done() => ready,
        };
        match ready {
            Ok(_) => {
                self.readable = true;
                Next::Go
            }
            Err(e) => {
                let errno = errno_of(&e);
                self.lost(errno)
            }
        }
    }

    fn obey(&mut self, order: Order) -> Next {
        match order {
            Order::Send(data) => {
                let sent = sys::send(self.fd.get_ref().raw(), &data);
                // Messages are so short, and so few, that one that does not go out whole is the
                // sign of a connection beyond repair.
                match sent {
                    Ok(n) if n == data.len() => Next::Go,
                    Ok(_) => self.broken(libc::ENOBUFS),
                    Err(e) => self.broken(errno_of(&e)),
                }
            }
            Order::Flush => {
                self.flushing = true;
                Next::Go
            }
            Order::Install(install) => Next::Install(install),
            // For connections that carry a flow.
            Order::Stop | Order::Drain => Next::Go,
        }
    }

    /// Writing failed: what has come is handed in all the same, before the loss.
    fn broken(&mut self, errno: i32) -> Next {
        while let Read::Message(message) = self.reader.step(self.fd.get_ref().raw()) {
            let conn = self.conn;
            self.shared.with(|d, now| d.message(now, conn, &message));
        }
        self.lost(errno)
    }

    fn lost(&mut self, errno: i32) -> Next {
        if self.flushing {
            self.flushed();
        }
        // What followed from that, or from the last message, may be that this connection carries a
        // flow now; then its loss is the flow's.
        while let Ok(Some(order)) = self.orders.try_recv() {
            match order {
                Order::Install(install) => return Next::Install(install),
                Order::Flush => self.flushed(),
                _ => {}
            }
        }
        let conn = self.conn;
        self.shared.with(|d, now| d.conn_lost(now, conn, errno));
        Next::End
    }

    fn flushed(&mut self) {
        self.flushing = false;
        let conn = self.conn;
        self.shared
            .with(|d, now| d.endpoint.handle_flushed(now, conn));
    }
}
