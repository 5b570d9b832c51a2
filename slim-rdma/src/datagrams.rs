//! What the agreement requires of a queue for unreliable datagrams.
//!
//! It stands beside [`Verbs`](crate::Verbs): a process opens one such queue for each port, and the port reports its completions together with those of
//! queue pairs ([`Verbs::reported`](crate::Verbs::reported)).

use crate::address::QpNumber;
use crate::locator::PortLocator;
use crate::verbs::VerbsError;

/// Most bytes of a datagram. Any path carries them: the smallest packet of verbs has 256.
pub const MAX_DATAGRAM: usize = 128;

/// The sender of a datagram, as the receiving adapter reports it. Its queue key is not in the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DatagramSource {
    /// Number of its queue pair.
    pub number: QpNumber,
    /// Its port in the InfiniBand subnet; 0 for RoCE.
    pub lid: u16,
    /// Global identifier of its port. `None`: the packet has none, which InfiniBand allows within a subnet.
    pub gid: Option<[u8; 16]>,
}

impl DatagramSource {
    /// Whether a datagram from here may come from that queue.
    pub fn may_be(&self, locator: &PortLocator) -> bool {
        self.number == locator.number
            && self.lid == locator.lid
            && self.gid.is_none_or(|gid| gid == locator.gid)
    }
}

/// A datagram that has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedDatagram {
    /// Its sender.
    pub from: DatagramSource,
    /// At most [`MAX_DATAGRAM`].
    pub bytes: Vec<u8>,
}

/// A queue pair for unreliable datagrams. They may be lost, come twice, late, and in any order. Dropping it destroys the queue pair.
pub trait Datagrams {
    /// How others reach it.
    fn locator(&self) -> PortLocator;

    /// Sends one. That it was sent says nothing.
    ///
    /// # Errors
    /// It was not sent: too long, no place in the queue, no way to that address, or the queue is [broken](Self::is_broken).
    fn send(&mut self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError>;

    /// Takes one that has arrived.
    fn receive(&mut self) -> Option<ReceivedDatagram>;

    /// Asks for one report when the next datagram comes: the number of this queue pair. To be followed by a call of [`receive`](Self::receive): one that
    /// has come before causes no report.
    ///
    /// # Errors
    /// The adapter cannot report completions any more.
    fn arm(&mut self) -> Result<(), VerbsError>;

    /// It neither sends nor receives any more, and has to be opened anew, which gives another locator.
    fn is_broken(&self) -> bool;
}

impl<D: Datagrams + ?Sized> Datagrams for Box<D> {
    fn locator(&self) -> PortLocator {
        (**self).locator()
    }

    fn send(&mut self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        (**self).send(to, bytes)
    }

    fn receive(&mut self) -> Option<ReceivedDatagram> {
        (**self).receive()
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        (**self).arm()
    }

    fn is_broken(&self) -> bool {
        (**self).is_broken()
    }
}
