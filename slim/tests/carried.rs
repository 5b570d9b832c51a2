//! Flows over transports that are no sockets: pipes in memory, which lose what is in flight when they break.

#[path = "common/carriers.rs"]
mod carriers;
mod common;
#[path = "../../slim-agent/tests/common/memory.rs"]
mod memory;
#[path = "common/streams.rs"]
mod streams;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use carriers::TwoSessions;
use common::*;
use slim::{Flow, Session, StreamState, TransferError, Update};
use streams::{exchange, receive, send};

fn sessions() -> TwoSessions {
    TwoSessions::open(&options(&[]))
}

#[test]
fn bytes_survive_pipes_that_break() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let before = near.stats().resumes;
    exchange(&near, &far, 3 << 20, |_| sessions.break_pipes());
    let resumes = near.stats().resumes - before;
    println!("{resumes} resumes");
    // A pipe that breaks while only one end has it may be followed by TCP.
    assert!(resumes >= 3);
    sessions.wait_carried([&near, &far]);
    near.finish().unwrap();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    far.send_all(b"still", LIMIT).unwrap();
    near.recv_exact(&mut [0; 5], LIMIT).unwrap();
    far.finish().unwrap();
    assert_eq!(near.recv(&mut [0], LIMIT), Ok(0));
}

#[test]
fn flows_fall_back_to_tcp_and_return() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    for down in [true, false, true, false] {
        exchange(&near, &far, 4 << 20, |n| match n {
            0 => sessions.set_down(down),
            1 if down && near.connection().is_some() => drop(kill(&near, Kill::Fin)),
            _ => {}
        });
        sessions.set_down(down);
        // Nothing breaks when it returns.
        wait_until("on the right kind", || {
            let on_tcp = [&near, &far].map(|flow| flow.connection().is_some());
            if down && on_tcp != [true; 2] {
                sessions.break_pipes();
            }
            exchange(&near, &far, 100, |_| ());
            on_tcp == [down; 2]
        });
        exchange(&near, &far, 1 << 20, |_| ());
    }
}

#[test]
fn a_close_delivers_the_last_bytes_although_the_pipe_breaks() {
    let sessions = sessions();
    for n in 0..10 {
        let (near, far) = sessions.carried_pair();
        send(&near, n, 50_000);
        near.close();
        sessions.break_pipes();
        receive(&far, n, 50_000, |_| ());
        assert_eq!(far.recv(&mut [0], LIMIT), Ok(0), "{n}");
    }
}

#[test]
fn a_reset_of_a_carried_flow_is_an_error_at_the_peer() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    near.reset();
    assert_eq!(
        far.recv(&mut [0], LIMIT),
        Err(TransferError::Lost(libc::ECONNRESET))
    );
}

#[test]
fn posts_are_completed_when_the_peer_has_recorded_them() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let posts = 50;
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..posts {
                near.post(Bytes::from(vec![n as u8; 10_000])).unwrap();
                if n % 7 == 0 {
                    sessions.break_pipes();
                }
                thread::sleep(Duration::from_millis(1));
            }
            near.wait_completed(LIMIT).unwrap();
        });
        let mut got = vec![0; 10_000];
        for n in 0..posts {
            far.recv_exact(&mut got, LIMIT).unwrap();
            assert!(got.iter().all(|byte| *byte == n as u8), "{n}");
        }
    });
    assert_eq!(near.completed(), posts);
}

/// Takes updates of the session until `f` returns true.
fn progress_until(session: &Session, mut f: impl FnMut(&[Update]) -> bool) {
    let begun = Instant::now();
    let mut updates = Vec::new();
    while !f(&updates) {
        assert!(begun.elapsed() < LIMIT.unwrap());
        updates.clear();
        session.wait(&mut updates, Some(Duration::from_secs(20)));
    }
}

#[test]
fn updates_tell_of_bytes_of_room_and_of_a_break() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    // What the other end does wakes the session.
    let waits =
        |session: &Session, flow: &Flow, test: fn(&Update) -> bool, act: &(dyn Fn() + Sync)| {
            session.progress(&mut Vec::new());
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(30));
                    act();
                });
                let id = flow.id();
                let begun = Instant::now();
                progress_until(session, |updates| {
                    updates.iter().any(|update| update.id == id && test(update))
                });
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "only when the wait was over"
                );
            });
        };
    let mut buf = [0; 100];
    assert_eq!(far.try_recv(&mut buf), Err(TransferError::WouldBlock));
    let readable = |update: &Update| update.readable;
    waits(&sessions.server, &far, readable, &|| {
        near.send_all(b"hello", LIMIT).unwrap();
    });
    assert_eq!(far.try_recv(&mut buf), Ok(5));
    // As much as the pipe holds.
    let mut sent = 0;
    while let Ok(n) = near.try_send(&[7; 10_000]) {
        sent += n;
    }
    waits(&sessions.client, &near, |update| update.writable, &|| {
        far.recv_exact(&mut vec![0; sent], LIMIT).unwrap();
    });
    near.try_send(b"again").unwrap();
    far.recv_exact(&mut buf[..5], LIMIT).unwrap();
    // A break is noticed without a data call.
    let resumes = near.stats().resumes;
    assert_eq!(near.try_recv(&mut buf), Err(TransferError::WouldBlock));
    sessions.break_pipes();
    wait_until("resumed", || {
        sessions.client.progress(&mut Vec::new());
        near.stats().resumes > resumes && near.state() == StreamState::Protected
    });
}

#[test]
fn a_thread_that_waits_uses_no_processor() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            near.recv(&mut [0], LIMIT).unwrap();
            processor_time()
        });
        thread::sleep(Duration::from_millis(1500));
        far.send_all(b"!", LIMIT).unwrap();
        let used = waiting.join().unwrap();
        assert!(used < Duration::from_millis(50), "{used:?}");
    });
}

/// Processor time of the calling thread.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn sessions_without_a_thread_use_carriers_too() {
    let sessions = TwoSessions::open(&options(&[]).without_thread());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for session in [&sessions.client, &sessions.server] {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    session.wait(&mut Vec::new(), Some(Duration::from_millis(10)));
                }
            });
        }
        // Ends the threads after a panic of this one, too.
        let _done = Done(&done);
        let (near, far) = sessions.carried_pair();
        let before = near.stats().resumes;
        exchange(&near, &far, 2 << 20, |_| sessions.break_pipes());
        assert!(near.stats().resumes > before);
    });
}

struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
