//! The bytes of one send, which may lie in several places.

use std::io::IoSlice;

/// The rest of what is to be sent: the bytes of these slices, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Pieces<'a> {
    slices: &'a [IoSlice<'a>],
    /// Bytes of the first slice that were taken.
    taken: usize,
    left: usize,
}

impl<'a> Pieces<'a> {
    /// All bytes of these slices.
    pub fn new(slices: &'a [IoSlice<'a>]) -> Self {
        Pieces {
            slices,
            taken: 0,
            left: slices.iter().map(|slice| slice.len()).sum(),
        }
    }

    /// Number of bytes that are left.
    pub fn left(&self) -> usize {
        self.left
    }

    /// The next `len` bytes, piece by piece. There are as many.
    pub(crate) fn next(&self, len: usize) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        debug_assert!(len <= self.left);
        let (mut skip, mut left) = (self.taken, len);
        let pieces = self.slices.iter().map(move |slice| {
            let from = std::mem::take(&mut skip).min(slice.len());
            let len = left.min(slice.len() - from);
            left -= len;
            &slice[from..from + len]
        });
        pieces.filter(|piece| !piece.is_empty())
    }

    /// The next `len` bytes are taken.
    pub(crate) fn take(&mut self, len: usize) {
        debug_assert!(len <= self.left);
        self.left -= len;
        self.taken += len;
        while let [first, rest @ ..] = self.slices
            && first.len() <= self.taken
        {
            self.taken -= first.len();
            self.slices = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_order_whatever_is_taken() {
        let slices = [&b""[..], b"ab", b"", b"cdefg", b"h", b""].map(IoSlice::new);
        for step in 1..=9 {
            let mut pieces = Pieces::new(&slices);
            let mut got = Vec::new();
            while pieces.left() > 0 {
                let len = step.min(pieces.left());
                let next: Vec<_> = pieces.next(len).collect();
                assert!(next.iter().all(|piece| !piece.is_empty()));
                let next = next.concat();
                assert_eq!(next.len(), len);
                got.extend(next);
                pieces.take(len);
            }
            assert_eq!(got, b"abcdefgh", "{step}");
            assert_eq!(pieces.next(0).count(), 0);
        }
        assert_eq!(Pieces::new(&[]).left(), 0);
    }
}
