//! Flows: the handle that the program holds.

mod calls;
mod carried;
mod control;
mod core;
mod ending;
mod introducing;
mod member;
mod posting;
mod posts;
mod transport;
mod wait;

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use slim_core::Role;
use slim_stream::Carrier;
use slim_sys::OwnFd;

use self::core::FlowCore;
use self::introducing::Introducing;
use crate::blob::DoorKey;
use crate::door::Admitted;
use crate::error::{ConnectError, NotOpened, TransferError};
use crate::event::{FlowDelivery, FlowStats, StreamState};
use crate::hub::{Hub, next_id};
use crate::socket;

pub(crate) use self::wait::Until;

/// One byte stream between two processes, in both directions.
///
/// Its methods may be called from any thread. The order of concurrent sends, and of concurrent receives, is undefined.
/// Dropping a flow [closes](Self::close) it.
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
        let core = FlowCore::create(hub, fd, Role::Connector, to)?;
        if stands {
            core.look_at_connecting();
        }
        Ok(Self { core })
    }

    /// Makes a flow of an accepted connection.
    pub(crate) fn accepted(
        hub: &Arc<Hub>,
        fd: OwnFd,
        remote: SocketAddr,
    ) -> Result<Self, NotOpened> {
        let core = FlowCore::create(hub, fd, Role::Acceptor, remote)?;
        core.begin(None);
        Ok(Self { core })
    }

    /// Begins to connect to the door of an endpoint, at the first of these addresses that works, with the key from its blob.
    pub(crate) fn connect_by_name(
        hub: &Arc<Hub>,
        doors: Vec<SocketAddr>,
        key: DoorKey,
    ) -> Result<Self, ConnectError> {
        if hub.is_closed() {
            return Err(ConnectError::Closed);
        }
        let introducing = Introducing::new(&hub.agent, doors, key);
        let mut introducing = introducing.map_err(ConnectError::Kernel)?;
        let id = next_id();
        let first = introducing.next_connection(hub, id, libc::EDESTADDRREQ);
        let (door, fd) = first.map_err(ConnectError::Kernel)?;
        let core = FlowCore::create_introducing(hub, id, fd, door, introducing)?;
        core.look_at_connecting();
        Ok(Self { core })
    }

    /// Makes a flow of a connection that the door has admitted.
    pub(crate) fn introduced(hub: &Arc<Hub>, admitted: Admitted) -> Result<Self, NotOpened> {
        // The connection may have ended already. Then the connector has no flow either.
        let ends = socket::ends(&admitted.fd);
        let (_, remote) = ends.ok_or(NotOpened::Kernel(libc::ECONNABORTED))?;
        let core = FlowCore::create(hub, admitted.fd, Role::Acceptor, remote)?;
        core.begin(Some((admitted.agreed, &admitted.last)));
        Ok(Self { core })
    }

    /// The flow's number. Numbers of flows and endpoints are unique in the process and are never reused.
    pub fn id(&self) -> u64 {
        self.core.id()
    }

    /// The flow's state.
    pub fn state(&self) -> StreamState {
        self.core.state()
    }

    /// Counters.
    pub fn stats(&self) -> FlowStats {
        self.core.counters()
    }

    /// This end of the first connection; `None` before that is established.
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

    /// Whether the flow is carried by a transport of another kind than TCP. A data call that moves nothing makes no system call then, so it is cheaper to try
    /// than to ask the session.
    pub fn is_carried(&self) -> bool {
        self.core.is_carried()
    }

    /// The transport of another kind than TCP that carries the flow now. For programs that know that kind, and use it beside the flow. What they send or
    /// receive by its data calls would be missing in the flow.
    pub fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        let carried = self.core.carried()?;
        Some(carried.carrier.clone())
    }

    /// Limits the bytes that the kernel takes and has not sent to the network yet (`TCP_NOTSENT_LOWAT`); the limit holds for later
    /// connections of the flow, too. With a low limit a program that spreads bytes over several flows learns early which of them is fast.
    pub fn limit_unsent(&self, bytes: u32) {
        self.core.limit_unsent(bytes);
    }

    /// What the kernel knows of the delivery on the present connection; `None` while the flow is suspended or has ended.
    pub fn delivery(&self) -> Option<FlowDelivery> {
        self.core.delivery()
    }

    /// Tells the session that the connection seems to be stuck. The session tries to replace it, over another path first. The flow
    /// goes on with the present connection until it has a new one, so a wrong suspicion costs one connection and no pause.
    pub fn suspect(&self) {
        self.core.suspect();
    }

    /// Sends the bytes that the kernel takes at once, and returns their number. If these are not all,
    /// [`Update::writable`](crate::Update::writable) tells when there is room again.
    ///
    /// # Errors
    /// [`TransferError::WouldBlock`] if the kernel takes none, with the same update.
    pub fn try_send(&self, data: &[u8]) -> Result<usize, TransferError> {
        self.core.send(&[IoSlice::new(data)])
    }

    /// Like [`try_send`](Self::try_send), with several pieces. The kernel takes at most 1024 pieces.
    ///
    /// # Errors
    /// Those of [`try_send`](Self::try_send).
    pub fn try_send_vectored(&self, data: &[IoSlice<'_>]) -> Result<usize, TransferError> {
        self.core.send(data)
    }

    /// Receives the bytes that are available, and returns their number: 0 at the end of the peer's stream, or if `into` is empty.
    ///
    /// # Errors
    /// [`TransferError::WouldBlock`] if none are available; [`Update::readable`](crate::Update::readable) tells when to try again.
    pub fn try_recv(&self, into: &mut [u8]) -> Result<usize, TransferError> {
        self.core.recv(&mut [IoSliceMut::new(into)])
    }

    /// Like [`try_recv`](Self::try_recv), into several pieces. The kernel takes at most 1024 pieces.
    ///
    /// # Errors
    /// Those of [`try_recv`](Self::try_recv).
    pub fn try_recv_vectored(&self, into: &mut [IoSliceMut<'_>]) -> Result<usize, TransferError> {
        self.core.recv(into)
    }

    /// Posts a buffer: sends it after all earlier sends and posts, and keeps the buffer itself, not a copy, until the peer's kernel has
    /// acknowledged all of it. Never waits; the program must limit the amount of posted bytes. Returns the number of the post, counted
    /// from 1 for each flow.
    ///
    /// [`Session::progress`](crate::Session::progress) sends the bytes that the kernel does not take at once. Until the kernel has taken
    /// all posts, [`try_send`](Self::try_send) returns [`TransferError::WouldBlock`]. Buffers of less than a kilobyte may be copied. The
    /// thread that drops the buffer, and the exact time, are unspecified. The owner of a buffer (`Bytes::from_owner`) must not call
    /// the library when it is dropped.
    ///
    /// # Errors
    /// [`TransferError::Lost`], [`TransferError::ShutDown`], [`TransferError::Closed`]; the buffer is dropped.
    pub fn post(&self, buffer: Bytes) -> Result<u64, TransferError> {
        self.core.post(buffer)
    }

    /// The number of completed posts: those that the peer's kernel has acknowledged. Posts are completed in order.
    /// [`Update::completed`](crate::Update::completed) tells when the number has grown. Pending posts of a flow that fails are never
    /// completed.
    pub fn completed(&self) -> u64 {
        self.core.posted().1
    }

    /// Ends this direction: the peer receives all sent bytes, then the end of the stream. This end can still receive.
    ///
    /// # Errors
    /// [`TransferError::WouldBlock`] before the first connection is established; [`TransferError::Closed`].
    pub fn finish(&self) -> Result<(), TransferError> {
        let finished = self.core.finish();
        // Tells the peer at once, also without an agent thread.
        self.core.agent().attend();
        finished
    }

    /// Closes the flow. The agent still delivers the sent bytes, even if the connection breaks, for at most
    /// [`Config::linger`](crate::Config::linger). Posts that the kernel has not taken yet are still sent by
    /// [`Session::progress`](crate::Session::progress) and [`Session::close`](crate::Session::close). As with `close(2)`, the flow is
    /// [reset](Self::reset) if there are bytes that this end has not received.
    pub fn close(self) {
        drop(self);
    }

    /// Closes the flow and discards undelivered bytes: the peer gets `ECONNRESET`.
    pub fn reset(self) {
        if !self.core.hub.is_parents() {
            self.core.close(true);
            self.core.agent().attend();
        }
    }
}

impl Drop for SessionFlow {
    fn drop(&mut self) {
        if self.core.hub.is_parents() {
            return mem::forget(self.core.clone());
        }
        self.core.close(false);
        self.core.agent().attend();
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
