//! Free chunks, shared by all flows of the process.

use std::sync::Mutex;

/// Bytes in a chunk.
pub const CHUNK: usize = 64 * 1024;
/// How many free chunks the process keeps: 8 MiB.
pub const POOL_CHUNKS: usize = 128;

/// The one of this process.
pub(super) static POOL: Pool = Pool(Mutex::new(Vec::new()));

/// Its lock is only tried: somebody else in the pool must not make a send wait, and in a forked
/// child the lock may be held by a thread that does not exist there.
pub(super) struct Pool(Mutex<Vec<Vec<u8>>>);

impl Pool {
    /// An empty chunk of this size; one of the full size may come from the pool.
    pub(super) fn take(&self, size: usize) -> Vec<u8> {
        let pooled = match size {
            CHUNK => self.0.try_lock().ok().and_then(|mut pool| pool.pop()),
            _ => None,
        };
        pooled.unwrap_or_else(|| Vec::with_capacity(size))
    }

    /// Takes chunks back; those that are small, or do not fit, go to the allocator.
    pub(super) fn give(&self, chunks: impl IntoIterator<Item = Vec<u8>>) {
        let mut pool = self.0.try_lock().ok();
        for mut chunk in chunks {
            if let Some(pool) = &mut pool
                && chunk.capacity() == CHUNK
                && pool.len() < POOL_CHUNKS
            {
                chunk.clear();
                pool.push(chunk);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(n: usize) -> impl Iterator<Item = Vec<u8>> {
        (0..n).map(|_| {
            let mut chunk = Vec::with_capacity(CHUNK);
            chunk.push(7);
            chunk
        })
    }

    #[test]
    fn a_chunk_is_used_again_and_the_pool_is_bounded() {
        let pool = Pool(Mutex::new(Vec::new()));
        pool.give(chunks(POOL_CHUNKS / 2));
        pool.give(chunks(POOL_CHUNKS));
        let pooled: Vec<_> = pool.0.lock().unwrap().iter().map(|c| c.as_ptr()).collect();
        assert_eq!(pooled.len(), POOL_CHUNKS);
        let taken = pool.take(CHUNK);
        assert_eq!((taken.len(), taken.capacity()), (0, CHUNK));
        assert_eq!(pooled.last(), Some(&taken.as_ptr()));
    }

    #[test]
    fn small_chunks_are_not_pooled() {
        let pool = Pool(Mutex::new(Vec::new()));
        let small = pool.take(CHUNK / 2);
        assert_eq!(small.capacity(), CHUNK / 2);
        pool.give([small]);
        assert!(pool.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_locked_pool_is_no_obstacle() {
        let pool = Pool(Mutex::new(Vec::new()));
        let held = pool.0.lock().unwrap();
        assert_eq!(pool.take(CHUNK).capacity(), CHUNK);
        pool.give(chunks(1));
        drop(held);
        assert!(pool.0.lock().unwrap().is_empty());
    }
}
