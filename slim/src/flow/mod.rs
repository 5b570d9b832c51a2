//! Flows: the handle that a program has.

mod calls;
mod control;
mod core;
mod ending;
mod introducing;
mod member;
mod posting;
mod posts;
mod wait;

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use slim_core::Role;
use slim_sys::{Errno, OwnFd};

use self::core::FlowCore;
use self::introducing::Introducing;
use crate::blob::DoorKey;
use crate::door::Admitted;
use crate::error::{ConnectError, TransferError};
use crate::event::{FlowStats, StreamState};
use crate::hub::Hub;
use crate::socket;

pub(crate) use self::wait::Until;

/// One byte stream between two processes, in both directions.
///
/// Its methods may be called from any thread. Bytes of sends, and of receives, that are made at the same time come in any order.
/// A flow that is dropped is [closed](Self::close).
pub struct SessionFlow {
    core: Arc<FlowCore>,
}

impl SessionFlow {
    /// Begins to connect.
    pub(crate) fn connect(hub: &Arc<Hub>, to: SocketAddr) -> Result<Self, ConnectError> {
        if hub.is_closed() {
            return Err(ConnectError::Closed);
        }
        let (fd, stands) = socket::connect(to).map_err(ConnectError::Kernel)?;
        let core = FlowCore::create(hub, fd, Role::Connector, to).map_err(ConnectError::Kernel)?;
        if stands {
            core.look_at_connecting();
        }
        Ok(Self { core })
    }

    /// Of a connection that was accepted.
    pub(crate) fn accepted(hub: &Arc<Hub>, fd: OwnFd) -> Result<Self, Errno> {
        // The peer may have gone already.
        let (_, remote) = socket::ends(&fd).ok_or(libc::ECONNABORTED)?;
        let core = FlowCore::create(hub, fd, Role::Acceptor, remote)?;
        core.begin(None);
        Ok(Self { core })
    }

    /// Begins to connect to the door of an endpoint whose blob is known.
    pub(crate) fn connect_by_name(
        hub: &Arc<Hub>,
        door: SocketAddr,
        key: DoorKey,
    ) -> Result<Self, ConnectError> {
        if hub.is_closed() {
            return Err(ConnectError::Closed);
        }
        let introducing = Introducing::new(&hub.agent, key).map_err(ConnectError::Kernel)?;
        let (fd, _) = socket::connect(door).map_err(ConnectError::Kernel)?;
        let core = FlowCore::create(hub, fd, Role::Connector, door);
        let core = core.map_err(ConnectError::Kernel)?;
        core.ctl().introducing = Some(Box::new(introducing));
        core.look_at_connecting();
        Ok(Self { core })
    }

    /// Of a connection at the door.
    pub(crate) fn introduced(hub: &Arc<Hub>, admitted: Admitted) -> Result<Self, Errno> {
        // It may be over already; then the connector has no flow either.
        let (_, remote) = socket::ends(&admitted.fd).ok_or(libc::ECONNABORTED)?;
        let core = FlowCore::create(hub, admitted.fd, Role::Acceptor, remote)?;
        core.begin(Some((admitted.agreed, &admitted.last)));
        Ok(Self { core })
    }

    /// The flow's number: no other flow or endpoint of the process has, or has had it.
    pub fn id(&self) -> u64 {
        self.core.id()
    }

    /// How the flow stands.
    pub fn state(&self) -> StreamState {
        self.core.state()
    }

    /// Counters.
    pub fn stats(&self) -> FlowStats {
        self.core.counters()
    }

    /// This end of the first connection; `None` before it stands.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.core.first_local()
    }

    /// The peer's end of the first connection.
    pub fn remote_addr(&self) -> SocketAddr {
        self.core.remote()
    }

    /// Both ends of the present connection, this one first; `None` while the flow has none.
    pub fn connection(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.core.present_ends()
    }

    /// Sends what the kernel takes at once, and says how many bytes.
    ///
    /// # Errors
    /// [`TransferError::WouldBlock`] if that is nothing; [`Update::writable`](crate::Update::writable) tells when to try again.
    pub fn try_send(&self, data: &[u8]) -> Result<usize, TransferError> {
        self.core.send(&[IoSlice::new(data)])
    }

    /// As [`try_send`](Self::try_send), of several pieces. The kernel takes at most 1024.
    ///
    /// # Errors
    /// Likewise.
    pub fn try_send_vectored(&self, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        self.core.send(data)
    }

    /// Receives what is there, and says how many bytes: 0 at the end of the peer's stream, or if there is no room in `into`.
    ///
    /// # Errors
    /// [`TransferError::WouldBlock`] if nothing is there; [`Update::readable`](crate::Update::readable) tells when to try again.
    pub fn try_recv(&self, into: &mut [u8]) -> Result<usize, TransferError> {
        self.core.recv(&mut [IoSliceMut::new(into)])
    }

    /// As [`try_recv`](Self::try_recv), into several pieces. The kernel takes at most 1024.
    ///
    /// # Errors
    /// Likewise.
    pub fn try_recv_vectored(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, TransferError> {
        self.core.recv(into)
    }

    /// Posts a buffer: it is sent behind everything before it, and kept as it is, not copied, until the peer's kernel has all of
    /// it. Never waits; how much is posted is for the program to bound. The number of the post, counted from 1 for each flow.
    ///
    /// What the kernel does not take at once is sent by [`Session::progress`](crate::Session::progress). Until it has taken
    /// everything, [`try_send`](Self::try_send) would block. Buffers of less than a kilobyte may be copied. When the buffer is
    /// dropped, and by which thread, is not said; should it have an owner of its own (`Bytes::from_owner`), that must not call the library.
    ///
    /// # Errors
    /// [`TransferError::Lost`], [`TransferError::ShutDown`], [`TransferError::Closed`]; the buffer is dropped.
    pub fn post(&self, buffer: Bytes) -> Result<u64, TransferError> {
        self.core.post(buffer)
    }

    /// How many posts the peer's kernel has, in their order. [`Update::completed`](crate::Update::completed) tells when it has
    /// more. The posts of a flow that fails are not completed.
    pub fn completed(&self) -> u64 {
        self.core.posted().1
    }

    /// Ends this direction: the peer receives what was sent, then the end of the stream. This end still receives.
    ///
    /// # Errors
    /// [`TransferError::WouldBlock`] before the first connection stands; [`TransferError::Closed`].
    pub fn finish(&self) -> Result<(), TransferError> {
        self.core.finish()
    }

    /// Closes the flow. What was sent is delivered all the same, by the agent, also if the connection breaks; for how long it
    /// tries is [`Config::linger`](crate::Config::linger). What was posted, and the kernel has not taken yet, is still sent by
    /// [`Session::progress`](crate::Session::progress) and [`Session::close`](crate::Session::close). As with `close(2)`, the flow is [reset](Self::reset) if there are bytes
    /// that have not been received.
    pub fn close(self) {
        drop(self);
    }

    /// Closes the flow, and throws away what is not delivered yet: the peer gets `ECONNRESET`.
    pub fn reset(self) {
        if !self.core.hub.is_parents() {
            self.core.close(true);
        }
    }
}

impl Drop for SessionFlow {
    fn drop(&mut self) {
        if self.core.hub.is_parents() {
            return mem::forget(self.core.clone());
        }
        self.core.close(false);
    }
}

impl fmt::Debug for SessionFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow")
            .field("id", &self.id())
            .field("state", &self.state())
            .field("remote", &self.remote_addr())
            .finish_non_exhaustive()
    }
}
