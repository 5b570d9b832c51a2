//! Threads and programs that wait for flows on carriers, and what becomes of a carrier that is not needed any more.

#[path = "common/carriers.rs"]
mod carriers;
mod common;
#[path = "../../slim-agent/tests/common/memory.rs"]
mod memory;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use carriers::TwoSessions;
use common::*;
use slim::{Flow, Session, TransferError, Update};

/// Limit of a wait for an update, and far less than that.
const WAIT: Duration = Duration::from_secs(20);
const SOON: Duration = Duration::from_secs(10);

/// The rounds of a test in which a thread waited for the whole second after which it looks again in any case. The machine may stand still for so
/// long, too, but not again and again.
#[derive(Default)]
struct Late(Vec<(usize, Duration)>);

impl Late {
    fn note(&mut self, round: usize, took: Duration) {
        if took >= Duration::from_secs(1) {
            self.0.push((round, took));
        }
        assert!(self.0.len() <= 2, "{:?}", self.0);
    }
}

fn sessions() -> TwoSessions {
    TwoSessions::open(&options(&[]))
}

/// A flow between sessions without a thread. Only the calls of the test drive them afterwards.
fn driven_pair(sessions: &TwoSessions) -> (Flow, Flow) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for session in [&sessions.client, &sessions.server] {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    session.wait(&mut Vec::new(), Some(Duration::from_millis(10)));
                }
            });
        }
        let pair = sessions.carried_pair();
        done.store(true, Ordering::Relaxed);
        pair
    })
}

/// Waits for an update of the flow that passes the test. Returns how long that took.
fn await_update(session: &Session, flow: &Flow, test: impl Fn(&Update) -> bool) -> Duration {
    let begun = Instant::now();
    let mut updates = Vec::new();
    loop {
        updates.clear();
        session.wait(&mut updates, Some(WAIT));
        if updates
            .iter()
            .any(|update| update.id == flow.id() && test(update))
        {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < LIMIT.unwrap());
    }
}

/// Sends as much as there is room for.
fn fill(flow: &Flow) -> usize {
    let mut sent = 0;
    while let Ok(n) = flow.try_send(&[7; 10_000]) {
        sent += n;
    }
    sent
}

/// The thread that waits resets the descriptor, and the session's poll set must hear of the room all the same.
#[test]
fn a_waiting_thread_takes_no_update_from_the_session() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    thread::scope(|scope| {
        scope.spawn(|| near.recv_exact(&mut [0], LIMIT).unwrap());
        for round in 0..50 {
            let sent = fill(&near);
            sessions.client.progress(&mut Vec::new());
            let far = &far;
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(5));
                far.recv_exact(&mut vec![0; sent], LIMIT).unwrap();
            });
            let took = await_update(&sessions.client, &near, |update| update.writable);
            assert!(took < SOON, "round {round}: {took:?}");
        }
        far.send_all(b"!", LIMIT).unwrap();
    });
}

fn two_threads_wait((near, far): (Flow, Flow)) {
    let mut late = Late::default();
    for round in 0..20 {
        let begun = Instant::now();
        thread::scope(|scope| {
            // More than the pipe holds.
            scope.spawn(|| near.send_all(&[1; 200_000], LIMIT).unwrap());
            scope.spawn(|| near.recv_exact(&mut [0; 5], LIMIT).unwrap());
            thread::sleep(Duration::from_millis(20));
            let room = || far.recv_exact(&mut [0; 200_000], LIMIT).unwrap();
            let bytes = || far.send_all(b"hello", LIMIT).unwrap();
            match round % 2 {
                0 => bytes(),
                _ => room(),
            }
            thread::sleep(Duration::from_millis(20));
            match round % 2 {
                0 => room(),
                _ => bytes(),
            }
        });
        late.note(round, begun.elapsed());
    }
}

/// One thread receives and one sends, and both wait on the carrier, which has one descriptor.
#[test]
fn two_threads_that_wait_for_one_flow_are_both_woken() {
    let sessions = sessions();
    two_threads_wait(sessions.carried_pair());
}

#[test]
fn two_threads_without_an_agent_thread_are_both_woken() {
    let sessions = TwoSessions::open(&options(&[]).without_thread());
    two_threads_wait(driven_pair(&sessions));
}

