//! Posted sends: in order, not copied, completed when the peer's kernel has acknowledged them, and replayed after killed connections.

mod common;

use std::io::Read;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use sha2::{Digest, Sha256};
use slim::{SessionError, StreamState, TransferError};

/// The owner of a posted buffer. A shared counter holds the number of owners that are alive.
struct Lent(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

fn lend(data: Vec<u8>, left: &Arc<AtomicUsize>) -> Bytes {
    left.fetch_add(1, Ordering::SeqCst);
    Bytes::from_owner(Lent(data, left.clone()))
}

#[test]
fn posts_are_completed_only_when_the_peer_s_kernel_has_them() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let left = Arc::new(AtomicUsize::new(0));
    let block = 1 << 20;
    for n in 0..16 {
        assert_eq!(near.post(lend(vec![n; block], &left)), Ok(u64::from(n) + 1));
    }
    // The posts exceed the kernels' buffers, and the peer does not receive yet. No buffer is copied.
    wait_until("steady", || {
        session.progress(&mut Vec::new());
        let before = near.completed();
        std::thread::sleep(Duration::from_millis(20));
        session.progress(&mut Vec::new());
        near.completed() == before
    });
    let completed = near.completed() as usize;
    assert!(completed < 16, "{completed}");
    // The agent may have released more buffers, which were acknowledged meanwhile.
    let held = left.load(Ordering::SeqCst);
    assert!((1..=16 - completed).contains(&held), "{held}, {completed}");
    // Other sends must wait for the posts.
    assert_eq!(near.try_send(b"tail"), Err(TransferError::WouldBlock));
    let reader = std::thread::spawn(move || {
        let mut got = vec![0; block];
        for n in 0..16 {
            far.recv_exact(&mut got, LIMIT).unwrap();
            assert!(got.iter().all(|b| *b == n));
        }
        far.recv_exact(&mut got[..4], LIMIT).unwrap();
        assert_eq!(&got[..4], b"tail");
        assert_eq!(far.recv(&mut got, LIMIT), Ok(0));
        far
    });
    let (mut updates, mut writable, mut told) = (Vec::new(), false, completed);
    while told < 16 || !writable {
        updates.clear();
        assert!(
            session.wait(&mut updates, LIMIT),
            "nothing to do after {told}"
        );
        for update in updates.iter().filter(|u| u.id == near.id()) {
            writable |= update.writable;
            if update.completed {
                assert!(near.completed() as usize > told);
                told = near.completed() as usize;
            }
        }
    }
    assert_eq!(left.load(Ordering::SeqCst), 0);
    near.send_all(b"tail", LIMIT).unwrap();
    near.close();
    drop(reader.join().unwrap());
}

#[test]
fn posts_of_all_sizes_arrive_although_connections_are_killed() {
    for how in kills() {
        let session = session();
        let endpoint = listen(&session);
        let (near, far) = pair(&session, &endpoint);
        let left = Arc::new(AtomicUsize::new(0));
        let mut rng = fastrand::Rng::with_seed(7);
        let (mut sum, mut total) = (Sha256::new(), 0_u64);
        let paused = Arc::new(AtomicBool::new(false));
        let waits = paused.clone();
        let reader = std::thread::spawn(move || {
            let (mut sum, mut buf) = (Sha256::new(), vec![0; 50_000]);
            loop {
                // Not for ever: the kill may wait for the end of a replay, which waits for this reader.
                let begun = Instant::now();
                let limit = Duration::from_millis(500);
                while waits.load(Ordering::SeqCst) && begun.elapsed() < limit {
                    std::thread::sleep(Duration::from_millis(1));
                }
                match far.recv(&mut buf, LIMIT).unwrap() {
                    0 => return (sum.finalize(), far),
                    n => sum.update(&buf[..n]),
                }
            }
        });
        for n in 0..400 {
            // One buffer is more than both kernels hold while the reader waits: the next kill loses a part of it.
            let len = match n % 4 {
                _ if n == 210 => 32 << 20,
                0 => rng.usize(1..100),
                1 => rng.usize(900..1200),
                2 => rng.usize(1..70_000),
                _ => rng.usize(1..400_000),
            };
            let data: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
            sum.update(&data);
            total += len as u64;
            paused.store(n == 210, Ordering::SeqCst);
            near.post(lend(data, &left)).unwrap();
            if n % 20 == 10 {
                wait_until("killed", || {
                    session.progress(&mut Vec::new());
                    kill(&near, how)
                });
            }
            if n % 50 == 49 {
                // A copying send between the posts.
                near.send_all(b"copied", LIMIT).unwrap();
                sum.update(b"copied");
                total += 6;
            }
            session.progress(&mut Vec::new());
        }
        near.finish().unwrap();
        assert_eq!(near.post(Bytes::new()), Err(TransferError::ShutDown));
        near.wait_completed(LIMIT).unwrap();
        assert_eq!(near.completed(), 400);
        let (got, far) = reader.join().unwrap();
        assert!(got == sum.finalize(), "{how:?}");
        let stats = near.stats();
        println!("{how:?}: {stats:?}");
        assert_eq!(stats.sent, total);
        assert!(stats.resumes > 10, "{stats:?}");
        // `Kill::Fin` ends the connection in an orderly way, which may deliver everything, so that nothing is replayed.
        let replays = matches!(how, Kill::Destroy);
        assert!(stats.replayed > 0 || !replays, "{stats:?}");
        assert_eq!(left.load(Ordering::SeqCst), 0);
        drop(far);
    }
}

