//! A program that links the library, and also runs under the preload library. Each test runs in a process of its own.

mod common;
#[path = "common/under_preload.rs"]
mod under_preload;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{self, AssertUnwindSafe};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use slim::{Endpoint, Flow, Session};
use under_preload::*;

const KILLS: u64 = 20;

/// A session with a protected flow, and both ends of that flow.
struct Linked {
    near: Flow,
    far: Flow,
    endpoint: Endpoint,
    session: Session,
}

impl Linked {
    fn open() -> Self {
        let session = session();
        let endpoint = listen(&session);
        let (near, far) = pair(&session, &endpoint);
        Self {
            near,
            far,
            endpoint,
            session,
        }
    }

    /// Kills the connection, and checks that the flow survives.
    fn survive(&self, how: Kill) {
        let before = self.near.stats().resumes;
        self.near.send_all(b"before", LIMIT).unwrap();
        wait_until("killed", || kill(&self.near, how));
        self.near.send_all(b"after", LIMIT).unwrap();
        let mut got = [0; 11];
        self.far.recv_exact(&mut got, LIMIT).unwrap();
        assert_eq!(&got, b"beforeafter");
        self.far.send_all(b"back", LIMIT).unwrap();
        self.near.recv_exact(&mut got[..4], LIMIT).unwrap();
        wait_resumed(&self.session, &self.near, before);
    }

    fn close(self) {
        drop((self.near, self.far, self.endpoint));
        self.session.close(LIMIT.unwrap()).unwrap();
    }
}

/// Both ends of a connection of the standard library, which the preload library manages.
struct Plain {
    near: TcpStream,
    far: TcpStream,
}

impl Plain {
    fn open() -> Self {
        let listener = TcpListener::bind(loopback()).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let plain = Self { near, far };
        // A connection that breaks before the peers have found each other ends with its error.
        wait_until("live", || {
            let live = |line: &Line| line.kind == "live" && plain.has(line.ends);
            logged().iter().filter(|line| live(line)).count() == 2
        });
        plain
    }

    fn ends(&self) -> (SocketAddr, SocketAddr) {
        (
            self.near.local_addr().unwrap(),
            self.near.peer_addr().unwrap(),
        )
    }

    fn has(&self, ends: (SocketAddr, SocketAddr)) -> bool {
        let (one, other) = self.ends();
        ends == (one, other) || ends == (other, one)
    }

    /// Both ends of the connection that carries the stream now. The program sees the addresses of the first one; a bare system call
    /// tells those of the present one.
    fn present(&self) -> Option<(SocketAddr, SocketAddr)> {
        let local = rustix::net::getsockname(&self.near).ok()?;
        let peer = rustix::net::getpeername(&self.near).ok()??;
        Some((local.try_into().ok()?, peer.try_into().ok()?))
    }

    /// Kills the connection that carries the stream, and checks that the stream survives. A shutdown by a bare system call
    /// ([`Kill::Fin`]) is not a fault for the preload library: the program itself may have made it.
    fn survive(&mut self, how: Kill) {
        self.near.write_all(b"before").unwrap();
        if let Kill::Destroy = how {
            wait_until("killed", || {
                self.present().is_some_and(|ends| kill_ends(ends, how))
            });
        }
        self.near.write_all(b"after").unwrap();
        let mut got = [0; 11];
        self.far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"beforeafter");
        self.far.write_all(b"back").unwrap();
        self.near.read_exact(&mut got[..4]).unwrap();
    }
}

fn survive_kills(linked: &Linked, plain: &mut Plain) {
    for how in kills() {
        for _ in 0..KILLS {
            linked.survive(how);
            plain.survive(how);
        }
    }
}

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
    for ends in managed() {
        assert!(plain.has(ends), "{ends:?} is not the program's");
    }
    linked.close();
}

#[test]
fn a_program_that_uses_only_the_library_gets_no_second_agent() {
    if !is_under_preload("a_program_that_uses_only_the_library_gets_no_second_agent") {
        return;
    }
    let before = descriptors();
    let linked = Linked::open();
    for how in kills() {
        (0..KILLS).for_each(|_| linked.survive(how));
    }
    assert_eq!(agent_threads(), 1);
    linked.close();
    assert_eq!(agent_threads(), 0);
    assert_eq!(descriptors(), before);
    assert_eq!(managed(), BTreeSet::new());
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
