//! An attacker who cannot read our messages sends HELLOs and ICMP messages, from any address.

mod common;

use std::mem;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread;
use std::time::Duration;

use common::{FlowSocket, Kill, LIMIT, Server};
use slim_agent::Agent;
use slim_core::Role;
use slim_core::auth::seal_with_job;
use slim_core::config::Config;
use slim_core::wire::{HEADER_LEN, Message};

/// A forged HELLO.
fn forged(n: u8, connector: SocketAddr, acceptor: SocketAddr) -> Vec<u8> {
    let hello = common::hello(n, connector, acceptor);
    seal_with_job(None, &Message::Hello(hello))
}

#[test]
fn a_connection_is_not_taken_by_a_forged_hello_that_comes_first() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    // On loopback the source need not be forged.
    let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    for accepted in [false, true] {
        let near = TcpStream::connect(server.addr()).unwrap();
        let say = |near: &TcpStream| {
            for n in 0..40 {
                let data = forged(n, near.local_addr().unwrap(), server.addr());
                stranger.send_to(&data, server.addr()).unwrap();
            }
        };
        if !accepted {
            say(&near);
            thread::sleep(Duration::from_millis(50));
        }
        let far = server.listener.accept().unwrap().0;
        let far = FlowSocket::new(&server.agent, Role::Acceptor, far);
        if accepted {
            say(&near);
            thread::sleep(Duration::from_millis(50));
            assert!(!far.state().live);
        }
        let near = FlowSocket::new(&client, Role::Connector, near);
        near.wait_live();
        far.wait_live();
        near.kill(Kill::Fin);
        near.write(b"still there?").unwrap();
        let mut buf = [0; 12];
        far.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"still there?");
        assert!(near.state().resumed > 0);
    }
}

/// A raw socket for ICMP messages. Without the privilege: `None`, and a line that says why.
fn icmp(test: &str) -> Option<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP) };
    if fd < 0 {
        println!("skip: {test}: a raw socket needs CAP_NET_RAW");
        return None;
    }
    // SAFETY: just made, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends an ICMP message to `from`, which says that nothing listens at `to`. `quoted` is the datagram that `from` is
/// said to have sent there.
fn refuse(icmp: &OwnedFd, from: SocketAddr, to: SocketAddr, quoted: &[u8]) {
    let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else {
        panic!("IPv4 only");
    };
    let udp_len = 8 + quoted.len() as u16;
    let mut message = vec![3, 3, 0, 0, 0, 0, 0, 0];
    message.extend([0x45, 0]);
    message.extend((20 + udp_len).to_be_bytes());
    message.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    message.extend(from.ip().octets());
    message.extend(to.ip().octets());
    for word in [from.port(), to.port(), udp_len, 0] {
        message.extend(word.to_be_bytes());
    }
    message.extend(quoted);
    let words = message.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([pair[0], low]))
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    message[2..4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    let victim = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(from.ip().octets()),
        },
        sin_zero: [0; 8],
    };
    // SAFETY: a buffer and an address that outlive the call.
    let sent = unsafe {
        libc::sendto(
            icmp.as_raw_fd(),
            message.as_ptr().cast(),
            message.len(),
            0,
            (&raw const victim).cast(),
            mem::size_of_val(&victim) as libc::socklen_t,
        )
    };
    assert_eq!(sent, message.len() as isize);
}

#[test]
fn forged_refusals_do_not_make_later_connections_plain() {
    let Some(icmp) = icmp("forged_refusals_do_not_make_later_connections_plain") else {
        return;
    };
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    // A server with a UDP socket of its own shows the client's HELLO, and its source.
    let shows = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = shows.local_addr().unwrap();
    let asked = UdpSocket::bind(at).unwrap();
    asked.set_read_timeout(Some(LIMIT)).unwrap();
    let near = FlowSocket::new(&client, Role::Connector, TcpStream::connect(at).unwrap());
    let mut hello = [0; 512];
    let (len, control) = asked.recv_from(&mut hello).unwrap();
    let hello = &hello[..len];
    // The ICMP messages claim that the client's control socket has sent a datagram to the server.
    let mut guess = hello.to_vec();
    guess[HEADER_LEN] ^= 1;
    for _ in 0..3 {
        for (to, quoted) in [
            (server.addr(), &guess[..]),
            (server.addr(), &[]),
            (at, &guess),
        ] {
            refuse(&icmp, control, to, quoted);
        }
        thread::sleep(Duration::from_millis(60));
    }
    let (first, second) = server.pair(&client);
    first.wait_live();
    second.wait_live();
    assert_eq!(near.state().legacy, None);
    // A refusal that quotes the HELLO is believed, which shows that the ICMP messages arrive.
    let SocketAddr::V4(wrong) = at else {
        panic!("IPv4")
    };
    let wrong = SocketAddrV4::new(*wrong.ip(), wrong.port() ^ 1).into();
    refuse(&icmp, control, wrong, hello);
    thread::sleep(Duration::from_millis(60));
    assert_eq!(near.state().legacy, None, "another address");
    refuse(&icmp, control, at, hello);
    near.wait("legacy", Duration::from_secs(2), |s| s.legacy.is_some());
}
