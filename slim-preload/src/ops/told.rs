//! Non-blocking calls after a report that the descriptor is ready.
//!
//! Between poll's report and the call the transport may break. On bare TCP a call after such a report does not fail with EAGAIN, and
//! some programs (XGBoost) do not handle it: they count -1 bytes as sent. So the first non-blocking call of a suspension waits a moment,
//! because most resumes take less. (Bytes that were reported as readable are kept, but a suspended flow cannot give them yet.)
//!
//! Other connections of the program wait meanwhile, so the time of all waits is limited by a debt, which time pays off.

use crate::flow::{Flow, Mode};
use crate::transport::CtlGuard;
use libc::c_int;
use slim_sys::now;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest wait.
const MOMENT: Duration = Duration::from_millis(100);
/// With more debt than this, no call waits.
const MOST_DEBT: Duration = Duration::from_secs(2);
/// How much debt a wait causes, as a multiple of its time: waits take a quarter of the time at most.
const COST: u64 = 4;
/// The same for a wait in vain. The outage is a long one then, and many flows may be suspended.
const COST_IN_VAIN: u64 = 10;

/// When the debt is paid off, in nanoseconds of [`now`].
static PAID_OFF: AtomicU64 = AtomicU64::new(0);

/// Waits until the suspended flow behind `fd` has a transport again. `sends`: the call sends. False if the call fails with `EAGAIN`.
pub fn wait(flow: &'static Flow, mut ctl: CtlGuard, fd: c_int, sends: bool) -> bool {
    let begin = now();
    let debt = PAID_OFF.load(Ordering::Relaxed).saturating_sub(begin);
    // An unannounced end means that the peer has died, mostly. The inquiry takes longer than a moment.
    let short = !ctl.receiving.end_came_first() && debt < MOST_DEBT.as_nanos() as u64;
    if !ctl.is_first_call(sends) || !short {
        return false;
    }
    let until = begin + MOMENT.as_nanos() as u64;
    loop {
        let seen = flow.stream.signal();
        drop(ctl);
        let left = until.saturating_sub(now());
        if left == 0 {
            owe(begin, COST_IN_VAIN);
            return false;
        }
        // A signal handler has run, or the flow was woken: either way it is looked at again.
        let _ = flow.stream.wait(seen, Some(Duration::from_nanos(left)));
        // Another thread may have put another file under the number, which must not get the bytes.
        let Some(still) = flow.ctl_of(fd) else {
            return false;
        };
        if still.mode() != Mode::Suspended {
            owe(begin, COST);
            return true;
        }
        ctl = still;
    }
}

/// Adds the cost of a wait that has begun at `begin` to the debt.
fn owe(begin: u64, cost: u64) {
    let now = now();
    let more = now.saturating_sub(begin) * cost;
    let add = |paid_off: u64| Some(paid_off.max(now) + more);
    let _ = PAID_OFF.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
}
