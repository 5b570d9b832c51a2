//! Several threads use carried flows at once, while pipes break and flows move between pipes and TCP.

#[path = "common/carriers.rs"]
mod carriers;
mod common;
#[path = "../../slim-agent/tests/common/memory.rs"]
mod memory;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use carriers::TwoSessions;
use common::*;
use slim::{Flow, Session, TransferError, Update};

const WAIT: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_secs(9);

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
        assert!(begun.elapsed() < SOON, "no update");
    }
}

fn fill(flow: &Flow) -> usize {
    let mut sent = 0;
    while let Ok(n) = flow.try_send(&[7; 10_000]) {
        sent += n;
    }
    sent
}

/// A thread waits for room again and again for a short time, and stops waiting when bytes arrive. The session's poll set must hear of the bytes.
#[test]
fn a_thread_whose_wait_ends_takes_no_update_from_the_session() {
    let sessions = TwoSessions::open(&options(&[]));
    let (near, far) = sessions.carried_pair();
    fill(&near);
    let done = AtomicBool::new(false);
    let turn = AtomicU64::new(0);
    let rounds = 20_000;
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let sent = near.send(&[1], Some(Duration::from_micros(50)));
                assert_eq!(sent, Err(TransferError::TimedOut));
            }
        });
        scope.spawn(|| {
            for round in 1..=rounds {
                while turn.load(Ordering::SeqCst) < round {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    thread::yield_now();
                }
                for _ in 0..fastrand::u32(0..20_000) {
                    std::hint::spin_loop();
                }
                far.try_send(b"!").unwrap();
            }
        });
        let _done = Done(&done);
        for round in 1..=rounds {
            sessions.client.progress(&mut Vec::new());
            assert_eq!(near.try_recv(&mut [0]), Err(TransferError::WouldBlock));
            turn.store(round, Ordering::SeqCst);
            while near.try_recv(&mut [0]).is_err() {
                let took = await_update(&sessions.client, &near, |update| update.readable);
                assert!(took < SOON, "round {round}: {took:?}");
            }
        }
    });
}

struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// Interrupts system calls of all threads.
fn storm() {
    // SAFETY: the structures are complete, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        let every = libc::timeval {
            tv_sec: 0,
            tv_usec: 300,
        };
        let timer = libc::itimerval {
            it_interval: every,
            it_value: every,
        };
        libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
    }
}

/// The bytes of a stream from `at` on, which is advanced.
fn pattern(at: &mut u64, buf: &mut [u8]) {
    for byte in buf {
        *byte = (*at ^ (*at >> 8) ^ (*at >> 17)) as u8;
        *at += 1;
    }
}

/// Sends by turns with and without waiting, with short limits, by posts, and zero-length calls.
fn sender(flow: &Flow, seed: u64, len: u64, posts: bool) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut at = 0u64;
    let mut last = Instant::now();
    while at < len {
        let mut piece = vec![0; (rng.u64(1..30_000)).min(len - at) as usize];
        let mut next = at;
        pattern(&mut next, &mut piece);
        let way = rng.u32(0..if posts { 6 } else { 5 });
        let sent = match way {
            0 => flow.try_send(&piece),
            1 => flow.send(&piece, Some(Duration::from_micros(rng.u64(0..500)))),
            2 => flow.send(&piece, LIMIT),
            3 => {
                assert_eq!(flow.try_send(&[]).unwrap_or(0), 0);
                assert_eq!(
                    flow.send(&[], Some(Duration::from_millis(1))).unwrap_or(0),
                    0
                );
                continue;
            }
            5 => {
                let n = piece.len();
                match flow.post(piece.clone().into()) {
                    Ok(_) => Ok(n),
                    Err(e) => Err(e),
                }
            }
            _ => flow.send_all(&piece, LIMIT).map(|()| piece.len()),
        };
        match sent {
            Ok(n) => {
                at += n as u64;
                last = Instant::now();
            }
            Err(TransferError::WouldBlock | TransferError::TimedOut) => {
                assert!(last.elapsed() < SOON, "stuck at {at} by {way}");
                if way == 0 {
                    thread::yield_now();
                }
            }
            Err(e) => panic!("send {e} at {at} by {way}"),
        }
    }
    if posts {
        flow.wait_completed(LIMIT).unwrap();
    }
}

/// Receives by turns with and without waiting, with short limits, and zero-length calls.
fn receiver(flow: &Flow, seed: u64, len: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut at = 0;
    let mut buf = vec![0; 40_000];
    let mut last = Instant::now();
    while at < len {
        let room = rng.usize(1..40_000).min((len - at) as usize);
        let way = rng.u32(0..4);
        let got = match way {
            0 => flow.try_recv(&mut buf[..room]),
            1 => flow.recv(
                &mut buf[..room],
                Some(Duration::from_micros(rng.u64(0..500))),
            ),
            2 => {
                assert_eq!(flow.try_recv(&mut []), Ok(0));
                assert_eq!(flow.recv(&mut [], Some(Duration::from_millis(1))), Ok(0));
                continue;
            }
            _ => flow.recv(&mut buf[..room], LIMIT),
        };
        match got {
            Ok(0) => panic!("end at {at}"),
            Ok(n) => {
                let mut want = vec![0; n];
                pattern(&mut at, &mut want);
                assert!(want == buf[..n], "wrong bytes before {at}");
                last = Instant::now();
            }
            Err(TransferError::WouldBlock | TransferError::TimedOut) => {
                assert!(last.elapsed() < SOON, "stuck at {at} by {way}");
                if way == 0 {
                    thread::yield_now();
                }
            }
            Err(e) => panic!("recv {e} at {at}"),
        }
    }
}

