//! Sessions without an agent thread. Tests that need a process with one thread run in a process of their own.

mod common;

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use slim::{Endpoint, Flow, Session, StreamState, TransferError, Update};

const KILLS: u64 = 20;

fn driven() -> Session {
    Session::open(options(&[]).without_thread()).unwrap()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Runs `f` in a process with one thread. `test` is the name of the test that calls this.
fn alone(test: &str, f: impl FnOnce()) {
    if runs_alone_elsewhere(test) {
        return;
    }
    // SAFETY: the child goes on with this thread alone. The only other one, which waits for this test, holds no lock.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        assert_eq!(threads(), 1);
        let code = panic::catch_unwind(AssertUnwindSafe(f)).map_or(1, |()| 0);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: the status is written to a variable of ours.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
}

/// Waits for the session's descriptor, and takes the updates. The descriptor must become readable within the limit.
fn poll(session: &Session, updates: &mut Vec<Update>) {
    let fd = session.descriptor().as_raw_fd();
    let ready = slim_sys::poll(fd, libc::POLLIN, Some(Duration::from_secs(20)));
    assert_ne!(ready, 0, "the descriptor does not become readable");
    updates.clear();
    session.progress(updates);
}

/// Polls until `done` returns true.
fn poll_until(session: &Session, mut done: impl FnMut(&[Update]) -> bool) {
    let begun = Instant::now();
    let mut updates = Vec::new();
    while !done(&updates) {
        poll(session, &mut updates);
        assert!(begun.elapsed() < LIMIT.unwrap());
    }
}

/// Both ends of a protected flow, opened without blocking.
fn polled_pair(session: &Session, endpoint: &Endpoint) -> (Flow, Flow) {
    let near = session.try_connect(endpoint.local_addr()).unwrap();
    let mut far = None;
    poll_until(session, |_| {
        far = far.take().or_else(|| endpoint.try_accept().ok());
        let protected = |flow: &Flow| flow.state() == StreamState::Protected;
        protected(&near) && far.as_ref().is_some_and(protected)
    });
    (near, far.unwrap())
}

/// One direction of a flow: bytes that are waiting to be sent, and the number of bytes received.
#[derive(Default)]
struct Way {
    queue: VecDeque<u8>,
    received: u64,
}

impl Way {
    fn send(&mut self, flow: &Flow) {
        while !self.queue.is_empty() {
            match flow.try_send(self.queue.as_slices().0) {
                Ok(n) => drop(self.queue.drain(..n)),
                Err(TransferError::WouldBlock) => return,
                Err(e) => panic!("{e}"),
            }
        }
    }

    /// Receives what is available, until the number of received bytes is at least `most`.
    fn receive(&mut self, flow: &Flow, most: u64, mut f: impl FnMut(&[u8])) {
        let mut buf = [0; 16 << 10];
        while self.received < most {
            match flow.try_recv(&mut buf) {
                Ok(0) => panic!("the flow has ended"),
                Ok(n) => {
                    self.received += n as u64;
                    f(&buf[..n]);
                }
                Err(TransferError::WouldBlock) => return,
                Err(e) => panic!("{e}"),
            }
        }
    }
}

/// Byte `n` of a stream.
fn byte(n: u64) -> u8 {
    (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Kills the connection as soon as the flow has one.
fn kill_polled(session: &Session, flow: &Flow, how: Kill) {
    poll_until_or_now(session, || kill(flow, how));
}

/// As [`poll_until`], for something that the descriptor need not announce.
fn poll_until_or_now(session: &Session, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        session.wait(&mut Vec::new(), Some(Duration::from_millis(1)));
        assert!(begun.elapsed() < LIMIT.unwrap());
    }
}

#[test]
fn echoed_bytes_survive_kills_in_a_process_with_one_thread() {
    let test = "echoed_bytes_survive_kills_in_a_process_with_one_thread";
    alone(test, || kills().into_iter().for_each(echo));
}

fn echo(how: Kill) {
    let session = driven();
    let endpoint = session.listen(loopback()).unwrap();
    let (near, far) = polled_pair(&session, &endpoint);
    let (mut there, mut back) = (Way::default(), Way::default());
    let mut rng = fastrand::Rng::with_seed(4);
    for n in 1..=KILLS {
        let sent: Vec<u8> = (0..3000).map(|_| rng.u8(..)).collect();
        let mut got = Vec::new();
        there.queue.extend(&sent[..1000]);
        there.send(&near);
        kill_polled(&session, &near, how);
        there.queue.extend(&sent[1000..]);
        poll_until(&session, |_| {
            there.send(&near);
            there.receive(&far, u64::MAX, |bytes| back.queue.extend(bytes));
            back.send(&far);
            back.receive(&near, u64::MAX, |bytes| got.extend_from_slice(bytes));
            got.len() == sent.len() && near.stats().resumes >= n && far.stats().resumes >= n
        });
        assert!(got == sent, "{how:?} {n}");
        assert_eq!(threads(), 1);
    }
    println!("{how:?}: {:?}", near.stats());
    drop((near, far, endpoint));
    session.close(LIMIT.unwrap()).unwrap();
}

#[test]
fn a_large_transfer_survives_kills_in_a_process_with_one_thread() {
    let test = "a_large_transfer_survives_kills_in_a_process_with_one_thread";
    alone(test, || kills().into_iter().for_each(transfer));
}

fn transfer(how: Kill) {
    const TOTAL: u64 = 64 << 20;
    let session = driven();
    let endpoint = session.listen(loopback()).unwrap();
    let (near, far) = polled_pair(&session, &endpoint);
    let (mut way, mut put, mut killed) = (Way::default(), 0, 0);
    let (mut updates, mut held) = (Vec::new(), 0);
    while way.received < TOTAL {
        way.send(&near);
        while way.queue.is_empty() && put < TOTAL {
            way.queue.extend((put..put + (64 << 10)).map(byte));
            put += 64 << 10;
            way.send(&near);
        }
        let next = match killed {
            KILLS => u64::MAX,
            _ => (killed + 1) * TOTAL / (KILLS + 1),
        };
        let due = way.received >= next;
        if due && kill([&near, &far][killed as usize % 2], how) {
            (killed, held) = (killed + 1, 0);
            continue;
        }
        if due && held < 200 {
            // The last kill is not mended yet.
            held += 1;
            session.wait(&mut updates, Some(Duration::from_millis(1)));
            continue;
        }
        let mut at = way.received;
        // A replay that is larger than the kernels' buffers ends only if the receiver reads, and the next kill waits for that end.
        let most = if due { at + (16 << 10) } else { next };
        way.receive(&far, most, |bytes| {
            for b in bytes {
                assert_eq!(*b, byte(at), "byte {at}");
                at += 1;
            }
        });
        if way.received < next.min(TOTAL) {
            poll(&session, &mut updates);
        }
    }
    assert_eq!((killed, threads()), (KILLS, 1));
    println!("{how:?}: {:?}", near.stats());
    assert!(near.stats().resumes > 0);
    drop((near, far, endpoint));
    session.close(LIMIT.unwrap()).unwrap();
}

#[test]
fn blocking_calls_do_the_agents_work() {
    for how in kills() {
        let session = driven();
        let endpoint = listen(&session);
        let address = endpoint.local_addr();
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                let far = endpoint.accept(LIMIT).unwrap();
                let mut buf = [0; 1000];
                loop {
                    match far.recv(&mut buf, LIMIT).unwrap() {
                        0 => return far.stats(),
                        n => far.send_all(&buf[..n], LIMIT).unwrap(),
                    }
                }
            });
            let near = session.connect(address, LIMIT).unwrap();
            assert_eq!(near.wait_negotiated(LIMIT), StreamState::Protected);
            let mut got = [0; 1000];
            for n in 1..=KILLS {
                let sent = [n as u8; 1000];
                let before = near.stats().resumes;
                near.send_all(&sent[..500], LIMIT).unwrap();
                kill_polled(&session, &near, how);
                near.send_all(&sent[500..], LIMIT).unwrap();
                near.recv_exact(&mut got, LIMIT).unwrap();
                assert!(got == sent, "{how:?} {n}");
                poll_until_or_now(&session, || near.stats().resumes > before);
            }
            near.post(vec![7; 1000].into()).unwrap();
            near.wait_completed(LIMIT).unwrap();
            near.recv_exact(&mut got, LIMIT).unwrap();
            near.finish().unwrap();
            assert_eq!(near.recv(&mut got, LIMIT), Ok(0));
            assert!(server.join().unwrap().resumes >= KILLS);
        });
        drop(endpoint);
        session.close(LIMIT.unwrap()).unwrap();
    }
}

