//! Which connection has these addresses?
//!
//! The kernel gives each socket a number that no other one gets (`SO_COOKIE`), and tells by `sock_diag(7)` that of the
//! connection with two given ends. So a connection that is over is told apart from a later one with the same ends.

use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::netlink::{HEADER, first, u16_at, u32_at};
use crate::sys;

/// `SOCK_DIAG_BY_FAMILY`, as the kernel numbers it.
const BY_FAMILY: u16 = 20;
/// Lengths of a question and an answer about sockets, behind their headers.
const QUESTION: usize = 56;
/// In both: where the two ends are (our port, their port, our address, their address, interface, cookie).
const ENDS_IN_QUESTION: usize = 8;
const ENDS_IN_ANSWER: usize = 4;
const PORTS: usize = 4;
const ADDRESS: usize = 16;
const COOKIE: usize = PORTS + 2 * ADDRESS + 4;

/// The number of the connection with these ends, one that is being closed included; `None` if there is none, or if the
/// kernel does not tell.
pub(crate) fn connection_at(local: SocketAddr, remote: SocketAddr) -> Option<u64> {
    ask(local, remote).ok().flatten()
}

fn ask(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u64>> {
    let socket = sys::sock_diag()?;
    sys::send(socket.raw(), &question(local, remote))?;
    let mut buf = [0; 1024];
    let n = sys::recv(socket.raw(), &mut buf)?;
    let answer = first(buf.get(..n).unwrap_or_default());
    Ok(answer.and_then(|(kind, body, _)| {
        let ends = body.get(ENDS_IN_ANSWER..).filter(|_| kind == BY_FAMILY)?;
        // Where there is no connection, the kernel finds the listener.
        if u16::from_be(u16_at(ends, 2)?) != remote.port() {
            return None;
        }
        let (low, high) = (u32_at(ends, COOKIE)?, u32_at(ends, COOKIE + 4)?);
        Some(u64::from(high) << 32 | u64::from(low))
    }))
}

fn question(local: SocketAddr, remote: SocketAddr) -> [u8; HEADER + QUESTION] {
    let mut message = [0; HEADER + QUESTION];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &((HEADER + QUESTION) as u32).to_ne_bytes());
    put(4, &BY_FAMILY.to_ne_bytes());
    put(6, &(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    let family = if local.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    put(HEADER, &[family as u8, libc::IPPROTO_TCP as u8]);
    put(HEADER + 4, &u32::MAX.to_ne_bytes());
    let ends = HEADER + ENDS_IN_QUESTION;
    for (n, end) in [local, remote].into_iter().enumerate() {
        put(ends + 2 * n, &end.port().to_be_bytes());
        let at = ends + PORTS + ADDRESS * n;
        match end.ip() {
            IpAddr::V4(ip) => put(at, &ip.octets()),
            IpAddr::V6(ip) => put(at, &ip.octets()),
        }
    }
    // Whichever it is.
    put(ends + COOKIE, &[0xff; 8]);
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn cookie(stream: &TcpStream) -> u64 {
        let mut cookie = 0u64;
        let mut len = size_of::<u64>() as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_COOKIE);
        // SAFETY: `cookie` is valid for writes of `len` bytes.
        let r = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                level,
                name,
                (&raw mut cookie).cast(),
                &mut len,
            )
        };
        assert_eq!(r, 0);
        cookie
    }

    #[test]
    fn a_connection_is_found_by_its_ends_until_nothing_is_left_of_it() {
        for (listen, connect) in [
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "::1"),
            ("::", "127.0.0.1"),
        ] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind((listen, 0)) else {
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect((connect, port)).unwrap();
            let (remote, local) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let waiting = connection_at(local, remote);
            let (server, _) = listener.accept().unwrap();
            assert_eq!(waiting, Some(cookie(&server)));
            assert_eq!(connection_at(local, remote), Some(cookie(&server)));
            assert_eq!(connection_at(remote, local), Some(cookie(&client)));
            // The end that closes first is remembered by the kernel.
            let known = Some(cookie(&server));
            drop(server);
            assert_eq!(connection_at(local, remote), known);
            drop(client);
            assert_eq!(connection_at(local, remote), known);
            assert_eq!(
                connection_at(remote, local),
                None,
                "the listener is no connection"
            );
        }
    }
}
