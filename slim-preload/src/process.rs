//! Fork, vfork and spawning. (Exec: [`crate::exec`].)
//!
//! A fork leaves two processes with the same connections, and only one of them can have the session. The session
//! stays with the parent. When the child reads from or writes to a connection, it marks the flow's byte in a page
//! that both processes share, and the parent continues with that connection as plain TCP.

use crate::flow::Flow;
use crate::ops::{demoting, left};
use crate::stand_in::{self, Departure};
use crate::{
    descriptors, epoll, exit, flow, heap, kept_names, listeners, marks, runtime, sleep, sys, table,
    transport,
};
use libc::c_int;
use slim_sys::{limit, numbers};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Registers the handlers for fork and exit, when the library is loaded. Fork handlers that the program registers later may use
/// connections, and run before ours. Registering allocates memory, which must not happen in a signal handler.
pub fn register() {
    // SAFETY: the handlers live as long as this library, which is never unloaded (it is a preload).
    unsafe {
        libc::pthread_atfork(
            Some(before_fork),
            Some(after_fork_parent),
            Some(after_fork_child),
        );
    }
    exit::register();
    flow::waits::register(left::before_end);
}

/// Makes a call that forks, but for which libc runs no fork handlers. The child returns from here, too.
pub fn forking(fork: impl FnOnce() -> libc::pid_t) -> libc::pid_t {
    if !runtime::in_use() {
        return fork();
    }
    sys::keep_errno(|| before_fork());
    let child = fork();
    sys::keep_errno(|| match child {
        0 => after_fork_child(),
        _ => after_fork_parent(),
    });
    child
}

/// Before `clone` makes a child with memory of its own, which starts in another function: the child has the connections, too.
pub fn before_clone() {
    if runtime::in_use() {
        table::for_each_flow(|_, f| f.mark_forked());
    }
}

/// The flags that are passed to `clone3`.
pub fn clone3_flags(args: *const u8, size: usize) -> u64 {
    let flags = sys::memory(args, size.min(size_of::<u64>()));
    flags
        .and_then(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)))
        .unwrap_or_default()
}

extern "C" fn before_fork() {
    limit::keep_over_fork();
    runtime::before_fork();
    exit::before_fork();
    flow::before_fork();
    epoll::before_fork();
    listeners::before_fork();
    // Lock order: a thread that makes a descriptor may hold the locks above, and may wait for those below.
    numbers::before_fork();
    sleep::before_fork();
    kept_names::before_fork();
    table::for_each_flow(|_, f| f.mark_forked());
    heap::before_fork();
}

extern "C" fn after_fork_parent() {
    heap::after_fork();
    kept_names::after_fork();
    sleep::after_fork(false);
    epoll::after_fork(false);
    numbers::after_fork(false);
    listeners::after_fork(false);
    flow::after_fork(false);
    exit::after_fork(false);
    runtime::after_fork_parent();
    limit::after_fork(false);
}

extern "C" fn after_fork_child() {
    limit::after_fork(true);
    numbers::after_fork(true);
    heap::after_fork();
    marks::inherit();
    // A file that stands in for a transport means nothing without the parent's agent.
    table::for_each_flow(|fd, f| {
        if !f.is_under(fd) {
            table::clear(fd);
        } else if f.exposed.load(Ordering::SeqCst) || !sys::is_tcp(fd) {
            replace_by_reset(fd);
            table::clear(fd);
        }
    });
    table::inherit(|f| f.slot);
    kept_names::after_fork();
    sleep::after_fork(true);
    epoll::after_fork(true);
    listeners::after_fork(true);
    flow::after_fork(true);
    exit::after_fork(true);
    slim_stream::forget_marks();
    runtime::after_fork_child();
}

/// Puts a reset connection under `fd`, in a process that must not have this flow, whose transport is away.
fn replace_by_reset(fd: c_int) {
    if let Ok(dead) = stand_in::over(Departure::Reset, &[], libc::AF_INET) {
        let _ = sys::replace(dead, fd);
        sys::close(dead);
    }
}

/// Before the application installs a system call filter. The filter does not allow for the calls that SLIM makes in addition to the
/// application's, and may apply to all threads.
pub fn before_filter() {
    stop_managing("the program installs a system call filter");
}