#[test]
fn several_threads_may_call_progress() {
    for how in kills() {
        let session = driven();
        let endpoint = listen(&session);
        let (near, far) = polled_pair(&session, &endpoint);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        session.wait(&mut Vec::new(), Some(Duration::from_millis(10)));
                    }
                });
            }
            let mut got = [0; 100];
            for n in 1..=KILLS {
                near.send_all(&[n as u8; 100], LIMIT).unwrap();
                wait_until("killed", || kill(&near, how));
                far.recv_exact(&mut got, LIMIT).unwrap();
                assert_eq!(got, [n as u8; 100]);
                // Done by the two threads alone.
                wait_until("resumed", || {
                    near.stats().resumes >= n && far.stats().resumes >= n
                });
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}

/// A session without a thread, and a flow to it from a session that has one.
struct Late {
    far: Flow,
    near: Flow,
    _sessions: [Session; 2],
}

impl Late {
    /// `linger` differs from that of other tests, whose threads would drive the same agent otherwise.
    fn open(linger: &str) -> Self {
        let driven = Session::open(options(&[("SLIM_LINGER", linger)]).without_thread()).unwrap();
        let own = session();
        let endpoint = listen(&driven);
        let near = own.connect(endpoint.local_addr(), LIMIT).unwrap();
        let far = endpoint.accept(LIMIT).unwrap();
        assert_eq!(far.wait_negotiated(LIMIT), StreamState::Protected);
        assert_eq!(near.wait_negotiated(LIMIT), StreamState::Protected);
        Self {
            far,
            near,
            _sessions: [driven, own],
        }
    }

