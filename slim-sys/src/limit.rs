//! Raises the soft limit on open files for short moments.
//!
//! The application must see its own limit, and its children must inherit it. So while the limit is raised, the application's
//! calls that read or set the limit wait, and so do its forks. While such a call or a fork runs, the limit is not raised.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::c_int;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{SignalsBlocked, futex_wait, futex_wake_all};

/// A soft limit above this is not raised: there is room enough below it.
const AMPLE: u64 = 32 << 10;
/// How long one wait lasts before the state is read again.
const WAIT: Duration = Duration::from_millis(10);

/// 1 while the limit is raised.
static RAISED: AtomicU32 = AtomicU32::new(0);
/// Number of calls of the application that are between [`keep_over_fork`] and [`after_fork`].
static CALLS: AtomicU32 = AtomicU32::new(0);

/// Runs a call of the application that reads, sets or inherits the limit, while the limit is not raised.
pub fn keep<R>(call: impl FnOnce() -> R) -> R {
    keep_over_fork();
    let r = call();
    after_fork(false);
    r
}

/// Begins such a call: waits until the limit is not raised, and keeps it so.
pub fn keep_over_fork() {
    CALLS.fetch_add(1, Ordering::SeqCst);
    if RAISED.load(Ordering::SeqCst) != 0 {
        while RAISED.load(Ordering::SeqCst) != 0 {
            let _ = futex_wait(&RAISED, 1, Some(WAIT));
        }
    }
}

/// Ends such a call. A forked child has no other thread, so nothing is left to count.
pub fn after_fork(child: bool) {
    if child {
        CALLS.store(0, Ordering::SeqCst);
    } else {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The application's own soft limit on open files.
pub(crate) fn soft() -> u64 {
    let limit = keep(|| getrlimit(Resource::Nofile));
    limit.current.unwrap_or(u64::MAX)
}

/// Whether the application's limit is above `fd`.
pub fn may_be_given_out(fd: c_int) -> bool {
    u64::try_from(fd).is_ok_and(|fd| fd < soft())
}

/// Runs `f(limit)` while the soft limit on open files is raised above `limit`, the application's own. The kernel checks the
/// limit only when it gives out a number. `None` if raising is not needed, not allowed, or not possible at the moment.
pub fn above<R>(f: impl FnOnce(c_int) -> R) -> Option<R> {
    let _signals = SignalsBlocked::new();
    while RAISED
        .compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst)
        .is_err()
    {
        let _ = futex_wait(&RAISED, 1, Some(WAIT));
    }
    // Calls that begin from now on wait.
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