/// All threads at once, and one that lets pipes and connections break.
fn stress(sessions: &TwoSessions, pairs: &[(Flow, Flow)], len: u64, seed: u64, posts: bool) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for session in [&sessions.client, &sessions.server] {
            scope.spawn(|| {
                let mut updates = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    updates.clear();
                    session.wait(&mut updates, Some(Duration::from_millis(3)));
                }
            });
        }
        let _done = Done(&done);
        scope.spawn(|| {
            let mut rng = fastrand::Rng::with_seed(seed);
            while !done.load(Ordering::Relaxed) {
                match rng.u32(0..6) {
                    0 => sessions.set_down(true),
                    1 | 2 => sessions.set_down(false),
                    3 => sessions.break_pipes(),
                    _ => {
                        for (near, _) in pairs {
                            if near.connection().is_some() {
                                kill(near, Kill::Fin);
                            }
                        }
                    }
                }
                thread::sleep(Duration::from_millis(rng.u64(1..80)));
            }
            sessions.set_down(false);
        });
        thread::scope(|inner| {
            for (n, (near, far)) in pairs.iter().enumerate() {
                let n = n as u64 * 4 + seed * 100;
                inner.spawn(move || sender(near, n, len, posts));
                inner.spawn(move || receiver(far, n + 1, len));
                inner.spawn(move || sender(far, n + 2, len, posts));
                inner.spawn(move || receiver(near, n + 3, len));
            }
        });
    });
}

/// Bytes in each direction.
const LEN: u64 = 4 << 20;

#[test]
fn threads_and_faults() {
    for seed in 0..3 {
        let sessions = TwoSessions::open(&options(&[]));
        let pairs: Vec<_> = (0..3).map(|_| sessions.carried_pair()).collect();
        stress(&sessions, &pairs, LEN, seed, false);
        println!("{seed}: {:?}", pairs[0].0.stats());
    }
}

#[test]
fn threads_and_faults_with_posts() {
    for seed in 0..3 {
        let sessions = TwoSessions::open(&options(&[]));
        let pairs: Vec<_> = (0..2).map(|_| sessions.carried_pair()).collect();
        stress(&sessions, &pairs, LEN, seed, true);
        println!("{seed}: {:?}", pairs[0].0.stats());
    }
}

#[test]
fn threads_and_faults_without_a_thread() {
    for seed in 0..3 {
        let sessions = TwoSessions::open(&options(&[]).without_thread());
        let done = AtomicBool::new(false);
        let pairs: Vec<_> = thread::scope(|scope| {
            for session in [&sessions.client, &sessions.server] {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        session.wait(&mut Vec::new(), Some(Duration::from_millis(10)));
                    }
                });
            }
            let _done = Done(&done);
            (0..2).map(|_| sessions.carried_pair()).collect()
        });
        stress(&sessions, &pairs, LEN / 4, seed, false);
        println!("{seed}: {:?}", pairs[0].0.stats());
    }
}

#[test]
fn threads_and_faults_and_signals() {
    if runs_alone_elsewhere("threads_and_faults_and_signals") {
        return;
    }
    storm();
    for seed in 0..2 {
        let sessions = TwoSessions::open(&options(&[]));
        let pairs: Vec<_> = (0..2).map(|_| sessions.carried_pair()).collect();
        stress(&sessions, &pairs, LEN / 2, seed, true);
        println!("{seed}: {:?}", pairs[0].0.stats());
    }
}

/// A flow is closed with bytes on their way, at a random moment of a break or a move.
#[test]
fn a_close_at_any_moment_delivers_all() {
    let rounds = 100;
    let sessions = TwoSessions::open(&options(&[]));
    for round in 0..rounds {
        let mut rng = fastrand::Rng::with_seed(round);
        sessions.set_down(false);
        let (near, far) = match rng.bool() {
            true => sessions.carried_pair(),
            false => sessions.pair(),
        };
        let len = rng.u64(1..300_000);
        let half = rng.bool();
        let tell = format!(
            "round {round} len {len} half {half} carried {}",
            near.connection().is_none()
        );
        let tcp_far = far.connection();
        let sessions = &sessions;
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(round + 1);
                thread::sleep(Duration::from_micros(rng.u64(0..4000)));
                match rng.u32(0..5) {
                    0 => sessions.set_down(true),
                    1 => sessions.break_pipes(),
                    2 => {
                        if let Some(ends) = tcp_far {
                            kill_ends(ends, Kill::Fin);
                        }
                    }
                    _ => {}
                }
            });
            let near = scope.spawn(move || {
                let mut data = vec![0; len as usize];
                pattern(&mut 0, &mut data);
                near.send_all(&data, LIMIT).unwrap();
                match half {
                    true => {
                        near.finish().unwrap();
                        Some(near)
                    }
                    false => {
                        near.close();
                        None
                    }
                }
            });
            receiver(&far, round, len);
            let begun = Instant::now();
            assert_eq!(far.recv(&mut [0], LIMIT), Ok(0), "{tell}");
            assert!(begun.elapsed() < SOON, "{tell} took {:?}", begun.elapsed());
            if let Some(near) = near.join().unwrap() {
                far.send_all(b"answer", LIMIT).unwrap();
                far.close();
                near.recv_exact(&mut [0; 6], LIMIT).unwrap();
                assert_eq!(near.recv(&mut [0], LIMIT), Ok(0), "{tell}");
            }
        });
    }
}
