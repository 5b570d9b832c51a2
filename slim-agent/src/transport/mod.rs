//! What resumes need of a transport, whatever kind it is of.
//!
//! A [`Provider`] makes the connections of one kind, and has a [`Listener`] where peers come to. A [`Connection`] carries first the
//! messages of a resume and then the replay. In the end it becomes a [`Transport`], which the agent gives to the front end
//! ([`FlowIo::install`]) and does not touch any more.
//!
//! ```text
//!   Provider::connect ──┐                                       prepare      into_transport
//!                       ├─► Connection ── messages (resume_io) ──► replay (pump) ──► Transport ──► FlowIo::install
//!   Listener::accept ───┘
//! ```
//!
//! What a kind must be like: bytes come in order and once, or not at all; those that came before the connection broke can be
//! read after it; and this end can tell how many of its own the other end has for good. The last one the agent does not ask for: the
//! front end trims by it ([`FlowIo::probe`]).
//!
//! Everything here is called on the agent thread, inside its runtime, and must not wait. Dispatch is dynamic: a connection
//! is one allocation, its messages none, and a live flow has nothing to do with any of it. Should the agent thread ever panic, only
//! descriptors are shut: the peers of another kind's listener and connections learn of it when their attempts are over.

#[cfg(test)]
pub(crate) mod kinds;
pub(crate) mod tcp;

use std::future::poll_fn;
use std::io;
use std::task::{Context, Poll};

use slim_core::transport::{Locator, OtherLocator, Path, TransportKind};

use crate::FlowIo;
use crate::handover::Transport;

/// A connection that is to be made.
pub struct Wanted<'a> {
    /// Where to; of the provider's kind.
    pub path: Path,
    /// The flow that it is for, if it is still there.
    pub flow: Option<&'a dyn FlowIo>,
    /// Connections wait to be accepted for want of descriptors: those that are left are for them.
    pub scarce: bool,
}

/// One kind of transport.
pub trait Provider {
    /// Which one.
    fn kind(&self) -> TransportKind;

    /// Begins to connect. Before that the flow's front end has its say ([`FlowIo::before_connect`]).
    ///
    /// # Errors
    /// There is no connection on this path: the attempt has failed.
    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>>;

    /// Where peers come to; called once. TCP has none here: its listeners stand beside the control sockets, which come and go.
    ///
    /// # Errors
    /// The agent does not start.
    fn listener(&self) -> io::Result<Option<Box<dyn Listener>>> {
        Ok(None)
    }
}

/// Where connections come in.
pub trait Listener {
    /// What peers are told, so that they come here. `None` if they come to the addresses and ports of TCP, which they are told
    /// anyway.
    fn locator(&self) -> Option<OtherLocator>;

    /// A connection that has come, and from where.
    ///
    /// # Errors
    /// `WouldBlock` if there is none. A shortage (of descriptors, of memory), which leaves it waiting, or the end of one connection
    /// have their usual errno; everything else is the end of the listener.
    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)>;

    /// Ready when [`accept`](Self::accept) is worth a call.
    ///
    /// # Errors
    /// The listener is of no use any more.
    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;
}

/// A connection that is not a flow's transport yet. Dropping it closes it.
///
/// The `poll_…` methods wake the task that asked last, and may be ready too early, never too late.
pub trait Connection {
    /// Whether a connection that was begun is made.
    ///
    /// # Errors
    /// Why it is not.
    fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Takes bytes that have come; 0 is the end of what the peer sends.
    ///
    /// # Errors
    /// `WouldBlock` if there are none; otherwise all that came has been taken, and there will be no more.
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// Sends as much as goes at once.
    ///
    /// # Errors
    /// `WouldBlock` if nothing does.
    fn send(&self, data: &[u8]) -> io::Result<usize>;

    /// Ready when there is something to take: bytes, the end, or an error.
    ///
    /// # Errors
    /// It cannot be waited for any more.
    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Ready when something can be sent, or sending fails.
    ///
    /// # Errors
    /// It cannot be waited for any more.
    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// A hint: nothing more can have come, so that [`poll_readable`](Self::poll_readable) need not find that out by another look.
    fn expect_nothing(&self) {}

    /// Shows the connection to the front end of the flow whose transport it is to be ([`FlowIo::prepare`]).
    ///
    /// # Errors
    /// It is not to be: the front end does not take this kind, or not this connection.
    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()>;

    /// Ends our direction.
    fn shut_write(&self);

    /// The connection is about to be handed over. What it has put off until now, since there might have been more to be done (TCP
    /// acknowledges late), is done at once: the peer waits for it.
    fn flush(&self);

    /// What the front end gets. Called after [`prepare`](Self::prepare).
    fn into_transport(self: Box<Self>) -> Transport;
}

/// All kinds of an agent, the preferred one first.
pub(crate) struct Providers(Vec<Box<dyn Provider + Send>>);

impl Providers {
    /// These, and TCP unless it is among them.
    pub(crate) fn new(mut all: Vec<Box<dyn Provider + Send>>) -> Self {
        if all.iter().all(|p| p.kind() != TransportKind::TCP) {
            all.push(Box::new(tcp::Tcp));
        }
        Providers(all)
    }

    pub(crate) fn kinds(&self) -> Vec<TransportKind> {
        self.0.iter().map(|provider| provider.kind()).collect()
    }

    pub(crate) fn listeners(&self) -> io::Result<Vec<Box<dyn Listener>>> {
        let listeners = self.0.iter().map(|provider| provider.listener());
        listeners.filter_map(io::Result::transpose).collect()
    }

    /// Has a connection made by the provider of its path's kind.
    pub(crate) fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let kind = wanted.path.kind();
        let provider = self.0.iter().find(|provider| provider.kind() == kind);
        let none = || io::Error::from_raw_os_error(libc::EPROTONOSUPPORT);
        provider.ok_or_else(none)?.connect(wanted)
    }
}

/// Waits until a connection can be written to or, if that is `wanted`, read from.
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
