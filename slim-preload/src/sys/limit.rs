//! The limit on open files, which is raised for moments.
//!
//! What the application sees of it, and what its children begin with, must be its own. So while the limit is raised its
//! calls about it wait, and forks; and while one of those is inside it is not raised.

use super::{Errno, futex_wait, futex_wake};
use crate::lock::undisturbed;
use libc::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Numbers from here on are not worth the trouble: there is room enough below.
const AMPLE: u64 = 32 << 10;
/// How long a wait for the other kind is at most; a thread that was cancelled inside never leaves.
const WAIT: Duration = Duration::from_millis(10);

/// 1 while the limit is raised.
static RAISED: AtomicU32 = AtomicU32::new(0);
/// Calls of the application that are inside.
static CALLS: AtomicU32 = AtomicU32::new(0);

/// Runs a call of the application that sees or sets the limit, or hands it on.
pub fn keep_limit<R>(call: impl FnOnce() -> R) -> R {
    keep_limit_over_fork();
    let r = call();
    limit_over_fork(false);
    r
}

/// The beginning of such a call.
pub fn keep_limit_over_fork() {
    CALLS.fetch_add(1, Ordering::SeqCst);
    if RAISED.load(Ordering::SeqCst) != 0 {
        super::keep_errno(|| {
            while RAISED.load(Ordering::SeqCst) != 0 {
                let _ = futex_wait(&RAISED, 1, Some(WAIT));
            }
        });
    }
}

/// Its end. In a forked child there is nobody else.
pub fn limit_over_fork(child: bool) {
    if child {
        CALLS.store(0, Ordering::SeqCst);
    } else {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Asks for the limit, and sets it.
fn limit(new: *const libc::rlimit, old: *mut libc::rlimit) -> Result<(), Errno> {
    call!(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, new, old).map(drop)
}

/// Runs `f(limit)` while the soft limit on open files is raised beyond `limit`, the one that the application has:
/// the kernel looks at it only when a number is given out. `None` where that is of no use, or not possible just now.
pub fn above_limit<R>(f: impl FnOnce(c_int) -> R) -> Option<R> {
    let _signals = undisturbed();
    while RAISED
        .compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst)
        .is_err()
    {
        let _ = futex_wait(&RAISED, 1, Some(WAIT));
    }
    // Whoever comes from now on waits.
    let r = if CALLS.load(Ordering::SeqCst) == 0 {
        raised(f)
    } else {
        None
    };
    RAISED.store(0, Ordering::SeqCst);
    futex_wake(&RAISED, c_int::MAX);
    r
}

fn raised<R>(f: impl FnOnce(c_int) -> R) -> Option<R> {
    let mut own = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    limit(std::ptr::null(), &raw mut own).ok()?;
    let raised = libc::rlimit {
        rlim_cur: own.rlim_max.min(2 * AMPLE),
        ..own
    };
    if own.rlim_cur > AMPLE || raised.rlim_cur <= own.rlim_cur {
        return None;
    }
    limit(&raw const raised, std::ptr::null_mut()).ok()?;
    let r = f(own.rlim_cur as c_int);
    let _ = limit(&raw const own, std::ptr::null_mut());
    Some(r)
}
