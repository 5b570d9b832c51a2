//! A front end of flows whose transports may be of either kind: TCP, or one without descriptors.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use slim_agent::{Agent, FlowIo, Transport, TransportRef};
use slim_core::replay::Replay;
use slim_core::stash::Stash;
use slim_core::transport::TransportKind;
use slim_core::{Cause, FlowToken, Role, Verdict};
use slim_stream::{Carrier, Drained, Probe, Stream, Undelivered};

use super::memory::OtherEnd;
use super::{LIMIT, Pattern};

/// A transport, as the front end has it.
pub enum End {
    Other(Box<dyn OtherEnd>),
    /// Not blocking.
    Tcp(TcpStream),
}

impl End {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            End::Other(end) => end.recv(buf),
            End::Tcp(sock) => {
                let mut sock = sock;
                sock.read(buf)
            }
        }
    }

    fn send(&self, data: &[u8]) -> io::Result<usize> {
        match self {
            End::Other(end) => end.send(data),
            End::Tcp(sock) => {
                let mut sock = sock;
                sock.write(data)
            }
        }
    }

    fn unacked(&self) -> u64 {
        match self {
            End::Other(end) => end.unacked(),
            End::Tcp(sock) => slim_sys::unacked(sock.as_raw_fd()).unwrap(),
        }
    }

    fn shut_down(&self) {
        match self {
            End::Other(end) => end.shut_down(),
            // It may have been cut before.
            End::Tcp(sock) => drop(sock.shutdown(Shutdown::Both)),
        }
    }

    fn suspend(&self) {
        if let End::Other(end) = self {
            end.suspend();
        }
    }

    fn kind(&self) -> TransportKind {
        match self {
            End::Other(end) => end.kind(),
            End::Tcp(_) => TransportKind::TCP,
        }
    }
}

/// How long a call waits before it tries again.
const MOMENT: Duration = Duration::from_millis(1);

/// One end of a flow. Data calls hold the state's lock, so no call is inside while control holds it.
pub struct AnyFlow {
    agent: Agent,
    pub token: FlowToken,
    pub stream: Stream,
    pub state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub struct State {
    end: Option<End>,
    stash: Stash,
    live: bool,
    resumed: u32,
    /// How many faults the front end has reported.
    faults: u32,
    /// Since when the flow is suspended.
    suspended: Option<Instant>,
    longest_pause: Duration,
    /// How many connections the front end still refuses.
    pub refused: u32,
    verdict: Option<Verdict>,
}

static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);

