//! Datagrams to neighbours that may not answer.
//!
//! Before a datagram is sent to a port of RoCE, the kernel resolves the port's hardware address. If the neighbour is unknown and silent, that call takes a second
//! or more. So threads of this module make it, and the agent goes on.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use slim_rdma::ibverbs::{DatagramWay, DatagramWays, VerbsDatagrams};
use slim_rdma::{Datagrams, PortLocator, ReceivedDatagram, VerbsError};
use slim_sys::{SignalsBlocked, as_agent, stack_size};

/// Most threads of a port. Each waits for one neighbour at a time.
const FINDERS: usize = 4;
/// Most of them that wait for neighbours that have not been found before: one is left for those that have.
const FOR_STRANGERS: usize = FINDERS - 1;
/// Most datagrams that wait, to all ports together. One neighbour gets no more than are left for others.
const MOST_WAITING: usize = 256;
/// Most neighbours that are remembered, found or not.
const MOST_KNOWN: usize = 1024;
/// A failure is reported to the next sender to that port, unless it is older.
const FAILURE_AGE: Duration = Duration::from_secs(1);
/// Room on the stack of a thread.
const STACK: usize = 128 << 10;

/// In a child of a fork, threads that do not exist there may hold the locks.
const NOT_OURS: VerbsError = VerbsError {
    call: "queue for datagrams of another process",
    errno: libc::EPERM,
};

/// Finds ways to other ports, in any thread.
pub(crate) trait FindWays: Send + Sync + 'static {
    type Way;

    /// Whether [`find`](Self::find) may wait.
    fn may_wait(&self) -> bool;

    /// Whether the calling process is no child of a fork of the one that has opened the port.
    fn is_own(&self) -> bool;

    fn find(&self, to: &PortLocator) -> Result<Self::Way, VerbsError>;
}

/// A queue for datagrams to which the ways are given.
pub(crate) trait SendBy<W>: Datagrams + Send + 'static {
    fn send_by(&mut self, way: W, bytes: &[u8]) -> Result<(), VerbsError>;
}

impl FindWays for DatagramWays {
    type Way = DatagramWay;

    fn may_wait(&self) -> bool {
        self.may_wait()
    }

    fn is_own(&self) -> bool {
        self.is_own()
    }

    fn find(&self, to: &PortLocator) -> Result<DatagramWay, VerbsError> {
        self.find(to)
    }
}

impl SendBy<DatagramWay> for VerbsDatagrams {
    fn send_by(&mut self, way: DatagramWay, bytes: &[u8]) -> Result<(), VerbsError> {
        self.send_by(way, bytes)
    }
}

/// What is looked for: the global identifier of a port, and a partition. The processes of a host have queues of their own behind it.
type RoceNeighbour = ([u8; 16], u16);

fn neighbour(of: &PortLocator) -> RoceNeighbour {
    (of.gid, of.partition)
}

/// What the threads are to do.
#[derive(Default)]
struct Errands {
    /// By neighbour: the datagrams to its ports, in their order. A neighbour is here until its last one has been sent.
    letters: BTreeMap<RoceNeighbour, VecDeque<(PortLocator, Vec<u8>)>>,
    /// The neighbours of `letters` of which no thread takes care: those that were found when they were looked for last, those that have not been looked
    /// for, and those that were not found.
    unattended: [VecDeque<RoceNeighbour>; 3],
    /// Whether neighbours were found when they were looked for last.
    known: BTreeMap<RoceNeighbour, bool>,
    /// Threads that take care of neighbours that may not answer.
    with_strangers: usize,
    /// The ports to which no datagram could be sent.
    failures: BTreeMap<PortLocator, (Instant, VerbsError)>,
    /// Threads that wait for work.
    idle: usize,
    over: bool,
}

impl Errands {
    /// Why the last datagram to this port was not sent. It is told once.
    fn failure(&mut self, to: &PortLocator) -> Option<VerbsError> {
        self.failures
            .retain(|_, (at, _)| at.elapsed() < FAILURE_AGE);
        self.failures.remove(to).map(|(_, e)| e)
    }

    /// Whether it was added. The same datagram to the same port waits once.
    fn add(&mut self, to: &PortLocator, bytes: &[u8]) -> bool {
        let waiting: usize = self.letters.values().map(VecDeque::len).sum();
        let there = neighbour(to);
        let same = self.letters.get(&there);
        let is_same = |(port, letter): &(PortLocator, Vec<u8>)| port == to && letter == bytes;
        if same.is_some_and(|letters| letters.iter().any(is_same)) {
            return true;
        }
        if same.map_or(0, VecDeque::len) + waiting >= MOST_WAITING {
            return false;
        }
        if same.is_none() {
            let class = match self.known.get(&there) {
                Some(true) => 0,
                None => 1,
                Some(false) => 2,
            };
            self.unattended[class].push_back(there);
        }
        let letters = self.letters.entry(there).or_default();
        letters.push_back((*to, bytes.into()));
        true
    }

    /// The neighbour of which a thread is to take care next, and whether it is a stranger.
    fn next(&mut self) -> Option<(RoceNeighbour, bool)> {
        let [found, new, silent] = &mut self.unattended;
        if let Some(there) = found.pop_front() {
            return Some((there, false));
        }
        if self.with_strangers >= FOR_STRANGERS {
            return None;
        }
        let there = new.pop_front().or_else(|| silent.pop_front())?;
        self.with_strangers += 1;
        Some((there, true))
    }