/// Bytes arrive just after a thread has found none, and the thread that leads resets the descriptor before the other one sleeps.
#[test]
fn no_event_is_lost_when_another_thread_leads() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let far = Arc::new(far);
    let rounds = 2000;
    let mut late = Late::default();
    thread::scope(|scope| {
        // More than the pipe holds, so this thread leads.
        scope.spawn(|| near.send_all(&[1; 200_000], LIMIT).unwrap());
        thread::sleep(Duration::from_millis(50));
        for carrier in sessions.carriers.all() {
            carrier.resets.store(0, Ordering::SeqCst);
        }
        for round in 0..rounds {
            for carrier in sessions.carriers.all() {
                let (far, same) = (far.clone(), carrier.clone());
                let arrive = move || {
                    let before = same.resets.load(Ordering::SeqCst);
                    far.try_send(b"!").unwrap();
                    let begun = Instant::now();
                    while same.resets.load(Ordering::SeqCst) == before
                        && begun.elapsed() < Duration::from_millis(2)
                    {
                        std::hint::spin_loop();
                    }
                };
                *carrier.on_dry.lock().unwrap() = Some(Box::new(arrive));
            }
            let begun = Instant::now();
            near.recv_exact(&mut [0], LIMIT).unwrap();
            late.note(round, begun.elapsed());
        }
        for carrier in sessions.carriers.all() {
            carrier.on_dry.lock().unwrap().take();
        }
        far.recv_exact(&mut vec![0; 200_000], LIMIT).unwrap();
    });
}

/// The program looks at the flow only when an update tells it to, while pipes break.
#[test]
fn a_program_that_polls_hears_of_everything_in_spite_of_breaks() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let rounds = 300;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                if round % 3 == 0 {
                    sessions.break_pipes();
                }
                near.send_all(&[1; 3000], LIMIT).unwrap();
                near.recv_exact(&mut [0], LIMIT).unwrap();
            }
        });
        for round in 0..rounds {
            let mut left = 3000;
            let mut buf = vec![0; 3000];
            while left > 0 {
                match far.try_recv(&mut buf[..left]) {
                    Ok(n) => left -= n,
                    Err(TransferError::WouldBlock) => {
                        let took = await_update(&sessions.server, &far, |_| true);
                        assert!(took < SOON, "round {round}: {took:?}");
                    }
                    Err(e) => panic!("{e}"),
                }
            }
            while far.try_send(b"!").is_err() {
                let took = await_update(&sessions.server, &far, |_| true);
                assert!(took < SOON, "round {round}: {took:?}");
            }
        }
    });
}

/// After the peer has ended its direction, which suspends the flow for a moment, room is still reported.
#[test]
fn a_program_that_polls_hears_of_room_after_the_peers_end() {
    let sessions = sessions();
    for round in 0..30 {
        let (near, far) = sessions.carried_pair();
        far.try_recv(&mut [0]).unwrap_err();
        near.finish().unwrap();
        while far.try_recv(&mut [0]) != Ok(0) {
            await_update(&sessions.server, &far, |update| update.readable);
        }
        for _ in 0..3 {
            let mut sent = 0;
            while sent == 0 {
                sent = fill(&far);
                if sent == 0 {
                    await_update(&sessions.server, &far, |update| update.writable);
                }
            }
            sessions.server.progress(&mut Vec::new());
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(2));
                    near.recv_exact(&mut vec![0; sent], LIMIT).unwrap();
                });
                let took = await_update(&sessions.server, &far, |update| update.writable);
                assert!(took < SOON, "round {round}: {took:?}");
            });
        }
    }
}

/// A thread that waits, and one that waits for that thread, when the session is closed.
#[test]
fn a_close_ends_the_waits_of_all_threads() {
    let sessions = sessions();
    let (near, _far) = sessions.carried_pair();
    let TwoSessions {
        client,
        server: _server,
        endpoint: _endpoint,
        ..
    } = sessions;
    let ended = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let got = near.recv(&mut [0], LIMIT);
                ended.lock().unwrap().push((got, Instant::now()));
            });
        }
        thread::sleep(Duration::from_millis(50));
        let begun = Instant::now();
        client.close(Duration::from_secs(10)).unwrap();
        while ended.lock().unwrap().len() < 3 {
            thread::sleep(Duration::from_millis(1));
            assert!(begun.elapsed() < Duration::from_secs(10));
        }
        for (got, at) in &*ended.lock().unwrap() {
            assert_eq!(*got, Err(TransferError::Closed));
            assert!(at.duration_since(begun) < Duration::from_secs(3));
        }
    });
}

