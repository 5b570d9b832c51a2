//! What a resume requires of a transport of any kind.
//!
//! A [`Provider`] makes the connections of one kind, and has a [`Listener`] for connections from peers. A
//! [`Connection`] first carries the messages of a resume, and then the replay. In the end it becomes a [`Transport`],
//! which the agent gives to the front end ([`FlowIo::install`]) and does not use any more.
//!
//! ```text
//!   Provider::connect ──┐                                       prepare      into_transport
//!                       ├─► Connection ── messages (resume::io) ─► replay (pump) ──► Transport ──► FlowIo::install
//!   Listener::accept ───┘
//! ```
//!
//! Requirements of a kind: bytes arrive in order and once, or not at all. Bytes that arrived before the connection
//! broke can be read afterwards. This end can tell how many of its own bytes the other end has for good; the agent does
//! not ask for that number, but the front end trims by it ([`FlowIo::probe`]).
//!
//! Everything here is called on the agent thread, inside its runtime, and must not block. Dispatch is dynamic: a
//! connection costs one allocation, its messages none, and a live flow uses none of this. After a panic of the agent
//! thread only descriptors are shut: peers on listeners and connections of another kind learn of it when their attempts
//! are over.

#[cfg(test)]
pub(crate) mod kinds;
mod relay;
pub(crate) mod tcp;

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use slim_core::config::Config;
use slim_core::transport::{Locator, OtherLocator, Path, TransportKind};
use slim_sys::AckWait;

use crate::FlowIo;
use crate::handover::Transport;
use relay::Relays;

/// A connection that is to be made.
pub struct Wanted<'a> {
    /// The path, of the provider's kind.
    pub path: Path,
    /// The path may drop long packets: packets are to be so short that every path carries them.
    pub small_segments: bool,
    /// The flow that needs it, if it still exists.
    pub flow: Option<&'a dyn FlowIo>,
    /// Descriptors are short, and connections wait to be accepted: the descriptors that are left are for those.
    pub scarce: bool,
}

/// One kind of transport.
pub trait Provider {
    /// The number of this kind.
    fn kind(&self) -> TransportKind;

    /// Begins to connect. Before that it must call the front end of the flow ([`FlowIo::before_connect`]).
    ///
    /// # Errors
    /// No connection can be made on this path: the attempt has failed.
    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>>;

    /// The listeners for connections from peers, such as one for each port of an adapter, the preferred one first; called once.
    /// TCP has none here: its listeners are opened and closed with the control sockets.
    ///
    /// # Errors
    /// The agent does not start.
    fn listeners(&self) -> io::Result<Vec<Box<dyn Listener>>> {
        Ok(Vec::new())
    }
}

/// Accepts connections from peers.
pub trait Listener {
    /// The locator that is announced to peers. `None` if they use the addresses and ports of TCP, which are announced
    /// anyway, or if no peer can connect here now.
    fn locator(&self) -> Option<OtherLocator>;

    /// Ready when [`locator`](Self::locator) may return something else than at its last call, because a port went down or came up. Wakes
    /// the task that asked last. The new locator is announced to peers, and flows that prefer this kind try it.
    fn poll_changed(&self, context: &mut Context<'_>) -> Poll<()> {
        let _ = context;
        Poll::Pending
    }

    /// Accepts a connection, and returns where it came from.
    ///
    /// # Errors
    /// `WouldBlock` if there is none. A shortage of descriptors or memory, which leaves the connection waiting, and the
    /// failure of one connection have their usual errno. Any other error means that the listener has failed.
    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)>;

    /// Ready when [`accept`](Self::accept) is worth a call.
    ///
    /// # Errors
    /// The listener has failed.
    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;
}