impl AnyFlow {
    pub fn new(agent: &Agent, role: Role, end: End, path: (SocketAddr, SocketAddr)) -> Arc<Self> {
        let flow = Arc::new(AnyFlow {
            agent: agent.clone(),
            token: FlowToken(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed)),
            stream: Stream::new(),
            state: Mutex::new(State {
                end: Some(end),
                ..State::default()
            }),
            changed: Condvar::new(),
        });
        agent.open(flow.token, flow.clone(), role, path.0, path.1);
        flow
    }

    /// Calls `f` until it has an answer, or the flow has its verdict.
    fn call(
        &self,
        mut f: impl FnMut(&mut State) -> Result<usize, Cause>,
    ) -> Result<usize, Verdict> {
        let mut state = self.state.lock().unwrap();
        loop {
            let cause = match f(&mut state) {
                Ok(n) => return Ok(n),
                Err(cause) => cause,
            };
            if let Some(verdict) = state.verdict {
                return Err(verdict);
            }
            if cause != Cause::Errno(libc::EAGAIN) && !self.stream.is_barred() {
                self.stream.bar();
                state.end.iter().for_each(End::suspend);
                state.faults += 1;
                state.suspended.get_or_insert_with(Instant::now);
                self.agent.fault(self.token, cause);
            }
            state = self.changed.wait_timeout(state, MOMENT).unwrap().0;
        }
    }

    pub fn write(&self, mut data: &[u8]) -> Result<(), Verdict> {
        while !data.is_empty() {
            let n = self.call(|state| {
                let end = usable(state, &self.stream)?;
                let n = end.send(data).map_err(cause)?;
                let copy = |from: usize, replay: &mut Replay| replay.push(&data[from..n]);
                self.stream
                    .with_half(|half| half.account(n, copy, || end.unacked()));
                self.stream.mark_dirty(|| self.agent.dirty(self.token));
                Ok(n)
            })?;
            data = &data[n..];
        }
        Ok(())
    }

    pub fn read(&self, buf: &mut [u8]) -> Result<usize, Verdict> {
        self.call(|state| {
            let n = state.stash.read(buf);
            if n > 0 {
                return Ok(n);
            }
            let n = usable(state, &self.stream)?.recv(buf).map_err(cause)?;
            self.stream.add_received(n as u64);
            let received = self.stream.received();
            match n > 0 || self.stream.ends_at(received) {
                true => Ok(n),
                false => Err(Cause::Eof { received }),
            }
        })
    }

    pub fn read_exact(&self, mut buf: &mut [u8]) {
        while !buf.is_empty() {
            let n = self.read(buf).expect("no error");
            assert!(n > 0, "no end");
            buf = &mut buf[n..];
        }
    }

    /// Breaks the transport: both ends notice, and bytes in flight are lost.
    pub fn shut_down(&self) {
        if let Some(end) = &self.state.lock().unwrap().end {
            end.shut_down();
        }
    }

    pub fn wait_live(&self) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, LIMIT, |s| !s.live);
        assert!(waited.unwrap().0.live);
    }

    pub fn resumed(&self) -> u32 {
        self.state.lock().unwrap().resumed
    }

    /// How many faults were reported.
    pub fn faults(&self) -> u32 {
        self.state.lock().unwrap().faults
    }

    /// The longest time for which the flow was suspended since the last call.
    pub fn longest_pause(&self) -> Duration {
        std::mem::take(&mut self.state.lock().unwrap().longest_pause)
    }

    /// The kind of the current transport, if there is one.
    pub fn kind(&self) -> Option<TransportKind> {
        self.state.lock().unwrap().end.as_ref().map(End::kind)
    }

    /// Waits until the flow has been resumed so often. The bytes of a replay can be read earlier: from the stash, before the new transport is
    /// installed.
    pub fn wait_resumed(&self, times: u32) {
        let state = self.state.lock().unwrap();
        let waited = self
            .changed
            .wait_timeout_while(state, LIMIT, |s| s.resumed < times);
        assert!(waited.unwrap().0.resumed >= times, "not resumed");
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    fn drain_into(&self, state: &mut State) {
        let mut buf = [0; 4096];
        if let Some(end) = state.end.take() {
            while let Ok(n @ 1..) = end.recv(&mut buf) {
                self.stream.add_received(n as u64);
                state.stash.push(&buf[..n]).unwrap();
            }
        }
    }
}

fn usable<'a>(state: &'a mut State, stream: &Stream) -> Result<&'a End, Cause> {
    let end = state.end.as_ref().filter(|_| !stream.is_barred());
    end.ok_or(Cause::Errno(libc::EAGAIN))
}

fn cause(e: io::Error) -> Cause {
    match e.kind() {
        io::ErrorKind::WouldBlock => Cause::Errno(libc::EAGAIN),
        _ => Cause::Errno(libc::ECONNRESET),
    }
}

impl FlowIo for AnyFlow {
    fn sent(&self) -> u64 {
        self.stream.sent()
    }

    fn trim(&self, peer_received: u64) {
        self.stream.trim(peer_received);
    }

    fn local_final(&self) -> Option<u64> {
        self.stream.local_final()
    }

    fn live(&self) {
        self.change(|state| state.live = true);
    }

    fn legacy(&self, _: bool) {
        panic!("the peer has SLIM");
    }

    fn suspend(&self) -> bool {
        self.change(|state| {
            self.stream.bar();
            state.end.iter().for_each(End::suspend);
            state.suspended.get_or_insert_with(Instant::now);
        });
        true
    }

    fn idle(&self) -> bool {
        true
    }

    fn drain(&self) -> Drained {
        self.drain_into(&mut self.state.lock().unwrap());
        self.stream.drained()
    }

