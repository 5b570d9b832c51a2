//! Long messages without a copy: `ob1` reads them out of the sender's memory (`btl_get`), by RDMA READs over the queue pairs that carry the rails.
//!
//! ```text
//!   sender                                receiver
//!   register its memory, RGET ─────────►  register its memory, get: READs ──► done: FIN ──► both requests are complete
//!                                                       └── a queue pair breaks: nothing more is placed; ob1 has the sender send all bytes
//! ```
//!
//! The sender's memory stays as it is until the receiver says that it has the bytes, so it does not matter how often they are read. A get is
//! carried out or has failed as a whole, since `ob1` cannot have a part of a message sent.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use slim_rdma::{PairError, ReadOver};
use slim_verbs::{MemoryAtPorts, MemoryKeys, PairReads};

use crate::endpoint::BtlEndpoint;
use crate::frag::SUCCESS;

/// Most bytes of one READ. Messages behind it wait for it.
const PIECE: u64 = 1 << 20;

/// `OPAL_ERROR`: the message is to be sent another way.
const FAILED: c_int = -1;

/// `mca_btl_base_rdma_completion_fn_t`: module, endpoint, local address, local handle, context, data, status.
pub type GetCompletionFn = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    *mut c_void,
    status: c_int,
);

/// What Open MPI wants to be told when a get is over.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GetCallback {
    /// The function.
    pub call: GetCompletionFn,
    /// The receiver's first byte.
    pub local: *mut c_void,
    /// Its registration.
    pub handle: *mut c_void,
    /// Two values that are passed on.
    pub context: *mut c_void,
    /// The second one.
    pub data: *mut c_void,
}

// SAFETY: the pointers are only passed on.
unsafe impl Send for GetCallback {}

/// The bytes of a get.
pub struct GetBytes<'a> {
    /// Address of the first one at the sender, and the keys of that memory.
    pub from: (u64, MemoryKeys),
    /// Address of the first one here, and this memory; `None`: it could not be registered.
    pub into: (u64, Option<&'a MemoryAtPorts>),
    /// Their number.
    pub len: u64,
}

/// A get that is not over.
struct Get {
    number: u64,
    endpoint: Arc<BtlEndpoint>,
    callback: GetCallback,
    ways: Vec<GetWay>,
    /// The way that the next piece is offered to first.
    turn: usize,
    len: u64,
    /// Bytes for which READs were posted.
    asked: u64,
    /// READs on their way.
    pieces: usize,
    failed: bool,
}

/// A queue pair over which a get can be carried out.
struct GetWay {
    reads: PairReads,
    from: slim_rdma::RemoteKey,
    into: slim_rdma::LocalKey,
}

impl Get {
    fn new(
        number: u64,
        endpoint: &Arc<BtlEndpoint>,
        callback: GetCallback,
        bytes: &GetBytes<'_>,
    ) -> Self {
        let mut ways = Vec::new();
        for carrier in endpoint.carriers() {
            let Some(reads) = PairReads::of(carrier) else {
                continue;
            };
            let [own, peer] = reads.ports();
            let (addr, keys) = &bytes.from;
            let from = keys.at(peer, *addr);
            let (addr, memory) = bytes.into;
            let into = memory.and_then(|memory| memory.at(own, addr));
            if let (Some(from), Some(into)) = (from, into) {
                ways.push(GetWay { reads, from, into });
            }
        }
        Get {
            number,
            endpoint: endpoint.clone(),
            callback,
            failed: ways.is_empty(),
            ways,
            turn: 0,
            len: bytes.len,
            asked: 0,
            pieces: 0,
        }
    }

    /// Posts as many READs as the queue pairs take.
    fn ask(&mut self) {
        let mut full = 0;
        while !self.failed && self.asked < self.len && full < self.ways.len() {
            self.turn = (self.turn + 1) % self.ways.len();
            let way = &self.ways[self.turn];
            let (mut from, mut into) = (way.from, way.into);
            from.addr += self.asked;
            into.addr += self.asked;
            let len = (self.len - self.asked).min(PIECE);
            match way.reads.read(self.number, from, into, len as u32) {
                Ok(()) => {
                    self.asked += len;
                    self.pieces += 1;
                    full = 0;
                }
                Err(PairError::WouldBlock) => full += 1,
                Err(_) => self.failed = true,
            }
        }
    }

    /// Nothing is on its way, and nothing more will be.
    fn is_over(&self) -> bool {
        self.pieces == 0 && (self.failed || self.asked == self.len)
    }

    fn status(&self) -> c_int {
        match self.failed {
            true => FAILED,
            false => SUCCESS,
        }
    }
}

/// What became of the gets so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GetTallies {
    /// Carried out, with their bytes.
    pub(crate) done: u64,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
}

impl fmt::Display for GetTallies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GetTallies {
            done,
            bytes,
            failed,
        } = self;
        write!(
            f,
            "long messages read out of the memory of peers: {done} ({bytes} bytes); sent because a read failed: {failed}"
        )
    }
}

#[derive(Default)]
struct GetQueue {
    gets: Vec<Get>,
    count: u64,
    tallies: GetTallies,
}

/// The gets of a process.
#[derive(Default)]
pub(crate) struct Gets {
    queue: Mutex<GetQueue>,
    /// Gets in the queue, so that progress need not lock it.
    left: AtomicUsize,
}

