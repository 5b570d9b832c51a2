//! A transport is found dead, or at an end that nobody has announced.

use super::{CtlGuard, conclude, suspend, unmanage, veil};
use crate::flow::{Ctl, Flow, Mode};
use crate::kept_names;
use crate::runtime;
use crate::stand_in::{self, Departure};
use crate::sys;
use libc::c_int;
use slim_agent::{Heard, turn};
use slim_core::{Cause, FinHow, Verdict};
use slim_stream::{SendHalf, Start};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Stands for the error that the kernel still has to report.
pub const TO_BE_ASKED: c_int = 0;

/// How long an end of stream waits for its announcement before it is looked into.
const ANNOUNCEMENT: Duration = Duration::from_millis(3);
/// How often a thread looks into the mailbox meanwhile.
const MAILBOX_LOOK: Duration = Duration::from_micros(300);

/// After so long a thread has counted what it has moved.
const COUNTED: Duration = Duration::from_millis(1);

/// What a data call does after the kernel has said that the transport is dead, or ended unannounced.
pub enum Fault {
    /// The flow is suspended: look again.
    Suspended,
    /// This is not (or no longer) a flow's failure: the caller passes on what the kernel said.
    Plain,
}

/// A data call, or a poll, found the transport under `fd` dead.
pub fn fault(flow: &'static Flow, fd: c_int, cause: Cause) -> Fault {
    // What is not the flow's any more has its own errors and ends.
    let Some(mut ctl) = flow.own_at(fd) else {
        return Fault::Plain;
    };
    if let Cause::Eof { received } = cause {
        let heard = hear(flow, &mut ctl, received);
        drop(ctl);
        // What the application was shown is not taken back.
        if flow.end_shown.load(Ordering::Acquire) || announced(flow, received, heard) {
            return Fault::Plain;
        }
    } else {
        drop(ctl);
    }
    // Plain TCP meanwhile: what the kernel said to this call, it says to nobody else.
    let Some(ctl) = flow.own_at(fd) else {
        return Fault::Plain;
    };
    if ctl.mode() != Mode::Open {
        return Fault::Suspended;
    }
    // Another thread may have had the transport replaced since the caller's system call failed.
    let at_its_end = || sys::recv(fd, &mut [0], libc::MSG_PEEK | libc::MSG_DONTWAIT) == Ok(0);
    let ended = matches!(cause, Cause::Eof { .. });
    if !(sys::is_over(fd) || ended && at_its_end()) {
        return Fault::Suspended;
    }
    if ended && is_used_past_us(flow, &ctl, fd) {
        // No announcement can fit what we have counted, and no resume would be right. The kernel knows the end.
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.demote(token));
        return Fault::Plain;
    }
    found_dead(flow, ctl, fd, cause)
}

/// Whether bytes of the transport, which has come to an end, were moved where no hook sees it. A thread that has just moved
/// some counts them in the next moment, so it is looked twice.
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

/// Suspends a live flow whose transport died when nobody was looking, or another thread that has its error is about to.
pub fn notice(flow: &'static Flow, fd: c_int) {
    if flow.live.load(Ordering::Acquire) && sys::is_over(fd) && has_failed(flow, fd) {
        fault(flow, fd, Cause::Errno(TO_BE_ASKED));
    }
}

/// Whether the transport under `fd`, which the kernel has given up, has failed. What both ends have ended is given up in good
/// order; what we have not is not, also where another thread has taken the error.
pub fn has_failed(flow: &Flow, fd: c_int) -> bool {
    flow.stream.local_final().is_none() || sys::has_error(fd)
}

/// The transport that is under `fd`, and in use, is dead, or has ended unannounced.
pub fn found_dead(flow: &'static Flow, mut ctl: CtlGuard, fd: c_int, cause: Cause) -> Fault {
    if flow.used_by_child() || !flow.was_established(fd) {
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.demote(token));
        return Fault::Plain;
    }
    // There is nobody yet who could be asked about it.
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
        // It looks as if there were something to read, and nothing is wrong with it.
        Cause::Eof { .. } => veil(flow, &mut ctl),
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
        Some(true) => turn::want(),
        // As bare, since nobody is left to resume it.
        _ => conclude(flow, ctl, verdict(cause)),
    }
    Fault::Suspended
}

/// Where our stream ended, if the application had shut both directions and the peer has all of it. Then the kernel has refused
/// what the peer went on sending, and has ended the connection with that: there is nothing to resume.
fn refused_by_us(flow: &Flow, fd: c_int, cause: Cause) -> Option<u64> {
    let end = flow.stream.local_final()?;
    let shut = flow.read_shut.load(Ordering::Relaxed);
    (shut && matches!(cause, Cause::Errno(_)) && sys::unacked(fd) == Ok(0)).then_some(end)
}

/// What the application sees of a transport that is lost for good.
fn verdict(cause: Cause) -> Verdict {
    match cause {
        Cause::Errno(errno) => Verdict::Errno(errno),
        Cause::Eof { .. } => Verdict::Eof,
        Cause::PeerAsked | Cause::Stall => Verdict::Errno(libc::ECONNRESET),
    }
}

/// The transport that bytes are sent on, though nobody may read from it yet, is dead.
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

/// A call has taken the error of a connection that is plain TCP, and cannot give it to its caller: the next call
/// is to get it.
pub fn owe(fd: c_int, errno: c_int) {
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

/// A call has taken an error from a transport that was suspended meanwhile: if the transport is ever put back, the
/// error is owed.
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

/// Whether the peer has announced the end that was met, or does so within a moment: the announcement and the end
/// travel at the same time, and to wait for the one costs less than to suspend and to ask.
fn announced(flow: &Flow, received: u64, mut heard: Heard) -> bool {
    let begun = Instant::now();
    while flow.live.load(Ordering::Acquire) && !flow.stream.is_barred() {
        let seen = flow.stream.signal();
        if flow.stream.ends_at(received) {
            return true;
        }
        let Some(left) = ANNOUNCEMENT.checked_sub(begun.elapsed()) else {
            break;
        };
        // What comes to a mailbox wakes nobody.
        let left = match heard {
            Heard::Open => left.min(MAILBOX_LOOK),
            _ => left,
        };
        let _ = sys::keep_errno(|| flow.stream.wait(seen, Some(left)));
        if heard == Heard::Open {
            heard = hear(flow, &mut flow.ctl(), received);
        }
    }
    false
}

/// Looks into the mailbox for what the peer of an accepted flow has said: that it has SLIM, and perhaps that it has closed
/// the flow, after as many bytes as were `received`.
pub fn hear(flow: &Flow, ctl: &mut Ctl, received: u64) -> Heard {
    let accepted = !ctl.receiving.dialled() && !ctl.receiving.has_moved();
    let ends = ctl.ends().filter(|_| accepted);
    let ask = |(local, remote)| runtime::with_agent(|a| a.heard(local, remote));
    // A mailbox that is empty is no error of the application's call.
    let heard = ends.and_then(|ends| sys::keep_errno(|| ask(ends)));
    let heard = heard.unwrap_or(Heard::Nothing);
    if heard != Heard::Nothing {
        // The agent may not have read it yet.
        flow.live.store(true, Ordering::Release);
    }
    if heard == Heard::Closed(received) {
        flow.stream.set_peer_final(received);
        ctl.receiving.peer_closed = true;
    }
    heard
}
