//! Bytes taken out of a dead transport that the application has not read yet.

use std::collections::VecDeque;

use crate::memory::{self, OutOfMemory};

/// A byte queue. It is empty nearly always, and holds no memory then.
///
/// The bytes that the kernel still holds for a dead connection are moved here, so that the number
/// of bytes received is final before the peer is told. The application reads them before anything
/// from the new transport.
#[derive(Debug, Default)]
#[expect(clippy::box_collection, reason = "most stashes are empty")]
pub struct Stash {
    /// `None` while the stash is empty.
    bytes: Option<Box<VecDeque<u8>>>,
}

impl Stash {
    /// An empty stash.
    pub const fn new() -> Self {
        Stash { bytes: None }
    }

    /// A stash of these bytes.
    pub fn of(bytes: Vec<u8>) -> Self {
        Stash {
            bytes: (!bytes.is_empty()).then(|| Box::new(bytes.into())),
        }
    }

    /// Number of bytes held.
    pub fn len(&self) -> usize {
        self.bytes.as_ref().map_or(0, |bytes| bytes.len())
    }

    /// Whether no bytes are held.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_none()
    }

    /// Appends `data`.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing is appended then.
    pub fn push(&mut self, data: impl AsRef<[u8]>) -> Result<(), OutOfMemory> {
        let data = data.as_ref();
        if data.is_empty() {
            return Ok(());
        }
        let bytes = self.bytes.get_or_insert_default();
        if bytes.capacity() - bytes.len() < data.len() {
            // Doubles the size if there is memory for that; else makes room for `data` only.
            memory::reserve_in_queue(bytes, data.len().max(bytes.len()))
                .or_else(|_| memory::reserve_in_queue(bytes, data.len()))
                .inspect_err(|_| self.consume(0))?;
        }
        if let Some(bytes) = &mut self.bytes {
            bytes.extend(data);
        }
        Ok(())
    }

    /// Copies bytes, from the `from`th on, into `out` without taking them, as `MSG_PEEK` does. Returns their number.
    pub fn peek(&self, from: usize, out: &mut [u8]) -> usize {
        let Some(bytes) = &self.bytes else {
            return 0;
        };
        let (front, back) = bytes.as_slices();
        let front = &front[from.min(front.len())..];
        let back = &back[from
            .saturating_sub(bytes.len() - back.len())
            .min(back.len())..];
        let n = out.len().min(front.len() + back.len());
        let from_front = n.min(front.len());
        out[..from_front].copy_from_slice(&front[..from_front]);
        out[from_front..n].copy_from_slice(&back[..n - from_front]);
        n
    }

    /// Moves the first bytes into `out`. Returns their number.
    pub fn read(&mut self, out: &mut [u8]) -> usize {
        let n = self.peek(0, out);
        self.consume(n);
        n
    }

    /// Discards the first `n` bytes, or all if there are fewer.
    pub fn consume(&mut self, n: usize) {
        let Some(bytes) = &mut self.bytes else {
            return;
        };
        bytes.drain(..n.min(bytes.len()));
        if bytes.is_empty() {
            // The queue may have grown to megabytes. A flow without faults must not keep them.
            self.bytes = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Push(Vec<u8>),
        /// Offset and length.
        Peek(usize, usize),
        Read(usize),
        Consume(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..50).prop_map(Op::Push),
            (0..60usize, 0..60usize).prop_map(|(from, n)| Op::Peek(from, n)),
            (0..60usize).prop_map(Op::Read),
            (0..60usize).prop_map(Op::Consume),
        ]
    }

    proptest! {
        #[test]
        fn does_what_a_vector_does(ops in proptest::collection::vec(op(), 0..100)) {
            let mut stash = Stash::new();
            let mut model: Vec<u8> = Vec::new();
            for op in ops {
                match op {
                    Op::Push(data) => {
                        stash.push(&data).unwrap();
                        model.extend(&data);
                    }
                    Op::Peek(from, n) => {
                        let mut out = vec![0; n];
                        let got = stash.peek(from, &mut out);
                        let rest = model.get(from..).unwrap_or_default();
                        prop_assert_eq!(got, n.min(rest.len()));
                        prop_assert_eq!(&out[..got], &rest[..got]);
                    }
                    Op::Read(n) => {
                        let mut out = vec![0; n];
                        let got = stash.read(&mut out);
                        prop_assert_eq!(got, n.min(model.len()));
                        prop_assert!(model.drain(..got).eq(out[..got].iter().copied()));
                    }
                    Op::Consume(n) => {
                        stash.consume(n);
                        model.drain(..n.min(model.len()));
                    }
                }
                prop_assert_eq!(stash.len(), model.len());
                prop_assert_eq!(stash.is_empty(), model.is_empty());
            }
        }
    }

    #[test]
    fn keeps_no_memory_when_empty() {
        let mut stash = Stash::new();
        stash.push(vec![1; 1 << 20]).unwrap();
        stash.consume(1 << 20);
        assert!(stash.bytes.is_none());
    }
}
