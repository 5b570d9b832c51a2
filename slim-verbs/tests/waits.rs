//! Threads and programs that wait for flows on queue pairs, and what an idle flow costs.

#[path = "sessions/carried.rs"]
mod carried;
#[path = "../../slim/tests/common/mod.rs"]
mod common;
#[path = "../../slim/tests/common/streams.rs"]
mod streams;
#[path = "sessions/usage.rs"]
mod usage;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use carried::{Done, VerbsSessions, pass, small, wait_for};
use common::*;
use slim::{Flow, Session, TransferError, Update};
use slim_verbs::VerbsSettings;
use streams::{exchange, receive, send};
use usage::used;

/// Limit of a wait for an update, and far less than that.
const WAIT: Duration = Duration::from_secs(20);
const SOON: Duration = Duration::from_secs(10);

fn sessions() -> VerbsSessions {
    VerbsSessions::open(&options(&[]), small())
}

/// A thread that sleeps in a call looks again after a second in any case. A machine that stands still may take as long, but not again and again.
fn assert_few_late(times: &[Duration]) {
    let late: Vec<_> = times.iter().filter(|t| t.as_secs() >= 1).collect();
    assert!(late.len() <= 2, "{late:?}");
}

/// Two threads wait in turn, and each is woken by the other one's message. They look for a moment before they sleep; so one of them makes pauses, shorter and
/// longer ones.
#[test]
fn threads_that_sleep_are_woken_by_each_message() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let rounds = 5000;
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..rounds {
                far.recv_exact(&mut [0; 8], LIMIT).unwrap();
                let pause = Duration::from_micros(u64::from(n % 100));
                match n % 2 {
                    0 => {}
                    _ => thread::sleep(pause),
                }
                far.send_all(&[1; 8], LIMIT).unwrap();
            }
        });
        let begun = Instant::now();
        let round = |_| {
            let begun = Instant::now();
            near.send_all(&[1; 8], LIMIT).unwrap();
            near.recv_exact(&mut [0; 8], LIMIT).unwrap();
            begun.elapsed()
        };
        let times: Vec<_> = (0..rounds).map(round).collect();
        println!("{:?} a round trip", begun.elapsed() / rounds);
        assert_few_late(&times);
    });
    assert!(near.connection().is_none());
}

/// One thread sends more than there is room for, and one receives, and both sleep.
#[test]
fn two_threads_that_wait_for_one_flow_are_both_woken() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let round = |n: usize| {
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| near.send_all(&[1; 200_000], LIMIT).unwrap());
            scope.spawn(|| near.recv_exact(&mut [0; 5], LIMIT).unwrap());
            thread::sleep(Duration::from_millis(10));
            let room = || far.recv_exact(&mut [0; 200_000], LIMIT).unwrap();
            let bytes = || far.send_all(b"hello", LIMIT).unwrap();
            match n % 2 {
                0 => {
                    bytes();
                    room();
                }
                _ => {
                    room();
                    bytes();
                }
            }
        });
        begun.elapsed()
    };
    assert_few_late(&(0..20).map(round).collect::<Vec<_>>());
}

#[test]
fn calls_with_time_limits_return_in_time() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let limit = Duration::from_millis(50);
    let begun = Instant::now();
    assert_eq!(
        near.recv(&mut [0], Some(limit)),
        Err(TransferError::TimedOut)
    );
    // Nobody reads.
    let sent = loop {
        match near.send(&[7; 10_000], Some(limit)) {
            Ok(_) => {}
            Err(e) => break e,
        }
    };
    assert_eq!(sent, TransferError::TimedOut);
    let took = begun.elapsed();
    assert!(took >= 2 * limit && took < SOON, "{took:?}");
    drop(far);
}

/// Waits for an update of the flow. Returns how long that took.
fn await_update(session: &Session, flow: &Flow, test: impl Fn(&Update) -> bool) -> Duration {
    let begun = Instant::now();
    let mut updates = Vec::new();
    loop {
        updates.clear();
        session.wait(&mut updates, Some(WAIT));
        let mut of_flow = updates.iter().filter(|update| update.id == flow.id());
        if of_flow.any(&test) {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < LIMIT.unwrap());
    }
}

