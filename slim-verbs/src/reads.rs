//! Long transfers without a copy: RDMA READs out of a peer's memory, over the queue pair that carries a flow.
//!
//! They are no part of the flow: the peer's software does not notice them, and a resume does not know of them. A program that has the keys of a peer's
//! memory reads it, and if the queue pair breaks meanwhile, sends for the bytes another way.

use std::any::Any;
use std::sync::Arc;

use slim_rdma::ibverbs::{ProgramAccess, ProgramMemory, ProgramPort, VerbsAdapter};
use slim_rdma::{LocalKey, PairError, ReadOver, RemoteKey, Verbs, VerbsError};
use slim_stream::Carrier;

use crate::carrier::PairCarrier;
use crate::pair::SharedPair;

/// Most ports of a process whose keys are told to peers.
const MOST_PORTS: usize = 4;
/// Global identifier and key.
const PORT_BYTES: usize = 20;
/// Bytes of [`MemoryKeys`].
pub const KEYS_LEN: usize = MOST_PORTS * PORT_BYTES;

/// What peers need to read memory of a process: a key for each of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryKeys([u8; KEYS_LEN]);

impl MemoryKeys {
    /// From its bytes, which any process may have sent. A key that is not right breaks the queue pair.
    pub fn from_bytes(bytes: [u8; KEYS_LEN]) -> Self {
        MemoryKeys(bytes)
    }

    /// As bytes, to be sent to a peer.
    pub fn to_bytes(self) -> [u8; KEYS_LEN] {
        self.0
    }

    fn new(ports: &[([u8; 16], u32)]) -> Self {
        let mut bytes = [0; KEYS_LEN];
        for (to, (gid, key)) in bytes.chunks_exact_mut(PORT_BYTES).zip(ports) {
            to[..16].copy_from_slice(gid);
            to[16..].copy_from_slice(&key.to_le_bytes());
        }
        MemoryKeys(bytes)
    }

    /// The byte at this address of the peer, if it can be reached through the port.
    pub fn at(&self, port: [u8; 16], addr: u64) -> Option<RemoteKey> {
        let mut ports = self.0.chunks_exact(PORT_BYTES);
        let found = ports.find(|bytes| bytes[..16] == port && port != [0; 16])?;
        let key = u32::from_le_bytes(found[16..].try_into().ok()?);
        Some(RemoteKey { addr, key })
    }
}

/// The ports of this process at which its memory can be registered.
#[derive(Clone, Default)]
pub struct MemoryPorts(Vec<ProgramPort>);

impl MemoryPorts {
    pub(crate) fn new<'a>(adapters: impl Iterator<Item = &'a VerbsAdapter>) -> Self {
        let ports = adapters.map(VerbsAdapter::program_port);
        let usable = ports.filter(ProgramPort::survives_forks);
        MemoryPorts(usable.take(MOST_PORTS).collect())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Registers memory at all ports, until the result is dropped.
    ///
    /// # Errors
    /// It cannot be registered at one of them.
    ///
    /// # Safety
    /// As for [`ProgramPort::register`].
    pub unsafe fn register(
        &self,
        at: *mut u8,
        len: usize,
        access: ProgramAccess,
    ) -> Result<MemoryAtPorts, VerbsError> {
        let register = |port: &ProgramPort| {
            // SAFETY: the caller's promise.
            Ok((port.gid(), unsafe { port.register(at, len, access) }?))
        };
        let ports = self.0.iter().map(register);
        Ok(MemoryAtPorts(ports.collect::<Result<_, _>>()?))
    }
}

/// Memory of the program that is registered at the ports of this process.
pub struct MemoryAtPorts(Vec<([u8; 16], ProgramMemory)>);

impl MemoryAtPorts {
    /// What peers need.
    pub fn keys(&self) -> MemoryKeys {
        let ports = self.0.iter();
        let keys: Vec<_> = ports
            .map(|(gid, memory)| (*gid, memory.remote_key()))
            .collect();
        MemoryKeys::new(&keys)
    }

    /// The byte at this address, for the adapter of this port.
    pub fn at(&self, port: [u8; 16], addr: u64) -> Option<LocalKey> {
        let mut ports = self.0.iter();
        let (_, memory) = ports.find(|(gid, _)| *gid == port)?;
        Some(memory.local_key(addr))
    }
}

/// The queue pair that carries a flow, for reads. It may carry it no more: then reads are refused.
pub struct PairReads<V: Verbs = VerbsAdapter>(Arc<SharedPair<V>>);

impl<V: Verbs + Send + 'static> PairReads<V> {
    /// `None` if the carrier is no queue pair of such an adapter.
    pub fn of(carrier: Arc<dyn Carrier>) -> Option<Self> {
        let carrier: Arc<dyn Any + Send + Sync> = carrier;
        let carrier = carrier.downcast::<PairCarrier<V>>().ok()?;
        Some(PairReads(carrier.pair().clone()))
    }

    /// Whether both are the same queue pair.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Global identifiers of its port and of the peer's.
    pub fn ports(&self) -> [[u8; 16]; 2] {
        self.0.with(|used| used.pair.ports())
    }

    /// Begins to read. [`poll`](Self::poll) tells when the read with this number is over.
    ///
    /// # Errors
    /// [`PairError::WouldBlock`] if too many are on their way; otherwise the queue pair carries nothing more.
    pub fn read(
        &self,
        number: u64,
        from: RemoteKey,
        into: LocalKey,
        len: u32,
    ) -> Result<(), PairError> {
        self.0
            .with(|used| used.pair.read(used.verbs, number, from, into, len))
    }

    /// Appends the reads that are over. If the queue pair breaks, those on their way are over when its flow is suspended.
    pub fn poll(&self, over: &mut Vec<ReadOver>) {
        self.0.with(|used| {
            used.pair.progress(used.verbs);
            over.extend(std::iter::from_fn(|| used.pair.next_read()));
        });
    }

    /// Gives the queue pair up: nothing that is on its way is placed any more. If it carries a flow, that goes on over another transport.
    pub fn abandon(&self) {
        self.0.suspend();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_by_the_port() {
        let (a, b) = ([1; 16], [2; 16]);
        let keys = MemoryKeys::new(&[(a, 7), (b, u32::MAX)]);
        let keys = MemoryKeys::from_bytes(keys.to_bytes());
        let key = |port| keys.at(port, 99).map(|key| (key.addr, key.key));
        assert_eq!(key(a), Some((99, 7)));
        assert_eq!(key(b), Some((99, u32::MAX)));
        assert_eq!(key([3; 16]), None);
        // Places that are not used are no keys.
        assert_eq!(key([0; 16]), None);
    }
}
