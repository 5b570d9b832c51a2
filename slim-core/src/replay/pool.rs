//! Free chunks, shared by all flows of the process.

use std::sync::Mutex;

/// Bytes in a chunk.
pub const CHUNK: usize = 64 * 1024;
/// How many free chunks the process keeps: 8 MiB.
pub const POOL_CHUNKS: usize = 128;

pub(super) type Chunk = Box<[u8]>;

static POOL: Mutex<Vec<Chunk>> = Mutex::new(Vec::new());

/// A chunk from the pool, or a new one.
///
/// The lock is only tried: somebody else in the pool must not make a send wait, and in a forked
/// child the lock may be held by a thread that does not exist there.
pub(super) fn take() -> Chunk {
    let pooled = POOL.try_lock().ok().and_then(|mut pool| pool.pop());
    pooled.unwrap_or_else(|| vec![0; CHUNK].into_boxed_slice())
}

/// Gives chunks back; what does not fit into the pool goes to the allocator.
pub(super) fn give(chunks: impl ExactSizeIterator<Item = Chunk>) {
    if chunks.len() == 0 {
        return;
    }
    let Ok(mut pool) = POOL.try_lock() else {
        return drop(chunks);
    };
    let room = POOL_CHUNKS - pool.len();
    pool.extend(chunks.take(room));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_used_again_and_the_pool_is_bounded() {
        let make = || vec![7; CHUNK].into_boxed_slice();
        give(
            (0..2 * POOL_CHUNKS)
                .map(|_| make())
                .collect::<Vec<_>>()
                .into_iter(),
        );
        assert!(POOL.lock().unwrap().len() <= POOL_CHUNKS);
        // Other tests of this process use the pool too, but none of them writes only sevens.
        assert!((0..2 * POOL_CHUNKS).any(|_| take().iter().all(|&b| b == 7)));
    }

    #[test]
    fn a_locked_pool_is_no_obstacle() {
        let held = POOL.lock().unwrap();
        let chunk = take();
        assert_eq!(chunk.len(), CHUNK);
        give(vec![chunk].into_iter());
        drop(held);
    }
}
