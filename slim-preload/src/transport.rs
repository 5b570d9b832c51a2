//! Swapping the file under a flow's descriptor numbers: suspend, install, reinstate, escalate.
//!
//! Invariants, all under the flow's control lock:
//! * the gate is barred before anything is swapped, and opened only when the transport is back, so a data
//!   call never accounts bytes of one transport to another;
//! * epoll registrations are removed before each swap and added again after it; they stay removed while a flow is suspended;
//! * `received` is final only after [`drain`], which runs when no call is inside the gate.
//!
//! A suspended flow needs no further descriptor: the old transport stays under its numbers, *exposed*, until a new one takes
//! them. The application does not see it: data calls meet the barred gate, epoll does not have it, poll and select leave it out
//! ([`crate::ops::poll`]). Other processes and unseen epoll registrations would see it: for them a
//! [placeholder](install_placeholder), which is never ready, takes the numbers first.

mod fault;
mod flags;
mod held;
mod over;
mod stashed;

use crate::flow::{Ctl, Flow, Mode, Then};
use crate::stand_in;
use crate::sys::{self, Errno};
use crate::{epoll, kept_names, options, rings, runtime, sleep, table};
use libc::c_int;
use slim_core::{Cause, Verdict};
use slim_stream::DrainError;
use slim_sys::lock::Guard;
use slim_sys::numbers;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

pub use fault::{
    Fault, TO_BE_ASKED, fault, found_dead, has_failed, lost_while_barred, notice, read_mailbox,
    remember, set_pending_error,
};
use flags::copy_flags;
pub use held::OTHER_EXEC;
use over::conclude;
pub use over::{escalate, take_pending_error};
use stashed::show_stash;
pub use stashed::{after_stash, behind_stash, show_end, show_handed, stash_more};

/// Changes with every swap, so that a call that slept in poll or select knows that it must look again. Also changes when a private file gets a number
/// [for a moment](flags::with_file), and when it has it no more.
pub static SWAPS: AtomicU64 = AtomicU64::new(0);
/// What a swap adds to [`SWAPS`].
const SWAP: u64 = 1 << 32;
/// What a file that has a number for a moment adds meanwhile. There are never 256 at a time.
const SHOWN: u64 = 1;
/// What is added when it has the number no more.
const WAS_SHOWN: u64 = 1 << 8;

/// Whether there was a swap since [`SWAPS`] was `swaps`.
#[inline(always)]
pub fn swapped(swaps: u64) -> bool {
    SWAPS.load(Ordering::Acquire) / SWAP != swaps / SWAP
}

/// Whether the files under all numbers are those that were there when [`SWAPS`] was `swaps`, and none has a number for a moment only.
#[inline(always)]
pub fn unswapped(swaps: u64) -> bool {
    swaps.is_multiple_of(WAS_SHOWN) && SWAPS.load(Ordering::Acquire) == swaps
}

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
    // In one piece, so that a forked child finds under each number the file that `set_under` has noted.
    let swapped = numbers::whole(|| {
        let swapped = ctl.fds.iter().try_for_each(|fd| sys::replace(file, *fd));
        flow.set_under(file);
        swapped
    });
    SWAPS.fetch_add(SWAP, Ordering::SeqCst);
    // After the swap: a thread that this wakes looks the number up again, and must find the new file.
    ctl.end_placeholder();
    if registered {
        for e in &ctl.epolls {
            ctl.fds.iter().for_each(|fd| e.attach(*fd));
        }
    }
    if let Some(fd) = ctl.fds.first().copied().filter(|_| registered) {
        if std::mem::take(&mut ctl.asynchronous) {
            sys::set_asynchronous(fd);
        }
        options::tell_owner(fd, fd);
    }
    sleep::wake_all();
    swapped
}

/// Bars the flow, and keeps the transport. Does nothing when the flow is barred already.
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
                install_placeholder(flow, ctl);
            }
            if ctl.has_placeholder() {
                return flow.stream.wake();
            }
            rings::swapping(|| {
                for e in &ctl.epolls {
                    ctl.fds.iter().for_each(|fd| e.detach(*fd));
                }
            });
            flow.exposed.store(true, Ordering::SeqCst);
            SWAPS.fetch_add(SWAP, Ordering::SeqCst);
            sleep::wake_all();
        }
        Mode::Stashed { then: Then::Open } => {
            flow.stream.bar();
            // The always-ready stand-in is under the numbers. It stays there if there is no descriptor for a placeholder.
            ctl.suspend();
            install_placeholder(flow, ctl);
        }
        _ => return,
    }
    flow.stream.wake();
}

