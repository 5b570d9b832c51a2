//! A reliable connected queue pair of verbs as the transport of a SLIM flow.
//!
//! This crate is the data half: it decides which work to post, and what each completion means; and it is how two processes agree on a queue pair
//! ([`agreement`]). An adapter is whatever implements
//! [`Verbs`]: those of libibverbs ([`ibverbs`]), and some in memory for tests ([`in_memory`]).
//! `docs/VERBS.md` has the design and the reasons.
//!
//! Each side has a ring of registered memory, into which the peer writes the bytes of the stream by RDMA WRITE with immediate data. The
//! immediate data has the counters of the sender: bytes that its software has recorded, and space that is free again.
//!
//! ```
//! use slim_rdma::in_memory::Fabric;
//! use slim_rdma::{HalfPair, PairSizes, RingShape};
//!
//! let fabric = Fabric::new(1);
//! let (mut here, mut there) = (fabric.adapter(0), fabric.adapter(1));
//! let sizes = PairSizes {
//!     shape: RingShape::new(4096, 16).unwrap(),
//!     depth: 16,
//!     staging: 4096,
//!     inline: 64,
//!     message: 1024,
//! };
//! let near = HalfPair::open(&mut here, sizes)?;
//! let far = HalfPair::open(&mut there, sizes)?;
//! // Each side tells the other its address.
//! let (a, b) = (near.address(), far.address());
//! let mut near = near.connect(&mut here, &b)?;
//! let mut far = far.connect(&mut there, &a)?;
//!
//! near.send(&mut here, b"hello").unwrap();
//! fabric.run();
//! let mut buf = [0; 5];
//! far.recv(&mut there, &mut buf).unwrap();
//! assert_eq!(&buf, b"hello");
//!
//! // The adapters have the bytes, and so has the peer's software. But it has not said so yet.
//! assert_eq!(near.recorded_by_peer(), 0);
//! far.tell_count(&mut there);
//! fabric.run();
//! near.progress(&mut here);
//! assert_eq!(near.recorded_by_peer(), 5);
//! # Ok::<(), slim_rdma::VerbsError>(())
//! ```
//!
//! # Map
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`agreement`] | how two processes agree on a queue pair by datagrams |
//! | `half_pair` | [`HalfPair`]: a queue pair before it is connected |
//! | `queue_pair` | [`QueuePair`]: data calls, completions, suspension |
//! | [`ibverbs`] | adapters of libibverbs, loaded at run time |
//! | [`in_memory`] | a network of adapters in memory, for tests |
//! | `pieces` | [`Pieces`]: the bytes of one send, in several places |
//! | `reads` | RDMA READs that are posted, and those that are over |
//! | `regions` | the registered memory of one queue pair |
//! | `send_queue` | writes that are posted and not completed |
//! | `window` | [`SendWindow`], [`ReceiveWindow`]: room, slots, and what is owed to the peer |
//! | `immediate` | [`Immediate`]: 32 bits |
//! | `verbs` | [`Verbs`]: what an adapter has to do |
//! | `datagrams` | [`Datagrams`]: what a port's queue for datagrams has to do |
//! | `locator` | [`PortLocator`]: how that queue is reached |
//! | `address` | [`PairAddress`]: what each side tells the other |
//! | `sizes` | [`RingShape`], [`PairSizes`]: sizes of one side |

mod address;
pub mod agreement;
mod datagrams;
mod half_pair;
pub mod ibverbs;
mod immediate;
pub mod in_memory;
mod locator;
mod pieces;
mod queue_pair;
mod reads;
mod regions;
mod send_queue;
mod sizes;
mod verbs;
mod window;

pub use address::{ADDRESS_LEN, PairAddress, PathMtu, QpNumber, RemoteKey};
pub use datagrams::{DatagramSource, Datagrams, MAX_DATAGRAM, ReceivedDatagram};
pub use half_pair::HalfPair;
pub use immediate::Immediate;
pub use locator::{LOCATOR_LEN, PortLocator};
pub use pieces::Pieces;
pub use queue_pair::{Break, PairError, QueuePair};
pub use reads::ReadOver;
pub use sizes::{MAX_RING, MAX_SLOTS, PairSizes, RingShape};
pub use verbs::{
    Access, AdapterEvent, Completed, Completion, CreatedPair, LocalKey, Payload, ReadWork,
    RegionId, Verbs, VerbsError, WorkError, WriteWork,
};
pub use window::{ReceiveWindow, SendWindow, Violation};
