//! Swapping what is under a flow's numbers: suspend, install, reinstate, escalate.
//!
//! Invariants, all under the flow's control lock:
//! * the gate is barred before anything is swapped, and opened only when the transport is back, so a data
//!   call never accounts bytes of one transport to another;
//! * epoll registrations are taken out before each swap and put back after it, and are out while a flow is suspended;
//! * `received` is final only after [`drain`], which comes when no call is inside the gate.
//!
//! A flow that is suspended needs no descriptor: the old transport stays under its numbers, *exposed*, until another one
//! takes them. Nobody of the application sees it: data calls meet the barred gate, epoll does not have it, poll and
//! select leave it out ([`crate::ops::poll`]). Only before others get the numbers, who know nothing of all that, they
//! are [veiled](veil): a placeholder that is never ready takes them.

mod fault;
mod held;
mod over;

use crate::flow::{Ctl, Flow, Mode, Then};
use crate::stand_in;
use crate::sys::{self, Errno};
use crate::{epoll, kept_names, options, rings, runtime, sleep, table};
use libc::c_int;
use slim_core::{Cause, Verdict};
use slim_stream::Unsound;
use slim_sys::lock::Guard;
use slim_sys::numbers;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

pub use fault::{
    Fault, TO_BE_ASKED, fault, found_dead, has_failed, hear, lost_while_barred, notice, owe,
    remember,
};
use over::conclude;
pub use over::{escalate, pay};

/// Grows with every swap, so that a call that slept in poll or select knows to look again.
pub static SWAPS: AtomicU64 = AtomicU64::new(0);

/// The control part of a flow, locked.
pub type CtlGuard = Guard<'static, Ctl>;

/// Puts `file` under all numbers of the flow.
fn swap_in(flow: &Flow, ctl: &mut Ctl, file: c_int, registered: bool) -> Result<(), Errno> {
    flow.drop_lost(ctl);
    rings::swapping(|| swap(flow, ctl, file, registered))
}

fn swap(flow: &Flow, ctl: &mut Ctl, file: c_int, registered: bool) -> Result<(), Errno> {
    epoll::read_back(flow, ctl);
    for e in &ctl.epolls {
        ctl.fds.iter().for_each(|fd| e.detach(*fd));
    }
    // A forked child finds under each number what it is told is there.
    let swapped = numbers::whole(|| {
        let swapped = ctl.fds.iter().try_for_each(|fd| sys::replace(file, *fd));
        flow.set_under(file);
        swapped
    });
    SWAPS.fetch_add(1, Ordering::SeqCst);
    // Not before the swap: who is woken looks the number up again, and is to find the new file.
    ctl.lift_veil();
    if registered {
        for e in &ctl.epolls {
            ctl.fds.iter().for_each(|fd| e.attach(*fd));
        }
    }
    if let Some(fd) = ctl.fds.first().filter(|_| registered) {
        options::tell_owner(*fd, *fd);
    }
    sleep::wake_all();
    swapped
}

/// Bars the flow; the transport is kept. Does nothing when that is so already.
pub fn suspend(flow: &Flow, ctl: &mut Ctl) {
    if ctl.fds.is_empty() {
        return;
    }
    match ctl.mode() {
        Mode::Open => {
            flow.stream.bar();
            epoll::read_back(flow, ctl);
            ctl.suspend();
            if epoll::any_unseen() {
                veil(flow, ctl);
            }
            if ctl.is_veiled() {
                return flow.stream.wake();
            }
            rings::swapping(|| {
                for e in &ctl.epolls {
                    ctl.fds.iter().for_each(|fd| e.detach(*fd));
                }
            });
            flow.exposed.store(true, Ordering::SeqCst);
            SWAPS.fetch_add(1, Ordering::SeqCst);
            sleep::wake_all();
        }
        Mode::Stashed { then: Then::Open } => {
            flow.stream.bar();
            // The always-ready stand-in is under the numbers; without a descriptor for a placeholder it stays there.
            ctl.suspend();
            veil(flow, ctl);
        }
        _ => return,
    }
    flow.stream.wake();
}

