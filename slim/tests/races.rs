//! Calls of several threads at the same time.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use slim::{AcceptError, StreamState, TransferError};

/// A buffer that counts the buffers that are alive.
struct Counted(Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &[7; 20_000]
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn a_session_that_is_closed_while_threads_post_keeps_no_buffer() {
    let left = Arc::new(AtomicUsize::new(0));
    for round in 0..150 {
        let (session, theirs) = (session(), session());
        let endpoint = listen(&theirs);
        let (near, far) = pair(&session, &endpoint);
        thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    left.fetch_add(1, Ordering::SeqCst);
                    if near.post(Bytes::from_owner(Counted(left.clone()))).is_err() {
                        return;
                    }
                    // Posts are often all completed at once, so that the next post is again the first.
                    let _ = near.wait_completed(Some(Duration::from_micros(round)));
                }
            });
            scope.spawn(|| while far.recv(&mut [0; 60_000], LIMIT).is_ok_and(|n| n > 0) {});
            thread::sleep(Duration::from_micros(300 + 17 * round));
            let _ = session.close(Duration::from_millis(20));
        });
        drop((near, far, endpoint, theirs));
        let begun = Instant::now();
        while left.load(Ordering::SeqCst) > 0 {
            let alive = left.load(Ordering::SeqCst);
            assert!(begun.elapsed() < Duration::from_secs(5), "{round}: {alive}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_flow_that_is_opened_while_its_session_closes_is_closed_or_refused() {
    for round in 0..150 {
        let (session, theirs) = (session(), session());
        let ours = listen(&session);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let _ = theirs.connect(ours.local_addr(), Some(Duration::from_millis(20)));
                }
            });
            let accepting = scope.spawn(|| {
                let mut flows = Vec::new();
                loop {
                    match ours.accept(LIMIT) {
                        Ok(flow) => flows.push(flow),
                        Err(AcceptError::Closed) => return flows,
                        Err(e) => panic!("{round}: {e:?}"),
                    }
                }
            });
            thread::sleep(Duration::from_micros(500 + 13 * round));
            drop(session);
            let begun = Instant::now();
            let flows = accepting.join().unwrap();
            stop.store(true, Ordering::SeqCst);
            assert!(begun.elapsed() < Duration::from_secs(10));
            for flow in flows {
                assert_eq!(flow.state(), StreamState::Closed, "{round}");
                assert_eq!(flow.try_recv(&mut [0]), Err(TransferError::Closed));
            }
        });
    }
}

#[test]
fn every_refused_send_is_followed_by_an_update_although_another_thread_posts() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let (begin, begins) = mpsc::channel();
    let (mut refused, mut lost) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| while far.recv(&mut [0; 100_000], LIMIT).unwrap() > 0 {});
        let near = &near;
        scope.spawn(move || {
            for () in begins {
                near.post(Bytes::from_static(&[1; 64])).unwrap();
            }
            near.finish().unwrap();
        });
        let mut updates = Vec::new();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) && lost == 0 {
            updates.clear();
            session.progress(&mut updates);
            begin.send(()).unwrap();
            if (0..100).all(|_| near.try_send(b"x").is_ok()) {
                continue;
            }
            refused += 1;
            let begun = Instant::now();
            while !updates.iter().any(|u| u.id == near.id() && u.writable) && lost == 0 {
                updates.clear();
                session.wait(&mut updates, Some(Duration::from_millis(100)));
                lost += u32::from(begun.elapsed() > Duration::from_secs(2));
            }
        }
        drop(begin);
    });
    assert!(refused > 0 && lost == 0, "{refused} refusals, {lost} lost");
}

/// A receive that waits returns as soon as the bytes are there, also if they come by a resume.
#[test]
fn a_waiting_receive_does_not_sleep_while_bytes_are_in_the_stash() {
    let session = session();
    let endpoint = listen(&session);
    let longest = thread::scope(|scope| {
        let lines: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let (near, far) = pair(&session, &endpoint);
                    let receiving = thread::spawn(move || {
                        while far.recv(&mut [0], LIMIT).unwrap() > 0 {
                            far.send_all(b"y", LIMIT).unwrap();
                        }
                    });
                    let mut longest = Duration::ZERO;
                    for n in 0..300 {
                        let how = kills()[n % kills().len()];
                        kill(&near, how);
                        near.send_all(b"x", LIMIT).unwrap();
                        let begun = Instant::now();
                        near.recv_exact(&mut [0], LIMIT).unwrap();
                        longest = longest.max(begun.elapsed());
                    }
                    near.finish().unwrap();
                    receiving.join().unwrap();
                    longest
                })
            })
            .collect();
        lines.into_iter().map(|line| line.join().unwrap()).max()
    });
    println!("longest: {longest:?}");
    assert!(longest.unwrap() < Duration::from_millis(700), "{longest:?}");
}