    fn stash(&self, data: &[u8]) {
        self.stream.add_received(data.len() as u64);
        self.state.lock().unwrap().stash.push(data).unwrap();
    }

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
        self.stream.replay(from, f).ok()
    }

    fn before_connect(&self, _: TransportRef<'_>) -> io::Result<()> {
        Ok(())
    }

    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()> {
        let refused = &mut self.state.lock().unwrap().refused;
        if *refused > 0 {
            *refused -= 1;
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.before_connect(transport)
    }

    fn install(&self, transport: Transport) {
        let end = match transport {
            Transport::Other(any) => End::Other(any.downcast().map_or_else(
                |any| {
                    let carrier = any.downcast::<Arc<dyn Carrier>>();
                    Box::new(*carrier.expect("of one of these types")) as Box<dyn OtherEnd>
                },
                |end| *end,
            )),
            Transport::Descriptor(fd) => End::Tcp(fd.into_owned().into()),
            Transport::Relayed(_) => unreachable!("refused"),
        };
        self.change(|state| {
            state.end = Some(end);
            state.resumed += 1;
            let pause = state.suspended.take().map(|since| since.elapsed());
            state.longest_pause = state.longest_pause.max(pause.unwrap_or_default());
            self.stream.open();
        });
    }

    fn reinstate(&self, _: bool) {
        self.change(|state| {
            state.suspended = None;
            self.stream.open();
        });
    }

    fn peer_final(&self, seq: u64) {
        self.change(|_| self.stream.set_peer_final(seq));
    }

    fn escalate(&self, verdict: Verdict) {
        self.change(|state| {
            self.stream.bar();
            self.drain_into(state);
            state.verdict = Some(verdict);
        });
    }

    fn probe(&self) -> Probe {
        let mut state = self.state.lock().unwrap();
        usable(&mut state, &self.stream).map_or(Probe::BUSY, |end| {
            self.stream.probe_by(|| end.unacked(), || false)
        })
    }

    fn undelivered(&self) -> Option<Undelivered> {
        self.state.lock().unwrap().end = None;
        None
    }
}

pub const PIECE: usize = 10_000;

/// Writes pieces of a pattern.
pub fn write_pieces(flow: &AnyFlow, seed: u64, pieces: usize) {
    let (mut pattern, mut buf) = (Pattern::new(seed), [0; PIECE]);
    for _ in 0..pieces {
        pattern.fill(&mut buf);
        flow.write(&buf).expect("no error");
    }
}

/// Reads the same pieces at the other end.
pub fn read_pieces(flow: &AnyFlow, seed: u64, pieces: usize) {
    let (mut pattern, mut want, mut got) = (Pattern::new(seed), [0; PIECE], [0; PIECE]);
    for n in 0..pieces {
        pattern.fill(&mut want);
        flow.read_exact(&mut got);
        assert!(want == got, "wrong bytes in piece {n}");
    }
}

/// Both ends of a flow.
pub type FlowEnds = (Arc<AnyFlow>, Arc<AnyFlow>);

/// The transport breaks with bytes on their way in both directions, which then arrive by the next one.
pub fn lose_some((near, far): &FlowEnds) {
    near.write(b"in flight, and lost").unwrap();
    far.write(b"so is this").unwrap();
    near.shut_down();
    let (mut there, mut back) = ([0; 19], [0; 10]);
    far.read_exact(&mut there);
    near.read_exact(&mut back);
    let got = (&there[..], &back[..]);
    assert_eq!(got, (&b"in flight, and lost"[..], &b"so is this"[..]));
}

/// How often the first ends of these flows were resumed.
pub fn resumed(flows: &[FlowEnds]) -> u32 {
    flows.iter().map(|(near, _)| near.resumed()).sum()
}

/// Sends so many pieces over each flow in both directions, and checks them. Calls `meanwhile` again and again until all of them are there,
/// after pauses of up to 10 ms.
pub fn exchange(
    flows: &[FlowEnds],
    pieces: usize,
    random: &mut Pattern,
    mut meanwhile: impl FnMut(&mut Pattern),
) {
    thread::scope(|scope| {
        let mut jobs = Vec::new();
        for (n, (near, far)) in (0..).zip(flows) {
            jobs.push(scope.spawn(move || write_pieces(near, n, pieces)));
            jobs.push(scope.spawn(move || read_pieces(far, n, pieces)));
            jobs.push(scope.spawn(move || write_pieces(far, !n, pieces)));
            jobs.push(scope.spawn(move || read_pieces(near, !n, pieces)));
        }
        while !jobs.iter().all(|job| job.is_finished()) {
            thread::sleep(Duration::from_millis(random.next() % 10));
            meanwhile(random);
        }
    });
}
