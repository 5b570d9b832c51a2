//! A small front end that owns its sockets: what a front end has to do on top of [`slim_stream`].
//!
//! A data call is inside until it has counted its bytes, so its descriptor stays the transport's. No call waits while
//! it is inside. Control holds the lock.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use slim_agent::table::asking;
use slim_agent::table::types::TableEscalation;
use slim_agent::{Agent, FlowIo, Transport, TransportRef};
use slim_core::{Cause, FinHow, FlowToken, Role, Verdict};
use slim_stream::{Delivery, Drained, Inside, Probe, ReceiveHalf, SendHalf, Stream, Undelivered};

use super::{LIMIT, MOMENT, Pretence, verdict};

/// Nothing can be read or sent yet.
const WAIT: Cause = Cause::Errno(libc::EAGAIN);

/// One end of a flow.
pub struct FlowSocket {
    pub(super) agent: Agent,
    pub token: FlowToken,
    pub stream: Stream,
    /// The transport's descriptor, for calls that are inside.
    fd: AtomicI32,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Default)]
pub struct State {
    pub(super) sock: Option<OwnedFd>,
    receiving: ReceiveHalf,
    /// The flow is given up. The verdict takes effect once the transport is drained.
    given_up: Option<Verdict>,
    /// The transport's fault, which the kernel reports only once, and whether the agent knows of it.
    fault: Option<(Cause, bool)>,
    closed: bool,
    pub live: bool,
    pub legacy: Option<bool>,
    pub verdict: Option<Verdict>,
    /// The last escalation in the table when the flow was given up: evidence, and the peer's process id.
    pub evidence: Option<(u32, u32)>,
    pub resumed: u32,
    pub pretence: Pretence,
}

static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);

