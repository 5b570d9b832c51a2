//! A transport is found dead, or at an end of stream that the peer has not announced.

use super::{CtlGuard, conclude, install_placeholder, suspend, unmanage};
use crate::flow::{Ctl, Flow, Mode};
use crate::kept_names;
use crate::runtime;
use crate::stand_in::{self, Departure};
use crate::sys;
use libc::c_int;
use slim_agent::{MailboxState, turn};
use slim_core::{Cause, FinHow, Verdict};
use slim_stream::{SendHalf, Start};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Stands for the error that the kernel still has to report.
pub const TO_BE_ASKED: c_int = 0;

/// How long an end of stream waits for its announcement before the flow is suspended.
const ANNOUNCEMENT: Duration = Duration::from_millis(3);
/// How often a thread reads the mailbox meanwhile.
const MAILBOX_LOOK: Duration = Duration::from_micros(300);

/// Within this time a thread has counted the bytes that it has moved.
const COUNTED: Duration = Duration::from_millis(1);

/// What a data call does after the kernel has reported that the transport is dead, or has ended unannounced.
pub enum Fault {
    /// The flow is suspended: look at it again.
    Suspended,
    /// The failure is not (or no longer) a flow's: the caller passes on the kernel's answer.
    Plain,
}

/// A data call, or a poll, found the transport under `fd` dead.
pub fn fault(flow: &'static Flow, fd: c_int, cause: Cause) -> Fault {
    // A file that is not the flow's any more has its own errors and ends.
    let Some(mut ctl) = flow.own_at(fd) else {
        return Fault::Plain;
    };
    if let Cause::Eof { received } = cause {
        let heard = read_mailbox(flow, &mut ctl, received);
        drop(ctl);
        // An end that the application has seen is not taken back.
        if flow.end_shown.load(Ordering::Acquire) || announced(flow, received, heard) {
            return Fault::Plain;
        }
    } else {
        drop(ctl);
    }
    // The flow may have become plain TCP meanwhile. The kernel reports an error once, so the call must return it.
    let Some(ctl) = flow.own_at(fd) else {
        return Fault::Plain;
    };
    if ctl.mode() != Mode::Open {
        return Fault::Suspended;
    }
    // The transport may have been replaced since the caller's system call failed.
    let at_its_end = || sys::recv(fd, &mut [0], libc::MSG_PEEK | libc::MSG_DONTWAIT) == Ok(0);
    let ended = matches!(cause, Cause::Eof { .. });
    if !(sys::is_over(fd) || ended && at_its_end()) {
        return Fault::Suspended;
    }
    if ended && is_used_past_us(flow, &ctl, fd) {
        // Our counts are wrong: no announcement can match them, and no resume would be correct. The kernel's end is true.
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.demote(token));
        return Fault::Plain;
    }
    found_dead(flow, ctl, fd, cause)
}

/// Whether bytes of the transport, which has come to an end, were moved where no hook sees it. The check is repeated after a
/// moment, because a thread counts the bytes that it has moved only after its system call.
fn is_used_past_us(flow: &Flow, ctl: &Ctl, fd: c_int) -> bool {
    let differs = || {
        let start = |half: &mut SendHalf| Start::of(&flow.stream, half.sent(), fd);
        let now = flow.stream.try_with_half(start).flatten();
        now.is_some_and(|now| ctl.receiving.start().contradiction(now, || true).is_some())
    };
    differs() && {
        std::thread::sleep(COUNTED);
        differs()
    }
}

/// Suspends a live flow whose transport has died without a call that noticed it (or another thread has its error, and is about to
/// suspend the flow).
pub fn notice(flow: &'static Flow, fd: c_int) {
    if flow.live.load(Ordering::Acquire) && sys::is_over(fd) && has_failed(flow, fd) {
        fault(flow, fd, Cause::Errno(TO_BE_ASKED));
    }
}

/// Whether the transport under `fd`, which the kernel has closed, has failed. A connection that both sides have ended is closed in
/// good order. If our side has not ended, the connection has failed, even if another thread has taken the error.
pub fn has_failed(flow: &Flow, fd: c_int) -> bool {
    flow.stream.local_final().is_none() || sys::has_error(fd)
}

/// Suspends the flow: its transport under `fd`, which was in use, is dead or has ended unannounced.
pub fn found_dead(flow: &'static Flow, mut ctl: CtlGuard, fd: c_int, cause: Cause) -> Fault {
    if flow.used_by_child() || !flow.was_established(fd) {
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.demote(token));
        return Fault::Plain;
    }
    // The flow is still negotiating: no peer agent is known that could be asked about the end.
    if matches!(cause, Cause::Eof { .. }) && !flow.live.load(Ordering::Acquire) {
        flow.end_shown.store(true, Ordering::Release);
        return Fault::Plain;
    }
    if let Some(end) = refused_by_us(flow, fd, cause) {
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.finish(token, end, FinHow::Close));
        return Fault::Plain;
    }
    suspend(flow, &mut ctl);
    ctl.receiving.set_ended(matches!(cause, Cause::Eof { .. }));
    match cause {
        // The old transport would be reported as readable for ever, and without an error.
        Cause::Eof { .. } => install_placeholder(flow, &mut ctl),
        _ => ctl.receiving.set_over(),
    }
    let cause = match (cause, ctl.old()) {
        (Cause::Errno(TO_BE_ASKED), Some(old)) => {
            let errno = sys::option::<c_int>(old, libc::SOL_SOCKET, libc::SO_ERROR);
            Cause::Errno(errno.filter(|e| *e != 0).unwrap_or(libc::ECONNRESET))
        }
        (cause, _) => cause,
    };
    if let Cause::Errno(errno) = cause {
        ctl.set_taken(errno);
    }
    // Queued with the lock held: the agent must hear of the fault before it can hear of anything that another
    // thread does with the flow, and before it can resume it for the peer.
    match runtime::with_agent(|a| a.fault(flow.token(), cause)) {
        Some(true) => turn::request(),
        // No agent is left to resume the flow: the application sees the error.
        _ => conclude(flow, ctl, verdict(cause)),
    }
    Fault::Suspended
}

