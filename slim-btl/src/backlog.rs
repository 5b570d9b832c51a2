//! Frames that wait to be sent on one flow, in order.

use std::collections::VecDeque;
use std::fmt;
use std::io::IoSlice;

use slim::Flow;

use crate::frag::FragRef;

/// Limit of the slices that one system call sends: up to 16 small fragments.
const SLICES: usize = 64;
/// Room for copies that is made at once.
const COPIES: usize = 4096;
/// Frames up to this size are sent as one piece.
const JOINED: usize = 512;
/// Slices of one frame: header, two segments, padding.
pub(crate) const FRAME_SLICES: usize = 4;

/// A fragment to send, or whole frames as bytes.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Fragment(FragRef),
    Bytes(Vec<u8>),
}

impl Outgoing {
    fn pieces(&self) -> [&[u8]; FRAME_SLICES] {
        match self {
            Self::Fragment(frag) => frag.pieces(),
            Self::Bytes(bytes) => [bytes, &[], &[], &[]],
        }
    }

    fn len(&self) -> usize {
        total(&self.pieces())
    }
}

/// Frames that the kernel has not taken as a whole.
#[derive(Default)]
pub(crate) struct Backlog {
    queue: VecDeque<Outgoing>,
    /// Bytes of the first frame that are sent already.
    sent: usize,
    /// Bytes of all frames.
    bytes: usize,
    /// The kernel took no more at the last flush.
    blocked: bool,
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes of the frames, those included that are sent already.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the kernel took no more at the last flush. The session reports when there is room again.
    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked
    }

    pub(crate) fn push(&mut self, frame: Outgoing) {
        self.bytes += frame.len();
        self.queue.push_back(frame);
    }

    /// Adds a copy of a frame.
    pub(crate) fn copy(&mut self, pieces: &[&[u8]; FRAME_SLICES]) {
        if !matches!(self.queue.back(), Some(Outgoing::Bytes(_))) {
            let bytes = Vec::with_capacity(COPIES);
            self.queue.push_back(Outgoing::Bytes(bytes));
        }
        if let Some(Outgoing::Bytes(bytes)) = self.queue.back_mut() {
            let before = bytes.len();
            pieces
                .iter()
                .for_each(|piece| bytes.extend_from_slice(piece));
            self.bytes += bytes.len() - before;
        }
    }

    /// Puts the only frame, of which `sent` bytes are sent already, into an empty backlog.
    pub(crate) fn put_partial(&mut self, frame: Outgoing, sent: usize) {
        debug_assert!(self.is_empty(), "the bytes belong to the first frame");
        self.push(frame);
        self.sent = sent;
        self.blocked = true;
    }

    /// Adds the frames of another backlog, of which nothing is sent yet.
    pub(crate) fn append(&mut self, other: &mut Self) {
        debug_assert_eq!(other.sent, 0);
        self.bytes += std::mem::take(&mut other.bytes);
        self.queue.append(&mut other.queue);
    }

    /// Sends until nothing is left or the kernel takes no more; then the session reports when there is room again. Appends the
    /// fragments that are sent to `done`.
    pub(crate) fn flush(&mut self, flow: &Flow, done: &mut Vec<FragRef>) {
        self.blocked = false;
        while !self.queue.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let waiting = self.queue.iter().flat_map(Outgoing::pieces);
            let count = gather(waiting, self.sent, &mut slices);
            match flow.try_send_vectored(&slices[..count]) {
                Ok(n) => self.advance(n, done),
                // Progress receives from the flow, and so meets its error.
                Err(_) => {
                    self.blocked = true;
                    return;
                }
            }
        }
    }

    /// Removes the frames that are sent as a whole after `n` more bytes are sent.
    fn advance(&mut self, n: usize, done: &mut Vec<FragRef>) {
        self.sent += n;
        while let Some(first) = self.queue.front() {
            let len = first.len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            self.bytes -= len;
            if let Some(Outgoing::Fragment(frag)) = self.queue.pop_front() {
                done.push(frag);
            }
        }
    }

    /// Removes everything; returns the fragments.
    pub(crate) fn take_fragments(&mut self) -> Vec<FragRef> {
        (self.sent, self.bytes) = (0, 0);
        let fragments = self.queue.drain(..).filter_map(|frame| match frame {
            Outgoing::Fragment(frag) => Some(frag),
            Outgoing::Bytes(_) => None,
        });
        fragments.collect()
    }
}

impl fmt::Debug for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backlog")
            .field("frames", &self.queue.len())
            .field("bytes", &self.bytes)
            .field("sent", &self.sent)
            .field("blocked", &self.blocked)
            .finish()
    }
}

/// Bytes of a frame.
pub(crate) fn total(pieces: &[&[u8]; FRAME_SLICES]) -> usize {
    pieces.iter().map(|piece| piece.len()).sum()
}

/// Sends the pieces of one frame until all `total` bytes are sent or the kernel takes no more. Returns the number of sent bytes.
pub(crate) fn send_pieces(flow: &Flow, pieces: &[&[u8]; FRAME_SLICES], total: usize) -> usize {
    let mut sent = 0;
    let mut joined = [0; JOINED];
    if total <= JOINED {
        // One piece costs the kernel less than several.
        let mut at = 0;
        for piece in pieces {
            joined[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        sent = flow.try_send(&joined[..total]).unwrap_or(0);
        if sent == 0 {
            return 0;
        }
    }
    while sent < total {
        let mut rest = [IoSlice::new(&[]); FRAME_SLICES];
        let count = gather(pieces.iter().copied(), sent, &mut rest);
        match flow.try_send_vectored(&rest[..count]) {
            Ok(n) => sent += n,
            Err(_) => break,
        }
    }
    sent
}

/// Fills `out` with the pieces without their first `skip` bytes. Returns the number of slices.
fn gather<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
    mut skip: usize,
    out: &mut [IoSlice<'a>],
) -> usize {
    let mut count = 0;
    for piece in pieces {
        if count == out.len() {
            break;
        }
        let skipped = skip.min(piece.len());
        skip -= skipped;
        if skipped < piece.len() {
            out[count] = IoSlice::new(&piece[skipped..]);
            count += 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frag::tests::fragment;
    use crate::hdr::{FrameHeader, FrameKind};

    #[test]
    fn frames_sent_in_parts_arrive_whole_and_once() {
        let mut rng = fastrand::Rng::with_seed(2);
        let mut backlog = Backlog::default();
        for n in 0..40 {
            match n % 5 {
                0 => {
                    let accept = FrameHeader::control(FrameKind::Accept).encode();
                    backlog.copy(&[&accept, &[1; 3], &[], &[2; 5]]);
                }
                _ => backlog.push(Outgoing::Fragment(fragment(rng.usize(0..300), n))),
            }
        }
        let frames = backlog.queue.iter();
        let all: Vec<u8> = frames.flat_map(|o| o.pieces().concat()).collect();
        let (mut done, mut got) = (Vec::new(), Vec::<u8>::new());
        while !backlog.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let waiting = backlog.queue.iter().flat_map(Outgoing::pieces);
            let count = gather(waiting, backlog.sent, &mut slices);
            let bytes: Vec<u8> = slices[..count].iter().flat_map(|p| p.to_vec()).collect();
            let n = rng.usize(1..=bytes.len());
            got.extend(&bytes[..n]);
            backlog.advance(n, &mut done);
        }
        assert!(got == all);
        assert_eq!((backlog.sent, backlog.bytes, done.len()), (0, 0, 32));
        done.into_iter().for_each(FragRef::free);
    }
}
