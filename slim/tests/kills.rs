//! Connections are killed 20 times for each test and kind of fault. Every byte must arrive exactly once.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use sha2::{Digest, Sha256};
use slim::{Flow, Session, TransferError, Update};

const KILLS: u64 = 20;

/// Kills the present connection. Waits until there is one: the last one may be dead already without any call having met that.
fn kill_now(session: &Session, flow: &Flow, how: Kill) {
    wait_until("killed", || {
        session.progress(&mut Vec::new());
        kill(flow, how)
    });
}

#[test]
fn echoed_bytes_survive_kills() {
    for how in kills() {
        let session = session();
        let endpoint = listen(&session);
        let (near, far) = pair(&session, &endpoint);
        let server = std::thread::spawn(move || {
            let mut buf = [0; 1000];
            loop {
                match far.recv(&mut buf, LIMIT).unwrap() {
                    0 => return far.stats(),
                    n => far.send_all(&buf[..n], LIMIT).unwrap(),
                }
            }
        });
        let mut rng = fastrand::Rng::with_seed(1);
        let mut got = vec![0; 3000];
        for n in 1..=KILLS {
            let sent: Vec<u8> = (0..3000).map(|_| rng.u8(..)).collect();
            near.send_all(&sent[..1000], LIMIT).unwrap();
            let before = near.stats().resumes;
            kill_now(&session, &near, how);
            near.send_all(&sent[1000..], LIMIT).unwrap();
            near.recv_exact(&mut got, LIMIT).unwrap();
            assert!(got == sent, "{how:?} {n}");
            wait_resumed(&session, &near, before);
        }
        near.finish().unwrap();
        assert_eq!(near.recv(&mut got, LIMIT), Ok(0));
        let far = server.join().unwrap();
        let near_stats = near.stats();
        println!("{how:?}: {near_stats:?}");
        assert_eq!((near_stats.sent, near_stats.received), (60_000, 60_000));
        assert!(far.resumes >= KILLS && near_stats.resumes >= KILLS);
        assert!(near_stats.suspended > Duration::ZERO);
    }
}

#[test]
fn a_connection_killed_before_it_is_accepted_is_resumed() {
    for how in kills() {
        let session = session();
        let endpoint = listen(&session);
        for n in 1..=KILLS {
            let near = session.connect(endpoint.local_addr(), LIMIT).unwrap();
            near.send_all(b"first", LIMIT).unwrap();
            kill_now(&session, &near, how);
            let far = endpoint.accept(LIMIT).unwrap();
            near.send_all(b" and second", LIMIT).unwrap();
            let mut got = [0; 16];
            far.recv_exact(&mut got, LIMIT).unwrap();
            assert_eq!(&got, b"first and second", "{how:?} {n}");
        }
    }
}

/// One end of a flow, with the numbers of bytes sent and received.
struct End {
    flow: Flow,
    sent: u64,
    received: u64,
}

/// Byte `n` of the stream of the flow with this index.
fn byte(index: usize, n: u64) -> u8 {
    (n.wrapping_mul(31).wrapping_add(index as u64) >> 3) as u8
}

impl End {
    fn send(&mut self, index: usize, total: u64) {
        let mut buf = [0; 4096];
        while self.sent < total {
            let n = buf.len().min((total - self.sent) as usize);
            for (at, b) in (self.sent..).zip(&mut buf[..n]) {
                *b = byte(index, at);
            }
            match self.flow.try_send(&buf[..n]) {
                Ok(n) => self.sent += n as u64,
                Err(TransferError::WouldBlock) => return,
                Err(e) => panic!("flow {index}: {e}"),
            }
        }
    }

    fn receive(&mut self, index: usize) {
        let mut buf = [0; 4096];
        loop {
            match self.flow.try_recv(&mut buf) {
                Ok(0) => panic!("flow {index} has ended"),
                Ok(n) => {
                    for (at, b) in (self.received..).zip(&buf[..n]) {
                        assert_eq!(*b, byte(index, at), "flow {index}, byte {at}");
                    }
                    self.received += n as u64;
                }
                Err(TransferError::WouldBlock) => return,
                Err(e) => panic!("flow {index}: {e}"),
            }
        }
    }
}

