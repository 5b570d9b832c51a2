//! Taking control messages out of a TCP stream, and not a byte more.

use std::io;

use slim_core::wire::layout::header;
use slim_core::wire::{self, HEADER_LEN, MAX_LEN};

use crate::sys;

/// Messages that one side sends on a connection at most; what comes then is data.
const MESSAGES: u8 = 2;

/// Puts messages together.
pub(crate) struct Reader {
    buf: [u8; MAX_LEN],
    have: usize,
    /// Whole messages read so far.
    messages: u8,
}

pub(crate) enum Read {
    Message(Vec<u8>),
    Nothing,
    /// The connection ended (0) or failed.
    Lost(i32),
}

impl Reader {
    pub(crate) fn new() -> Self {
        Reader {
            buf: [0; MAX_LEN],
            have: 0,
            messages: 0,
        }
    }

    /// Whether no more messages may be read.
    pub(crate) fn is_done(&self) -> bool {
        self.messages == MESSAGES
    }

    /// One message, if it is there. Never reads beyond its end.
    pub(crate) fn step(&mut self, fd: i32) -> Read {
        if self.is_done() {
            return Read::Nothing;
        }
        loop {
            let want = match self.wanted() {
                Some(want) => want,
                None => return Read::Lost(libc::EPROTO),
            };
            if want == self.have {
                let message = self.buf.get(..self.have).unwrap_or_default().to_vec();
                self.have = 0;
                self.messages += 1;
                return Read::Message(message);
            }
            let Some(space) = self.buf.get_mut(self.have..want) else {
                return Read::Lost(libc::EPROTO);
            };
            match sys::recv(fd, space) {
                Ok(0) => return Read::Lost(0),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Read::Nothing,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Read::Lost(e.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
    }

    /// Up to where to read: the header, then what it says. `None`: this is no message of ours.
    fn wanted(&self) -> Option<usize> {
        if self.have < HEADER_LEN {
            return Some(HEADER_LEN);
        }
        if !self.buf.starts_with(&wire::MAGIC) {
            return None;
        }
        let length = self.buf.get(header::LENGTH..header::LENGTH + 2)?;
        let length = usize::from(u16::from_be_bytes(length.try_into().ok()?));
        (HEADER_LEN < length && length <= MAX_LEN).then_some(length)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn message(body: &[u8]) -> Vec<u8> {
        let mut m = wire::MAGIC.to_vec();
        m.extend([wire::VERSION, 1]);
        m.extend(((HEADER_LEN + body.len()) as u16).to_be_bytes());
        m.extend(body);
        m
    }

    /// Waits for the bytes to have arrived, since they are sent to another socket.
    fn step(reader: &mut Reader, stream: &TcpStream) -> Read {
        stream.peek(&mut [0]).unwrap();
        reader.step(stream.as_raw_fd())
    }

    #[test]
    fn bytes_after_a_message_stay_in_the_socket() {
        let (mut near, far) = pair();
        let mut all = message(b"hello");
        all.extend(b"data of the flow");
        near.write_all(&all).unwrap();
        let mut reader = Reader::new();
        let Read::Message(m) = step(&mut reader, &far) else {
            panic!("no message")
        };
        assert_eq!(m, message(b"hello"));
        let mut rest = [0; 16];
        far.peek(&mut rest).unwrap();
        assert_eq!(&rest, b"data of the flow");
    }

    #[test]
    fn the_second_message_is_the_last() {
        let (mut near, far) = pair();
        for n in [b"1", b"2", b"3"] {
            near.write_all(&message(n)).unwrap();
        }
        let mut reader = Reader::new();
        for n in [b"1", b"2"] {
            let Read::Message(m) = step(&mut reader, &far) else {
                panic!("no message")
            };
            assert_eq!(m, message(n));
        }
        assert!(matches!(step(&mut reader, &far), Read::Nothing));
        let mut rest = [0; 9];
        far.peek(&mut rest).unwrap();
        assert_eq!(&rest[..], message(b"3"));
    }

    #[test]
    fn a_message_may_come_in_pieces() {
        let (mut near, far) = pair();
        let mut reader = Reader::new();
        let whole = message(b"0123456789");
        for piece in whole.chunks(3) {
            assert!(matches!(reader.step(far.as_raw_fd()), Read::Nothing));
            near.write_all(piece).unwrap();
            far.peek(&mut [0]).unwrap();
            if let Read::Message(m) = reader.step(far.as_raw_fd()) {
                assert_eq!(m, whole);
                return;
            }
        }
        panic!("no message");
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        for garbage in [
            &b"GET / HTTP/1.0\r\n"[..],
            b"SLIM\x01\x01\xff\xff",
            b"SLIM\x01\x01\0\0",
        ] {
            let (mut near, far) = pair();
            near.write_all(garbage).unwrap();
            let mut reader = Reader::new();
            assert!(matches!(step(&mut reader, &far), Read::Lost(libc::EPROTO)));
        }
    }
}
