//! Descriptor numbers while connections are resumed.
//!
//! One test: it must be the only one in the process that opens anything.

mod common;

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Kill, Server};
use slim_agent::Agent;
use slim_core::config::Config;
use slim_sys::numbers;

const RESUMES: u32 = 200;

/// The descriptor number that the application would get now; it is free again afterwards.
fn lowest() -> RawFd {
    numbers::take(|| File::open("/dev/null").unwrap().as_raw_fd())
}

#[test]
fn the_application_always_gets_the_lowest_number() {
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let (near, far) = server.pair(&client);
    near.wait_live();
    far.wait_live();
    let round_trip = || {
        let mut buf = [0; 4];
        near.write(b"ping").unwrap();
        far.read_exact(&mut buf).unwrap();
        far.write(b"pong").unwrap();
        near.read_exact(&mut buf).unwrap();
    };
    // The connections that the test itself makes have low numbers; those that replace them do not.
    near.kill(Kill::Fin);
    round_trip();

    let expected = lowest();
    let done = AtomicBool::new(false);
    let (mut asked, mut wrong) = (0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..RESUMES {
                near.kill(Kill::Fin);
                round_trip();
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            asked += 1;
            wrong += u32::from(lowest() != expected);
        }
    });
    assert!(near.state().resumed >= RESUMES);
    println!("{asked} numbers during {RESUMES} resumes");
    assert_eq!(wrong, 0, "of {asked} numbers");

    sleeping_calls_do_not_delay_the_agent();
}

/// A call may sleep for ever once it has its number, as `accept` does. It delays nothing, even if other calls begin all the time.
fn sleeping_calls_do_not_delay_the_agent() {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sleep = || {
            while !stop.load(Ordering::Relaxed) {
                thread::park();
            }
        };
        let sleeper = scope.spawn(move || numbers::take_and_wait(sleep));
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                numbers::take_and_wait(|| ());
            }
        });
        thread::sleep(Duration::from_millis(10));
        let begun = Instant::now();
        for _ in 0..1000 {
            numbers::make(|| ());
        }
        let took = begun.elapsed();
        stop.store(true, Ordering::Relaxed);
        sleeper.thread().unpark();
        assert!(took < Duration::from_millis(100), "took {took:?}");
    });
}
