//! A program with many connections and without MPI. Every connection carries checked bytes in both directions for a given
//! time, then ends in order.
//!
//! ```text
//! slim-lab-stream server ADDRESS CONNECTIONS SECONDS KIB
//! slim-lab-stream client ADDRESS CONNECTIONS SECONDS KIB
//! ```
//!
//! Each end sends KIB KiB on each connection, spread over SECONDS, and checks what it receives: the bytes are a function of
//! connection, direction and position. At the end it shuts down its sending half, and expects exactly the other end's bytes
//! and then the end of the stream. Each time of 20 ms or more without bytes is reported: `STALL SECONDS`. The last line is `DONE conns=.. bytes=.. errs=.. failed=.. maxstall=..`. The exit status is
//! 0 if nothing was wrong.

use std::{
    env,
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    process::ExitCode,
    time::{Duration, Instant},
};

/// Size of the buffer for one call, in bytes.
const PIECE: usize = 16 * 1024;
/// A time without bytes that is reported.
const LONG: Duration = Duration::from_millis(20);
/// All bytes must have arrived within this time after the end of the sending time.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let parsed = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [role @ ("server" | "client"), address, count, seconds, kib] => {
            parse(address, count, seconds, kib)
                .map(|(address, plan)| (role == "server", address, plan))
        }
        _ => None,
    };
    let Some((server, address, plan)) = parsed else {
        eprintln!("usage: slim-lab-stream server|client ADDRESS CONNECTIONS SECONDS KIB");
        return ExitCode::from(2);
    };
    raise_descriptor_limit();
    let opened = if server {
        accept(address, plan.count)
    } else {
        connect(address, plan.count)
    };
    match opened.and_then(|streams| StreamRun::new(streams, server, plan)?.work()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(3),
        Err(error) => {
            println!("FAILED {error}");
            ExitCode::from(4)
        }
    }
}

/// What each end does, from the command line.
#[derive(Clone, Copy)]
struct StreamPlan {
    count: usize,
    time: Duration,
    total: u64,
}

fn parse(address: &str, count: &str, seconds: &str, kib: &str) -> Option<(SocketAddr, StreamPlan)> {
    let time = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
    let total = kib
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
        .filter(|total| *total > 0)?;
    Some((
        address.parse().ok()?,
        StreamPlan {
            count: count.parse().ok()?,
            time,
            total,
        },
    ))
}

/// Accepts all connections. The first four bytes of each are its number.
fn accept(address: SocketAddr, count: usize) -> io::Result<Vec<TcpStream>> {
    let listener = TcpListener::bind(address)?;
    println!("READY");
    let mut slots: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
    for _ in 0..count {
        let (mut stream, _) = listener.accept()?;
        let mut index = [0; 4];
        stream.read_exact(&mut index)?;
        let slot = slots.get_mut(u32::from_be_bytes(index) as usize);
        *slot.ok_or_else(|| io::Error::other("a connection with a number too high"))? =
            Some(stream);
    }
    let streams: Vec<_> = slots.into_iter().flatten().collect();
    if streams.len() == count {
        Ok(streams)
    } else {
        Err(io::Error::other("a connection's number came twice"))
    }
}

/// Makes all connections, and prints the median and the longest time of a connect.
fn connect(address: SocketAddr, count: usize) -> io::Result<Vec<TcpStream>> {
    let mut times = Vec::new();
    let mut streams = Vec::new();
    for index in 0..count as u32 {
        let start = Instant::now();
        let mut stream = TcpStream::connect(address)?;
        times.push(start.elapsed());
        stream.write_all(&index.to_be_bytes())?;
        streams.push(stream);
    }
    times.sort();
    let (median, longest) = (times.get(count / 2), times.last());
    if let (Some(median), Some(longest)) = (median, longest) {
        println!(
            "CONNECTED median_us={} max_us={}",
            median.as_micros(),
            longest.as_micros()
        );
    }
    Ok(streams)
}

/// Raises the limit on descriptors as far as this process may: a thousand connections exceed the usual limit.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointer is to a live value of the type that the call fills in.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: as above; a failure leaves the limit as it was, and shows when it is reached.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    }
}

/// A connection and its progress.
struct StreamConn {
    stream: TcpStream,
    out_key: u64,
    in_key: u64,
    sent: u64,
    received: u64,
    ended: bool,
    failed: Option<io::Error>,
    heard: Instant,
}

impl StreamConn {
    fn over(&self, total: u64) -> bool {
        self.failed.is_some() || (self.ended && self.sent == total)
    }
}

struct StreamRun {
    conns: Vec<StreamConn>,
    plan: StreamPlan,
    start: Instant,
    errors: u64,
    max_stall: Duration,
}