#[test]
fn many_polled_flows_survive_kills() {
    const FLOWS: usize = 32;
    const TOTAL: u64 = 2 << 20;
    for how in kills() {
        let session = session();
        let endpoint = listen(&session);
        let mut ends = Vec::new();
        for _ in 0..FLOWS {
            let (near, far) = pair(&session, &endpoint);
            ends.extend([near, far].map(|flow| End {
                flow,
                sent: 0,
                received: 0,
            }));
        }
        let by_id: std::collections::HashMap<u64, usize> = ends
            .iter()
            .enumerate()
            .map(|(n, e)| (e.flow.id(), n))
            .collect();
        let mut rng = fastrand::Rng::with_seed(2);
        let all = FLOWS as u64 * 2 * TOTAL;
        let (mut updates, mut killed) = (Vec::<Update>::new(), 0);
        let done = |ends: &[End]| ends.iter().map(|end| end.received).sum::<u64>();
        while done(&ends) < all {
            updates.clear();
            let progress = session.wait(&mut updates, LIMIT);
            assert!(progress, "{how:?}: stuck at {} of {all}", done(&ends));
            for update in &updates {
                // Spread the kills over the whole transfer.
                if done(&ends) >= killed * all / (KILLS + 1) && killed < KILLS {
                    let victim = rng.usize(..ends.len());
                    killed += u64::from(kill(&ends[victim].flow, how));
                }
                let Some(n) = by_id.get(&update.id).copied() else {
                    continue;
                };
                if update.readable {
                    ends[n].receive(n / 2);
                }
                if update.writable {
                    ends[n].send(n / 2, TOTAL);
                }
            }
        }
        assert_eq!(killed, KILLS);
        let resumes: u64 = ends.iter().map(|end| end.flow.stats().resumes).sum();
        println!("{how:?}: {resumes} resumes of {killed} kills, at two ends");
        assert!(resumes >= KILLS, "{how:?}: {resumes}");
    }
}

/// Sends `total` pseudo-random bytes. Returns their checksum.
fn send_pattern(flow: &Flow, total: usize) -> [u8; 32] {
    let (mut rng, mut sum) = (fastrand::Rng::with_seed(3), Sha256::new());
    let mut block = vec![0; 256 << 10];
    for _ in 0..total / block.len() {
        rng.fill(&mut block);
        sum.update(&block);
        flow.send_all(&block, LIMIT).unwrap();
    }
    flow.finish().unwrap();
    sum.finalize().into()
}

/// Receives to the end. Waits for a while when it has received as much as is `allowed`: not for ever, because a replay that is larger than
/// the kernels' buffers ends only when the receiver reads, and the next kill waits for that end.
fn receive_all(flow: &Flow, allowed: &AtomicU64) -> (usize, [u8; 32]) {
    let (mut sum, mut buf, mut total) = (Sha256::new(), vec![0; 64 << 10], 0);
    loop {
        let begun = Instant::now();
        while total as u64 >= allowed.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
            if begun.elapsed() > Duration::from_millis(500) {
                allowed.fetch_add(4 << 20, Ordering::SeqCst);
            }
        }
        match flow.recv(&mut buf, LIMIT).unwrap() {
            0 => return (total, sum.finalize().into()),
            n => {
                sum.update(&buf[..n]);
                total += n;
            }
        }
    }
}

fn transfer(session: &Session, how: Kill) {
    const TOTAL: usize = 64 << 20;
    let endpoint = listen(session);
    let (near, far) = pair(session, &endpoint);
    let step = TOTAL as u64 / (KILLS + 1);
    let allowed = AtomicU64::new(step);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_all(&far, &allowed));
        let sending = scope.spawn(|| send_pattern(&near, TOTAL));
        // Kill at both ends in turn. The receiver waits for each kill, so bytes are in flight.
        let killing = scope.spawn(|| {
            for n in 1..=KILLS {
                wait_until("got so far", || far.stats().received >= n * step);
                // Once when the pipe is full: the sender's kernel has bytes that the receiver's has no room for.
                if n == KILLS / 2 {
                    let (mut before, mut sent, mut held) = (0, 1, 0);
                    while sent != before || held < 128 << 10 {
                        std::thread::sleep(Duration::from_millis(50));
                        (before, sent) = (sent, near.stats().sent);
                        held = sent - far.stats().received;
                    }
                }
                kill_now(session, [&near, &far][n as usize % 2], how);
                allowed.store(
                    if n == KILLS { u64::MAX } else { (n + 1) * step },
                    Ordering::SeqCst,
                );
            }
        });
        let sent = sending.join().unwrap();
        assert_eq!(receiving.join().unwrap(), (TOTAL, sent), "{how:?}");
        killing.join().unwrap();
    });
    let stats = near.stats();
    println!("{how:?}: {stats:?}");
    assert!(stats.resumes > 0, "{how:?}: {stats:?}");
    // `Kill::Fin` ends the connection in an orderly way, which may deliver everything, so that nothing is replayed.
    let replays = matches!(how, Kill::Destroy);
    assert!(stats.replayed > 0 || !replays, "{how:?}: {stats:?}");
    assert_eq!(stats.sent, TOTAL as u64);
}

#[test]
fn a_large_transfer_survives_kills() {
    for how in kills() {
        transfer(&session(), how);
    }
}

#[test]
fn progress_replaces_an_idle_connection_that_dies() {
    for how in kills() {
        let session = session();
        let endpoint = listen(&session);
        let (near, far) = pair(&session, &endpoint);
        for n in 1..=KILLS {
            kill_now(&session, &near, how);
            let begun = Instant::now();
            while near.stats().resumes < n || far.stats().resumes < n {
                session.wait(&mut Vec::new(), Some(Duration::from_millis(100)));
                assert!(begun.elapsed() < LIMIT.unwrap(), "{how:?} {n}");
            }
        }
        near.send_all(b"x", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
    }
}
