//! The application's addresses of connections that are plain TCP, or given up, and whose file has other addresses.
//!
//! They are kept by file, so they hold for all duplicates of the number.

use crate::addr::{Name, RawAddr};
use crate::sys;
use libc::c_int;
use slim_sys::lock::Lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Our address, and the peer's.
pub type BothNames = (Option<Name>, Option<Name>);

/// The addresses by the file's identity, with the number that the file had.
static KEPT: Lock<BTreeMap<u64, (c_int, BothNames)>> = Lock::new(BTreeMap::new());
/// The number of entries.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// At this number of entries, those are removed whose number has another file by now.
static TIDY_AT: AtomicUsize = AtomicUsize::new(LEAST);
const LEAST: usize = 64;

/// Keeps the addresses of the connection that the file under `fd` stands for.
pub fn remember(fd: c_int, ends: BothNames) {
    let Some(file) = sys::identity(fd) else {
        return;
    };
    KEPT.with(|kept| {
        if kept.len() >= TIDY_AT.load(Ordering::Relaxed) {
            kept.retain(|file, (number, _)| sys::identity(*number) == Some(*file));
            TIDY_AT.store((2 * kept.len()).max(LEAST), Ordering::Relaxed);
        }
        kept.insert(file, (fd, ends));
        COUNT.store(kept.len(), Ordering::Relaxed);
    });
}

/// Whether any file stands for a connection.
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Whether the file under `fd` is another one than `file`, and stands for a connection.
#[cold]
pub fn stands_in(fd: c_int, file: u64) -> bool {
    let now = sys::identity(fd).filter(|now| *now != file);
    now.is_some_and(|now| KEPT.with(|kept| kept.contains_key(&now)))
}

/// Forgets the addresses for the file under `fd`: it is not connected any more, so its own addresses count from now on.
#[cold]
pub fn forget(fd: c_int) {
    let Some(file) = sys::identity(fd) else {
        return;
    };
    KEPT.with(|kept| {
        kept.remove(&file);
        COUNT.store(kept.len(), Ordering::Relaxed);
    });
}

/// The addresses of a connection that is plain TCP.
pub fn of(fd: c_int) -> BothNames {
    kept(fd).unwrap_or_else(|| {
        let name = |addr: Option<RawAddr>| addr.and_then(|a| a.name());
        (name(RawAddr::local(fd)), name(RawAddr::peer(fd)))
    })
}

/// The addresses that are kept for the file under `fd`.
pub fn kept(fd: c_int) -> Option<BothNames> {
    let file = sys::identity(fd)?;
    KEPT.with(|kept| kept.get(&file).map(|(_, ends)| ends.clone()))
}

/// Before a fork: takes the lock. The child keeps the entries, because it has the same files.
pub fn before_fork() {
    KEPT.lock();
}

/// After a fork, on either side.
pub fn after_fork() {
    KEPT.unlock();
}
