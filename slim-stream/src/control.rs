//! The control operations on a stream: drain, replay, trim, probe.
//!
//! Unless an operation says otherwise, data calls are barred meanwhile ([`Stream::bar`]).

use libc::c_int;
use slim_core::memory::{self, OutOfMemory};
use slim_core::replay::OutOfRange;
use slim_sys as sys;
use std::fmt;

use crate::answers::{Delivery, Drained, Probe, Undelivered};
use crate::receive_half::ReceiveHalf;
use crate::send_half::SendHalf;
use crate::start::Start;
use crate::stream::Stream;

/// When a relayed flow keeps more bytes than this, a resume must tell how many of them the peer has.
const RELAYED_MAX: u64 = 8 << 20;

/// Why a flow must escalate: the application would not read what the peer has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DrainError {
    /// There is no memory for received bytes.
    NoMemory,
    /// The kernel's byte counts differ from ours.
    CountMismatch(String),
}

impl fmt::Display for DrainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMemory => f.write_str("no memory for received bytes"),
            Self::CountMismatch(how) => f.write_str(how),
        }
    }
}

impl std::error::Error for DrainError {}

impl From<OutOfMemory> for DrainError {
    fn from(_: OutOfMemory) -> Self {
        Self::NoMemory
    }
}

impl Stream {
    /// The positions of both directions. They are final when the transport has been drained.
    pub fn drained(&self) -> Drained {
        Drained {
            received: self.received(),
            sent: self.sent(),
        }
    }

    /// Reads the old transport `fd` into the stash until it is empty. The result is final: the peer has stopped trimming, and
    /// no data call is inside. A second call does nothing. `sent`: bytes sent since the flow began.
    ///
    /// # Errors
    /// The flow must escalate.
    pub fn drain(&self, half: &mut ReceiveHalf, fd: c_int, sent: u64) -> Result<(), DrainError> {
        if half.is_drained() {
            return Ok(());
        }
        half.set_drained();
        self.read_dry(half, fd)?;
        let dry = Start::of_dry(self, sent, fd);
        if dry.is_some() {
            half.set_over();
        }
        let now = dry.or_else(|| Start::of(self, sent, fd));
        let ended = || sys::has_peer_fin(fd);
        let why = now.and_then(|now| half.start().contradiction(now, ended));
        why.map_or(Ok(()), |why| Err(DrainError::CountMismatch(why)))
    }

    fn read_dry(&self, half: &mut ReceiveHalf, fd: c_int) -> Result<(), OutOfMemory> {
        // Mostly the transport is empty, and thousands of flows may be drained at once: begin with a small buffer.
        let (mut small, mut large) = ([0; 512], Vec::new());
        // The kernel reports each error once, and may do so before the queue is empty. So only EAGAIN and EOF end the reading.
        let mut errors = 0;
        loop {
            let buf = match large.is_empty() {
                true => &mut small[..],
                false => &mut large[..],
            };
            match sys::recv(fd, buf, libc::MSG_DONTWAIT) {
                Ok(0) | Err(libc::EAGAIN) => return Ok(()),
                Ok(n) => {
                    self.stash(half, &buf[..n])?;
                    let full = n == buf.len() && large.is_empty();
                    if full && memory::reserve(&mut large, 64 << 10).is_ok() {
                        large.resize(64 << 10, 0);
                    }
                }
                Err(libc::EINTR) => {}
                Err(_) if errors < 2 => errors += 1,
                Err(_) => return Ok(()),
            }
        }
    }

    /// Discards the unread bytes of the transport `fd`, but counts them. Shuts the transport down and marks it as drained.
    pub fn discard_unread(&self, half: &mut ReceiveHalf, fd: c_int) {
        sys::shutdown(fd, libc::SHUT_RDWR);
        self.add_received(sys::readable(fd));
        half.set_drained();
    }

    /// Appends bytes that control has read for the stream to the stash, and counts them.
    ///
    /// # Errors
    /// There is no memory for the bytes. They are counted all the same.
    pub fn stash(&self, half: &mut ReceiveHalf, data: &[u8]) -> Result<(), OutOfMemory> {
        self.add_received(data.len() as u64);
        half.stash.push(data)
    }

