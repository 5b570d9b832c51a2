//! Adapters that refuse, and adapters that report nonsense.

use std::ops::Range;

use slim_rdma::in_memory::MemoryAdapter;
use slim_rdma::{
    Access, AdapterEvent, Completed, Completion, CreatedPair, LocalKey, PairAddress, PairSizes,
    QpNumber, ReadWork, RegionId, RemoteKey, Verbs, VerbsError, WorkError, WriteWork,
};

type Poll<'a> = Box<dyn FnMut(&mut MemoryAdapter, QpNumber) -> Option<Completion> + 'a>;

/// An adapter that does not do what it should.
pub struct BadAdapter<'a> {
    inner: &'a mut MemoryAdapter,
    refuses: Range<u32>,
    /// Calls so far that can fail.
    pub calls: u32,
    poll: Poll<'a>,
}

impl<'a> BadAdapter<'a> {
    /// Calls that can fail are refused, if their number, counted from 1, is one of these.
    pub fn refusing(inner: &'a mut MemoryAdapter, refuses: Range<u32>) -> Self {
        BadAdapter {
            refuses,
            ..Self::polling(inner, |inner, pair| inner.poll(pair))
        }
    }

    /// `poll` is done instead of each poll.
    pub fn polling(
        inner: &'a mut MemoryAdapter,
        poll: impl FnMut(&mut MemoryAdapter, QpNumber) -> Option<Completion> + 'a,
    ) -> Self {
        BadAdapter {
            inner,
            refuses: 0..0,
            calls: 0,
            poll: Box::new(poll),
        }
    }

    fn call(&mut self) -> Result<(), VerbsError> {
        self.calls += 1;
        match self.refuses.contains(&self.calls) {
            true => Err(VerbsError::new("bad adapter", 12)),
            false => Ok(()),
        }
    }
}

impl Verbs for BadAdapter<'_> {
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        self.call()?;
        self.inner.register(len, access)
    }
    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.inner.remote_key(region)
    }
    fn local_key(&self, region: RegionId) -> LocalKey {
        self.inner.local_key(region)
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
    fn create(&mut self, sizes: &PairSizes) -> Result<CreatedPair, VerbsError> {
        self.call()?;
        self.inner.create(sizes)
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
    fn post_read(&mut self, pair: QpNumber, work: &ReadWork) -> Result<(), VerbsError> {
        self.call()?;
        self.inner.post_read(pair, work)
    }
    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        (self.poll)(self.inner, pair)
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

/// Polls of completions that come out of order, twice, or as errors.
pub fn shuffled(
    mut random: fastrand::Rng,
) -> impl FnMut(&mut MemoryAdapter, QpNumber) -> Option<Completion> {
    let mut held = Vec::new();
    move |inner, pair| {
        held.extend(std::iter::from_fn(|| inner.poll(pair)));
        if held.is_empty() {
            return None;
        }
        let unkind = random.u32(0..20) == 0;
        let at = if unkind {
            random.usize(0..held.len())
        } else {
            0
        };
        match random.u32(0..60) {
            // It comes again.
            0 => Some(held[at]),
            1 => Some(Completion {
                id: held.remove(at).id,
                how: Completed::Failed(WorkError::Other(5)),
            }),
            _ => Some(held.remove(at)),
        }
    }
}
