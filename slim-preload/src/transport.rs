//! Swapping what is under a flow's numbers: suspend, install, reinstate, escalate.
//!
//! Invariants, all under the flow's control lock:
//! * the gate is barred before anything is swapped, and opened only when the transport is back, so a data
//!   call never accounts bytes of one transport to another;
//! * epoll registrations are taken out before each swap and put back after it, and are out while a flow is suspended;
//! * `received` is final only after [`drain`], which waits until no call is inside the gate.
//!
//! A flow that is suspended needs no descriptor: the old transport stays under its numbers, *exposed*, until another one
//! takes them. Nobody of the application sees it: data calls meet the barred gate, epoll does not have it, poll and
//! select leave it out ([`crate::ops::poll`]). Only before others get the numbers, who know nothing of all that, they
//! are [veiled](veil): a placeholder that is never ready takes them.

use crate::flow::{Ctl, Flow, Mode, Start, Then, UNKNOWN};
use crate::lock::Guard;
use crate::stand_in::{self, Left};
use crate::sys::{self, Errno};
use crate::{epoll, options, rings, runtime};
use libc::c_int;
use slim_agent::turn;
use slim_core::stash::Stash;
use slim_core::{Cause, Verdict, memory};
use std::num::NonZeroI32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Grows with every swap, so that a call that slept in poll or select knows to look again.
pub static SWAPS: AtomicU64 = AtomicU64::new(0);

/// Longest wait for calls inside the gate once their transport is shut. What is still counted then is a
/// thread that was cancelled inside its call; the kernel's own byte count guards against anything else.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// Stands for the error that the kernel still has to report.
pub const TO_BE_ASKED: c_int = 0;

/// How long an end of stream waits for its announcement before it is looked into.
const ANNOUNCEMENT: Duration = Duration::from_millis(3);

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
    let swapped = ctl.fds.iter().try_for_each(|fd| sys::replace(file, *fd));
    flow.set_under(file);
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
    crate::ops::sleep::wake_all();
    swapped
}

/// Bars the flow; the transport is kept. Does nothing when that is so already.
pub fn suspend(flow: &Flow, ctl: &mut Ctl) {
    if ctl.fds.is_empty() {
        return;
    }
    match ctl.mode {
        Mode::Open => {
            flow.bar();
            epoll::read_back(flow, ctl);
            ctl.mode = Mode::Suspended;
            if epoll::any_unseen() {
                veil(flow, ctl);
            }
            if ctl.veil.is_some() {
                return flow.wake();
            }
            rings::swapping(|| {
                for e in &ctl.epolls {
                    ctl.fds.iter().for_each(|fd| e.detach(*fd));
                }
            });
            flow.exposed.store(true, Ordering::SeqCst);
            SWAPS.fetch_add(1, Ordering::SeqCst);
            crate::ops::sleep::wake_all();
        }
        Mode::Stashed { then: Then::Open } => {
            flow.bar();
            // The always-ready stand-in is under the numbers; without a descriptor for a placeholder it stays there.
            ctl.mode = Mode::Suspended;
            veil(flow, ctl);
        }
        _ => return,
    }
    flow.wake();
}

/// Puts a placeholder under the numbers of a suspended flow, unless one is there, or there is no descriptor for it.
pub fn veil(flow: &Flow, ctl: &mut Ctl) {
    let Some(first) = ctl.fds.first().copied() else {
        return;
    };
    if ctl.mode != Mode::Suspended || ctl.veil.is_some() {
        return;
    }
    let Ok([placeholder, far]) = stand_in::placeholder() else {
        return;
    };
    if ctl.transport.is_none() {
        match sys::dup_high(first) {
            Ok(old) => ctl.transport = Some(old),
            Err(_) => return [placeholder, far].into_iter().for_each(sys::close),
        }
    }
    sys::set_status(placeholder, sys::status(ctl.flags_of(first)));
    ctl.registered = epoll::any_unseen();
    let _ = swap_in(flow, ctl, placeholder, ctl.registered);
    sys::close(placeholder);
    // A number of ours is never 0.
    ctl.veil = NonZeroI32::new(far);
    flow.exposed.store(false, Ordering::SeqCst);
}

