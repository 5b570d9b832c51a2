//! Everything at once: many threads on the same flows, killed connections, and sessions that close in the middle.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use common::*;
use slim::{Endpoint, Flow, Session, TransferError};

#[test]
fn many_threads_send_and_receive_on_one_flow_whose_connections_are_killed() {
    const EACH: u64 = 20_000;
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let counts: [AtomicU64; 6] = Default::default();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (near, far, counts, done, session) = (&near, &far, &counts, &done, &session);
        let senders: Vec<_> = (0..6_u8)
            .map(|value| {
                scope.spawn(move || {
                    for n in 0..EACH {
                        match value {
                            0 | 1 => near.send_all(&[value], LIMIT).unwrap(),
                            2 => {
                                while near.try_send(&[value]).is_err() {
                                    thread::yield_now();
                                }
                            }
                            _ => drop(near.post(Bytes::from(vec![value])).unwrap()),
                        }
                        // However fast the senders are, connections are killed while they send.
                        if n == EACH / 2 {
                            wait_until("killed", || near.stats().resumes > 2);
                        }
                        // Acknowledgements come slower than posts.
                        if n % 500 == 0 {
                            near.wait_completed(LIMIT).unwrap();
                        }
                    }
                })
            })
            .collect();
        for _ in 0..3 {
            scope.spawn(move || {
                let mut buf = [0; 100];
                loop {
                    match far.recv(&mut buf, LIMIT).unwrap() {
                        0 => return,
                        n => buf[..n].iter().for_each(|value| {
                            counts[usize::from(*value)].fetch_add(1, Ordering::Relaxed);
                        }),
                    }
                }
            });
        }
        scope.spawn(move || {
            let mut updates = Vec::new();
            while !done.load(Ordering::SeqCst) {
                updates.clear();
                session.wait(&mut updates, Some(Duration::from_millis(20)));
                assert!(session.stats().open >= 2 && far.stats().sent == 0);
                near.state();
            }
        });
        scope.spawn(move || {
            for n in 0.. {
                if done.load(Ordering::SeqCst) {
                    return;
                }
                kill([near, far][n % 2], kills()[n % kills().len()]);
                thread::sleep(Duration::from_millis(2));
            }
        });
        for sender in senders {
            sender.join().unwrap();
        }
        near.finish().unwrap();
        near.wait_completed(LIMIT).unwrap();
        done.store(true, Ordering::SeqCst);
    });
    let got: Vec<u64> = counts.iter().map(|n| n.load(Ordering::Relaxed)).collect();
    println!("{:?}", near.stats());
    assert_eq!(got, [EACH; 6]);
}

/// Uses a flow until it ends, in one of several ways.
fn use_flow(flow: &Flow, n: usize, alive: &Arc<AtomicUsize>) {
    let short = Some(Duration::from_millis(3));
    let mut buf = [0; 3000];
    loop {
        let end = match n % 6 {
            0 => flow.send_all(&[1; 5000], short),
            1 => flow.recv(&mut buf, short).and_then(|n| match n {
                0 => Err(TransferError::Ended),
                _ => Ok(()),
            }),
            2 => flow.try_recv(&mut buf).map(drop),
            3 => {
                alive.fetch_add(1, Ordering::SeqCst);
                let posted = flow.post(Bytes::from_owner(Alive(alive.clone())));
                posted.and_then(|_| flow.wait_completed(short))
            }
            4 => flow.try_send(&[2; 100]).map(drop),
            _ => {
                flow.stats();
                flow.connection();
                flow.completed();
                match flow.state() {
                    slim::StreamState::Closed => Err(TransferError::Closed),
                    _ => Ok(()),
                }
            }
        };
        match end {
            Ok(()) | Err(TransferError::TimedOut | TransferError::WouldBlock) => {
                thread::sleep(Duration::from_micros(100));
            }
            Err(TransferError::Closed) => return,
            // A flow that has failed remains in use until it is closed.
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

struct Alive(Arc<AtomicUsize>);

impl AsRef<[u8]> for Alive {
    fn as_ref(&self) -> &[u8] {
        &[7; 9000]
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Flows between two sessions, with threads of all kinds on them, until both sessions have closed.
fn round(n: u64, alive: &Arc<AtomicUsize>) {
    let (ours, theirs) = (session(), session());
    let endpoint: Endpoint = listen(&theirs);
    let pairs: Vec<(Flow, Flow)> = (0..3)
        .map(|_| {
            let near = ours.connect(endpoint.local_addr(), LIMIT).unwrap();
            (near, endpoint.accept(LIMIT).unwrap())
        })
        .collect();
    thread::scope(|scope| {
        for (near, far) in &pairs {
            for kind in 0..6 {
                scope.spawn(move || use_flow(near, kind, alive));
                scope.spawn(move || use_flow(far, kind + 3, alive));
            }
        }
        scope.spawn(|| {
            while let Ok(flow) | Err(Some(flow)) = endpoint.accept(LIMIT).map_err(|_| None) {
                drop(flow);
            }
        });
        let mut rng = fastrand::Rng::with_seed(n);
        for _ in 0..5 {
            let (near, far) = &pairs[rng.usize(..pairs.len())];
            let how = kills()[rng.usize(..kills().len())];
            kill(if rng.bool() { near } else { far }, how);
            ours.progress(&mut Vec::new());
            theirs.wait(&mut Vec::new(), Some(Duration::from_millis(rng.u64(..4))));
        }
        let close = |session: Session| drop(session.close(Duration::from_millis(200)));
        let other = scope.spawn(move || close(theirs));
        close(ours);
        other.join().unwrap();
    });
}

#[test]
fn sessions_close_while_threads_use_their_flows() {
    let alive = Arc::new(AtomicUsize::new(0));
    for n in 0..3 {
        round(n, &alive);
    }
    wait_until("released", || alive.load(Ordering::SeqCst) == 0);
}

#[test]
fn a_hundred_flows_survive_kills_of_all_connections_at_once() {
    const FLOWS: usize = 100;
    let session = session();
    let endpoint = listen(&session);
    let flows: Vec<_> = (0..FLOWS).map(|_| pair(&session, &endpoint)).collect();
    for turn in 0..2_u8 {
        for (n, (near, far)) in flows.iter().enumerate() {
            near.send_all(&[n as u8, turn], LIMIT).unwrap();
            if n % 2 == 0 {
                kill(far, Kill::Fin);
            }
        }
        for (n, (near, far)) in flows.iter().enumerate() {
            let mut got = [0; 2];
            far.recv_exact(&mut got, LIMIT).unwrap();
            assert_eq!(got, [n as u8, turn]);
            far.send_all(&got, LIMIT).unwrap();
            near.recv_exact(&mut got, LIMIT).unwrap();
            assert_eq!(got, [n as u8, turn]);
        }
    }
    let stats = session.stats();
    println!("{stats:?}");
    assert_eq!((stats.open, stats.failed), (2 * FLOWS as u64, 0));
    assert!(stats.total.resumes >= FLOWS as u64, "{stats:?}");
}
