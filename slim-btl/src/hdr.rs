//! Frames: the messages of two components on a flow.
//!
//! A frame is a header of 8 bytes, a payload, and padding up to the next multiple of 8, so that headers and payloads are aligned
//! in the receiver's buffer. Numbers are little-endian.

use crate::proc::ProcName;

/// Bytes of a header.
pub const HEADER: usize = 8;
/// Limit of a payload.
pub const MAX_PAYLOAD: usize = 1 << 30;

const MAGIC: u32 = u32::from_le_bytes(*b"SLBT");
const VERSION: u32 = 3;
/// Payload bytes of a hello, the longest payload of a handshake.
pub const HELLO_BYTES: usize = 32;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A fragment, for the callback of its tag.
    Data = 0,
    /// The first frame of a connector: its name.
    Hello = 1,
    /// The acceptor's answer: the flow is the one between both processes. It sends nothing else before [`Confirm`](Self::Confirm).
    Accept = 2,
    /// The acceptor's other answer: its own flow to the connector is the one.
    Reject = 3,
    /// The last frame of a flow: the end that follows is no failure.
    Goodbye = 4,
    /// The connector's answer to [`Accept`](Self::Accept): it uses the flow.
    Confirm = 5,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Its kind.
    pub kind: FrameKind,
    /// Of [`FrameKind::Data`]: which callback receives it.
    pub tag: u8,
    /// Bytes of payload.
    pub len: usize,
}

impl FrameHeader {
    /// The header of a frame without payload.
    pub fn control(kind: FrameKind) -> Self {
        Self {
            kind,
            tag: 0,
            len: 0,
        }
    }

    /// On the wire: length (4), kind (1), tag (1), zero (2).
    pub fn encode(self) -> [u8; HEADER] {
        let [a, b, c, d] = (self.len as u32).to_le_bytes();
        [a, b, c, d, self.kind as u8, self.tag, 0, 0]
    }

    /// `None`: not a header of this version.
    pub fn parse(bytes: [u8; HEADER]) -> Option<Self> {
        let [a, b, c, d, kind, tag, 0, 0] = bytes else {
            return None;
        };
        let kind = match kind {
            0 => FrameKind::Data,
            1 => FrameKind::Hello,
            2 => FrameKind::Accept,
            3 => FrameKind::Reject,
            4 => FrameKind::Goodbye,
            5 => FrameKind::Confirm,
            _ => return None,
        };
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        (len <= MAX_PAYLOAD).then_some(Self { kind, tag, len })
    }

    /// Bytes of the whole frame, padding included.
    pub fn frame_len(self) -> usize {
        HEADER + self.len + padding(self.len)
    }
}

/// Bytes of padding behind a payload.
pub fn padding(len: usize) -> usize {
    len.wrapping_neg() % HEADER
}

/// The content of a [`FrameKind::Hello`] frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BtlHello {
    /// The connector.
    pub name: ProcName,
    /// The acceptor's published token. It shows that the connector belongs to the job.
    pub token: u64,
    /// The flow is a further rail, beside the first flow.
    pub is_rail: bool,
}

impl BtlHello {
    /// The frame.
    pub fn encode(self) -> Vec<u8> {
        let header = FrameHeader {
            kind: FrameKind::Hello,
            tag: 0,
            len: HELLO_BYTES,
        };
        let mut frame = header.encode().to_vec();
        frame.extend(MAGIC.to_le_bytes());
        frame.extend(VERSION.to_le_bytes());
        frame.extend(self.name.0.to_le_bytes());
        frame.extend(self.token.to_le_bytes());
        frame.extend(u64::from(self.is_rail).to_le_bytes());
        frame
    }

    /// Reads the payload of a frame. `None`: no component of this version has sent it to the process with this token.
    pub fn parse(payload: &[u8], token: u64) -> Option<Self> {
        let payload: &[u8; HELLO_BYTES] = payload.try_into().ok()?;
        let (words, _) = payload.as_chunks::<8>();
        let &[first, name, theirs, is_rail] = words else {
            return None;
        };
        let mut expected = [0; 8];
        expected[..4].copy_from_slice(&MAGIC.to_le_bytes());
        expected[4..].copy_from_slice(&VERSION.to_le_bytes());
        let is_rail = u64::from_le_bytes(is_rail);
        let is_ours = first == expected && u64::from_le_bytes(theirs) == token && is_rail <= 1;
        is_ours.then(|| Self {
            name: ProcName(u64::from_le_bytes(name)),
            token,
            is_rail: is_rail == 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire() {
        for len in [0, 1, 7, 8, 131_072, MAX_PAYLOAD] {
            let header = FrameHeader {
                kind: FrameKind::Data,
                tag: 0x41,
                len,
            };
            assert_eq!(FrameHeader::parse(header.encode()), Some(header));
            assert_eq!(header.frame_len() % 8, 0);
        }
    }

    #[test]
    fn a_header_with_an_unknown_kind_or_an_absurd_length_is_refused() {
        assert_eq!(FrameHeader::parse([0, 0, 0, 0, 9, 0, 0, 0]), None);
        assert_eq!(FrameHeader::parse([0, 0, 0, 0, 0, 0, 1, 0]), None);
        assert_eq!(FrameHeader::parse([255; 8]), None);
        assert_eq!(FrameHeader::parse([0, 0, 0, 0x80, 0, 0, 0, 0]), None);
    }

    #[test]
    fn a_hello_counts_only_with_the_acceptors_token() {
        for is_rail in [false, true] {
            let hello = BtlHello {
                name: ProcName(7),
                token: 99,
                is_rail,
            };
            let frame = hello.encode();
            let payload = &frame[HEADER..];
            assert_eq!(BtlHello::parse(payload, 99), Some(hello));
            assert_eq!(BtlHello::parse(payload, 98), None);
            assert_eq!(BtlHello::parse(&payload[1..], 99), None);
        }
    }
}
