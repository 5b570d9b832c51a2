//! Whether SLIM works in this process, and its agent.
//!
//! Hooks run before our constructor and after our destructor, in forked and vforked children, and in
//! processes that never touch a socket. So nothing is set up until the first TCP socket needs it, and
//! whatever cannot be set up makes the process run as if SLIM were absent, with one line that says why.

use crate::{descriptors, direct, heap, marks, sys};
use libc::c_int;
use slim_agent::Agent;
use slim_core::config::{Config, LogLevel, Policy};
use slim_sys::lock::Lock;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::Duration;

/// How long each step of an end before the process's may take.
const RETIRING: Duration = Duration::from_secs(5);

const UNINIT: u8 = 0;
const READY: u8 = 1;
const OFF: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNINIT);
/// The process that `AGENT` belongs to; a child has another pid.
static OWNER: AtomicI32 = AtomicI32::new(0);
static AGENT: Lock<Option<Agent>> = Lock::new(None);

/// Runs `f` as our own code: hooks pass its calls through.
pub fn quietly<R>(f: impl FnOnce() -> R) -> R {
    slim_sys::as_agent(f)
}

/// Whether calls on this thread are our own.
pub fn is_our_call() -> bool {
    slim_sys::in_agent()
}

/// A descriptor that was just made: moved up, and hidden from the application, if one of our own calls made it.
pub fn out_of_the_way(fd: c_int) -> c_int {
    if fd < 0 || !is_our_call() {
        return fd;
    }
    // SAFETY: the kernel has just given it out; the caller gets the number that takes its place.
    sys::keep_errno(|| slim_sys::fds::adopt(unsafe { OwnedFd::from_raw_fd(fd) }).into_raw_fd())
}

/// Whether sockets of this process may become flows some time.
pub fn possible() -> bool {
    STATE.load(Ordering::Relaxed) != OFF
}

/// Whether this process, or one that it was forked from, has used its first TCP socket.
pub fn in_use() -> bool {
    STATE.load(Ordering::Acquire) == READY
}

/// Whether this is the process that the table and the agent belong to, not a vforked child of it that
/// shares our memory. Costs a system call.
pub fn in_own_process() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner == 0 || owner == sys::pid()
}

/// Whether the caller is a vforked child that has put something else under a number of a flow's: the flows are nothing to it.
#[inline]
pub fn is_another_process() -> bool {
    direct::do_numbers_differ() && !sys::keep_errno(in_own_process)
}

/// Which file a descriptor of the calling process is: device and number.
pub fn file(fd: c_int) -> Option<(u64, u64)> {
    file_in(sys::pid(), fd)
}

/// Which file a number of the process that the table belongs to is, asked by a vforked child of it.
pub fn file_in_owner(fd: c_int) -> Option<(u64, u64)> {
    file_in(OWNER.load(Ordering::Relaxed), fd)
}

fn file_in(pid: c_int, fd: c_int) -> Option<(u64, u64)> {
    sys::proc::file(format_args!("{pid}/fd/{fd}"))
}

/// Whether sockets of this process are to be managed; sets everything up at the first call that asks.
/// Call only for a TCP socket. In a signal handler nothing is set up: libc calls the program's `malloc` for a new thread, and the
/// handler may have interrupted `malloc`. What the handler connects stays plain TCP.
pub fn ready() -> bool {
    match STATE.load(Ordering::Acquire) {
        READY => !is_our_call() && in_own_process(),
        OFF => false,
        _ => !is_our_call() && sys::keep_errno(|| !slim_sys::in_handler() && start()),
    }
}

#[cold]
fn start() -> bool {
    AGENT.with(|agent| {
        if STATE.load(Ordering::Acquire) == UNINIT {
            *agent = start_agent();
            STATE.store(if agent.is_some() { READY } else { OFF }, Ordering::Release);
        }
        agent.is_some()
    })
}

/// The job key's file as it was when the program began: later the process may have given up the right to
/// read it, and its children have it from there.
static KEY_FILE: OnceLock<Result<(Vec<u8>, u32), String>> = OnceLock::new();

/// Reads the job key's file, when the library is loaded.
pub fn read_job_key() {
    quietly(|| {
        if let Some(path) = std::env::var_os("SLIM_JOB_KEY_FILE") {
            let file = slim_agent::read_job_key(path.as_ref());
            KEY_FILE.get_or_init(|| file);
        }
    });
}

/// How long a call waits for an answer of the peer's agent without which it goes on all the same.
pub fn time_to_answer(at_once: bool) -> Duration {
    // A part of the time in which a peer's first answer is waited for: by default 100 ms and 10 ms.
    config().hello_timeout / if at_once { 300 } else { 30 }
}

/// The settings as they were when the first process of a family of forks began: some programs (nginx)
/// clear their environment before they fork. What is wrong with them is said once.
fn config() -> &'static Config {
    // Never locked by another thread at a fork: whoever gets here has `AGENT`, which a fork waits for.
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        let (mut config, mut problems) = quietly(|| {
            let vars = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v)));
            Config::from_vars(vars)
        });
        let wanted = config.policy != Policy::Off;
        if let Some(path) = config.job_key_file.clone() {
            let read = || quietly(|| slim_agent::read_job_key(&path));
            let file = KEY_FILE.get_or_init(read).as_ref();
            let file = file.map(|(bytes, mode)| (&bytes[..], *mode));
            problems.extend(config.set_job_key(file.map_err(String::as_str)).err());
        }
        if wanted {
            for p in problems {
                say(&p.to_string());
            }
        }
        config
    })
}

