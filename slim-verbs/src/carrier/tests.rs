use std::io::IoSlice;
use std::sync::Arc;

use slim_rdma::in_memory::{Fabric, MemoryAdapter};
use slim_rdma::{
    Access, AdapterEvent, Completion, CreatedPair, HalfPair, LocalKey, PairAddress, PairSizes,
    QpNumber, ReadWork, RegionId, RemoteKey, Verbs, VerbsError, WriteWork,
};
use slim_stream::Carrier;

use super::PairCarrier;
use crate::pair::SharedPair;
use crate::settings::VerbsSettings;

/// An adapter whose peer has taken everything, and has said so, whenever a completion is looked for.
struct PromptlyRead {
    own: MemoryAdapter,
    fabric: Fabric,
    peer: Option<Arc<SharedPair<MemoryAdapter>>>,
}

impl Verbs for PromptlyRead {
    fn poll(&mut self, pair: QpNumber) -> Option<Completion> {
        if let Some(peer) = &self.peer {
            self.fabric.run();
            peer.with(|used| while let Ok(1..) = used.pair.recv(used.verbs, &mut [0; 4096]) {});
            self.fabric.run();
        }
        self.own.poll(pair)
    }

    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError> {
        self.own.register(len, access)
    }

    fn remote_key(&self, region: RegionId) -> RemoteKey {
        self.own.remote_key(region)
    }

    fn local_key(&self, region: RegionId) -> LocalKey {
        self.own.local_key(region)
    }

    fn invalidate(&mut self, region: RegionId) {
        self.own.invalidate(region);
    }

    fn release(&mut self, region: RegionId) {
        self.own.release(region);
    }

    fn read(&self, region: RegionId, at: usize, into: &mut [u8]) {
        self.own.read(region, at, into);
    }

    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]) {
        self.own.write(region, at, bytes);
    }

    fn create(&mut self, sizes: &PairSizes) -> Result<CreatedPair, VerbsError> {
        self.own.create(sizes)
    }

    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError> {
        self.own.connect(pair, peer)
    }

    fn fail(&mut self, pair: QpNumber) {
        self.own.fail(pair);
    }

    fn destroy(&mut self, pair: QpNumber) {
        self.own.destroy(pair);
    }

    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError> {
        self.own.post_receive(pair, id)
    }

    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError> {
        self.own.post_write(pair, work)
    }

    fn post_read(&mut self, pair: QpNumber, work: &ReadWork) -> Result<(), VerbsError> {
        self.own.post_read(pair, work)
    }

    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError> {
        self.own.arm(pair)
    }

    fn reported(&mut self) -> Option<QpNumber> {
        self.own.reported()
    }

    fn event(&mut self) -> Option<AdapterEvent> {
        self.own.event()
    }
}

/// The agent's thread and the other direction's calls wait for the queue pair's lock meanwhile.
#[test]
fn a_send_returns_although_the_peer_makes_room_all_the_time() {
    let fabric = Fabric::new(1);
    let sizes = VerbsSettings::default().sizes;
    let mut peer_adapter = fabric.adapter(1);
    let mut adapter = PromptlyRead {
        own: fabric.adapter(0),
        fabric: fabric.clone(),
        peer: None,
    };
    let near = HalfPair::open(&mut adapter, sizes).unwrap();
    let far = HalfPair::open(&mut peer_adapter, sizes).unwrap();
    let (here, there) = (near.address(), far.address());
    let far = far.connect(&mut peer_adapter, &here).unwrap();
    let near = near.connect(&mut adapter, &there).unwrap();
    let far = Arc::new(SharedPair::new(far, peer_adapter, Default::default()));
    adapter.peer = Some(far.clone());
    let near = SharedPair::new(near, adapter, Default::default());
    near.make_event().unwrap();
    let carrier = PairCarrier::new(Arc::new(near)).unwrap();
    let data = vec![7; 64 << 20];
    let ring = sizes.shape.ring() as usize;
    let mut sent = 0;
    while sent < data.len() {
        let n = carrier.send(&[IoSlice::new(&data[sent..])]).unwrap();
        assert!((1..=4 * ring).contains(&n), "{n} bytes in one call");
        sent += n;
    }
}
