//! A second kind of transport: pipes in memory, between two agents of one process.
//!
//! A byte that is sent is in flight, and is lost if the pipe breaks. When the other end reads, all bytes in flight
//! arrive; the sender takes bytes that have arrived for acknowledged. They stay readable after the pipe breaks.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::any::Any;
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use slim_agent::transport::{Connection, Listener, Provider, Wanted};
use slim_agent::{FlowIo, Transport, TransportRef};
use slim_core::transport::{Locator, OtherLocator, TransportKind};
use slim_stream::Carrier;
use slim_stream::carrier::IsCarrier;

/// A transport without a descriptor. The agent passes it on as `Transport::Other`, in a box of this type.
pub trait OtherEnd: Send + 'static {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize>;
    fn send(&self, data: &[u8]) -> io::Result<usize>;
    /// Bytes sent that the peer does not have for certain.
    fn unacked(&self) -> u64;
    /// Breaks it.
    fn shut_down(&self);
    fn kind(&self) -> TransportKind;

    /// The flow is suspended: it takes nothing more.
    fn suspend(&self) {}
}

/// A queue pair, as front ends get it.
impl OtherEnd for Arc<dyn Carrier> {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let got = (**self).recv(&mut [IoSliceMut::new(buf)]);
        got.map_err(|e| match e {
            libc::EAGAIN if !self.is_over() => io::ErrorKind::WouldBlock.into(),
            _ => io::ErrorKind::ConnectionReset.into(),
        })
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        let sent = (**self).send(&[IoSlice::new(data)]);
        sent.map_err(io::Error::from_raw_os_error)
    }

    fn unacked(&self) -> u64 {
        (**self).unacked()
    }

    fn shut_down(&self) {
        (**self).suspend();
    }

    fn kind(&self) -> TransportKind {
        TransportKind::VERBS
    }

    fn suspend(&self) {
        (**self).suspend();
    }
}

/// How a front end gets an end of a pipe, other than as an [`OtherEnd`].
pub type Handing = Arc<dyn Fn(PipeEnd) -> Transport + Send + Sync>;

/// Most bytes in flight in one direction.
const FLIGHT: usize = 64 << 10;
/// Most bytes in one send, so that a replay takes many turns.
const AT_ONCE: usize = 4 << 10;

#[derive(Default)]
struct Direction {
    flight: VecDeque<u8>,
    arrived: VecDeque<u8>,
    /// Number of bytes that were in flight when the pipe broke.
    lost: usize,
    /// The sender sends no more.
    ended: bool,
    /// Wakers of the reader and the writer.
    wakers: [Option<Waker>; 2],
}

struct Pipe {
    directions: [Direction; 2],
    broken: bool,
    /// Number of bytes after which the pipe breaks.
    fuse: Option<usize>,
}

impl Pipe {
    fn wake(&mut self) {
        for direction in &mut self.directions {
            direction
                .wakers
                .iter_mut()
                .filter_map(Option::take)
                .for_each(Waker::wake);
        }
    }

    fn shut_down(&mut self) {
        self.broken = true;
        for direction in &mut self.directions {
            direction.lost += direction.flight.len();
            direction.flight.clear();
        }
        self.wake();
    }
}

/// One end of a pipe. Dropping it ends both directions.
pub struct PipeEnd {
    pipe: Arc<Mutex<Pipe>>,
    /// The direction that this end sends in.
    out: usize,
    /// `None`: as an [`OtherEnd`]. Otherwise as an `Arc<dyn Carrier>`.
    handing: Option<Handing>,
}

/// A pipe, which breaks after `fuse` bytes, if given.
pub fn pipe(fuse: Option<usize>) -> (PipeEnd, PipeEnd) {
    let pipe = Arc::new(Mutex::new(Pipe {
        directions: Default::default(),
        broken: false,
        fuse,
    }));
    let end = |out| PipeEnd {
        pipe: pipe.clone(),
        out,
        handing: None,
    };
    (end(0), end(1))
}

