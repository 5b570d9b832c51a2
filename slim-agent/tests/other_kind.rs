//! Flows that never have a descriptor: all their transports, the first one too, are pipes in memory.

mod common;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::memory::{PipeEnd, PipeNet, Pipes, pipe};
use common::{Kill, LIMIT, Pattern, Server, config};
use slim_agent::{Agent, FlowIo, Transport, TransportRef};
use slim_core::config::Config;
use slim_core::replay::Replay;
use slim_core::stash::Stash;
use slim_core::{Cause, FinHow, FlowToken, Role, Verdict};
use slim_stream::{Drained, Owed, Probe, Stream};

/// How long a call waits at a time.
const MOMENT: Duration = Duration::from_millis(1);

/// One end of a flow. Data calls hold the state's lock, so nobody is ever inside when control has it.
struct PipeFlow {
    agent: Agent,
    token: FlowToken,
    stream: Stream,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    end: Option<PipeEnd>,
    stash: Stash,
    live: bool,
    resumed: u32,
    /// Connections that are not taken.
    refused: u32,
    verdict: Option<Verdict>,
}

static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);

impl PipeFlow {
    fn new(agent: &Agent, role: Role, end: PipeEnd, path: (SocketAddr, SocketAddr)) -> Arc<Self> {
        let flow = Arc::new(PipeFlow {
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

    /// Calls `f` with the transport, if there is one, until it has an answer.
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
                self.agent.fault(self.token, cause);
            }
            state = self.changed.wait_timeout(state, MOMENT).unwrap().0;
        }
    }

