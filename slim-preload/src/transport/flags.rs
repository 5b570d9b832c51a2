//! Status flags (`F_GETFL`) of a flow, while the file that has them is not the one under its numbers.
//!
//! A file in `O_ASYNC` mode signals its owner when it is ready. The signal reports the number through which this flag was set, so SLIM
//! sets it through a number of the application.

use super::{SHOWN, SWAPS, WAS_SHOWN};
use crate::flow::Ctl;
use crate::{rings, runtime, sleep, stand_in, sys};
use libc::c_int;
use slim_sys::numbers;
use std::sync::atomic::Ordering;

/// Gives the private file `to`, which `has` these status flags, the flags of the flow's number `fd`; `O_ASYNC` only when it has the numbers.
pub(super) fn copy_flags(ctl: &mut Ctl, fd: c_int, to: c_int, has: c_int) {
    let flags = sys::status(ctl.flags_of(fd));
    ctl.asynchronous = flags & libc::O_ASYNC != 0;
    let flags = flags & !libc::O_ASYNC;
    if flags != has {
        sys::set_status(to, flags);
    }
}

/// Runs `set`, which changes status flags, on the descriptor that has those of the flow's number `fd`. If this may be a private one, it has
/// the number meanwhile, so that the kernel's signals report the number.
pub(super) fn set_flags(ctl: &mut Ctl, fd: c_int, set: impl Fn(c_int) -> c_int) -> c_int {
    let has = ctl.flags_of(fd);
    let mut private = has != fd;
    let asynchronous = || sys::keep_errno(|| sys::status(has)) & libc::O_ASYNC != 0;
    let before = asynchronous();
    let at_its_number = || {
        if has == fd || before || !runtime::in_own_process() {
            return None;
        }
        let errno = sys::errno();
        let set = |fd| {
            sys::set_errno(errno);
            (set(fd), sys::errno())
        };
        with_file(has, fd, set)
    };
    let r = match sys::keep_errno(at_its_number) {
        Some((r, errno)) => {
            private = false;
            sys::set_errno(errno);
            r
        }
        None => set(has),
    };
    match asynchronous() {
        true if !before => {
            ctl.put_first(fd);
            // Signals report a number that the application does not know. The next swap corrects that.
            ctl.asynchronous = private;
        }
        true => {}
        false => ctl.asynchronous = false,
    }
    r
}

/// Runs `f` while `file` is under `number`, in place of a stand-in. The kernel reports readiness of a file by the number through which
/// `O_ASYNC` was set. Epoll instances do not notice: they have the stand-in itself registered. Poll and select notice by [`SWAPS`]. `None` if
/// there is no descriptor.
pub(super) fn with_file<R>(file: c_int, number: c_int, f: impl FnOnce(c_int) -> R) -> Option<R> {
    let copy = sys::dup_high(number).ok();
    let stand_in = copy.or_else(|| {
        // Usually a copy of one of these is under the number.
        let file = runtime::file(number)?;
        stand_in::ready_under(|ready| runtime::file(ready) == Some(file))
    })?;
    let result = rings::swapping(|| {
        // In one piece, so that a forked child never finds the file under the number, nor the count of it.
        numbers::whole(|| {
            SWAPS.fetch_add(SHOWN, Ordering::SeqCst);
            let result = sys::replace(file, number).ok().map(|()| {
                let result = f(number);
                let _ = sys::replace(stand_in, number);
                result
            });
            SWAPS.fetch_add(WAS_SHOWN - SHOWN, Ordering::SeqCst);
            result
        })
    });
    copy.into_iter().for_each(sys::close);
    // A call may sleep in poll or select on the file.
    sleep::wake_all();
    result
}
