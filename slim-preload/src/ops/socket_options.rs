//! `getsockopt` and `setsockopt`.

use super::demoting;
use crate::flow::{Ctl, Flow, Mode, Then};
use crate::sys;
use crate::table::{self, Entry};
use crate::transport::{self, Fault};
use crate::{options, runtime};
use libc::{c_int, c_void, socklen_t};
use slim_core::Cause;
use std::sync::atomic::Ordering;

/// `getsockopt`; `real(fd)` asks the kernel.
///
/// # Safety
/// `value` and `len` as `getsockopt(2)` asks.
pub unsafe fn option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
    real: impl Fn(c_int) -> c_int,
) -> c_int {
    let Entry::Flow(flow) = table::entry(fd) else {
        return real(fd);
    };
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_ZEROCOPY_RECEIVE) {
        // This option reads from the stream.
        sys::keep_errno(|| demoting::hand_over(flow, fd));
        return real(fd);
    }
    let Some(ctl) = flow.ctl_of(fd) else {
        return real(fd);
    };
    let error = (level, name) == (libc::SOL_SOCKET, libc::SO_ERROR);
    let on = match ctl.mode() {
        Mode::Dead(errno)
        | Mode::Stashed {
            then: Then::Error(errno),
        } if error => {
            let r = real(fd);
            if r == 0 {
                // SAFETY: the kernel has just answered.
                unsafe { answer(value, len, errno) };
            }
            transport::take_pending_error(flow, ctl);
            return r;
        }
        Mode::Stashed { then: Then::Over } if error => return real(fd),
        _ => ctl.kept_under(fd),
    };
    let (open, receives) = (ctl.mode() == Mode::Open, ctl.receives);
    let swaps = transport::SWAPS.load(Ordering::Acquire);
    // With the lock held, because otherwise another thread may close a private descriptor.
    let r = real(on);
    drop(ctl);
    if r == 0 && receives != 0 && (level, name) == (libc::SOL_SOCKET, libc::SO_RCVBUF) {
        // SAFETY: the kernel has just answered.
        unsafe { answer(value, len, receives) };
    }
    if r == 0 && (level, name) == (libc::IPPROTO_TCP, libc::TCP_INFO) {
        // SAFETY: the kernel has just answered.
        unsafe { show_state(flow, fd, value, len) };
    }
    if !error || r != 0 {
        return r;
    }
    // SAFETY: the kernel has just answered.
    let errno = unsafe { answered(value, len) };
    if errno == 0 || !flow.was_established(fd) {
        return r;
    }
    // The error is hidden if its transport is away, has been replaced meanwhile, or is dead.
    let hidden = !open
        || (super::broken(fd, errno)
            && matches!(
                transport::fault(flow, fd, Cause::Errno(errno)),
                Fault::Suspended
            ))
        || transport::swapped(swaps);
    if hidden {
        // SAFETY: as above.
        unsafe { answer(value, len, 0) };
    }
    r
}

/// TCP_INFO must not show a connection as closed when its transport is away, or has just died: writes the state that it will have
/// after the resume.
///
/// # Safety
/// The kernel has just written `*len` bytes, of TCP_INFO, to `value`, and `*len`.
unsafe fn show_state(flow: &'static Flow, fd: c_int, value: *mut c_void, len: *const socklen_t) {
    const { assert!(std::mem::offset_of!(libc::tcp_info, tcpi_state) == 0) };
    let state = value.cast::<u8>();
    // SAFETY: the caller's contract; the state is the first byte.
    if unsafe { len.read_unaligned() == 0 || *state != sys::TCP_CLOSE } {
        return;
    }
    if !flow.was_established(fd) {
        return;
    }
    sys::keep_errno(|| transport::notice(flow, fd));
    let away = |ctl: &Ctl| match ctl.mode() {
        // Includes a dead transport behind stashed bytes: its death is found when the bytes have been read.
        Mode::Suspended | Mode::Stashed { then: Then::Open } => true,
        // The transport is back since the kernel was asked, and may have died again.
        Mode::Open => {
            let live = flow.live.load(Ordering::Acquire);
            sys::tcp_state(fd) != Some(sys::TCP_CLOSE) || live && transport::has_failed(flow, fd)
        }
        _ => false,
    };
    if flow.ctl_of(fd).is_some_and(|ctl| away(&ctl)) {
        let stream = &flow.stream;
        let peer_ended = stream.ends_at(stream.received());
        let shown = match (stream.local_final().is_some(), peer_ended) {
            (false, false) => sys::TCP_ESTABLISHED,
            (true, false) => sys::TCP_FIN_WAIT2,
            (false, true) => sys::TCP_CLOSE_WAIT,
            (true, true) => return,
        };
        // SAFETY: as above.
        unsafe { state.write(shown) };
    }
}

/// The integer in the answer to a `getsockopt`, which may be shorter if the application asked for fewer bytes.
///
/// # Safety
/// The kernel has just written `*len` bytes, of a number, to `value`, and `*len`.
unsafe fn answered(value: *const c_void, len: *const socklen_t) -> c_int {
    let mut bytes = [0; size_of::<c_int>()];
    // SAFETY: the caller's contract; not more than both have.
    unsafe {
        let n = bytes.len().min(len.read_unaligned() as usize);
        std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), n);
    }
    c_int::from_ne_bytes(bytes)
}

/// Writes another integer to the answer.
///
/// # Safety
/// As [`answered`].
unsafe fn answer(value: *mut c_void, len: *const socklen_t, number: c_int) {
    let bytes = number.to_ne_bytes();
    // SAFETY: the caller's contract; not more bytes than both have.
    unsafe {
        let n = bytes.len().min(len.read_unaligned() as usize);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), n);
    }
}

/// `setsockopt`; `real(fd)` asks the kernel. An option that is set while the transport is away is set on the old transport, from which
/// the new one takes its options. An option that cannot be moved to another connection makes the flow plain TCP.
pub fn set_option(fd: c_int, level: c_int, name: c_int, real: impl Fn(c_int) -> c_int) -> c_int {
    let binds = !runtime::is_our_call() && options::set(level, name);
    let flow = match table::entry(fd) {
        Entry::Flow(flow) => Some(flow),
        _ => None,
    };
    if let Some(flow) = flow.filter(|_| binds) {
        let away = flow.ctl_of(fd).is_some_and(|c| c.mode() == Mode::Suspended);
        if away {
            sys::keep_errno(|| demoting::hand_over(flow, fd));
            return real(fd);
        }
    }
    let Some((flow, mut ctl)) = flow.and_then(|flow| Some((flow, flow.ctl_of(fd)?))) else {
        let r = real(fd);
        if binds && r == 0 {
            sys::keep_errno(|| options::bind(fd));
        }
        return r;
    };
    let mode = ctl.mode();
    let on = ctl.kept_under(fd);
    let r = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_RCVBUFFORCE) => {
            options::set_receives(on, &mut ctl.receives, || real(on))
        }
        _ => real(on),
    };
    ctl.options_set |= mode == Mode::Suspended;
    if !binds || r != 0 {
        return r;
    }
    sys::keep_errno(|| {
        options::bind(on);
        drop(ctl);
        match mode {
            Mode::Open => demoting::demote(flow, fd),
            // The flow becomes plain TCP as soon as the stash has been read.
            _ => drop(runtime::with_agent(|a| a.demote(flow.token()))),
        }
    });
    r
}
