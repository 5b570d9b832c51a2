//! Descriptors that go to other processes over Unix sockets.

use super::demoting;
use crate::runtime;
use crate::sys;
use crate::table::{self, Entry};
use libc::c_int;

/// Before a message is sent on `socket`, which is no flow: descriptors in the message may be flows, whose connections then
/// belong to another process, too. The message is read with checks, because the kernel has not accepted it yet.
pub fn passing(socket: c_int, message: *const libc::msghdr) {
    if can_pass(socket) {
        sys::keep_errno(|| hand_over_all(message));
    }
}

fn can_pass(socket: c_int) -> bool {
    let local = || sys::keep_errno(|| sys::domain(socket)) == Some(libc::AF_UNIX);
    table::any() && !runtime::is_our_call() && local() && runtime::in_own_process()
}

/// [`passing`], for `sendmmsg`.
pub fn passing_many(socket: c_int, list: *const libc::mmsghdr, count: libc::c_uint) {
    // The kernel accepts no more in one call (sendmmsg(2)).
    let most = libc::UIO_MAXIOV as libc::c_uint;
    for i in 0..if can_pass(socket) { count.min(most) } else { 0 } {
        // Computes only the address; `hand_over_all` reads with checks.
        let message = list.wrapping_add(i as usize);
        sys::keep_errno(|| hand_over_all(message.cast()));
    }
}

fn hand_over_all(message: *const libc::msghdr) {
    // SAFETY: a msghdr is plain data, and has been read whole.
    let header = sys::memory(message.cast(), size_of::<libc::msghdr>())
        .map(|bytes| unsafe { bytes.as_ptr().cast::<libc::msghdr>().read_unaligned() });
    // The kernel accepts no more control data than this (net.core.optmem_max is far below).
    const MOST: usize = 1 << 20;
    let Some(header) = header.filter(|h| (1..MOST).contains(&h.msg_controllen)) else {
        return;
    };
    let Some(control) = sys::memory(header.msg_control.cast(), header.msg_controllen) else {
        return;
    };
    let word = |at: usize| {
        let bytes = control.get(at..at + size_of::<c_int>())?;
        Some(c_int::from_ne_bytes(bytes.try_into().ok()?))
    };
    let length = |at: usize| {
        let bytes = control.get(at..at + size_of::<usize>())?;
        Some(usize::from_ne_bytes(bytes.try_into().ok()?))
    };
    // SAFETY: arithmetic.
    let head = unsafe { libc::CMSG_LEN(0) } as usize;
    let mut at = 0;
    while let Some(len) = length(at).filter(|len| *len >= head) {
        let kind = (
            word(at + std::mem::offset_of!(libc::cmsghdr, cmsg_level)),
            word(at + std::mem::offset_of!(libc::cmsghdr, cmsg_type)),
        );
        if kind == (Some(libc::SOL_SOCKET), Some(libc::SCM_RIGHTS)) {
            let numbers = (at + head..at + len).step_by(size_of::<c_int>());
            for fd in numbers.map_while(word) {
                if let Entry::Flow(flow) = table::entry(fd) {
                    demoting::hand_over(flow, fd);
                }
            }
        }
        // SAFETY: arithmetic.
        at += unsafe { libc::CMSG_SPACE((len - head).min(MOST) as u32) } as usize;
    }
}
