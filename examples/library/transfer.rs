//! Sends a file, in Rust. usage: see transfer.c

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use slim::{Config, Flow, LogLevel, Session, SessionOptions};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
const PIECE: usize = 1 << 20;
/// Limit of posts that are not completed.
const AHEAD: u64 = 16;

/// Length and checksum, as in transfer.c.
#[derive(Default)]
struct Summary {
    length: u64,
    sum: u64,
}

impl Summary {
    fn add(&mut self, data: &[u8]) {
        for chunk in data.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let mixed = (self.sum ^ u64::from_ne_bytes(word)).wrapping_mul(0x100_0000_01b3);
            self.sum = mixed ^ (mixed >> 29);
        }
        self.length += data.len() as u64;
    }

    fn bytes(&self) -> [u8; 16] {
        let mut all = [0; 16];
        all[..8].copy_from_slice(&self.length.to_ne_bytes());
        all[8..].copy_from_slice(&self.sum.to_ne_bytes());
        all
    }
}

/// Reads until the buffer is full or the file ends.
fn read_piece(file: &mut File) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut piece = Vec::with_capacity(PIECE);
    file.take(PIECE as u64).read_to_end(&mut piece)?;
    Ok(piece)
}

fn send_file(session: &Session, flow: &Flow, path: &str) -> Result<(), Box<dyn Error>> {
    let (mut file, mut all) = (File::open(path)?, Summary::default());
    loop {
        let piece = read_piece(&mut file)?;
        if piece.is_empty() {
            break;
        }
        all.add(&piece);
        let posted = flow.post(Bytes::from(piece))?;
        while posted - flow.completed() >= AHEAD {
            session.wait(&mut Vec::new(), LIMIT);
        }
    }
    flow.wait_completed(LIMIT)?;
    flow.finish()?;
    let mut theirs = [0; 16];
    flow.recv_exact(&mut theirs, LIMIT)?;
    if theirs != all.bytes() {
        return Err("the receiver has other bytes".into());
    }
    println!("{} bytes, checksum {:016x}", all.length, all.sum);
    Ok(())
}

fn receive_file(flow: &Flow, path: &str) -> Result<(), Box<dyn Error>> {
    let (mut file, mut all) = (File::create(path)?, Summary::default());
    let mut buf = vec![0; PIECE];
    loop {
        let mut len = 0;
        // Full pieces, so that both ends see the same words.
        while len < PIECE {
            match flow.recv(&mut buf[len..], LIMIT)? {
                0 => break,
                n => len += n,
            }
        }
        all.add(&buf[..len]);
        file.write_all(&buf[..len])?;
        if len < PIECE {
            flow.send_all(&all.bytes(), LIMIT)?;
            return Ok(());
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (what, ip, port, path) = match args[..] {
        [what @ ("send" | "receive"), ip, port, path] => (what, ip, port, path),
        _ => return Err("usage: transfer send|receive ADDRESS PORT FILE".into()),
    };
    let addr = SocketAddr::new(ip.parse::<IpAddr>()?, port.parse()?);

    let mut options = SessionOptions::new("transfer");
    options.config = Config {
        log: LogLevel::Off,
        ..Config::from_vars(std::env::vars()).0
    };
    let session = Session::open(options)?;
    let flow = if what == "send" {
        let flow = session.connect(addr, LIMIT)?;
        send_file(&session, &flow, path)?;
        flow
    } else {
        let endpoint = session.listen(addr)?;
        println!("{}", endpoint.local_addr().port());
        let flow = endpoint.accept(LIMIT)?;
        receive_file(&flow, path)?;
        flow
    };
    eprintln!("resumes: {}", flow.stats().resumes);
    flow.close();
    session.close(LIMIT.unwrap_or_default())?;
    Ok(())
}
