//! A small front end: streams over real TCP sockets, protected by an [`Agent`].
//!
//! Every call on a stream's socket is non-blocking and made under one lock, which makes suspending
//! simple. What the preload does without locks on the data path is not the matter here.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use slim_agent::{Agent, FlowIo};
use slim_core::config::Config;
use slim_core::replay::Replay;
use slim_core::stash::Stash;
use slim_core::{Cause, FinHow, FlowToken, Role, Verdict};
use slim_stream::{Drained, Owed, Probe};
use slim_sys::OwnFd;

pub const LIMIT: Duration = Duration::from_secs(30);

/// One end of a flow.
pub struct Stream {
    agent: Agent,
    token: FlowToken,
    state: Mutex<State>,
    changed: Condvar,
}

pub struct State {
    sock: Option<OwnedFd>,
    replay: Replay,
    stash: Stash,
    received: u64,
    barred: bool,
    dirty: bool,
    /// How often `idle` is to say no after the next suspension, and how often it was asked.
    pub busy: u32,
    pub asked: u32,
    /// What `probe` is to say instead of the truth.
    pub pretended: Option<Probe>,
    pub live: bool,
    pub legacy: Option<bool>,
    pub verdict: Option<Verdict>,
    pub peer_final: Option<u64>,
    pub local_final: Option<u64>,
    pub resumed: u32,
    pub reinstated: u32,
    closed: bool,
}

static NEXT_TOKEN: AtomicU64 = AtomicU64::new(1);

impl Stream {
    pub fn new(agent: &Agent, role: Role, sock: TcpStream) -> Arc<Stream> {
        let local = sock.local_addr().unwrap();
        let remote = sock.peer_addr().unwrap();
        sock.set_nonblocking(true).unwrap();
        let stream = Arc::new(Stream {
            agent: agent.clone(),
            token: FlowToken(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed)),
            state: Mutex::new(State {
                sock: Some(sock.into()),
                replay: Replay::new(),
                stash: Stash::new(),
                received: 0,
                barred: false,
                dirty: false,
                busy: 0,
                asked: 0,
                pretended: None,
                live: false,
                legacy: None,
                verdict: None,
                peer_final: None,
                local_final: None,
                resumed: 0,
                reinstated: 0,
                closed: false,
            }),
            changed: Condvar::new(),
        });
        agent.open(stream.token, stream.clone(), role, local, remote);
        stream
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until `f` holds; panics with `what` if it takes too long.
    pub fn wait(&self, what: &str, limit: Duration, f: impl Fn(&State) -> bool) -> Duration {
        let begun = Instant::now();
        let mut state = self.state();
        while !f(&state) {
            let left = limit.saturating_sub(begun.elapsed());
            assert!(!left.is_zero(), "not {what} after {limit:?}");
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
        begun.elapsed()
    }

    pub fn wait_live(&self) -> Duration {
        self.wait("live", Duration::from_secs(5), |s| s.live)
    }

    pub fn write(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut s = self.usable()?;
            let Some(fd) = s.fd() else { continue };
            match send(fd, data) {
                Ok(n) => {
                    if s.legacy.is_none() {
                        s.replay.push(&data[..n]);
                        s.trim();
                        if !s.dirty {
                            s.dirty = true;
                            self.agent.dirty(self.token);
                        }
                    }
                    data = &data[n..];
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    drop(s);
                    sleep_until_ready(fd, libc::POLLOUT);
                }
                Err(e) => self.fault(s, e)?,
            }
        }
        Ok(())
    }