impl PipeEnd {
    fn pipe(&self) -> MutexGuard<'_, Pipe> {
        self.pipe.lock().unwrap()
    }

    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        let mut pipe = self.pipe();
        let direction = &mut pipe.directions[1 - self.out];
        let flown = std::mem::take(&mut direction.flight);
        direction.arrived.extend(flown);
        let n = buf.len().min(direction.arrived.len());
        for (to, from) in buf.iter_mut().zip(direction.arrived.drain(..n)) {
            *to = from;
        }
        let ended = direction.ended;
        match n {
            0 if pipe.broken => Err(io::ErrorKind::ConnectionReset.into()),
            0 if !ended && !buf.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
            _ => {
                pipe.wake();
                Ok(n)
            }
        }
    }

    pub fn send(&self, data: &[u8]) -> io::Result<usize> {
        let mut pipe = self.pipe();
        if pipe.broken || pipe.directions[self.out].ended {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let flight = &mut pipe.directions[self.out].flight;
        let n = data.len().min(AT_ONCE).min(FLIGHT - flight.len());
        if n == 0 && !data.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        flight.extend(&data[..n]);
        match &mut pipe.fuse {
            Some(fuse) if *fuse <= n => pipe.shut_down(),
            Some(fuse) => *fuse -= n,
            None => {}
        }
        pipe.wake();
        Ok(n)
    }

    /// Number of bytes sent that have not arrived, lost ones included.
    pub fn unacked(&self) -> u64 {
        let out = &self.pipe().directions[self.out];
        (out.flight.len() + out.lost) as u64
    }

    /// Number of bytes that can be received now.
    pub fn unread(&self) -> u64 {
        let direction = &self.pipe().directions[1 - self.out];
        (direction.flight.len() + direction.arrived.len()) as u64
    }

    pub fn has_room(&self) -> bool {
        self.pipe().directions[self.out].flight.len() < FLIGHT
    }

    pub fn is_broken(&self) -> bool {
        self.pipe().broken
    }

    pub fn shut_write(&self) {
        let mut pipe = self.pipe();
        pipe.directions[self.out].ended = true;
        pipe.wake();
    }

    /// Breaks the pipe: bytes in flight are lost.
    pub fn shut_down(&self) {
        self.pipe().shut_down();
    }

    fn poll(
        &self,
        context: &Context<'_>,
        write: bool,
        ready: impl Fn(&Direction) -> bool,
    ) -> Poll<io::Result<()>> {
        let mut pipe = self.pipe();
        let which = if write { self.out } else { 1 - self.out };
        if pipe.broken || ready(&pipe.directions[which]) {
            return Poll::Ready(Ok(()));
        }
        let waker = &mut pipe.directions[which].wakers[usize::from(write)];
        *waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl PipeEnd {
    fn shown(&self) -> TransportRef<'_> {
        TransportRef::Other(match self.handing {
            None => self as &dyn Any,
            Some(_) => &IsCarrier,
        })
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        let mut pipe = self.pipe();
        pipe.directions.iter_mut().for_each(|d| d.ended = true);
        pipe.wake();
    }
}

impl OtherEnd for PipeEnd {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        self.send(data)
    }

    fn unacked(&self) -> u64 {
        self.unacked()
    }

    fn shut_down(&self) {
        self.shut_down();
    }

    fn kind(&self) -> TransportKind {
        TransportKind::TEST
    }
}

impl Connection for PipeEnd {
    fn poll_connected(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv(buf)
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        self.send(data)
    }

    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, false, |d| {
            d.ended || !d.flight.is_empty() || !d.arrived.is_empty()
        })
    }

    fn poll_writable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context, true, |d| d.ended || d.flight.len() < FLIGHT)
    }

    fn is_narrow(&self) -> bool {
        true
    }

    fn prepare(&self, flow: &dyn FlowIo) -> io::Result<()> {
        flow.prepare(self.shown())
    }

    fn shut_write(&self) {
        self.shut_write();
    }

    fn flush(&self) {}

    fn into_transport(self: Box<Self>) -> Transport {
        match self.handing.clone() {
            None => Transport::Other(Box::new(self as Box<dyn OtherEnd>)),
            Some(handing) => handing(*self),
        }
    }
}

/// Most ports of a side.
pub const PORTS: usize = 2;

/// A port, where one agent accepts pipes.
#[derive(Default)]
pub struct PipePort {
    waiting: Mutex<(VecDeque<PipeEnd>, Option<Waker>)>,
    down: Mutex<PortState>,
    /// Number of pipes made to it.
    pub made: AtomicU32,
}

#[derive(Default)]
struct PortState {
    down: bool,
    /// Since the agent has asked last.
    changed: bool,
    waker: Option<Waker>,
}

