//! The last escalations of the process, and the descriptors that tell of new ones.
//!
//! A descriptor is one end of a pair of sockets, which the caller owns; the other end is ours. So a caller that closes its end is noticed,
//! and callers do not take each other's news.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use libc::c_int;
use slim_core::Time;
use slim_core::endpoint::SurveyedEscalation;
use slim_core::event::Event;
use slim_sys::OwnFd;
use slim_sys::fds::{self, Mark};
use slim_sys::lock::SignalSafeMutex;

use crate::table::offered;
use crate::table::per_process::PerProcess;
use crate::table::rows;
use crate::table::types::TableEscalation;

/// Escalations that are remembered.
const KEPT: usize = 64;
/// Most descriptors at a time.
const MOST: usize = 64;

#[derive(Default)]
struct Escalations {
    /// Number of escalations so far.
    count: u64,
    /// Oldest first.
    last: VecDeque<TableEscalation>,
    /// Our ends of the descriptors.
    watchers: Vec<OwnFd>,
}

impl Escalations {
    /// Has `tell` tell each caller that still has its descriptor, and forgets the others.
    fn tell_watchers(&mut self, tell: impl Fn(RawFd)) {
        for fd in mem::take(&mut self.watchers) {
            if !Mark::NEWS.is_on(fd.raw()) {
                // The program has closed it where no hook sees that, and may have another file under the number.
                fds::release(fd.leak());
                continue;
            }
            tell(fd.raw());
            if !slim_sys::has_ended(fd.raw()) {
                self.watchers.push(fd);
            }
        }
    }
}

static ESCALATIONS: PerProcess<SignalSafeMutex<Escalations>> = PerProcess::new();

/// Records an escalation, before the application sees its error.
pub(crate) fn note(now: Time, escalation: &SurveyedEscalation) {
    let ago = now.since(escalation.at);
    let at = SystemTime::now().duration_since(UNIX_EPOCH);
    let row = row_of(escalation, at.unwrap_or_default().saturating_sub(ago));
    match offered::elsewhere() {
        Some(host) => (host.escalated)(&raw const row, size_of::<TableEscalation>()),
        None => record(row),
    }
}

/// Records an escalation of any copy. Its `seq` is the number of escalations that were dropped before it.
pub(crate) fn record(mut row: TableEscalation) {
    let mut all = ESCALATIONS.get().lock();
    all.count += row.seq + 1;
    row.seq = all.count;
    if all.last.len() == KEPT {
        all.last.pop_front();
    }
    all.last.push_back(row);
    // A full socket is readable already.
    all.tell_watchers(|fd| {
        let _ = slim_sys::send(fd, &[1], libc::MSG_DONTWAIT);
    });
}

/// The last escalations, the newest first.
pub(crate) fn last() -> Vec<TableEscalation> {
    let all = ESCALATIONS.get().lock();
    all.last.iter().rev().copied().collect()
}

/// A new descriptor that becomes readable with each escalation.
///
/// # Errors
/// The kernel's; `EMFILE` if there are too many.
pub(crate) fn descriptor() -> io::Result<RawFd> {
    // The number that the caller gets is one as its own calls give out. So this is such a call, and not one of SLIM's.
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let mut ends: [c_int; 2] = [-1; 2];
    // SAFETY: the kernel writes two numbers.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let [theirs, first] = ends;
    // SAFETY: open until it is closed below.
    let ours = OwnFd::make(|| unsafe { BorrowedFd::borrow_raw(first) }.try_clone_to_owned());
    // SAFETY: nothing else has this number.
    unsafe { libc::close(first) };
    let watch = ours.and_then(|ours| {
        let mut all = ESCALATIONS.get().lock();
        all.tell_watchers(|_| {});
        Mark::NEWS.set(ours.raw());
        match all.watchers.len() < MOST {
            true => all.watchers.push(ours),
            false => return Err(io::Error::from_raw_os_error(libc::EMFILE)),
        }
        Ok(theirs)
    });
    if watch.is_err() {
        // SAFETY: as above.
        unsafe { libc::close(theirs) };
    }
    watch
}

fn row_of(escalation: &SurveyedEscalation, since_epoch: Duration) -> TableEscalation {
    let suspend = Event::Suspend {
        cause: escalation.cause,
    };
    let process = escalation.process;
    TableEscalation {
        // `record` gives the number.
        seq: escalation.missed,
        time_ns: u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX),
        flow: rows::text(escalation.flow),
        sock: rows::text(escalation.sock),
        peer: rows::text(escalation.peer),
        process: rows::name(process),
        cause: rows::field(&suspend, "cause"),
        reason: rows::word(escalation.reason),
        pid: process.map_or(0, |process| process.pid),
        evidence: rows::evidence(escalation.evidence),
        attempts: escalation.attempts,
        error: escalation.errno,
    }
}
