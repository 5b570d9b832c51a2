//! Calls that are abandoned by a jump (a handler interrupts a waiting call, and ends in `siglongjmp`), or by the end of their thread.
//!
//! Such a call would hold the gate and the sending half for ever. So the thread releases them before it jumps, or ends. How many
//! bytes the kernel moved for the call is unknown: usually none, because the call was waiting. The kernel's own count tells. If
//! bytes were moved, the connection becomes plain TCP.

use super::demoting;
use crate::flow::{Flow, Mode, waits};
use crate::sys;
use libc::c_int;
use slim_stream::{Inside, Start};

/// Before the thread jumps to a place where its stack ends at `target`.
pub fn before_jump(target: usize) {
    while let Some(top) = waits::waiting() {
        // The stack grows downwards: the frames that the jump abandons lie below.
        if top.frame >= target || stays_in_handler(target, top.frame) {
            return;
        }
        waits::forget_waiting();
        sys::keep_errno(|| release(top.flow, top.has_half));
    }
}

/// The thread ends: it is cancelled, or calls `pthread_exit` in a handler, or returns.
pub extern "C" fn before_end(_: *mut libc::c_void) {
    while let Some(top) = waits::waiting() {
        waits::forget_waiting();
        release(top.flow, top.has_half);
    }
}

/// Whether a handler on an alternate signal stack jumps within that stack, so that a call that waits on another stack is not abandoned.
fn stays_in_handler(target: usize, waits: usize) -> bool {
    let mut stack = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: valid for a write; zeroes are valid, and no pointer in it is followed.
    let stack = unsafe {
        libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr());
        stack.assume_init()
    };
    let within =
        |at: usize| (stack.ss_sp.addr()..=stack.ss_sp.addr() + stack.ss_size).contains(&at);
    stack.ss_flags & libc::SS_ONSTACK != 0 && within(target) && !within(waits)
}

fn release(flow: &'static Flow, had_half: bool) {
    if had_half {
        flow.stream.holder_may_be_cancelled(false);
        flow.stream.unlock_half();
    }
    let moved = moved(flow, had_half);
    flow.leave(Inside::Counted);
    if let Some(fd) = moved {
        demoting::demote_if_open(flow, fd);
    }
}

/// The flow's number, if bytes may have been moved that are not counted. If the transport is away, this is found when the transport
/// is drained.
fn moved(flow: &'static Flow, sending: bool) -> Option<c_int> {
    let sent = flow.stream.try_sent();
    let ctl = flow.ctl();
    let fd = ctl
        .fds
        .first()
        .copied()
        .filter(|_| ctl.mode() == Mode::Open)?;
    let shut = !sending && flow.stream.local_final().is_some();
    let agrees = sent.and_then(|sent| {
        let now = Start::of(&flow.stream, sent, fd)?;
        Some(
            ctl.receiving
                .start()
                .agrees(now, shut, || sys::has_peer_fin(fd)),
        )
    });
    (agrees != Some(true)).then_some(fd)
}