    /// Zero at the end of the stream.
    pub fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut s = self.state();
            let n = s.stash.read(buf);
            if n > 0 {
                return Ok(n);
            }
            match s.verdict {
                Some(Verdict::Errno(e)) => return Err(io::Error::from_raw_os_error(e)),
                Some(Verdict::Eof) => return Ok(0),
                None => {}
            }
            if s.barred {
                drop(self.changed.wait_timeout(s, LIMIT).unwrap());
                continue;
            }
            let Some(fd) = s.fd() else { continue };
            match recv(fd, buf) {
                Ok(0) if s.legacy.is_some() || s.peer_final == Some(s.received) => return Ok(0),
                Ok(0) => {
                    s.barred = true;
                    let received = s.received;
                    self.agent.fault(self.token, Cause::Eof { received });
                }
                Ok(n) => {
                    s.received += n as u64;
                    return Ok(n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    drop(s);
                    sleep_until_ready(fd, libc::POLLIN);
                }
                Err(e) => self.fault(s, e)?,
            }
        }
    }

    pub fn read_exact(&self, buf: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            match self.read(&mut buf[at..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => at += n,
            }
        }
        Ok(())
    }

    /// Ends our direction.
    pub fn finish(&self) {
        let mut s = self.state();
        let end = s.replay.end();
        s.local_final = Some(end);
        self.agent.shut(self.token, end, FinHow::HalfClose);
        if let Some(fd) = s.fd().filter(|_| !s.barred) {
            shutdown(fd, libc::SHUT_WR);
        }
    }

    /// The application is done; what was sent is still to be delivered.
    pub fn close(&self) {
        let mut s = self.state();
        let end = s.replay.end();
        s.local_final = Some(end);
        s.closed = true;
        self.agent.finish(self.token, end, FinHow::Close);
        if let Some(fd) = s.fd().filter(|_| !s.barred) {
            shutdown(fd, libc::SHUT_WR);
        }
    }

    /// The application closes with linger 0: what is under way is thrown away.
    pub fn reset(&self) {
        let mut s = self.state();
        let end = s.replay.end();
        s.local_final = Some(end);
        s.closed = true;
        self.agent.finish(self.token, end, FinHow::Reset);
        if let Some(sock) = s.sock.take() {
            let linger = Some(Duration::ZERO);
            socket2::SockRef::from(&sock).set_linger(linger).unwrap();
        }
        self.agent.gone(self.token);
    }

    /// Breaks the transport of both ends, as a middlebox or an administrator could.
    pub fn kill(&self, how: Kill) {
        let s = self.state();
        let Some(fd) = s.fd() else { return };
        match how {
            Kill::Fin => shutdown(fd, libc::SHUT_RDWR),
            Kill::Destroy => {
                // SAFETY: the descriptor is open while the state is locked.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                let sock = socket2::SockRef::from(&fd);
                let port = |a: io::Result<socket2::SockAddr>| {
                    a.ok().and_then(|a| a.as_socket()).map(|a| a.port())
                };
                let (Some(local), Some(remote)) = (port(sock.local_addr()), port(sock.peer_addr()))
                else {
                    return;
                };
                destroy(local, remote);
            }
        }
    }

    fn usable(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut s = self.state();
        loop {
            match s.verdict {
                Some(Verdict::Errno(e)) => return Err(io::Error::from_raw_os_error(e)),
                Some(Verdict::Eof) => return Err(io::ErrorKind::BrokenPipe.into()),
                None if s.barred => s = self.changed.wait_timeout(s, LIMIT).unwrap().0,
                None => return Ok(s),
            }
        }
    }

    fn fault(&self, mut s: MutexGuard<'_, State>, e: io::Error) -> io::Result<()> {
        if s.legacy.is_some() {
            return Err(e);
        }
        s.barred = true;
        let errno = e.raw_os_error().unwrap();
        self.agent.fault(self.token, Cause::Errno(errno));
        Ok(())
    }
}

impl State {
    fn fd(&self) -> Option<RawFd> {
        self.sock.as_ref().map(|s| s.as_raw_fd())
    }

    fn trim(&mut self) -> u64 {
        let unacked = self.fd().map_or(0, unacked).min(self.replay.len() as u64);
        self.replay.trim(self.replay.end() - unacked);
        unacked
    }

    fn drain(&mut self) {
        let mut buf = vec![0; 65536];
        if let Some(fd) = self.fd() {
            // An error is reported once, and may hide what comes after it.
            for _ in 0..2 {
                while let Ok(n @ 1..) = recv(fd, &mut buf) {
                    self.stash.push(&buf[..n]).unwrap();
                    self.received += n as u64;
                }
            }
        }
        self.sock = None;
    }
}

impl FlowIo for Stream {
    fn live(&self) {
        self.state().live = true;
        self.changed.notify_all();
    }

    fn legacy(&self, refused: bool) {
        let mut s = self.state();
        s.legacy = Some(refused);
        s.replay = Replay::new();
        s.barred = false;
        self.changed.notify_all();
    }

    fn suspend(&self) -> bool {
        let mut s = self.state();
        s.barred = true;
        s.asked = 0;
        s.busy == 0
    }

    fn idle(&self) -> bool {
        let mut s = self.state();
        s.asked += 1;
        s.busy = s.busy.saturating_sub(1);
        s.busy == 0
    }

    fn drain(&self) -> Drained {
        let mut s = self.state();
        assert!(s.barred, "drained while in use");
        s.drain();
        Drained {
            received: s.received,
            sent: s.replay.end(),
        }
    }

    fn sent(&self) -> u64 {
        self.state().replay.end()
    }

    fn stash(&self, data: &[u8]) {
        let mut s = self.state();
        s.stash.push(data).unwrap();
        s.received += data.len() as u64;
    }

    fn trim(&self, peer_received: u64) {
        self.state().replay.trim(peer_received);
    }

    fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> u64 {
        let s = self.state();
        let mut at = from;
        while let Some(piece) = s.replay.chunk_at(at).expect("what is asked for is kept") {
            let n = f(piece);
            at += n as u64;
            if n < piece.len() {
                break;
            }
        }
        at
    }