/// The old transport, which is not drained yet, is about to be closed with the last number `fd` of its flow.
pub fn keep(flow: &Flow, ctl: &mut Ctl, fd: c_int) {
    match sys::dup_high(fd) {
        Ok(old) => ctl.set_transport(Some(old)),
        // Nobody is left to read it: what it has brought only counts, and once it is shut it brings no more.
        Err(_) => {
            sys::shutdown(fd, libc::SHUT_RDWR);
            flow.add_received(sys::readable(fd));
            ctl.drained = true;
        }
    }
}

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
    if flow.own_at(fd).is_none() {
        return Fault::Plain;
    }
    if let Cause::Eof { received } = cause
        && announced(flow, received)
    {
        return Fault::Plain;
    }
    // Plain TCP meanwhile: what the kernel said to this call, it says to nobody else.
    let Some(ctl) = flow.own_at(fd) else {
        return Fault::Plain;
    };
    if ctl.mode != Mode::Open {
        return Fault::Suspended;
    }
    // Another thread may have had the transport replaced since the caller's system call failed.
    let still = sys::tcp_state(fd).is_some_and(|s| match cause {
        Cause::Eof { .. } => {
            sys::recv(fd, &mut [0], libc::MSG_PEEK | libc::MSG_DONTWAIT) == Ok(0)
                || s == sys::TCP_CLOSE
        }
        _ => s == sys::TCP_CLOSE,
    });
    if !still {
        return Fault::Suspended;
    }
    found_dead(flow, ctl, fd, cause)
}

/// Suspends a live flow whose transport died when nobody was looking.
pub fn notice(flow: &'static Flow, fd: c_int) {
    if flow.live.load(Ordering::Acquire) && sys::has_error(fd) {
        fault(flow, fd, Cause::Errno(TO_BE_ASKED));
    }
}

/// The transport that is under `fd`, and in use, is dead, or has ended unannounced.
pub fn found_dead(flow: &'static Flow, mut ctl: CtlGuard, fd: c_int, cause: Cause) -> Fault {
    // An end that nobody could be asked about is passed on, and one that was shown to the application is not taken back.
    let believed = || !flow.live.load(Ordering::Acquire) || flow.end_shown.load(Ordering::Acquire);
    let given_up = flow.used_by_child()
        || !flow.was_established(fd)
        || (matches!(cause, Cause::Eof { .. }) && believed());
    if given_up {
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.demote(token));
        return Fault::Plain;
    }
    suspend(flow, &mut ctl);
    ctl.ended = matches!(cause, Cause::Eof { .. });
    match cause {
        // It looks as if there were something to read, and nothing is wrong with it.
        Cause::Eof { .. } => veil(flow, &mut ctl),
        _ => ctl.over = true,
    }
    let cause = match (cause, ctl.old()) {
        (Cause::Errno(TO_BE_ASKED), Some(old)) => {
            let errno = sys::option::<c_int>(old, libc::SOL_SOCKET, libc::SO_ERROR);
            Cause::Errno(errno.filter(|e| *e != 0).unwrap_or(libc::ECONNRESET))
        }
        (cause, _) => cause,
    };
    if let Cause::Errno(errno) = cause {
        ctl.taken = NonZeroI32::new(errno);
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
    if ctl.plain {
        return conclude(flow, ctl, Verdict::Errno(errno));
    }
    suspend(flow, &mut ctl);
    ctl.taken = NonZeroI32::new(errno);
    let cause = Cause::Errno(errno);
    if runtime::with_agent(|a| a.fault(flow.token(), cause)) != Some(true) {
        conclude(flow, ctl, verdict(cause));
    }
}