    /// A datagram was sent, or was not. That there is no way says the same of the others; a queue that is full says nothing, and the datagram is lost.
    fn note(&mut self, there: RoceNeighbour, sent: Result<(), VerbsError>) {
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        match sent {
            Err(e) if e.errno != libc::ENOBUFS => {
                self.known.insert(there, false);
                let failed = self.letters.remove(&there).into_iter().flatten();
                let now = Instant::now();
                self.failures.extend(failed.map(|(to, _)| (to, (now, e))));
            }
            _ => {
                self.known.insert(there, true);
                if let Some(letters) = self.letters.get_mut(&there) {
                    letters.pop_front();
                }
            }
        }
    }
}

struct MailShared<F, D> {
    ways: F,
    queue: Mutex<D>,
    errands: Mutex<Errands>,
    work: Condvar,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<F: FindWays, D: SendBy<F::Way>> MailShared<F, D> {
    fn send_now(&self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        let way = self.ways.find(to)?;
        locked(&self.queue).send_by(way, bytes)
    }

    /// A thread.
    fn run(&self) {
        let mut errands = locked(&self.errands);
        loop {
            if errands.over {
                return;
            }
            let Some((there, is_stranger)) = errands.next() else {
                errands.idle += 1;
                errands = self
                    .work
                    .wait(errands)
                    .unwrap_or_else(PoisonError::into_inner);
                errands.idle -= 1;
                continue;
            };
            while let Some((to, bytes)) =
                errands.letters.get(&there).and_then(|l| l.front()).cloned()
            {
                drop(errands);
                // Whatever happens, the neighbour must not stay without anybody who takes care of it.
                let sent = panic::catch_unwind(AssertUnwindSafe(|| self.send_now(&to, &bytes)));
                errands = locked(&self.errands);
                let sent = sent.unwrap_or(Err(VerbsError::new("way to a port", libc::EIO)));
                errands.note(there, sent);
                if errands.over {
                    return;
                }
            }
            errands.letters.remove(&there);
            errands.with_strangers -= usize::from(is_stranger);
        }
    }
}

/// A queue for datagrams that never waits for a neighbour. That a datagram could not be sent is the result of the next try to send one to that port.
pub(crate) struct PatientMail<F: FindWays, D: SendBy<F::Way>> {
    shared: Arc<MailShared<F, D>>,
    locator: PortLocator,
    threads: Vec<JoinHandle<()>>,
    /// Most threads.
    most: usize,
}

impl PatientMail<DatagramWays, VerbsDatagrams> {
    pub(crate) fn new(queue: VerbsDatagrams) -> Self {
        Self::of(queue.ways(), queue)
    }
}

impl<F: FindWays, D: SendBy<F::Way>> PatientMail<F, D> {
    fn of(ways: F, queue: D) -> Self {
        PatientMail {
            locator: queue.locator(),
            shared: Arc::new(MailShared {
                ways,
                queue: Mutex::new(queue),
                errands: Mutex::default(),
                work: Condvar::new(),
            }),
            threads: Vec::new(),
            most: FINDERS,
        }
    }

    fn start_thread(&mut self) {
        let shared = self.shared.clone();
        // The program's signal handlers must not run in it.
        let blocked = SignalsBlocked::new();
        let started = Builder::new()
            .name("slim-verbs".to_owned())
            .stack_size(stack_size(STACK))
            .spawn(move || as_agent(|| shared.run()));
        drop(blocked);
        self.threads.extend(started);
    }
}

impl<F: FindWays, D: SendBy<F::Way>> Datagrams for PatientMail<F, D> {
    fn locator(&self) -> PortLocator {
        self.locator
    }

    fn send(&mut self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        if !self.shared.ways.is_own() {
            return Err(NOT_OURS);
        }
        if !self.shared.ways.may_wait() {
            return self.shared.send_now(to, bytes);
        }
        let is_thread_missing = {
            let mut errands = locked(&self.shared.errands);
            if let Some(e) = errands.failure(to) {
                return Err(e);
            }
            if !errands.add(to, bytes) {
                return Err(VerbsError::new("datagrams that wait", libc::ENOBUFS));
            }
            errands.idle < errands.unattended.iter().map(VecDeque::len).sum()
        };
        if is_thread_missing && self.threads.len() < self.most {
            self.start_thread();
        }
        if self.threads.is_empty() {
            // The process may have no more threads.
            *locked(&self.shared.errands) = Errands::default();
            return self.shared.send_now(to, bytes);
        }
        self.shared.work.notify_one();
        Ok(())
    }

    fn receive(&mut self) -> Option<ReceivedDatagram> {
        let is_own = self.shared.ways.is_own();
        is_own.then(|| locked(&self.shared.queue).receive())?
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        match self.shared.ways.is_own() {
            true => locked(&self.shared.queue).arm(),
            false => Err(NOT_OURS),
        }
    }

    fn is_broken(&self) -> bool {
        !self.shared.ways.is_own() || locked(&self.shared.queue).is_broken()
    }
}

impl<F: FindWays, D: SendBy<F::Way>> Drop for PatientMail<F, D> {
    fn drop(&mut self) {
        if !self.shared.ways.is_own() {
            // The threads are the parent's.
            return mem::take(&mut self.threads)
                .into_iter()
                .for_each(mem::forget);
        }
        locked(&self.shared.errands).over = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
