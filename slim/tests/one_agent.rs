//! A session under the preload library uses the preload library's agent, if both have the same settings. Each test runs in a process of
//! its own.

#[path = "common/beside.rs"]
mod beside;
mod common;
#[path = "common/under_preload.rs"]
mod under_preload;

use std::fs;
use std::io::{PipeWriter, Read, Write, pipe};
use std::mem;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};

use beside::*;
use common::*;
use slim::{Session, StreamState, TransferError};
use under_preload::*;

const IPV6_LOOPBACK: &str = "00000000000000000000000001000000";

/// Number of control sockets of this process. Each agent has one at each loopback address; those of listeners are at the listener's
/// address, which is one of IPv4 in these tests. `None` if the host has no IPv6.
fn control_sockets() -> Option<usize> {
    let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let own = files.filter_map(|fd| Some(fs::metadata(fd.path()).ok()?.ino()));
    let own: Vec<u64> = own.collect();
    fs::read_to_string("/proc/self/net/if_inet6").ok()?;
    let table = fs::read_to_string("/proc/self/net/udp6").ok()?;
    let is_one = |line: &&str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        fields[1].starts_with(IPV6_LOOPBACK) && own.contains(&fields[9].parse().unwrap())
    };
    Some(table.lines().skip(1).filter(is_one).count())
}

fn assert_agents(count: usize) {
    assert_eq!(agent_threads(), count);
    if let Some(sockets) = control_sockets() {
        assert_eq!(sockets, count, "control sockets");
    }
}

/// Waits at most until the threads that are ending have ended.
fn wait_for_agents(count: usize) {
    wait_until("ended", || agent_threads() == count);
    assert_agents(count);
}

#[test]
fn a_session_uses_the_agent_that_the_preload_library_has() {
    if !is_under_preload("a_session_uses_the_agent_that_the_preload_library_has") {
        return;
    }
    let mut plain = Plain::open();
    assert_agents(1);
    let linked = Linked::open();
    assert_agents(1);
    survive_kills(&linked, &mut plain);
    assert_agents(1);
    // Both are in the log of the process, each connection with two ends.
    let ends = logged().into_iter().filter(|line| line.kind == "live");
    assert_eq!(ends.count(), 4);
    linked.close();
    plain.survive(Kill::Fin);
    assert_agents(1);
}

#[test]
fn a_session_starts_the_agent_of_the_preload_library() {
    if !is_under_preload("a_session_starts_the_agent_of_the_preload_library") {
        return;
    }
    let linked = Linked::open();
    assert_agents(1);
    let mut plain = Plain::open();
    assert_agents(1);
    survive_kills(&linked, &mut plain);
    linked.close();
    assert_agents(1);
}

#[test]
fn a_session_with_other_settings_has_an_agent_of_its_own() {
    if !is_under_preload("a_session_with_other_settings_has_an_agent_of_its_own") {
        return;
    }
    let mut plain = Plain::open();
    let key = [("SLIM_JOB_KEY", "a key of sixteen bytes")];
    for vars in [&[("SLIM_ATTEMPTS", "2")], &key] {
        let linked = Linked::open_in(session_with(vars));
        assert_agents(2);
        survive_kills(&linked, &mut plain);
        linked.close();
        wait_for_agents(1);
    }
    let linked = Linked::open_in(Session::open(options(&[]).without_thread()).unwrap());
    assert_eq!(agent_threads(), 1);
    linked.close();
}

#[test]
fn a_preload_library_that_offers_no_agent_leaves_sessions_theirs() {
    if !is_under_older_preload("a_preload_library_that_offers_no_agent_leaves_sessions_theirs") {
        return;
    }
    let mut plain = Plain::open();
    let linked = Linked::open();
    assert_agents(2);
    survive_kills(&linked, &mut plain);
    linked.close();
    wait_for_agents(1);
}

