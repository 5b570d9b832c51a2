//! Finds out whether a socket listens for TCP connections to an address.
//!
//! The kernel's table of connections (`/proc/net/tcp`) would tell, but opening it takes more than a millisecond, for
//! which it blocks the agent. So the kernel is asked for the listeners of one port (`sock_diag(7)`), and the table is
//! read only if that fails.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};

use crate::kernel::netlink::{HEADER, first};
use crate::kernel::sock_diag::{ENDS_IN_QUESTION, Question};
use crate::kernel::sys;
use slim_sys::OwnFd;

/// The kernel's number of a listener's state (`TCP_LISTEN`).
const LISTEN: u32 = 10;
/// Offsets in an answer, after its header: source port and address.
const PORT_AT: usize = 4;
const IP_AT: usize = 8;
/// The number of connections that wait to be accepted, in an answer about a listener.
const QUEUED_AT: usize = 56;

/// Whether a socket in this network namespace listens for TCP connections to `addr`.
pub(crate) fn is_listened_on(addr: SocketAddr) -> bool {
    by_asking(addr, |_| true).unwrap_or_else(|_| by_table(addr))
}

/// Whether no connection waits in the queue of any listener that `addr` concerns. False if that is not known.
pub(crate) fn is_queue_empty(addr: SocketAddr) -> bool {
    let queued = |body: &[u8]| {
        let n = body.get(QUEUED_AT..).and_then(|n| n.first_chunk());
        n.is_none_or(|n| u32::from_ne_bytes(*n) > 0)
    };
    by_asking(addr, queued).is_ok_and(|queued| !queued)
}

