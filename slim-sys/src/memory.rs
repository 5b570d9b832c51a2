//! Memory of our own, and checks of memory that an application points to. A bad pointer of the application must give `EFAULT`, and
//! must not crash our code.
//!
//! The checks are futex calls that change nothing and wake no thread: each makes the kernel access one word of a page. They also work
//! where access to other processes' memory is forbidden.

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

/// Returns memory from [`map`] to the system. If only the pages, and not the address space, could be returned: false.
///
/// # Safety
/// The memory is not used any more.
pub unsafe fn unmap(at: *mut u8, len: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe {
        let done = mm::munmap(at.cast(), len).is_ok();
        if !done {
            // The process is at its limit of mappings. The pages are freed; the address space stays in use.
            let _ = mm::madvise(at.cast(), len, Advice::LinuxDontNeed);
        }
        done
    }
}

/// Makes memory from [`map`] larger or smaller; it may move. Null on failure.
///
/// # Safety
/// The memory is not used at its old address afterwards.
pub unsafe fn remap(at: *mut u8, old: usize, new: usize) -> *mut u8 {
    // SAFETY: the caller's contract.
    let mapped = unsafe { mm::mremap(at.cast(), old, new, MremapFlags::MAYMOVE) };
    mapped.map_or(ptr::null_mut(), <*mut c_void>::cast)
}

/// Whether memory can be read.
pub fn is_readable(at: *const u8, len: usize) -> bool {
    each_page(at, len, |word| {
        // The kernel compares the word with 0. Whatever the result, no thread is woken or requeued.
        let (none, other) = (0usize, AtomicU32::new(0));
        let op = libc::FUTEX_CMP_REQUEUE | libc::FUTEX_PRIVATE_FLAG;
        let other = other.as_ptr();
        // SAFETY: the kernel reads the word, and checks first whether it may.
        unsafe { call!(libc::SYS_futex, word, op, 0, none, other, 0) }.err()
    })
}

/// Whether memory can be written to.
pub fn is_writable(at: *const u8, len: usize) -> bool {
    each_page(at, len, |word| {
        // The kernel adds 0 to the word; no thread waits on `other`.
        let (none, other) = (0usize, AtomicU32::new(0));
        let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
        let add_nothing = libc::FUTEX_OP_ADD << 28;
        let other = other.as_ptr();
        // SAFETY: the kernel writes the value that is there already, atomically, and checks first whether it may.
        unsafe { call!(libc::SYS_futex, other, op, 0, none, word, add_nothing) }.err()
    })
}

/// Calls `ask` for one word in each page of `[at, at + len)`. True if `ask` never returns `EFAULT`.
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

/// A copy of memory that an application points to; `None` if the memory cannot be read.
pub fn memory(at: *const u8, len: usize) -> Option<Vec<u8>> {
    let mut copy = vec![0; len];
    read_memory(at, &mut copy).then_some(copy)
}

/// Copies memory that an application points to into `copy`; false if it cannot be read.
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
    // SAFETY: the kernel writes up to `len` bytes to `copy`, and checks whether the source can be read.
    let n = unsafe { call!(libc::SYS_process_vm_readv, pid, to, 1, from, 1, 0) };
    n == Ok(len as c_long)
}

/// A copy of a value that an application points to; `None` if the memory cannot be read.
///
/// # Safety
/// Any bytes are a valid `T`; and the memory, if any, is the application's: we have no mutable reference to it.
pub unsafe fn copy_of<T: Copy>(at: *const T) -> Option<T> {
    // SAFETY: readable; the rest is the caller's contract.
    is_readable(at.cast(), size_of::<T>()).then(|| unsafe { at.read_unaligned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmapped_and_protected_memory_is_found() {
        let page = PAGE;
        // SAFETY: a new mapping of three pages, two of which then lose permissions; no reference points into it.
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
        // SAFETY: integers, without any mutable reference to them.
        let copy = |at: *const u64| unsafe { copy_of(at) };
        assert_eq!(copy(&raw const words[3]), Some(7));
        assert_eq!(copy(at.wrapping_add(2 * page - 2).cast()), None);
    }
}