#[test]
fn flows_by_blob_and_posts_use_it_too() {
    if !is_under_preload("flows_by_blob_and_posts_use_it_too") {
        return;
    }
    let session = session();
    let endpoint = listen(&session);
    let blob = endpoint.blob().unwrap();
    let near = std::thread::scope(|scope| {
        let connect = scope.spawn(|| session.connect_blob(&blob, LIMIT).unwrap());
        let far = endpoint.accept(LIMIT).unwrap();
        (connect.join().unwrap(), far)
    });
    let (near, far) = near;
    assert_agents(1);
    let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 251) as u8).collect();
    for how in kills() {
        for _ in 0..KILLS {
            let before = near.stats().resumes;
            near.post(bytes.clone().into()).unwrap();
            kill(&near, how);
            let mut got = vec![0; bytes.len()];
            std::thread::scope(|scope| {
                let pump = scope.spawn(|| far.recv_exact(&mut got, LIMIT).unwrap());
                while !pump.is_finished() {
                    session.wait(&mut Vec::new(), Some(Duration::from_millis(1)));
                }
                pump.join().unwrap();
            });
            assert!(got == bytes);
            near.send_all(b"x", LIMIT).unwrap();
            far.recv_exact(&mut [0], LIMIT).unwrap();
            wait_resumed(&session, &near, before);
        }
    }
    drop((near, far, endpoint));
    session.close(LIMIT.unwrap()).unwrap();
}

#[test]
fn sessions_that_come_and_go_leave_nothing_behind() {
    if !is_under_preload("sessions_that_come_and_go_leave_nothing_behind") {
        return;
    }
    let mut plain = Plain::open();
    let open = || {
        let linked = Linked::open();
        linked.near.send_all(b"bytes", LIMIT).unwrap();
        linked.far.recv_exact(&mut [0; 5], LIMIT).unwrap();
        linked
    };
    open().close();
    // The preload library keeps a pair of sockets that it makes when a connection is away for longer.
    let before = descriptors().len() + 2;
    for n in 0..100 {
        let linked = open();
        if n % 10 == 0 {
            plain.survive(Kill::Destroy);
        }
        match n % 3 {
            0 => linked.close(),
            1 => linked.session.close(LIMIT.unwrap()).unwrap(),
            // Undelivered bytes are discarded.
            _ => {
                kill(&linked.near, Kill::Fin);
                linked.near.send_all(b"more", LIMIT).unwrap();
                linked.session.abort(LIMIT.unwrap()).unwrap();
            }
        }
    }
    plain.survive(Kill::Destroy);
    assert_agents(1);
    // The agent closes control sockets of listeners, and connections that lost a race to resume a flow, a moment later.
    wait_until("closed", || descriptors().len() <= before);
}

/// Runs in a forked child. Returns its exit code.
fn child(parents: Linked, session_first: bool) -> i32 {
    drop(parents);
    let (linked, mut plain) = match session_first {
        true => {
            let linked = Linked::open();
            (linked, Plain::open())
        }
        false => {
            let plain = Plain::open();
            (Linked::open(), plain)
        }
    };
    survive_kills(&linked, &mut plain);
    assert_agents(1);
    linked.close();
    assert_agents(1);
    0
}

#[test]
fn a_forked_child_has_one_agent_too() {
    if !is_under_preload("a_forked_child_has_one_agent_too") {
        return;
    }
    let mut plain = Plain::open();
    for session_first in [true, false] {
        let (linked, parents) = (Linked::open(), Linked::open());
        // SAFETY: the child goes on with this thread alone. The others, the agent's and the test's main thread, which waits, hold no
        // lock that it needs.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = panic::catch_unwind(AssertUnwindSafe(|| child(parents, session_first)));
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(code.unwrap_or(2)) };
        }
        linked.survive(Kill::Fin);
        let mut status = -1;
        // SAFETY: the status is written to a variable of ours.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(status, 0, "the child has failed");
        linked.survive(Kill::Fin);
        parents.survive(Kill::Fin);
        plain.survive(Kill::Fin);
        assert_agents(1);
        parents.close();
        linked.close();
    }
}

