//! Flows that become plain TCP, because somebody is to use them whom no hook sees.

use crate::descriptors::set_stream;
use crate::flow::{Flow, Mode, Then};
use crate::table::{self, Entry};
use crate::{runtime, sys, transport};
use libc::c_int;
use slim_core::Verdict;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Somebody whom we cannot see is to use `fd`: the flow becomes plain TCP. A transport that is away is waited for
/// a while first.
pub fn hand_over(flow: &'static Flow, fd: c_int) {
    hand_over_until(flow, fd, Instant::now() + PATIENCE);
}

/// How long a transport that is away is waited for before its flow is given up.
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

/// The flow behind `fd` becomes plain TCP here and at the peer. Where that cannot be, because the transport is away or
/// bytes are stashed, it is a connection that was reset after these bytes.
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

/// The flow behind `fd`, if it has a transport, becomes plain TCP here, and the peer is told so before anything else is sent. One
/// that has bytes stashed keeps them until they are read.
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

/// [`demote_if_open`], before an urgent byte is sent: the peer has heard it before that, if it answers in time. What it has
/// read aside, and where the mark is, would be lost if it had to resume the connection.
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
        runtime::with_agent(|a| a.demote_heard(token));
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

/// How long the agent is given to send the peer what it is to know.
const TELLING: Duration = Duration::from_millis(100);

/// Before libc reads or writes a descriptor where no hook sees it.
pub fn for_stdio(fd: c_int) {
    if let Entry::Flow(flow) = table::entry(fd) {
        sys::keep_errno(|| hand_over(flow, fd));
    }
}

/// libc's stdio has a stream for this number. What comes under it, by `connect` or `dup2`, stays plain TCP.
pub fn stdio(fd: c_int) {
    for_stdio(fd);
    set_stream(fd, true);
}

/// The stream is about to be closed, and the number with it.
pub fn no_stdio(fd: c_int) {
    set_stream(fd, false);
}