impl StreamRun {
    fn new(streams: Vec<TcpStream>, server: bool, plan: StreamPlan) -> io::Result<Self> {
        let start = Instant::now();
        let mut conns = Vec::new();
        for (index, stream) in streams.into_iter().enumerate() {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let (ours, theirs) = (
                2 * index as u64 + u64::from(server),
                2 * index as u64 + u64::from(!server),
            );
            conns.push(StreamConn {
                stream,
                out_key: ours,
                in_key: theirs,
                sent: 0,
                received: 0,
                ended: false,
                failed: None,
                heard: start,
            });
        }
        println!("RUNNING conns={}", conns.len());
        Ok(StreamRun {
            conns,
            plan,
            start,
            errors: 0,
            max_stall: Duration::ZERO,
        })
    }

    /// Sends and receives everything. Returns whether all of it was right.
    fn work(mut self) -> io::Result<bool> {
        let mut buffer = vec![0; PIECE];
        while self.conns.iter().any(|c| !c.over(self.plan.total)) {
            if self.start.elapsed() > self.plan.time + PATIENCE {
                return Err(io::Error::new(ErrorKind::TimedOut, self.summary()));
            }
            let due = self.due();
            for n in self.ready(due)? {
                let result = self
                    .receive(n, &mut buffer)
                    .and_then(|()| self.send(n, due, &mut buffer));
                if let Err(error) = result {
                    println!("connection {n}: {error}");
                    self.conns[n].failed = Some(error);
                }
            }
        }
        println!("DONE {}", self.summary());
        Ok(self.errors == 0 && self.conns.iter().all(|c| c.failed.is_none()))
    }

    fn summary(&self) -> String {
        let bytes: u64 = self.conns.iter().map(|c| c.received).sum();
        let failed = self.conns.iter().filter(|c| c.failed.is_some()).count();
        let over = self
            .conns
            .iter()
            .filter(|c| c.over(self.plan.total))
            .count();
        let (count, stall) = (self.conns.len(), self.max_stall.as_secs_f64());
        format!(
            "conns={count} over={over} bytes={bytes} errs={} failed={failed} maxstall={stall:.3}",
            self.errors
        )
    }

    /// How many bytes may have been sent on each connection by now.
    fn due(&self) -> u64 {
        let part = self.start.elapsed().as_secs_f64() / self.plan.time.as_secs_f64().max(0.001);
        (self.plan.total as f64 * part.min(1.0)) as u64
    }

    /// Connections on which a receive or a send may move bytes now.
    fn ready(&self, due: u64) -> io::Result<Vec<usize>> {
        let open: Vec<_> = (0..self.conns.len())
            .filter(|n| !self.conns[*n].over(self.plan.total))
            .collect();
        let mut polled: Vec<_> = open
            .iter()
            .map(|n| {
                let conn = &self.conns[*n];
                let writes = if conn.sent < due { libc::POLLOUT } else { 0 };
                let reads = if conn.ended { 0 } else { libc::POLLIN };
                libc::pollfd {
                    fd: conn.stream.as_raw_fd(),
                    events: reads | writes,
                    revents: 0,
                }
            })
            .collect();
        // SAFETY: the pointer and the length are those of a vector that lives across the call.
        let found = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 10) };
        match found {
            -1 => match io::Error::last_os_error() {
                e if e.kind() == ErrorKind::Interrupted => Ok(Vec::new()),
                e => Err(e),
            },
            _ => Ok(open
                .into_iter()
                .zip(polled)
                .filter(|(_, p)| p.revents != 0)
                .map(|(n, _)| n)
                .collect()),
        }
    }

    fn receive(&mut self, n: usize, buffer: &mut [u8]) -> io::Result<()> {
        let conn = &mut self.conns[n];
        if conn.ended {
            return Ok(());
        }
        match conn.stream.read(buffer) {
            Ok(0) if conn.received == self.plan.total => conn.ended = true,
            Ok(0) => {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    format!("ended at {}", conn.received),
                ));
            }
            Ok(got) => {
                let position = conn.received;
                let wrong =
                    |(i, byte): &(usize, &u8)| **byte != byte_at(conn.in_key, position + *i as u64);
                self.errors += buffer[..got].iter().enumerate().filter(wrong).count() as u64;
                conn.received += got as u64;
                let stall = conn.heard.elapsed();
                if stall >= LONG {
                    println!("STALL {:.4}", stall.as_secs_f64());
                }
                self.max_stall = self.max_stall.max(stall);
                conn.heard = Instant::now();
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn send(&mut self, n: usize, due: u64, buffer: &mut [u8]) -> io::Result<()> {
        let conn = &mut self.conns[n];
        let want = ((due - conn.sent.min(due)) as usize).min(buffer.len());
        if want == 0 {
            return Ok(());
        }
        for (i, byte) in buffer[..want].iter_mut().enumerate() {
            *byte = byte_at(conn.out_key, conn.sent + i as u64);
        }
        match conn.stream.write(&buffer[..want]) {
            Ok(put) => conn.sent += put as u64,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        if conn.sent == self.plan.total {
            conn.stream.shutdown(Shutdown::Write)?;
        }
        Ok(())
    }
}

/// The byte at a position of a stream. Neighbouring keys or positions give unrelated bytes.
fn byte_at(key: u64, position: u64) -> u8 {
    let mut z = (key + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        ^ (position >> 3).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 32;
    (z >> (8 * (position & 7))) as u8
}
