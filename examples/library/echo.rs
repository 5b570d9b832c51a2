//! Echo in Rust. usage: see echo.c

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use slim::{Config, Flow, LogLevel, Session, SessionOptions};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

/// Sends back what comes. Returns whether the client said goodbye.
fn answer(flow: &Flow) -> Result<bool, Box<dyn Error>> {
    let (mut buf, mut last) = ([0; 4096], Vec::<u8>::new());
    loop {
        match flow.recv(&mut buf, LIMIT)? {
            0 => return Ok(last == b"bye\n"),
            n => {
                flow.send_all(&buf[..n], LIMIT)?;
                last.extend(&buf[..n]);
                last.drain(..last.len().saturating_sub(4));
            }
        }
    }
}

fn ask(flow: &Flow) -> Result<(), Box<dyn Error>> {
    for line in io::stdin().lock().lines() {
        let mut line = line? + "\n";
        flow.send_all(line.as_bytes(), LIMIT)?;
        let mut answer = vec![0; line.len()];
        flow.recv_exact(&mut answer, LIMIT)?;
        line = String::from_utf8(answer)?;
        print!("{line}");
        io::stdout().flush()?;
    }
    flow.finish()?;
    flow.recv(&mut [0], LIMIT)?;
    eprintln!("resumes: {}", flow.stats().resumes);
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (serves, ip, port) = match args[..] {
        ["serve", ip, port] => (true, ip, port),
        [ip, port] => (false, ip, port),
        _ => return Err("usage: echo [serve] ADDRESS PORT".into()),
    };
    let addr = SocketAddr::new(ip.parse::<IpAddr>()?, port.parse()?);

    let mut options = SessionOptions::new("echo");
    options.config = Config {
        log: LogLevel::Off,
        ..Config::from_vars(std::env::vars()).0
    };
    let session = Session::open(options)?;
    if serves {
        let endpoint = session.listen(addr)?;
        println!("{}", endpoint.local_addr().port());
        while !answer(&endpoint.accept(LIMIT)?)? {}
    } else {
        ask(&session.connect(addr, LIMIT)?)?;
    }
    session.close(LIMIT.unwrap_or_default())?;
    Ok(())
}
