//! `getsockname` and `getpeername`: a connection keeps the addresses of its first transport.
//!
//! This also holds after the flow has become plain TCP, or has been given up, and the file under its numbers is a connection over
//! loopback ([`crate::stand_in`]). The number is a plain descriptor then. Its addresses are kept by file, so duplicates of the
//! number have them, too.

use crate::addr::Name;
use crate::flow::Mode;
use crate::table::{self, Entry};
use crate::transport;
use crate::{kept_names, sys};
use libc::{c_int, sockaddr, socklen_t};

/// The end of a connection whose address is requested.
#[derive(Clone, Copy)]
pub enum Side {
    /// `getsockname`.
    Local,
    /// `getpeername`.
    Peer,
}

/// `getsockname` and `getpeername`.
///
/// # Safety
/// `addr` and `len` as `getsockname(2)` asks.
pub unsafe fn name(
    fd: c_int,
    end: Side,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl Fn() -> c_int,
) -> c_int {
    let errno = sys::errno();
    // SAFETY: the caller's contract.
    let r = unsafe { known(fd, end, addr, len, &real) };
    if r == 0 || sys::errno() != libc::ENOTCONN || !is_dead_unnoticed(fd) {
        return r;
    }
    // SAFETY: likewise; nothing has been written yet.
    let r = unsafe { known(fd, end, addr, len, &real) };
    if r == 0 {
        sys::set_errno(errno);
    }
    r
}

/// Whether the kernel has forgotten the peer's address because the transport has died unnoticed. The flow is suspended then, or the
/// transport has been replaced meanwhile.
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
    end: Side,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl Fn() -> c_int,
) -> c_int {
    let Entry::Flow(flow) = table::entry(fd) else {
        // SAFETY: the caller's contract.
        return unsafe { kept(fd, end, addr, len, real) };
    };
    let Some(ctl) = flow.ctl_of(fd) else {
        // It has become plain TCP since the look at the table.
        // SAFETY: the caller's contract.
        return unsafe { kept(fd, end, addr, len, real) };
    };
    if let Mode::Dead(_) = ctl.mode() {
        drop(ctl);
        // SAFETY: the caller's contract.
        return unsafe { kept(fd, end, addr, len, real) };
    }
    let moved = ctl.receiving.has_moved() || ctl.mode() != Mode::Open;
    let saved = match end {
        Side::Local => &ctl.local,
        Side::Peer => &ctl.peer,
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
        // A connection that has ended in both directions has no peer any more: the kernel reports that.
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
    end: Side,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    if !kept_names::any() {
        return real();
    }
    // SAFETY: the application's integer.
    let room = unsafe { sys::copy_of(len) };
    let r = real();
    // The kernel reports a missing peer (`ENOTCONN`) and bad pointers.
    let Some(room) = room.filter(|_| r == 0) else {
        return r;
    };
    sys::keep_errno(|| {
        let saved = kept_names::kept(fd).and_then(|(local, peer)| match end {
            Side::Local => local,
            Side::Peer => peer,
        });
        saved.map_or(r, |saved| {
            // SAFETY: the kernel has just written to it.
            unsafe { len.write_unaligned(room) };
            // SAFETY: the caller's contract.
            unsafe { give(&saved, addr, len) }
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
            // SAFETY: both have just been found to be writable.
            unsafe { saved.give(addr, len) };
            return 0;
        }
        _ => libc::EFAULT,
    };
    super::fail(errno) as c_int
}
