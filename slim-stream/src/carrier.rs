//! A transport that is no socket, as a front end uses it: a queue pair, or a pipe in memory.

use std::any::Any;
use std::io::{IoSlice, IoSliceMut};

use slim_core::memory::OutOfMemory;
use slim_sys::{Errno, OwnFd};

use crate::answers::{Delivery, Probe};
use crate::control::DrainError;
use crate::receive_half::ReceiveHalf;
use crate::stream::Stream;

/// The present transport of a flow, if it is no socket. Its calls never wait, and several threads may make them at once.
///
/// Bytes arrive in order and once, or not at all. What has arrived is acknowledged by software of the other end, never by a kernel or an adapter:
/// [`suspend`](Self::suspend) ends that, and makes the number of received bytes final.
///
/// Dropping it closes it, and no kernel delivers the rest, as it does for a socket. So the carrier of a closed flow is dropped once all is acknowledged.
/// Only a flow that the agent no longer protects loses its last bytes, which is an error at the other end.
pub trait Carrier: Any + Send + Sync {
    /// Sends the bytes that it takes at once, and returns their number. Of a long send it may take a part although there [is room](Self::has_room) for
    /// more.
    ///
    /// # Errors
    /// `EAGAIN` if it takes none; `EPIPE` after [`end`](Self::end); any other error means that it is broken. The program is shown the number if it is
    /// one of a socket.
    fn send(&self, data: &[IoSlice<'_>]) -> Result<usize, Errno>;

    /// Receives the bytes that have arrived; 0 at the end of the other direction, or if there is no room. Bytes that arrived before it broke
    /// or was suspended come first.
    ///
    /// # Errors
    /// `EAGAIN` if there are none, also after [`suspend`](Self::suspend). Any other error means that it is broken, and no bytes are left.
    fn recv(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, Errno>;

    /// Number of bytes that [`recv`](Self::recv) can return now.
    fn unread(&self) -> u64;

    /// Whether [`send`](Self::send) takes bytes now. If not, the descriptor becomes readable when it does, as after a send that failed.
    fn has_room(&self) -> bool;

    /// Number of bytes sent that the other end is not known to have. Bytes that were lost when it broke are among them.
    fn unacked(&self) -> u64;

    /// It is broken or suspended, and cannot be used again.
    fn is_over(&self) -> bool;

    /// Ends our direction: the other end finds the end of the stream behind the bytes that were sent. May be called again.
    fn end(&self);

    /// Takes nothing more from the other end, and sends nothing more, for good. May be called again.
    fn suspend(&self);

    /// A descriptor for poll and epoll. It becomes readable when it is worth to try again what failed with `EAGAIN` (or a send that took only a part),
    /// when the other direction has ended, when it breaks, and when it is suspended. It may become readable for no reason. What happens while it is
    /// readable need not be told apart: nobody relies on a second event before [`reset`](Self::reset).
    fn descriptor(&self) -> &OwnFd;

    /// Makes the descriptor unreadable until something happens again. What has happened before this call returns must be looked for after it.
    fn reset(&self);
}

/// What a connection shows a front end as its kind (`TransportRef::Other`) if it will become an `Arc<dyn Carrier>`.
pub struct IsCarrier;

impl Stream {
    /// [`Stream::unacked`] for a carrier.
    pub fn unacked_by(&self, carrier: &dyn Carrier) -> u64 {
        match self.is_barred() {
            true => u64::MAX,
            false => carrier.unacked(),
        }
    }

    /// [`Stream::drain`] for a carrier, which is suspended for that.
    ///
    /// # Errors
    /// The flow must escalate: there is no memory for received bytes.
    pub fn drain_carrier(
        &self,
        half: &mut ReceiveHalf,
        carrier: &dyn Carrier,
    ) -> Result<(), DrainError> {
        carrier.suspend();
        if half.is_drained() {
            return Ok(());
        }
        half.set_drained();
        half.set_over();
        Ok(self.read_carrier(half, carrier)?)
    }

    fn read_carrier(
        &self,
        half: &mut ReceiveHalf,
        carrier: &dyn Carrier,
    ) -> Result<(), OutOfMemory> {
        let mut buf = [0; 4096];
        while let Ok(n @ 1..) = carrier.recv(&mut [IoSliceMut::new(&mut buf)]) {
            self.stash(half, &buf[..n])?;
        }
        Ok(())
    }

    /// [`Stream::install`] for a carrier.
    pub fn install_carrier(&self, half: &mut ReceiveHalf, carrier: &dyn Carrier) {
        self.set_relayed(false);
        if self.local_final().is_some() {
            carrier.end();
        }
        // There is no kernel that counts, too.
        half.carry(None);
    }

    /// [`Stream::probe`] for a carrier.
    pub fn probe_carrier(&self, carrier: &dyn Carrier) -> Probe {
        self.probe_by(|| carrier.unacked(), || carrier.is_over())
    }

    /// [`Stream::delivery`] for a carrier. Bytes of the peer that nobody reads do not end it: the peer is told by a message that the flow
    /// is closed.
    pub fn delivery_by(&self, carrier: &dyn Carrier) -> Delivery {
        let unacked = carrier.unacked();
        if unacked == 0 {
            return Delivery::Done;
        }
        let believed = (!self.is_barred()).then_some(unacked);
        let owed = self.try_with_half(|half| half.undelivered(believed));
        match carrier.is_over() {
            true => Delivery::Broken(owed.unwrap_or_default()),
            false => Delivery::Undelivered(owed.unwrap_or_default()),
        }
    }
}
