//! The end of the process.
//!
//! The C library runs exit handlers in the first thread that calls `exit`. While they run, another thread, or a signal handler, may call
//! `exit`, too. That call runs the handlers that are left, and then ends the process. So the handler of this module registers itself
//! again for as long as it waits for the last bytes: then the second call waits, too. It is registered several times from the beginning,
//! because calls may come in the moment before it has done so.

use crate::flow::{self, Flow};
use crate::ops::{closing, demoting};
use crate::{runtime, sys, table, transport};
use libc::{c_int, c_void};
use slim_agent::Agent;
use slim_agent::offered::host;
use slim_sys::lock::Lock;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long an exiting process waits for flows whose last bytes are not delivered, unless the user wants flows to be held for longer.
const LEAST: Duration = Duration::from_secs(60);
/// An exit that waits for longer than this closes all other connections first.
const SOON: Duration = Duration::from_millis(100);
/// How much longer a second exit waits for the first.
const SECOND: Duration = Duration::from_secs(5);

/// How many calls may come in the same moment.
const AT_ONCE: usize = 8;

/// The thread that ends the process, and since when.
static ENDING: Lock<Option<(c_int, Instant)>> = Lock::new(None);
/// 1 once that thread has nothing to wait for any more.
static ENDED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" {
    // The C library has these functions; the crate `libc` does not declare them.
    fn at_quick_exit(f: extern "C" fn()) -> c_int;
    fn __cxa_atexit(f: extern "C" fn(*mut c_void), arg: *mut c_void, library: *mut c_void)
    -> c_int;
}

fn limit() -> Duration {
    LEAST.max(runtime::hold())
}

/// Registers the handlers, when the library is loaded.
pub fn register() {
    for _ in 0..AT_ONCE {
        register_quick();
        // Exit handlers run in reverse order of registration. The handler that runs the destructors of all libraries is
        // registered later, when the program begins, so this handler runs after all others.
        register_last();
    }
}

/// Registers the handler of `exit`. It is registered for no library: otherwise it would run with our own destructors, before those of
/// libraries that the program has opened.
fn register_last() {
    // SAFETY: the handler lives as long as this library, which is never unloaded (it is a preload).
    unsafe { __cxa_atexit(at_very_last, null_mut(), null_mut()) };
}

/// Registers the handler of `quick_exit`.
fn register_quick() {
    // SAFETY: as above.
    unsafe { at_quick_exit(at_quick) };
}

/// Before a fork: takes the lock, so that the child inherits a consistent state.
pub fn before_fork() {
    ENDING.lock();
}

/// After a fork, on either side. The child does not end because its parent does.
pub fn after_fork(child: bool) {
    if child {
        ENDED.store(0, Ordering::Relaxed);
    }
    // SAFETY: taken by `before_fork`.
    unsafe { ENDING.unlock_after_fork(child) };
}

/// After `main`, or `exit`. The program's handlers and the destructors of its libraries run first, because they may still write
/// to connections and close them in order.
extern "C" fn at_very_last(_: *mut c_void) {
    if let Some(ending) = begin() {
        register_last();
        // The C library has removed these with this library's other handlers.
        (0..AT_ONCE).for_each(|_| register_quick());
        end(ending);
    }
}

extern "C" fn at_quick() {
    if let Some(ending) = begin() {
        register_quick();
        end(ending);
    }
}

/// The thread that ends the process, which is this one if there was none, and since when. `None` if there is nothing to wait for.
fn begin() -> Option<(c_int, Instant)> {
    if ENDED.load(Ordering::Acquire) != 0 || !runtime::in_own_process() {
        return None;
    }
    // Flows of a program that links SLIM itself are delivered, too.
    let any = table::any() || host::has_flows();
    ENDING.with(|ending| {
        if ending.is_none() && any {
            *ending = Some((sys::tid(), Instant::now()));
        }
        *ending
    })
}

/// The first call ends the connections; calls of other threads wait for it. A call of the same thread, in a signal handler, goes on in
/// the place of the first, which does not return.
fn end((thread, since): (c_int, Instant)) {
    if thread == sys::tid() {
        // A handler of the program that sends while this thread waits must not end the process by a signal.
        sys::without_sigpipe(|| end_connections(since));
        ENDED.store(1, Ordering::Release);
        sys::futex_wake_all(&ENDED);
        return;
    }
    while ENDED.load(Ordering::Acquire) == 0
        && let Some(left) = (limit() + SECOND).checked_sub(since.elapsed())
    {
        let _ = sys::futex_wait(&ENDED, 0, Some(left));
    }
}

/// The kernel closes the connections of an exiting process. The peers are told that these ends are genuine. The last bytes are waited for:
/// until the peers' kernels have them, or only the peers' applications are slow; and also the ends of flows through the witness.
/// Other threads of the program may go on sending until the process ends, so their open flows are left to the kernel.
fn end_connections(since: Instant) {
    runtime::with_agent(Agent::process_ends);
    // This thread, and the agent's.
    let alone = slim_sys::threads() <= 2;
    let is_owed = |f, fd| alone && closing::has_bytes_under_way(f, fd);
    table::for_each_flow(|fd, f| {
        transport::notice(f, fd);
        match f.own_at(fd).map(|c| c.mode()) {
            Some(flow::Mode::Suspended) => closing::leave(f, fd),
            Some(flow::Mode::Open) if f.stream.is_relayed() || is_owed(f, fd) => {
                closing::leave(f, fd);
            }
            Some(flow::Mode::Open) => announce_end(fd, f),
            _ => {}
        }
    });
    // The first call lets the agent find out which closed flows have lost their transport. The second call waits for
    // those, and returns at once when there are none.
    let left = || limit().saturating_sub(since.elapsed());
    let answers = runtime::with_agent(|a| {
        // On a busy machine the agent answers late. The second call would then return before the agent knows.
        let looked = a.drain_exit(Duration::ZERO) || a.flush(left());
        let (begun, soon) = (Instant::now(), SOON.min(left()));
        if looked && alone && !(a.drain_exit(soon) && begun.elapsed() < soon) {
            close_all_else();
        }
        looked && a.drain_exit(left())
    });
    if answers != Some(true) {
        return;
    }
    // Libraries whose destructors run later may still use connections. These become plain TCP. A flow whose transport
    // is away gets its error, because no agent is left to resume it.
    runtime::end();
    table::for_each_flow(|fd, f| demoting::demote(f, fd));
}

/// Closes the connections and listeners that are not waited for: their peers must not wait for those that are, nor must the next process
/// that listens. No other thread of the program may use them.
fn close_all_else() {
    table::for_each_socket(|fd| {
        // The kernel does not linger either when a process ends.
        if closing::lingers(fd).is_some_and(|s| s > 0) {
            sys::set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &sys::NOT_AT_ALL);
        }
        closing::close(fd, || {
            sys::close(fd);
            0
        });
    });
}

/// Tells the peer where the stream ends. The kernel is about to close the connection under `fd`, unless a child has it, too.
fn announce_end(fd: c_int, f: &Flow) {
    if f.forked.load(Ordering::Relaxed) {
        runtime::with_agent(|a| a.demote(f.token()));
        return;
    }
    // Another thread is sending, and goes on until the process ends: where the stream ends is unknown.
    let Some(sent) = f.stream.try_sent() else {
        return;
    };
    let how = closing::how_closed(fd);
    runtime::with_agent(|a| a.announce(f.token(), sent, how));
}