impl PipePort {
    /// It goes down, or comes up. Pipes that exist are not touched.
    pub fn set_down(&self, down: bool) {
        let mut state = self.down.lock().unwrap();
        (state.down, state.changed) = (down, true);
        state.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// Connects two agents by pipes.
#[derive(Default)]
pub struct PipeNet {
    /// The ports of each side.
    pub ports: [[PipePort; PORTS]; 2],
    /// The fuses of the next pipes.
    pub fuses: Mutex<VecDeque<usize>>,
    pub made: AtomicU32,
    /// No pipe can be made.
    pub down: AtomicBool,
}

/// One agent's side of a [`PipeNet`].
#[derive(Clone)]
pub struct Pipes {
    net: Arc<PipeNet>,
    side: usize,
    kind: TransportKind,
    ports: usize,
    handing: Option<Handing>,
}

/// A listener.
struct PipeListener {
    pipes: Pipes,
    port: usize,
}

impl Pipes {
    /// Pipes with this kind's number: in the place of TCP, or beside it.
    pub fn new(net: &Arc<PipeNet>, side: usize, kind: TransportKind) -> Self {
        Pipes {
            net: net.clone(),
            side,
            kind,
            ports: 1,
            handing: None,
        }
    }

    /// The same, whose ends are handed over as carriers.
    pub fn handed(self, handing: Handing) -> Self {
        Pipes {
            handing: Some(handing),
            ..self
        }
    }

    /// Pipes with all ports.
    pub fn with_ports(net: &Arc<PipeNet>, side: usize, kind: TransportKind) -> Self {
        Pipes {
            ports: PORTS,
            ..Self::new(net, side, kind)
        }
    }

    /// The locator of a port; `None` if the pipes are in the place of TCP.
    fn place(&self, side: usize, port: usize) -> Option<OtherLocator> {
        OtherLocator::new(self.kind, &[b'p', side as u8, port as u8])
    }
}

impl Provider for Pipes {
    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn connect(&self, wanted: Wanted<'_>) -> io::Result<Box<dyn Connection>> {
        let there = 1 - self.side;
        let is_at = |n: &usize| {
            let place = self.place(there, *n);
            place.is_none_or(|place| wanted.path.to == place.into())
        };
        let port = (0..self.ports).find(is_at).expect("a locator of the peer");
        let port = &self.net.ports[there][port];
        if self.net.down.load(Ordering::Relaxed) || port.down.lock().unwrap().down {
            return Err(io::ErrorKind::NetworkUnreachable.into());
        }
        let fuse = self.net.fuses.lock().unwrap().pop_front();
        let (mut near, far) = pipe(fuse);
        near.handing = self.handing.clone();
        if let Some(flow) = wanted.flow {
            flow.before_connect(near.shown())?;
        }
        self.net.made.fetch_add(1, Ordering::Relaxed);
        port.made.fetch_add(1, Ordering::Relaxed);
        let (waiting, waker) = &mut *port.waiting.lock().unwrap();
        waiting.push_back(far);
        waker.take().into_iter().for_each(Waker::wake);
        Ok(Box::new(near))
    }

    fn listeners(&self) -> io::Result<Vec<Box<dyn Listener>>> {
        let listener = |port| {
            let pipes = self.clone();
            Box::new(PipeListener { pipes, port }) as Box<dyn Listener>
        };
        Ok((0..self.ports).map(listener).collect())
    }
}

impl PipeListener {
    fn port(&self) -> &PipePort {
        &self.pipes.net.ports[self.pipes.side][self.port]
    }
}

impl Listener for PipeListener {
    fn locator(&self) -> Option<OtherLocator> {
        let mut state = self.port().down.lock().unwrap();
        state.changed = false;
        let place = self.pipes.place(self.pipes.side, self.port);
        place.filter(|_| !state.down)
    }

    fn poll_changed(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.port().down.lock().unwrap();
        state.waker = Some(context.waker().clone());
        match state.changed {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    fn accept(&self) -> io::Result<(Box<dyn Connection>, Locator)> {
        let came = self.port().waiting.lock().unwrap().0.pop_front();
        let mut end = came.ok_or(io::ErrorKind::WouldBlock)?;
        end.handing = self.pipes.handing.clone();
        let tcp = || SocketAddr::from((Ipv4Addr::LOCALHOST, 1)).into();
        let from = self.pipes.place(1 - self.pipes.side, 0);
        let from = from.map_or_else(tcp, Locator::from);
        Ok((Box::new(end), from))
    }

    fn poll_acceptable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (waiting, waker) = &mut *self.port().waiting.lock().unwrap();
        if !waiting.is_empty() {
            return Poll::Ready(Ok(()));
        }
        *waker = Some(context.waker().clone());
        Poll::Pending
    }
}
