//! The receiving side of a flow: bytes in, frames out.

use std::fmt;
use std::ops::Range;

use crate::hdr::{FrameHeader, HEADER};

/// Limit of a read when no frame has begun: the bytes are then still in the processor's cache when they are delivered.
const READ: usize = 64 << 10;
/// Bytes of a fresh buffer: a frame of the usual largest size behind as much as one read brings.
const BYTES: usize = 256 << 10;
/// Bytes behind a payload that a callback may write to. For a message without data, `ob1` of Open MPI 5.0 sets a field of the header that would follow:
/// `mca_pml_ob1_recv_frag_callback_cid` writes two bytes behind the segment.
const BEHIND: usize = HEADER;

/// The received bytes are not a sequence of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoFrame;

/// Received bytes, which are cut into frames.
#[derive(Default)]
pub struct FrameReader {
    buf: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes of the frame at `start`, once its header is there.
    wanted: usize,
}

impl FrameReader {
    /// Gives the reader a buffer, unless it has one. A reader without a buffer makes one.
    pub fn lend(&mut self, from: &mut Vec<Vec<u8>>) {
        if self.buf.is_empty() {
            self.buf = from.pop().unwrap_or_default();
        }
    }

    /// Takes the buffer back if it holds no part of a frame: an idle flow needs none, and the next flow finds it in the processor's cache.
    pub fn give_back(&mut self, to: &mut Vec<Vec<u8>>) {
        if self.start == self.end && !self.buf.is_empty() {
            (self.start, self.end) = (0, 0);
            to.push(std::mem::take(&mut self.buf));
        }
    }

    /// The memory for the next bytes. It is not empty, provided that [`next_frame`](Self::next_frame) has given out all whole frames.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        // A frame that has begun stays where it is if the rest of it fits behind it.
        let mut limit = self.buf.len().saturating_sub(BEHIND);
        if limit - self.start < self.wanted.max(HEADER) || self.end == limit {
            self.buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let needed = self.wanted.max(BYTES);
            if limit < needed {
                limit = needed;
                self.buf.resize(limit + BEHIND, 0);
            }
        }
        // Of a long frame only the rest is read, so that nothing has to be moved.
        let most = self.wanted.saturating_sub(self.end - self.start).max(READ);
        let until = limit.min(self.end + most);
        &mut self.buf[self.end..until]
    }

    /// Counts bytes that were received into [`room`](Self::room).
    pub fn filled(&mut self, n: usize) {
        self.end += n;
    }

    /// The next whole frame: its header, and the place of its payload, which is valid until the next call of [`room`](Self::room).
    /// A reader makes room for the payload that a header announces, so `most` limits the memory that a stranger can use up.
    ///
    /// # Errors
    /// The bytes are not a frame of this version, or its payload is longer than `most` bytes.
    pub fn next_frame(
        &mut self,
        most: usize,
    ) -> Result<Option<(FrameHeader, Range<usize>)>, NoFrame> {
        let have = &self.buf[self.start..self.end];
        let Some((header, _)) = have.split_first_chunk::<HEADER>() else {
            self.wanted = HEADER;
            return Ok(None);
        };
        let header = FrameHeader::parse(*header).ok_or(NoFrame)?;
        if header.len > most {
            return Err(NoFrame);
        }
        self.wanted = header.frame_len();
        if have.len() < self.wanted {
            return Ok(None);
        }
        let payload = self.start + HEADER..self.start + HEADER + header.len;
        self.start += self.wanted;
        self.wanted = 0;
        Ok(Some((header, payload)))
    }

    /// Gives `callback` the payload that [`next_frame`](Self::next_frame) has found, and [`BEHIND`] bytes behind it. It may change all of
    /// these bytes; those behind the payload, which belong to the next frame, are restored.
    pub fn deliver(&mut self, at: Range<usize>, callback: impl FnOnce(&mut [u8])) {
        let until = at.end + BEHIND;
        let mut kept = [0; BEHIND];
        kept.copy_from_slice(&self.buf[at.end..until]);
        callback(&mut self.buf[at.start..until]);
        self.buf[at.end..until].copy_from_slice(&kept);
    }

    /// The payload that [`next_frame`](Self::next_frame) has found.
    pub fn payload(&mut self, at: Range<usize>) -> &mut [u8] {
        &mut self.buf[at]
    }
}

