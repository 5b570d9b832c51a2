//! The memory that a process shares with its forked children: one byte for each flow.
//!
//! A child sets the byte of a flow before it uses the connection; the parent then goes on with that connection as plain TCP.

use std::io;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

/// The number of bytes. Slots that differ by a multiple of it share a byte, which can only make a flow plain TCP needlessly.
const SLOTS: usize = 1 << 16;

/// The memory shared with children.
static MARKS: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());
/// In a child: the memory shared with the parent.
static PARENT_MARKS: AtomicPtr<AtomicU8> = AtomicPtr::new(std::ptr::null_mut());

/// Maps this process's shared memory.
pub fn prepare() -> io::Result<()> {
    // SAFETY: a fresh anonymous mapping; nothing else refers to it.
    let page = unsafe {
        let (read_write, shared) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        );
        libc::mmap(
            std::ptr::null_mut(),
            SLOTS,
            read_write,
            shared | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    MARKS.store(page.cast(), Ordering::Release);
    Ok(())
}

fn mark(page: &AtomicPtr<AtomicU8>, slot: u32) -> Option<&AtomicU8> {
    let page = page.load(Ordering::Acquire);
    // SAFETY: null, or a mapping of SLOTS bytes that is never unmapped.
    (!page.is_null()).then(|| unsafe { &*page.add(slot as usize % SLOTS) })
}

/// Whether a forked child has used the connection of this slot.
pub fn child_used(slot: u32) -> bool {
    mark(&MARKS, slot).is_some_and(|m| m.load(Ordering::SeqCst) != 0)
}

/// Clears the mark of a slot that gets a new connection.
pub fn clear_mark(slot: u32) {
    if let Some(m) = mark(&MARKS, slot) {
        m.store(0, Ordering::SeqCst);
    }
}

/// In a child, before it uses a connection of its parent: sets the mark.
pub fn tell_parent(slot: u32) {
    if let Some(m) = mark(&PARENT_MARKS, slot) {
        m.store(1, Ordering::SeqCst);
    }
}

/// In a forked child: the shared memory becomes the parent's.
pub fn inherit() {
    let parents = MARKS.swap(std::ptr::null_mut(), Ordering::Relaxed);
    PARENT_MARKS.store(parents, Ordering::Relaxed);
}
