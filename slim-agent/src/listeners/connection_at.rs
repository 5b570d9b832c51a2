//! Finds the connection that has two given addresses.
//!
//! The kernel gives each socket a unique number (`SO_COOKIE`), and reports by `sock_diag(7)` the number of the
//! connection with two given ends. So a connection that is over is told apart from a later connection with the same
//! ends.

use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::kernel::netlink::{first, u16_at, u32_at};
use crate::kernel::sock_diag::{BY_FAMILY, ENDS_IN_ANSWER, ENDS_IN_QUESTION, Question};
use crate::kernel::sys;

/// Lengths and offsets within the ends, in a question and an answer.
const PORTS: usize = 4;
const ADDRESS: usize = 16;
const COOKIE: usize = PORTS + 2 * ADDRESS + 4;

/// The number of the connection with these ends, also while it is being closed. `None` if there is none, or if the
/// kernel does not answer.
pub(crate) fn connection_at(local: SocketAddr, remote: SocketAddr) -> Option<u64> {
    ask(local, remote).ok().flatten()
}

fn ask(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u64>> {
    let socket = sys::sock_diag()?;
    question(local, remote).ask(&socket)?;
    let mut buf = [0; 1024];
    let n = sys::recv(socket.raw(), &mut buf)?;
    let answer = first(buf.get(..n).unwrap_or_default());
    Ok(answer.and_then(|(kind, body, _)| {
        let ends = body.get(ENDS_IN_ANSWER..).filter(|_| kind == BY_FAMILY)?;
        // Where there is no connection, the kernel reports the listener.
        if u16::from_be(u16_at(ends, 2)?) != remote.port() {
            return None;
        }
        let (low, high) = (u32_at(ends, COOKIE)?, u32_at(ends, COOKIE + 4)?);
        Some(u64::from(high) << 32 | u64::from(low))
    }))
}

fn question(local: SocketAddr, remote: SocketAddr) -> Question {
    let family = if local.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let mut question = Question::new(0, family, u32::MAX);
    for (n, end) in [local, remote].into_iter().enumerate() {
        question.put(ENDS_IN_QUESTION + 2 * n, &end.port().to_be_bytes());
        let at = ENDS_IN_QUESTION + PORTS + ADDRESS * n;
        match end.ip() {
            IpAddr::V4(ip) => question.put(at, &ip.octets()),
            IpAddr::V6(ip) => question.put(at, &ip.octets()),
        }
    }
    // Any cookie.
    question.put(ENDS_IN_QUESTION + COOKIE, &[0xff; 8]);
    question
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
            // The kernel remembers the end that closes first (TIME_WAIT).
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