    fn write(&self, mut data: &[u8]) -> Result<(), Verdict> {
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

    fn read(&self, buf: &mut [u8]) -> Result<usize, Verdict> {
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

    fn read_exact(&self, mut buf: &mut [u8]) {
        while !buf.is_empty() {
            let n = self.read(buf).expect("no error");
            assert!(n > 0, "no end");
            buf = &mut buf[n..];
        }
    }

    /// Breaks the transport: both ends notice, and what is in flight is lost.
    fn cut(&self) {
        if let Some(end) = &self.state.lock().unwrap().end {
            end.cut();
        }
    }

    fn wait_live(&self) {
        let state = self.state.lock().unwrap();
        let waited = self.changed.wait_timeout_while(state, LIMIT, |s| !s.live);
        assert!(waited.unwrap().0.live);
    }

    fn resumed(&self) -> u32 {
        self.state.lock().unwrap().resumed
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

fn usable<'a>(state: &'a mut State, stream: &Stream) -> Result<&'a PipeEnd, Cause> {
    let end = state.end.as_ref().filter(|_| !stream.is_barred());
    end.ok_or(Cause::Errno(libc::EAGAIN))
}

fn cause(e: io::Error) -> Cause {
    match e.kind() {
        io::ErrorKind::WouldBlock => Cause::Errno(libc::EAGAIN),
        _ => Cause::Errno(libc::ECONNRESET),
    }
}

impl FlowIo for PipeFlow {
    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn live(&self) {
        self.change(|state| state.live = true);
    }

    fn legacy(&self, _: bool) {
        panic!("the peer has SLIM");
    }

    fn suspend(&self) -> bool {
        self.change(|_| self.stream.bar());
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

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> u64 {
        self.stream.replay(from, f).unwrap()
    }

    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()> {
        match transport {
            TransportRef::Other(any) if any.is::<PipeEnd>() => Ok(()),
            _ => Err(io::ErrorKind::Unsupported.into()),
        }
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
        let Transport::Other(any) = transport else {
            panic!("was refused");
        };
        self.change(|state| {
            state.end = Some(*any.downcast::<PipeEnd>().expect("was prepared"));
            state.resumed += 1;
            self.stream.open();
        });
    }

    fn reinstate(&self, _: bool) {
        self.change(|_| self.stream.open());
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

    fn owed(&self) -> Option<Owed> {
        self.state.lock().unwrap().end = None;
        None
    }
}

/// Two agents that resume by pipes.
struct Agents {
    net: Arc<PipeNet>,
    client: Agent,
    server: Agent,
    listener: TcpListener,
}

impl Agents {
    fn start(config: &Config) -> Agents {
        let net = Arc::<PipeNet>::default();
        let agent = |side| {
            let provider = Box::new(Pipes(net.clone(), side));
            Agent::start_with(config.clone(), vec![provider]).unwrap()
        };
        let (client, server) = (agent(0), agent(1));
        // Nobody ever connects to it. Its UDP port is where the peer is asked for SLIM.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        server.listen(listener.as_fd(), listener.local_addr().unwrap());
        Agents {
            net,
            client,
            server,
            listener,
        }
    }

    fn pair(&self) -> (Arc<PipeFlow>, Arc<PipeFlow>) {
        let there = self.listener.local_addr().unwrap();
        // A name for the flow, as good as any other.
        let here = (Ipv4Addr::LOCALHOST, 1).into();
        let (near, far) = pipe(None);
        let near = PipeFlow::new(&self.client, Role::Connector, near, (here, there));
        let far = PipeFlow::new(&self.server, Role::Acceptor, far, (there, here));
        near.wait_live();
        far.wait_live();
        (near, far)
    }
}

const PIECE: usize = 10_000;

/// Writes pieces of a pattern.
fn write_pieces(flow: &PipeFlow, seed: u64, pieces: usize) {
    let (mut pattern, mut buf) = (Pattern::new(seed), [0; PIECE]);
    for _ in 0..pieces {
        pattern.fill(&mut buf);
        flow.write(&buf).expect("no error");
    }
}

/// Reads them at the other end.
fn read_pieces(flow: &PipeFlow, seed: u64, pieces: usize) {
    let (mut pattern, mut want, mut got) = (Pattern::new(seed), [0; PIECE], [0; PIECE]);
    for n in 0..pieces {
        pattern.fill(&mut want);
        flow.read_exact(&mut got);
        assert!(want == got, "wrong bytes in piece {n}");
    }
}

#[test]
fn a_flow_without_descriptors_is_resumed_byte_exact() {
    let agents = Agents::start(&Config::default());
    let (near, far) = agents.pair();
    near.write(b"in flight, and lost").unwrap();
    far.write(b"so is this").unwrap();
    near.cut();
    let (mut there, mut back) = ([0; 19], [0; 10]);
    far.read_exact(&mut there);
    near.read_exact(&mut back);
    assert_eq!(
        (&there[..], &back[..]),
        (&b"in flight, and lost"[..], &b"so is this"[..])
    );
    assert_eq!((near.resumed(), far.resumed()), (1, 1));
    assert!(agents.net.made.load(Ordering::Relaxed) >= 1);
    near.write(b"and on").unwrap();
    far.read_exact(&mut there[..6]);
    assert_eq!(&there[..6], b"and on");
    near.stream.end_at(near.stream.sent());
    agents
        .client
        .finish(near.token, near.stream.sent(), FinHow::Close);
    assert_eq!(far.read(&mut there), Ok(0));
}

#[test]
fn pipes_that_break_in_the_handshake_or_in_the_replay_lose_nothing() {
    // As much as a pipe holds in each direction.
    const PIECES: usize = 6;
    let agents = Agents::start(&Config::default());
    let (near, far) = agents.pair();
    // The handshake has a few hundred bytes, and what follows is the replay of both.
    for fuse in [1, 60, 200, 400, 2_000, 30_000, 50_000, 90_000] {
        // Nobody reads, so all of it is in flight when it breaks.
        write_pieces(&near, 1, PIECES);
        write_pieces(&far, 2, PIECES);
        let (resumed, made) = (near.resumed(), agents.net.made.load(Ordering::Relaxed));
        *agents.net.fuses.lock().unwrap() = [fuse, fuse + 1].into();
        near.cut();
        thread::scope(|scope| {
            scope.spawn(|| read_pieces(&far, 1, PIECES));
            read_pieces(&near, 2, PIECES);
        });
        let made = agents.net.made.load(Ordering::Relaxed) - made;
        let resumed = near.resumed() - resumed;
        println!("fuse {fuse}: {made} pipes, {resumed} resumes");
        if fuse <= 30_000 {
            // Neither end can have written its replay when the first two broke, so they never were transports.
            assert!(made >= 3 && resumed == 1, "fuse {fuse}");
        }
        assert!(made >= 2, "fuse {fuse}");
    }
}

#[test]
fn flows_of_pipes_stay_byte_exact_while_all_of_them_break() {
    const PIECES: usize = 400;
    let agents = Agents::start(&Config::default());
    let pairs: Vec<_> = (0..8).map(|_| agents.pair()).collect();
    let mut cuts = 0;
    thread::scope(|scope| {
        let mut jobs = Vec::new();
        for (n, (near, far)) in (0..).zip(&pairs) {
            jobs.push(scope.spawn(move || write_pieces(near, n, PIECES)));
            jobs.push(scope.spawn(move || read_pieces(far, n, PIECES)));
            jobs.push(scope.spawn(move || write_pieces(far, !n, PIECES)));
            jobs.push(scope.spawn(move || read_pieces(near, !n, PIECES)));
        }
        let mut random = Pattern::new(5);
        while !jobs.iter().all(|job| job.is_finished()) {
            thread::sleep(Duration::from_millis(random.next() % 10));
            // Few at the end, so that it comes to one.
            if cuts < 40 {
                let fuses = (0..4).map(|_| random.next() as usize % 100_000);
                *agents.net.fuses.lock().unwrap() = fuses.collect();
                pairs.iter().for_each(|(near, _)| near.cut());
                cuts += 1;
            }
        }
    });
    let resumed: u32 = pairs.iter().map(|(near, _)| near.resumed()).sum();
    println!("{cuts} times cut, {resumed} resumes");
    assert!(resumed >= 8);
}

#[test]
fn a_connection_that_the_front_end_refuses_is_an_attempt_that_has_failed() {
    let agents = Agents::start(&Config::default());
    let (near, far) = agents.pair();
    far.state.lock().unwrap().refused = 2;
    near.write(b"in flight").unwrap();
    near.cut();
    let mut buf = [0; 9];
    far.read_exact(&mut buf);
    assert_eq!(&buf, b"in flight");
    far.write(b"taken").unwrap();
    near.read_exact(&mut buf[..5]);
    assert_eq!(far.state.lock().unwrap().refused, 0);
    assert_eq!(far.resumed(), 1);
    assert!(agents.net.made.load(Ordering::Relaxed) >= 3);
}

#[test]
fn a_front_end_that_does_not_take_this_kind_gets_the_error() {
    let vars = [("SLIM_ATTEMPTS", "1"), ("SLIM_ATTEMPT_TIMEOUTS", "0.3")];
    let agents = Agents::start(&config(&vars));
    let server = Server {
        agent: agents.server,
        listener: agents.listener,
    };
    // Flows of sockets.
    let (near, far) = server.pair(&agents.client);
    near.wait_live();
    far.wait_live();
    let begun = Instant::now();
    near.kill(Kill::Fin);
    far.read(&mut [0]).unwrap_err();
    near.read(&mut [0]).unwrap_err();
    assert_eq!((near.state().resumed, far.state().resumed), (0, 0));
    assert!(begun.elapsed() < Duration::from_secs(10));
}