/// Puts a placeholder under the numbers of a suspended flow, unless one is there, or there is no descriptor for it.
pub fn veil(flow: &Flow, ctl: &mut Ctl) {
    let Some(first) = ctl.fds.first().copied() else {
        return;
    };
    if ctl.mode() != Mode::Suspended || ctl.is_veiled() {
        return;
    }
    let Ok([placeholder, far]) = stand_in::placeholder() else {
        return;
    };
    if ctl.transport().is_none() {
        match sys::dup_high(first) {
            Ok(old) => ctl.set_transport(Some(old)),
            Err(_) => return [placeholder, far].into_iter().for_each(sys::close),
        }
    }
    sys::set_status(placeholder, sys::status(ctl.flags_of(first)));
    let registered = epoll::any_unseen();
    ctl.register_veil(registered);
    let _ = swap_in(flow, ctl, placeholder, registered);
    sys::close(placeholder);
    ctl.veil(far);
    flow.exposed.store(false, Ordering::SeqCst);
}

/// The old transport, which is not drained yet, is about to be closed with the last number `fd` of its flow.
pub fn keep(flow: &Flow, ctl: &mut Ctl, fd: c_int) {
    match sys::dup_high(fd) {
        Ok(old) => ctl.set_transport(Some(old)),
        // Nobody is left to read it: what it has brought only counts, and once it is shut it brings no more.
        Err(_) => flow.stream.write_off(&mut ctl.receiving, fd),
    }
}

/// The numbers become plain descriptors, and the table's hold on the flow ends.
pub fn unmanage(flow: &'static Flow, mut ctl: CtlGuard) {
    epoll::drop_closed(flow, &mut ctl);
    if let Some(fd) = ctl.fds.first().filter(|_| ctl.receiving.has_moved()) {
        kept_names::remember(*fd, (ctl.local.take(), ctl.peer.take()));
    }
    // A reader that has met the end of the stream need not wait for an announcement.
    release_numbers(flow, &mut ctl);
    flow.live.store(false, Ordering::Release);
    ctl.set_transport(None);
    ctl.linger();
    drop(ctl);
    flow.stream.wake();
    flow.drop_ref();
}

/// From now on the numbers are plain descriptors. `ctl` is this flow's.
fn release_numbers(flow: &'static Flow, ctl: &mut Ctl) {
    for fd in ctl.fds.drain(..) {
        table::release(fd, flow);
        for e in &ctl.epolls {
            e.leave(fd);
        }
    }
    ctl.epolls.clear();
}

/// Ends the old transport, if it has not ended yet; wakes whoever is blocked in a call on it.
pub fn cut(ctl: &mut Ctl) {
    if let Some(old) = ctl.old() {
        ctl.receiving.cut(old);
    }
}

/// Reads the old transport dry into the stash. Final: the peer has stopped trimming, and nobody is inside. Who is given up may
/// have one inside that does not come out. How many bytes the flow has sent.
pub fn drain(flow: &'static Flow) -> u64 {
    let ctl = flow.own().map(|mut ctl| {
        cut(&mut ctl);
        ctl
    });
    let idle = flow.stream.idle();
    // A call that is inside, of what is plain TCP by now perhaps, may have the sending half for long.
    let sent = match idle {
        true => flow.stream.sent(),
        false => flow.stream.try_sent().unwrap_or(0),
    };
    let Some(mut ctl) = ctl else { return sent };
    let Some(old) = ctl.old().filter(|_| !ctl.receiving.is_drained()) else {
        return sent;
    };
    let drained = flow.stream.drain(&mut ctl.receiving, old, sent);
    if flow.forked.load(Ordering::Relaxed) {
        // Another process that has the transport must not take what is left of it for an orderly end.
        sys::disconnect(old);
    }
    // Not before: while we have it nobody closes an exposed transport.
    drop(ctl);
    match drained {
        // What a call that is inside has moved is not counted yet.
        Err(Unsound::UsedPastUs(_)) if !idle => {}
        Err(why) => give_up(flow, &why),
        Ok(()) => {}
    }
    sent
}