impl fmt::Debug for FrameReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameReader")
            .field("have", &(self.end - self.start))
            .field("wanted", &self.wanted)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hdr::{FrameKind, MAX_PAYLOAD, padding};
    use std::collections::VecDeque;

    /// Runs of the test with random sizes.
    const SEEDS: u64 = 20;

    fn frame(tag: u8, payload: &[u8]) -> Vec<u8> {
        let header = FrameHeader {
            kind: FrameKind::Data,
            tag,
            len: payload.len(),
        };
        let mut bytes = header.encode().to_vec();
        bytes.extend(payload);
        bytes.extend(vec![0; padding(payload.len())]);
        bytes
    }

    #[test]
    fn frames_come_out_whole_and_in_order_however_their_bytes_arrive() {
        let mut rng = fastrand::Rng::with_seed(1);
        let sent: Vec<Vec<u8>> = (0..400)
            .map(|n| {
                let len = match n % 40 {
                    0 => rng.usize(0..3 * BYTES),
                    _ => rng.usize(0..5000),
                };
                (0..len).map(|_| rng.u8(..)).collect()
            })
            .collect();
        let stream: Vec<u8> = (0..)
            .zip(&sent)
            .flat_map(|(n, payload)| frame(n as u8, payload))
            .collect();
        let (mut reader, mut at, mut got) = (FrameReader::default(), 0, 0);
        while at < stream.len() {
            let room = reader.room();
            let n = rng
                .usize(1..=200_000)
                .min(room.len())
                .min(stream.len() - at);
            room[..n].copy_from_slice(&stream[at..at + n]);
            reader.filled(n);
            at += n;
            while let Some((header, range)) = reader.next_frame(MAX_PAYLOAD).unwrap() {
                assert_eq!(header.tag, got as u8);
                reader.deliver(range, |payload| {
                    assert!(payload[..header.len] == sent[got], "frame {got}");
                    payload.fill(0xff);
                });
                got += 1;
            }
        }
        assert_eq!(got, sent.len());
    }

    /// A flow whose frames and reads often end exactly at a limit of its reader's buffer, or 8 bytes beside it.
    #[derive(Default)]
    struct Peer {
        reader: FrameReader,
        /// Payloads that have not come out.
        sent: VecDeque<Vec<u8>>,
        /// Bytes that have not been read.
        stream: VecDeque<u8>,
    }

    impl Peer {
        fn send(&mut self, rng: &mut fastrand::Rng) {
            let limit = self.reader.buf.len().saturating_sub(BEHIND).max(BYTES);
            let behind = self.reader.end + self.stream.len();
            let frame_len = match rng.u8(..64) {
                0 => rng.usize(HEADER..3 * BYTES),
                1 => limit,
                2 => BYTES,
                3 => READ,
                4..12 => limit.saturating_sub(behind),
                12..16 => limit - self.reader.start,
                16..32 => HEADER,
                32..48 => rng.usize(HEADER..5 * HEADER),
                _ => rng.usize(HEADER..20_000),
            };
            let beside = [0, 0, 1, HEADER - 1, HEADER, HEADER + 1][rng.usize(..6)];
            let frame_len = match rng.bool() {
                true => frame_len + beside,
                false => frame_len.saturating_sub(beside),
            };
            let len = frame_len.saturating_sub(HEADER);
            let (first, step) = (rng.u8(..), rng.u8(..) | 1);
            let payload: Vec<u8> = (0..len)
                .map(|n| first.wrapping_add(step.wrapping_mul((n ^ (n >> 8)) as u8)))
                .collect();
            self.stream.extend(frame(len as u8, &payload));
            self.sent.push_back(payload);
        }

        /// One read, and what comes out of it. Returns how many frames have ended exactly at the end of the buffer.
        fn read(&mut self, rng: &mut fastrand::Rng) -> usize {
            let (had, have, wanted) = (
                self.reader.buf.len(),
                self.reader.end - self.reader.start,
                self.reader.wanted,
            );
            let room = self.reader.room().len();
            assert!(room > 0 && room <= READ.max(wanted.saturating_sub(have)));
            let len = self.reader.buf.len();
            match had.saturating_sub(BEHIND) < wanted.max(BYTES) {
                true => assert!(len == had || len == wanted.max(BYTES) + BEHIND),
                false => assert_eq!(len, had, "the buffer has grown without need"),
            }
            let rest = wanted.saturating_sub(have);
            let most = match rng.u8(..8) {
                0 => 1,
                1 => rng.usize(1..=2 * HEADER),
                2 => rest.max(1),
                3 => rest.saturating_sub(1).max(1),
                4 => rng.usize(1..=READ),
                _ => usize::MAX,
            };
            let n = most.min(room).min(self.stream.len());
            for (to, byte) in self.reader.room().iter_mut().zip(self.stream.drain(..n)) {
                *to = byte;
            }
            self.reader.filled(n);
            let mut at_limit = 0;
            while let Some((header, at)) = self.reader.next_frame(MAX_PAYLOAD).unwrap() {
                let sent = self.sent.pop_front().unwrap();
                assert_eq!((header.len, header.tag), (sent.len(), sent.len() as u8));
                at_limit += usize::from(at.end + BEHIND == self.reader.buf.len());
                let overwrites = rng.u8(..);
                self.reader.deliver(at, |payload| {
                    assert!(payload[..header.len] == sent);
                    assert_eq!(payload.len(), header.len + BEHIND);
                    payload.fill(overwrites);
                });
            }
            at_limit
        }
    }

    #[test]
    fn frames_come_out_whole_at_the_limits_of_buffers_that_readers_share() {
        let (mut at_limit, mut shared) = (0, 0);
        for seed in 0..SEEDS {
            let mut rng = fastrand::Rng::with_seed(seed);
            let (mut peers, mut buffers) = (<[Peer; 3]>::default(), Vec::new());
            for _ in 0..300 {
                let peer = &mut peers[rng.usize(..3)];
                shared += usize::from(peer.reader.buf.is_empty() && !buffers.is_empty());
                peer.reader.lend(&mut buffers);
                for _ in 0..rng.usize(1..5) {
                    if peer.stream.len() < BYTES && rng.bool() {
                        (0..rng.usize(1..4)).for_each(|_| peer.send(&mut rng));
                    }
                    at_limit += peer.read(&mut rng);
                }
                peer.reader.give_back(&mut buffers);
                assert!(buffers.len() <= 3);
            }
            for peer in &mut peers {
                peer.reader.lend(&mut buffers);
                while !peer.stream.is_empty() {
                    at_limit += peer.read(&mut rng);
                }
                assert!(peer.sent.is_empty());
                peer.reader.give_back(&mut buffers);
                assert!(peer.reader.buf.is_empty());
            }
        }
        assert!(at_limit > 10 && shared > 10, "{at_limit} {shared}");
    }

    #[test]
    fn a_stream_without_frames_is_refused() {
        let mut reader = FrameReader::default();
        reader.room()[..8].copy_from_slice(b"GET / HT");
        reader.filled(8);
        assert_eq!(reader.next_frame(MAX_PAYLOAD), Err(NoFrame));
    }

    #[test]
    fn a_frame_beyond_the_limit_is_refused_before_there_is_room_for_it() {
        let header = FrameHeader {
            kind: FrameKind::Hello,
            tag: 0,
            len: MAX_PAYLOAD,
        };
        let mut reader = FrameReader::default();
        reader.room()[..HEADER].copy_from_slice(&header.encode());
        reader.filled(HEADER);
        assert_eq!(reader.next_frame(MAX_PAYLOAD - 1), Err(NoFrame));
        reader.room();
        assert_eq!(reader.buf.len(), BYTES + BEHIND);
        assert_eq!(reader.next_frame(MAX_PAYLOAD), Ok(None));
    }
}
