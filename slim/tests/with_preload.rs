//! A program that links the library, and also runs under the preload library. Each test runs in a process of its own.

#[path = "common/beside.rs"]
mod beside;
mod common;
#[path = "common/under_preload.rs"]
mod under_preload;

use std::os::fd::{AsRawFd, RawFd};
use std::panic::{self, AssertUnwindSafe};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use beside::*;
use common::*;
use under_preload::*;

#[test]
fn no_socket_is_managed_twice() {
    if !is_under_preload("no_socket_is_managed_twice") {
        return;
    }
    let linked = Linked::open();
    let mut plain = Plain::open();
    survive_kills(&linked, &mut plain);
    let resumed = logged().iter().filter(|line| line.kind == "resume").count() as u64;
    let killed = kills()
        .iter()
        .filter(|how| matches!(how, Kill::Destroy))
        .count() as u64
        * KILLS;
    assert!(resumed >= killed, "{resumed} resumes of {killed} kills");
    // Each connection has two ends in this process, and each end has become live once.
    let live = logged().into_iter().filter(|line| line.kind == "live");
    let live: Vec<_> = live.map(|line| line.ends).collect();
    assert_eq!(live.len(), 4, "{live:?}");
    assert_eq!(live.iter().filter(|ends| plain.has(**ends)).count(), 2);
    linked.close();
}

#[test]
fn a_program_that_uses_only_the_library_gets_no_second_agent() {
    if !is_under_preload("a_program_that_uses_only_the_library_gets_no_second_agent") {
        return;
    }
    // The preload library's agent stays when the session ends.
    Linked::open().close();
    let before = descriptors();
    let linked = Linked::open();
    for how in kills() {
        (0..KILLS).for_each(|_| linked.survive(how));
    }
    assert_eq!(agent_threads(), 1);
    linked.close();
    assert_eq!(agent_threads(), 1);
    // The agent closes control sockets of listeners, and connections that lost a race to resume a flow, a moment later.
    wait_until("closed", || {
        descriptors().iter().all(|one| before.contains(one))
    });
}

#[test]
fn a_program_that_closes_numbers_it_does_not_know_closes_none_of_slims() {
    if !is_under_preload("a_program_that_closes_numbers_it_does_not_know_closes_none_of_slims") {
        return;
    }
    let linked = Linked::open();
    let mut plain = Plain::open();
    // The numbers above those that the program got itself.
    let first = 64;
    assert!(plain.far.as_raw_fd() < first);
    let close_all = || {
        // SAFETY: the program has no descriptors there.
        assert_eq!(unsafe { libc::close_range(first as u32, u32::MAX, 0) }, 0);
    };
    let close_each = || {
        for fd in first..5000 {
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
    };
    for close in [&close_all as &dyn Fn(), &close_each] {
        close();
        for how in kills() {
            linked.survive(how);
            plain.survive(how);
        }
    }
    linked.close();
}

#[test]
fn the_program_gets_the_numbers_that_it_would_get_without_slim() {
    if !is_under_preload("the_program_gets_the_numbers_that_it_would_get_without_slim") {
        return;
    }
    let linked = Linked::open();
    let _plain = Plain::open();
    let high = descriptors().into_iter().filter_map(|(fd, to)| {
        let fd: RawFd = fd.parse().ok()?;
        (to.starts_with("socket:") || to.starts_with("anon_inode:")).then_some(fd)
    });
    // Two ends of the connection of the program, and the poll set of the session.
    assert_eq!(high.filter(|fd| *fd < 64).count(), 3, "{:?}", descriptors());
    linked.close();
}

/// Runs in a forked child. Returns its exit code.
fn child(parents: Linked) -> i32 {
    drop(parents);
    let linked = Linked::open();
    let mut plain = Plain::open();
    for how in kills() {
        linked.survive(how);
        plain.survive(how);
    }
    linked.close();
    // The agent of the preload library.
    match agent_threads() {
        1 => 0,
        _ => 1,
    }
}

#[test]
fn a_forked_child_opens_sessions_and_connections_of_its_own() {
    if !is_under_preload("a_forked_child_opens_sessions_and_connections_of_its_own") {
        return;
    }
    let linked = Linked::open();
    let mut plain = Plain::open();
    // SAFETY: the child goes on with this thread alone. The others, the agents' and the test's main thread, which waits, hold no lock
    // that it needs.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = panic::catch_unwind(AssertUnwindSafe(|| child(linked)));
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(code.unwrap_or(2)) };
    }
    for how in kills() {
        linked.survive(how);
    }
    let mut status = -1;
    // SAFETY: the status is written to a variable of ours.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child has failed");
    for how in kills() {
        linked.survive(how);
        plain.survive(how);
    }
    linked.close();
}

#[test]
fn a_fork_does_not_wait_for_threads_that_open_and_close_flows() {
    if !is_under_preload("a_fork_does_not_wait_for_threads_that_open_and_close_flows") {
        return;
    }
    let session = session();
    let endpoint = listen(&session);
    let stop = AtomicBool::new(false);
    let longest = thread::scope(|scope| {
        let (session, endpoint, stop) = (&session, &endpoint, &stop);
        for _ in 0..2 {
            scope.spawn(move || {
                while !stop.load(Ordering::SeqCst) {
                    drop(session.connect(endpoint.local_addr(), LIMIT).unwrap());
                }
            });
        }
        scope.spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                drop(endpoint.accept(Some(Duration::from_millis(10))));
            }
        });
        let forks = (0..100).map(|_| {
            let begun = Instant::now();
            // SAFETY: the child ends at once, without exit handlers.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: as above.
                unsafe { libc::_exit(0) };
            }
            let took = begun.elapsed();
            assert_eq!(wait_for_child(pid), Some(0));
            took
        });
        let longest = forks.max();
        stop.store(true, Ordering::SeqCst);
        longest.unwrap()
    });
    println!("the longest fork took {longest:?}");
    // Each side waits at most 2 s for the other.
    assert!(longest < Duration::from_secs(1), "{longest:?}");
}

#[test]
fn another_program_gets_no_descriptors_of_slims() {
    if !is_under_preload("another_program_gets_no_descriptors_of_slims") {
        return;
    }
    let list = || {
        Command::new("ls")
            .arg("/proc/self/fd")
            .output()
            .unwrap()
            .stdout
    };
    let before = list();
    let linked = Linked::open();
    let plain = Plain::open();
    assert_eq!(String::from_utf8(list()), String::from_utf8(before));
    drop(plain);
    linked.close();
}

#[test]
fn both_work_within_a_low_limit_on_open_files() {
    if !is_under_preload("both_work_within_a_low_limit_on_open_files") {
        return;
    }
    let low = libc::rlimit {
        rlim_cur: 160,
        rlim_max: 160,
    };
    // SAFETY: the structure is valid.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const low) };
    assert_eq!(set, 0);
    let linked = Linked::open();
    let mut plain = Plain::open();
    survive_kills(&linked, &mut plain);
    linked.close();
}