/// An invariant does not hold, because somebody uses the descriptor past us, or what was received cannot be kept: that
/// is said.
pub fn give_up(flow: &'static Flow, why: &Unsound) {
    let token = flow.token();
    runtime::warn(&format!(
        "flow {token:?}: {why}; the connection is given up"
    ));
    out_of_step(flow);
}

/// The flow ends in an error rather than with wrong bytes.
pub fn out_of_step(flow: &'static Flow) {
    let token = flow.token();
    if let Some(ctl) = flow.own() {
        let errno = ctl.taken().unwrap_or(libc::ECONNRESET);
        conclude(flow, ctl, Verdict::Errno(errno));
    }
    runtime::with_agent(|a| a.demote(token));
}

/// A replayed transport becomes the flow's.
pub fn install(flow: &'static Flow, new: c_int) {
    let Some(mut ctl) = flow.own() else {
        return abort(new);
    };
    let ended = flow.stream.ends_at(flow.stream.received());
    if flow.end_shown.load(Ordering::Acquire) && !ended && ctl.mode() == Mode::Suspended {
        // A stranger had ended the stream, and the application was shown that: nothing can follow.
        drop(ctl);
        abort(new);
        return out_of_step(flow);
    }
    match (ctl.mode(), ctl.fds.first().copied()) {
        (Mode::Suspended, Some(fd)) => {
            let flags = sys::status(ctl.flags_of(fd));
            // The agent's connections are like that already.
            if flags != libc::O_RDWR | libc::O_NONBLOCK {
                sys::set_status(new, flags);
            }
            if std::mem::take(&mut ctl.options_set)
                && let Some(old) = ctl.old()
            {
                // What the kernel refuses now, it refused before.
                let _ = options::copy(old, new, &mut ctl.receives);
            }
            if flow.read_shut.load(Ordering::Relaxed) {
                // Who reads meets the end once more, behind what has come.
                sys::shutdown(new, libc::SHUT_RD);
            }
            dismiss(&mut ctl);
            flow.stream.carried_by(&mut ctl.receiving, new);
            ctl.install(new);
            if ctl.receiving.stash.is_empty() {
                open(flow, &mut ctl);
            } else {
                show_stash(flow, &mut ctl);
            }
        }
        (Mode::Lingering, _) if !ctl.is_lost() && flow.stream.local_final().is_some() => {
            dismiss(&mut ctl);
            flow.stream.carried_by(&mut ctl.receiving, new);
            ctl.install(new);
            flow.stream.open();
        }
        _ => {
            dismiss(&mut ctl);
            abort(new);
            // The peer would ask for another transport, again and again.
            runtime::with_agent(|a| a.demote(flow.token()));
        }
    }
    drop(ctl);
    flow.stream.wake();
}

/// The old transport is of no use any more. The kernel is not to go on with it, nor is another process that has it.
fn dismiss(ctl: &mut Ctl) {
    let over = ctl.receiving.dismiss();
    if let Some(exposed) = ctl.exposed() {
        if !over {
            sys::disconnect(exposed);
        }
    } else if over {
        ctl.set_transport(None);
    } else if let Some(old) = ctl.take_transport() {
        abort(old);
    }
}

/// The private transport takes the numbers, or the exposed one keeps them, and data calls go straight to it.
fn open(flow: &Flow, ctl: &mut Ctl) {
    if let Some(new) = ctl.take_transport() {
        let _ = swap_in(flow, ctl, new, true);
        // SAFETY: it is ours alone, and not used again.
        slim_sys::reserve::close_or_keep(unsafe { OwnedFd::from_raw_fd(new) });
    } else if let Some(fd) = ctl.exposed() {
        rings::swapping(|| {
            for e in &ctl.epolls {
                ctl.fds.iter().for_each(|fd| e.attach(*fd));
            }
        });
        options::tell_owner(fd, fd);
        SWAPS.fetch_add(1, Ordering::SeqCst);
        sleep::wake_all();
    } else {
        return;
    }
    ctl.uncover(flow);
    ctl.open();
    flow.stream.open();
}

