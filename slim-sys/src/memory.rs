//! Memory of our own, and memory that an application points to, which may be bad: that is its `EFAULT`, and not our crash.
//!
//! For the latter the kernel is asked, by futex calls that change nothing and wake nobody: they look at one word of a page each. They work
//! where looking at other processes' memory is forbidden.

use crate::pid;
use libc::c_long;
use rustix::mm::{self, Advice, MapFlags, MremapFlags, ProtFlags};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::AtomicU32;

const WORD: usize = 4;
/// No page is smaller.
const PAGE: usize = 4096;

/// Memory from the system: whole pages of zeros, or null.
pub fn map(len: usize) -> *mut u8 {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let mapped = unsafe { mm::mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) };
    mapped.map_or(ptr::null_mut(), <*mut c_void>::cast)
}

/// Gives such memory back, or as much of it as the system takes back.
///
/// # Safety
/// Nobody uses the memory any more.
pub unsafe fn unmap(at: *mut u8, len: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe {
        let done = mm::munmap(at.cast(), len).is_ok();
        if !done {
            // The process has as many mappings as it may: only the address space stays.
            let _ = mm::madvise(at.cast(), len, Advice::LinuxDontNeed);
        }
        done
    }
}

/// Makes such memory larger or smaller; it may move. Null if that cannot be.
///
/// # Safety
/// Nobody uses it at its old place afterwards.
pub unsafe fn remap(at: *mut u8, old: usize, new: usize) -> *mut u8 {
    // SAFETY: the caller's contract.
    let mapped = unsafe { mm::mremap(at.cast(), old, new, MremapFlags::MAYMOVE) };
    mapped.map_or(ptr::null_mut(), <*mut c_void>::cast)
}

/// Whether memory can be read.
pub fn is_readable(at: *const u8, len: usize) -> bool {
    each_page(at, len, |word| {
        // A word there is compared with another one; whether they are the same, nobody is woken or moved.
        let (none, other) = (0usize, AtomicU32::new(0));
        let op = libc::FUTEX_CMP_REQUEUE | libc::FUTEX_PRIVATE_FLAG;
        let other = other.as_ptr();
        // SAFETY: the kernel reads a word of each, and checks first whether it may.
        unsafe { call!(libc::SYS_futex, word, op, 0, none, other, 0) }.err()
    })
}

/// Whether memory can be written to.
pub fn is_writable(at: *const u8, len: usize) -> bool {
    each_page(at, len, |word| {
        // Nothing is added to a word there, and nobody waits for the other one.
        let (none, other) = (0usize, AtomicU32::new(0));
        let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
        let add_nothing = libc::FUTEX_OP_ADD << 28;
        let other = other.as_ptr();
        // SAFETY: the kernel writes what is there already, in one step, and checks first whether it may.
        unsafe { call!(libc::SYS_futex, other, op, 0, none, word, add_nothing) }.err()
    })
}

/// Whether `ask` says no `EFAULT` of a word in each page of `[at, at + len)`.
fn each_page(at: *const u8, len: usize, ask: impl Fn(*const u8) -> Option<libc::c_int>) -> bool {
    let Some(last) = len.checked_sub(1) else {
        return true;
    };
    let Some(end) = at.addr().checked_add(last) else {
        return false;
    };
    let first = at.addr() & !(WORD - 1);
    let others = (first / PAGE + 1..=end / PAGE).map(|page| page * PAGE);
    std::iter::once(first)
        .chain(others)
        .all(|word| ask(at.with_addr(word)) != Some(libc::EFAULT))
}

/// A copy of memory that an application points to; `None` where it points to nothing.
pub fn memory(at: *const u8, len: usize) -> Option<Vec<u8>> {
    let mut copy = vec![0; len];
    read_memory(at, &mut copy).then_some(copy)
}

/// Likewise, into `copy`.
pub fn read_memory(at: *const u8, copy: &mut [u8]) -> bool {
    let len = copy.len();
    let to = libc::iovec {
        iov_base: copy.as_mut_ptr().cast(),
        iov_len: len,
    };
    let from = libc::iovec {
        iov_base: at.cast_mut().cast(),
        iov_len: len,
    };
    let (pid, to, from) = (pid(), &raw const to, &raw const from);
    // SAFETY: the kernel writes up to `len` bytes to `copy`, and checks whether there are any to read.
    let n = unsafe { call!(libc::SYS_process_vm_readv, pid, to, 1, from, 1, 0) };
    n == Ok(len as c_long)
}

/// A copy of something that an application points to; `None` where it points to nothing.
///
/// # Safety
/// Any bytes are a `T`; and what is there, if anything, is the application's, of which we have no mutable reference.
pub unsafe fn copy_of<T: Copy>(at: *const T) -> Option<T> {
    // SAFETY: readable; the rest is the caller's contract.
    is_readable(at.cast(), size_of::<T>()).then(|| unsafe { at.read_unaligned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there() {
        let page = PAGE;
        // SAFETY: a new mapping of three pages, of which two are then made worse; none is a reference's.
        let at = unsafe {
            let (rw, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 3 * page, rw, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at, page, libc::PROT_READ), 0);
            assert_eq!(libc::mprotect(at.byte_add(2 * page), page, none), 0);
            at.cast::<u8>().cast_const()
        };
        let reads = |from, len| is_readable(at.wrapping_add(from), len);
        assert!(reads(0, page) && reads(0, 2 * page) && reads(2 * page - 1, 1) && reads(1, 2));
        assert!(!reads(2 * page, 1), "behind the end");
        assert!(!reads(2 * page - 1, 2), "across the end");
        assert!(!reads(0, 3 * page), "all of it");
        assert!(!is_readable(std::ptr::null(), 1));
        assert!(!is_readable(at, usize::MAX), "more than there is");
        assert!(is_readable(std::ptr::null(), 0), "nothing");
        let writes = |from, len| is_writable(at.wrapping_add(from), len);
        assert!(writes(page, page) && writes(page + 1, 7) && writes(2 * page - 1, 1));
        assert!(!writes(page - 1, 1), "read only");
        assert!(!writes(page - 1, 2) && !writes(2 * page - 1, 2) && !writes(2 * page, 8));
        let words = [7_u64; 1024];
        assert!(is_writable(words.as_ptr().cast(), size_of_val(&words)));
        assert_eq!(words, [7; 1024]);
        // SAFETY: integers, of which nobody has a mutable reference.
        let copy = |at: *const u64| unsafe { copy_of(at) };
        assert_eq!(copy(&raw const words[3]), Some(7));
        assert_eq!(copy(at.wrapping_add(2 * page - 2).cast()), None);
    }
}
