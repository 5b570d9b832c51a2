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
//! - Datagrams arrive in the order that the test chooses, once, twice or never.
//! - A completion is seen some time after its cause, or, if the test wants that, never.

mod adapter;
mod bell;
mod mail;
mod memory;
mod pairs;
mod ports;
mod steps;

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use adapter::MemoryAdapter;
pub use mail::MemoryDatagrams;
pub use steps::Step;

use crate::address::QpNumber;
use crate::verbs::AdapterEvent;
use bell::Bell;
use mail::Mail;
use memory::Memories;
use pairs::Packets;

/// The network. Clones are the same network.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<Mutex<FabricState>>);

/// Hosts from and to which no packet comes.
#[derive(Debug)]
pub(crate) struct Cuts {
    is_silent: fn(usize) -> bool,
    without_link: BTreeSet<usize>,
}

impl Default for Cuts {
    fn default() -> Self {
        Cuts {
            is_silent: |_| false,
            without_link: BTreeSet::new(),
        }
    }
}

impl Cuts {
    fn has(&self, host: usize) -> bool {
        (self.is_silent)(host) || self.without_link.contains(&host)
    }
}

#[derive(Debug)]
pub(crate) struct FabricState {
    memories: Memories,
    packets: Packets,
    mail: Mail,
    tallies: Tallies,
    /// Of armed queue pairs and of adapters, with their hosts.
    reports: VecDeque<(usize, QpNumber)>,
    events: VecDeque<(usize, AdapterEvent)>,
    /// Grows with each step that has changed something.
    moves: u64,
    /// Most bytes of a write that the adapters take by value.
    most_inline: usize,
    /// Most queue pairs.
    most_pairs: usize,
    /// Sabotage, to check that tests notice: invalidating a region has no effect.
    keeps_keys: bool,
    cuts: Cuts,
    /// Each completion with a multiple of this number is lost.
    loses_each: Option<NonZeroU64>,
    revealed: u64,
    /// What rings when an adapter has something to report, with its host.
    report_bells: Vec<(usize, Bell)>,
    /// What rings when there may be steps to take.
    work_bell: Option<Bell>,
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
    /// Datagrams that were taken into a queue.
    pub delivered: u64,
    /// Datagrams that no queue took: it has gone or is full, or their key was wrong.
    pub undelivered: u64,
}

impl Fabric {
    /// A network without queue pairs. `seed` chooses the numbers of first packets.
    pub fn new(seed: u64) -> Self {
        Fabric(Arc::new(Mutex::new(FabricState {
            memories: Memories::default(),
            packets: Packets::new(seed),
            mail: Mail::default(),
            tallies: Tallies::default(),
            reports: VecDeque::new(),
            events: VecDeque::new(),
            moves: 0,
            most_inline: usize::MAX,
            most_pairs: usize::MAX,
            keeps_keys: false,
            cuts: Cuts::default(),
            loses_each: None,
            revealed: 0,
            report_bells: Vec::new(),
            work_bell: None,
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
        let mut state = self.state();
        state.events.push_back((host, event));
        state.ring_for_report(host);
    }

    /// Has `ring` called when the adapter of this host has something to report ([`Verbs::reported`](crate::Verbs::reported),
    /// [`Verbs::event`](crate::Verbs::event)). It must not use the network itself.
    pub fn on_report(&self, host: usize, ring: impl Fn() + Send + Sync + 'static) {
        self.state().report_bells.push((host, Bell::new(ring)));
    }

    /// Has `ring` called when an adapter was given work, so that there may be steps to take. It must not use the network itself.
    pub fn on_work(&self, ring: impl Fn() + Send + Sync + 'static) {
        self.state().work_bell = Some(Bell::new(ring));
    }

    /// The queue pairs that there are, with their hosts.
    pub fn pairs(&self) -> Vec<(usize, QpNumber)> {
        let state = self.state();
        let pairs = state.packets.pairs.iter();
        pairs.map(|(number, pair)| (pair.host, *number)).collect()
    }

    /// Whether no queue pair, queue for datagrams or region is left.
    pub fn is_empty(&self) -> bool {
        let state = self.state();
        state.packets.pairs.is_empty() && state.mail.is_empty() && state.memories.is_empty()
    }

    /// Queue pairs that are made from now on take at most so many bytes by value, whatever is wanted.
    pub fn limit_inline(&self, most: usize) {
        self.state().most_inline = most;
    }

    /// No queue pair is made while there are so many.
    pub fn limit_pairs(&self, most: usize) {
        self.state().most_pairs = most;
    }

    /// From now on all packets from and to the hosts of which this is true are lost when they would arrive.
    pub fn silence(&self, is_silent: fn(usize) -> bool) {
        let mut state = self.state();
        state.cuts.is_silent = is_silent;
        state.ring_for_work();
    }

    /// The link of a host's port goes or comes: the adapter reports it, and no packet from or to a host without link arrives.
    pub fn set_link(&self, host: usize, up: bool) {
        let mut state = self.state();
        let event = match up {
            true => AdapterEvent::PortUp,
            false => AdapterEvent::PortDown,
        };
        match up {
            true => state.cuts.without_link.remove(&host),
            false => state.cuts.without_link.insert(host),
        };
        state.events.push_back((host, event));
        state.ring_for_report(host);
        state.ring_for_work();
    }

    /// From now on one completion in so many is lost, or none.
    pub fn lose_completions(&self, each: Option<NonZeroU64>) {
        self.state().loses_each = each;
    }

    /// From now on, invalidating a region has no effect.
    pub fn keep_keys(&self) {
        self.state().keeps_keys = true;
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, FabricState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FabricState {
    fn ring_for_report(&self, host: usize) {
        let bells = self.report_bells.iter().filter(|(of, _)| *of == host);
        bells.for_each(|(_, bell)| bell.ring());
    }

    fn ring_for_work(&self) {
        self.work_bell.iter().for_each(Bell::ring);
    }
}
