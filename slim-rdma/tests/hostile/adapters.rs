//! Adapters that refuse, and adapters that report nonsense.

use slim_rdma::in_memory::MemoryAdapter;
use slim_rdma::{
    Access, AdapterEvent, Completed, Completion, PairAddress, QpNumber, RegionId, RemoteKey,
    RingShape, Verbs, VerbsError, WorkError, WriteWork,
};

/// An adapter at which something else happens before each poll.
pub struct Interrupted<'a> {
    pub inner: &'a mut MemoryAdapter,
    pub between: &'a mut dyn FnMut(),
    /// Calls that can fail are refused from this one on, this often.
    pub refuses: std::ops::Range<u32>,
    pub calls: u32,
}

impl Interrupted<'_> {
    fn call(&mut self) -> Result<(), VerbsError> {
        self.calls += 1;
        match self.refuses.contains(&self.calls) {
            true => Err(VerbsError(12)),
            false => Ok(()),
        }
    }
}

impl Verbs for Interrupted<'_> {
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        self.call()?;
        self.inner.register(len, access)
    }
    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.inner.remote_key(region)
    }
    fn invalidate(&mut self, region: RegionId) {
        self.inner.invalidate(region);
    }
    fn release(&mut self, region: RegionId) {
        self.inner.release(region);
    }
    fn read(&self, region: RegionId, at: usize, into: &mut [u8]) {
        self.inner.read(region, at, into);
    }
    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]) {
        self.inner.write(region, at, bytes);
    }
    fn create(&mut self, depth: u32, own: RingShape) -> Result<PairAddress, VerbsError> {
        self.call()?;
        self.inner.create(depth, own)
    }
    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError> {
        self.call()?;
        self.inner.connect(pair, peer)
    }
    fn fail(&mut self, pair: QpNumber) {
        self.inner.fail(pair);
    }
    fn destroy(&mut self, pair: QpNumber) {
        self.inner.destroy(pair);
    }
    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError> {
        self.call()?;
        self.inner.post_receive(pair, id)
    }
    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError> {
        self.call()?;
        self.inner.post_write(pair, work)
    }
    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        (self.between)();
        self.inner.poll(pair)
    }
    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError> {
        self.call()?;
        self.inner.arm(pair)
    }
    fn reported(&mut self) -> Option<QpNumber> {
        self.inner.reported()
    }
    fn event(&mut self) -> Option<AdapterEvent> {
        self.inner.event()
    }
}

/// An adapter whose completions come out of order, twice, or as errors.
pub struct Shuffled {
    pub inner: MemoryAdapter,
    pub held: Vec<Completion>,
    pub random: fastrand::Rng,
}

impl Verbs for Shuffled {
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        self.inner.register(len, access)
    }
    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.inner.remote_key(region)
    }
    fn invalidate(&mut self, region: RegionId) {
        self.inner.invalidate(region);
    }
    fn release(&mut self, region: RegionId) {
        self.inner.release(region);
    }
    fn read(&self, region: RegionId, at: usize, into: &mut [u8]) {
        self.inner.read(region, at, into);
    }
    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]) {
        self.inner.write(region, at, bytes);
    }
    fn create(&mut self, depth: u32, own: RingShape) -> Result<PairAddress, VerbsError> {
        self.inner.create(depth, own)
    }
    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError> {
        self.inner.connect(pair, peer)
    }
    fn fail(&mut self, pair: QpNumber) {
        self.inner.fail(pair);
    }
    fn destroy(&mut self, pair: QpNumber) {
        self.inner.destroy(pair);
    }
    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError> {
        self.inner.post_receive(pair, id)
    }
    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError> {
        self.inner.post_write(pair, work)
    }
    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        self.held
            .extend(std::iter::from_fn(|| self.inner.poll(pair)));
        if self.held.is_empty() {
            return None;
        }
        let unkind = self.random.u32(0..20) == 0;
        let at = if unkind {
            self.random.usize(0..self.held.len())
        } else {
            0
        };
        let next = self.held[at];
        match self.random.u32(0..60) {
            0 => {}
            1 => {
                self.held.remove(at);
                return Some(Completion {
                    id: next.id,
                    how: Completed::Failed(WorkError::Other(5)),
                });
            }
            _ => drop(self.held.remove(at)),
        }
        Some(next)
    }
    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError> {
        self.inner.arm(pair)
    }
    fn reported(&mut self) -> Option<QpNumber> {
        self.inner.reported()
    }
    fn event(&mut self) -> Option<AdapterEvent> {
        self.inner.event()
    }
}
