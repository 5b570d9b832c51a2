//! Free chunks, shared by all flows of the process.

use std::sync::Mutex;

/// Bytes in a chunk.
pub const CHUNK: usize = 64 * 1024;
/// How many free chunks the process keeps: 8 MiB.
pub const POOL_CHUNKS: usize = 128;

pub(super) type Chunk = Box<[u8]>;

/// The one of this process.
pub(super) static POOL: Pool = Pool(Mutex::new(Vec::new()));

/// Its lock is only tried: somebody else in the pool must not make a send wait, and in a forked
/// child the lock may be held by a thread that does not exist there.
pub(super) struct Pool(Mutex<Vec<Chunk>>);

impl Pool {
    /// A chunk from the pool, or a new one.
    pub(super) fn take(&self) -> Chunk {
        let pooled = self.0.try_lock().ok().and_then(|mut pool| pool.pop());
        pooled.unwrap_or_else(|| vec![0; CHUNK].into_boxed_slice())
    }

    /// Takes chunks back; what does not fit goes to the allocator.
    pub(super) fn give(&self, chunks: impl ExactSizeIterator<Item = Chunk>) {
        if chunks.len() == 0 {
            return;
        }
        let Ok(mut pool) = self.0.try_lock() else {
            return drop(chunks);
        };
        let room = POOL_CHUNKS - pool.len();
        pool.extend(chunks.take(room));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(n: usize) -> impl ExactSizeIterator<Item = Chunk> {
        (0..n).map(|_| vec![7; CHUNK].into_boxed_slice())
    }

    #[test]
    fn a_chunk_is_used_again_and_the_pool_is_bounded() {
        let pool = Pool(Mutex::new(Vec::new()));
        assert_eq!(pool.take()[0], 0);
        pool.give(chunks(POOL_CHUNKS / 2));
        pool.give(chunks(POOL_CHUNKS));
        assert_eq!(pool.0.lock().unwrap().len(), POOL_CHUNKS);
        assert!((0..POOL_CHUNKS).all(|_| pool.take()[0] == 7));
        assert_eq!(pool.take()[0], 0);
    }

    #[test]
    fn a_locked_pool_is_no_obstacle() {
        let pool = Pool(Mutex::new(Vec::new()));
        let held = pool.0.lock().unwrap();
        assert_eq!(pool.take().len(), CHUNK);
        pool.give(chunks(1));
        drop(held);
        assert!(pool.0.lock().unwrap().is_empty());
    }
}
