//! Taking control messages out of a TCP stream, and not a byte more.

use std::io;

use slim_core::wire::layout::{self, header};
use slim_core::wire::{self, HEADER_LEN, MAX_LEN};

use crate::sys;

/// Messages that one side sends on a connection at most; what comes then is data.
const MESSAGES: usize = 2;

/// Bytes that can be taken at once from a connection of ours, for each message: the longest that may come there. Behind
/// a shorter one nothing follows before our answer.
const FROM_RESPONDER: [usize; MESSAGES] = [layout::challenge::LEN, layout::resume_ok::LEN];
/// From one that the peer has made. Bytes of the stream may follow CONFIRM.
const FROM_INITIATOR: [usize; MESSAGES] = [layout::resume::LEN, layout::confirm::LEN];
const _: () = assert!(layout::refuse::LEN <= layout::resume_ok::LEN);

/// Puts messages together.
pub(crate) struct Reader {
    /// What has come of a message; mostly one is there whole.
    part: Vec<u8>,
    /// Whole messages read so far.
    messages: usize,
    at_once: &'static [usize; MESSAGES],
}

pub(crate) enum Read {
    Message(Vec<u8>),
    Nothing,
    /// The connection ended (0) or failed.
    Lost(i32),
}

impl Reader {
    /// For a connection that is `incoming`, or of ours.
    pub(crate) fn new(incoming: bool) -> Self {
        Reader {
            part: Vec::new(),
            messages: 0,
            at_once: match incoming {
                true => &FROM_INITIATOR,
                false => &FROM_RESPONDER,
            },
        }
    }

    /// Whether no more messages may be read.
    pub(crate) fn is_done(&self) -> bool {
        self.messages == MESSAGES
    }

    /// One message, if it is there. Never reads stream bytes behind it.
    pub(crate) fn step(&mut self, fd: i32) -> Read {
        let mut space = [0; MAX_LEN];
        loop {
            let Some(at_once) = self.at_once.get(self.messages) else {
                return Read::Nothing;
            };
            let have = self.part.len();
            let want = match self.length() {
                Ok(None) => *at_once,
                Ok(Some(length)) if length == have => {
                    self.messages += 1;
                    return Read::Message(std::mem::take(&mut self.part));
                }
                Ok(Some(length)) if length > have => length,
                Ok(Some(_)) | Err(NoMessage) => return Read::Lost(libc::EPROTO),
            };
            let Some(space) = space.get_mut(..want - have) else {
                return Read::Lost(libc::EPROTO);
            };
            match sys::recv(fd, space) {
                Ok(0) => return Read::Lost(0),
                Ok(n) => self
                    .part
                    .extend_from_slice(space.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Read::Nothing,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Read::Lost(e.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
    }

    /// How long the message is, once its header is there.
    fn length(&self) -> Result<Option<usize>, NoMessage> {
        let Some(header) = self.part.get(..HEADER_LEN) else {
            return Ok(None);
        };
        if !header.starts_with(&wire::MAGIC) {
            return Err(NoMessage);
        }
        let length = header.get(header::LENGTH..header::LENGTH + 2);
        let length = length.and_then(|l| l.try_into().ok()).ok_or(NoMessage)?;
        let length = usize::from(u16::from_be_bytes(length));
        if (HEADER_LEN + 1..=MAX_LEN).contains(&length) {
            Ok(Some(length))
        } else {
            Err(NoMessage)
        }
    }
}

/// What has come is none of ours.
struct NoMessage;

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

    /// The two that an initiator sends, as far as a reader looks at them.
    fn of_initiator() -> [Vec<u8>; 2] {
        [layout::resume::LEN, layout::confirm::LEN].map(|len| message(&vec![7; len - HEADER_LEN]))
    }

    #[test]
    fn bytes_after_the_last_message_stay_in_the_socket() {
        let (mut near, far) = pair();
        let mut reader = Reader::new(true);
        let [resume, confirm] = of_initiator();
        for (message, behind) in [(resume, &b""[..]), (confirm, b"data of the flow")] {
            near.write_all(&[&message[..], behind].concat()).unwrap();
            let Read::Message(m) = step(&mut reader, &far) else {
                panic!("no message")
            };
            assert_eq!(m, message);
        }
        let mut rest = [0; 16];
        far.peek(&mut rest).unwrap();
        assert_eq!(&rest, b"data of the flow");
    }

    #[test]
    fn the_second_message_is_the_last() {
        let (mut near, far) = pair();
        let messages = of_initiator();
        for message in messages.iter().chain(&messages[1..]) {
            near.write_all(message).unwrap();
        }
        let mut reader = Reader::new(true);
        for message in &messages {
            let Read::Message(m) = step(&mut reader, &far) else {
                panic!("no message")
            };
            assert_eq!(m, *message);
        }
        assert!(matches!(step(&mut reader, &far), Read::Nothing));
        let mut rest = [0; layout::confirm::LEN];
        far.peek(&mut rest).unwrap();
        assert_eq!(&rest[..], messages[1]);
    }

    #[test]
    fn a_refusal_is_shorter_than_what_may_come_there() {
        let (mut near, far) = pair();
        let mut reader = Reader::new(false);
        for len in [layout::challenge::LEN, layout::refuse::LEN] {
            near.write_all(&message(&vec![7; len - HEADER_LEN]))
                .unwrap();
            assert!(matches!(step(&mut reader, &far), Read::Message(m) if m.len() == len));
        }
    }

    #[test]
    fn a_message_may_come_in_pieces() {
        let (mut near, far) = pair();
        let mut reader = Reader::new(true);
        let [whole, _] = of_initiator();
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
        let mut followed = message(b"short");
        followed.extend([7; 20]);
        for garbage in [
            &b"GET / HTTP/1.0\r\n"[..],
            b"SLIM\x01\x01\xff\xff",
            b"SLIM\x01\x01\0\0",
            &followed,
        ] {
            let (mut near, far) = pair();
            near.write_all(garbage).unwrap();
            let mut reader = Reader::new(true);
            assert!(matches!(step(&mut reader, &far), Read::Lost(libc::EPROTO)));
        }
    }
}
