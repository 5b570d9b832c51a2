//! Rough treatment of flows on queue pairs in memory.

#[path = "sessions/carried.rs"]
mod carried;
#[path = "../../slim/tests/common/mod.rs"]
mod common;
#[path = "../../slim/tests/common/streams.rs"]
mod streams;

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use carried::{Done, VerbsSessions, pass, small, wait_for};
use common::*;
use slim::{Flow, TransferError};
use slim_verbs::VerbsSettings;
use streams::{exchange, receive, send};

const PICKS: [fn(usize) -> bool; 3] = [|host| host == 0, |host| host == 1, |_| true];

fn byte(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 13) as u8
}

fn writer(flow: &Flow, total: usize, seed: u64, posts: bool) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut at = 0;
    while at < total {
        let count = match rng.u8(..4) {
            0 => 1000,
            1 => 1,
            _ => rng.usize(..40),
        };
        let most = match rng.u8(..5) {
            0 => 30_000,
            1 => 1,
            _ => 200,
        };
        let mut from = at;
        let pieces: Vec<Vec<u8>> = (0..count)
            .map(|_| {
                let len = if rng.bool() { 0 } else { rng.usize(..=most) };
                let len = len.min(total - from);
                from += len;
                (from - len..from).map(byte).collect()
            })
            .collect();
        if posts && rng.u8(..3) == 0 {
            for piece in pieces {
                if piece.is_empty() && rng.bool() {
                    continue;
                }
                at += piece.len();
                flow.post(Bytes::from(piece)).unwrap();
            }
            flow.wait_completed(LIMIT).unwrap();
            continue;
        }
        let slices: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        match flow.try_send_vectored(&slices) {
            Ok(n) => at += n,
            Err(TransferError::WouldBlock) => {
                let one = [byte(at)];
                flow.send_all(&one, LIMIT).unwrap();
                at += 1;
            }
            Err(e) => panic!("{e:?}"),
        }
    }
}

fn reader(flow: &Flow, total: usize, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut at = 0;
    while at < total {
        let count = match rng.u8(..4) {
            0 => 1000,
            _ => 1 + rng.usize(..10),
        };
        let mut bufs: Vec<Vec<u8>> = (0..count)
            .map(|_| vec![0; if rng.bool() { 0 } else { rng.usize(1..5000) }])
            .collect();
        let room: usize = bufs.iter().map(Vec::len).sum();
        if room == 0 {
            continue;
        }
        let mut slices: Vec<_> = bufs.iter_mut().map(|b| IoSliceMut::new(b)).collect();
        match flow.try_recv_vectored(&mut slices) {
            Ok(0) => panic!("the end at {at}"),
            Ok(mut n) => {
                for buf in &bufs {
                    let got = n.min(buf.len());
                    for b in &buf[..got] {
                        assert_eq!(*b, byte(at), "at {at}");
                        at += 1;
                    }
                    n -= got;
                }
            }
            Err(TransferError::WouldBlock) => {
                let mut one = [0];
                flow.recv_exact(&mut one, LIMIT).unwrap();
                assert_eq!(one[0], byte(at), "at {at}");
                at += 1;
            }
            Err(e) => panic!("{e:?}"),
        }
    }
}

/// Vectored calls with many and empty pieces, and posts, while queue pairs fail and TCP connections are killed.
#[test]
fn pieces_and_posts_survive_faults() {
    for seed in 0..6 {
        let sessions = VerbsSessions::open(&options(&[]), small());
        let (near, far) = sessions.carried_pair();
        let total = 3 << 20;
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = fastrand::Rng::with_seed(seed + 1000);
                while !done.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(rng.u64(1..60)));
                    match rng.u8(..6) {
                        0 => drop(kill(&near, Kill::Fin)),
                        1 => {
                            let host = rng.usize(..2);
                            sessions.net.fabric.set_link(host, false);
                            thread::sleep(Duration::from_millis(rng.u64(0..5)));
                            sessions.net.fabric.set_link(host, true);
                        }
                        2 => near.suspect(),
                        n => sessions.net.fail_pairs(n % 2 == 0, PICKS[n as usize % 3]),
                    }
                }
            });
            let _done = Done(&done);
            let begun = Instant::now();
            thread::scope(|scope| {
                let (near, far) = (&near, &far);
                scope.spawn(move || writer(near, total, seed, true));
                scope.spawn(move || writer(far, total, seed + 1, false));
                scope.spawn(move || reader(near, total, seed + 2));
                scope.spawn(move || reader(far, total, seed + 3));
            });
            println!(
                "seed {seed}: {:?}, {:?} {:?}",
                begun.elapsed(),
                near.stats(),
                far.stats()
            );
        });
        near.finish().unwrap();
        assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    }
}

