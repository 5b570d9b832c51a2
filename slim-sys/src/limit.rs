//! The limit on open files, which is raised for moments.
//!
//! What the application sees of it, and what its children begin with, must be its own. So while the limit is raised its
//! calls about it wait, and forks; and while one of those is inside it is not raised.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::c_int;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{SignalsBlocked, futex_wait, futex_wake_all};

/// Numbers from here on are not worth the trouble: there is room enough below.
const AMPLE: u64 = 32 << 10;
/// How long a wait for the other kind is at most; a thread that was cancelled inside never leaves.
const WAIT: Duration = Duration::from_millis(10);

/// 1 while the limit is raised.
static RAISED: AtomicU32 = AtomicU32::new(0);
/// Calls of the application that are inside.
static CALLS: AtomicU32 = AtomicU32::new(0);

/// Runs a call of the application that sees or sets the limit, or hands it on.
pub fn keep<R>(call: impl FnOnce() -> R) -> R {
    keep_over_fork();
    let r = call();
    after_fork(false);
    r
}

/// The beginning of such a call.
pub fn keep_over_fork() {
    CALLS.fetch_add(1, Ordering::SeqCst);
    if RAISED.load(Ordering::SeqCst) != 0 {
        while RAISED.load(Ordering::SeqCst) != 0 {
            let _ = futex_wait(&RAISED, 1, Some(WAIT));
        }
    }
}

/// Its end. In a forked child there is nobody else.
pub fn after_fork(child: bool) {
    if child {
        CALLS.store(0, Ordering::SeqCst);
    } else {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The soft limit on open files that the application has.
pub(crate) fn soft() -> u64 {
    let limit = keep(|| getrlimit(Resource::Nofile));
    limit.current.unwrap_or(u64::MAX)
}

/// Whether the application's limit is above `fd`.
pub fn may_be_given_out(fd: c_int) -> bool {
    u64::try_from(fd).is_ok_and(|fd| fd < soft())
}

/// Runs `f(limit)` while the soft limit on open files is raised beyond `limit`, the one that the application has:
/// the kernel looks at it only when a number is given out. `None` where that is of no use, or not possible just now.
pub fn above<R>(f: impl FnOnce(c_int) -> R) -> Option<R> {
    let _signals = SignalsBlocked::new();
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
    futex_wake_all(&RAISED);
    r
}

fn raised<R>(f: impl FnOnce(c_int) -> R) -> Option<R> {
    let own = getrlimit(Resource::Nofile);
    let soft = own.current.unwrap_or(u64::MAX);
    let raised = own.maximum.unwrap_or(u64::MAX).min(2 * AMPLE);
    if soft > AMPLE || raised <= soft {
        return None;
    }
    let raised = Rlimit {
        current: Some(raised),
        maximum: own.maximum,
    };
    setrlimit(Resource::Nofile, raised).ok()?;
    let r = f(soft as c_int);
    let _ = setrlimit(Resource::Nofile, own);
    Some(r)
}
