//! A flow is given up: what its numbers show from then on.

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

/// Gives the flow up with an errno, or with an orderly end; what has come before that is still to be read.
pub fn escalate(flow: &'static Flow, verdict: Verdict) {
    // What the kernel has received is the application's, whatever becomes of the connection.
    drain_if_suspended(flow);
    let Some(mut ctl) = flow.own() else { return };
    if ctl.mode() == Mode::Lingering {
        ctl.set_transport(None);
    }
    let verdict = match (verdict, ctl.taken()) {
        // The end had come before the transport failed: it is what we sent that was refused.
        (Verdict::Eof, Some(libc::EPIPE)) => Verdict::Errno(libc::EPIPE),
        (verdict, _) => verdict,
    };
    conclude(flow, ctl, verdict);
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

/// A connection that is over takes the numbers, with the stash in it. The kernel reports the end by itself, but for
/// an errno that only a true network can bring about: that one is owed once by us. A stash that is too large for
/// it stays here.
pub(super) fn conclude(flow: &'static Flow, mut ctl: CtlGuard, verdict: Verdict) {
    let (how, owed) = match verdict {
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
    let copied = owed.is_none()
        && ctl.receiving.stash.len() <= stand_in::MOST
        && memory::reserve(&mut unread, ctl.receiving.stash.len()).is_ok();
    let whole = match copied {
        true => {
            unread.resize(ctl.receiving.stash.len(), 0);
            ctl.receiving.stash.peek(0, &mut unread);
            stand_in::over(how, &unread, family).ok()
        }
        false => None,
    };
    if whole.is_some() {
        ctl.receiving.stash = Stash::new();
    }
    let file = whole.or_else(|| stand_in::over(how, &[], family).ok());
    if let Some(fd) = file.filter(|_| flow.stream.local_final().is_some()) {
        sys::shutdown(fd, libc::SHUT_WR);
    }
    bury(flow, &mut ctl, file);
    if let Some(fd) = ctl.fds.first() {
        kept_names::remember(*fd, (ctl.local.clone(), ctl.peer.clone()));
    }
    ctl.uncover(flow);
    if owed.is_none() && ctl.receiving.stash.is_empty() {
        return unmanage(flow, ctl);
    }
    ctl.escalate(owed);
    drop(ctl);
    flow.stream.wake();
}

/// Puts `file`, or for want of one the old transport, under the numbers, with the flags and options they had.
fn bury(flow: &Flow, ctl: &mut Ctl, file: Option<c_int>) {
    let Some(fd) = ctl.fds.first().copied() else {
        file.into_iter().for_each(sys::close);
        return ctl.set_transport(None);
    };
    let exposed = ctl.exposed();
    let flags = sys::status(ctl.flags_of(fd));
    let old = ctl.take_transport();
    let Some(file) = file.or(old) else {
        for e in ctl.epolls.iter().filter(|_| exposed.is_some()) {
            ctl.fds.iter().for_each(|fd| e.attach(*fd));
        }
        return;
    };
    let before = old.unwrap_or(fd);
    sys::set_status(file, flags);
    if before != file {
        // What is over sends nothing.
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

/// Takes the errno that a dead flow owes, in place of the one that the kernel would report. Nothing more is owed
/// then, and what is left of the stash comes before the end.
pub fn pay(flow: &'static Flow, mut ctl: CtlGuard) -> Option<c_int> {
    let (Mode::Dead(errno)
    | Mode::Stashed {
        then: Then::Owed(errno),
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
        ctl.pay();
    }
    Some(errno)
}
