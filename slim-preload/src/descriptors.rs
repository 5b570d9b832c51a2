//! The descriptor numbers of the process: which ones are SLIM's own, which ones libc's stdio uses, and how many places the kernel's
//! table has.

use crate::{stand_in, sys};
use libc::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Whether a number is SLIM's own: for the application it does not exist.
pub fn is_ours(fd: c_int) -> bool {
    is_internal(fd) && !slim_sys::in_agent()
}

/// Whether a number is SLIM's own, also for its own calls.
pub fn is_internal(fd: c_int) -> bool {
    slim_sys::fds::is_internal(fd) || stand_in::is_ours(fd)
}

/// All numbers that are open.
pub fn open_numbers() -> Vec<c_int> {
    let mut all = Vec::new();
    sys::for_each_open(|fd| all.push(fd));
    all
}

/// Numbers that have a stream of libc's; the standard ones always do.
static STREAMS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// libc has a stream for this number from now on, or has none any more.
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

/// How many places the kernel's table of descriptors has, as proc(5) tells it.
static PLACES: AtomicI32 = AtomicI32::new(sys::TABLE_MIN);

/// The application has got this number.
pub fn note_number(fd: c_int) {
    if fd >= sys::TABLE_MIN {
        let places = (fd as u32 + 1).next_power_of_two() as c_int;
        PLACES.fetch_max(places, Ordering::Relaxed);
    }
}

/// Before the first descriptor of ours above those of the application: how many places the kernel says that there are.
pub fn note_table_size(size: Option<c_int>) {
    PLACES.fetch_max(size.unwrap_or(sys::TABLE_MIN), Ordering::Relaxed);
}

/// How many places the table would have without our descriptors: what is beyond them, `select` does not look at. It
/// grows by powers of two, and never shrinks.
pub fn table_size() -> c_int {
    // One of ours that is just being made is up there, and not known to be ours yet.
    let floor = slim_sys::fds::floor();
    let open = open_numbers()
        .into_iter()
        .filter(|fd| *fd < floor && !is_ours(*fd));
    if let Some(last) = open.max() {
        note_number(last);
    }
    PLACES.load(Ordering::Relaxed)
}
