//! Queue pairs of an adapter in memory as a kind of transport for two agents of one process.
//!
//! The addresses of the queue pairs are exchanged in memory. A thread carries out what happens in the network.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use slim_agent::transport::{Connection, Listener, Provider, Wanted};
use slim_agent::{FlowIo, Transport, TransportRef};
use slim_core::transport::{Locator, OtherLocator, TransportKind};
use slim_rdma::in_memory::{Fabric, MemoryAdapter, Step};
use slim_rdma::{
    HalfPair, PairAddress, PairError, PairSizes, QpNumber, QueuePair, RingShape, Verbs,
};

use crate::common::memory::OtherEnd;

/// A connection that waits to be accepted.
struct PairCall {
    address: PairAddress,
    answer: Arc<Mutex<Answer>>,
}

#[derive(Default)]
struct Answer {
    address: Option<PairAddress>,
    waker: Option<Waker>,
}

/// The network, and the exchange of addresses.
pub struct PairNet {
    pub fabric: Fabric,
    waiting: [Mutex<(VecDeque<PairCall>, Option<Waker>)>; 2],
    wakers: Mutex<HashMap<QpNumber, Vec<Waker>>>,
    /// Connections that were accepted.
    pub made: AtomicU32,
    /// No connection can be made.
    pub down: AtomicBool,
}

impl PairNet {
    pub fn start() -> Arc<Self> {
        let net = Arc::new(PairNet {
            fabric: Fabric::new(1),
            waiting: Default::default(),
            wakers: Mutex::default(),
            made: AtomicU32::new(0),
            down: AtomicBool::new(false),
        });
        let weak = Arc::downgrade(&net);
        thread::spawn(move || {
            while let Some(net) = weak.upgrade() {
                net.fabric.run();
                for side in 0..2 {
                    while let Some(number) = net.fabric.adapter(side).reported() {
                        let wakers = net.wakers.lock().unwrap().remove(&number);
                        wakers.into_iter().flatten().for_each(Waker::wake);
                    }
                }
                drop(net);
                thread::sleep(Duration::from_micros(20));
            }
        });
        net
    }
}

fn sizes() -> PairSizes {
    PairSizes {
        // A message of a resume has up to 512 bytes.
        shape: RingShape::new(16 << 10, 16).unwrap(),
        depth: 8,
        staging: 8 << 10,
        inline: 64,
        message: 4 << 10,
    }
}

enum Stage {
    /// Waits for the peer's address.
    Half(HalfPair, Arc<Mutex<Answer>>),
    Up(QueuePair),
    Gone,
}

struct Held {
    stage: Stage,
    adapter: MemoryAdapter,
}

/// One end of a connection. Dropping it gives everything back.
pub struct PairEnd {
    net: Arc<PairNet>,
    held: Mutex<Held>,
}

impl PairEnd {
    fn new(net: &Arc<PairNet>, adapter: MemoryAdapter, stage: Stage) -> Self {
        PairEnd {
            net: net.clone(),
            held: Mutex::new(Held { stage, adapter }),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap()
    }

    /// Runs `f` with the connected queue pair.
    fn with<R>(&self, f: impl FnOnce(&mut QueuePair, &mut MemoryAdapter) -> R) -> Option<R> {
        let Held { stage, adapter } = &mut *self.held();
        match stage {
            Stage::Up(pair) => Some(f(pair, adapter)),
            _ => None,
        }
    }

    fn moved(moved: Option<Result<usize, PairError>>) -> io::Result<usize> {
        match moved {
            Some(Ok(n)) => Ok(n),
            Some(Err(PairError::WouldBlock)) => Err(io::ErrorKind::WouldBlock.into()),
            Some(Err(PairError::Ended)) => Err(io::ErrorKind::BrokenPipe.into()),
            Some(Err(PairError::Broken(_))) | None => Err(io::ErrorKind::ConnectionReset.into()),
        }
    }

    /// Ready if `ready` says so, also after everything that has come was taken; else at the next completion.
    fn poll(
        &self,
        context: &Context<'_>,
        ready: impl Fn(&QueuePair) -> bool,
    ) -> Poll<io::Result<()>> {
        let is_ready = self.with(|pair, adapter| {
            self.net
                .wakers
                .lock()
                .unwrap()
                .entry(pair.number())
                .or_default()
                .push(context.waker().clone());
            ready(pair) || !pair.arm(adapter) || ready(pair)
        });
        match is_ready {
            Some(false) => Poll::Pending,
            Some(true) | None => Poll::Ready(Ok(())),
        }
    }
}

impl Drop for PairEnd {
    fn drop(&mut self) {
        let Held { stage, adapter } = &mut *self.held();
        match std::mem::replace(stage, Stage::Gone) {
            Stage::Half(half, _) => half.abandon(adapter),
            Stage::Up(pair) => pair.release(adapter),
            Stage::Gone => {}
        }
    }
}

impl OtherEnd for PairEnd {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        Self::moved(self.with(|pair, adapter| {
            let got = pair.recv(adapter, buf);
            if got == Err(PairError::WouldBlock) {
                // Nothing more comes for the moment.
                pair.tell_count(adapter);
            }
            got
        }))
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        Self::moved(self.with(|pair, adapter| pair.send(adapter, data)))
    }

