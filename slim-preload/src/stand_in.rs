//! Files that take a descriptor number while no transport can.
//!
//! * the *placeholder* is never ready: one end of a pair of unix sockets that receives nothing and whose send buffer is full. It
//!   has no name, so no other process can connect to it;
//! * the *ready* stand-in is always readable and writable, and shows which directions have ended. It is used while stashed bytes wait;
//! * a connection that is *over* is a real TCP connection over loopback. Its other end has sent the bytes that the application has
//!   not read yet, and has left. So the kernel itself gives bytes, errors, poll bits and end of file.

use crate::addr::RawAddr;
use crate::sys::{self, Errno};
use libc::c_int;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// A new placeholder, and its other end. The other end must stay open for as long as the placeholder is in use.
pub fn placeholder() -> Result<[c_int; 2], Errno> {
    let pair @ [near, _] = sys::socketpair(libc::SOCK_STREAM)?;
    let socket = libc::SOL_SOCKET;
    // The kernel raises the size to its minimum. A socket whose send buffer is full is not writable.
    sys::set_option(near, socket, libc::SO_SNDBUF, &0);
    while sys::send(near, &FILLING, libc::MSG_DONTWAIT).is_ok() {}
    // A blocking call that began before a swap may reach the placeholder. It must not block in the kernel: the
    // suspension waits until the call has left the gate.
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        sys::set_option(near, socket, option, &AT_ONCE);
    }
    sign(near);
    Ok(pair)
}

/// Sent to fill a placeholder: usually one such send is enough.
const FILLING: [u8; 2048] = [0; 2048];
/// The shortest time limit; zero would mean none (socket(7)).
const AT_ONCE: libc::timeval = libc::timeval {
    tv_sec: 0,
    tv_usec: 1,
};

/// Closes the other end of a placeholder. A process that still has the placeholder finds a reset connection, not an orderly
/// end, because the other end has not read everything.
pub fn end_placeholder(far: c_int) {
    sys::close(far);
}

/// Marks SLIM's unix sockets: it is the value of their SO_RCVLOWAT. The option has no effect, because nothing is ever
/// received from them.
const SIGN: c_int = 0x534c_494d;

fn sign(fd: c_int) {
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, &SIGN);
}

/// Whether a descriptor is a file that stands in for a transport that is away. It may have another number by now, or be in
/// another process.
pub fn is_one(fd: c_int) -> bool {
    let option = |name| sys::option::<c_int>(fd, libc::SOL_SOCKET, name);
    option(libc::SO_RCVLOWAT) == Some(SIGN) && option(libc::SO_DOMAIN) == Some(libc::AF_UNIX)
}

/// Which directions of a flow have ended, as poll shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShownEnds {
    /// None that poll shows: a program that has ended its own direction finds the descriptor writable, as before.
    Neither,
    /// The one that the application reads: `POLLRDHUP`.
    Read,
    /// Both: `POLLRDHUP` and `POLLHUP`.
    Both,
}

/// The process's always-ready descriptors, by [`ShownEnds`].
static READY: [AtomicI32; 3] = [const { AtomicI32::new(-1) }; 3];

/// The process's one always-ready descriptor that shows these ends. It is duplicated, never read.
pub fn ready(ended: ShownEnds) -> Result<c_int, Errno> {
    let have = READY[ended as usize].load(Ordering::Acquire);
    if have >= 0 {
        return Ok(have);
    }
    let made = make_ready(ended)?;
    // The others, too, so that the number of SLIM's descriptors does not grow later.
    for other in [ShownEnds::Neither, ShownEnds::Read, ShownEnds::Both] {
        if READY[other as usize].load(Ordering::Acquire) < 0 {
            let _ = make_ready(other);
        }
    }
    Ok(made)
}

fn make_ready(ended: ShownEnds) -> Result<c_int, Errno> {
    // The socket has one empty packet to read, and nothing can be written to it. A program that got the file without our
    // knowledge finds an end of file, never bytes that the peer did not send. Each end of such a pair is shut down alone, and the
    // other end need not stay.
    let [a, b] = sys::socketpair(libc::SOCK_DGRAM)?;
    sign(a);
    let sent = sys::send(b, b"", 0);
    sys::shutdown(
        a,
        match ended {
            ShownEnds::Neither => libc::SHUT_WR,
            ShownEnds::Read => libc::SHUT_RD,
            ShownEnds::Both => libc::SHUT_RDWR,
        },
    );
    sys::close(b);
    sent.inspect_err(|_| sys::close(a))?;
    // Two threads that race here leak one socket.
    READY[ended as usize].store(a, Ordering::Release);
    Ok(a)
}

