//! Refused memory: the replay buffer goes on without a copy, and the stash returns an error.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use slim_core::memory::{self, OutOfMemory};
use slim_core::replay::Replay;
use slim_core::stash::Stash;

thread_local! {
    static REFUSES: Cell<bool> = const { Cell::new(false) };
}

/// Refuses fallible requests, and only those.
struct Refusing;

#[global_allocator]
static REFUSING: Refusing = Refusing;

fn refuses(bytes: usize) -> bool {
    REFUSES.get() && memory::may_fail(bytes)
}

// SAFETY: every call goes to the system's allocator, or returns null, which means that there is no memory.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match refuses(layout.size()) {
            true => std::ptr::null_mut(),
            // SAFETY: the caller's contract.
            false => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract; the block came from the system's allocator.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match refuses(size) {
            true => std::ptr::null_mut(),
            // SAFETY: the caller's contract; the block came from the system's allocator.
            false => unsafe { System.realloc(at, layout, size) },
        }
    }
}

fn refused<R>(f: impl FnOnce() -> R) -> R {
    REFUSES.set(true);
    let r = f();
    REFUSES.set(false);
    r
}

#[test]
fn a_replay_buffer_without_memory_fails_only_for_the_bytes_that_it_lost() {
    let bytes: Vec<u8> = (0..200_000).map(|i| (i % 251) as u8).collect();
    let mut replay = Replay::new();
    replay.push(&bytes[..100]);
    refused(|| replay.push(&bytes[100..150_000]));
    assert_eq!((replay.start(), replay.end()), (150_000, 150_000));
    for lost in [0, 99, 100, 149_999] {
        assert!(replay.chunk_at(lost).is_err());
    }
    assert_eq!(replay.chunk_at(150_000), Ok(None));
    // The peer's kernel may not have acknowledged the lost bytes yet.
    replay.trim(120_000);
    replay.push(&bytes[150_000..]);
    assert_eq!(replay.end(), 200_000);
    let mut at = 150_000;
    while let Some(piece) = replay.chunk_at(at as u64).unwrap() {
        assert_eq!(piece, &bytes[at..at + piece.len()]);
        at += piece.len();
    }
    assert_eq!(at, 200_000);
    assert!(replay.chunk_at(149_999).is_err());
}

#[test]
fn a_push_without_memory_leaves_the_stash_unchanged() {
    let mut stash = Stash::new();
    assert_eq!(refused(|| stash.push([1; 100])), Err(OutOfMemory));
    assert!(stash.is_empty());
    stash.push([2; 100]).unwrap();
    assert_eq!(refused(|| stash.push([3; 10_000])), Err(OutOfMemory));
    let mut out = [0; 200];
    assert_eq!(stash.read(&mut out), 100);
    assert_eq!(out[..100], [2; 100]);
    assert!(stash.is_empty());
}
