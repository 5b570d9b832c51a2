//! Queue pairs as a kind of transport.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use slim_agent::TransportRef;
use slim_agent::transport::{Connection, Listener, Provider, Wanted};
use slim_core::transport::{Locator, TransportKind};
use slim_rdma::Verbs;
use slim_stream::carrier::IsCarrier;
use slim_sys::OwnFd;

use crate::connection::PairConnection;
use crate::listener::PortListener;
use crate::port::{PortShared, VerbsPort};
use crate::settings::VerbsSettings;

/// Makes queue pairs of kind [`TransportKind::VERBS`], which front ends get as carriers ([`slim_stream::Carrier`]).
pub struct VerbsProvider<V: Verbs + Clone> {
    ports: Vec<Arc<PortShared<V>>>,
    /// Those of each port, until the agent takes the listeners.
    reports: Mutex<Vec<Vec<OwnFd>>>,
}

impl<V: Verbs + Clone + Send + 'static> VerbsProvider<V> {
    /// Uses these ports. Of equally good ones, the first is preferred.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new(ports: Vec<VerbsPort<V>>, settings: VerbsSettings) -> io::Result<Self> {
        let mut reports = Vec::new();
        let shared = ports.into_iter().map(|port| {
            reports.push(port.reports);
            Ok(Arc::new(PortShared::new(port.verbs, port.mail, settings)?))
        });
        Ok(VerbsProvider {
            ports: shared.collect::<io::Result<_>>()?,
            reports: Mutex::new(reports),
        })
    }
}

impl<V: Verbs + Clone + Send + 'static> Provider for VerbsProvider<V> {
    fn kind(&self) -> TransportKind {
        TransportKind::VERBS
    }

    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let Locator::Other(to) = wanted.path.to else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let usable = self.ports.iter();
        let usable = usable.filter_map(|port| Some((port, port.can_ask(&to)?)));
        let best = usable.min_by_key(|(_, choice)| *choice);
        let (port, _) = best.ok_or(io::ErrorKind::NetworkUnreachable)?;
        if let Some(flow) = wanted.flow {
            flow.before_connect(TransportRef::Other(&IsCarrier))?;
        }
        let attempt = port.ask(&to)?;
        Ok(Box::new(PairConnection::asking(port.clone(), attempt)))
    }

    fn listeners(&self) -> io::Result<Vec<Box<dyn Listener>>> {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        let of_each = self.ports.iter().zip(reports.drain(..));
        let listener = |(port, reports): (&Arc<PortShared<V>>, _)| {
            let listener = PortListener::new(port.clone(), reports)?;
            Ok(Box::new(listener) as Box<dyn Listener>)
        };
        of_each.map(listener).collect()
    }
}
