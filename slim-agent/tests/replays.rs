//! An attacker has recorded the messages between two agents, and sends them again.
//!
//! Needs root, to record on the loopback interface. One test, because it records all messages to agents of this
//! process.

mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::mem;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use common::{FlowSocket, Kill, LIMIT, Server, resume_listeners};
use slim_agent::Agent;
use slim_core::FinHow;
use slim_core::config::Config;
use slim_core::wire::{self, HEADER_LEN, MAGIC, Message, RefuseReason};

const TCP: u8 = 6;
const UDP: u8 = 17;

/// A recorded message.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct MailboxState {
    protocol: u8,
    to: u16,
    data: Vec<u8>,
}

/// Records everything on the loopback interface.
struct Tap(OwnedFd);

impl Tap {
    /// `None` without the privilege.
    fn open() -> Option<Tap> {
        let everything = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: no memory is passed.
        let fd = unsafe {
            let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
            libc::socket(libc::AF_PACKET, kind, i32::from(everything))
        };
        if fd < 0 {
            return None;
        }
        // SAFETY: just created.
        let tap = Tap(unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: all bytes zero is a valid address.
        let mut addr: libc::sockaddr_ll = unsafe { mem::zeroed() };
        addr.sll_family = libc::AF_PACKET as u16;
        addr.sll_protocol = everything;
        let room = 64 << 20;
        // SAFETY: the name is a C string, and address and value are of the lengths given.
        unsafe {
            addr.sll_ifindex = libc::if_nametoindex(c"lo".as_ptr()) as i32;
            let len = mem::size_of_val(&addr) as u32;
            assert_eq!(libc::bind(fd, (&raw const addr).cast(), len), 0);
            let (value, len) = ((&raw const room).cast(), mem::size_of_val(&room) as u32);
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, value, len);
        }
        Some(tap)
    }

    /// The SLIM messages recorded so far, each once.
    fn read_mailboxes(&self) -> BTreeSet<MailboxState> {
        let mut all = BTreeSet::new();
        let mut frame = vec![0; 1 << 16];
        loop {
            let (fd, at) = (self.0.as_raw_fd(), frame.as_mut_ptr().cast());
            // SAFETY: `frame` is valid for writes of its length.
            let n = unsafe { libc::recv(fd, at, frame.len(), 0) };
            let Ok(n) = usize::try_from(n) else {
                return all;
            };
            all.extend(message(&frame[..n]));
        }
    }
}

/// The message in an Ethernet frame, if there is one.
fn message(frame: &[u8]) -> Option<MailboxState> {
    let packet = frame.get(14..)?;
    let protocol = *packet.get(9).filter(|_| packet[0] >> 4 == 4)?;
    let segment = packet.get(usize::from(packet[0] & 15) * 4..)?;
    let header = match protocol {
        TCP => usize::from(segment.get(12)? >> 4) * 4,
        UDP => 8,
        _ => return None,
    };
    let to = u16::from_be_bytes([*segment.get(2)?, *segment.get(3)?]);
    let data = segment.get(header..)?;
    (data.len() > HEADER_LEN && data.starts_with(&MAGIC)).then(|| MailboxState {
        protocol,
        to,
        data: data.to_vec(),
    })
}

fn round_trip(near: &FlowSocket, far: &FlowSocket) {
    let mut buf = [0; 4];
    near.write(b"ping").unwrap();
    far.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"ping");
    far.write(b"pong").unwrap();
    near.read_exact(&mut buf).unwrap();
    assert_eq!(&buf, b"pong");
}

/// Sends `data` in place of RESUME. Returns the reason why it was refused, if there was an answer.
fn say_to(port: u16, data: &[u8]) -> Option<RefuseReason> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let limit = Some(Duration::from_secs(10));
    stream.set_read_timeout(limit).unwrap();
    let challenge = read_message(&mut stream).expect("a challenge");
    assert!(matches!(challenge, Message::Challenge(_)));
    stream.write_all(data).unwrap();
    match read_message(&mut stream)? {
        Message::Refuse(refusal) => Some(refusal.reason),
        other => panic!("{other:?} in answer to a recorded message"),
    }
}

/// `None` at the end of the connection.
fn read_message(stream: &mut TcpStream) -> Option<Message> {
    let mut data = vec![0; HEADER_LEN];
    stream.read_exact(&mut data).ok()?;
    let len = usize::from(u16::from_be_bytes([data[6], data[7]]));
    data.resize(len, 0);
    stream.read_exact(&mut data[HEADER_LEN..]).ok()?;
    Some(wire::parse(&data).expect("a message").message)
}