impl Gets {
    fn queue(&self) -> MutexGuard<'_, GetQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a get. Its callback comes from a later [`progress`](Self::progress).
    pub(crate) fn begin(
        &self,
        endpoint: &Arc<BtlEndpoint>,
        callback: GetCallback,
        bytes: &GetBytes<'_>,
    ) {
        let mut queue = self.queue();
        queue.count += 1;
        let mut get = Get::new(queue.count, endpoint, callback, bytes);
        get.ask();
        queue.gets.push(get);
        self.left.store(queue.gets.len(), Ordering::Release);
    }

    /// Goes on with all gets, and calls back for those that are over, unless Open MPI must not `hear` of the peer. Returns their number.
    pub(crate) fn progress(
        &self,
        module: *mut c_void,
        hears: impl Fn(&Arc<BtlEndpoint>) -> bool,
    ) -> usize {
        if self.left.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut queue = match self.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(queue)) => queue.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        let over = queue.take_over();
        self.left.store(queue.gets.len(), Ordering::Release);
        drop(queue);
        let count = over.len();
        for get in over.iter().filter(|get| hears(&get.endpoint)) {
            let GetCallback {
                call,
                local,
                handle,
                context,
                data,
            } = get.callback;
            let endpoint = Arc::as_ptr(&get.endpoint).cast_mut().cast();
            // SAFETY: all are Open MPI's own pointers, and no lock is held.
            unsafe { call(module, endpoint, local, handle, context, data, get.status()) };
        }
        count
    }

    /// The peer is lost, or Open MPI has let go of it: its gets end without a callback, and nothing more is placed.
    pub(crate) fn forget(&self, endpoint: &Arc<BtlEndpoint>) {
        let mut queue = self.queue();
        let is_its = |get: &mut Get| Arc::ptr_eq(&get.endpoint, endpoint);
        let forgotten: Vec<Get> = queue.gets.extract_if(.., is_its).collect();
        self.left.store(queue.gets.len(), Ordering::Release);
        drop(queue);
        for get in forgotten.iter().filter(|get| get.pieces > 0) {
            get.ways.iter().for_each(|way| way.reads.abandon());
        }
    }

    pub(crate) fn tallies(&self) -> GetTallies {
        self.queue().tallies
    }
}

impl GetQueue {
    /// Looks at what has come, posts what there is room for, and takes the gets that are over.
    fn take_over(&mut self) -> Vec<Get> {
        let mut looked: Vec<&PairReads> = Vec::new();
        let mut over: Vec<ReadOver> = Vec::new();
        for way in self.gets.iter().flat_map(|get| &get.ways) {
            if !looked.iter().any(|reads| reads.is(&way.reads)) {
                way.reads.poll(&mut over);
                looked.push(&way.reads);
            }
        }
        for ReadOver { number, done } in over {
            if let Some(get) = self.gets.iter_mut().find(|get| get.number == number) {
                get.pieces -= 1;
                get.failed |= !done;
            }
        }
        self.gets.iter_mut().for_each(Get::ask);
        let over: Vec<Get> = self.gets.extract_if(.., |get| get.is_over()).collect();
        for get in &over {
            match get.failed {
                true => self.tallies.failed += 1,
                false => {
                    self.tallies.done += 1;
                    self.tallies.bytes += get.len;
                }
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::proc::ProcName;

    unsafe extern "C" fn told(
        _: *mut c_void,
        _: *mut c_void,
        _: *mut c_void,
        _: *mut c_void,
        _: *mut c_void,
        data: *mut c_void,
        status: c_int,
    ) {
        // SAFETY: the test hands its list in.
        unsafe { (*data.cast::<Vec<c_int>>()).push(status) };
    }

    /// The statuses that Open MPI is told of a get from a peer without a queue pair.
    fn statuses(meanwhile: impl FnOnce(&Gets, &Arc<BtlEndpoint>), hears: bool) -> Vec<c_int> {
        let (gets, endpoint) = (Gets::default(), Arc::new(BtlEndpoint::new(ProcName(3))));
        let mut statuses = Vec::<c_int>::new();
        let callback = GetCallback {
            call: told,
            local: ptr::null_mut(),
            handle: ptr::null_mut(),
            context: ptr::null_mut(),
            data: (&raw mut statuses).cast(),
        };
        let bytes = GetBytes {
            from: (0, MemoryKeys::from_bytes([0; slim_verbs::KEYS_LEN])),
            into: (0, None),
            len: 1 << 20,
        };
        gets.begin(&endpoint, callback, &bytes);
        meanwhile(&gets, &endpoint);
        for _ in 0..2 {
            gets.progress(ptr::null_mut(), |_| hears);
        }
        statuses
    }

    #[test]
    fn a_get_without_a_queue_pair_fails_in_progress_and_once() {
        assert_eq!(statuses(|_, _| {}, true), [FAILED]);
    }

    #[test]
    fn open_mpi_is_told_nothing_of_a_peer_that_it_must_not_hear_of() {
        assert!(statuses(|_, _| {}, false).is_empty());
        assert!(statuses(|gets, peer| gets.forget(peer), true).is_empty());
    }
}
