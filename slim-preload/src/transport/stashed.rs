//! A flow whose stash is read first: the always-ready stand-in is under its numbers, while the transport waits behind.

use super::flags::with_file;
use super::{CtlGuard, open, swap_in, unmanage};
use crate::flow::{Ctl, Flow, Mode, Then};
use crate::stand_in::{self, ShownEnds};
use crate::{options, runtime, sys};
use libc::c_int;
use std::sync::atomic::Ordering;

/// The stash is read first, while the transport waits.
pub(super) fn show_stash(flow: &Flow, ctl: &mut Ctl) {
    let ends = ended(flow, ctl);
    put_ready(flow, ctl, ends);
    ctl.clear_suspension(flow);
    ctl.show_stash();
}

/// A direction of the flow has ended: shows that, if the stash is being read.
pub fn show_end(flow: &Flow, ctl: &mut Ctl) {
    let is_shown = |ready| runtime::file(ready).is_some_and(|file| flow.is_file(file));
    if ctl.mode() != (Mode::Stashed { then: Then::Open }) {
        return;
    }
    let ends = ended(flow, ctl);
    if stand_in::ready(ends).is_ok_and(|ready| !is_shown(ready)) {
        put_ready(flow, ctl, ends);
    }
}

/// Which directions have ended. The peer's has ended only when all its bytes are here.
fn ended(flow: &Flow, ctl: &Ctl) -> ShownEnds {
    let unread = || ctl.transport().map_or(0, sys::readable);
    let peer_ended = || match flow.stream.peer_final() {
        Some(_) => flow.stream.ends_at(flow.stream.received() + unread()),
        None => false,
    };
    match flow.read_shut.load(Ordering::Relaxed) || peer_ended() {
        true if flow.stream.local_final().is_some() => ShownEnds::Both,
        true => ShownEnds::Read,
        false => ShownEnds::Neither,
    }
}

/// Puts the always-ready stand-in that shows these ends under the numbers.
fn put_ready(flow: &Flow, ctl: &mut Ctl, ends: ShownEnds) {
    let asynchronous = std::mem::take(&mut ctl.asynchronous);
    if let Ok(file) = stand_in::ready(ends) {
        // The stand-in's status flags are not the flow's, see `Ctl::flags_of`.
        let _ = swap_in(flow, ctl, file, true);
    }
    if let (Some(transport), Some(fd)) = (ctl.transport(), ctl.fds.first().copied()) {
        if asynchronous && with_file(transport, fd, sys::set_asynchronous).is_none() {
            // These signals report a number that the application does not know. The next swap corrects that.
            sys::set_asynchronous(transport);
            ctl.asynchronous = true;
        }
        // Signal the owner of the transport: the stand-in has no owner.
        options::tell_owner(transport, fd);
    }
}

/// The flow was handed over by the program before while its stash was read: shows the stash, with the transport behind it.
pub fn show_handed(flow: &Flow, ctl: &mut Ctl, transport: c_int) {
    flow.stream.bar();
    ctl.suspend();
    ctl.set_transport(Some(transport));
    show_stash(flow, ctl);
}

/// The transport whose received bytes follow the stash: the waiting one, or one that has broken since and is not drained yet.
pub fn behind_stash(ctl: &Ctl) -> Option<c_int> {
    let is_behind = match ctl.mode() {
        Mode::Stashed { then: Then::Open } => true,
        Mode::Suspended => !ctl.receiving.stash.is_empty() && !ctl.receiving.is_drained(),
        _ => false,
    };
    ctl.transport().filter(|_| is_behind)
}

/// Takes bytes from the waiting transport until the stash holds `want` bytes: a call that reads the stash, or peeks at it, must see
/// the bytes that have arrived behind it, too.
pub fn stash_more(flow: &Flow, ctl: &mut Ctl, want: usize) {
    let Some(new) = behind_stash(ctl) else {
        return;
    };
    flow.stream.stash_more(&mut ctl.receiving, new, want);
}

/// Called when the application may have read the last stashed byte: goes on to the state that follows ([`Then`]).
pub fn after_stash(flow: &'static Flow, mut ctl: CtlGuard) {
    if !ctl.receiving.stash.is_empty() {
        return;
    }
    match ctl.mode() {
        Mode::Stashed { then: Then::Open } => {
            let plain = ctl.is_plain();
            open(flow, &mut ctl);
            if plain {
                return unmanage(flow, ctl);
            }
        }
        Mode::Stashed {
            then: Then::Error(_),
        } => ctl.mark_dead(),
        Mode::Stashed { then: Then::Over } => return unmanage(flow, ctl),
        _ => return,
    }
    drop(ctl);
    flow.stream.wake();
}
