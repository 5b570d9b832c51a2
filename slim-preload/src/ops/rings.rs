//! `io_uring_register`: descriptors that are used through a ring.

use super::demoting::hand_over;
use crate::sys;
use crate::table::{self, Entry};
use libc::{c_int, c_uint};

/// From `linux/io_uring.h`.
const REGISTER_FILES: c_uint = 2;
const REGISTER_FILES_UPDATE: c_uint = 6;
const REGISTER_FILES2: c_uint = 13;
const REGISTER_FILES_UPDATE2: c_uint = 14;

/// `io_uring_register`: makes flows plain TCP whose descriptors are registered, because no hook sees requests on them.
pub fn register(what: c_uint, args: usize, count: usize) {
    if !table::any() {
        return;
    }
    let (list, count) = match what {
        REGISTER_FILES => (args, count),
        REGISTER_FILES_UPDATE => (word::<u64>(args, 8) as usize, count),
        REGISTER_FILES2 => (
            word::<u64>(args, 16) as usize,
            word::<u32>(args, 0) as usize,
        ),
        REGISTER_FILES_UPDATE2 => (
            word::<u64>(args, 8) as usize,
            word::<u32>(args, 24) as usize,
        ),
        _ => return,
    };
    // The kernel accepts no more (IORING_MAX_FIXED_FILES).
    const MOST: usize = 1 << 20;
    for i in 0..count.min(MOST) {
        let Some(fd) = read::<c_int>(list.wrapping_add(i * size_of::<c_int>())) else {
            return;
        };
        if let Entry::Flow(flow) = table::entry(fd) {
            sys::keep_errno(|| hand_over(flow, fd));
        }
    }
}

fn word<T: Copy + Default>(at: usize, offset: usize) -> T {
    read(at.wrapping_add(offset)).unwrap_or_default()
}

/// An integer at an address given by the application; `None` if it cannot be read.
fn read<T: Copy>(at: usize) -> Option<T> {
    let bytes = sys::memory(at as *const u8, size_of::<T>())?;
    // SAFETY: as many bytes as the type has; all of those used here are integers.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}
