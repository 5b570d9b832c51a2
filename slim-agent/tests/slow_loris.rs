//! Thousands of connections to the resume listeners on which nothing is sent.
//!
//! One test: it looks at the memory and the descriptors of the process.

mod common;

use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use common::{Kill, Server, resident_kib, resume_listeners};
use slim_agent::Agent;
use slim_core::config::Config;

const CONNECTIONS: usize = 5000;

/// Raises the limit on open files as far as possible, and returns it.
fn raise_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is valid for both calls.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
    limit.rlim_cur
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn silent_connections_cost_little_and_delay_no_resume() {
    let limit = raise_limit();
    assert!(limit >= 16 << 10, "the limit on open files is {limit}");
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    let ports = resume_listeners();
    assert_eq!(ports.len(), 2);
    let (memory, descriptors) = (resident_kib(), open_descriptors());
    let mut silent = Vec::new();
    let mut longest = Duration::ZERO;
    let mut buf = [0; 4];
    for n in 0..CONNECTIONS {
        silent.push(TcpStream::connect((Ipv4Addr::LOCALHOST, ports[n % 2])).unwrap());
        if n % 500 == 0 {
            let begun = Instant::now();
            near.kill(Kill::Fin);
            near.write(b"ping").unwrap();
            far.read_exact(&mut buf).unwrap();
            longest = longest.max(begun.elapsed());
        }
    }
    let grown = resident_kib().saturating_sub(memory);
    let theirs = open_descriptors() - descriptors - silent.len();
    println!("longest resume {longest:?}, {grown} KiB and {theirs} descriptors more");
    assert!(near.state().resumed >= 10);
    assert!(
        longest < Duration::from_secs(2),
        "a resume took {longest:?}"
    );
    // Each of the two agents keeps at most 1024 connections that have proved nothing.
    assert!(theirs <= 2 * 1024 + 64, "{theirs} descriptors");
    assert!(grown < 32 << 10, "{grown} KiB more than before");

    // In the end all of them are closed.
    for stream in &mut silent {
        stream
            .set_read_timeout(Some(Duration::from_secs(15)))
            .unwrap();
        // The challenge, and then the end, orderly or not.
        if let Err(e) = stream.read_to_end(&mut Vec::new()) {
            assert_eq!(e.raw_os_error(), Some(libc::ECONNRESET), "left open");
        }
    }
}