/// A connection that is not a flow's transport yet. Dropping it closes it.
///
/// The `poll_…` methods wake the task that asked last, and may be ready too early, never too late.
pub trait Connection {
    /// Ready when the connection is made.
    ///
    /// # Errors
    /// The reason why it cannot be made.
    fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Reads bytes that have arrived; 0 is the end of the peer's stream.
    ///
    /// # Errors
    /// `WouldBlock` if there are none. Any other error means that all bytes that arrived have been read, and no more
    /// will come.
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// Sends as much as is possible without blocking.
    ///
    /// # Errors
    /// `WouldBlock` if nothing can be sent.
    fn send(&self, data: &[u8]) -> io::Result<usize>;

    /// Ready when there is something to read: bytes, the end, or an error.
    ///
    /// # Errors
    /// Waiting for it is not possible any more.
    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready when something can be sent, or sending fails.
    ///
    /// # Errors
    /// Waiting for it is not possible any more.
    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// A hint that nothing more can have arrived, which saves [`poll_readable`](Self::poll_readable) a check.
    fn expect_nothing(&self) {}

    /// Whether the connection holds fewer bytes than a replay may have. Then each end reads the whole replay of the other before its flow goes on.
    /// Otherwise the other one would stay suspended, and receive nothing, until the application reads.
    fn is_narrow(&self) -> bool {
        false
    }

    /// What bytes under way wait for; `None` if there are none, or this kind cannot tell.
    fn ack_wait(&self) -> Option<AckWait> {
        None
    }

    /// Passes the connection to the front end of the flow whose transport it is to become ([`FlowIo::prepare`]).
    ///
    /// # Errors
    /// The front end does not take this kind, or not this connection.
    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()>;

    /// Ends our direction.
    fn shut_write(&self);

    /// Called before the connection is handed over. Work that was put off until now because more might have followed
    /// (TCP delays acknowledgements) is done at once: the peer waits for it.
    fn flush(&self);

    /// Becomes what the front end gets. Called after [`prepare`](Self::prepare).
    fn into_transport(self: Box<Self>) -> Transport;
}

/// All kinds of an agent, the preferred one first.
pub(crate) struct Providers(Vec<Box<dyn Provider + Send>>);

impl Providers {
    /// These providers, TCP unless it is among them, and the witness of the job as a relay.
    pub(crate) fn new(config: &Config, mut all: Vec<Box<dyn Provider + Send>>) -> Self {
        if let Some(relays) = Relays::of(config) {
            all.push(Box::new(relays));
        }
        if all.iter().all(|p| p.kind() != TransportKind::TCP) {
            all.push(Box::new(tcp::Tcp));
        }
        Providers(all)
    }

    pub(crate) fn kinds(&self) -> Vec<TransportKind> {
        self.0.iter().map(|provider| provider.kind()).collect()
    }

    pub(crate) fn listeners(&self) -> io::Result<Vec<Box<dyn Listener>>> {
        let listeners = self.0.iter().map(|provider| provider.listeners());
        let of_each: Vec<_> = listeners.collect::<io::Result<_>>()?;
        Ok(of_each.into_iter().flatten().collect())
    }

    /// Makes a connection with the provider of the path's kind.
    pub(crate) fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let kind = wanted.path.kind();
        let provider = self.0.iter().find(|provider| provider.kind() == kind);
        let none = || io::Error::from_raw_os_error(libc::EPROTONOSUPPORT);
        provider.ok_or_else(none)?.connect(wanted)
    }
}

/// Waits until a connection can be written to or, with `readable`, read from.
pub(crate) async fn ready(connection: &dyn Connection, readable: bool) -> io::Result<()> {
    poll_fn(|context| match connection.poll_writable(context) {
        Poll::Pending if readable => connection.poll_readable(context),
        ready => ready,
    })
    .await
}

/// Waits until a connection can be read from.
pub(crate) async fn readable(connection: &dyn Connection) -> io::Result<()> {
    poll_fn(|context| connection.poll_readable(context)).await
}

/// The number of an error, or `otherwise` if it has none.
pub(crate) fn errno_of(e: &io::Error, otherwise: i32) -> i32 {
    e.raw_os_error().unwrap_or(otherwise)
}
