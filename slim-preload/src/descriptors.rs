//! The descriptor numbers of the process: which ones are SLIM's own, which ones libc's stdio uses, and the size of the kernel's
//! descriptor table.

use crate::{stand_in, sys};
use libc::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Whether a number is SLIM's own: for the application it does not exist.
pub fn is_ours(fd: c_int) -> bool {
    is_internal(fd) && !slim_sys::in_agent()
}

/// Whether a number is SLIM's own, even when SLIM's own thread asks.
pub fn is_internal(fd: c_int) -> bool {
    slim_sys::fds::is_internal(fd) || stand_in::is_ours(fd)
}

/// All numbers that are open.
pub fn open_numbers() -> Vec<c_int> {
    let mut all = Vec::new();
    sys::for_each_open(|fd| all.push(fd));
    all
}

/// Numbers that have a libc stream (stdio). The three standard numbers always do.
static STREAMS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// Notes whether libc has a stream for this number.
pub fn set_stream(fd: c_int, has: bool) {
    if let Some(word) = STREAMS.get(fd as u32 as usize / 64) {
        let bit = 1 << (fd % 64);
        if has {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// Whether libc may read or write this number where no hook sees it.
pub fn has_stream(fd: c_int) -> bool {
    let word = STREAMS.get(fd as u32 as usize / 64);
    (0..=2).contains(&fd) || word.is_some_and(|w| w.load(Ordering::Relaxed) >> (fd % 64) & 1 == 1)
}

/// The size of the kernel's descriptor table, as in proc(5) (`FDSize`).
static PLACES: AtomicI32 = AtomicI32::new(sys::TABLE_MIN);

/// Notes that the application has got this number: the table is at least that large.
pub fn note_number(fd: c_int) {
    if fd >= sys::TABLE_MIN {
        let places = (fd as u32 + 1).next_power_of_two() as c_int;
        PLACES.fetch_max(places, Ordering::Relaxed);
    }
}

/// Notes the table size that the kernel reports. Called before SLIM makes its first descriptor above those of the application.
pub fn note_table_size(size: Option<c_int>) {
    PLACES.fetch_max(size.unwrap_or(sys::TABLE_MIN), Ordering::Relaxed);
}

/// The size that the kernel's table would have without our descriptors. `select` ignores numbers beyond the table. The table
/// grows by powers of two, and never shrinks.
pub fn table_size() -> c_int {
    // A descriptor of ours that is just being made lies above the floor, and is not registered as ours yet.
    let floor = slim_sys::fds::floor();
    let open = open_numbers()
        .into_iter()
        .filter(|fd| *fd < floor && !is_ours(*fd));
    if let Some(last) = open.max() {
        note_number(last);
    }
    PLACES.load(Ordering::Relaxed)
}
