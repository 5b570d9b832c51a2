//! How the agent affects the process that it runs in.
//!
//! One test: it looks at all descriptors and threads of the process.

mod common;

use std::fs;
use std::os::fd::RawFd;
use std::thread;
use std::time::{Duration, Instant};

use common::Server;
use slim_agent::Agent;
use slim_core::config::Config;
use slim_sys::{as_agent, fds, in_agent};

fn open_fds() -> Vec<RawFd> {
    let dir = fs::read_dir("/proc/self/fd").unwrap();
    dir.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
        .filter(|fd| is_open(*fd))
        .collect()
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// Directories of the agents' threads.
fn agent_threads() -> Vec<std::path::PathBuf> {
    fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| fs::read_to_string(p.join("comm")).is_ok_and(|c| c == "slim-agent\n"))
        .collect()
}

fn field(text: &str, name: &str) -> String {
    let line = text.lines().find(|l| l.starts_with(name)).unwrap();
    line.split_once(':').unwrap().1.trim().to_owned()
}

/// How often the agents' threads have gone to sleep.
fn sleeps() -> u64 {
    let status = |p: &std::path::PathBuf| fs::read_to_string(p.join("status")).unwrap();
    let count = |text: String| {
        field(&text, "voluntary_ctxt_switches")
            .parse::<u64>()
            .unwrap()
    };
    agent_threads().iter().map(status).map(count).sum()
}

#[test]
fn the_agent_blocks_signals_uses_high_descriptors_and_sleeps_when_idle() {
    assert!(!slim_sys::in_agent());
    assert!(as_agent(in_agent) && !in_agent());

    let before = open_fds();
    let begun = Instant::now();
    let client = Agent::start(Config::default()).unwrap();
    println!("started in {:?}", begun.elapsed());
    let server = Server::start(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();

    // Its threads take no signals.
    let threads = agent_threads();
    assert_eq!(threads.len(), 2);
    for thread in &threads {
        let status = fs::read_to_string(thread.join("status")).unwrap();
        let blocked = u64::from_str_radix(&field(&status, "SigBlk"), 16).unwrap();
        for signal in [
            libc::SIGINT,
            libc::SIGTERM,
            libc::SIGCHLD,
            libc::SIGALRM,
            libc::SIGPIPE,
        ] {
            assert!(
                blocked >> (signal - 1) & 1 == 1,
                "signal {signal} in {thread:?}"
            );
        }
    }

    // Its descriptors are high, close-on-exec and registered; but for the runtime's own, which a
    // front end with hooks registers.
    let ours: Vec<RawFd> = open_fds()
        .into_iter()
        .filter(|fd| fds::is_internal(*fd))
        .collect();
    assert!(ours.len() >= 12, "{ours:?}");
    for fd in &ours {
        // SAFETY: no memory is passed.
        let flags = unsafe { libc::fcntl(*fd, libc::F_GETFD) };
        assert!(flags & libc::FD_CLOEXEC != 0, "{fd} survives exec");
        assert!(*fd >= fds::floor(), "{fd} is low");
    }
    assert!(before.iter().all(|fd| !fds::is_internal(*fd)));

    // The byte is acknowledged, and probed once; then nothing wakes the threads.
    near.write(b"x").unwrap();
    far.read_exact(&mut [0]).unwrap();
    thread::sleep(Duration::from_millis(1500));
    let slept = sleeps();
    thread::sleep(Duration::from_secs(2));
    assert_eq!(sleeps() - slept, 0, "woken although idle");

    a_forked_child_can_start_anew(&client, &server, &ours);

    // The child has not affected the parent's agent.
    near.kill(common::Kill::Fin);
    near.write(b"y").unwrap();
    far.read_exact(&mut [0]).unwrap();
}

fn a_forked_child_can_start_anew(client: &Agent, server: &Server, ours: &[RawFd]) {
    // SAFETY: the child only calls what may be called there, and what works with a heap that the
    // C library keeps usable after a fork; it leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        Agent::after_fork_child();
        let verdict = match () {
            () if ours.iter().any(|fd| is_open(*fd)) => 1,
            () if client.flush(Duration::from_millis(10)) => 2,
            () => {
                client.unlisten(server.addr());
                client.drain_exit(Duration::from_secs(5));
                match Agent::start(Config::default()) {
                    Ok(fresh) if fresh.flush(Duration::from_secs(5)) => 0,
                    Ok(_) => 3,
                    Err(_) => 4,
                }
            }
        };
        // SAFETY: ends the child at once, without destructors.
        unsafe { libc::_exit(verdict) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for writes; the child is ours.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0);
}
