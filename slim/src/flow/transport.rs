//! The present transport of a flow: a socket, or a carrier of another kind.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use slim_stream::{Carrier, Delivery, Stream};
use slim_sys::{Errno, OwnFd};

use crate::error::TransferError;
use crate::hub::Hub;
use crate::socket;

/// The number in the place of a socket's while the transport is a carrier.
pub(super) const CARRIED: RawFd = -2;

/// A transport. Waiting threads share it, so that its descriptor number is not reused while they poll it.
#[derive(Clone)]
pub(super) enum FlowTransport {
    Socket(Arc<OwnFd>),
    Carrier(Arc<Carried>),
}

/// A carrier as the transport of a flow.
pub(super) struct Carried {
    pub(super) carrier: Arc<dyn Carrier>,
    /// A thread leads. The descriptor is reset, and the stream is woken after that, under this lock: a thread that finds the signal unchanged has
    /// looked at the carrier after the last reset.
    pub(super) leads: Mutex<bool>,
}

impl Carried {
    pub(super) fn new(carrier: Arc<dyn Carrier>) -> Self {
        Self {
            carrier,
            leads: Mutex::new(false),
        }
    }
}

/// What data calls inside the stream use. It is valid only there.
pub(super) enum DataPath {
    Socket(RawFd),
    Carrier(Arc<Carried>),
    /// The flow was closed meanwhile.
    Gone,
}

impl FlowTransport {
    /// The socket, if it is one.
    pub(super) fn socket(&self) -> Option<&Arc<OwnFd>> {
        match self {
            Self::Socket(sock) => Some(sock),
            Self::Carrier(_) => None,
        }
    }

    /// The descriptor that poll sets watch.
    pub(super) fn descriptor(&self) -> &OwnFd {
        match self {
            Self::Socket(sock) => sock,
            Self::Carrier(carried) => carried.carrier.descriptor(),
        }
    }

    pub(super) fn watch(&self, hub: &Hub, id: u64) -> Result<(), Errno> {
        match self {
            Self::Socket(sock) => hub.watch_flow(sock, id),
            Self::Carrier(_) => hub.watch_carrier(self.descriptor(), id),
        }
    }

    /// Bytes that can be received now.
    pub(super) fn unread(&self) -> u64 {
        match self {
            Self::Socket(sock) => slim_sys::readable(sock.raw()),
            Self::Carrier(carried) => carried.carrier.unread(),
        }
    }

    /// Ends our direction.
    pub(super) fn end(&self) {
        match self {
            Self::Socket(sock) => slim_sys::shutdown(sock.raw(), libc::SHUT_WR),
            Self::Carrier(carried) => carried.carrier.end(),
        }
    }

    /// The state of delivery for a flow that the program has closed.
    pub(super) fn delivery(&self, stream: &Stream) -> Delivery {
        match self {
            Self::Socket(sock) => stream.delivery(sock.raw()),
            Self::Carrier(carried) => stream.delivery_by(&*carried.carrier),
        }
    }

    /// It cannot be used any more.
    pub(super) fn is_over(&self) -> bool {
        match self {
            Self::Socket(sock) => {
                slim_sys::tcp_state(sock.raw()).is_none_or(|state| state == slim_sys::TCP_CLOSE)
            }
            Self::Carrier(carried) => carried.carrier.is_over(),
        }
    }
}

impl DataPath {
    pub(super) fn send(&self, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        match self {
            Self::Socket(fd) => socket::send(*fd, data).map_err(refused),
            Self::Carrier(carried) => carried.carrier.send(data).map_err(broken),
            Self::Gone => Err(TransferError::WouldBlock),
        }
    }

    pub(super) fn recv(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, TransferError> {
        match self {
            Self::Socket(fd) => socket::recv(*fd, into).map_err(refused),
            Self::Carrier(carried) => carried.carrier.recv(into).map_err(broken),
            Self::Gone => Err(TransferError::WouldBlock),
        }
    }

    /// Bytes of the stream that the peer is not known to have.
    pub(super) fn unacked(&self, stream: &Stream) -> u64 {
        match self {
            Self::Socket(fd) => stream.unacked(*fd),
            Self::Carrier(carried) => stream.unacked_by(&*carried.carrier),
            Self::Gone => u64::MAX,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Socket(fd) => slim_sys::ready(*fd, libc::POLLOUT) != 0,
            Self::Carrier(carried) => carried.carrier.has_room(),
            Self::Gone => false,
        }
    }
}

/// The result of a data call for an error of the kernel.
fn refused(errno: Errno) -> TransferError {
    match errno {
        libc::EAGAIN => TransferError::WouldBlock,
        errno if socket::is_end(errno) => TransferError::Lost(errno),
        errno => TransferError::Kernel(errno),
    }
}

/// The result of a data call for an error of a carrier. All but one mean that it is broken. Programs know only the numbers of sockets.
fn broken(errno: Errno) -> TransferError {
    match errno {
        libc::EAGAIN => TransferError::WouldBlock,
        errno if socket::is_end(errno) => TransferError::Lost(errno),
        _ => TransferError::Lost(libc::ECONNRESET),
    }
}

impl AsRawFd for FlowTransport {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor().raw()
    }
}
