//! A stranger sends noise to the ports of a preloaded pair of programs. The connection is not disturbed, memory does not grow,
//! and the flow still resumes after a true break. (Attacks by a stranger that knows the protocol are tested in slim-agent.)

mod common;

use common::{
    NEGOTIATED_MS, Program, compare, compile, own_network, pair_started, ports, preload, scratch,
};
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// Resident memory of a process, in kilobytes.
fn resident(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    text.lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .and_then(|l| l.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Pure noise, or a valid header followed by noise.
    fn message(&mut self) -> Vec<u8> {
        let len = 8 + (self.next() % 400) as usize;
        let mut m: Vec<u8> = (0..len).map(|_| self.next() as u8).collect();
        if !self.next().is_multiple_of(4) {
            m[..4].copy_from_slice(b"SLIM");
            m[4] = 1;
            m[5] = (self.next() % 20) as u8;
            m[6..8].copy_from_slice(&(len as u16).to_be_bytes());
        }
        m
    }
}

#[test]
fn noise_does_no_harm() {
    if !own_network("noise_does_no_harm") {
        return;
    }
    let program = compile("broken", &[]);
    let noisy = scratch("noisy");
    let one = |slim: bool| {
        Program::new(&program)
            .env("T_ARGS", "steady")
            .env("T_WHILE", &noisy)
            .env("T_BREAKS", if slim { "1" } else { "0" })
            .env("T_OWN_NETWORK", "1")
            .negotiation_ms(NEGOTIATED_MS)
            .preloaded(slim)
    };
    let bare = common::pair(one(false), one(false));
    assert!(preload().exists());

    fs::write(&noisy, "").expect("a file");
    let (server, client) = pair_started(one(true), one(true));
    let begun = Instant::now();
    while ports("udp", "07").len() < 3 && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(600));
    let (udp, tcp) = (ports("udp", "07"), ports("tcp", "0A"));
    assert!(
        udp.len() >= 3 && tcp.len() >= 3,
        "SLIM's ports: {udp:?} {tcp:?}"
    );
    let before = [resident(server.id()), resident(client.id())];

    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
    let mut noise = Noise(0x5eed);
    for n in 0..100_000 {
        let port = *udp.iter().nth(n % udp.len()).expect("one of them");
        // A failed send means that the receiver's queue is full, which is allowed.
        let _ = stranger.send_to(&noise.message(), (Ipv4Addr::LOCALHOST, port));
    }
    for port in &tcp {
        for _ in 0..40 {
            let at = SocketAddrV4::new(Ipv4Addr::LOCALHOST, *port).into();
            if let Ok(mut s) = TcpStream::connect_timeout(&at, Duration::from_millis(200)) {
                let _ = s.write_all(&noise.message());
            }
        }
    }

    let after = [resident(server.id()), resident(client.id())];
    for (before, after) in before.iter().zip(&after) {
        assert!(*after > 0, "a program ended early");
        assert!(
            after.saturating_sub(*before) < 24 << 10,
            "from {before} to {after} kB"
        );
    }
    fs::remove_file(&noisy).expect("the file");
    let got = (server.finish(), client.finish());
    for (end, want, got) in [("server", &bare.0, &got.0), ("client", &bare.1, &got.1)] {
        if let Some(difference) = compare(end, want, got) {
            panic!("{difference}");
        }
    }
}
