//! How a front end receives a transport.

use std::any::Any;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use slim_sys::OwnFd;

use crate::kernel::sys;

/// A flow's transport, handed over to its front end.
///
/// Most kinds have a descriptor, and a front end that can use a connected stream socket needs to know no more of them.
/// Any other kind agrees with the front ends that take it on a type: they downcast the box to that type. The box costs
/// one allocation per resume.
pub enum Transport {
    /// A connected stream socket that does not block.
    Descriptor(OwnFd),
    /// The same, connected to the witness of the job, which passes the bytes on: what the kernel reports as acknowledged, the peer need not have.
    Relayed(OwnFd),
    /// The transport of a kind without descriptors.
    Other(Box<dyn Any + Send>),
}

/// A transport that the agent still owns.
#[derive(Clone, Copy)]
pub enum TransportRef<'a> {
    /// A stream socket that does not block, connected or about to be.
    Descriptor(BorrowedFd<'a>),
    /// As [`Transport::Relayed`].
    Relayed(BorrowedFd<'a>),
    /// The transport of a kind without descriptors.
    Other(&'a dyn Any),
}

impl Transport {
    /// The local and the remote address of a direct connection.
    pub(crate) fn ends(&self) -> Option<(SocketAddr, SocketAddr)> {
        let Self::Descriptor(fd) = self else {
            return None;
        };
        let ends =
            sys::local_addr(fd.raw()).and_then(|local| Ok((local, sys::peer_addr(fd.raw())?)));
        ends.ok()
    }

    /// For front ends that take only direct connections with a descriptor, and have refused everything else by
    /// [`TransportRef::descriptor`].
    pub fn into_descriptor(self) -> Option<OwnFd> {
        match self {
            Self::Descriptor(fd) => Some(fd),
            Self::Relayed(_) | Self::Other(_) => None,
        }
    }

    /// For front ends that take relayed connections, too, and have refused everything else by [`TransportRef::socket`]: the socket, and
    /// whether it is relayed.
    pub fn into_socket(self) -> Option<(OwnFd, bool)> {
        match self {
            Self::Descriptor(fd) => Some((fd, false)),
            Self::Relayed(fd) => Some((fd, true)),
            Self::Other(_) => None,
        }
    }
}

impl<'a> TransportRef<'a> {
    /// For front ends that take only direct connections with a descriptor.
    ///
    /// # Errors
    /// The transport is of another kind. This error refuses it, and the operation on it fails.
    pub fn descriptor(self) -> io::Result<BorrowedFd<'a>> {
        match self {
            Self::Descriptor(fd) => Ok(fd),
            Self::Relayed(_) | Self::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// For front ends that take relayed connections, too.
    ///
    /// # Errors
    /// As [`descriptor`](Self::descriptor).
    pub fn socket(self) -> io::Result<BorrowedFd<'a>> {
        match self {
            Self::Descriptor(fd) | Self::Relayed(fd) => Ok(fd),
            Self::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor(fd) => f.debug_tuple("Descriptor").field(fd).finish(),
            Self::Relayed(fd) => f.debug_tuple("Relayed").field(fd).finish(),
            Self::Other(_) => f.write_str("Other"),
        }
    }
}
