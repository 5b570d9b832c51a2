//! Whether SLIM works in this process, and its agent.
//!
//! Hooks run before our constructor and after our destructor, in forked and vforked children, and in
//! processes that never touch a socket. So nothing is set up until the first TCP socket needs it. If the
//! setup fails, the process runs as if SLIM were absent, and one line says why.

use crate::{descriptors, direct, heap, marks, sys};
use libc::c_int;
use slim_agent::Agent;
use slim_agent::offered::host;
use slim_core::config::{Config, LogLevel, Policy};
use slim_sys::SignalMask;
use slim_sys::lock::Lock;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::time::Duration;

/// Time limit of each step when the session ends before the process does.
const RETIRING: Duration = Duration::from_secs(5);

const UNINIT: u8 = 0;
const READY: u8 = 1;
const OFF: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNINIT);
/// The process that `AGENT` belongs to; a child has another pid.
static OWNER: AtomicI32 = AtomicI32::new(0);
static AGENT: Lock<Option<Agent>> = Lock::new(None);
/// The signal mask of the process's first thread, once that has called `pthread_exit`. Used under the lock of `AGENT`.
static FIRST_ENDS: Lock<Option<SignalMask>> = Lock::new(None);

/// Runs `f` as our own code: hooks pass its calls through.
pub fn quietly<R>(f: impl FnOnce() -> R) -> R {
    slim_sys::as_agent(f)
}

/// Whether calls on this thread are our own.
pub fn is_our_call() -> bool {
    slim_sys::in_agent()
}

/// Moves a descriptor that one of our own calls has just made above the floor, and hides it from the application. Descriptors
/// that the application made stay as they are.
pub fn out_of_the_way(fd: c_int) -> c_int {
    if fd < 0 || !is_our_call() {
        return fd;
    }
    // SAFETY: the kernel has just given it out; the caller gets the number that takes its place.
    sys::keep_errno(|| slim_sys::fds::adopt(unsafe { OwnedFd::from_raw_fd(fd) }).into_raw_fd())
}

/// Whether sockets of this process may still become flows.
pub fn possible() -> bool {
    STATE.load(Ordering::Relaxed) != OFF
}

/// Whether SLIM is set up: this process, or the one that it shares its memory with (vfork), has used its first TCP socket.
pub fn in_use() -> bool {
    STATE.load(Ordering::Acquire) == READY
}

/// Whether this is the process that the table and the agent belong to, not a vforked child of it that
/// shares our memory. Costs a system call.
pub fn in_own_process() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner == 0 || owner == sys::pid()
}

/// Whether the caller is a vforked child, after such a child has put another file under a flow's number. The flows do not concern
/// it.
#[inline]
pub fn is_another_process() -> bool {
    direct::do_numbers_differ() && !sys::keep_errno(in_own_process)
}

/// The file under a descriptor of the calling process: device and inode.
pub fn file(fd: c_int) -> Option<(u64, u64)> {
    file_in(sys::pid(), fd)
}

/// The file under a number of the process that the table belongs to. Called by a vforked child of that process.
pub fn file_in_owner(fd: c_int) -> Option<(u64, u64)> {
    file_in(OWNER.load(Ordering::Relaxed), fd)
}

/// The file under a number of a process: device and inode.
pub fn file_in(pid: c_int, fd: c_int) -> Option<(u64, u64)> {
    sys::proc::file(format_args!("{pid}/fd/{fd}"))
}

/// Whether sockets of this process are to be managed. The first call sets everything up. Call only for a TCP socket.
/// In a signal handler nothing is set up: libc calls the program's `malloc` for a new thread, and the handler may have
/// interrupted `malloc`. A connection that the handler makes stays plain TCP.
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
            *agent = start_agent(Agent::start);
            STATE.store(if agent.is_some() { READY } else { OFF }, Ordering::Release);
            if let (Some(agent), Some(mask)) = (&*agent, FIRST_ENDS.with(|mask| *mask)) {
                agent.first_thread_ends(mask);
            }
        }
        agent.is_some()
    })
}

/// Sets everything up when the library is loaded, with the agent that `start` makes. False if SLIM does not work in this program.
pub fn start_handed(start: impl FnOnce(Config) -> io::Result<Agent>) -> bool {
    AGENT.with(|agent| {
        *agent = start_agent(start);
        STATE.store(if agent.is_some() { READY } else { OFF }, Ordering::Release);
        agent.is_some()
    })
}

/// The job key's file, read when the program begins: later the process may have given up the right to read it.
/// Forked children inherit the contents.
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

/// How long a call waits for an answer of the peer's agent, before it continues without the answer.
pub fn time_to_answer(at_once: bool) -> Duration {
    // A fraction of the time limit for a peer's first answer: by default 10 ms (`at_once`) or 100 ms.
    config().hello_timeout / if at_once { 300 } else { 30 }
}

/// For how long flows are held after their attempts have failed.
pub fn hold() -> Duration {
    config().hold.unwrap_or_default()
}

/// The settings, read once by the first process of a family of forks: some programs (nginx) clear their environment before
/// they fork. Problems in the settings are reported once.
fn config() -> &'static Config {
    // No other thread is initializing this at a fork: the first caller holds `AGENT`, and a fork waits for that lock.
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

