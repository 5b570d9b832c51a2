//! Many flows with poll(2) in Rust. usage: see many.c

use std::collections::HashMap;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slim::{Config, Flow, LogLevel, Session, SessionOptions, TransferError};

const LIMIT: Duration = Duration::from_secs(60);

/// One flow, with its number in the order of the client, which is the first byte of each stream.
struct Stream {
    flow: Flow,
    number: Option<u8>,
    sent: u64,
    received: u64,
    finished: bool,
    ended: bool,
}

/// Byte `at` of the stream with this number.
fn pattern(number: u8, at: u64) -> u8 {
    match at {
        0 => number,
        at => (at.wrapping_mul(31).wrapping_add(number.into()) >> 3) as u8,
    }
}

impl Stream {
    fn new(flow: Flow, number: Option<u8>) -> Self {
        Self {
            flow,
            number,
            sent: 0,
            received: 0,
            finished: false,
            ended: false,
        }
    }

    fn done(&self) -> bool {
        self.finished && self.ended
    }

    fn send_more(&mut self, total: u64) -> Result<(), TransferError> {
        let Some(number) = self.number else {
            return Ok(());
        };
        let mut buf = [0; 16384];
        while self.sent < total {
            let len = (total - self.sent).min(buf.len() as u64) as usize;
            for (at, byte) in (self.sent..).zip(&mut buf[..len]) {
                *byte = pattern(number, at);
            }
            match self.flow.try_send(&buf[..len]) {
                Ok(n) => self.sent += n as u64,
                Err(TransferError::WouldBlock) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        if !std::mem::replace(&mut self.finished, true) {
            self.flow.finish()?;
        }
        Ok(())
    }

    fn receive_more(&mut self, total: u64) -> Result<(), Box<dyn Error>> {
        let mut buf = [0; 16384];
        while !self.ended {
            let n = match self.flow.try_recv(&mut buf) {
                Ok(n) => n,
                Err(TransferError::WouldBlock) => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            if n == 0 && self.received != total {
                return Err(format!("a flow ended at {}", self.received).into());
            }
            self.ended = n == 0;
            let number = *self.number.get_or_insert(buf[0]);
            for byte in &buf[..n] {
                if *byte != pattern(number, self.received) {
                    return Err(format!("wrong byte at {}", self.received).into());
                }
                self.received += 1;
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (serves, rest) = match args[..] {
        ["serve", ip, port, flows, total] => (true, [ip, port, flows, total]),
        [ip, port, flows, total] => (false, [ip, port, flows, total]),
        _ => return Err("usage: many [serve] ADDRESS PORT FLOWS BYTES".into()),
    };
    let addr = SocketAddr::new(rest[0].parse::<IpAddr>()?, rest[1].parse()?);
    let (flows, total): (u8, u64) = (rest[2].parse()?, rest[3].parse()?);

    let mut options = SessionOptions::new("many");
    options.config = Config {
        log: LogLevel::Off,
        ..Config::from_vars(std::env::vars()).0
    };
    let session = Session::open(options)?;
    let mut streams: HashMap<u64, Stream> = HashMap::new();
    let mut endpoint = None;
    if serves {
        let open = session.listen(addr)?;
        println!("{}", open.local_addr().port());
        endpoint = Some(open);
    } else {
        for number in 0..flows {
            let flow = session.try_connect(addr)?;
            streams.insert(flow.id(), Stream::new(flow, Some(number)));
        }
    }
    let (mut done, mut updates) = (0, Vec::new());
    while done < flows {
        updates.clear();
        if !session.progress(&mut updates) {
            let limit = Timespec::try_from(LIMIT)?;
            let ready = poll(&mut [PollFd::new(&session, PollFlags::IN)], Some(&limit))?;
            if ready == 0 {
                return Err("stuck".into());
            }
        }
        for update in &updates {
            if let Some(endpoint) = endpoint.as_ref().filter(|_| update.acceptable) {
                while let Ok(flow) = endpoint.try_accept() {
                    streams.insert(flow.id(), Stream::new(flow, None));
                }
            }
            let stream = streams.get_mut(&update.id);
            let Some(stream) = stream.filter(|stream| !stream.done()) else {
                continue;
            };
            stream.receive_more(total)?;
            stream.send_more(total)?;
            done += u8::from(stream.done());
        }
    }
    eprintln!("resumes: {}", session.stats().total.resumes);
    drop(streams);
    session.close(LIMIT)?;
    Ok(())
}