impl FlowSocket {
    pub fn new(agent: &Agent, role: Role, sock: TcpStream) -> Arc<Self> {
        let (local, remote) = (sock.local_addr().unwrap(), sock.peer_addr().unwrap());
        let this = Arc::new(Self {
            agent: agent.clone(),
            token: FlowToken(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed)),
            stream: Stream::new(),
            fd: AtomicI32::new(sock.as_raw_fd()),
            state: Mutex::new(State {
                sock: Some(sock.into()),
                receiving: ReceiveHalf::new(role == Role::Connector),
                ..State::default()
            }),
            changed: Condvar::new(),
        });
        agent.open(this.token, this.clone(), role, local, remote);
        this
    }

    pub fn write(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let send = |fd: Option<RawFd>| match (fd.ok_or(WAIT)?, self.state().legacy) {
                (fd, Some(_)) => slim_sys::send(fd, data, libc::MSG_DONTWAIT).map_err(Cause::Errno),
                (fd, None) => self.stream.send(fd, data, || self.agent.dirty(self.token)),
            };
            match self.call(libc::POLLOUT, send)? {
                0 => return Err(io::ErrorKind::BrokenPipe.into()),
                n => data = &data[n..],
            }
        }
        Ok(())
    }

    /// Returns 0 at the end of the stream.
    pub fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.call(libc::POLLIN, |fd| {
            let stashed = self.state().receiving.stash.read(buf);
            match stashed {
                0 => self.stream.recv(fd.ok_or(WAIT)?, buf),
                _ => Ok(stashed),
            }
        })
    }

    /// Calls `ask` inside with the transport's descriptor, or outside with `None` while the flow has no transport.
    /// Waits for `events`, for another transport, or for the end, which is 0.
    fn call(
        &self,
        events: i16,
        mut ask: impl FnMut(Option<RawFd>) -> Result<usize, Cause>,
    ) -> io::Result<usize> {
        loop {
            let inside = self.stream.enter();
            let fd = inside.then(|| self.fd.load(Ordering::Relaxed));
            let answer = ask(fd);
            let end = match answer {
                Ok(_) | Err(WAIT) if inside => None,
                Err(cause) if inside => self.fault(cause),
                _ => self.state().verdict,
            };
            if inside && self.stream.leave(Inside::Counted).last_and_barred {
                self.conclude(&mut self.state());
            }
            match (answer, end, fd) {
                (Ok(n), ..) => return Ok(n),
                (_, Some(Verdict::Eof), _) => return Ok(0),
                (_, Some(Verdict::Errno(e)), _) => return Err(io::Error::from_raw_os_error(e)),
                (Err(WAIT), None, Some(fd)) => drop(slim_sys::poll(fd, events, Some(MOMENT))),
                (Err(_), None, _) => {
                    let state = self.state();
                    if state.verdict.is_none() && self.stream.is_barred() {
                        drop(self.changed.wait_timeout(state, LIMIT).unwrap());
                    }
                }
            }
        }
    }

    /// The transport of a call that is inside is dead, or has ended. If the flow is plain TCP, returns the verdict for
    /// the caller; otherwise suspends the flow.
    fn fault(&self, cause: Cause) -> Option<Verdict> {
        let mut state = self.state();
        if state.legacy.is_some() {
            return Some(verdict(cause));
        }
        if !self.stream.is_barred() {
            self.stream.bar();
            state.fault = Some((cause, false));
        }
        None
    }

    /// Ends our direction, or both.
    pub fn finish(&self, how: FinHow) {
        let mut state = self.state();
        state.closed |= how != FinHow::HalfClose;
        self.stream.end_at(self.stream.sent());
        let end = self.stream.local_final().unwrap();
        match how {
            FinHow::HalfClose => self.agent.shut(self.token, end, how),
            _ => self.agent.finish(self.token, end, how),
        }
        let goes_on = how != FinHow::Reset && !self.stream.is_barred();
        if let Some(sock) = state.sock.as_ref().filter(|_| goes_on) {
            slim_sys::shutdown(sock.as_raw_fd(), libc::SHUT_WR);
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// Drains the old transport and closes it.
    fn drain_into(&self, state: &mut State) {
        state.fault = None;
        if let Some(sock) = state.sock.take() {
            let (fd, sent) = (sock.as_raw_fd(), self.stream.sent());
            state.receiving.shut_down(fd);
            let drained = self.stream.drain(&mut state.receiving, fd, sent);
            drained.expect("no other code uses the descriptor");
        }
    }

    /// Once no call is inside: reports a fault to the agent, which must not happen earlier; drains a flow that is given
    /// up, and sets its verdict.
    fn conclude(&self, state: &mut State) {
        if let Some((cause, told @ false)) = &mut state.fault
            && self.stream.idle()
        {
            *told = true;
            self.agent.fault(self.token, *cause);
        }
        if state.given_up.is_some() && state.verdict.is_none() && self.stream.idle() {
            self.drain_into(state);
            state.verdict = state.given_up;
            self.changed.notify_all();
        }
    }
}

impl FlowIo for FlowSocket {
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

    fn legacy(&self, refused: bool) {
        self.change(|state| {
            state.legacy = Some(refused);
            self.stream.with_half(|half| *half = SendHalf::new());
            match state.fault {
                Some((cause @ Cause::Errno(_), _)) => state.given_up = Some(verdict(cause)),
                _ => self.stream.open(),
            }
            self.conclude(state);
        });
    }

    fn suspend(&self) -> bool {
        let mut state = self.state();
        self.stream.bar();
        !state.pretence.is_busy_at_first() && self.stream.idle()
    }

    fn idle(&self) -> bool {
        !self.state().pretence.is_busy() && self.stream.idle()
    }

    fn connection_exists(&self) -> bool {
        let state = self.state();
        let sock = state.sock.as_ref().map(AsRawFd::as_raw_fd);
        let tcp = sock.and_then(slim_sys::tcp_state);
        tcp.is_some_and(|state| state != slim_sys::TCP_CLOSE)
    }

    fn connection(&self) -> Option<u64> {
        slim_sys::cookie(self.state().sock.as_ref()?.as_raw_fd())
    }

    fn drain(&self) -> Drained {
        assert!(self.stream.is_barred() && self.stream.idle(), "in use");
        self.drain_into(&mut self.state());
        self.stream.drained()
    }

    fn stash(&self, data: &[u8]) {
        let receiving = &mut self.state().receiving;
        self.stream.stash(receiving, data).unwrap();
    }

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Option<u64> {
        let reached = self.stream.replay(from, f).ok();
        if reached.is_none() {
            self.agent.out_of_step(self.token);
        }
        reached
    }

    fn before_connect(&self, transport: TransportRef<'_>) -> io::Result<()> {
        transport.socket().map(drop)
    }

    fn prepare(&self, transport: TransportRef<'_>) -> io::Result<()> {
        let fd = transport.socket()?;
        assert!(slim_sys::fds::is_internal(fd.as_raw_fd()));
        // Small, so that a replay takes several turns.
        socket2::SockRef::from(&fd).set_send_buffer_size(64 << 10)
    }

    fn install(&self, transport: Transport) {
        let (own, relayed) = transport.into_socket().expect("others are refused");
        let (sock, mut state) = (own.into_owned(), self.state());
        let fd = sock.as_raw_fd();
        assert!(state.sock.is_none() && !slim_sys::fds::is_internal(fd));
        self.stream.install(&mut state.receiving, fd, relayed);
        state.sock = Some(sock);
        state.resumed += 1;
        self.fd.store(fd, Ordering::Relaxed);
        self.stream.open();
        self.changed.notify_all();
    }

    fn reinstate(&self, legacy: bool) {
        self.change(|state| {
            state.fault = None;
            state.legacy = state.legacy.or(legacy.then_some(false));
            self.stream.open();
        });
    }

    fn peer_final(&self, seq: u64) {
        self.change(|_| self.stream.set_peer_final(seq));
    }

    fn escalate(&self, verdict: Verdict) {
        let mut state = self.state();
        self.stream.bar();
        state.given_up = Some(verdict);
        let last = asking::all::<TableEscalation>().unwrap().first().copied();
        state.evidence = last.map(|last| (last.evidence, last.pid));
        self.conclude(&mut state);
    }

    fn probe(&self) -> Probe {
        let state = self.state();
        let sock = state.sock.as_ref().filter(|_| !self.stream.is_barred());
        let asked = || sock.map_or(Probe::BUSY, |s| self.stream.probe(s.as_raw_fd()));
        state.pretence.probe.unwrap_or_else(asked)
    }

    fn undelivered(&self) -> Option<Undelivered> {
        let mut state = self.state();
        let sock = state.sock.as_ref().filter(|_| state.verdict.is_none());
        match sock.map(|sock| self.stream.delivery(sock.as_raw_fd())) {
            _ if self.stream.is_barred() || !state.closed => Some(self.stream.undelivered()),
            None | Some(Delivery::Done) => state.sock.take().and(None),
            Some(Delivery::Undelivered(owed)) => Some(owed),
            Some(Delivery::Broken(owed)) => {
                self.stream.bar();
                self.agent.fault(self.token, Cause::Errno(libc::ECONNRESET));
                Some(owed)
            }
        }
    }
}