/// A closed flow whose bytes are delivered gives its carrier up, so that the peer's sends fail instead of waiting for ever.
#[test]
fn sends_to_a_closed_flow_fail() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    near.send_all(b"last", LIMIT).unwrap();
    near.close();
    far.recv_exact(&mut [0; 4], LIMIT).unwrap();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    let sent = far.send_all(&[1; 1 << 20], Some(Duration::from_secs(20)));
    assert!(
        matches!(sent, Err(TransferError::Lost(_) | TransferError::ShutDown)),
        "{sent:?}"
    );
}

#[test]
fn carriers_are_dropped_when_they_are_replaced_and_when_flows_end() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    for _ in 0..20 {
        sessions.break_pipes();
        near.send_all(b"?", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
    }
    wait_until("one carrier at each end", || sessions.carriers.count() == 2);
    near.close();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    far.close();
    wait_until("none", || sessions.carriers.count() == 0);
    let (near, far) = sessions.carried_pair();
    near.reset();
    far.recv(&mut [0], LIMIT).unwrap_err();
    wait_until("none after a reset", || sessions.carriers.count() == 0);
    drop(far);
}

/// Handles that outlive their session hold no carrier.
#[test]
fn a_closed_session_has_no_carriers() {
    let sessions = sessions();
    let pairs: Vec<_> = (0..4).map(|_| sessions.carried_pair()).collect();
    // Two are reset because of bytes that were not received.
    for (near, far) in &pairs[..2] {
        far.send_all(b"unread", LIMIT).unwrap();
        near.send_all(b"?", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
    }
    let carriers = sessions.carriers.clone();
    let TwoSessions { client, server, .. } = sessions;
    for session in [client, server] {
        session.close(Duration::from_secs(5)).unwrap();
    }
    wait_until("none", || carriers.count() == 0);
    drop(pairs);
}

/// A carrier that was replaced and still reports events changes nothing.
#[test]
fn a_replaced_carrier_is_not_listened_to() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let old = sessions.carriers.all();
    sessions.break_pipes();
    // It may have gone to TCP for a moment, and moves once more then.
    sessions.wait_carried([&near, &far]);
    wait_until("quiet", || {
        let mut updates = Vec::new();
        sessions
            .client
            .wait(&mut updates, Some(Duration::from_millis(50)));
        updates.is_empty()
    });
    old.iter().for_each(|carrier| carrier.signal());
    let mut updates = Vec::new();
    sessions
        .client
        .wait(&mut updates, Some(Duration::from_millis(50)));
    assert_eq!(updates, []);
    assert_eq!(near.stats().resumes, far.stats().resumes);
    near.send_all(b"?", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
}

/// The child drops what it has of its parent's flows, which does not disturb the parent.
#[test]
fn a_child_does_not_touch_its_parents_carriers() {
    if runs_alone_elsewhere("a_child_does_not_touch_its_parents_carriers") {
        return;
    }
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let resumes = near.stats().resumes;
    // SAFETY: the child only drops its copies and ends. No other thread holds a lock that it needs.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop((near, far, sessions));
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    assert_eq!(wait_for_child(pid), Some(0));
    for _ in 0..10 {
        near.send_all(b"?", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
    }
    assert_eq!(near.stats().resumes, resumes);
    near.close();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
}

#[test]
fn resumes_leave_no_descriptor() {
    if runs_alone_elsewhere("resumes_leave_no_descriptor") {
        return;
    }
    let before = descriptors().len();
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let pass = || {
        near.send_all(b"?", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
    };
    let count = || {
        wait_until("one carrier at each end", || sessions.carriers.count() == 2);
        descriptors().len()
    };
    let first = count();
    for round in 0..30 {
        if round % 10 == 0 {
            sessions.set_down(true);
            pass();
            sessions.set_down(false);
            kill(&near, Kill::Fin);
            sessions.wait_carried([&near, &far]);
        }
        sessions.break_pipes();
        pass();
    }
    // A control socket more or less.
    assert!(
        count() <= first + 2,
        "{first}, {}: {:#?}",
        count(),
        descriptors()
    );
    drop((near, far));
    let TwoSessions {
        net,
        client,
        server,
        endpoint,
        ..
    } = sessions;
    drop(endpoint);
    for session in [client, server] {
        session.close(Duration::from_secs(10)).unwrap();
    }
    // It has wakers of the agents' runtimes.
    drop(net);
    assert_eq!(descriptors().len(), before, "{:#?}", descriptors());
}