/// Puts a placeholder under the numbers of a suspended flow, unless one is there already, or there is no descriptor for it.
pub fn install_placeholder(flow: &Flow, ctl: &mut Ctl) {
    let Some(first) = ctl.fds.first().copied() else {
        return;
    };
    if ctl.mode() != Mode::Suspended || ctl.has_placeholder() {
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
    ctl.register_placeholder(registered);
    let _ = swap_in(flow, ctl, placeholder, registered);
    sys::close(placeholder);
    ctl.set_placeholder(far);
    flow.exposed.store(false, Ordering::SeqCst);
}

/// Keeps the old transport, which is not drained yet: the last number `fd` of its flow is about to be closed.
pub fn keep_transport(flow: &Flow, ctl: &mut Ctl, fd: c_int) {
    match sys::dup_high(fd) {
        Ok(old) => ctl.set_transport(Some(old)),
        // No call will read it. The received bytes are only counted; after the shutdown no more arrive.
        Err(_) => flow.stream.discard_unread(&mut ctl.receiving, fd),
    }
}

/// The numbers become plain descriptors, and the table's hold on the flow ends.
pub fn unmanage(flow: &'static Flow, mut ctl: CtlGuard) {
    epoll::drop_closed(flow, &mut ctl);
    if let Some(fd) = ctl.fds.first().filter(|_| ctl.receiving.has_moved()) {
        kept_names::remember(*fd, (ctl.local.take(), ctl.peer.take()));
    }
    // A reader that has met the end of the stream need not wait for the peer's announcement.
    release_numbers(flow, &mut ctl);
    flow.live.store(false, Ordering::Release);
    ctl.set_transport(None);
    ctl.linger();
    drop(ctl);
    flow.stream.wake();
    flow.drop_ref();
}

/// Makes the numbers plain descriptors. `ctl` is this flow's.
fn release_numbers(flow: &'static Flow, ctl: &mut Ctl) {
    for fd in ctl.fds.drain(..) {
        table::release(fd, flow);
        for e in &ctl.epolls {
            e.leave(fd);
        }
    }
    ctl.epolls.clear();
}

/// Shuts the old transport down, if that has not been done yet. This wakes threads that are blocked in a call on it.
pub fn shut_down(ctl: &mut Ctl) {
    if let Some(old) = ctl.old() {
        ctl.receiving.shut_down(old);
    }
}

/// Drains the old transport into the stash, and gives the number of bytes that the flow has sent. This is final: the peer has stopped
/// trimming, and no call is inside the gate. Exception: a flow that is given up may have a call inside that does not leave.
pub fn drain(flow: &'static Flow) -> u64 {
    let ctl = flow.own().map(|mut ctl| {
        shut_down(&mut ctl);
        ctl
    });
    let idle = flow.stream.idle();
    // A call that is still inside (the flow may be plain TCP by now) may hold the sending half for long.
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
        // Another process that has the transport must not see an orderly end.
        sys::disconnect(old);
    }
    // Only now: while the lock is held an exposed transport is not closed.
    drop(ctl);
    match drained {
        // The bytes that a call inside the gate has moved are not counted yet.
        Err(DrainError::CountMismatch(_)) if !idle => {}
        Err(why) => give_up(flow, &why),
        Ok(()) => {}
    }
    sent
}

/// Warns, and ends the flow in an error: the descriptor was used past SLIM, or there is no memory for received bytes.
pub fn give_up(flow: &'static Flow, why: &DrainError) {
    let token = flow.token();
    runtime::warn(&format!(
        "flow {token:?}: {why}; the connection is given up"
    ));
    out_of_step(flow);
}

/// Ends the flow in an error at both ends, rather than with wrong or missing bytes.
pub fn out_of_step(flow: &'static Flow) {
    let token = flow.token();
    if let Some(ctl) = flow.own() {
        let errno = ctl.taken().unwrap_or(libc::ECONNRESET);
        conclude(flow, ctl, Verdict::Errno(errno));
    }
    runtime::with_agent(|a| a.out_of_step(token));
}

