//! Non-blocking calls after a report that the descriptor is ready.
//!
//! Between poll's report and the call the transport may break. On bare TCP a call after such a report does not fail with EAGAIN, and
//! some programs (XGBoost) do not handle it: they count -1 bytes as sent. So the first non-blocking call of a suspension waits a moment,
//! because most resumes take less. (Bytes that were reported as readable are kept, but a suspended flow cannot give them yet.)

use crate::flow::{Flow, Mode};
use crate::transport::CtlGuard;
use libc::c_int;
use slim_sys::now;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest wait.
const MOMENT: Duration = Duration::from_millis(100);
/// After a wait in vain the outage is a long one, and many flows may be suspended: no call waits for that long.
const REST: Duration = Duration::from_secs(1);

/// Until when no call waits, in nanoseconds of [`now`].
static REST_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Waits until the suspended flow has a transport again, if its descriptor `fd` may have been reported as ready. `sends`: the call sends.
/// False if the call fails with `EAGAIN`.
pub fn wait(flow: &'static Flow, mut ctl: CtlGuard, fd: c_int, sends: bool) -> bool {
    let begin = now();
    if !ctl.is_first_call(sends) || begin < REST_UNTIL.load(Ordering::Relaxed) {
        return false;
    }
    let until = begin + MOMENT.as_nanos() as u64;
    loop {
        let seen = flow.stream.signal();
        drop(ctl);
        let left = until.saturating_sub(now());
        if left == 0 {
            REST_UNTIL.store(now() + REST.as_nanos() as u64, Ordering::Relaxed);
            return false;
        }
        // A signal handler has run, or the flow was woken: either way it is looked at again.
        let _ = flow.stream.wait(seen, Some(Duration::from_nanos(left)));
        let still = flow.ctl_of(fd);
        match still.filter(|ctl| ctl.mode() == Mode::Suspended) {
            Some(still) => ctl = still,
            None => return true,
        }
    }
}