/// Whether there is a listener that `addr` concerns and for which `fits` holds.
fn by_asking(addr: SocketAddr, fits: fn(&[u8]) -> bool) -> io::Result<bool> {
    let socket = sys::sock_diag()?;
    for family in [libc::AF_INET, libc::AF_INET6] {
        question(family, addr.port()).ask(&socket)?;
        if answers(&socket, addr, fits)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A question about all listeners on `port`.
fn question(family: i32, port: u16) -> Question {
    let mut question = Question::new(libc::NLM_F_DUMP, family, 1 << LISTEN);
    question.put(ENDS_IN_QUESTION, &port.to_be_bytes());
    question
}

/// Reads all answers. Returns whether one is of a listener that `addr` concerns and for which `fits` holds.
fn answers(socket: &OwnFd, addr: SocketAddr, fits: fn(&[u8]) -> bool) -> io::Result<bool> {
    let mut buf = [0; 8192];
    let mut found = false;
    loop {
        let n = sys::recv(socket.raw(), &mut buf)?;
        let mut rest = buf.get(..n).unwrap_or_default();
        while let Some((kind, body, next)) = first(rest) {
            match i32::from(kind) {
                libc::NLMSG_DONE => return Ok(found),
                libc::NLMSG_ERROR => return Err(io::ErrorKind::Unsupported.into()),
                _ => {
                    let concerned = listener(body).is_some_and(|other| overlap(addr, other));
                    found |= concerned && fits(body);
                }
            }
            rest = next;
        }
        if n < HEADER {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// The address in an answer.
fn listener(body: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_be_bytes(*body.get(PORT_AT..)?.first_chunk()?);
    let ip = body.get(IP_AT..)?;
    let ip = match i32::from(*body.first()?) {
        libc::AF_INET => IpAddr::from(*ip.first_chunk::<4>()?),
        _ => IpAddr::from(*ip.first_chunk::<16>()?),
    };
    Some(SocketAddr::new(ip.to_canonical(), port))
}

fn by_table(addr: SocketAddr) -> bool {
    let tables = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];
    tables.iter().any(|path| {
        let Ok(table) = OwnFd::make(|| File::open(path)) else {
            return false;
        };
        let listeners = BufReader::new(sys::Reading(&table)).lines().skip(1);
        listeners
            .map_while(|line| in_line(&line.ok()?))
            .any(|other| overlap(addr, other))
    })
}

/// The address in a line of the kernel's table, if it is a listener's; the lines of listeners come first.
fn in_line(line: &str) -> Option<SocketAddr> {
    let mut fields = line.split_whitespace().skip(1);
    let (ip, port) = fields.next()?.split_once(':')?;
    if fields.nth(1)? != "0A" {
        return None;
    }
    let word = |n: usize| u32::from_str_radix(ip.get(8 * n..8 * n + 8)?, 16).ok();
    let ip = if ip.len() == 8 {
        IpAddr::from(word(0)?.to_ne_bytes())
    } else {
        let words = [word(0)?, word(1)?, word(2)?, word(3)?];
        let mut octets = [0; 16];
        for (bytes, word) in octets.chunks_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        IpAddr::from(octets)
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(SocketAddr::new(ip.to_canonical(), port))
}

pub(crate) fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let any = a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port() && (any || a.ip().to_canonical() == b.ip())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::{Duration, Instant};

    use super::*;

    /// The answers of both methods.
    fn both(addr: SocketAddr) -> [bool; 2] {
        let asked = by_asking(addr, |_| true).expect("a kernel that answers");
        [asked, by_table(addr)]
    }

    #[test]
    fn a_connection_in_the_queue_is_seen_even_if_it_has_broken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        assert!(is_queue_empty(at));
        let near = std::net::TcpStream::connect(at).unwrap();
        assert!(!is_queue_empty(at));
        socket2::SockRef::from(&near)
            .set_linger(Some(std::time::Duration::ZERO))
            .unwrap();
        drop(near);
        assert!(!is_queue_empty(at));
        drop(listener.accept().unwrap());
        assert!(is_queue_empty(at));
    }

    #[test]
    fn a_listener_is_seen_while_there_is_one() {
        for at in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind(at) else {
                continue;
            };
            let addr = listener.local_addr().unwrap();
            let copy = listener.try_clone().unwrap();
            drop(listener);
            assert_eq!(both(addr), [true; 2], "{addr}");
            drop(copy);
            assert_eq!(both(addr), [false; 2], "{addr}");
        }
    }

    #[test]
    fn a_listener_is_found_by_its_own_address_or_a_wildcard() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for (ip, concerned) in [
            ("127.0.0.1", true),
            ("127.0.0.2", false),
            ("0.0.0.0", true),
            ("::", true),
        ] {
            let addr = SocketAddr::new(ip.parse().unwrap(), port);
            assert_eq!(both(addr), [concerned; 2], "{addr}");
        }
    }

    #[test]
    fn listeners_spread_over_several_answers_are_all_found() {
        let first = TcpListener::bind("127.0.1.1:0").unwrap();
        let port = first.local_addr().unwrap().port();
        let others =
            (2..=200).filter_map(|n| TcpListener::bind((Ipv4Addr::new(127, 0, 1, n), port)).ok());
        let all: Vec<_> = others.chain([first]).collect();
        assert!(all.len() > 150, "another has the port");
        for listener in &all {
            assert!(by_asking(listener.local_addr().unwrap(), |_| true).unwrap());
        }
    }

    /// Closing a listener asks this, and other calls of the process to `connect` wait for the agent meanwhile.
    #[test]
    fn asking_the_kernel_is_several_times_faster_than_reading_the_table() {
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        let took = |ask: &dyn Fn() -> bool| {
            let begun = Instant::now();
            assert!(!ask());
            begun.elapsed()
        };
        let (mut asked, mut read) = (Duration::MAX, Duration::MAX);
        for _ in 0..20 {
            asked = asked.min(took(&|| by_asking(addr, |_| true).unwrap()));
            read = read.min(took(&|| by_table(addr)));
        }
        assert!(asked * 3 < read, "{asked:?}, by the table {read:?}");
    }
}