#[test]
fn recorded_messages_are_worth_nothing() {
    let Some(tap) = Tap::open() else {
        println!("skip: recorded_messages_are_worth_nothing: recording needs root");
        return;
    };
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    // Another flow, which ends, so that the FIN that announces its end is recorded, too.
    let (other, other_far) = server.pair(&client);
    other.wait_live();
    other_far.wait_live();
    other.finish(FinHow::HalfClose);
    assert_eq!(other_far.read(&mut [0]).unwrap(), 0);

    let listeners = resume_listeners();
    assert_eq!(listeners.len(), 2);
    let (mut all, mut recorded) = (BTreeSet::new(), BTreeSet::new());
    let mut refused = 0;
    for epoch in 1..=3 {
        // The flow breaks once in every epoch, so that each epoch is tested with its own RESUMEs and those of earlier
        // epochs.
        if epoch % 2 == 1 {
            near.kill(Kill::Fin);
        } else {
            far.kill(Kill::Fin);
        }
        round_trip(&near, &far);
        all.extend(tap.read_mailboxes());
        let to_listeners =
            |heard: &&MailboxState| heard.protocol == TCP && listeners.contains(&heard.to);
        recorded.extend(all.iter().filter(to_listeners).cloned());
        let resumes = recorded
            .iter()
            .filter(|heard| matches!(parsed(&heard.data), Some(Message::Resume(_))));
        assert!(resumes.count() >= epoch, "{epoch} times resumed");
        let before = (near.state().resumed, far.state().resumed);
        for heard in &recorded {
            for port in &listeners {
                let reason = say_to(*port, &heard.data);
                if let Some(Message::Resume(_)) = parsed(&heard.data) {
                    let reason = reason.expect("an answer to RESUME");
                    // Both agents know the flow by the same id, so each of them checks the proof.
                    assert_eq!(reason, RefuseReason::BadProof);
                    refused += 1;
                }
            }
        }
        round_trip(&near, &far);
        assert_eq!(before, (near.state().resumed, far.state().resumed));
    }
    assert!(refused >= 2 * (1 + 2 + 3), "{refused} refused");

    // All datagrams about our flows, each sent to its own destination and to every other one, from another port and
    // address.
    let (near2, far2) = server.pair(&client);
    near2.wait_live();
    far2.wait_live();
    near2.close();
    assert_eq!(far2.read(&mut [0]).unwrap(), 0);
    far2.close();
    all.extend(tap.read_mailboxes());
    all.retain(|heard| heard.protocol == UDP);
    let hellos = all.iter().filter(|h| h.to == server.addr().port());
    let flows: BTreeSet<_> = hellos.filter_map(|h| flow(&h.data)).collect();
    assert!(flows.len() >= 3, "{} flows", flows.len());
    let about_ours =
        |heard: &&MailboxState| flow(&heard.data).is_some_and(|id| flows.contains(&id));
    let datagrams: Vec<_> = all.iter().filter(about_ours).collect();
    let ports: BTreeSet<u16> = datagrams.iter().map(|heard| heard.to).collect();
    for from in [Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 9)] {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        for heard in &datagrams {
            for port in &ports {
                let to: SocketAddr = (Ipv4Addr::LOCALHOST, *port).into();
                // Another test's socket may be gone.
                let _ = socket.send_to(&heard.data, to);
            }
        }
    }
    thread::sleep(Duration::from_millis(100));
    assert!(client.flush(LIMIT) && server.agent.flush(LIMIT));
    let before = (near.state().resumed, far.state().resumed);
    round_trip(&near, &far);
    for end in [&near, &far] {
        let state = end.state();
        assert_eq!((state.legacy, end.stream.peer_final()), (None, None));
    }
    assert_eq!(before, (near.state().resumed, far.state().resumed));
    // Its own ends can still resume it.
    near.kill(Kill::Fin);
    round_trip(&near, &far);
}

/// The flow that a datagram is about; every kind has it in the same place.
fn flow(data: &[u8]) -> Option<Vec<u8>> {
    data.get(HEADER_LEN..HEADER_LEN + 16).map(<[u8]>::to_vec)
}

fn parsed(data: &[u8]) -> Option<Message> {
    Some(wire::parse(data).ok()?.message)
}