/// Installs a new transport on which the replay is done. `relayed`: it goes through the witness.
pub fn install(flow: &'static Flow, new: c_int, relayed: bool) {
    let Some(mut ctl) = flow.own() else {
        return abort(new);
    };
    let ended = flow.stream.ends_at(flow.stream.received());
    if flow.end_shown.load(Ordering::Acquire) && !ended && ctl.mode() == Mode::Suspended {
        // A stranger had ended the stream, and the application has seen that end: no bytes can follow it.
        drop(ctl);
        abort(new);
        return out_of_step(flow);
    }
    match (ctl.mode(), ctl.fds.first().copied()) {
        (Mode::Suspended, Some(fd)) => {
            // The agent's connections have these flags already.
            copy_flags(&mut ctl, fd, new, libc::O_RDWR | libc::O_NONBLOCK);
            if std::mem::take(&mut ctl.options_set)
                && let Some(old) = ctl.old()
            {
                // Errors are ignored: an option that the kernel refuses now, it has refused before, too.
                let _ = options::copy(old, new, &mut ctl.receives);
            }
            if flow.read_shut.load(Ordering::Relaxed) {
                // Reads meet the end again, behind the bytes that have arrived.
                sys::shutdown(new, libc::SHUT_RD);
            }
            retire(&mut ctl);
            flow.stream.install(&mut ctl.receiving, new, relayed);
            ctl.install(new);
            if ctl.receiving.stash.is_empty() {
                open(flow, &mut ctl);
            } else {
                show_stash(flow, &mut ctl);
            }
        }
        (Mode::Lingering, _) if !ctl.is_lost() && flow.stream.local_final().is_some() => {
            retire(&mut ctl);
            flow.stream.install(&mut ctl.receiving, new, relayed);
            ctl.install(new);
            flow.stream.open();
        }
        _ => {
            retire(&mut ctl);
            abort(new);
            // Otherwise the peer would ask for another transport, again and again.
            runtime::with_agent(|a| a.out_of_step(flow.token()));
        }
    }
    drop(ctl);
    flow.stream.wake();
}

/// Ends the old transport for good: neither the kernel nor another process that has it may go on with it.
fn retire(ctl: &mut Ctl) {
    let over = ctl.receiving.retire();
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

/// Puts the private transport under the numbers, or leaves the exposed one there, and opens the gate: data calls go straight to it.
fn open(flow: &Flow, ctl: &mut Ctl) {
    if let Some(new) = ctl.take_transport() {
        let _ = swap_in(flow, ctl, new, true);
        // SAFETY: nothing else owns `new`, and it is not used again.
        slim_sys::reserve::close_or_keep(unsafe { OwnedFd::from_raw_fd(new) });
    } else if let Some(fd) = ctl.exposed() {
        rings::swapping(|| {
            for e in &ctl.epolls {
                ctl.fds.iter().for_each(|fd| e.attach(*fd));
            }
        });
        options::tell_owner(fd, fd);
        SWAPS.fetch_add(SWAP, Ordering::SeqCst);
        sleep::wake_all();
    } else {
        return;
    }
    ctl.clear_suspension(flow);
    ctl.open();
    flow.stream.open();
}

/// Makes the flow plain TCP, now or as soon as nothing is stashed.
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

/// Whether the transport has ended first, and then refused bytes that were sent while the end was inquired into.
fn refused_after_its_end(ctl: &Ctl) -> bool {
    let half_open = ctl.receiving.is_half_open();
    half_open && ctl.transport().is_some_and(sys::is_over)
}

/// Puts the old transport back: it was not dead after all, or the application is to see the error that it reports.
pub fn reinstate(flow: &'static Flow, legacy: bool) {
    let Some(mut ctl) = flow.own() else { return };
    if ctl.mode() == Mode::Suspended
        && let Some(errno) = ctl
            .taken()
            .or(ctl.receiving.is_cut().then_some(libc::ECONNRESET))
            .or_else(|| refused_after_its_end(&ctl).then_some(libc::EPIPE))
    {
        drop(ctl);
        if legacy {
            return escalate(flow, Verdict::Errno(errno));
        }
        // A call has met an error on the transport since the agent decided to put it back. The flow stays suspended, and the
        // agent decides again. It may not have been told of the error (`remember`).
        let cause = Cause::Errno(errno);
        if runtime::with_agent(|a| a.fault(flow.token(), cause)) != Some(true) {
            escalate(flow, Verdict::Errno(errno));
        }
        return;
    }
    if ctl.mode() == Mode::Suspended {
        if let (Some(old), Some(fd)) = (ctl.transport(), ctl.fds.first().copied()) {
            copy_flags(&mut ctl, fd, old, sys::status(old));
        }
        // A transport that was never drained has a stash only if the flow was suspended with one. It is not exposed then.
        if ctl.receiving.stash.is_empty() || ctl.exposed().is_some() {
            open(flow, &mut ctl);
        } else {
            show_stash(flow, &mut ctl);
        }
    }
    if ctl.mode() == Mode::Lingering && flow.stream.local_final().is_some() {
        // The application has closed the flow meanwhile. The kernel goes on with the transport; if it breaks, `FlowIo::undelivered`
        // reports that.
        if let Some(old) = ctl.transport() {
            sys::shutdown(old, libc::SHUT_WR);
        }
        ctl.receiving.reinstate();
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

/// Closes a transport and ends its connection at once, even if another process has it.
pub fn abort(fd: c_int) {
    sys::disconnect(fd);
    sys::close(fd);
}