    fn unacked(&self) -> u64 {
        let unacked = self.with(|pair, adapter| {
            pair.progress(adapter);
            pair.sent() - pair.recorded_by_peer()
        });
        unacked.unwrap_or(u64::MAX)
    }

    /// The queue pair of this end fails. The peer does not notice.
    fn shut_down(&self) {
        if let Some(number) = self.with(|pair, _| pair.number()) {
            self.net.fabric.take(Step::Fail(number));
        }
    }

    fn kind(&self) -> TransportKind {
        TransportKind::VERBS
    }

    fn suspend(&self) {
        self.with(|pair, adapter| pair.suspend(adapter));
    }
}

impl Connection for PairEnd {
    fn poll_connected(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Held { stage, adapter } = &mut *self.held();
        let Stage::Half(_, answer) = stage else {
            return Poll::Ready(Ok(()));
        };
        let answer = answer.clone();
        let mut answer = answer.lock().unwrap();
        let Some(peer) = answer.address else {
            answer.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        if let Stage::Half(half, _) = std::mem::replace(stage, Stage::Gone) {
            let pair = half.connect(adapter, &peer).map_err(io::Error::other)?;
            *stage = Stage::Up(pair);
        }
        Poll::Ready(Ok(()))
    }

    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        OtherEnd::recv(self, buf)
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        OtherEnd::send(self, data)
    }

    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, |pair| {
            pair.unread() > 0 || pair.peer_has_ended() || pair.broken().is_some()
        })
    }

    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, QueuePair::can_send)
    }

    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()> {
        flow.prepare(TransportRef::Other(self as &dyn Any))
    }

    fn shut_write(&self) {
        self.with(|pair, adapter| pair.end(adapter));
    }

    fn flush(&self) {
        self.with(|pair, adapter| pair.tell_count(adapter));
    }

    fn into_transport(self: Box<Self>) -> Transport {
        Transport::Other(Box::new(self as Box<dyn OtherEnd>))
    }
}

/// One agent's side of a [`PairNet`].
#[derive(Clone)]
pub struct PairProvider {
    net: Arc<PairNet>,
    side: usize,
}

impl PairProvider {
    pub fn new(net: &Arc<PairNet>, side: usize) -> Self {
        let net = net.clone();
        PairProvider { net, side }
    }

    fn place(side: usize) -> OtherLocator {
        OtherLocator::new(TransportKind::VERBS, &[b'q', side as u8]).unwrap()
    }

    fn half(&self) -> io::Result<(HalfPair, MemoryAdapter)> {
        let mut adapter = self.net.fabric.adapter(self.side);
        let half = HalfPair::open(&mut adapter, sizes()).map_err(io::Error::other)?;
        Ok((half, adapter))
    }
}

impl Provider for PairProvider {
    fn kind(&self) -> TransportKind {
        TransportKind::VERBS
    }

    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let there = 1 - self.side;
        assert_eq!(wanted.path.to, Self::place(there).into());
        if self.net.down.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::NetworkUnreachable.into());
        }
        let (half, adapter) = self.half()?;
        let (address, answer) = (half.address(), Arc::<Mutex<Answer>>::default());
        let end = PairEnd::new(&self.net, adapter, Stage::Half(half, answer.clone()));
        if let Some(flow) = wanted.flow {
            flow.before_connect(TransportRef::Other(&end))?;
        }
        let (waiting, waker) = &mut *self.net.waiting[there].lock().unwrap();
        waiting.push_back(PairCall { address, answer });
        waker.take().into_iter().for_each(Waker::wake);
        Ok(Box::new(end))
    }

    fn listener(&self) -> io::Result<Option<Box<dyn Listener>>> {
        Ok(Some(Box::new(self.clone())))
    }
}

impl Listener for PairProvider {
    fn locator(&self) -> Option<OtherLocator> {
        Some(Self::place(self.side))
    }

    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)> {
        let call = self.net.waiting[self.side].lock().unwrap().0.pop_front();
        let call = call.ok_or(io::ErrorKind::WouldBlock)?;
        let (half, mut adapter) = self.half()?;
        let address = half.address();
        let pair = half
            .connect(&mut adapter, &call.address)
            .map_err(io::Error::other)?;
        let mut answer = call.answer.lock().unwrap();
        answer.address = Some(address);
        answer.waker.take().into_iter().for_each(Waker::wake);
        self.net.made.fetch_add(1, Ordering::Relaxed);
        let end = PairEnd::new(&self.net, adapter, Stage::Up(pair));
        Ok((Box::new(end), Self::place(1 - self.side).into()))
    }

    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (waiting, waker) = &mut *self.net.waiting[self.side].lock().unwrap();
        if !waiting.is_empty() {
            return Poll::Ready(Ok(()));
        }
        *waker = Some(context.waker().clone());
        Poll::Pending
    }
}
