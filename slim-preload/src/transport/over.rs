//! Escalation: what the numbers of a flow show after it is given up.

use super::flags::copy_flags;
use super::{CtlGuard, abort, drain, swap_in, unmanage};
use crate::addr::Name;
use crate::flow::{Ctl, Flow, Mode, Then};
use crate::kept_names;
use crate::options;
use crate::stand_in::{self, Departure};
use crate::sys;
use libc::c_int;
use slim_core::stash::Stash;
use slim_core::{Verdict, memory};

/// Gives the flow up with an errno, or with an orderly end. Bytes received before that can still be read.
pub fn escalate(flow: &'static Flow, verdict: Verdict) {
    // Bytes that the kernel has received belong to the application, even if the connection is lost.
    drain_if_suspended(flow);
    let Some(mut ctl) = flow.own() else { return };
    if ctl.mode() == Mode::Lingering {
        ctl.set_transport(None);
    }
    let verdict = match (verdict, ctl.taken()) {
        // Sends were refused after the stream had ended, while the application could not see that end. Without SLIM it would have met the end
        // first. A program that sends before it reads must not get SIGPIPE for that, so its next send is the first one to be refused.
        (Verdict::Errno(libc::EPIPE), _) if ctl.receiving.end_came_first() => Verdict::Eof,
        // The peer's stream had ended before the transport failed, so the failure concerns the bytes that we sent on it. If there are none,
        // someone else than the peer's kernel has reset the connection, and the application's next send is the first one to be refused.
        (Verdict::Eof, Some(libc::EPIPE)) if has_sent(flow, &ctl) => Verdict::Errno(libc::EPIPE),
        (verdict, _) => verdict,
    };
    conclude(flow, ctl, verdict);
}

/// Whether the application has sent bytes on the transport that has failed. True if that is unknown.
fn has_sent(flow: &Flow, ctl: &Ctl) -> bool {
    let start = ctl.receiving.start();
    flow.stream
        .try_sent()
        .is_none_or(|sent| start.has_sent(sent))
}

fn drain_if_suspended(flow: &'static Flow) {
    let undrained = {
        let ctl = flow.ctl();
        ctl.mode() == Mode::Suspended && !ctl.receiving.is_drained()
    };
    if undrained {
        drain(flow);
    }
}

/// Puts a connection that is over under the numbers, with the stash in its receive queue. The kernel then reports the end by itself.
/// Exception: an errno that only a real network can cause is a pending error, which SLIM reports once, if no bytes are unread; after unread
/// bytes the error is ECONNRESET. So these bytes are in the kernel, for a program that this one or a child executes. A stash that is too large
/// for the queue stays here.
pub(super) fn conclude(flow: &'static Flow, mut ctl: CtlGuard, verdict: Verdict) {
    let (how, pending) = match verdict {
        Verdict::Errno(libc::ECONNRESET) => (Departure::Reset, None),
        Verdict::Errno(libc::EPIPE) => (Departure::Refused, None),
        Verdict::Errno(errno) => (Departure::Reset, Some(errno)),
        Verdict::Eof => (Departure::Closed, None),
    };
    if !matches!(
        ctl.mode(),
        Mode::Open | Mode::Suspended | Mode::Stashed { then: Then::Open }
    ) {
        return;
    }
    flow.stream.bar();
    let mut unread = Vec::new();
    let family = ctl.local.as_ref().map_or(libc::AF_INET, Name::family);
    let copied = ctl.receiving.stash.len() <= stand_in::MOST
        && memory::reserve(&mut unread, ctl.receiving.stash.len()).is_ok();
    let whole = match copied {
        true => {
            unread.resize(ctl.receiving.stash.len(), 0);
            ctl.receiving.stash.peek(0, &mut unread);
            stand_in::over(how, &unread, family).ok()
        }
        false => None,
    };
    let pending = pending.filter(|_| unread.is_empty() || whole.is_none());
    if whole.is_some() {
        ctl.receiving.stash = Stash::new();
    }
    let file = whole.or_else(|| stand_in::over(how, &[], family).ok());
    if let Some(fd) = file.filter(|_| flow.stream.local_final().is_some()) {
        sys::shutdown(fd, libc::SHUT_WR);
    }
    install_stand_in(flow, &mut ctl, file);
    if let Some(fd) = ctl.fds.first() {
        kept_names::remember(*fd, (ctl.local.clone(), ctl.peer.clone()));
    }
    ctl.clear_suspension(flow);
    if pending.is_none() && ctl.receiving.stash.is_empty() {
        return unmanage(flow, ctl);
    }
    ctl.escalate(pending);
    drop(ctl);
    flow.stream.wake();
}

/// Puts `file` under the numbers (without one: the old transport), with the flags and options that they had.
fn install_stand_in(flow: &Flow, ctl: &mut Ctl, file: Option<c_int>) {
    let Some(fd) = ctl.fds.first().copied() else {
        file.into_iter().for_each(sys::close);
        return ctl.set_transport(None);
    };
    let exposed = ctl.exposed();
    if let Some(file) = file.or(ctl.transport()) {
        copy_flags(ctl, fd, file, sys::status(file));
    }
    let old = ctl.take_transport();
    let Some(file) = file.or(old) else {
        for e in ctl.epolls.iter().filter(|_| exposed.is_some()) {
            ctl.fds.iter().for_each(|fd| e.attach(*fd));
        }
        return;
    };
    let before = old.unwrap_or(fd);
    if before != file {
        // Errors do not matter: a connection that is over sends nothing.
        let _ = options::copy(before, file, &mut ctl.receives);
    }
    if old.is_none() {
        sys::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &sys::AT_ONCE);
    }
    if let Some(exposed) = exposed {
        sys::disconnect(exposed);
    }
    let _ = swap_in(flow, ctl, file, true);
    sys::close(file);
    if let Some(old) = old.filter(|o| *o != file) {
        abort(old);
    }
}

/// Takes the pending error of a dead flow, in place of the error that the kernel would report. Afterwards no error is pending. If
/// stashed bytes are left, they are read before the end.
pub fn take_pending_error(flow: &'static Flow, mut ctl: CtlGuard) -> Option<c_int> {
    let (Mode::Dead(errno)
    | Mode::Stashed {
        then: Then::Error(errno),
    }) = ctl.mode()
    else {
        return None;
    };
    if let Some(fd) = ctl.fds.first() {
        let _ = sys::option::<c_int>(*fd, libc::SOL_SOCKET, libc::SO_ERROR);
    }
    if ctl.receiving.stash.is_empty() {
        unmanage(flow, ctl);
    } else {
        ctl.clear_pending_error();
    }
    Some(errno)
}