    fn before_connect(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        assert!(slim_sys::fds::is_internal(fd.as_raw_fd()));
        assert!(socket2::SockRef::from(&fd).peer_addr().is_err());
        Ok(())
    }

    fn prepare(&self, fd: BorrowedFd<'_>) -> std::io::Result<()> {
        assert!(slim_sys::fds::is_internal(fd.as_raw_fd()));
        // Small, so that a replay takes several turns.
        let sock = socket2::SockRef::from(&fd);
        sock.set_send_buffer_size(64 << 10)
    }

    fn install(&self, fd: OwnFd) {
        let fd = fd.into_owned();
        assert!(!slim_sys::fds::is_internal(fd.as_raw_fd()));
        let mut s = self.state();
        assert!(s.barred && s.sock.is_none());
        if s.local_final.is_some() {
            shutdown(fd.as_raw_fd(), libc::SHUT_WR);
        }
        s.sock = Some(fd);
        s.barred = false;
        s.resumed += 1;
        self.changed.notify_all();
    }

    fn reinstate(&self, legacy: bool) {
        let mut s = self.state();
        s.barred = false;
        s.reinstated += 1;
        if legacy {
            s.legacy = Some(false);
        }
        self.changed.notify_all();
    }

    fn peer_final(&self, seq: u64) {
        self.state().peer_final = Some(seq);
        self.changed.notify_all();
    }

    fn escalate(&self, verdict: Verdict) {
        let mut s = self.state();
        s.drain();
        s.verdict = Some(verdict);
        self.changed.notify_all();
    }

    fn probe(&self) -> Probe {
        let mut s = self.state();
        if let Some(probe) = s.pretended {
            return probe;
        }
        if s.barred {
            // The fault that tells is still in the queue. Nothing may be trimmed any more.
            return Probe {
                unacked: 1,
                ..Probe::default()
            };
        }
        s.dirty = false;
        let unacked = s.trim();
        s.dirty = unacked > 0;
        Probe {
            unacked,
            acked: s.replay.end() - unacked,
            retransmits: 0,
            established: true,
        }
    }

    fn local_final(&self) -> Option<u64> {
        self.state().local_final
    }

    fn owed(&self) -> Option<Owed> {
        let mut s = self.state();
        let owed = Owed {
            kept: s.replay.len(),
            acked: s.replay.end() - s.replay.len() as u64,
        };
        if s.barred || !s.closed {
            return Some(owed);
        }
        let done = s.verdict.is_some() || s.trim() == 0;
        if let Some(fd) = s.fd().filter(|_| !done)
            && let Some(errno) = socket_error(fd)
        {
            s.barred = true;
            self.agent.fault(self.token, Cause::Errno(errno));
            return Some(owed);
        }
        if done {
            s.sock = None;
        }
        (!done).then_some(owed)
    }
}

/// How a transport is broken.
#[derive(Clone, Copy, Debug)]
pub enum Kill {
    /// Ends it in both directions.
    Fin,
    /// As `ss -K` does: an error at this end, a reset at the other.
    Destroy,
}

/// A listener with its agent.
pub struct Server {
    pub agent: Agent,
    pub listener: TcpListener,
}

impl Server {
    pub fn start(config: Config) -> Server {
        Server::start_on(config, (Ipv4Addr::LOCALHOST, 0).into())
    }

    pub fn start_on(config: Config, addr: SocketAddr) -> Server {
        let agent = Agent::start(config).expect("the agent starts");
        let listener = TcpListener::bind(addr).unwrap();
        agent.listen(listener.as_fd(), listener.local_addr().unwrap());
        Server { agent, listener }
    }

    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Two ends of a new flow: of `client`'s and of this agent.
    pub fn pair(&self, client: &Agent) -> (Arc<Stream>, Arc<Stream>) {
        self.pair_by(client, self.addr())
    }

    /// The same by another of the listener's addresses.
    pub fn pair_by(&self, client: &Agent, addr: SocketAddr) -> (Arc<Stream>, Arc<Stream>) {
        let near = TcpStream::connect(addr).unwrap();
        let near = Stream::new(client, Role::Connector, near);
        let far = self.listener.accept().unwrap().0;
        (near, Stream::new(&self.agent, Role::Acceptor, far))
    }
}

/// The settings that these pairs of variable and value give.
pub fn config(vars: &[(&str, &str)]) -> Config {
    let vars = vars.iter().map(|(k, v)| (k.to_string(), v.to_string()));
    let (config, problems) = Config::from_vars(vars);
    assert!(problems.is_empty(), "{problems:?}");
    config
}

/// Bytes that look random and can be made again.
pub struct Pattern(u64);

