//! Memory requests that may fail.
//!
//! Rust aborts the process when memory is refused, unless the request is fallible (`try_reserve`). An allocator is not told
//! which kind of request it gets. So this module marks fallible requests ([`may_fail`]): SLIM's allocator keeps a reserve for
//! the other kind only.

use std::cell::Cell;
use std::collections::{TryReserveError, VecDeque};

thread_local! {
    /// Size of the fallible request under way. A flag would not do: a signal handler may interrupt the request and make
    /// others.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

/// A memory request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

/// Whether the calling thread's request for this many bytes is fallible: its caller goes on when it is refused.
pub fn may_fail(bytes: usize) -> bool {
    ASKED.get() == bytes
}

/// Makes room for exactly `more` further items.
///
/// # Errors
/// [`OutOfMemory`]; the vector is unchanged.
pub fn reserve<T>(items: &mut Vec<T>, more: usize) -> Result<(), OutOfMemory> {
    let all = items.len().saturating_add(more);
    ask::<T>(all, || items.try_reserve_exact(more))
}

/// Makes room for exactly `more` further items in a queue.
///
/// # Errors
/// [`OutOfMemory`]; the queue is unchanged.
pub fn reserve_in_queue<T>(items: &mut VecDeque<T>, more: usize) -> Result<(), OutOfMemory> {
    let all = items.len().saturating_add(more);
    ask::<T>(all, || items.try_reserve_exact(more))
}

fn ask<T>(
    items: usize,
    request: impl FnOnce() -> Result<(), TryReserveError>,
) -> Result<(), OutOfMemory> {
    let before = ASKED.replace(items.saturating_mul(size_of::<T>()));
    let reserved = request();
    ASKED.set(before);
    reserved.map_err(|_| OutOfMemory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_request_changes_nothing() {
        let mut items = vec![1u64, 2];
        assert_eq!(reserve(&mut items, usize::MAX / 8), Err(OutOfMemory));
        assert_eq!(items, [1, 2]);
        assert_eq!(reserve(&mut items, 3), Ok(()));
        assert!(items.capacity() >= 5);
        assert!(!may_fail(40));
    }
}