/// The end of our stream, if the application has shut both directions and the peer has received everything. Then our kernel has reset
/// the connection because the peer went on sending: there is nothing to resume.
fn refused_by_us(flow: &Flow, fd: c_int, cause: Cause) -> Option<u64> {
    let end = flow.stream.local_final()?;
    let shut = flow.read_shut.load(Ordering::Relaxed);
    (shut && matches!(cause, Cause::Errno(_)) && flow.stream.undelivered_on(fd) == Ok(0))
        .then_some(end)
}

/// What the application sees when a transport is lost for good.
fn verdict(cause: Cause) -> Verdict {
    match cause {
        Cause::Errno(errno) => Verdict::Errno(errno),
        Cause::Eof { .. } => Verdict::Eof,
        Cause::PeerAsked | Cause::Stall => Verdict::Errno(libc::ECONNRESET),
    }
}

/// A transport on which bytes are sent while the gate is barred (it waits behind the stash, or is half open) is dead.
pub fn lost_while_barred(flow: &'static Flow, mut ctl: CtlGuard, errno: c_int) {
    if ctl.is_plain() {
        return conclude(flow, ctl, Verdict::Errno(errno));
    }
    suspend(flow, &mut ctl);
    ctl.set_taken(errno);
    let cause = Cause::Errno(errno);
    if runtime::with_agent(|a| a.fault(flow.token(), cause)) != Some(true) {
        conclude(flow, ctl, verdict(cause));
    }
}

/// Makes the next call on a plain TCP connection report `errno`: an earlier call has taken the error from the kernel, and cannot
/// return it to its caller.
pub fn set_pending_error(fd: c_int, errno: c_int) {
    let how = match errno {
        libc::EPIPE => Departure::Refused,
        _ => Departure::Reset,
    };
    let family = sys::domain(fd).unwrap_or(libc::AF_INET);
    if let Ok(dead) = stand_in::over(how, &[], family) {
        sys::set_status(dead, sys::status(fd));
        let ends = kept_names::of(fd);
        let _ = sys::replace(dead, fd);
        kept_names::remember(fd, ends);
        sys::close(dead);
    }
}

/// Notes an error that a call has taken from a transport that was suspended meanwhile. If the transport is ever put back, the
/// error is pending.
pub fn remember(flow: &'static Flow, fd: c_int, errno: c_int) {
    let of_transport = [
        libc::ECONNRESET,
        libc::ECONNABORTED,
        libc::ETIMEDOUT,
        libc::EPIPE,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
    ];
    if of_transport.contains(&errno)
        && let Some(mut ctl) = flow.ctl_of(fd)
        && ctl.mode() == Mode::Suspended
    {
        ctl.remember_taken(errno);
    }
}

/// Whether the peer has announced the end that was met, or does so within `ANNOUNCEMENT`. The announcement and the end travel at
/// the same time, and waiting for the announcement costs less than a suspension and an inquiry.
fn announced(flow: &Flow, received: u64, mut heard: MailboxState) -> bool {
    let begun = Instant::now();
    while flow.live.load(Ordering::Acquire) && !flow.stream.is_barred() {
        let seen = flow.stream.signal();
        if flow.stream.ends_at(received) {
            return true;
        }
        let Some(left) = ANNOUNCEMENT.checked_sub(begun.elapsed()) else {
            break;
        };
        // The arrival of a message in a mailbox wakes no thread.
        let left = match heard {
            MailboxState::Open => left.min(MAILBOX_LOOK),
            _ => left,
        };
        let _ = sys::keep_errno(|| flow.stream.wait(seen, Some(left)));
        if heard == MailboxState::Open {
            heard = read_mailbox(flow, &mut flow.ctl(), received);
        }
    }
    false
}

/// Reads the mailbox for messages of an accepted flow's peer: that it has SLIM, and perhaps that it has closed the flow, after as
/// many bytes as were `received`.
pub fn read_mailbox(flow: &Flow, ctl: &mut Ctl, received: u64) -> MailboxState {
    let accepted = !ctl.receiving.dialled() && !ctl.receiving.has_moved();
    let ends = ctl.ends().filter(|_| accepted);
    let ask = |(local, remote)| runtime::with_agent(|a| a.read_mailboxes(local, remote));
    // The errno of an empty mailbox must not reach the application's call.
    let heard = ends.and_then(|ends| sys::keep_errno(|| ask(ends)));
    let heard = heard.unwrap_or(MailboxState::Nothing);
    if heard != MailboxState::Nothing {
        // The agent may not have handled the message yet.
        flow.live.store(true, Ordering::Release);
    }
    if heard == MailboxState::Closed(received) {
        flow.stream.set_peer_final(received);
        ctl.receiving.peer_closed = true;
    }
    heard
}