impl Pattern {
    pub fn new(seed: u64) -> Self {
        Pattern(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn fill(&mut self, buf: &mut [u8]) {
        for chunk in buf.chunks_mut(8) {
            let bytes = self.next().to_le_bytes();
            chunk.copy_from_slice(&bytes[..chunk.len()]);
        }
    }
}

/// Writes `total` bytes of a pattern.
pub fn write_pattern(stream: &Stream, seed: u64, total: usize, piece: usize) -> io::Result<()> {
    let mut pattern = Pattern::new(seed);
    let mut buf = vec![0; piece];
    let mut left = total;
    while left > 0 {
        let n = piece.min(left);
        pattern.fill(&mut buf[..n]);
        stream.write(&buf[..n])?;
        left -= n;
    }
    Ok(())
}

/// Reads `total` bytes and compares them with a pattern written in pieces of `piece`.
pub fn read_pattern(stream: &Stream, seed: u64, total: usize, piece: usize) -> io::Result<()> {
    let mut pattern = Pattern::new(seed);
    let (mut want, mut got) = (vec![0; piece], vec![0; piece]);
    let mut at = 0;
    while at < total {
        let n = piece.min(total - at);
        pattern.fill(&mut want[..n]);
        stream.read_exact(&mut got[..n])?;
        assert!(want[..n] == got[..n], "wrong bytes at or after {at}");
        at += n;
    }
    Ok(())
}

/// Destroys a loopback connection, if we may; ends it otherwise.
fn destroy(local: u16, remote: u16) {
    let filter = format!("( sport = :{local} and dport = :{remote} )");
    let done = Command::new("ss").args(["-KHtn", &filter]).output();
    assert!(
        done.is_ok_and(|o| o.status.success()),
        "ss -K does not work"
    );
}

/// Whether connections can be destroyed here (root, and a kernel with `INET_DIAG_DESTROY`).
pub fn can_destroy() -> bool {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (local, remote) = (near.local_addr().unwrap(), near.peer_addr().unwrap());
    let filter = format!(
        "( sport = :{} and dport = :{} )",
        local.port(),
        remote.port()
    );
    let done = Command::new("ss").args(["-KHtn", &filter]).output();
    done.is_ok() && near.take_error().is_ok_and(|e| e.is_some())
}

/// TCP listeners of this process on the loopback address of IPv6, where no test listens: our resume listeners.
pub fn resume_listeners() -> Vec<u16> {
    let ours: Vec<u64> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| Some(fs::metadata(entry.ok()?.path()).ok()?.ino()))
        .collect();
    let table = fs::read_to_string("/proc/self/net/tcp6").unwrap();
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (ip, port) = fields[1].split_once(':')?;
            let mine = ours.contains(&fields[9].parse().ok()?);
            (mine && fields[3] == "0A" && ip.ends_with("000001000000"))
                .then(|| u16::from_str_radix(port, 16).unwrap())
        })
        .collect()
}

/// Memory of this process that is not swapped out or never touched.
pub fn resident_kib() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|l| l.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Destroys every connection to one of these ports.
pub fn destroy_all_to(ports: &[u16]) {
    let filters: Vec<_> = ports.iter().map(|p| format!("dport = :{p}")).collect();
    let filter = format!("( {} )", filters.join(" or "));
    let done = Command::new("ss").args(["-KHtn", &filter]).output();
    assert!(
        done.is_ok_and(|o| o.status.success()),
        "ss -K does not work"
    );
}

/// The kinds of faults that can be made here.
pub fn kills() -> Vec<Kill> {
    if can_destroy() {
        vec![Kill::Destroy, Kill::Fin]
    } else {
        eprintln!("ss -K needs root: connections are only ended, not destroyed");
        vec![Kill::Fin]
    }
}

fn recv(fd: RawFd, buf: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `buf` is valid for writes of its length.
    let n = unsafe { libc::recv(fd, buf.as_mut_ptr().cast(), buf.len(), libc::MSG_DONTWAIT) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

fn send(fd: RawFd, buf: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `buf` is valid for reads of its length.
    let n = unsafe { libc::send(fd, buf.as_ptr().cast(), buf.len(), flags) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

fn shutdown(fd: RawFd, how: i32) {
    // SAFETY: no memory is passed.
    unsafe { libc::shutdown(fd, how) };
}

fn unacked(fd: RawFd) -> u64 {
    let mut n = 0;
    // SAFETY: `n` is valid for writes.
    let r = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &mut n) };
    if r < 0 { 0 } else { n as u64 }
}

fn socket_error(fd: RawFd) -> Option<i32> {
    // SAFETY: the caller's descriptor is open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let error = socket2::SockRef::from(&fd).take_error().ok()??;
    error.raw_os_error()
}

/// Not for long: the descriptor may be another socket by then.
fn sleep_until_ready(fd: RawFd, events: i16) {
    let mut entry = libc::pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: one valid entry.
    unsafe { libc::poll(&mut entry, 1, 5) };
}
