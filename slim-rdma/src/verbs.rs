//! What the transport requires of an adapter.
//!
//! The methods are those of libibverbs, as far as a reliable connected queue pair needs them. None of them blocks. Each queue pair has a
//! completion queue of its own, which has room for the completions of all its posted work: it cannot overrun, and threads that use
//! different flows share no lock.

use crate::address::{PairAddress, QpNumber, RemoteKey};
use crate::sizes::PairSizes;

/// Name of a region of memory at its own process; never given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

/// Who may write to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only this process: the adapter reads it.
    Local,
    /// The peer, too.
    Remote,
    /// Only this process; the peer may read it.
    Readable,
    /// This process, and its own adapter: the bytes of an RDMA READ.
    Sink,
}

/// Bytes of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Copied by the call.
    Inline(&'a [u8]),
    /// The adapter reads them at any time until the work has completed, and perhaps more than once.
    Staged {
        /// Where they are.
        region: RegionId,
        /// Offset of the first byte.
        at: usize,
        /// Number of bytes.
        len: usize,
    },
}

/// An RDMA WRITE to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteWork<'a> {
    /// Comes back with the completion.
    pub id: u64,
    /// What is written.
    pub payload: Payload<'a>,
    /// Where it is written.
    pub to: RemoteKey,
    /// Immediate data; a write with immediate data takes a receive of the peer. A write without it goes unnoticed there.
    pub immediate: Option<u32>,
    /// A completion is wanted even if all goes well.
    pub signaled: bool,
}

/// A place in registered memory of this process, as its own adapter knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalKey {
    /// Address of the first byte.
    pub addr: u64,
    /// Key of the region.
    pub key: u32,
}

/// An RDMA READ to be posted. It always reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadWork {
    /// Comes back with the completion.
    pub id: u64,
    /// The peer's bytes.
    pub from: RemoteKey,
    /// Where they are placed.
    pub into: LocalKey,
    /// Number of bytes.
    pub len: u32,
}

/// Why work has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkError {
    /// The peer's adapter has not answered. The data may have arrived all the same.
    RetryExceeded,
    /// The queue pair had failed before. The data may have arrived all the same.
    Flushed,
    /// The peer's adapter has refused the key or the address.
    RemoteAccess,
    /// It is no failure, but the completion of something that nobody has posted, or that a peer of this protocol does not send.
    Unexpected,
    /// Any other status of the adapter.
    Other(u32),
}

/// How work has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed {
    /// A receive: a write of the peer with immediate data. Its bytes are in memory.
    Received {
        /// Number of bytes.
        len: u32,
        /// The immediate data.
        immediate: u32,
    },
    /// A write: the peer's adapter has the bytes. Whether the peer's process ever sees them is open.
    Written,
    /// A read. Its bytes are in memory, if work that was posted after it completes without an error, too: soft RoCE, on a busy machine,
    /// reports a read as done without its bytes, and then fails the queue pair.
    Read,
    /// Work of either direction.
    Failed(WorkError),
}

/// One entry of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The number of the work.
    pub id: u64,
    /// How it has ended.
    pub how: Completed,
}

/// A queue pair that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreatedPair {
    /// Its number, and the path to it: everything of its address but the ring.
    pub address: PairAddress,
    /// Most bytes of a write that the adapter takes by value; perhaps fewer than were wanted.
    pub inline: usize,
}

/// What an adapter reports without being asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterEvent {
    /// A queue pair has failed.
    PairFailed(QpNumber),
    /// The port has no link.
    PortDown,
    /// The port has a link again.
    PortUp,
    /// The adapter is gone, with all its queue pairs.
    Removed,
}

/// The adapter could not do it: no memory, no more objects, or the queue pair is in the wrong state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerbsError {
    /// What has failed.
    pub call: &'static str,
    /// Why: a number of errno.
    pub errno: i32,
}

impl VerbsError {
    /// An error of this call.
    pub fn new(call: &'static str, errno: i32) -> Self {
        VerbsError { call, errno }
    }
}

impl std::fmt::Display for VerbsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let why = std::io::Error::from_raw_os_error(self.errno);
        write!(f, "{}: {why}", self.call)
    }
}

impl std::error::Error for VerbsError {}

/// An adapter's port, as a process has it open.
pub trait Verbs {
    /// Makes a region of `len` bytes.
    ///
    /// # Errors
    /// There is no memory for it, or too much is locked.
    fn register(&mut self, len: usize, access: Access) -> Result<RegionId, VerbsError>;

    /// What the peer needs to write to a region.
    fn remote_key(&self, region: RegionId) -> RemoteKey;

    /// What the own adapter needs to place the bytes of a read in a region.
    fn local_key(&self, region: RegionId) -> LocalKey;

    /// When this returns, no adapter reads or writes the region any more, whatever is still under way. Its bytes stay where they are.
    fn invalidate(&mut self, region: RegionId);

    /// Gives the memory of an invalidated region back.
    fn release(&mut self, region: RegionId);

    /// Copies bytes out of a region. The adapter does not write to these bytes meanwhile.
    fn read(&self, region: RegionId, at: usize, into: &mut [u8]);

    /// Copies bytes into a region. The adapter does not read these bytes meanwhile.
    fn write(&mut self, region: RegionId, at: usize, bytes: &[u8]);

    /// Makes a queue pair for writes and receives of these sizes.
    ///
    /// # Errors
    /// There are no more queue pairs, or the adapter has none of these sizes.
    fn create(&mut self, sizes: &PairSizes) -> Result<CreatedPair, VerbsError>;

    /// Connects the queue pair to the peer's. Receives may be posted before, writes only afterwards.
    ///
    /// # Errors
    /// The peer's address is of no use on this port.
    fn connect(&mut self, pair: QpNumber, peer: &PairAddress) -> Result<(), VerbsError>;

    /// Puts the queue pair into its error state: it sends nothing more, and all posted work completes with an error.
    fn fail(&mut self, pair: QpNumber);

    /// Destroys the queue pair. Completions that were not polled are lost.
    fn destroy(&mut self, pair: QpNumber);

    /// Posts a receive without memory: only immediate data comes this way. Receives are used in the order in which they were posted.
    ///
    /// # Errors
    /// The queue pair does not take it.
    fn post_receive(&mut self, pair: QpNumber, id: u64) -> Result<(), VerbsError>;

    /// Posts a write. Writes are carried out in order.
    ///
    /// # Errors
    /// The queue pair does not take it.
    fn post_write(&mut self, pair: QpNumber, work: &WriteWork<'_>) -> Result<(), VerbsError>;

    /// Posts a read. It is carried out in its turn among the writes. When the queue pair is destroyed, no more bytes of it are placed.
    ///
    /// # Errors
    /// The queue pair does not take it.
    fn post_read(&mut self, pair: QpNumber, work: &ReadWork) -> Result<(), VerbsError>;

    /// Takes the next completion of a queue pair. Completions of one direction come in the order of their work.
    fn poll(&mut self, pair: QpNumber) -> Option<Completion>;

    /// Asks for one report when the next completion of the queue pair comes. To be followed by a poll: a completion that has come before
    /// causes no report.
    ///
    /// # Errors
    /// The adapter cannot report completions any more.
    fn arm(&mut self, pair: QpNumber) -> Result<(), VerbsError>;

    /// A queue pair that was armed and has a completion.
    fn reported(&mut self) -> Option<QpNumber>;

    /// The next event of the adapter.
    fn event(&mut self) -> Option<AdapterEvent>;
}