/// A call has taken the error of a connection that is plain TCP, and cannot give it to its caller: the next call
/// is to get it.
pub fn owe(fd: c_int, errno: c_int) {
    let how = match errno {
        libc::EPIPE => Left::Refused,
        _ => Left::Reset,
    };
    if let Ok(dead) = stand_in::over(how, &[]) {
        sys::set_status(dead, sys::status(fd));
        let _ = sys::replace(dead, fd);
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
        && ctl.mode == Mode::Suspended
    {
        ctl.taken = ctl.taken.or(NonZeroI32::new(errno));
    }
}

/// Whether the peer has announced the end that was met, or does so within a moment: the announcement and the end
/// travel at the same time, and to wait for the one costs less than to suspend and to ask.
fn announced(flow: &Flow, received: u64) -> bool {
    let begun = Instant::now();
    while flow.live.load(Ordering::Acquire) && !flow.gate.is_barred() {
        let seen = flow.signal.load(Ordering::SeqCst);
        if flow.peer_final.load(Ordering::Acquire) == received {
            return true;
        }
        let Some(left) = ANNOUNCEMENT.checked_sub(begun.elapsed()) else {
            break;
        };
        let _ = sys::keep_errno(|| flow.wait(seen, Some(left)));
    }
    false
}

/// The numbers become plain descriptors, and the table's hold on the flow ends.
pub fn unmanage(flow: &'static Flow, mut ctl: CtlGuard) {
    // A reader that has met the end of the stream need not wait for an announcement.
    flow.release_numbers(&mut ctl);
    flow.live.store(false, Ordering::Release);
    ctl.set_transport(None);
    ctl.mode = Mode::Lingering;
    drop(ctl);
    flow.wake();
    flow.drop_ref();
}

/// Ends the old transport, if it has not ended yet; wakes whoever is blocked in a call on it.
pub fn cut(ctl: &mut Ctl) {
    if let Some(old) = ctl.old().filter(|_| !ctl.cut) {
        ctl.cut = true;
        ctl.over = ctl.over || sys::try_shutdown(old, libc::SHUT_RDWR) == Err(libc::ENOTCONN);
    }
}

/// Reads the old transport dry into the stash. Final: the peer has stopped trimming. How many bytes the flow has sent.
pub fn drain(flow: &'static Flow) -> u64 {
    if let Some(mut ctl) = flow.own() {
        cut(&mut ctl);
    }
    let begun = Instant::now();
    while !flow.idle() {
        if begun.elapsed() > LEAVE_LIMIT {
            runtime::say(&format!(
                "a thread never left its call on flow {:?}",
                flow.token()
            ));
            break;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    let sent = flow.sent();
    let Some(mut ctl) = flow.own() else {
        return sent;
    };
    let Some(old) = ctl.old().filter(|_| !ctl.drained) else {
        return sent;
    };
    ctl.drained = true;
    // Mostly there is nothing, and thousands of flows may be drained at once.
    let (mut small, mut large) = ([0; 512], Vec::new());
    // Errors come once each and before the queue is known to be dry: only "no more" and EOF end the reading.
    let mut errors = 0;
    let mut no_memory = false;
    loop {
        let buf = match large.is_empty() {
            true => &mut small[..],
            false => &mut large[..],
        };
        match sys::recv(old, buf, libc::MSG_DONTWAIT) {
            Ok(0) | Err(libc::EAGAIN) => break,
            Ok(n) => {
                flow.add_received(n as u64);
                if ctl.stash.push(&buf[..n]).is_err() {
                    no_memory = true;
                    break;
                }
                let full = n == buf.len() && large.is_empty();
                if full && memory::reserve(&mut large, 64 << 10).is_ok() {
                    large.resize(64 << 10, 0);
                }
            }
            Err(libc::EINTR) => {}
            Err(_) if errors < 2 => errors += 1,
            Err(_) => break,
        }
    }
    let start = ctl.start();
    let dry = Start::of_dry(flow, sent, old);
    ctl.over |= dry.is_some();
    let now = dry.or_else(|| Start::of(flow, sent, old));
    let why = now.and_then(|now| start.contradiction(now, || sys::has_come_to_an_end(old)));
    if flow.forked.load(Ordering::Relaxed) {
        // Another process that has the transport must not take what is left of it for an orderly end.
        sys::disconnect(old);
    }
    // Not before: while we have it nobody closes an exposed transport.
    drop(ctl);
    if no_memory {
        give_up(flow, NO_MEMORY);
    } else if let Some(why) = why {
        give_up(flow, &why);
    }
    sent
}

/// Why a flow is given up whose bytes cannot be kept.
pub const NO_MEMORY: &str = "no memory for what has been received";

/// An invariant does not hold, because somebody uses the descriptor past us, or what was received cannot be kept: that
/// is said.
pub fn give_up(flow: &'static Flow, why: &str) {
    let token = flow.token();
    runtime::say(&format!(
        "flow {token:?}: {why}; the connection is given up"
    ));
    out_of_step(flow);
}

/// The flow ends in an error rather than with wrong bytes.
pub fn out_of_step(flow: &'static Flow) {
    let token = flow.token();
    if let Some(ctl) = flow.own() {
        let errno = ctl.taken.map_or(libc::ECONNRESET, NonZeroI32::get);
        conclude(flow, ctl, Verdict::Errno(errno));
    }
    runtime::with_agent(|a| a.demote(token));
}

/// A replayed transport becomes the flow's.
pub fn install(flow: &'static Flow, new: c_int) {
    let Some(mut ctl) = flow.own() else {
        return abort(new);
    };
    match (ctl.mode, ctl.fds.first().copied()) {
        (Mode::Suspended, Some(fd)) => {
            let flags = sys::status(ctl.flags_of(fd));
            // The agent's connections are like that already.
            if flags != libc::O_RDWR | libc::O_NONBLOCK {
                sys::set_status(new, flags);
            }
            dismiss(&mut ctl);
            ctl.moved = true;
            ctl.drained = false;
            ctl.is_new();
            ctl.start = Start::of(flow, flow.sent(), new).map(Box::new);
            ctl.transport = Some(new);
            if ctl.stash.is_empty() {
                open(flow, &mut ctl);
            } else {
                show_stash(flow, &mut ctl);
            }
        }
        (Mode::Lingering, _)
            if !ctl.lost && flow.local_final.load(Ordering::Acquire) != UNKNOWN =>
        {
            dismiss(&mut ctl);
            ctl.drained = false;
            ctl.start = Start::of(flow, flow.sent(), new).map(Box::new);
            ctl.transport = Some(new);
            flow.gate.open();
        }
        _ => {
            dismiss(&mut ctl);
            abort(new);
        }
    }
    drop(ctl);
    flow.wake();
}

/// The old transport is of no use any more. The kernel is not to go on with it, nor is another process that has it.
fn dismiss(ctl: &mut Ctl) {
    let over = std::mem::take(&mut ctl.over);
    ctl.ended = false;
    if let Some(exposed) = ctl.exposed() {
        if !over {
            sys::disconnect(exposed);
        }
    } else if over {
        ctl.set_transport(None);
    } else if let Some(old) = ctl.transport.take() {
        abort(old);
    }
}

/// The private transport takes the numbers, or the exposed one keeps them, and data calls go straight to it.
fn open(flow: &Flow, ctl: &mut Ctl) {
    if let Some(new) = ctl.transport.take() {
        let _ = swap_in(flow, ctl, new, true);
        sys::close(new);
    } else if let Some(fd) = ctl.exposed() {
        rings::swapping(|| {
            for e in &ctl.epolls {
                ctl.fds.iter().for_each(|fd| e.attach(*fd));
            }
        });
        options::tell_owner(fd, fd);
        SWAPS.fetch_add(1, Ordering::SeqCst);
        crate::ops::sleep::wake_all();
    } else {
        return;
    }
    ctl.mode = Mode::Open;
    ctl.ended = false;
    ctl.uncover(flow);
    ctl.is_new();
    flow.gate.open();
}

/// Stashed bytes come first; the transport waits.
fn show_stash(flow: &Flow, ctl: &mut Ctl) {
    if let Ok(file) = stand_in::ready() {
        // Its status flags are not the flow's, see `Ctl::flags_of`.
        let _ = swap_in(flow, ctl, file, true);
    }
    if let (Some(transport), Some(fd)) = (ctl.transport, ctl.fds.first()) {
        // The stand-in has no owner.
        options::tell_owner(transport, *fd);
    }
    ctl.mode = Mode::Stashed { then: Then::Open };
    ctl.uncover(flow);
}

/// Whether calls on the flow must not wait.
pub fn nonblocking(ctl: &Ctl, fd: c_int) -> bool {
    sys::is_nonblocking(ctl.flags_of(fd))
}

/// Called when the stash may have been read up: what was to follow it happens.
pub fn after_stash(flow: &'static Flow, mut ctl: CtlGuard) {
    if !ctl.stash.is_empty() {
        return;
    }
    match ctl.mode {
        Mode::Stashed { then: Then::Open } => {
            open(flow, &mut ctl);
            if ctl.plain {
                return unmanage(flow, ctl);
            }
        }
        Mode::Stashed {
            then: Then::Owed(errno),
        } => ctl.mode = Mode::Dead(errno),
        Mode::Stashed { then: Then::Over } => return unmanage(flow, ctl),
        _ => return,
    }
    drop(ctl);
    flow.wake();
}

/// The flow is plain TCP from now on, or as soon as nothing is stashed.
pub fn become_plain(flow: &'static Flow) {
    let mut ctl = flow.ctl();
    match ctl.mode {
        Mode::Open => unmanage(flow, ctl),
        Mode::Suspended => {
            drop(ctl);
            reinstate(flow, true);
        }
        Mode::Stashed { then: Then::Open } => ctl.plain = true,
        _ => {}
    }
}

/// The old transport is put back: it was not dead after all, or the error it reports is the true one.
pub fn reinstate(flow: &'static Flow, legacy: bool) {
    let Some(mut ctl) = flow.own() else { return };
    if ctl.mode == Mode::Suspended
        && let Some(errno) = ctl
            .taken
            .map(NonZeroI32::get)
            .or(ctl.cut.then_some(libc::ECONNRESET))
    {
        drop(ctl);
        return escalate(flow, Verdict::Errno(errno));
    }
    if ctl.mode == Mode::Suspended {
        if let (Some(old), Some(fd)) = (ctl.transport, ctl.fds.first()) {
            sys::set_status(old, sys::status(ctl.flags_of(*fd)));
        }
        // What was never drained has a stash only if it was suspended with one, and is not exposed then.
        if ctl.stash.is_empty() || ctl.exposed().is_some() {
            open(flow, &mut ctl);
        } else {
            show_stash(flow, &mut ctl);
        }
    }
    if ctl.mode == Mode::Lingering && flow.local_final.load(Ordering::Acquire) != UNKNOWN {
        // The application has closed it meanwhile. The kernel goes on with it, and if it breaks now, that is noticed.
        if let Some(old) = ctl.transport {
            sys::shutdown(old, libc::SHUT_WR);
        }
        ctl.cut = false;
        flow.gate.open();
    }
    if legacy && ctl.mode == Mode::Open {
        unmanage(flow, ctl);
    } else {
        ctl.plain |= legacy;
        drop(ctl);
        flow.wake();
    }
}

/// Gives the flow up with an errno, or with an orderly end; what has come before that is still to be read.
pub fn escalate(flow: &'static Flow, verdict: Verdict) {
    // What the kernel has received is the application's, whatever becomes of the connection.
    drain_if_suspended(flow);
    let Some(mut ctl) = flow.own() else { return };
    if ctl.mode == Mode::Lingering {
        ctl.set_transport(None);
    }
    let verdict = match (verdict, ctl.taken.map(NonZeroI32::get)) {
        // The end had come before the transport failed: it is what we sent that was refused.
        (Verdict::Eof, Some(libc::EPIPE)) => Verdict::Errno(libc::EPIPE),
        (verdict, _) => verdict,
    };
    conclude(flow, ctl, verdict);
}

fn drain_if_suspended(flow: &'static Flow) {
    let undrained = {
        let ctl = flow.ctl();
        ctl.mode == Mode::Suspended && !ctl.drained
    };
    if undrained {
        drain(flow);
    }
}

/// A connection that is over takes the numbers, with the stash in it. The kernel reports the end by itself, but for
/// an errno that only a true network can bring about: that one is owed once by us. A stash that is too large for
/// it stays here.
fn conclude(flow: &'static Flow, mut ctl: CtlGuard, verdict: Verdict) {
    let (how, owed) = match verdict {
        Verdict::Errno(libc::ECONNRESET) => (Left::Reset, None),
        Verdict::Errno(libc::EPIPE) => (Left::Refused, None),
        Verdict::Errno(errno) => (Left::Reset, Some(errno)),
        Verdict::Eof => (Left::Closed, None),
    };
    if !matches!(
        ctl.mode,
        Mode::Open | Mode::Suspended | Mode::Stashed { then: Then::Open }
    ) {
        return;
    }
    flow.bar();
    let mut unread = Vec::new();
    let copied = owed.is_none()
        && ctl.stash.len() <= stand_in::MOST
        && memory::reserve(&mut unread, ctl.stash.len()).is_ok();
    let whole = match copied {
        true => {
            unread.resize(ctl.stash.len(), 0);
            ctl.stash.peek(0, &mut unread);
            stand_in::over(how, &unread).ok()
        }
        false => None,
    };
    if whole.is_some() {
        ctl.stash = Stash::new();
    }
    let file = whole.or_else(|| stand_in::over(how, &[]).ok());
    if let Some(fd) = file.filter(|_| flow.local_final.load(Ordering::Acquire) != UNKNOWN) {
        sys::shutdown(fd, libc::SHUT_WR);
    }
    bury(flow, &mut ctl, file);
    ctl.uncover(flow);
    ctl.mode = match owed {
        None if ctl.stash.is_empty() => return unmanage(flow, ctl),
        None => Mode::Stashed { then: Then::Over },
        Some(errno) if ctl.stash.is_empty() => Mode::Dead(errno),
        Some(errno) => Mode::Stashed {
            then: Then::Owed(errno),
        },
    };
    drop(ctl);
    flow.wake();
}

/// Puts `file`, or for want of one the old transport, under the numbers, with the flags and options they had.
fn bury(flow: &Flow, ctl: &mut Ctl, file: Option<c_int>) {
    let Some(fd) = ctl.fds.first().copied() else {
        file.into_iter().for_each(sys::close);
        return ctl.set_transport(None);
    };
    let exposed = ctl.exposed();
    let flags = sys::status(ctl.flags_of(fd));
    let old = ctl.transport.take();
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
    }) = ctl.mode
    else {
        return None;
    };
    if let Some(fd) = ctl.fds.first() {
        let _ = sys::option::<c_int>(*fd, libc::SOL_SOCKET, libc::SO_ERROR);
    }
    if ctl.stash.is_empty() {
        unmanage(flow, ctl);
    } else {
        ctl.mode = Mode::Stashed { then: Then::Over };
    }
    Some(errno)
}

/// Closes a transport without letting the kernel go on with it, also where another process has it.
pub fn abort(fd: c_int) {
    sys::disconnect(fd);
    sys::close(fd);
}
