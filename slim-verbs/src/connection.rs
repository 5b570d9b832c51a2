//! A queue pair that carries a resume, until it becomes a flow's transport.

use std::cell::OnceCell;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use slim_agent::transport::Connection;
use slim_agent::{FlowIo, Transport, TransportRef};
use slim_rdma::Verbs;
use slim_rdma::agreement::PairAttempt;
use slim_stream::Carrier;
use slim_stream::carrier::IsCarrier;

use crate::carrier::{PairCarrier, errno};
use crate::pair::{InUse, SharedPair};
use crate::port::{PortShared, StrangersPair};

/// A connection that is made, or was accepted.
pub(crate) struct PairConnection<V: Verbs + Clone> {
    port: Arc<PortShared<V>>,
    /// What this side has asked for.
    attempt: Option<PairAttempt>,
    /// Once there is an answer.
    pair: OnceCell<Arc<SharedPair<V>>>,
    /// If it was accepted: until it is a flow's transport.
    _stranger: Option<StrangersPair>,
}

impl<V: Verbs + Clone> PairConnection<V> {
    pub(crate) fn asking(port: Arc<PortShared<V>>, attempt: PairAttempt) -> Self {
        PairConnection {
            port,
            attempt: Some(attempt),
            pair: OnceCell::new(),
            _stranger: None,
        }
    }

    pub(crate) fn accepted(
        port: Arc<PortShared<V>>,
        pair: Arc<SharedPair<V>>,
        stranger: StrangersPair,
    ) -> Self {
        // Now, because the flow is not suspended yet. If no descriptor is free, `prepare` tries again.
        let _ = pair.make_event();
        PairConnection {
            port,
            attempt: None,
            pair: pair.into(),
            _stranger: Some(stranger),
        }
    }

    pub(crate) fn pair(&self) -> io::Result<&Arc<SharedPair<V>>> {
        let pair = self.pair.get();
        pair.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn with<R>(&self, f: impl FnOnce(&mut InUse<'_, V>) -> R) -> io::Result<R> {
        Ok(self.pair()?.with(f))
    }
}

impl<V: Verbs + Clone + Send + 'static> Connection for PairConnection<V> {
    fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let (None, Some(attempt)) = (self.pair.get(), self.attempt) {
            let pair = ready!(self.port.poll_answer(attempt, context))?;
            // Now, because the flow is not suspended yet.
            pair.make_event()?;
            self.pair.get_or_init(|| pair);
        }
        Poll::Ready(Ok(()))
    }

    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.with(|used| used.pair.recv(used.verbs, buf))?;
        got.map_err(|e| io::Error::from_raw_os_error(errno(e)))
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        let sent = self.with(|used| used.pair.send(used.verbs, data))?;
        sent.map_err(|e| io::Error::from_raw_os_error(errno(e)))
    }

    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ready = self.with(|used| {
            used.wake_reader(context.waker());
            used.is_readable() || {
                used.arm();
                used.is_readable()
            }
        })?;
        match ready {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        }
    }

    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ready = self.with(|used| {
            used.has_room() || {
                used.wake_writer(context.waker());
                used.arm();
                used.has_room()
            }
        })?;
        match ready {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        }
    }

    /// A ring has a few hundred KiB, and TCP holds megabytes.
    fn is_narrow(&self) -> bool {
        true
    }

    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()> {
        flow.prepare(TransportRef::Other(&IsCarrier))?;
        self.pair()?.make_event()
    }

    fn shut_write(&self) {
        let _ = self.with(|used| used.pair.end(used.verbs));
    }

    /// Nothing was put off. The peer learns the count of this side by its next message, or soon after; a message of its own would only wake the peer.
    fn flush(&self) {}

    fn into_transport(self: Box<Self>) -> Transport {
        let pair = self.pair().expect("prepared").clone();
        let number = pair.with(|used| {
            used.arm();
            // The front end looks at what there is when it has reset the counter.
            used.tell();
            used.pair.number()
        });
        // What came before it was armed is not reported.
        self.port.look_soon(number);
        let carrier = PairCarrier::new(pair).expect("prepared");
        Transport::Other(Box::new(Arc::new(carrier) as Arc<dyn Carrier>))
    }
}

impl<V: Verbs + Clone> Drop for PairConnection<V> {
    fn drop(&mut self) {
        if let (None, Some(attempt)) = (self.pair.get(), self.attempt) {
            self.port.forget(attempt);
        }
    }
}