/// The always-ready descriptor of which a copy is under a number, if `is_under` says so.
pub fn ready_under(is_under: impl Fn(c_int) -> bool) -> Option<c_int> {
    READY
        .iter()
        .map(|place| place.load(Ordering::Acquire))
        .find(|fd| *fd >= 0 && is_under(*fd))
}

/// Whether the number is an always-ready descriptor. The application must not close it.
pub fn is_ours(fd: c_int) -> bool {
    fd >= 0 && READY.iter().any(|r| r.load(Ordering::Relaxed) == fd)
}

/// A number was closed: forgets it if it was an always-ready descriptor.
pub fn closed(fd: c_int) {
    for place in &READY {
        let _ = place.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// How the other end of a connection left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// Closed: end of file; bytes sent to it are refused.
    Closed,
    /// Closed, and has refused bytes that were sent to it: end of file, and `EPIPE` as pending error.
    Refused,
    /// Reset: `ECONNRESET` once.
    Reset,
}

/// The most bytes that are put into a loopback connection.
pub const MOST: usize = 128 << 10;
/// How long the kernel is given to move the bytes.
const PATIENCE: Duration = Duration::from_millis(5);
/// The least number of checks before giving up: more than the strangers that can connect first.
const LOOKS: c_int = 2 * STRANGERS;

/// A connection of this address family whose other end has sent `bytes` and left: the kernel itself gives the bytes, the errors,
/// the poll bits and the end of file. Fails with `EMSGSIZE` when there are more bytes than the connection takes.
pub fn over(how: Departure, bytes: &[u8], family: c_int) -> Result<c_int, Errno> {
    if bytes.len() > MOST {
        return Err(libc::EMSGSIZE);
    }
    // Without a usable loopback interface, a pair of unix sockets behaves nearly the same.
    let [near, far] = connection(bytes.len(), family)
        .or_else(|_| connection(bytes.len(), libc::AF_INET))
        .or_else(|_| sys::socketpair(libc::SOCK_STREAM))?;
    let sent = feed(near, far, bytes).map(|()| match how {
        Departure::Closed => {}
        Departure::Refused => {
            // A reset after the FIN is reported as EPIPE, not ECONNRESET. Closing with an unread byte sends the reset.
            sys::shutdown(far, libc::SHUT_WR);
            let _ = sys::send(near, b"!", 0);
            until(|| sys::readable(far) > 0);
        }
        Departure::Reset => {
            sys::set_option(far, libc::SOL_SOCKET, libc::SO_LINGER, &sys::AT_ONCE);
            if !sys::is_tcp(far) {
                let _ = sys::send(near, b"!", 0);
            }
        }
    });
    sys::close(far);
    let arrived = |state: u8| match how {
        Departure::Closed => state != sys::TCP_ESTABLISHED,
        Departure::Refused | Departure::Reset => state == sys::TCP_CLOSE,
    };
    until(|| sys::tcp_state(near).is_none_or(arrived));
    sent.map(|()| near).inspect_err(|_| sys::close(near))
}

/// Moves all the bytes through the connection.
fn feed(near: c_int, far: c_int, bytes: &[u8]) -> Result<(), Errno> {
    let mut at = 0;
    let mut arrived = || {
        while at < bytes.len() {
            match sys::send(far, &bytes[at..], libc::MSG_DONTWAIT) {
                Ok(n) => at += n,
                Err(_) => break,
            }
        }
        sys::readable(near) == bytes.len() as u64
    };
    if arrived() || until(arrived) {
        Ok(())
    } else {
        Err(libc::EMSGSIZE)
    }
}

/// Checks repeatedly, for a moment; on loopback two checks are hardly ever needed. At least `LOOKS` checks are made, because the
/// scheduler may stop the thread for that long.
fn until(mut done: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    let mut looks = 0;
    while !done() {
        looks += 1;
        if looks > LOOKS && begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    true
}

/// Both ends of a loopback connection, with room for `bytes` unread bytes at the first end. It uses IPv4, because a host may have
/// no other protocol on its loopback interface.
fn connection(bytes: usize, family: c_int) -> Result<[c_int; 2], Errno> {
    let listener = sys::socket(libc::AF_INET, libc::SOCK_STREAM)?;
    let near = sys::socket(family, libc::SOCK_STREAM);
    let made = near.and_then(|near| {
        let far = meet(listener, near, bytes);
        if far.is_err() {
            sys::close(near);
        }
        far.map(|far| [near, far])
    });
    sys::close(listener);
    made
}

fn meet(listener: c_int, near: c_int, bytes: usize) -> Result<c_int, Errno> {
    if bytes > 0 {
        // The kernel caps the size at the system's limit.
        let room = (2 * bytes) as c_int;
        sys::set_option(near, libc::SOL_SOCKET, libc::SO_RCVBUF, &room);
    }
    sys::bind(listener, (Ipv4Addr::LOCALHOST, 0).into())?;
    sys::listen(listener, STRANGERS)?;
    join(listener, near)
}

/// Connections of other processes that may arrive first: every user of the host can find the listener.
const STRANGERS: c_int = 16;

/// Connects `near` to the listener, and accepts the other end of that connection; connections of strangers are closed.
fn join(listener: c_int, near: c_int) -> Result<c_int, Errno> {
    let local = |fd| RawAddr::local(fd).and_then(|a| a.internet());
    let mut to = local(listener).ok_or(libc::EINVAL)?;
    if let (Some(libc::AF_INET6), IpAddr::V4(ip)) = (sys::domain(near), to.ip()) {
        to.set_ip(ip.to_ipv6_mapped().into());
        sys::set_option(near, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &0);
    }
    sys::set_status(near, libc::O_NONBLOCK);
    // On loopback the connection is established at once, or never.
    let connected = sys::connect(near, to);
    if connected.is_err() && !until(|| sys::tcp_state(near) == Some(sys::TCP_ESTABLISHED)) {
        return Err(libc::ENETUNREACH);
    }
    sys::set_status(near, 0);
    let ours = local(near);
    sys::set_status(listener, libc::O_NONBLOCK);
    // Our connection never arrives if the kernel has dropped it because strangers fill the queue.
    let mut far = Err(libc::ECONNREFUSED);
    until(|| match sys::accept(listener) {
        Ok(fd) if RawAddr::peer(fd).and_then(|a| a.internet()) == ours => {
            far = Ok(fd);
            true
        }
        Ok(stranger) => {
            sys::close(stranger);
            false
        }
        Err(_) => false,
    });
    far
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready_for(fd: c_int) -> i16 {
        let mut p = libc::pollfd {
            fd,
            events: libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut p, 1, 0) };
        p.revents
    }

    #[test]
    fn placeholder_is_never_ready_until_its_other_end_is_closed() {
        let [fd, far] = placeholder().unwrap();
        let mut byte = [0];
        assert_eq!(ready_for(fd), 0);
        assert!(is_one(fd));
        // Blocking calls return at once.
        let begun = Instant::now();
        assert_eq!(sys::recv(fd, &mut byte, 0), Err(libc::EAGAIN));
        assert_eq!(sys::send(fd, b"x", libc::MSG_NOSIGNAL), Err(libc::EAGAIN));
        assert!(begun.elapsed() < Duration::from_secs(1));
        assert_eq!(ready_for(fd), 0);
        end_placeholder(far);
        assert_ne!(ready_for(fd) & libc::POLLHUP, 0);
        assert_eq!(sys::recv(fd, &mut byte, 0), Err(libc::ECONNRESET));
        assert_eq!(sys::send(fd, b"x", libc::MSG_NOSIGNAL), Err(libc::EPIPE));
        sys::close(fd);
    }

    #[test]
    fn nobody_can_connect_to_a_stand_in() {
        let [near, far] = placeholder().unwrap();
        let all_ready =
            [ShownEnds::Neither, ShownEnds::Read, ShownEnds::Both].map(|e| ready(e).unwrap());
        for fd in [near, far].into_iter().chain(all_ready) {
            let name = RawAddr::local(fd).unwrap();
            // Only the address family: the socket has no name by which another process could find it.
            assert_eq!(name.len as usize, size_of::<libc::sa_family_t>());
        }
        [near, far].into_iter().for_each(sys::close);
    }

    #[test]
    fn ready_is_always_ready() {
        let open = libc::POLLIN | libc::POLLOUT;
        let read = open | libc::POLLRDHUP;
        for (ended, shown, refusal) in [
            (ShownEnds::Neither, open, libc::EPIPE),
            (ShownEnds::Read, read, libc::ECONNREFUSED),
            (ShownEnds::Both, read | libc::POLLHUP, libc::EPIPE),
        ] {
            let fd = ready(ended).unwrap();
            assert_eq!(ready_for(fd), shown, "{ended:?}");
            assert_eq!(ready(ended).unwrap(), fd);
            assert_eq!(ready_under(|ready| ready == fd), Some(fd));
            assert!(is_one(fd) && is_ours(fd));
            let mut byte = [0];
            assert_eq!(sys::recv(fd, &mut byte, libc::MSG_PEEK), Ok(0));
            assert_eq!(sys::send(fd, b"x", libc::MSG_NOSIGNAL), Err(refusal));
            assert_eq!(ready_for(fd), shown, "after a send: {ended:?}");
        }
        assert!(!is_one(0));
    }

    #[test]
    fn a_stranger_who_connects_first_is_not_taken() {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        use std::os::fd::{AsRawFd, IntoRawFd};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut strangers: Vec<_> = (0..5).map(|_| TcpStream::connect(at).unwrap()).collect();
        for stranger in &mut strangers {
            stranger.write_all(b"evil").unwrap();
        }
        let near = sys::socket(libc::AF_INET, libc::SOCK_STREAM).unwrap();
        let far = join(listener.as_raw_fd(), near).unwrap();
        sys::send(far, b"ours", 0).unwrap();
        let mut buf = [0; 8];
        assert_eq!(sys::recv(near, &mut buf, 0), Ok(4));
        assert_eq!(&buf[..4], b"ours");
        assert_eq!(sys::readable(far), 0);
        sys::close(near);
        sys::close(far);
        sys::close(listener.into_raw_fd());
    }

    const DEAD: i16 =
        libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP | libc::POLLRDHUP;

    /// Reads the bytes, and then twice more: `end` holds the expected results of these two reads.
    fn read_up(fd: c_int, bytes: &[u8], end: [Result<usize, Errno>; 2]) {
        let mut buf = vec![0; bytes.len() + 1];
        if !bytes.is_empty() {
            assert_eq!(sys::recv(fd, &mut buf, 0), Ok(bytes.len()));
            assert_eq!(&buf[..bytes.len()], bytes);
        }
        for want in end {
            assert_eq!(sys::recv(fd, &mut buf, 0), want);
        }
    }

    #[test]
    fn unix_sockets_serve_where_there_is_no_loopback() {
        let alone = std::thread::spawn(|| {
            // SAFETY: concerns this thread only.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                println!(
                    "skip: unix_sockets_serve_where_there_is_no_loopback: a network namespace needs CAP_SYS_ADMIN"
                );
                return;
            }
            let fd = over(Departure::Reset, b"unread", libc::AF_INET).unwrap();
            assert_eq!(ready_for(fd), DEAD);
            read_up(fd, b"unread", [Err(libc::ECONNRESET), Ok(0)]);
            sys::close(fd);
            let fd = over(Departure::Closed, b"unread", libc::AF_INET).unwrap();
            read_up(fd, b"unread", [Ok(0), Ok(0)]);
            sys::close(fd);
        });
        alone.join().unwrap();
    }

    #[test]
    fn a_connection_that_is_over_behaves_as_in_the_kernel() {
        let much: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        for bytes in [&b""[..], b"unread", &much] {
            let fd = over(Departure::Reset, bytes, libc::AF_INET).unwrap();
            assert_eq!(ready_for(fd), DEAD);
            read_up(fd, bytes, [Err(libc::ECONNRESET), Ok(0)]);
            sys::close(fd);

            let fd = over(Departure::Refused, bytes, libc::AF_INET).unwrap();
            assert_eq!(ready_for(fd), DEAD);
            assert_eq!(sys::send(fd, b"x", 0), Err(libc::EPIPE));
            assert_eq!(ready_for(fd), DEAD & !libc::POLLERR);
            read_up(fd, bytes, [Ok(0), Ok(0)]);
            sys::close(fd);

            let fd = over(Departure::Closed, bytes, libc::AF_INET).unwrap();
            let open = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
            assert_eq!(ready_for(fd), open);
            read_up(fd, bytes, [Ok(0), Ok(0)]);
            assert_eq!(sys::send(fd, b"x", 0), Ok(1));
            sys::close(fd);
        }
        assert_eq!(
            over(Departure::Reset, &vec![0; MOST + 1], libc::AF_INET),
            Err(libc::EMSGSIZE)
        );
    }
}
