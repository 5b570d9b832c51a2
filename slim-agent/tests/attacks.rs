//! An attacker without the flow's key can do no harm.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{FlowSocket, Kill, Pattern, Server, config, resident_kib, resume_listeners};
use slim_agent::Agent;
use slim_core::config::Config;
use slim_core::event::Record;
use slim_core::wire::{self, Demote, Fin, MAC_LEN, MAX_LEN, Message, RefuseReason, Resume};
use slim_core::{FinHow, FlowId, Nonce, Role};

/// Sends numbers there and back until `stop` is set. Returns the number of round trips.
fn ping_pong(near: &FlowSocket, far: &FlowSocket, stop: &AtomicBool) -> u64 {
    let mut count: u64 = 0;
    let mut buf = [0; 8];
    while !stop.load(Ordering::Relaxed) {
        near.write(&count.to_be_bytes()).unwrap();
        far.read_exact(&mut buf).unwrap();
        assert_eq!(u64::from_be_bytes(buf), count);
        far.write(&buf).unwrap();
        near.read_exact(&mut buf).unwrap();
        assert_eq!(u64::from_be_bytes(buf), count);
        count += 1;
    }
    count
}

/// A message with a plausible header, random fields, and an invalid code.
fn plausible(pattern: &mut Pattern) -> Vec<u8> {
    let mut data = vec![0; MAX_LEN];
    pattern.fill(&mut data);
    let kind = (pattern.next() % 16) as u8;
    data[..4].copy_from_slice(&wire::MAGIC);
    data[4] = wire::VERSION;
    data[5] = kind;
    // The length is right for some kinds now and then; most messages are dropped because it is wrong.
    let len = 24 + (pattern.next() % 300) as usize;
    data[6..8].copy_from_slice(&(len as u16).to_be_bytes());
    data.truncate(len);
    data
}

fn live_pair(client: &Agent, server: &Server) -> (Arc<FlowSocket>, Arc<FlowSocket>) {
    let (near, far) = server.pair(client);
    near.wait_live();
    far.wait_live();
    (near, far)
}

#[test]
fn a_flood_of_datagrams_does_no_harm() {
    const DATAGRAMS: usize = 100_000;
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let (near, far) = live_pair(&client, &server);
    let target = server.addr();
    let before = resident_kib();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let pings = scope.spawn(|| ping_pong(&near, &far, &stop));
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut pattern = Pattern::new(11);
        let mut noise = [0; 1400];
        for n in 0..DATAGRAMS {
            if n % 2 == 0 {
                socket.send_to(&plausible(&mut pattern), target).unwrap();
            } else {
                let len = pattern.next() as usize % noise.len();
                pattern.fill(&mut noise[..len]);
                socket.send_to(&noise[..len], target).unwrap();
            }
            // In the middle of the flood a connection breaks, and another one is made.
            if n == DATAGRAMS / 2 {
                near.kill(Kill::Fin);
            }
        }
        let resumed = near.wait("resumed", common::LIMIT, |s| s.resumed > 0);
        stop.store(true, Ordering::Relaxed);
        let count = pings.join().expect("no wrong bytes");
        println!("{count} round trips meanwhile, resumed {resumed:?} after the flood");
        assert!(count > 100);
    });
    let (more_near, more_far) = live_pair(&client, &server);
    more_near.write(b"x").unwrap();
    more_far.read_exact(&mut [0]).unwrap();
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB more than before");
}

#[test]
fn connections_that_say_nothing_or_nonsense_do_no_harm() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let (near, far) = live_pair(&client, &server);
    let ports = resume_listeners();
    assert!(ports.len() >= 2, "{ports:?}");
    let before = resident_kib();
    let mut silent = Vec::new();
    let mut pattern = Pattern::new(5);
    for n in 0..600 {
        for port in &ports {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).unwrap();
            if n % 2 == 0 {
                // The connection may have been closed already.
                let _ = stream.write_all(&plausible(&mut pattern));
            } else if n % 20 == 1 {
                silent.push(stream);
            }
        }
    }
    let begun = Instant::now();
    near.kill(Kill::Fin);
    near.write(b"still there?").unwrap();
    let mut buf = [0; 12];
    far.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"still there?");
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "took {took:?}");
    let grown = resident_kib().saturating_sub(before);
    assert!(grown < 32 << 10, "{grown} KiB more than before");
    // Silent connections are not kept for ever.
    let mut last = silent.pop().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(15)))
        .unwrap();
    let mut rest = Vec::new();
    // The challenge, and then the end, orderly or not.
    let ended = match last.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.raw_os_error() == Some(libc::ECONNRESET),
    };
    assert!(ended, "left open");
}

/// Two agents, a live flow between them, and its id, which is in the event log.
struct Known {
    client: Agent,
    server: Server,
    near: Arc<FlowSocket>,
    far: Arc<FlowSocket>,
    flow: FlowId,
}

