//! The task of a port: accepts connections, takes the adapter's reports, and keeps the times.
//!
//! The agent asks its listeners all the time whether there is something to accept. So the port needs no thread of its own: all its work is done there. Its timer is a
//! descriptor, because an agent without a thread is driven by whoever polls the runtime's descriptors.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use slim_agent::transport::{Connection, Listener};
use slim_core::transport::{Locator, OtherLocator};
use slim_rdma::Verbs;
use slim_sys::OwnFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::connection::PairConnection;
use crate::port::PortShared;

fn watch(fd: OwnFd) -> io::Result<AsyncFd<OwnFd>> {
    // SAFETY: it owns the descriptor, which is the same one, and open, until `AsyncFd` has deregistered it and drops it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// The listener of a port.
pub(crate) struct PortListener<V: Verbs + Clone> {
    port: Arc<PortShared<V>>,
    reports: Vec<AsyncFd<OwnFd>>,
    timer: AsyncFd<OwnFd>,
    /// What the timer is set to.
    set_to: Cell<Option<Instant>>,
}

impl<V: Verbs + Clone> PortListener<V> {
    /// Must be called inside the runtime.
    pub(crate) fn new(port: Arc<PortShared<V>>, reports: Vec<OwnFd>) -> io::Result<Self> {
        let reports = reports.into_iter().map(watch).collect::<io::Result<_>>()?;
        let timer = watch(slim_sys::timerfd()?)?;
        Ok(PortListener {
            port,
            reports,
            timer,
            set_to: Cell::new(None),
        })
    }

    /// Whether one of the descriptors has become readable since the last call.
    fn poll_descriptors(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut ready = Poll::Pending;
        for fd in self.reports.iter().chain([&self.timer]) {
            if let Poll::Ready(guard) = fd.poll_read_ready(context) {
                guard?.clear_ready();
                ready = Poll::Ready(Ok(()));
            }
        }
        ready
    }

    /// If the time has not changed, the timer has not expired: what was due then has been done.
    fn set_timer(&self, due: Option<Instant>) {
        if self.set_to.replace(due) == due {
            return;
        }
        let delay = due.map(|due| due.saturating_duration_since(Instant::now()));
        slim_sys::set_timerfd(self.timer.get_ref().raw(), delay);
    }
}

impl<V: Verbs + Clone + Send + 'static> Listener for PortListener<V> {
    fn locator(&self) -> Option<OtherLocator> {
        self.port.locator()
    }

    fn poll_changed(&self, context: &mut Context<'_>) -> Poll<()> {
        self.port.poll_changed(context)
    }

    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)> {
        let (pair, from, stranger) = self.port.accept().ok_or(io::ErrorKind::WouldBlock)?;
        let connection = PairConnection::accepted(self.port.clone(), pair, stranger);
        Ok((Box::new(connection), from.into()))
    }

    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Before the turn: what is reported during the turn makes them readable again.
        let _ = self.poll_descriptors(context)?;
        loop {
            let due = self.port.turn(context);
            if self.port.has_proved() {
                return Poll::Ready(Ok(()));
            }
            if self.poll_descriptors(context)?.is_pending() {
                self.set_timer(due);
                return Poll::Pending;
            }
        }
    }
}
