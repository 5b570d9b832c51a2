//! Flows over real TCP sockets, protected by an [`Agent`], and ways to break them.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod any_flow;
mod front;
pub mod memory;
pub mod two_kinds;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use slim_agent::Agent;
use slim_core::config::Config;
use slim_core::wire::{AddrList, Hello};
use slim_core::{Cause, EndpointId, FinHow, FlowId, Role, Verdict};
use slim_stream::Probe;
use socket2::{Domain, Socket, Type};

pub use front::{FlowSocket, State};

/// How long a call waits for its socket before it tries again: the flow may have another socket by then.
const MOMENT: Duration = Duration::from_millis(5);
pub const LIMIT: Duration = Duration::from_secs(30);

/// The verdict for a call whose transport has failed, or ended, and is not replaced.
fn verdict(cause: Cause) -> Verdict {
    match cause {
        Cause::Errno(e) => Verdict::Errno(e),
        _ => Verdict::Eof,
    }
}

/// The answers that a test makes a front end give instead of the true ones.
#[derive(Default)]
pub struct Pretence {
    /// How many checks after the next suspension still find a call inside.
    pub busy: u32,
    /// How many such checks there were.
    pub asked: u32,
    pub probe: Option<Probe>,
}

impl Pretence {
    fn is_busy_at_first(&mut self) -> bool {
        self.asked = 0;
        self.busy > 0
    }

    fn is_busy(&mut self) -> bool {
        self.asked += 1;
        self.busy = self.busy.saturating_sub(1);
        self.busy > 0
    }
}

impl FlowSocket {
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

    /// The application closes the flow; the bytes sent are still to be delivered.
    pub fn close(&self) {
        self.finish(FinHow::Close);
    }

    /// The application closes with linger 0: bytes in flight are discarded.
    pub fn reset(&self) {
        if let Some(sock) = &self.state().sock {
            let linger = Some(Duration::ZERO);
            socket2::SockRef::from(sock).set_linger(linger).unwrap();
        }
        self.finish(FinHow::Reset);
        self.state().sock = None;
        self.agent.gone(self.token);
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

    /// Breaks the transport of both ends, as a middlebox or an administrator could.
    pub fn kill(&self, how: Kill) {
        let state = self.state();
        let Some(sock) = &state.sock else { return };
        match how {
            Kill::Fin => slim_sys::shutdown(sock.as_raw_fd(), libc::SHUT_RDWR),
            Kill::Destroy => {
                let sock = socket2::SockRef::from(sock);
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
        Server::of(Agent::start(config).expect("the agent starts"), addr)
    }

    /// With this agent.
    pub fn of(agent: Agent, addr: SocketAddr) -> Server {
        let listener = TcpListener::bind(addr).unwrap();
        agent.listen(listener.as_fd(), listener.local_addr().unwrap());
        Server { agent, listener }
    }

    pub fn addr(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// The two ends of a new flow: at `client`, and at this agent.
    pub fn pair(&self, client: &Agent) -> (Arc<FlowSocket>, Arc<FlowSocket>) {
        self.pair_by(client, self.addr())
    }

    /// As [`pair`](Self::pair), over another of the listener's addresses.
    pub fn pair_by(&self, client: &Agent, addr: SocketAddr) -> (Arc<FlowSocket>, Arc<FlowSocket>) {
        let near = TcpStream::connect(addr).unwrap();
        let near = FlowSocket::new(client, Role::Connector, near);
        let far = self.listener.accept().unwrap().0;
        (near, FlowSocket::new(&self.agent, Role::Acceptor, far))
    }
}

/// Long enough for a datagram to arrive and be handled.
pub const SOON: Duration = Duration::from_millis(50);

/// Connects from this address; without a port in it the kernel chooses one.
pub fn connect_from(from: SocketAddr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&from.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

/// The HELLO of a connector that does not exist.
pub fn hello(n: u8, connector: SocketAddr, acceptor: SocketAddr) -> Hello {
    Hello {
        flow: FlowId([n; 16]),
        connector,
        acceptor,
        endpoint: EndpointId {
            host: [n; 16],
            pid: 1,
            incarnation: 1,
        },
        random_c: [n; 32],
        features: 0,
        resume_port: 9,
        control_port: 9,
        addrs: AddrList::new([]),
    }
}

/// Settings from pairs of variable and value.
pub fn config(vars: &[(&str, &str)]) -> Config {
    let vars = vars.iter().map(|(k, v)| (k.to_string(), v.to_string()));
    let (config, problems) = Config::from_vars(vars);
    assert!(problems.is_empty(), "{problems:?}");
    config
}

/// Reproducible bytes that look random.
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
pub fn write_pattern(stream: &FlowSocket, seed: u64, total: usize, piece: usize) -> io::Result<()> {
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
pub fn read_pattern(stream: &FlowSocket, seed: u64, total: usize, piece: usize) -> io::Result<()> {
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

/// Destroys a loopback connection.
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

/// The ports of our resume listeners: the TCP listeners of this process on the loopback address of IPv6, where no test
/// listens.
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

/// Resident memory of this process.
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
