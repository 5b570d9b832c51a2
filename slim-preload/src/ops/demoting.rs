//! Flows that become plain TCP, because they are going to be used where no hook sees it.

use crate::descriptors::set_stream;
use crate::flow::{Flow, Mode, Then};
use crate::table::{self, Entry};
use crate::{runtime, sys, transport};
use libc::c_int;
use slim_core::Verdict;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Makes the flow plain TCP: `fd` is going to be used where no hook sees it. If the transport is away, waits for it for a
/// while first.
pub fn hand_over(flow: &'static Flow, fd: c_int) {
    hand_over_until(flow, fd, Instant::now() + PATIENCE);
}

/// How long to wait for a transport that is away, before its flow is given up.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// [`hand_over`], waiting until `limit`.
pub fn hand_over_until(flow: &'static Flow, fd: c_int, limit: Instant) {
    transport::notice(flow, fd);
    wait_while_away(flow, fd, limit, || false);
    demote(flow, fd);
}

/// Waits until the flow behind `fd` has a transport again or is given up, `enough` holds, or `limit` has come.
pub fn wait_while_away(flow: &'static Flow, fd: c_int, limit: Instant, enough: impl Fn() -> bool) {
    while let Some(ctl) = flow.ctl_of(fd)
        && ctl.mode() == Mode::Suspended
    {
        let seen = flow.stream.signal();
        drop(ctl);
        let left = limit.saturating_duration_since(Instant::now());
        if left.is_zero() || enough() {
            break;
        }
        let _ = flow.stream.wait(seen, Some(left));
    }
}

/// Makes the flow behind `fd` plain TCP here and at the peer. If that is impossible, because the transport is away or bytes are
/// stashed, the flow becomes a connection that was reset after these bytes.
pub fn demote(flow: &'static Flow, fd: c_int) {
    let Some(ctl) = flow.own_at(fd) else { return };
    let token = flow.token();
    if ctl.mode() == Mode::Open {
        transport::unmanage(flow, ctl);
    } else {
        drop(ctl);
        transport::escalate(flow, Verdict::Errno(libc::ECONNRESET));
    }
    runtime::with_agent(|a| a.demote(token));
}

/// If the flow behind `fd` has a transport, makes it plain TCP here, and tells the peer before anything else is sent. Stashed bytes
/// are kept until they are read.
pub fn demote_if_open(flow: &'static Flow, fd: c_int) {
    let Some(ctl) = flow.ctl_of(fd) else { return };
    let token = flow.token();
    match ctl.mode() {
        Mode::Open => transport::unmanage(flow, ctl),
        Mode::Stashed { then: Then::Open } if !ctl.is_plain() => {
            drop(ctl);
            transport::become_plain(flow);
        }
        _ => return,
    }
    runtime::with_agent(|a| {
        a.demote(token);
        a.flush(TELLING);
    });
}

/// [`demote_if_open`], before an urgent byte is sent. The peer is told before that, and its answer is waited for: if the peer
/// resumed the connection, it would lose the urgent byte that it has read out of band, and the position of the mark.
pub fn demote_for_urgent(flow: &'static Flow, fd: c_int, flags: c_int) {
    let is_ours = || {
        let ctl = flow.ctl_of(fd)?;
        let ours = ctl.mode() == Mode::Open || ctl.mode() == Mode::Stashed { then: Then::Open };
        (ours && !ctl.is_plain()).then(|| sys::is_nonblocking(ctl.flags_of(fd)))
    };
    let Some(nonblocking) = is_ours() else { return };
    let at_once = nonblocking || flags & libc::MSG_DONTWAIT != 0;
    let limit = Instant::now() + runtime::time_to_answer(at_once);
    let token = flow.token();
    if flow.live.load(Ordering::Acquire) {
        runtime::with_agent(|a| a.demote_confirmed(token));
        loop {
            let seen = flow.stream.signal();
            let left = limit.saturating_duration_since(Instant::now());
            if is_ours().is_none() || left.is_zero() {
                break;
            }
            let _ = flow.stream.wait(seen, Some(left));
        }
    }
    demote_if_open(flow, fd);
}

/// How long the agent is given to send its messages to the peer.
const TELLING: Duration = Duration::from_millis(100);

/// Before libc reads or writes a descriptor where no hook sees it.
pub fn for_stdio(fd: c_int) {
    if let Entry::Flow(flow) = table::entry(fd) {
        sys::keep_errno(|| hand_over(flow, fd));
    }
}

/// libc's stdio has a stream for this number. A connection that gets the number later, by `connect` or `dup2`, is plain TCP.
pub fn stdio(fd: c_int) {
    for_stdio(fd);
    set_stream(fd, true);
}

/// The stream is about to be closed, and the number with it.
pub fn no_stdio(fd: c_int) {
    set_stream(fd, false);
}
