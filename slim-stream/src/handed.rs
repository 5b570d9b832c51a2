//! A stream that goes over to the next program, when a process executes one.

use std::time::Duration;

use libc::c_int;
use slim_core::saved::Saved;
use slim_sys as sys;

use crate::receive_half::ReceiveHalf;
use crate::start::Start;
use crate::stream::Stream;

/// How long a call that sends is waited for: some system calls that do not block.
const SENDING: Duration = Duration::from_millis(2);

/// A stream at one moment.
pub struct HandedStream {
    received: u64,
    peer_final: Option<u64>,
    local_final: Option<u64>,
    /// Position of the first byte in `kept`.
    kept_from: u64,
    /// The bytes that the peer may not have, and one before them if it is known.
    kept: Vec<u8>,
    /// Bytes that the peer has for certain.
    acked: u64,
    receiving: ReceiveHalf,
}

impl HandedStream {
    /// The stream now. `None` if a call is inside that sends, and stays there. Otherwise calls that send wait from now on, until
    /// [`Stream::take_back`]: there would be no copy of their bytes. The caller has its signals blocked.
    pub fn of(stream: &Stream, receiving: &ReceiveHalf) -> Option<Self> {
        if stream.is_relayed() || !stream.lock_half_within(SENDING) {
            return None;
        }
        // Code that runs in this thread before the exec must not wait for it.
        stream.holder_may_be_cancelled(true);
        let (acked, kept_from, kept) = stream.with_half(|half| {
            let acked = half.replay.start();
            // The replay buffer has one byte more, unless that one was skipped.
            let before = acked.checked_sub(1);
            let before = before.filter(|at| half.replay.chunk_at(*at).is_ok());
            let from = before.unwrap_or(acked);
            let mut kept = Vec::with_capacity(half.replay.len() + 1);
            while let Ok(Some(piece)) = half.replay.chunk_at(from + kept.len() as u64) {
                kept.extend(piece);
            }
            (acked, from, kept)
        });
        Some(HandedStream {
            received: stream.received(),
            peer_final: stream.peer_final(),
            local_final: stream.local_final(),
            kept_from,
            kept,
            acked,
            receiving: receiving.handed(),
        })
    }

    /// Sets a stream that has just been made to this state. Returns the receiving half.
    pub fn restore(self, stream: &Stream) -> ReceiveHalf {
        stream.set_received(self.received);
        if let Some(end) = self.peer_final {
            stream.set_peer_final(end);
        }
        if let Some(end) = self.local_final {
            stream.end_at(end);
        }
        stream.with_half(|half| {
            half.replay.skip_to(self.kept_from);
            half.replay.push(&self.kept);
            half.replay.trim(self.acked.min(half.replay.end()));
        });
        self.receiving
    }
}

impl Stream {
    /// The exec after [`HandedStream::of`] has failed: calls send again. For the same thread.
    pub fn take_back(&self) {
        self.holder_may_be_cancelled(false);
        self.unlock_half();
    }

    /// In the next program: counts the bytes that other threads of the program before have received on the transport `fd` after the
    /// stream was handed over. The exec ended these threads.
    pub fn catch_up(&self, half: &ReceiveHalf, fd: c_int) {
        let now = Start::of(self, self.sent(), fd);
        let Some((now, state)) = now.zip(sys::tcp_state(fd)) else {
            return;
        };
        // An end counts like a byte. If bytes of a connection that is over are unread, it is not known whether it was ended. Then a byte
        // too many is counted, which the resume refuses, not one too few, which would come twice.
        let ended = match state {
            sys::TCP_CLOSE => sys::readable(fd) == 0 && sys::has_peer_fin(fd),
            _ => sys::is_state_of_end(state),
        };
        let missed = half.start().uncounted(now);
        self.add_received(missed.saturating_sub(ended.into()));
    }
}

impl Saved for HandedStream {
    fn save(&self, out: &mut Vec<u8>) {
        self.received.save(out);
        (self.peer_final, self.local_final).save(out);
        (self.kept_from, self.acked).save(out);
        self.kept.save(out);
        self.receiving.save(out);
    }