/// Sets up this process. Gives `None` when SLIM is off, or when it cannot work here; the latter has been reported then.
fn start_agent(start: impl FnOnce(Config) -> io::Result<Agent>) -> Option<Agent> {
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
    // The thread sanitizer intercepts our calls of `memcpy` and `close`, too, and does not see how they are synchronized: it
    // reports false races (a dozen in a transfer between two threads). It can be told to ignore calls from this library
    // (`called_from_lib`). But then it no longer learns from the program's sends and receives how the program's own threads are
    // synchronized, and it reports an error when a thread is cancelled in such a call.
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
        .and_then(|()| quietly(|| start(config.clone())));
    agent
        .inspect(|_| sys::proc::hold())
        .inspect_err(|why| {
            say(&format!(
                "cannot work here ({why}); connections are plain TCP"
            ))
        })
        .ok()
}

/// The status file of a process (proc(5)), by the name of its directory; empty if the file cannot be read.
fn status_of(process: &str) -> String {
    let status = sys::proc::read(format_args!("{process}/status"));
    status
        .and_then(|s| String::from_utf8(s).ok())
        .unwrap_or_default()
}

/// The number on the line of a status file that begins with `name`.
fn number_in(status: &str, name: &str) -> Option<c_int> {
    let line = status.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().parse().ok()
}

/// The number of system call filters of a process. What a filter allows cannot be found out, and a filter may kill a process for
/// one call. Filters that process 1 has, too, belong to the container: they serve many programs, and forbid none of SLIM's
/// calls. Any further filter was made for this program, without SLIM in mind.
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

/// Ending the session when memory runs out needs memory, too: this reserves it. Starting a thread takes some of the program's, and ends
/// the program if there is none.
fn enough_memory() -> io::Result<()> {
    // SAFETY: what is allocated is freed, and not used.
    let theirs = unsafe {
        // The compiler would leave out memory that it knows to be unused.
        let probe = std::hint::black_box(libc::malloc(4096));
        libc::free(probe);
        !probe.is_null()
    };
    match theirs && heap::prepare() {
        true => Ok(()),
        false => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
    }
}

/// Switches SLIM off in this process and its children: everything is plain TCP, and the agent's thread ends. Reports `why` if
/// the agent was running.
pub fn switch_off(why: &str) {
    let agent = AGENT.with(|agent| {
        STATE.store(OFF, Ordering::SeqCst);
        agent.take()
    });
    if let Some(agent) = agent {
        say(&format!("{why}; connections are plain TCP"));
        // Tells the peers, and delivers the remaining bytes of flows that the application has closed.
        host::step_back(&agent, RETIRING);
        if !agent.retire(RETIRING) {
            say("SLIM's thread has not ended");
        }
    }
    sys::proc::release();
    // With no owner `in_own_process` makes no system call.
    OWNER.store(0, Ordering::SeqCst);
}

/// The process is about to end: everything becomes plain TCP, and the agent's thread ends.
pub fn end() {
    const LIMIT: Duration = Duration::from_secs(1);
    let agent = AGENT.with(|agent| {
        STATE.store(OFF, Ordering::SeqCst);
        agent.take()
    });
    if let Some(agent) = agent {
        host::step_back(&agent, Duration::ZERO);
        agent.retire(LIMIT);
    }
}

/// The calling thread, the first one of the process, is about to end. The process ends with the last of the others, and the agent must
/// not count as one.
pub fn first_thread_ends() {
    let mask = SignalMask::of_this_thread();
    AGENT.with(|agent| {
        let before = FIRST_ENDS.with(|first| first.replace(mask));
        if let (Some(agent), None) = (&*agent, before) {
            agent.first_thread_ends(mask);
        }
    });
}

/// Calls `f` with the agent, if there is one.
pub fn with_agent<R>(f: impl FnOnce(&Agent) -> R) -> Option<R> {
    if STATE.load(Ordering::Acquire) != READY {
        return None;
    }
    let agent = AGENT.with(|a| a.clone())?;
    Some(f(&agent))
}

/// The agent, for a program that links SLIM itself and has settings with this digest. Starts it if necessary.
pub fn agent_for(digest: &[u8; 32]) -> Option<Agent> {
    // Under the lock, for which a fork waits: see `config`.
    let wanted = || sys::keep_errno(|| AGENT.with(|_| config().serves(digest)));
    (possible() && wanted() && ready()).then(|| with_agent(Agent::clone))?
}

/// Before a fork: takes the lock, so that the child inherits a consistent state.
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
        host::after_fork_child();
        sys::proc::forget();
        // SAFETY: locked by `before_fork`. The handle's thread does not exist here; it is forgotten, not
        // dropped, because dropping would talk to that thread.
        std::mem::forget(unsafe { AGENT.get() }.take());
        STATE.store(UNINIT, Ordering::Relaxed);
    } else {
        // Those of a library that the program links.
        slim_sys::fds::close_all_in_child();
    }
    OWNER.store(0, Ordering::Relaxed);
    FIRST_ENDS.with(|first| *first = None);
    AGENT.unlock();
}

/// Warns, unless the settings forbid it.
pub fn warn(text: &str) {
    if config().log >= LogLevel::Warn {
        say(text);
    }
}

/// Writes one line to standard error, past all hooks and buffers.
pub fn say(text: &str) {
    let line = format!("slim[{}]: {text}\n", sys::pid());
    sys::write(2, line.as_bytes());
}