    /// Moves bytes that have arrived on the transport `fd` to the end of the stash, until the stash holds `want` bytes. So a call
    /// that reads or peeks at the stash also gets the bytes behind it.
    pub fn stash_more(&self, half: &mut ReceiveHalf, fd: c_int, want: usize) {
        let mut buf = [0; 4096];
        // The transport's error must stay with it. While bytes are unread, `recv` reports none.
        while half.stash.len() < want && sys::readable(fd) > 0 {
            let most = buf.len().min(want - half.stash.len());
            let look = libc::MSG_PEEK | libc::MSG_DONTWAIT;
            let Ok(n @ 1..) = sys::recv(fd, &mut buf[..most], look) else {
                return;
            };
            if half.stash.push(&buf[..n]).is_err() {
                return;
            }
            let _ = sys::recv(fd, &mut buf[..n], libc::MSG_DONTWAIT);
            self.add_received(n as u64);
        }
    }

    /// Makes `fd`, on which everything has been replayed, the stream's transport. If the application has ended our direction, it
    /// is ended on `fd`, too. A call that ends the direction first records that ([`Stream::end_at`]) and then shuts the present
    /// transport; control keeps it from shutting a transport during this call.
    /// `relayed`: it goes through the witness.
    pub fn install(&self, half: &mut ReceiveHalf, fd: c_int, relayed: bool) {
        self.set_relayed(relayed);
        if self.local_final().is_some() {
            sys::shutdown(fd, libc::SHUT_WR);
        }
        half.carry(Start::of(self, self.sent(), fd));
    }

    /// Trims the replay buffer: the peer holds everything before `peer_received`.
    pub fn trim(&self, peer_received: u64) {
        self.with_half(|half| half.replay.trim(peer_received));
    }

    /// Passes the kept bytes from position `from` on to `f`, in contiguous pieces, until `f` takes less than it was offered or no
    /// bytes are left. Returns the position reached.
    ///
    /// # Errors
    /// The peer asks for bytes that it had acknowledged.
    pub fn replay(&self, from: u64, f: &mut dyn FnMut(&[u8]) -> usize) -> Result<u64, OutOfRange> {
        self.with_half(|half| {
            let mut at = from;
            while let Some(piece) = half.replay.chunk_at(at)? {
                let took = f(piece);
                at += took as u64;
                if took < piece.len() {
                    break;
                }
            }
            Ok(at)
        })
    }

    /// Asks the kernel how far the peer has acknowledged on the transport `fd`, and trims. Data calls need not be barred. If all
    /// is acknowledged the stream is marked clean.
    pub fn probe(&self, fd: c_int) -> Probe {
        // On a relayed transport only a resume tells how much the peer has, and bytes that wait for one look like a stall.
        let relayed = self.is_relayed();
        let unacked = || match relayed {
            true => u64::MAX,
            false => sys::unacked(fd).unwrap_or(0),
        };
        let probe = self.probe_by(unacked, || relayed || sys::is_stuck(fd));
        Probe {
            relayed,
            full: relayed && probe.unacked >= RELAYED_MAX,
            ..probe
        }
    }

    /// [`Stream::probe`] for a transport of another kind. The closures return the number of unacknowledged bytes, and whether
    /// the transport looks [stuck](Probe::stuck).
    pub fn probe_by(&self, unacked: impl FnOnce() -> u64, stuck: impl FnOnce() -> bool) -> Probe {
        let asked = self.try_with_half(|half| {
            let unacked = half.trim_to(unacked());
            if unacked == 0 {
                // The flow is quiet and may stay so: the next send begins with a small chunk again.
                half.replay.shrink();
                // Nothing can be sent before the half is returned, so no later send is missed.
                self.clear_dirty();
            }
            (half.sent(), unacked)
        });
        let (sent, unacked) = match asked {
            None => return Probe::BUSY,
            // `stuck` matters only while bytes are unacknowledged.
            Some((sent, 0)) => {
                return Probe {
                    acked: sent,
                    ..Probe::default()
                };
            }
            Some(asked) => asked,
        };
        Probe {
            unacked,
            acked: sent - unacked,
            stuck: stuck(),
            ..Probe::default()
        }
    }

    /// The state of delivery on the transport `fd` of a flow that the application has closed, as the agent knows by now. The kernel
    /// delivers the rest. Only a resume tells whether a relayed transport has delivered it, and only a resume tells the peer of such a
    /// transport where the stream ends. So it counts as broken until one has done both.
    pub fn delivery(&self, fd: c_int) -> Delivery {
        let mut unacked = self.undelivered_on(fd).unwrap_or(0);
        // Both sides have ended the connection, or it is broken. The count is final now: the last acknowledgement may have come after the
        // first count.
        let over = unacked > 0 && sys::tcp_state(fd) == Some(sys::TCP_CLOSE);
        if over {
            unacked = self.undelivered_on(fd).unwrap_or(0);
        }
        // While calls are barred a resume may be under way that does not tell the end yet. And nothing is trimmed then: the peer has been
        // told what the replay buffer holds.
        let believed = !self.is_barred();
        let dead = match self.is_relayed() {
            true => !(believed && self.will_tell_end()) || unacked > 0,
            false => over && unacked > 0,
        };
        // The peer has sent bytes to a closed descriptor. The kernel answers these with a reset when we close the transport.
        if !dead && (unacked == 0 || sys::readable(fd) > 0) {
            return Delivery::Done;
        }
        let owed = |half: &mut SendHalf| half.undelivered(believed.then_some(unacked));
        let owed = self.try_with_half(owed).unwrap_or_default();
        match dead {
            true => Delivery::Broken(owed),
            false => Delivery::Undelivered(owed),
        }
    }

