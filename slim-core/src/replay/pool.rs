//! Free chunks, shared by all flows of the process.

use std::sync::Mutex;

use crate::memory::{self, OutOfMemory};

/// Bytes in a chunk.
pub const CHUNK: usize = 64 * 1024;
/// How many free chunks the process keeps: 8 MiB.
pub const POOL_CHUNKS: usize = 128;

/// The pool of this process.
pub(super) static POOL: Pool = Pool::new();

/// Free chunks. The lock is only tried, never waited for: another thread in the pool must not make a
/// send wait, and in a forked child a thread that does not exist there may hold the lock.
pub(super) struct Pool(Mutex<Kept>);

struct Kept {
    count: usize,
    /// The first `count` places hold chunks.
    chunks: [Vec<u8>; POOL_CHUNKS],
}

impl Pool {
    const fn new() -> Self {
        Pool(Mutex::new(Kept {
            count: 0,
            chunks: [const { Vec::new() }; POOL_CHUNKS],
        }))
    }

    /// An empty chunk of this size. A chunk of the full size may come from the pool.
    pub(super) fn take(&self, size: usize) -> Result<Vec<u8>, OutOfMemory> {
        let pooled = match size {
            CHUNK => self.0.try_lock().ok().and_then(|mut pool| pool.take()),
            _ => None,
        };
        match pooled {
            Some(chunk) => Ok(chunk),
            None => {
                let mut chunk = Vec::new();
                memory::reserve(&mut chunk, size)?;
                Ok(chunk)
            }
        }
    }

    /// Takes chunks back. Small chunks, and those for which there is no room, go to the allocator.
    pub(super) fn give(&self, chunks: impl IntoIterator<Item = Vec<u8>>) {
        let mut pool = self.0.try_lock().ok();
        for mut chunk in chunks {
            if let Some(pool) = &mut pool
                && chunk.capacity() == CHUNK
                && pool.count < POOL_CHUNKS
            {
                chunk.clear();
                let place = pool.count;
                pool.chunks[place] = chunk;
                pool.count += 1;
            }
        }
    }
}

impl Kept {
    fn take(&mut self) -> Option<Vec<u8>> {
        self.count = self.count.checked_sub(1)?;
        Some(std::mem::take(&mut self.chunks[self.count]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Pool {
        fn count(&self) -> usize {
            self.0.lock().unwrap().count
        }
    }

    fn chunks(n: usize) -> impl Iterator<Item = Vec<u8>> {
        (0..n).map(|_| {
            let mut chunk = Vec::with_capacity(CHUNK);
            chunk.push(7);
            chunk
        })
    }

    #[test]
    fn a_chunk_is_used_again_and_the_pool_is_bounded() {
        let pool = Pool::new();
        pool.give(chunks(POOL_CHUNKS / 2));
        pool.give(chunks(POOL_CHUNKS));
        assert_eq!(pool.count(), POOL_CHUNKS);
        let last = pool.0.lock().unwrap().chunks[POOL_CHUNKS - 1].as_ptr();
        let taken = pool.take(CHUNK).unwrap();
        assert_eq!((taken.len(), taken.capacity()), (0, CHUNK));
        assert_eq!(last, taken.as_ptr());
        assert_eq!(pool.count(), POOL_CHUNKS - 1);
    }

    #[test]
    fn small_chunks_are_not_pooled() {
        let pool = Pool::new();
        let small = pool.take(CHUNK / 2).unwrap();
        assert_eq!(small.capacity(), CHUNK / 2);
        pool.give([small]);
        assert_eq!(pool.count(), 0);
    }

    #[test]
    fn a_locked_pool_is_bypassed() {
        let pool = Pool::new();
        let held = pool.0.lock().unwrap();
        assert_eq!(pool.take(CHUNK).unwrap().capacity(), CHUNK);
        pool.give(chunks(1));
        drop(held);
        assert_eq!(pool.count(), 0);
    }
}
