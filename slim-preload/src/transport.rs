//! Swapping what is under a flow's numbers: suspend, install, reinstate, escalate.
//!
//! Invariants, all under the flow's control lock:
//! * the gate is barred before anything is swapped, and opened only when the transport is back, so a data
//!   call never accounts bytes of one transport to another;
//! * epoll registrations are taken out before each swap and put back after it;
//! * `received` is final only after [`drain`], which waits until no call is inside the gate.

use crate::flow::{Ctl, Flow, Mode, Start, Then, UNKNOWN};
use crate::sys::{self, Errno};
use crate::{runtime, stand_in};
use libc::c_int;
use slim_core::Cause;
use std::sync::MutexGuard;
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

type CtlGuard = MutexGuard<'static, Ctl>;

/// Puts `file` under all numbers of the flow.
fn swap_in(ctl: &Ctl, file: c_int, registered: bool) -> Result<(), Errno> {
    for e in &ctl.epolls {
        ctl.fds.iter().for_each(|fd| e.detach(*fd));
    }
    let swapped = ctl.fds.iter().try_for_each(|fd| sys::replace(file, *fd));
    SWAPS.fetch_add(1, Ordering::SeqCst);
    if registered {
        for e in &ctl.epolls {
            ctl.fds.iter().for_each(|fd| e.attach(*fd));
        }
    }
    crate::ops::sleep::wake_all();
    swapped
}

/// Bars the flow and puts a placeholder under its numbers; the transport is kept. Does nothing when that is
/// so already. An error leaves everything as it was.
pub fn suspend(flow: &Flow, ctl: &mut Ctl) -> Result<(), Errno> {
    let first = match (ctl.mode, ctl.fds.first()) {
        (Mode::Open | Mode::Stashed { then: Then::Open }, Some(fd)) => *fd,
        _ => return Ok(()),
    };
    let placeholder = stand_in::placeholder()?;
    if ctl.mode == Mode::Open {
        let old = sys::dup_high(first).inspect_err(|_| sys::close(placeholder))?;
        ctl.set_transport(Some(old));
    }
    flow.gate.bar();
    // While the stash is shown, the flags are the waiting transport's.
    let flags = sys::status(ctl.transport.unwrap_or(first));
    sys::set_status(placeholder, flags);
    let swapped = swap_in(ctl, placeholder, false);
    sys::close(placeholder);
    ctl.mode = Mode::Suspended;
    flow.wake();
    swapped
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
    if let Cause::Eof { received } = cause
        && announced(flow, received)
    {
        return Fault::Plain;
    }
    // Plain TCP meanwhile: what the kernel said to this call, it says to nobody else.
    let Some(mut ctl) = flow.ctl_of(fd) else {
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
    let live = flow.live.load(Ordering::Acquire);
    let given_up = flow.used_by_child()
        || !flow.was_established(fd)
        || (matches!(cause, Cause::Eof { .. }) && !live);
    if given_up || suspend(flow, &mut ctl).is_err() {
        let token = flow.token();
        unmanage(flow, ctl);
        runtime::with_agent(|a| a.demote(token));
        return Fault::Plain;
    }
    let cause = match (cause, ctl.transport) {
        (Cause::Errno(TO_BE_ASKED), Some(old)) => {
            let errno = sys::option::<c_int>(old, libc::SOL_SOCKET, libc::SO_ERROR);
            Cause::Errno(errno.filter(|e| *e != 0).unwrap_or(libc::ECONNRESET))
        }
        (cause, _) => cause,
    };
    // Queued with the lock held: the agent must hear of the fault before it can hear of anything that another
    // thread does with the flow, and before it can resume it for the peer.
    runtime::with_agent(|a| a.fault(flow.token(), cause));
    Fault::Suspended
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
        ctl.taken.get_or_insert(errno);
    }
}

