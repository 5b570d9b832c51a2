//! Several messages in one call: `recvmmsg(2)` and `sendmmsg(2)`.

use super::buffers::Buffers;
use super::limit::{Given, write_left};
use super::receive::{has_failed, set_pending_error};
use super::{fail, passing};
use crate::sys::{self, is_writable};
use crate::table;
use libc::{c_int, c_uint, mmsghdr, msghdr, timespec};

/// `recvmmsg`; `one` receives one message with the flags that it is given.
///
/// # Safety
/// `list`, of `count` messages, and `timeout` are as `recvmmsg(2)` requires; `real` makes that call.
pub unsafe fn receive(
    fd: c_int,
    (list, count): (*mut mmsghdr, c_uint),
    flags: c_int,
    timeout: *mut timespec,
    one: impl Fn(*mut msghdr, c_int) -> isize,
    real: impl Fn() -> c_int,
) -> c_int {
    if table::flow(fd).is_none() || list.is_null() {
        return real();
    }
    // The kernel must refuse a bad time limit before it looks at anything else.
    let Some(limit) = Given::Spec(timeout).read() else {
        return real();
    };
    let limit = limit.begun();
    // An error comes before the bytes that are unread (recvmmsg(2)).
    if flags & libc::MSG_ERRQUEUE == 0 && has_failed(fd) {
        return real();
    }
    let errno = sys::errno();
    let mut done = 0;
    while done < count {
        let wait = match done > 0 && flags & libc::MSG_WAITFORONE != 0 {
            true => libc::MSG_DONTWAIT,
            false => 0,
        };
        let message = list.wrapping_add(done as usize);
        let n = one(message.cast(), flags & !libc::MSG_WAITFORONE | wait);
        if n < 0 && done == 0 {
            return -1;
        }
        if n < 0 {
            set_pending_error(fd, sys::errno());
            sys::set_errno(errno);
            break;
        }
        // SAFETY: the message is in the caller's list.
        if !unsafe { write_length(message, n) } {
            return partial(done);
        }
        done += 1;
        // The limit is checked only after each message, and the remaining time is written back.
        if let Some(left) = limit.left() {
            // SAFETY: the caller's contract.
            unsafe { write_left(timeout, left) };
            if left.is_zero() {
                break;
            }
        }
    }
    done as c_int
}

/// `sendmmsg`; `one` sends one message.
///
/// # Safety
/// `list`, of `count` messages, is as `sendmmsg(2)` requires; `real` makes that call.
pub unsafe fn send(
    fd: c_int,
    (list, count): (*mut mmsghdr, c_uint),
    one: impl Fn(*const msghdr) -> isize,
    real: impl Fn() -> c_int,
) -> c_int {
    if table::flow(fd).is_none() || list.is_null() {
        passing::passing_many(fd, list, count);
        return real();
    }
    let errno = sys::errno();
    let mut done = 0;
    // The kernel accepts no more in one call (sendmmsg(2)).
    while done < count.min(libc::UIO_MAXIOV as c_uint) {
        let message = list.wrapping_add(done as usize);
        let n = one(message.cast());
        if n < 0 && done == 0 {
            return -1;
        }
        if n < 0 {
            sys::set_errno(errno);
            break;
        }
        // SAFETY: the message is in the caller's list.
        if !unsafe { write_length(message, n) } {
            return partial(done);
        }
        done += 1;
        // SAFETY: the kernel has just accepted the message.
        let whole = unsafe { Buffers::message(message.cast()) }.len();
        // After a message that was sent in part no other is sent (`__sys_sendmmsg` in the kernel).
        if (n as usize) < whole {
            break;
        }
    }
    done as c_int
}

/// The result of a call when the length of a message cannot be written: an error, unless other messages were received or sent.
fn partial(done: c_uint) -> c_int {
    match done {
        0 => fail(libc::EFAULT) as c_int,
        done => done as c_int,
    }
}

/// Writes the length of a message; false if it cannot be written. The kernel has accessed only the header before the length: that may
/// end its page, or lie in read-only memory.
///
/// # Safety
/// The memory is the application's.
unsafe fn write_length(message: *mut mmsghdr, n: isize) -> bool {
    let at = message.wrapping_byte_add(std::mem::offset_of!(mmsghdr, msg_len));
    let at = at.cast::<c_uint>();
    let good = is_writable(at.cast(), size_of::<c_uint>());
    if good {
        // SAFETY: writable, and the application's.
        unsafe { at.write_unaligned(n as c_uint) };
    }
    good
}
