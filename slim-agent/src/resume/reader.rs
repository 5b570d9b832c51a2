//! Reads control messages from a connection, and not a byte more.

use std::io;

use slim_core::wire::layout::{self, header};
use slim_core::wire::{self, HEADER_LEN, MAX_LEN};

use crate::transport::{Connection, errno_of};

/// Most messages that one side sends on a connection; the bytes after them are data.
const MESSAGES: usize = 2;

/// Bytes that can be read at once for each message, on a connection that we made: the length of the longest message
/// that may come there. After a shorter message nothing follows before our answer.
const FROM_RESPONDER: [usize; MESSAGES] = [layout::challenge::LEN, layout::resume_ok::LEN];
/// The same on a connection that the peer made. Stream bytes may follow CONFIRM.
const FROM_INITIATOR: [usize; MESSAGES] = [layout::resume::LEN, layout::confirm::LEN];
const _: () = assert!(layout::refuse::LEN <= layout::resume_ok::LEN);

/// Assembles messages.
pub(crate) struct Reader {
    /// The part of a message that has arrived. Most messages arrive whole.
    partial: Vec<u8>,
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
    /// `incoming` says that the peer made the connection.
    pub(crate) fn new(incoming: bool) -> Self {
        Reader {
            partial: Vec::new(),
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

    /// Reads one message, if it has arrived. Never reads stream bytes after it.
    pub(crate) fn step(&mut self, connection: &dyn Connection) -> Read {
        let mut space = [0; MAX_LEN];
        loop {
            let Some(at_once) = self.at_once.get(self.messages) else {
                return Read::Nothing;
            };
            let have = self.partial.len();
            let want = match self.length() {
                Ok(None) => *at_once,
                Ok(Some(length)) if length == have => {
                    self.messages += 1;
                    return Read::Message(std::mem::take(&mut self.partial));
                }
                Ok(Some(length)) if length > have => length,
                Ok(Some(_)) | Err(NoMessage) => return Read::Lost(libc::EPROTO),
            };
            let Some(space) = space.get_mut(..want - have) else {
                return Read::Lost(libc::EPROTO);
            };
            match connection.recv(space) {
                Ok(0) => return Read::Lost(0),
                Ok(n) => self
                    .partial
                    .extend_from_slice(space.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Read::Nothing,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Read::Lost(errno_of(&e, libc::EIO)),
            }
        }
    }

    /// The length of the message, once its header has arrived.
    fn length(&self) -> Result<Option<usize>, NoMessage> {
        let Some(header) = self.partial.get(..HEADER_LEN) else {
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

/// The bytes are not a SLIM message.
struct NoMessage;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::kinds::{next, over_each_kind, send_all};
    use crate::transport::readable;

    fn message(body: &[u8]) -> Vec<u8> {
        let mut m = wire::MAGIC.to_vec();
        m.extend([wire::VERSION, 1]);
        m.extend(((HEADER_LEN + body.len()) as u16).to_be_bytes());
        m.extend(body);
        m
    }

    /// Waits until the reader returns something.
    async fn step(reader: &mut Reader, connection: &dyn Connection) -> Read {
        loop {
            match reader.step(connection) {
                Read::Nothing => readable(connection).await.unwrap(),
                read => return read,
            }
        }
    }

    /// The two messages of an initiator, as far as a reader checks them.
    fn of_initiator() -> [Vec<u8>; 2] {
        [layout::resume::LEN, layout::confirm::LEN].map(|len| message(&vec![7; len - HEADER_LEN]))
    }

    #[test]
    fn bytes_after_the_last_message_stay_in_the_connection() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            let mut reader = Reader::new(true);
            let [resume, confirm] = of_initiator();
            for (message, behind) in [(resume, &b""[..]), (confirm, b"data of the flow")] {
                send_all(&*near, &[&message[..], behind].concat());
                let Read::Message(m) = step(&mut reader, &*far).await else {
                    panic!("no message")
                };
                assert_eq!(m, message);
            }
            assert_eq!(next(&*far, 20).await, b"data of the flow");
        });
    }

    #[test]
    fn the_second_message_is_the_last() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            let messages = of_initiator();
            for message in messages.iter().chain(&messages[1..]) {
                send_all(&*near, message);
            }
            let mut reader = Reader::new(true);
            for message in &messages {
                let Read::Message(m) = step(&mut reader, &*far).await else {
                    panic!("no message")
                };
                assert_eq!(m, *message);
            }
            assert!(reader.is_done());
            assert!(matches!(reader.step(&*far), Read::Nothing));
            assert_eq!(next(&*far, layout::confirm::LEN).await, messages[1]);
        });
    }

    #[test]
    fn a_refusal_shorter_than_the_expected_message_is_read() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            let mut reader = Reader::new(false);
            for len in [layout::challenge::LEN, layout::refuse::LEN] {
                send_all(&*near, &message(&vec![7; len - HEADER_LEN]));
                let read = step(&mut reader, &*far).await;
                assert!(matches!(read, Read::Message(m) if m.len() == len));
            }
        });
    }

    #[test]
    fn a_message_may_come_in_pieces() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            let mut reader = Reader::new(true);
            let [whole, _] = of_initiator();
            let mut pieces = whole.chunks(3).peekable();
            while let Some(piece) = pieces.next() {
                assert!(matches!(reader.step(&*far), Read::Nothing));
                send_all(&*near, piece);
                readable(&*far).await.unwrap();
                if pieces.peek().is_none() {
                    let read = step(&mut reader, &*far).await;
                    assert!(matches!(read, Read::Message(m) if m == whole));
                }
            }
        });
    }

    #[test]
    fn bytes_that_are_no_message_end_the_connection() {
        let mut followed = message(b"short");
        followed.extend([7; 20]);
        over_each_kind(async |ends| {
            for garbage in [
                &b"GET / HTTP/1.0\r\n"[..],
                b"SLIM\x01\x01\xff\xff",
                b"SLIM\x01\x01\0\0",
                &followed,
            ] {
                let (near, far) = ends();
                send_all(&*near, garbage);
                let mut reader = Reader::new(true);
                let read = step(&mut reader, &*far).await;
                assert!(matches!(read, Read::Lost(libc::EPROTO)));
            }
        });
    }

    #[test]
    fn the_end_of_the_connection_is_told_from_its_failure() {
        over_each_kind(async |ends| {
            let (near, far) = ends();
            send_all(&*near, b"SLI");
            drop(near);
            let mut reader = Reader::new(true);
            assert!(matches!(step(&mut reader, &*far).await, Read::Lost(0)));
        });
    }
}
