//! Ready-made data calls for a front end. They do not block, and the caller has [entered](Stream::enter) the stream.

use libc::c_int;
use slim_core::Cause;
use slim_sys as sys;

use crate::stream::{Inside, Stream};

impl Stream {
    /// Sends as much as the transport `fd` takes at once, and keeps a copy. `tell` is called when the agent must be told of
    /// unacknowledged bytes.
    ///
    /// # Errors
    /// The kernel's error; `EAGAIN` if it takes nothing.
    pub fn send(&self, fd: c_int, data: &[u8], tell: impl FnOnce()) -> Result<usize, Cause> {
        let sent = self.with_half(|half| {
            let n = sys::send(fd, data, libc::MSG_DONTWAIT)?;
            let copy = |from, replay: &mut slim_core::replay::Replay| replay.push(&data[from..n]);
            half.account(n, copy, || self.unacked(fd));
            Ok(n)
        });
        self.mark_dirty(tell);
        sent.map_err(Cause::Errno)
    }

    /// Receives what has arrived on the transport `fd`; 0 bytes at the announced end of the peer's stream. The caller has
    /// [entered](Stream::enter).
    ///
    /// # Errors
    /// The kernel's error, `EAGAIN` included; `Cause::Eof` at an end that the peer has not announced.
    pub fn recv(&self, fd: c_int, buf: &mut [u8]) -> Result<usize, Cause> {
        let n = sys::recv(fd, buf, libc::MSG_DONTWAIT).map_err(Cause::Errno)?;
        self.count(&Inside::Counted, n);
        let received = self.received();
        match n > 0 || buf.is_empty() || self.ends_at(received) {
            true => Ok(n),
            false => Err(Cause::Eof { received }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn bytes_sent_are_received_and_only_an_announced_end_is_no_error() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let (sender, receiver) = (Stream::new(), Stream::new());
        let mut told = 0;
        assert!(sender.enter() && receiver.enter());
        assert_eq!(
            receiver.recv(far.as_raw_fd(), &mut [0]),
            Err(Cause::Errno(libc::EAGAIN))
        );
        for _ in 0..2 {
            assert_eq!(sender.send(near.as_raw_fd(), b"hello", || told += 1), Ok(5));
        }
        assert_eq!((told, sender.sent()), (1, 10));
        near.shutdown(Shutdown::Write).unwrap();
        let mut buf = [0; 20];
        sys::poll(far.as_raw_fd(), libc::POLLIN, None);
        assert_eq!(receiver.recv(far.as_raw_fd(), &mut buf), Ok(10));
        let end = Cause::Eof { received: 10 };
        assert_eq!(receiver.recv(far.as_raw_fd(), &mut buf), Err(end));
        receiver.set_peer_final(10);
        assert_eq!(receiver.recv(far.as_raw_fd(), &mut buf), Ok(0));
    }
}
