//! What a front end gets of a transport.

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

use slim_sys::OwnFd;

/// A flow's transport, handed over to its front end.
///
/// Most kinds have a descriptor, and a front end that knows what to do with a connected stream socket needs to know no more of
/// them. What another kind hands over is between that kind and the front ends that take it: they look for its type in the
/// box, which is one allocation in a resume.
pub enum Transport {
    /// A connected stream socket that does not block.
    Descriptor(OwnFd),
    /// Something else.
    Other(Box<dyn Any + Send>),
}

/// The same while the agent still has it.
#[derive(Clone, Copy)]
pub enum TransportRef<'a> {
    /// A stream socket that does not block, connected or about to be.
    Descriptor(BorrowedFd<'a>),
    /// Something else.
    Other(&'a dyn Any),
}

impl Transport {
    /// For front ends that take nothing but descriptors, and have said so by [`TransportRef::descriptor`].
    pub fn into_descriptor(self) -> Option<OwnFd> {
        match self {
            Self::Descriptor(fd) => Some(fd),
            Self::Other(_) => None,
        }
    }
}

impl<'a> TransportRef<'a> {
    /// For front ends that take nothing but descriptors.
    ///
    /// # Errors
    /// The transport has none. It is refused by that, and what was to be done with it fails.
    pub fn descriptor(self) -> io::Result<BorrowedFd<'a>> {
        match self {
            Self::Descriptor(fd) => Ok(fd),
            Self::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor(fd) => f.debug_tuple("Descriptor").field(fd).finish(),
            Self::Other(_) => f.write_str("Other"),
        }
    }
}