/// Whether the peer has announced the end that was met, or does so within a moment: the announcement and the end
/// travel at the same time, and to wait for the one costs less than to suspend and to ask.
fn announced(flow: &Flow, received: u64) -> bool {
    let begun = Instant::now();
    while flow.live.load(Ordering::Acquire) && !flow.gate.is_barred() {
        if flow.peer_final.load(Ordering::Acquire) == received {
            return true;
        }
        if begun.elapsed() > ANNOUNCEMENT {
            break;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    false
}

/// The numbers become plain descriptors, and the table's hold on the flow ends.
pub fn unmanage(flow: &'static Flow, mut ctl: CtlGuard) {
    flow.release_numbers(&mut ctl);
    ctl.set_transport(None);
    ctl.mode = Mode::Lingering;
    drop(ctl);
    flow.wake();
    flow.drop_ref();
}

/// Reads the old transport dry into the stash. Final: the peer has stopped trimming.
pub fn drain(flow: &'static Flow) {
    if let Some(old) = flow.ctl().transport {
        // Wakes whoever is blocked in a call on it.
        sys::shutdown(old, libc::SHUT_RDWR);
    }
    let begun = Instant::now();
    while !flow.gate.idle() {
        if begun.elapsed() > LEAVE_LIMIT {
            runtime::say(&format!(
                "a thread never left its call on flow {:?}",
                flow.token()
            ));
            break;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    let mut ctl = flow.ctl();
    let Some(old) = ctl.transport.filter(|_| !ctl.drained) else {
        return;
    };
    ctl.drained = true;
    let mut buf = vec![0; 64 << 10];
    // Errors come once each and before the queue is known to be dry: only "no more" and EOF end the reading.
    let mut errors = 0;
    loop {
        match sys::recv(old, &mut buf, libc::MSG_DONTWAIT) {
            Ok(0) | Err(libc::EAGAIN) => break,
            Ok(n) => {
                ctl.stash.push(&buf[..n]);
                flow.received.fetch_add(n as u64, Ordering::SeqCst);
            }
            Err(libc::EINTR) => {}
            Err(_) if errors < 2 => errors += 1,
            Err(_) => break,
        }
    }
    let start = ctl.start;
    drop(ctl);
    if let Some(why) = Start::of(flow, old).and_then(|now| start.contradiction(now)) {
        give_up(flow, &why);
    }
}

/// An invariant does not hold: the flow ends in an error rather than with wrong bytes.
pub fn give_up(flow: &'static Flow, why: &str) {
    let token = flow.token();
    runtime::say(&format!(
        "flow {token:?}: {why}; the connection is given up"
    ));
    let ctl = flow.ctl();
    if ctl.mode != Mode::Lingering {
        die(flow, ctl, libc::ECONNRESET);
    }
    runtime::with_agent(|a| a.demote(token));
}

/// A replayed transport becomes the flow's.
pub fn install(flow: &'static Flow, new: c_int) {
    let mut ctl = flow.ctl();
    if let Some(old) = ctl.transport.take() {
        abort(old);
    }
    match (ctl.mode, ctl.fds.first().copied()) {
        (Mode::Suspended, Some(fd)) => {
            sys::set_status(new, sys::status(fd));
            ctl.epoch += 1;
            ctl.drained = false;
            ctl.start = Start::of(flow, new).unwrap_or_default();
            ctl.transport = Some(new);
            if ctl.stash.is_empty() {
                open(flow, &mut ctl);
            } else {
                show_stash(&mut ctl, Then::Open);
            }
        }
        (Mode::Lingering, _) if flow.local_final.load(Ordering::Acquire) != UNKNOWN => {
            ctl.drained = false;
            ctl.start = Start::of(flow, new).unwrap_or_default();
            ctl.transport = Some(new);
            flow.gate.open();
        }
        _ => abort(new),
    }
    drop(ctl);
    flow.wake();
}

/// The private transport takes the numbers and data calls go straight to it.
fn open(flow: &Flow, ctl: &mut Ctl) {
    let Some(new) = ctl.transport.take() else {
        return;
    };
    let _ = swap_in(ctl, new, true);
    sys::close(new);
    ctl.mode = Mode::Open;
    ctl.taken = None;
    flow.gate.open();
}

/// Stashed bytes come first.
fn show_stash(ctl: &mut Ctl, then: Then) {
    // What follows shows in the poll bits already now, as it does with the kernel's own queue.
    let file = match then {
        Then::Open => stand_in::ready(),
        Then::Dead(_) => stand_in::dead(),
        Then::Eof => stand_in::ended(),
    };
    if let Ok(file) = file {
        // Its status flags are not the flow's, see `nonblocking`.
        let _ = swap_in(ctl, file, true);
        if then != Then::Open {
            sys::close(file);
        }
    }
    ctl.mode = Mode::Stashed { then };
}

/// Whether calls on the flow must not wait. The always-ready stand-in is one file for all flows, so a
/// stashed flow's flags are those of its waiting transport.
pub fn nonblocking(ctl: &Ctl, fd: c_int) -> bool {
    sys::is_nonblocking(match ctl.mode {
        Mode::Stashed { .. } => ctl.transport.unwrap_or(fd),
        _ => fd,
    })
}

/// Called when the stash may have been read up: what was to follow it happens.
pub fn after_stash(flow: &'static Flow, mut ctl: CtlGuard) {
    if !ctl.stash.is_empty() {
        return;
    }
    match ctl.mode {
        Mode::Stashed { then: Then::Open } => {
            open(flow, &mut ctl);
            drop(ctl);
            flow.wake();
        }
        Mode::Stashed {
            then: Then::Dead(errno),
        } => die(flow, ctl, errno),
        Mode::Stashed { then: Then::Eof } => end(flow, ctl),
        _ => {}
    }
}

/// The old transport is put back: it was not dead after all, or the error it reports is the true one.
pub fn reinstate(flow: &'static Flow, legacy: bool) {
    let mut ctl = flow.ctl();
    if let Some(errno) = ctl.taken.take().filter(|_| ctl.mode == Mode::Suspended) {
        drop(ctl);
        return escalate(flow, Then::Dead(errno));
    }
    if ctl.mode == Mode::Suspended {
        if let (Some(old), Some(fd)) = (ctl.transport, ctl.fds.first()) {
            sys::set_status(old, sys::status(*fd));
        }
        if ctl.stash.is_empty() {
            open(flow, &mut ctl);
        } else {
            show_stash(&mut ctl, Then::Open);
        }
    }
    if legacy && ctl.mode == Mode::Open {
        unmanage(flow, ctl);
    } else {
        drop(ctl);
        flow.wake();
    }
}

/// Gives the flow up with an errno, or with an orderly end; after the stash.
pub fn escalate(flow: &'static Flow, then: Then) {
    // What the kernel has received is the application's, whatever becomes of the connection.
    drain_if_suspended(flow);
    let mut ctl = flow.ctl();
    let stashable = matches!(ctl.mode, Mode::Suspended) && !ctl.stash.is_empty();
    if ctl.mode == Mode::Lingering {
        ctl.set_transport(None);
    } else if stashable {
        if let Some(fd) = ctl.fds.first() {
            // Kept for its status flags; nothing is sent on it any more.
            if let Some(old) = ctl.transport {
                sys::set_status(old, sys::status(*fd));
            }
        }
        show_stash(&mut ctl, then);
        drop(ctl);
        flow.wake();
    } else {
        match then {
            Then::Dead(errno) => die(flow, ctl, errno),
            Then::Eof | Then::Open => end(flow, ctl),
        }
    }
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

/// A dead descriptor comes under the numbers. `ECONNRESET` is then the kernel's own to report; any other
/// errno is owed once by us.
fn die(flow: &'static Flow, mut ctl: CtlGuard, errno: c_int) {
    flow.gate.bar();
    bury(&mut ctl, stand_in::dead());
    if errno == libc::ECONNRESET {
        unmanage(flow, ctl);
    } else {
        ctl.mode = Mode::Dead(errno);
        drop(ctl);
        flow.wake();
    }
}

/// The stream has ended orderly and nothing more can be sent.
fn end(flow: &'static Flow, mut ctl: CtlGuard) {
    let file = stand_in::ended().inspect(|fd| sys::shutdown(*fd, libc::SHUT_WR));
    bury(&mut ctl, file);
    unmanage(flow, ctl);
}

/// Puts `file`, or for want of one the old transport, under the numbers, with the flags they had.
fn bury(ctl: &mut Ctl, file: Result<c_int, Errno>) {
    let old = ctl.transport.take();
    let Some(file) = file.ok().or(old) else {
        return;
    };
    if let Some(fd) = ctl.fds.first() {
        let flags = match ctl.mode {
            Mode::Stashed { .. } => old.map_or(0, sys::status),
            _ => sys::status(*fd),
        };
        sys::set_status(file, flags);
    }
    let _ = swap_in(ctl, file, true);
    sys::close(file);
    if let Some(old) = old.filter(|o| *o != file) {
        abort(old);
    }
}

/// Pays the errno that a dead flow owes; the kernel reports the rest.
pub fn pay(flow: &'static Flow, ctl: CtlGuard) {
    if let Some(fd) = ctl.fds.first() {
        // Takes the reset that the stand-in still has to report.
        let _ = sys::option::<c_int>(*fd, libc::SOL_SOCKET, libc::SO_ERROR);
    }
    unmanage(flow, ctl);
}

/// Closes a transport without letting the kernel go on with it.
pub fn abort(fd: c_int) {
    sys::set_option(
        fd,
        libc::SOL_SOCKET,
        libc::SO_LINGER,
        &libc::linger {
            l_onoff: 1,
            l_linger: 0,
        },
    );
    sys::close(fd);
}