impl Known {
    fn new(name: &str) -> Known {
        let file = format!("slim-attack-{name}-{}.json", std::process::id());
        let path = std::env::temp_dir().join(file);
        let config = config(&[("SLIM_EVENTS", path.to_str().unwrap())]);
        let client = Agent::start(config.clone()).unwrap();
        let server = Server::start(config);
        let (near, far) = live_pair(&client, &server);
        assert!(client.flush(common::LIMIT) && server.agent.flush(common::LIMIT));
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let record: Record = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        let mut id = [0; 16];
        for (n, byte) in id.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&record.flow[2 * n..2 * n + 2], 16).unwrap();
        }
        Known {
            client,
            server,
            near,
            far,
            flow: FlowId(id),
        }
    }

    /// Checks that the flow works, and has not been resumed.
    fn assert_unharmed(&self) {
        self.near.write(b"ping").unwrap();
        let mut buf = [0; 4];
        self.far.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"ping");
        self.far.write(b"pong").unwrap();
        self.near.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"pong");
        for end in [&self.near, &self.far] {
            let s = end.state();
            assert_eq!(
                (s.resumed, s.legacy, end.stream.peer_final()),
                (0, None, None)
            );
        }
    }
}

#[test]
fn a_forged_resume_is_refused_and_changes_nothing() {
    let known = Known::new("resume");
    let mut refused = 0;
    for port in resume_listeners() {
        for epoch in [0, 1, 7, u64::MAX] {
            match forged_resume(port, known.flow, epoch) {
                // The agent of another test has no such flow.
                RefuseReason::UnknownFlow => {}
                reason => {
                    assert_eq!(reason, RefuseReason::BadProof);
                    refused += 1;
                }
            }
            known.assert_unharmed();
        }
    }
    // Both ends of the flow were tried.
    assert_eq!(refused, 8);
    // Flow ids cannot be found by guessing.
    let mut pattern = Pattern::new(17);
    for port in resume_listeners() {
        for _ in 0..200 {
            let mut guess = [0; 16];
            pattern.fill(&mut guess);
            assert_eq!(
                forged_resume(port, FlowId(guess), 1),
                RefuseReason::UnknownFlow
            );
        }
    }
    known.assert_unharmed();
    // Its own ends can still resume it.
    known.near.kill(Kill::Fin);
    known.near.write(b"x").unwrap();
    known.far.read_exact(&mut [0]).unwrap();
    drop(known.client);
}

/// Sends RESUME with an invalid code, and returns the reason why it was refused.
fn forged_resume(port: u16, flow: FlowId, epoch: u64) -> RefuseReason {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let challenge = read_message(&mut stream).expect("a challenge");
    assert!(matches!(challenge, Message::Challenge(_)));
    let resume = Message::Resume(Resume {
        flow,
        epoch,
        nonce_i: Nonce([3; 16]),
    });
    let mut pattern = Pattern::new(epoch);
    let forged = wire::encode(&resume, |_| {
        let mut mac = [0; MAC_LEN];
        pattern.fill(&mut mac);
        mac
    });
    stream.write_all(&forged).unwrap();
    match read_message(&mut stream) {
        Some(Message::Refuse(refusal)) => refusal.reason,
        other => panic!("{other:?} instead of a refusal"),
    }
}

/// Any process on the host can connect to the socket by which processes share a listener.
#[test]
fn silent_local_processes_keep_nobody_from_a_shared_listener() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let name = socket2::SockAddr::unix(format!("\0slim/{}", server.addr())).unwrap();
    let silent: Vec<_> = (0..400)
        .map(|_| {
            let socket =
                socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None)
                    .unwrap();
            socket.connect(&name).unwrap();
            socket
        })
        .collect();
    // A second agent: for the owner it is another process that accepts from the listener.
    let other = Agent::start(Config::default()).unwrap();
    for _ in 0..3 {
        let near = TcpStream::connect(server.addr()).unwrap();
        let near = FlowSocket::new(&client, Role::Connector, near);
        let far = server.listener.accept().unwrap().0;
        let far = FlowSocket::new(&other, Role::Acceptor, far);
        near.wait_live();
        far.wait_live();
    }
    drop(silent);
}

#[test]
fn forged_announcements_are_not_believed() {
    let known = Known::new("announcement");
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let target: SocketAddr = known.server.addr();
    let fin = |how| {
        Message::Fin(Fin {
            flow: known.flow,
            final_seq: 0,
            how,
        })
    };
    let messages = [
        fin(FinHow::HalfClose),
        fin(FinHow::Close),
        fin(FinHow::Reset),
        Message::Demote(Demote { flow: known.flow }),
    ];
    for message in &messages {
        for mac in [[0; MAC_LEN], [0xff; MAC_LEN]] {
            socket
                .send_to(&wire::encode(message, |_| mac), target)
                .unwrap();
        }
    }
    thread::sleep(Duration::from_millis(100));
    known.assert_unharmed();
    known.near.kill(Kill::Fin);
    known.near.write(b"x").unwrap();
    known.far.read_exact(&mut [0]).unwrap();
}

fn read_message(stream: &mut TcpStream) -> Option<Message> {
    let mut data = vec![0; wire::HEADER_LEN];
    stream.read_exact(&mut data).ok()?;
    let len = usize::from(u16::from_be_bytes([data[6], data[7]]));
    data.resize(len, 0);
    stream.read_exact(&mut data[wire::HEADER_LEN..]).ok()?;
    Some(wire::parse(&data).expect("a message").message)
}