    fn load(from: &mut &[u8]) -> Option<Self> {
        let received = Saved::load(from)?;
        let (peer_final, local_final) = Saved::load(from)?;
        let (kept_from, acked) = Saved::load(from)?;
        Some(HandedStream {
            received,
            peer_final,
            local_final,
            kept_from,
            acked,
            kept: Saved::load(from)?,
            receiving: Saved::load(from)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through_bytes(handed: &HandedStream) -> HandedStream {
        let mut bytes = Vec::new();
        handed.save(&mut bytes);
        for len in 0..bytes.len() {
            assert!(HandedStream::load(&mut &bytes[..len]).is_none());
        }
        HandedStream::load(&mut &bytes[..]).unwrap()
    }

    #[test]
    fn counters_copies_and_stash_come_over() {
        let (old, mut half) = (Stream::new(), ReceiveHalf::new(true));
        old.renew();
        old.add_received(70);
        old.set_peer_final(90);
        half.stash.push(b"unread").unwrap();
        old.with_half(|half| {
            half.replay.push(b"0123456789");
            half.replay.trim(4);
        });
        let handed = HandedStream::of(&old, &half).unwrap();
        let new = Stream::new();
        new.renew();
        let half = through_bytes(&handed).restore(&new);
        assert_eq!((new.received(), new.sent()), (70, 10));
        assert_eq!((new.peer_final(), new.local_final()), (Some(90), None));
        let (mut stash, mut kept) = (vec![0; half.stash.len()], Vec::new());
        half.stash.peek(0, &mut stash);
        assert_eq!(stash, b"unread");
        assert!(half.dialled() && !half.has_moved());
        // One acknowledged byte comes over, too.
        let all = new.replay(3, &mut |piece| {
            kept.extend(piece);
            piece.len()
        });
        assert_eq!((all, &kept[..]), (Ok(10), &b"3456789"[..]));
        assert!(new.replay(2, &mut |_| 0).is_err());
    }

    #[test]
    fn a_stream_that_has_sent_nothing_comes_over() {
        let (old, half) = (Stream::new(), ReceiveHalf::new(false));
        old.renew();
        let new = Stream::new();
        new.renew();
        through_bytes(&HandedStream::of(&old, &half).unwrap()).restore(&new);
        assert_eq!((new.received(), new.sent()), (0, 0));
    }

    #[test]
    fn bytes_that_were_received_after_the_handing_over_are_counted() {
        use std::io::{Read, Write};
        for ends in [false, true] {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let mut near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut far = listener.accept().unwrap().0;
            let fd = std::os::fd::AsRawFd::as_raw_fd(&near);
            let (old, half) = (Stream::new(), ReceiveHalf::new(true));
            old.renew();
            let handed = HandedStream::of(&old, &half).unwrap();
            // Another thread, before the exec.
            far.write_all(b"received, unread").unwrap();
            near.read_exact(&mut [0; 8]).unwrap();
            if ends {
                far.shutdown(std::net::Shutdown::Write).unwrap();
                while sys::tcp_state(fd).is_some_and(|state| !sys::is_state_of_end(state)) {}
            }
            let new = Stream::new();
            new.renew();
            let mut half = handed.restore(&new);
            new.catch_up(&half, fd);
            new.catch_up(&half, fd);
            assert_eq!(new.received(), 8, "{ends}");
            new.bar();
            assert_eq!(new.drain(&mut half, fd, 0), Ok(()));
            assert_eq!((new.received(), half.stash.len()), (16, 8));
        }
    }

    /// Both ends of a connection, and its stream as the next program gets it after `meanwhile`.
    fn next_program(
        meanwhile: impl FnOnce(&mut std::net::TcpStream, std::net::TcpStream),
    ) -> (std::net::TcpStream, Stream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let (old, half) = (Stream::new(), ReceiveHalf::new(true));
        old.renew();
        let handed = HandedStream::of(&old, &half).unwrap();
        meanwhile(&mut near, far);
        let new = Stream::new();
        new.renew();
        let half = handed.restore(&new);
        new.catch_up(&half, std::os::fd::AsRawFd::as_raw_fd(&near));
        (near, new)
    }

    #[test]
    fn a_byte_that_was_received_before_a_reset_is_no_end() {
        use std::io::{Read, Write};
        for (bytes, ends, want) in [(1, false, 1), (0, true, 0), (1, true, 1), (9, false, 9)] {
            let (_near, stream) = next_program(|near, mut far| {
                far.write_all(&[7; 9][..bytes]).unwrap();
                near.read_exact(&mut [0; 9][..bytes]).unwrap();
                let fd = std::os::fd::AsRawFd::as_raw_fd(near);
                if ends {
                    far.shutdown(std::net::Shutdown::Write).unwrap();
                    while sys::tcp_state(fd) != Some(sys::TCP_CLOSE_WAIT) {}
                }
                let (level, option) = (libc::SOL_SOCKET, libc::SO_LINGER);
                let far_fd = std::os::fd::AsRawFd::as_raw_fd(&far);
                sys::set_option(far_fd, level, option, &sys::AT_ONCE);
                drop(far);
                while sys::tcp_state(fd) != Some(sys::TCP_CLOSE) {}
            });
            assert_eq!(stream.received(), want, "{bytes} {ends}");
        }
    }

    #[test]
    fn no_call_sends_after_the_handing_over_until_the_exec_has_failed() {
        let (stream, half) = (Stream::new(), ReceiveHalf::new(true));
        assert!(HandedStream::of(&stream, &half).is_some());
        assert!(!stream.try_lock_half() && stream.waits_with_half());
        // A handler of the executing thread does not wait.
        assert_eq!(stream.sent(), 0);
        stream.take_back();
        assert!(stream.try_lock_half() && !stream.waits_with_half());
    }

    #[test]
    fn nothing_is_handed_over_while_a_call_sends() {
        let stream = Stream::new();
        stream.lock_half();
        assert!(HandedStream::of(&stream, &ReceiveHalf::new(true)).is_none());
        stream.unlock_half();
    }
}
