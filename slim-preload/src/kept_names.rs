//! Addresses of connections that are plain TCP, or given up, and whose file has other addresses than the application's connection had.
//!
//! They are kept by the file, so all copies of the number have them.

use crate::addr::{Name, RawAddr};
use crate::sys;
use libc::c_int;
use slim_sys::lock::Lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ours, and the peer's.
pub type BothNames = (Option<Name>, Option<Name>);

/// By the file's identity, with the number that the file had.
static KEPT: Lock<BTreeMap<u64, (c_int, BothNames)>> = Lock::new(BTreeMap::new());
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// With so many, those are forgotten whose number has something else by now.
static TIDY_AT: AtomicUsize = AtomicUsize::new(LEAST);
const LEAST: usize = 64;

/// The file under `fd` stands for a connection that had these addresses.
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

/// Whether another file than `file` is under `fd`, which stands for a connection.
#[cold]
pub fn stands_in(fd: c_int, file: u64) -> bool {
    let now = sys::identity(fd).filter(|now| *now != file);
    now.is_some_and(|now| KEPT.with(|kept| kept.contains_key(&now)))
}

/// The file under `fd` is not connected any more: its addresses are its own from now on.
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

/// Around a fork: the child has the same files.
pub fn before_fork() {
    KEPT.lock();
}

/// After a fork, on either side.
pub fn after_fork() {
    KEPT.unlock();
}