/// Sets up this process; `None` when SLIM is off or cannot work here, which has been said then.
fn start_agent() -> Option<Agent> {
    let config = config();
    if config.policy == Policy::Off {
        return None;
    }
    OWNER.store(sys::pid(), Ordering::Relaxed);
    let status = status_of("self");
    descriptors::note_table_size(number_in(&status, "FDSize:"));
    if filters(&status) > filters(&status_of("1")) {
        if config.log >= LogLevel::Warn {
            say("the process began under a system call filter; connections are plain TCP");
        }
        return None;
    }
    // The sanitizer takes our calls of `memcpy` and `close`, too, and knows nothing of what orders them: it reports races
    // (a dozen in a transfer between two threads). Told to ignore calls from this library (`called_from_lib`), it does not
    // learn from the program's sends and receives any more what orders the program's own threads, and calls it a mistake
    // when a thread is cancelled in one.
    if sys::has_symbol(c"__tsan_acquire") {
        say(
            "the program is built for the thread sanitizer, which does not see our locks; connections are plain TCP",
        );
        return None;
    }
    direct::allow();
    sys::register_fence();
    let agent = enough_descriptors()
        .and_then(|()| enough_memory())
        .and_then(|()| marks::prepare())
        .and_then(|()| quietly(|| Agent::start(config.clone())));
    agent
        .inspect(|_| sys::proc::hold())
        .inspect_err(|why| {
            say(&format!(
                "cannot work here ({why}); connections are plain TCP"
            ))
        })
        .ok()
}

/// What proc(5) has on a process, by its directory; nothing if that cannot be read.
fn status_of(process: &str) -> String {
    let status = sys::proc::read(format_args!("{process}/status"));
    status
        .and_then(|s| String::from_utf8(s).ok())
        .unwrap_or_default()
}

/// The number on a line of that.
fn number_in(status: &str, name: &str) -> Option<c_int> {
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().parse().ok()
}

/// How many system call filters a process has. What they allow cannot be found out, and a filter may kill a process for
/// one call. Those that the first process has, too, are a container's: its programs are many, and it forbids none of the
/// calls that we make. A filter beyond those was made for this program, without us in mind.
fn filters(status: &str) -> c_int {
    const FILTERED: c_int = 2;
    // Linux 5.9 and later count them.
    let counted = number_in(status, "Seccomp_filters:");
    counted.unwrap_or_else(|| c_int::from(number_in(status, "Seccomp:") == Some(FILTERED)))
}

/// SLIM must not take the last descriptors of a program that has few.
fn enough_descriptors() -> io::Result<()> {
    const NEEDED: u64 = 64;
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: fills the structure it is given.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if known && limit.rlim_cur < NEEDED {
        let text = format!(
            "the limit on open files is {}; SLIM needs {NEEDED} (ulimit -n)",
            limit.rlim_cur
        );
        return Err(io::Error::other(text));
    }
    Ok(())
}

/// What is to be done when memory runs out needs some, too.
fn enough_memory() -> io::Result<()> {
    match heap::prepare() {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
    }
}

/// From now on everything is plain TCP, in this process and its children, and nothing of ours runs. Says why, if it did
/// run.
pub fn switch_off(why: &str) {
    let agent = AGENT.with(|agent| {
        STATE.store(OFF, Ordering::SeqCst);
        agent.take()
    });
    if let Some(agent) = agent {
        say(&format!("{why}; connections are plain TCP"));
        // The peers are told, and what was closed with bytes on the way is delivered.
        agent.drain_exit(RETIRING);
        if !agent.retire(RETIRING) {
            say("the thread of SLIM has not ended");
        }
    }
    sys::proc::release();
    // No need to ask the kernel whose process this is.
    OWNER.store(0, Ordering::SeqCst);
}

/// The process is about to end: everything is plain TCP from now on, and the agent's thread ends.
pub fn end() {
    const LIMIT: Duration = Duration::from_secs(1);
    let agent = AGENT.with(|agent| {
        STATE.store(OFF, Ordering::SeqCst);
        agent.take()
    });
    if let Some(agent) = agent {
        agent.retire(LIMIT);
    }
}

/// Calls `f` with the agent, if there is one.
pub fn with_agent<R>(f: impl FnOnce(&Agent) -> R) -> Option<R> {
    if STATE.load(Ordering::Acquire) != READY {
        return None;
    }
    let agent = AGENT.with(|a| a.clone())?;
    Some(f(&agent))
}

/// Around a fork: no other thread may be changing what the child is to inherit in one piece.
pub fn before_fork() {
    AGENT.lock();
}

/// After a fork, in the parent.
pub fn after_fork_parent() {
    AGENT.unlock();
}

/// After a fork, in the child: nothing is set up here yet.
pub fn after_fork_child() {
    if STATE.load(Ordering::Relaxed) == READY {
        Agent::after_fork_child();
        sys::proc::forget();
        // SAFETY: locked by `before_fork`. The handle's thread does not exist here; it is forgotten, not
        // dropped, because dropping would talk to that thread.
        std::mem::forget(unsafe { AGENT.get() }.take());
        STATE.store(UNINIT, Ordering::Relaxed);
    }
    OWNER.store(0, Ordering::Relaxed);
    AGENT.unlock();
}

/// Warns, unless the settings forbid it.
pub fn warn(text: &str) {
    if config().log >= LogLevel::Warn {
        say(text);
    }
}

/// Says one line on standard error, without going through anything that could be hooked or buffered.
pub fn say(text: &str) {
    let line = format!("slim[{}]: {text}\n", sys::pid());
    sys::write(2, line.as_bytes());
}