    /// The unacknowledged bytes of a flow without a transport: all that are kept.
    pub fn undelivered(&self) -> Undelivered {
        self.try_with_half(|half| half.undelivered(None))
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    /// A stream, its halves of a transport that this end has dialled, and the peer's end of that transport.
    fn stream() -> (Stream, ReceiveHalf, TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        (Stream::new(), ReceiveHalf::new(true), near, far)
    }

    fn send(stream: &Stream, sock: &TcpStream, data: &[u8]) {
        let mut sock = sock;
        sock.write_all(data).unwrap();
        stream.with_half(|half| {
            let copy =
                |from: usize, replay: &mut slim_core::replay::Replay| replay.push(&data[from..]);
            half.account(data.len(), copy, || u64::MAX);
        });
    }

    /// Waits until the kernel has `n` bytes for `sock`.
    fn await_bytes(sock: &TcpStream, n: u64) {
        let begun = Instant::now();
        while sys::readable(sock.as_raw_fd()) < n {
            assert!(begun.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn kept_from(stream: &Stream, from: u64) -> Vec<u8> {
        let mut kept = Vec::new();
        let all = stream.replay(from, &mut |piece| {
            kept.extend(piece);
            piece.len()
        });
        assert_eq!(all, Ok(stream.sent()));
        kept
    }

    #[test]
    fn draining_stashes_all_unread_bytes_and_is_done_once() {
        let (stream, mut half, near, mut far) = stream();
        let fd = near.as_raw_fd();
        far.write_all(&[7; 3000]).unwrap();
        await_bytes(&near, 3000);
        assert_eq!(sys::recv(fd, &mut [0; 1000], 0), Ok(1000));
        stream.add_received(1000);
        stream.bar();
        half.shut_down(fd);
        stream.drain(&mut half, fd, 0).unwrap();
        assert_eq!((stream.drained().received, half.stash.len()), (3000, 2000));
        assert!(half.is_drained() && half.is_cut());
        stream.drain(&mut half, fd, 0).unwrap();
        // The next transport begins where this one has ended.
        let (_, _, next, mut far) = self::stream();
        stream.install(&mut half, next.as_raw_fd(), false);
        assert!(half.has_moved() && !half.is_drained() && !half.is_cut());
        far.write_all(&[8; 10]).unwrap();
        await_bytes(&next, 10);
        stream.stash_more(&mut half, next.as_raw_fd(), 2004);
        assert_eq!((stream.received(), half.stash.len()), (3004, 2004));
        stream.drain(&mut half, next.as_raw_fd(), 0).unwrap();
        assert_eq!((stream.received(), half.stash.len()), (3010, 2010));
    }

    #[test]
    fn a_stream_that_has_ended_ends_on_the_next_transport() {
        let (stream, mut half, near, _far) = stream();
        stream.bar();
        stream.drain(&mut half, near.as_raw_fd(), 0).unwrap();
        assert!(stream.end_at(0));
        let (_, _, next, mut far) = self::stream();
        stream.install(&mut half, next.as_raw_fd(), false);
        far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn bytes_read_or_written_past_us_are_found() {
        for reads in [true, false] {
            let (stream, mut half, near, mut far) = stream();
            let fd = near.as_raw_fd();
            far.write_all(b"ab").unwrap();
            await_bytes(&near, 2);
            if reads {
                assert_eq!(sys::recv(fd, &mut [0; 1], 0), Ok(1));
            } else {
                // One byte more would be taken for our FIN, so send two.
                assert_eq!(sys::send(fd, b"xy", 0), Ok(2));
            }
            stream.bar();
            let drained = stream.drain(&mut half, fd, 0);
            assert!(
                matches!(drained, Err(DrainError::CountMismatch(_))),
                "{reads}"
            );
        }
    }

    #[test]
    fn acknowledged_bytes_are_trimmed_and_the_others_can_be_replayed() {
        let (stream, _, near, mut far) = stream();
        let fd = near.as_raw_fd();
        stream.begin();
        send(&stream, &near, b"hello");
        stream.mark_dirty(|| ());
        far.read_exact(&mut [0; 5]).unwrap();
        let begun = Instant::now();
        while stream.probe(fd).unacked > 0 {
            assert!(begun.elapsed() < Duration::from_secs(10));
        }
        let mut told = false;
        stream.mark_dirty(|| told = true);
        assert!(told, "the stream is clean, so the agent must be told");
        // Nothing is kept but the last acknowledged byte, in whose place a forged FIN may have been acknowledged.
        assert!(stream.replay(3, &mut |_| 0).is_err());
        assert_eq!(stream.undelivered(), Undelivered { kept: 0, acked: 5 });
        // While the kernel's number cannot be trusted, everything is kept.
        stream.bar();
        assert_eq!(stream.unacked(fd), u64::MAX);
        send(&stream, &near, b" world");
        assert_eq!(kept_from(&stream, 5), b" world");
        assert_eq!(stream.replay(5, &mut |_| 2), Ok(7));
        stream.trim(8);
        assert_eq!(kept_from(&stream, 8), b"rld");
    }

    #[test]
    fn a_probe_does_not_wait_for_a_sender() {
        let (stream, _, near, _far) = stream();
        stream.lock_half();
        assert_eq!(stream.probe(near.as_raw_fd()), Probe::BUSY);
        stream.unlock_half();
        assert_eq!(stream.probe(near.as_raw_fd()).unacked, 0);
    }

    #[test]
    fn delivery_is_done_when_all_is_acknowledged_and_broken_when_the_transport_is() {
        let (stream, _, near, far) = stream();
        let fd = near.as_raw_fd();
        assert_eq!(stream.delivery(fd), Delivery::Done);
        // Send more than the peer's kernel takes while its application does not read.
        near.set_nonblocking(true).unwrap();
        while sys::send(fd, &[0; 4096], libc::MSG_DONTWAIT).is_ok_and(|n| {
            stream
                .with_half(|half| half.account(n, |at, r| r.push(&[0; 4096][at..n]), || u64::MAX));
            true
        }) {}
        let Delivery::Undelivered(owed) = stream.delivery(fd) else {
            panic!("bytes are unacknowledged");
        };
        assert!(owed.kept > 0 && owed.acked + owed.kept as u64 == stream.sent());
        // Dropping a socket with unread bytes resets the connection.
        drop(far);
        let begun = Instant::now();
        while !matches!(stream.delivery(fd), Delivery::Broken(_)) {
            assert!(begun.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The acknowledgement of the last bytes closes a connection that both sides have ended. It may come between two questions to the
    /// kernel.
    #[test]
    fn delivery_is_done_when_the_last_acknowledgement_closes_the_connection() {
        for n in 0..2_000 {
            let (stream, _, near, mut far) = stream();
            let fd = near.as_raw_fd();
            far.set_nonblocking(true).unwrap();
            let reader = std::thread::spawn(move || {
                let (mut piece, mut got) = ([0; 4096], 0);
                while got < 4096 {
                    got += far.read(&mut piece).unwrap_or(0);
                }
            });
            assert!(stream.enter());
            assert_eq!(stream.send(fd, &[7; 4096], || {}), Ok(4096));
            near.shutdown(std::net::Shutdown::Write).unwrap();
            while let owed @ (Delivery::Undelivered(_) | Delivery::Broken(_)) = stream.delivery(fd)
            {
                assert!(matches!(owed, Delivery::Undelivered(_)), "connection {n}");
            }
            reader.join().unwrap();
        }
    }

    /// How a connection ends before its bytes are delivered.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum HowBroken {
        PeerResets,
        TimedOut,
        Disconnected,
    }

    /// Breaks a connection on which `bytes` bytes are under way, and then our FIN if `ends`, and asks at all times.
    fn break_connection(local: IpAddr, how: HowBroken, bytes: usize, ends: bool) {
        let case = format!("{local} {how:?} {bytes} {ends}");
        let listener = TcpListener::bind((local, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let (stream, fd) = (Stream::new(), near.as_raw_fd());
        make_deaf(far.as_raw_fd());
        assert!(stream.enter());
        near.set_nonblocking(true).unwrap();
        // More than the peer's window is partly unsent.
        let sent = stream.send(fd, &vec![7; bytes], || {}).unwrap_or(0);
        assert_eq!(sent > 0, bytes > 0, "{case}");
        if ends {
            near.shutdown(std::net::Shutdown::Write).unwrap();
        }
        assert!(
            matches!(stream.delivery(fd), Delivery::Undelivered(_)),
            "{case}"
        );
        match how {
            HowBroken::PeerResets => {
                let fd = far.as_raw_fd();
                sys::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &sys::AT_ONCE);
                drop(far);
            }
            HowBroken::TimedOut => {
                let ms: c_int = 50;
                sys::set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, &ms);
            }
            HowBroken::Disconnected => sys::disconnect(fd),
        }
        let begun = Instant::now();
        loop {
            match stream.delivery(fd) {
                Delivery::Done => panic!("{case}: nothing has been delivered"),
                Delivery::Undelivered(_) => assert!(begun.elapsed().as_secs() < 10, "{case}"),
                Delivery::Broken(owed) => {
                    assert_eq!((owed.kept, owed.acked), (sent, 0), "{case}");
                    return;
                }
            }
        }
    }

    /// The kernel drops what arrives for the socket, and acknowledges nothing.
    fn make_deaf(fd: c_int) {
        let mut drop_all = [libc::sock_filter {
            code: 6, // BPF_RET | BPF_K
            jt: 0,
            jf: 0,
            k: 0,
        }];
        let program = libc::sock_fprog {
            len: 1,
            filter: drop_all.as_mut_ptr(),
        };
        let (at, len) = ((&raw const program).cast(), size_of_val(&program));
        // SAFETY: the kernel copies the program, which lives until the call returns.
        let set = unsafe {
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, at, len as u32)
        };
        assert_eq!(set, 0);
    }

    #[test]
    fn delivery_is_never_done_on_a_connection_that_breaks_with_bytes_under_way() {
        for local in [
            IpAddr::from(Ipv4Addr::LOCALHOST),
            Ipv6Addr::LOCALHOST.into(),
        ] {
            for how in [
                HowBroken::PeerResets,
                HowBroken::TimedOut,
                HowBroken::Disconnected,
            ] {
                for (bytes, ends) in [
                    (5_000, false),
                    (5_000, true),
                    (4 << 20, false),
                    (4 << 20, true),
                    (0, true),
                ] {
                    break_connection(local, how, bytes, ends);
                }
            }
        }
    }

    /// The peer does not believe the end of a relayed transport, so a resume must tell it where the stream ends.
    #[test]
    fn a_closed_flow_on_a_relayed_transport_is_done_after_a_resume_that_tells_its_end() {
        let (stream, mut half, near, mut far) = stream();
        let fd = near.as_raw_fd();
        stream.install(&mut half, fd, true);
        stream.end_at(stream.sent());
        // Unread bytes of the peer do not count.
        far.write_all(b"late").unwrap();
        await_bytes(&near, 4);
        // A resume that is under way may have begun before the end was known.
        stream.bar();
        assert!(matches!(stream.delivery(fd), Delivery::Broken(_)));
        stream.open();
        assert!(matches!(stream.delivery(fd), Delivery::Broken(_)));
        assert_eq!(stream.delivery(fd), Delivery::Done);
    }

    /// What the kernel of the witness has acknowledged, the peer need not have.
    #[test]
    fn a_relayed_transport_keeps_all_bytes_until_a_resume() {
        let (stream, mut half, near, mut far) = stream();
        let fd = near.as_raw_fd();
        stream.install(&mut half, fd, true);
        assert!(stream.enter());
        // Small and large sends take different ways.
        for data in [&[1u8; 5][..], &[2; 40_000], &[3; 30_000]] {
            assert_eq!(stream.send(fd, data, || {}), Ok(data.len()));
            far.read_exact(&mut vec![0; data.len()]).unwrap();
        }
        while sys::unacked(fd) != Ok(0) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let sent = stream.sent();
        let probe = stream.probe(fd);
        assert_eq!((probe.unacked, probe.acked), (70_005, sent - 70_005));
        assert!(probe.stuck && probe.relayed && !probe.full);
        assert_eq!(stream.undelivered_on(fd), Ok(70_005));
        assert!(matches!(stream.delivery(fd), Delivery::Broken(_)));
        // A resume has told what the peer has.
        stream.trim(sent - 5);
        assert_eq!(stream.probe(fd).unacked, 5);
        assert!(matches!(stream.delivery(fd), Delivery::Broken(_)));
        stream.trim(sent);
        assert_eq!(
            (stream.probe(fd).unacked, stream.delivery(fd)),
            (0, Delivery::Done)
        );
        // On a direct transport the kernel is believed again.
        stream.install(&mut half, fd, false);
        assert_eq!(stream.send(fd, b"more", || {}), Ok(4));
        while stream.probe(fd).unacked > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