    /// Kills the connection while the program does not call the session without a thread for `late`. Returns how long the resume takes
    /// from then on.
    fn kill(&self, how: Kill, late: Duration) -> Duration {
        let before = self.far.stats().resumes;
        self.near.send_all(b"before", LIMIT).unwrap();
        assert!(kill(&self.near, how));
        thread::scope(|scope| {
            // Waits for the resume.
            scope.spawn(|| self.near.send_all(b"after", LIMIT).unwrap());
            thread::sleep(late);
            let begun = Instant::now();
            let mut got = [0; 11];
            self.far.recv_exact(&mut got, LIMIT).unwrap();
            assert_eq!(&got, b"beforeafter");
            assert!(self.far.stats().resumes > before);
            begun.elapsed()
        })
    }
}

#[test]
fn a_flow_is_resumed_although_the_program_is_late() {
    for how in kills() {
        let late = Late::open("71");
        // Within the first attempt, and after it.
        for (seconds, most) in [(0.5, 1.0), (2.0, 1.0), (4.0, 12.0)] {
            let took = late.kill(how, Duration::from_secs_f64(seconds));
            println!("{how:?}: late by {seconds} s, resumed after {took:?}");
            assert!(took < Duration::from_secs_f64(most));
        }
    }
}

#[test]
fn a_peer_makes_the_flow_plain_if_nobody_answers_it() {
    let driven = Session::open(options(&[("SLIM_LINGER", "72")]).without_thread()).unwrap();
    let own = session_with(&[("SLIM_HELLO_TIMEOUT", "0.3")]);
    let endpoint = listen(&driven);
    let near = own.connect(endpoint.local_addr(), LIMIT).unwrap();
    assert_eq!(near.wait_negotiated(LIMIT), StreamState::Plain);
    let far = endpoint.accept(LIMIT).unwrap();
    assert_eq!(far.wait_negotiated(LIMIT), StreamState::Plain);
    near.send_all(b"plain", LIMIT).unwrap();
    far.recv_exact(&mut [0; 5], LIMIT).unwrap();
}