/// Stashed bytes come first; the transport waits.
fn show_stash(flow: &Flow, ctl: &mut Ctl) {
    if let Ok(file) = stand_in::ready() {
        // Its status flags are not the flow's, see `Ctl::flags_of`.
        let _ = swap_in(flow, ctl, file, true);
    }
    if let (Some(transport), Some(fd)) = (ctl.transport(), ctl.fds.first()) {
        // The stand-in has no owner.
        options::tell_owner(transport, *fd);
    }
    ctl.uncover(flow);
    ctl.show_stash();
}

/// The transport with what has come behind the stash: the one that waits, or has broken since and is not read dry yet.
pub fn behind_stash(ctl: &Ctl) -> Option<c_int> {
    let is_behind = match ctl.mode() {
        Mode::Stashed { then: Then::Open } => true,
        Mode::Suspended => !ctl.receiving.stash.is_empty() && !ctl.receiving.is_drained(),
        _ => false,
    };
    ctl.transport().filter(|_| is_behind)
}

/// Who reads the stash, or only looks at it, is to have what has come behind it, too: that is taken from the waiting transport,
/// up to `want` bytes in all.
pub fn stash_more(flow: &Flow, ctl: &mut Ctl, want: usize) {
    let Some(new) = behind_stash(ctl) else {
        return;
    };
    flow.stream.stash_more(&mut ctl.receiving, new, want);
}

/// Called when the stash may have been read up: what was to follow it happens.
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
            then: Then::Owed(_),
        } => ctl.die(),
        Mode::Stashed { then: Then::Over } => return unmanage(flow, ctl),
        _ => return,
    }
    drop(ctl);
    flow.stream.wake();
}

/// The flow is plain TCP from now on, or as soon as nothing is stashed.
pub fn become_plain(flow: &'static Flow) {
    let mut ctl = flow.ctl();
    match ctl.mode() {
        Mode::Open => unmanage(flow, ctl),
        Mode::Suspended => {
            drop(ctl);
            reinstate(flow, true);
        }
        Mode::Stashed { then: Then::Open } => ctl.become_plain(),
        _ => {}
    }
}

/// The old transport is put back: it was not dead after all, or the error it reports is the true one.
pub fn reinstate(flow: &'static Flow, legacy: bool) {
    let Some(mut ctl) = flow.own() else { return };
    if ctl.mode() == Mode::Suspended
        && let Some(errno) = ctl
            .taken()
            .or(ctl.receiving.is_cut().then_some(libc::ECONNRESET))
    {
        drop(ctl);
        if legacy {
            return escalate(flow, Verdict::Errno(errno));
        }
        // A call has met an error on it since the agent decided that. It stays suspended: what becomes of it is to be decided
        // anew, and the agent may not have been told (`remember`).
        let cause = Cause::Errno(errno);
        if runtime::with_agent(|a| a.fault(flow.token(), cause)) != Some(true) {
            escalate(flow, Verdict::Errno(errno));
        }
        return;
    }
    if ctl.mode() == Mode::Suspended {
        if let (Some(old), Some(fd)) = (ctl.transport(), ctl.fds.first()) {
            sys::set_status(old, sys::status(ctl.flags_of(*fd)));
        }
        // What was never drained has a stash only if it was suspended with one, and is not exposed then.
        if ctl.receiving.stash.is_empty() || ctl.exposed().is_some() {
            open(flow, &mut ctl);
        } else {
            show_stash(flow, &mut ctl);
        }
    }
    if ctl.mode() == Mode::Lingering && flow.stream.local_final().is_some() {
        // The application has closed it meanwhile. The kernel goes on with it, and if it breaks now, that is noticed.
        if let Some(old) = ctl.transport() {
            sys::shutdown(old, libc::SHUT_WR);
        }
        ctl.receiving.put_back();
        flow.stream.open();
    }
    if legacy && ctl.mode() == Mode::Open {
        unmanage(flow, ctl);
    } else {
        if legacy {
            ctl.become_plain();
        }
        drop(ctl);
        flow.stream.wake();
    }
}

/// Closes a transport without letting the kernel go on with it, also where another process has it.
pub fn abort(fd: c_int) {
    sys::disconnect(fd);
    sys::close(fd);
}