#[test]
fn posts_are_sent_before_the_flow_and_the_session_close() {
    for _ in 0..10 {
        let (session, theirs) = (session(), session());
        let endpoint = listen(&theirs);
        let (near, far) = pair(&session, &endpoint);
        let sent: Vec<u8> = (0..20 << 20).map(|n: u32| (n % 251) as u8).collect();
        let all = Bytes::from(sent.clone());
        for at in (0..all.len()).step_by(1 << 20) {
            near.post(all.slice(at..at + (1 << 20))).unwrap();
        }
        near.close();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; 20 << 20];
            far.recv_exact(&mut got, LIMIT).unwrap();
            assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
            got
        });
        session.close(Duration::from_secs(30)).unwrap();
        assert!(reader.join().unwrap() == sent);
        // All bytes are delivered. The agent, which the other session still uses, releases the buffer a moment later.
        wait_until("released", || all.is_unique());
    }
}

#[test]
fn posts_to_a_plain_peer_are_completed_too() {
    let session = session_with(&[("SLIM_HELLO_TIMEOUT", "0.1")]);
    let listener = TcpListener::bind(loopback()).unwrap();
    let near = session
        .connect(listener.local_addr().unwrap(), LIMIT)
        .unwrap();
    let mut far = listener.accept().unwrap().0;
    near.post(vec![1; 5000].into()).unwrap();
    assert_eq!(near.wait_negotiated(LIMIT), StreamState::Plain);
    near.post(vec![2; 5000].into()).unwrap();
    near.wait_completed(LIMIT).unwrap();
    let mut got = vec![0; 10_000];
    far.read_exact(&mut got).unwrap();
    assert!(got[..5000] == [1; 5000] && got[5000..] == [2; 5000]);
    assert_eq!(near.completed(), 2);
}

#[test]
fn posts_of_a_failed_flow_are_released_and_not_completed() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let left = Arc::new(AtomicUsize::new(0));
    near.post(lend(vec![0; 32 << 20], &left)).unwrap();
    near.post(lend(vec![0; 32 << 20], &left)).unwrap();
    far.reset();
    let begun = Instant::now();
    let lost = near.wait_completed(LIMIT).unwrap_err();
    assert!(matches!(lost, TransferError::Lost(_)), "{lost:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(near.completed(), 0);
    let again = near.post(Bytes::from_static(b"x"));
    assert!(matches!(again, Err(TransferError::Lost(_))), "{again:?}");
    near.close();
    session.close(Duration::from_secs(10)).unwrap();
    wait_until("released", || left.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_program_that_only_polls_is_woken_for_a_completion() {
    let session = session();
    let endpoint = listen(&session);
    let (near, _far) = pair(&session, &endpoint);
    let mut updates = Vec::new();
    session.progress(&mut updates);
    near.post(vec![1; 4000].into()).unwrap();
    let begun = Instant::now();
    while near.completed() == 0 {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&session);
        assert!(slim_sys::poll(fd, libc::POLLIN, LIMIT) != 0);
        session.progress(&mut updates);
    }
    println!("completed after {:?}", begun.elapsed());
    assert!(updates.iter().any(|u| u.id == near.id() && u.completed));
}

/// Posts that a session could not send within its limit end in an error at both ends, never in an orderly end before them.
#[test]
fn posts_that_are_not_sent_when_a_session_closes_reset_their_flow() {
    let (session, theirs) = (session(), session());
    let endpoint = listen(&theirs);
    let (near, far) = pair(&session, &endpoint);
    let all = Bytes::from(vec![7; 64 << 20]);
    for at in (0..all.len()).step_by(1 << 20) {
        near.post(all.slice(at..at + (1 << 20))).unwrap();
    }
    let closed = session.close(Duration::from_millis(300));
    assert!(matches!(closed, Err(SessionError::TimedOut)), "{closed:?}");
    let (mut got, mut buf) = (0, vec![0; 1 << 20]);
    let end = loop {
        match far.recv(&mut buf, LIMIT) {
            Ok(n @ 1..) => got += n,
            end => break end,
        }
    };
    assert!(end.is_err() && got < all.len(), "{end:?} after {got}");
    drop(near);
}

/// The flows of a closed session keep no posted buffers, even if their bytes are not delivered, and another session uses the agent.
#[test]
fn a_closed_session_keeps_no_posted_buffers() {
    let (session, other) = (session(), session());
    let endpoint = listen(&other);
    let (near, far) = pair(&session, &endpoint);
    let (dropped, unread) = pair(&session, &endpoint);
    let left = Arc::new(AtomicUsize::new(0));
    for flow in [&near, &dropped] {
        for _ in 0..2 {
            flow.post(lend(vec![7; 8 << 20], &left)).unwrap();
        }
    }
    drop(dropped);
    let closed = session.close(Duration::from_millis(200));
    assert!(matches!(closed, Err(SessionError::TimedOut)), "{closed:?}");
    assert_eq!(left.load(Ordering::SeqCst), 0);
    assert_eq!(near.try_send(b"more"), Err(TransferError::Closed));
    drop((far, unread));
}

/// An aborted session resets its flows: the peer must not take the end for an orderly one.
#[test]
fn an_aborted_session_resets_its_flows() {
    let (session, other) = (session(), session());
    let endpoint = listen(&other);
    let (near, far) = pair(&session, &endpoint);
    let left = Arc::new(AtomicUsize::new(0));
    near.post(lend(vec![7; 8 << 20], &left)).unwrap();
    session.abort(Duration::from_secs(10)).unwrap();
    assert_eq!(left.load(Ordering::SeqCst), 0);
    let mut buf = vec![0; 1 << 20];
    let end = loop {
        match far.recv(&mut buf, LIMIT) {
            Ok(1..) => {}
            end => break end,
        }
    };
    assert_eq!(end, Err(TransferError::Lost(libc::ECONNRESET)));
}