#[test]
fn a_closed_session_leaves_nothing_and_delivers_everything() {
    let test = "a_closed_session_leaves_nothing_and_delivers_everything";
    alone(test, || {
        let before = descriptors();
        for how in kills() {
            let one = driven();
            let other = Session::open(options(&[("SLIM_ATTEMPTS", "2")]).without_thread()).unwrap();
            let endpoint = listen(&one);
            let near = other.try_connect(endpoint.local_addr()).unwrap();
            let mut far = None;
            poll_until_or_now(&one, || {
                other.progress(&mut Vec::new());
                far = far.take().or_else(|| endpoint.try_accept().ok());
                let protected = |flow: &Flow| flow.state() == StreamState::Protected;
                protected(&near) && far.as_ref().is_some_and(protected)
            });
            let far = far.unwrap();
            far.try_send(b"bytes").unwrap();
            assert!(kill(&far, how));
            drop((far, endpoint));
            // Each session's agent needs the other's, and this thread drives one at a time.
            assert!(one.close(Duration::from_millis(300)).is_ok());
            drop(near);
            other.close(Duration::from_secs(10)).unwrap();
            assert_eq!(descriptors(), before, "{how:?}");
            assert_eq!(threads(), 1);
        }
    });
}

#[test]
fn a_session_without_a_thread_can_be_used_in_an_asynchronous_task() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let session = driven();
        let endpoint = listen(&session);
        let (near, far) = polled_pair(&session, &endpoint);
        for how in kills() {
            near.send_all(b"x", LIMIT).unwrap();
            kill_polled(&session, &near, how);
            far.recv_exact(&mut [0], LIMIT).unwrap();
        }
        drop((near, far, endpoint));
        session.close(LIMIT.unwrap()).unwrap();
    });
}

#[test]
fn a_flow_is_lost_if_the_program_is_later_than_all_attempts_of_the_peer() {
    for how in kills() {
        let driven = Session::open(options(&[("SLIM_LINGER", "73")]).without_thread()).unwrap();
        let own = session_with(&[("SLIM_ATTEMPTS", "1"), ("SLIM_ATTEMPT_TIMEOUTS", "0.3")]);
        let endpoint = listen(&driven);
        let near = own.connect(endpoint.local_addr(), LIMIT).unwrap();
        let far = endpoint.accept(LIMIT).unwrap();
        assert_eq!(far.wait_negotiated(LIMIT), StreamState::Protected);
        assert_eq!(near.wait_negotiated(LIMIT), StreamState::Protected);
        near.send_all(b"before", LIMIT).unwrap();
        assert!(kill(&near, how));
        let lost = near.recv(&mut [0], LIMIT);
        assert!(!matches!(lost, Ok(1..)), "{lost:?}");
        // The program gets all bytes that have arrived, and then what the kernel reports without SLIM.
        let mut got = [0; 6];
        far.recv_exact(&mut got, LIMIT).unwrap();
        assert_eq!(&got, b"before");
        let lost = far.recv(&mut got, LIMIT);
        match how {
            Kill::Destroy => assert!(matches!(lost, Err(TransferError::Lost(_))), "{lost:?}"),
            Kill::Fin => assert_eq!(lost, Ok(0)),
        }
        assert_eq!(far.stats().resumes, 0);
    }
}
