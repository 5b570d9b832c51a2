//! Adapters whose queue pairs fail at moments that the test chooses, as if the adapter had found an error.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use slim_rdma::{
    Access, AdapterEvent, Completion, CreatedPair, LocalKey, PairAddress, PairSizes, QpNumber,
    ReadWork, RegionId, RemoteKey, Verbs, VerbsError, WriteWork, ibverbs::VerbsAdapter,
};
use slim_verbs::VerbsPort;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The queue pairs of a port that are not destroyed, with the handles that have made them.
#[derive(Clone, Default)]
pub struct LivePairs(Arc<Mutex<BTreeMap<QpNumber, Weak<Mutex<VerbsAdapter>>>>>);

impl LivePairs {
    /// Puts all into their error state. Their process is told only what an adapter tells. Returns how many there were.
    pub fn fail(&self) -> usize {
        let all: Vec<_> = locked(&self.0)
            .iter()
            .map(|(n, handle)| (*n, handle.clone()))
            .collect();
        let found = all
            .into_iter()
            .filter_map(|(n, handle)| Some((n, handle.upgrade()?)));
        found
            .map(|(number, handle)| locked(&handle).fail(number))
            .count()
    }
}

/// A handle of an adapter that another thread can reach, too.
pub struct FragileAdapter {
    handle: Arc<Mutex<VerbsAdapter>>,
    live: LivePairs,
}

impl Clone for FragileAdapter {
    fn clone(&self) -> Self {
        FragileAdapter {
            handle: Arc::new(Mutex::new(self.verbs().clone())),
            live: self.live.clone(),
        }
    }
}

impl FragileAdapter {
    /// A port for a provider, and its queue pairs.
    pub fn port(adapter: VerbsAdapter) -> (VerbsPort<Self>, LivePairs) {
        let VerbsPort {
            verbs,
            reports,
            mail,
        } = VerbsPort::new(adapter).unwrap();
        let live = LivePairs::default();
        let verbs = FragileAdapter {
            handle: Arc::new(Mutex::new(verbs)),
            live: live.clone(),
        };
        let port = VerbsPort {
            verbs,
            reports,
            mail,
        };
        (port, live)
    }

    fn verbs(&self) -> MutexGuard<'_, VerbsAdapter> {
        locked(&self.handle)
    }
}

impl Verbs for FragileAdapter {
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        self.verbs().register(len, access)
    }

    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.verbs().remote_key(region)
    }

    fn local_key(&self, region: RegionId) -> LocalKey {
        self.verbs().local_key(region)
    }

    fn invalidate(&mut self, region: RegionId) {
        self.verbs().invalidate(region);
    }

    fn release(&mut self, region: RegionId) {
        self.verbs().release(region);
    }

    fn read(&self, region: RegionId, at: usize, into: &mut [u8]) {
        self.verbs().read(region, at, into);
    }

    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]) {
        self.verbs().write(region, at, bytes);
    }

    fn create(&mut self, sizes: &PairSizes) -> Result<CreatedPair, VerbsError> {
        let created = self.verbs().create(sizes)?;
        let handle = Arc::downgrade(&self.handle);
        locked(&self.live.0).insert(created.address.number, handle);
        Ok(created)
    }

    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError> {
        self.verbs().connect(pair, peer)
    }

    fn fail(&mut self, pair: QpNumber) {
        self.verbs().fail(pair);
    }

    fn destroy(&mut self, pair: QpNumber) {
        // Before the number is in use again.
        locked(&self.live.0).remove(&pair);
        self.verbs().destroy(pair);
    }

    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError> {
        self.verbs().post_receive(pair, id)
    }

    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError> {
        self.verbs().post_write(pair, work)
    }

    fn post_read(&mut self, pair: QpNumber, work: &ReadWork) -> Result<(), VerbsError> {
        self.verbs().post_read(pair, work)
    }

    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        self.verbs().poll(pair)
    }

    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError> {
        self.verbs().arm(pair)
    }

    fn reported(&mut self) -> Option<QpNumber> {
        self.verbs().reported()
    }

    fn event(&mut self) -> Option<AdapterEvent> {
        self.verbs().event()
    }
}
