//! A network of adapters in memory, for tests.
//!
//! Nothing happens by itself: a test carries out one [`Step`] after the other, in an order of its own, or all of them
//! ([`Fabric::run`]). The network is as unkind as verbs allow:
//!
//! - The adapter reads staged bytes when the message arrives, so bytes that are overwritten too early arrive wrong.
//! - A message that the peer's adapter has accepted is placed in memory later, even if its queue pair has failed or is destroyed by then.
//!   Only [`invalidate`](crate::Verbs::invalidate) puts an end to that.
//! - Memory that was released is registered again for the next region of its size, and numbers of queue pairs and keys are used again.
//! - Packets of a queue pair that has failed stay on their way. The peer's queue pair does not notice the failure.
//! - A completion is seen some time after its cause, or, if the test wants that, never.

mod adapter;
mod memory;
mod pairs;
mod steps;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use adapter::MemoryAdapter;
pub use steps::Step;

use crate::address::QpNumber;
use crate::verbs::AdapterEvent;
use memory::Memories;
use pairs::Packets;

/// The network. Clones are the same network.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<Mutex<FabricState>>);

#[derive(Debug)]
pub(crate) struct FabricState {
    memories: Memories,
    packets: Packets,
    tallies: Tallies,
    /// Of armed queue pairs and of adapters, with their hosts.
    reports: VecDeque<(usize, QpNumber)>,
    events: VecDeque<(usize, AdapterEvent)>,
    /// Grows with each step that has changed something.
    moves: u64,
    /// Most bytes of a write that the adapters take by value.
    most_inline: usize,
    /// Sabotage, to check that tests notice: invalidating a region has no effect.
    keeps_keys: bool,
}

/// What has happened in a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tallies {
    /// Messages that were placed in memory.
    pub placed: u64,
    /// Messages that found no receive posted. The protocol rules that out.
    pub not_ready: u64,
    /// Messages that were dropped because their queue pair has gone or is another one by now.
    pub strayed: u64,
    /// Messages that were refused because of their key or address.
    pub refused: u64,
    /// Messages that an adapter had accepted, and that were not placed because their region was invalidated.
    pub fenced: u64,
    /// Messages of failed queue pairs that arrived all the same.
    pub late: u64,
    /// Writes whose bytes were passed by value.
    pub inline: u64,
    /// Writes whose bytes the adapter reads from a region.
    pub staged: u64,
}

impl Fabric {
    /// A network without queue pairs. `seed` chooses the numbers of first packets.
    pub fn new(seed: u64) -> Self {
        Fabric(Arc::new(Mutex::new(FabricState {
            memories: Memories::default(),
            packets: Packets::new(seed),
            tallies: Tallies::default(),
            reports: VecDeque::new(),
            events: VecDeque::new(),
            moves: 0,
            most_inline: usize::MAX,
            keeps_keys: false,
        })))
    }

    /// The adapter of a host.
    pub fn adapter(&self, host: usize) -> MemoryAdapter {
        MemoryAdapter::new(self.clone(), host)
    }

    /// What has happened so far.
    pub fn tallies(&self) -> Tallies {
        self.state().tallies
    }

    /// The adapter of a host reports an event.
    pub fn report(&self, host: usize, event: AdapterEvent) {
        self.state().events.push_back((host, event));
    }

    /// Whether no queue pair and no region is left.
    pub fn is_empty(&self) -> bool {
        let state = self.state();
        state.packets.pairs.is_empty() && state.memories.is_empty()
    }

    /// Queue pairs that are made from now on take at most so many bytes by value, whatever is wanted.
    pub fn limit_inline(&self, most: usize) {
        self.state().most_inline = most;
    }

    /// From now on, invalidating a region has no effect.
    pub fn keep_keys(&self) {
        self.state().keeps_keys = true;
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FabricState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