fn take_all() -> Vec<File> {
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    taken
}

/// No descriptors are left when flows would move, and when they are resumed.
#[test]
fn flows_live_without_descriptors() {
    if runs_alone_elsewhere("flows_live_without_descriptors") {
        return;
    }
    let maximum = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = |n| {
        let limit = rustix::process::Rlimit {
            current: Some(n),
            maximum,
        };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    };
    let sessions = VerbsSessions::open(&options(&[]), small());
    let (near, far) = sessions.carried_pair();
    limit(300);
    for round in 0..6 {
        let taken = take_all();
        println!("round {round}: {} taken", taken.len());
        sessions.net.fail_pairs(round % 2 == 0, PICKS[round % 3]);
        thread::sleep(Duration::from_millis(500 * (round as u64 % 3)));
        drop(taken);
        let begun = Instant::now();
        exchange(&near, &far, 1 << 20, |_| ());
        println!("passes after {:?}", begun.elapsed());
        let back = wait_for(&near, &far, true);
        println!("back after {back:?}");
    }
    // Begins on TCP and has no descriptor for the queue pair.
    let (near, far) = sessions.pair();
    let taken = take_all();
    for _ in 0..3 {
        near.send_all(b"?", LIMIT).unwrap();
        far.recv_exact(&mut [0], LIMIT).unwrap();
        thread::sleep(Duration::from_millis(300));
    }
    println!("{:?} {:?}", near.state(), near.connection());
    drop(taken);
    println!("moved after {:?}", wait_for(&near, &far, true));
    println!("{:?}", sessions.net.fabric.pairs());
}

/// Many flows at once, links that flap, silences.
#[test]
fn many_flows_survive_flapping() {
    let settings = VerbsSettings {
        ping_every: Duration::from_millis(200),
        ..small()
    };
    let sessions = VerbsSessions::open(&options(&[]), settings);
    let flows: Vec<_> = (0..28).map(|_| sessions.pair()).collect();
    let done = AtomicBool::new(false);
    let passes = AtomicU64::new(0);
    let longest = AtomicU64::new(0);
    thread::scope(|scope| {
        let _done = Done(&done);
        for chunk in flows.chunks(20) {
            let (done, passes, longest) = (&done, &passes, &longest);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    for (near, far) in chunk {
                        let begun = Instant::now();
                        pass(near, far);
                        let ms = begun.elapsed().as_millis() as u64;
                        longest.fetch_max(ms, Ordering::Relaxed);
                        passes.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut rng = fastrand::Rng::with_seed(7);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(rng.u64(1..200)));
            match rng.u8(..4) {
                0 => {
                    let host = rng.usize(..2);
                    for _ in 0..rng.usize(1..10) {
                        sessions.net.fabric.set_link(host, false);
                        thread::sleep(Duration::from_micros(rng.u64(0..2000)));
                        sessions.net.fabric.set_link(host, true);
                    }
                }
                1 => {
                    sessions.net.set_silent(true);
                    thread::sleep(Duration::from_millis(rng.u64(1..300)));
                    sessions.net.set_silent(false);
                }
                n => sessions.net.fail_pairs(n % 2 == 0, PICKS[n as usize % 3]),
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    let begun = Instant::now();
    for (near, far) in &flows {
        while near.connection().is_some() || far.connection().is_some() {
            // The longest pause between two trials is a minute and an eighth.
            assert!(begun.elapsed() < Duration::from_secs(80), "never back");
            pass(near, far);
            thread::sleep(Duration::from_millis(1));
        }
    }
    println!(
        "{} passes, longest {} ms, all back after {:?}, {} pairs",
        passes.into_inner(),
        longest.into_inner(),
        begun.elapsed(),
        sessions.net.fabric.pairs().len()
    );
    wait_until("two for each", || sessions.net.fabric.pairs().len() == 56);
}

/// A peer that does not read for a while; large sends.
#[test]
fn a_peer_that_does_not_read_gets_all_in_the_end() {
    let sessions = VerbsSessions::open(&options(&[]), VerbsSettings::default());
    let (near, far) = sessions.carried_pair();
    thread::scope(|scope| {
        scope.spawn(|| send(&near, 3, 64 << 20));
        thread::sleep(Duration::from_secs(2));
        sessions.net.fail_pairs(true, |_| true);
        thread::sleep(Duration::from_secs(2));
        receive(&far, 3, 64 << 20, |_| ());
    });
    send(&near, 4, 200_000);
    near.close();
    thread::sleep(Duration::from_millis(300));
    sessions.net.set_silent(true);
    thread::sleep(Duration::from_millis(2500));
    sessions.net.set_silent(false);
    receive(&far, 4, 200_000, |_| ());
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
}