/// Runs in a forked child: closes a flow whose bytes have gone down with its connection, and ends the process without closing the session.
/// Writes the number of bytes to the pipe.
fn end_with_undelivered_bytes(to: SocketAddr, mut pipe: PipeWriter) -> ! {
    let session = session();
    let near = session.connect(to, LIMIT).unwrap();
    assert_eq!(near.wait_negotiated(LIMIT), StreamState::Protected);
    let (mut sent, mut last) = (0, Instant::now());
    // Until both kernels are full.
    while last.elapsed() < Duration::from_millis(100) {
        if let Ok(n) = near.try_send(&pattern(sent, 1 << 16)) {
            (sent, last) = (sent + n, Instant::now());
        }
    }
    assert!(kill(&near, Kill::Destroy));
    drop(near);
    // The peer's program begins to receive.
    pipe.write_all(&sent.to_ne_bytes()).unwrap();
    mem::forget(session);
    // SAFETY: the process has no other thread that uses what the exit handlers free.
    unsafe { libc::exit(0) };
}

/// The bytes of a stream from this position on.
fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|n| (n % 251) as u8).collect()
}

#[test]
fn a_process_that_ends_delivers_closed_flows() {
    if kills().len() < 2 || !is_under_preload("a_process_that_ends_delivers_closed_flows") {
        return;
    }
    let session = session();
    let endpoint = listen(&session);
    for _ in 0..5 {
        let to = endpoint.local_addr();
        let (mut count, pipe) = pipe().unwrap();
        // SAFETY: as in the test above.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let ends = || end_with_undelivered_bytes(to, pipe);
            let _ = panic::catch_unwind(AssertUnwindSafe(ends));
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(2) };
        }
        drop(pipe);
        let far = endpoint.accept(LIMIT).unwrap();
        let mut sent = [0; size_of::<usize>()];
        count.read_exact(&mut sent).unwrap();
        let mut got = vec![0; usize::from_ne_bytes(sent)];
        far.recv_exact(&mut got, LIMIT).unwrap();
        assert!(got == pattern(0, got.len()));
        assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
        assert_eq!(wait_for_child(pid), Some(0));
    }
    drop(endpoint);
    session.close(LIMIT.unwrap()).unwrap();
}

/// Installs a system call filter that forbids nothing. The preload library steps back before.
fn install_filter() {
    let mut allow = libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    };
    let filter = libc::sock_fprog {
        len: 1,
        filter: &raw mut allow,
    };
    // SAFETY: the filter is valid for the time of the calls.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter, 0, 0)
    };
    assert_eq!(installed, 0);
}

#[test]
fn flows_are_plain_when_the_preload_library_steps_back() {
    if !is_under_preload("flows_are_plain_when_the_preload_library_steps_back") {
        return;
    }
    let mut plain = Plain::open();
    let linked = Linked::open();
    linked.survive(Kill::Fin);
    linked.near.send_all(b"bytes", LIMIT).unwrap();
    let begun = Instant::now();
    install_filter();
    assert!(begun.elapsed() < Duration::from_secs(4), "{begun:?}");
    assert_eq!(agent_threads(), 0);
    for flow in [&linked.near, &linked.far] {
        assert_eq!(flow.state(), StreamState::Plain);
    }
    let mut got = [0; 10];
    linked.near.send_all(b"again", LIMIT).unwrap();
    linked.far.recv_exact(&mut got, LIMIT).unwrap();
    assert_eq!(&got, b"bytesagain");
    plain.near.write_all(b"plain").unwrap();
    plain.far.read_exact(&mut got[..5]).unwrap();
    // New flows of the session are plain from the beginning.
    let near = linked
        .session
        .connect(linked.endpoint.local_addr(), LIMIT)
        .unwrap();
    let far = linked.endpoint.accept(LIMIT).unwrap();
    for flow in [&near, &far] {
        assert_eq!(flow.wait_negotiated(LIMIT), StreamState::Plain);
    }
    near.send_all(b"plain", LIMIT).unwrap();
    far.recv_exact(&mut got[..5], LIMIT).unwrap();
    // They fail with the error of their connection.
    assert!(kill(&linked.near, Kill::Destroy) || kills().len() == 1);
    if kills().len() == 2 {
        let lost = linked.far.recv(&mut got, LIMIT);
        assert_eq!(lost, Err(TransferError::Lost(libc::ECONNRESET)));
    }
    // A new session has an agent of its own.
    let other = Linked::open();
    assert_eq!(agent_threads(), 1);
    other.survive(Kill::Fin);
    other.close();
    drop((near, far));
    linked.close();
    assert_eq!(agent_threads(), 0);
}
