//! `getsockname` and `getpeername`: a connection keeps the addresses of its first transport.
//!
//! Also when it has become plain TCP, or has been given up, and what is under its numbers is a connection over loopback
//! ([`crate::stand_in`]). The number is a plain descriptor then. Its addresses are remembered by the file, so copies of the
//! number have them, too.

use crate::addr::{Name, RawAddr};
use crate::flow::Mode;
use crate::sys;
use crate::table::{self, Entry};
use crate::transport;
use libc::{c_int, sockaddr, socklen_t};
use slim_sys::lock::Lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which end of a connection is asked for.
#[derive(Clone, Copy)]
pub enum End {
    /// `getsockname`.
    Local,
    /// `getpeername`.
    Peer,
}

/// Ours, and the peer's.
type Ends = (Option<Name>, Option<Name>);

/// By the file's identity, with the number that the file had.
static KEPT: Lock<BTreeMap<u64, (c_int, Ends)>> = Lock::new(BTreeMap::new());
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// With so many, those are forgotten whose number has something else by now.
static TIDY_AT: AtomicUsize = AtomicUsize::new(LEAST);
const LEAST: usize = 64;

/// The file under `fd` stands for a connection that had these addresses.
pub fn remember(fd: c_int, ends: Ends) {
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
pub fn of(fd: c_int) -> Ends {
    let file = sys::identity(fd);
    let kept = KEPT.with(|kept| kept.get(&file?).map(|(_, ends)| ends.clone()));
    kept.unwrap_or_else(|| {
        let name = |addr: Option<RawAddr>| addr.and_then(|a| a.name());
        (name(RawAddr::local(fd)), name(RawAddr::peer(fd)))
    })
}

/// Around a fork: the child has the same files.
pub fn before_fork() {
    KEPT.lock();
}

/// After a fork, on either side.
pub fn after_fork() {
    KEPT.unlock();
}

/// `getsockname` and `getpeername`.
///
/// # Safety
/// `addr` and `len` as `getsockname(2)` asks.
pub unsafe fn name(
    fd: c_int,
    end: End,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl Fn() -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    let r = unsafe { known(fd, end, addr, len, &real) };
    if r == 0 || sys::errno() != libc::ENOTCONN || !is_dead_unnoticed(fd) {
        return r;
    }
    // SAFETY: likewise; nothing has been written yet.
    unsafe { known(fd, end, addr, len, &real) }
}

/// Whether the kernel has forgotten the peer because the transport died when nobody was looking. It is suspended then, or
/// has been replaced meanwhile.
#[cold]
fn is_dead_unnoticed(fd: c_int) -> bool {
    let Entry::Flow(flow) = table::entry(fd) else {
        return false;
    };
    sys::keep_errno(|| transport::notice(flow, fd));
    flow.ctl_of(fd)
        .is_some_and(|ctl| ctl.receiving.has_moved() || ctl.mode() == Mode::Suspended)
}

/// # Safety
/// As [`name`].
unsafe fn known(
    fd: c_int,
    end: End,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl Fn() -> c_int,
) -> c_int {
    let Entry::Flow(flow) = table::entry(fd) else {
        // SAFETY: the caller's contract.
        return unsafe { kept(fd, end, addr, len, real) };
    };
    let Some(ctl) = flow.ctl_of(fd) else {
        return real();
    };
    if let Mode::Dead(_) = ctl.mode() {
        drop(ctl);
        // SAFETY: the caller's contract.
        return unsafe { kept(fd, end, addr, len, real) };
    }
    let moved = ctl.receiving.has_moved() || ctl.mode() != Mode::Open;
    let saved = match end {
        End::Local => &ctl.local,
        End::Peer => &ctl.peer,
    };
    let Some(saved) = saved.as_ref().filter(|_| moved) else {
        return real();
    };
    let stream = &flow.stream;
    let has_ended = || stream.local_final().is_some() && stream.peer_final().is_some();
    if ctl.mode() == Mode::Open && has_ended() {
        // SAFETY: the application's integer.
        let room = unsafe { sys::copy_of(len) };
        let r = real();
        // What has ended in both directions has no peer any more.
        let Some(room) = room.filter(|_| r == 0) else {
            return r;
        };
        // SAFETY: the kernel has just written to it.
        unsafe { len.write_unaligned(room) };
    }
    // SAFETY: the caller's contract.
    unsafe { give(saved, addr, len) }
}

/// # Safety
/// As [`name`].
unsafe fn kept(
    fd: c_int,
    end: End,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    if !any() {
        return real();
    }
    // SAFETY: the application's integer.
    let room = unsafe { sys::copy_of(len) };
    let r = real();
    // What has no name any more (`ENOTCONN`), and bad pointers, the kernel says.
    let Some(room) = room.filter(|_| r == 0) else {
        return r;
    };
    sys::keep_errno(|| {
        let Some(file) = sys::identity(fd) else {
            return r;
        };
        KEPT.with(|kept| {
            let saved = kept.get(&file).and_then(|(_, (local, peer))| match end {
                End::Local => local.as_ref(),
                End::Peer => peer.as_ref(),
            });
            saved.map_or(r, |saved| {
                // SAFETY: the kernel has just written to it.
                unsafe { len.write_unaligned(room) };
                // SAFETY: the caller's contract.
                unsafe { give(saved, addr, len) }
            })
        })
    })
}

/// # Safety
/// As [`name`].
unsafe fn give(saved: &Name, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the application's integer.
    let room = unsafe { sys::copy_of(len) }.map(c_int::try_from);
    let errno = match room {
        Some(Err(_)) => libc::EINVAL,
        Some(Ok(room))
            if sys::is_writable(len.cast(), size_of::<socklen_t>())
                && sys::is_writable(addr.cast(), saved.len().min(room as usize)) =>
        {
            // SAFETY: both are writable, as was just found out.
            unsafe { saved.give(addr, len) };
            return 0;
        }
        _ => libc::EFAULT,
    };
    super::fail(errno) as c_int
}
