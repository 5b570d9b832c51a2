//! The trait [`Verbs`] on libibverbs.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::datagrams::VerbsDatagrams;
use super::error::AdapterError;
use super::memory::RegisteredMemory;
use super::objects::PairObjects;
use super::port::{OpenPort, PortSettings};
use super::program::ProgramPort;
use crate::address::{PairAddress, QpNumber, RemoteKey};
use crate::sizes::PairSizes;
use crate::verbs::{
    Access, AdapterEvent, Completion, CreatedPair, LocalKey, Payload, ReadWork, RegionId, Verbs,
    VerbsError, WriteWork,
};

/// A port of an adapter, open for this process.
///
/// A clone is another handle on the same port, for another thread: queue pairs and regions belong to the handle that has made them, so threads
/// with handles of their own share no lock. What the port reports, [`reported`](Verbs::reported) and [`event`](Verbs::event), any handle takes,
/// and once for all of them. Dropping a handle destroys what it has made.
///
/// A child of a fork has none of it: calls fail there or find nothing, memory of regions reads as zeros, and dropping a handle leaves the
/// parent's objects alone.
pub struct VerbsAdapter {
    pairs: BTreeMap<QpNumber, PairObjects>,
    regions: BTreeMap<RegionId, RegisteredMemory>,
    port: Arc<OpenPort>,
}

// SAFETY: the objects behind the pointers may be used by any thread, one at a time, and are reached through `&mut self` only (the addresses
// and bytes of a region also through `&self`, which is not shared: there is no `Sync`).
unsafe impl Send for VerbsAdapter {}

impl Clone for VerbsAdapter {
    fn clone(&self) -> Self {
        VerbsAdapter {
            pairs: BTreeMap::new(),
            regions: BTreeMap::new(),
            port: self.port.clone(),
        }
    }
}

impl std::fmt::Debug for VerbsAdapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsAdapter")
            .field("name", &self.port.name)
            .field("port", &self.port.address.number)
            .field("pairs", &self.pairs.len())
            .field("regions", &self.regions.len())
            .finish()
    }
}

impl VerbsAdapter {
    /// Opens a port.
    ///
    /// # Errors
    /// The library is missing, or no port fits; the text of the error says what there is.
    pub fn open(settings: &PortSettings) -> Result<Self, AdapterError> {
        Ok(VerbsAdapter {
            pairs: BTreeMap::new(),
            regions: BTreeMap::new(),
            port: Arc::new(OpenPort::open(settings)?),
        })
    }

    /// Name of the adapter.
    pub fn name(&self) -> &str {
        &self.port.name
    }

    /// Number of the port.
    pub fn port(&self) -> u8 {
        self.port.address.number
    }

    /// Global identifier of the port: for RoCE its IP address.
    pub fn gid(&self) -> [u8; 16] {
        self.port.address.gid
    }

    /// Whether the port has a link, and still the address that it had when it was opened.
    pub fn is_up(&self) -> bool {
        self.port.is_up()
    }

    /// Readable when [`reported`](Verbs::reported) has something to say: for poll sets.
    pub fn completion_descriptor(&self) -> BorrowedFd<'_> {
        self.port.completions()
    }

    /// Readable when [`event`](Verbs::event) has something to say: for poll sets.
    pub fn event_descriptor(&self) -> BorrowedFd<'_> {
        self.port.events()
    }

    /// Opens a queue for datagrams at this port. It lives as long as it is kept, and not as this handle.
    ///
    /// # Errors
    /// The adapter has no queue pair for datagrams, or no memory.
    pub fn datagrams(&self) -> Result<VerbsDatagrams, VerbsError> {
        VerbsDatagrams::open(&self.port)
    }

    /// The port, for memory of the program.
    pub fn program_port(&self) -> ProgramPort {
        ProgramPort(self.port.clone())
    }

    /// Whether this handle has made nothing that is not destroyed yet.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty() && self.regions.is_empty()
    }

    fn pair(&mut self, number: QpNumber) -> Result<&mut PairObjects, VerbsError> {
        self.port.check()?;
        let found = self.pairs.get_mut(&number);
        found.ok_or(VerbsError::new("queue pair of this handle", libc::EINVAL))
    }

    fn region(&self, id: RegionId) -> &RegisteredMemory {
        let found = self.regions.get(&id);
        found.expect("a region that is not released")
    }

    fn region_mut(&mut self, id: RegionId) -> &mut RegisteredMemory {
        let found = self.regions.get_mut(&id);
        found.expect("a region that is not released")
    }
}

impl Verbs for VerbsAdapter {
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let memory = RegisteredMemory::new(&self.port, len, access.into())?;
        let id = RegionId(COUNT.fetch_add(1, Ordering::Relaxed));
        self.regions.insert(id, memory);
        Ok(id)
    }

    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.region(region).remote_key()
    }

    fn local_key(&self, region: RegionId) -> LocalKey {
        let (addr, key) = self.region(region).place(0, 0);
        LocalKey { addr, key }
    }

    fn invalidate(&mut self, region: RegionId) {
        self.region_mut(region).invalidate();
    }

    fn release(&mut self, region: RegionId) {
        self.regions.remove(&region);
    }

    fn read(&self, region: RegionId, at: usize, into: &mut [u8]) {
        self.region(region).read(at, into);
    }

    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]) {
        self.region_mut(region).write(at, bytes);
    }

    fn create(&mut self, sizes: &PairSizes) -> Result<CreatedPair, VerbsError> {
        let (pair, inline) = PairObjects::new(&self.port, sizes)?;
        let address = pair.address(sizes);
        self.pairs.insert(address.number, pair);
        Ok(CreatedPair { address, inline })
    }

    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError> {
        self.pair(pair)?.connect(peer)
    }

    fn fail(&mut self, pair: QpNumber) {
        if let Ok(pair) = self.pair(pair) {
            pair.fail();
        }
    }

    fn destroy(&mut self, pair: QpNumber) {
        self.pairs.remove(&pair);
    }

    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError> {
        self.pair(pair)?.post_receive(id)
    }

    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError> {
        let (addr, len, key) = match work.payload {
            Payload::Inline(bytes) => (bytes.as_ptr() as u64, bytes.len(), None),
            Payload::Staged { region, at, len } => {
                let (addr, key) = self.region(region).place(at, len);
                (addr, len, Some(key))
            }
        };
        self.pair(pair)?.post_write(work, addr, len, key)
    }

    fn post_read(&mut self, pair: QpNumber, work: &ReadWork) -> Result<(), VerbsError> {
        self.pair(pair)?.post_read(work)
    }

    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        self.pair(pair).ok()?.poll()
    }

    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError> {
        self.pair(pair)?.arm()
    }

    fn reported(&mut self) -> Option<QpNumber> {
        self.port.reported()
    }

    fn event(&mut self) -> Option<AdapterEvent> {
        self.port.event()
    }
}