/// Makes all flows plain TCP. Nothing new is managed from now on, and the agent's thread ends.
fn stop_managing(why: &str) {
    if !runtime::possible() || runtime::is_our_call() || !runtime::in_own_process() {
        return;
    }
    sys::keep_errno(|| {
        let limit = Instant::now() + demoting::PATIENCE;
        let mut all: Vec<(c_int, &'static Flow)> = Vec::new();
        table::for_each_flow(|fd, f| all.push((fd, f)));
        for (fd, f) in all {
            demoting::hand_over_until(f, fd, limit);
        }
        runtime::switch_off(why);
    });
}

/// `unshare`: the agent's thread would no longer share with the program what the program unshares.
pub fn unshare(flags: c_int, real: impl Fn() -> c_int) -> c_int {
    const ALONE: c_int =
        libc::CLONE_NEWUSER | libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    if flags & libc::CLONE_FILES != 0 {
        before_other_numbers();
    }
    if flags & libc::CLONE_NEWNET != 0 {
        before_other_network();
    }
    match flags & ALONE {
        0 => real(),
        _ => alone(real),
    }
}

/// `setns`.
pub fn set_namespace(fd: c_int, kind: c_int, real: impl Fn() -> c_int) -> c_int {
    const ALONE: c_int = libc::CLONE_NEWNS | libc::CLONE_NEWUSER | libc::CLONE_NEWTIME;
    let kind = match kind {
        0 => sys::namespace_kind(fd),
        kind => kind,
    };
    if kind & libc::CLONE_NEWNET != 0 {
        before_other_network();
    }
    match kind & ALONE {
        0 => real(),
        _ => alone(real),
    }
}

/// Before the calling thread gets a descriptor table of its own: a number then no longer means the same in all threads, and
/// the agent's thread would keep open what the program closes.
pub fn before_other_numbers() {
    if runtime::in_use() || crate::direct::has_threads() {
        stop_managing("the program gets a table of descriptors for one thread");
    }
}

/// Before the calling thread moves to another network namespace, which does not contain the agent's sockets.
fn before_other_network() {
    if runtime::in_use() {
        stop_managing("the program moves to another network");
    }
}

/// Makes a call that the kernel refuses to a process with several threads. If it is refused, the agent's thread ends and the call
/// is made again.
fn alone(real: impl Fn() -> c_int) -> c_int {
    let errno = sys::errno();
    let r = real();
    if r == 0 || !runtime::in_use() || !matches!(sys::errno(), libc::EINVAL | libc::EUSERS) {
        return r;
    }
    stop_managing("the program makes a call that needs a process with one thread");
    sys::set_errno(errno);
    real()
}

/// Before the calling thread ends. If it is the first thread, the process continues with the others.
pub fn before_thread_exit() {
    if runtime::in_own_process() && sys::tid() == sys::pid() {
        runtime::first_thread_ends();
    }
}

/// Before libc creates a process that inherits descriptors, for which it runs no fork handlers. With `chosen` the new process may get
/// any of them, otherwise those that survive an exec.
pub fn before_spawn(chosen: bool) {
    if runtime::in_own_process() {
        sys::keep_errno(|| {
            table::for_each_flow(|fd, f| {
                if chosen || sys::survives_exec(fd) {
                    f.mark_forked();
                    if let Some(mut ctl) = f.own_at(fd) {
                        transport::install_placeholder(f, &mut ctl);
                    }
                }
            });
        });
    }
}

/// A vforked child shares our memory, but has descriptors of its own. This function changes only those that the new program gets,
/// and nothing in the tables.
pub fn before_exec_of_vforked() {
    let mut exposed = Vec::new();
    table::for_each_flow(|fd, f| {
        f.mark_forked();
        if f.exposed.load(Ordering::SeqCst) {
            // The parent's file: the child may have another file under its number.
            exposed.extend(runtime::file_in_owner(fd).filter(|file| f.is_file(*file)));
        }
    });
    let away = |fd| {
        let same = |file| exposed.contains(&file);
        stand_in::is_one(fd) || (!exposed.is_empty() && runtime::file(fd).is_some_and(same))
    };
    for fd in descriptors::open_numbers() {
        if sys::survives_exec(fd) && away(fd) {
            replace_by_reset(fd);
        }
    }
}

/// `close_range` for a thread that gets a descriptor table of its own: flows and SLIM's own descriptors are closed like all
/// others.
pub fn close_range_apart(first: u32, last: u32, real: impl FnOnce() -> c_int) -> c_int {
    if !runtime::in_own_process() {
        return real();
    }
    before_other_numbers();
    let r = real();
    if r == 0 && !runtime::possible() {
        for fd in first..=last.min(slim_sys::fds::LIMIT as u32 - 1) {
            let fd = fd as c_int;
            if descriptors::is_internal(fd) && !sys::keep_errno(|| sys::is_open(fd)) {
                slim_sys::fds::release(fd);
                stand_in::closed(fd);
            }
        }
    }
    r
}
