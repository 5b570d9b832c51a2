//! Requests for memory that may be refused.
//!
//! Rust aborts the process where memory is refused, unless the request says that it can do without (`try_reserve`). An
//! allocator is not told which kind of request it gets; ours ([`may_fail`]) has a reserve for the one kind only.

use std::cell::Cell;
use std::collections::{TryReserveError, VecDeque};

thread_local! {
    /// How many bytes are being asked for. Not just whether: a signal's handler may interrupt, and ask for others.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

/// No memory is to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

/// Whether the caller of the calling thread's request for so many bytes goes on when it is refused.
pub fn may_fail(bytes: usize) -> bool {
    ASKED.get() == bytes
}

/// Makes room for exactly `more` items.
///
/// # Errors
/// [`OutOfMemory`]; the vector is as it was.
pub fn reserve<T>(items: &mut Vec<T>, more: usize) -> Result<(), OutOfMemory> {
    let all = items.len().saturating_add(more);
    ask::<T>(all, || items.try_reserve_exact(more))
}

/// Likewise, for a queue.
///
/// # Errors
/// [`OutOfMemory`]; the queue is as it was.
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