/// The program looks at its flow only when an update tells it to, while queue pairs fail.
#[test]
fn a_program_that_polls_hears_of_everything() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let rounds = 300;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                if round % 10 == 0 {
                    sessions
                        .net
                        .fail_pairs(round % 20 == 0, |host| round % 30 > 0 || host == 0);
                }
                near.send_all(&[1; 30_000], LIMIT).unwrap();
                near.recv_exact(&mut [0], LIMIT).unwrap();
            }
        });
        for round in 0..rounds {
            let mut left = 30_000;
            let mut buf = vec![0; left];
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

/// Room that comes is an update, although nothing can be read.
#[test]
fn a_program_that_polls_hears_of_room() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    for round in 0..50 {
        let mut sent = 0;
        while let Ok(n) = near.try_send(&[7; 10_000]) {
            sent += n;
        }
        sessions.client.progress(&mut Vec::new());
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(2));
                far.recv_exact(&mut vec![0; sent], LIMIT).unwrap();
            });
            let took = await_update(&sessions.client, &near, |update| update.writable);
            assert!(took < SOON, "round {round}: {took:?}");
        });
    }
}

/// Nobody reads for long; the flow breaks meanwhile, and all bytes are there in the end.
#[test]
fn a_flow_that_nobody_reads_for_long_is_complete() {
    let settings = VerbsSettings {
        ping_every: Duration::from_millis(100),
        ..small()
    };
    let sessions = VerbsSessions::open(&options(&[]), settings);
    let (near, far) = sessions.carried_pair();
    thread::scope(|scope| {
        scope.spawn(|| send(&near, 3, 1 << 20));
        thread::sleep(Duration::from_millis(1500));
        sessions.net.fail_pairs(true, |host| host == 1);
        thread::sleep(Duration::from_millis(1500));
        receive(&far, 3, 1 << 20, |_| ());
    });
    wait_for(&near, &far, true);
}

/// The peer's software records bytes that its program does not read, and tells so without being asked.
#[test]
fn what_nobody_reads_is_told_soon() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let mut times = Vec::new();
    for n in 0..20 {
        let begun = Instant::now();
        near.post(Bytes::from(vec![n; 100])).unwrap();
        near.wait_completed(LIMIT).unwrap();
        times.push(begun.elapsed());
    }
    let mean = times.iter().sum::<Duration>() / 20;
    println!("completed after {mean:?}");
    assert!(mean < Duration::from_millis(500), "{times:?}");
    far.recv_exact(&mut [0; 2000], LIMIT).unwrap();
}

#[test]
fn sessions_without_a_thread_use_queue_pairs_too() {
    let sessions = VerbsSessions::open(&options(&[]).without_thread(), small());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for session in [&sessions.client, &sessions.server] {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    session.wait(&mut Vec::new(), Some(Duration::from_millis(10)));
                }
            });
        }
        let _done = Done(&done);
        let (near, far) = sessions.carried_pair();
        let before = near.stats().resumes;
        exchange(&near, &far, 2 << 20, |n| {
            sessions.net.fail_pairs(n % 2 == 0, |host| host == n % 2);
        });
        assert!(near.stats().resumes > before);
        wait_for(&near, &far, true);
    });
}

/// Idle flows cost what their pings cost.
#[test]
fn idle_flows_use_no_processor() {
    if runs_alone_elsewhere("idle_flows_use_no_processor") {
        return;
    }
    let sessions = VerbsSessions::open(&options(&[]), VerbsSettings::default());
    let flows: Vec<_> = (0..8).map(|_| sessions.carried_pair()).collect();
    // One that is not read, either, and a thread that waits for the last.
    let (near, far) = &flows[0];
    near.send_all(&[1; 10_000], LIMIT).unwrap();
    let idle_for = Duration::from_secs(4);
    thread::scope(|scope| {
        scope.spawn(|| flows[7].0.recv_exact(&mut [0], LIMIT).unwrap());
        thread::sleep(Duration::from_secs(2));
        let before = used();
        thread::sleep(idle_for);
        let after = used();
        flows[7].1.send_all(b"!", LIMIT).unwrap();
        let (time, sleeps) = (after.0 - before.0, after.1 - before.1);
        println!(
            "8 flows, both ends, idle for {idle_for:?}: {time:?} of processor time, {sleeps} wake-ups"
        );
        assert!(time < idle_for / 50, "{time:?}");
        assert!(sleeps < 400, "{sleeps}");
    });
    far.recv_exact(&mut [0; 10_000], LIMIT).unwrap();
    for (near, far) in &flows {
        pass(near, far);
        assert!(near.connection().is_none());
    }
}
