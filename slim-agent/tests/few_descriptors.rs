//! A process that has hardly any descriptors left. A program of its own: it lowers the limit.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{Kill, Server};
use slim_agent::Agent;
use slim_core::config::Config;
use slim_sys::fds;

const LIMIT: u64 = 148;
const FLOWS: usize = 50;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn flows_resume_one_after_the_other_when_descriptors_are_short() {
    let mut limit = libc::rlimit {
        rlim_cur: LIMIT,
        rlim_max: LIMIT,
    };
    // SAFETY: `limit` is valid for reads, then for writes.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = LIMIT;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
    assert_eq!(fds::floor(), 111);
    let client = Agent::start(Config::default()).unwrap();
    let server = Server::start(Config::default());
    let pairs: Vec<_> = (0..FLOWS).map(|_| server.pair(&client)).collect();
    for (near, far) in &pairs {
        near.wait_live();
        far.wait_live();
    }
    let used = open_descriptors();
    assert!(
        used + FLOWS > LIMIT as usize,
        "{used} in use: there is no shortage"
    );
    let begun = Instant::now();
    for (near, _) in &pairs {
        near.kill(Kill::Fin);
    }
    thread::scope(|scope| {
        for (n, (near, far)) in pairs.iter().enumerate() {
            scope.spawn(move || {
                let mut buf = [0; 8];
                near.write(&(n as u64).to_be_bytes()).unwrap();
                far.read_exact(&mut buf).unwrap();
                assert_eq!(u64::from_be_bytes(buf), n as u64);
                far.write(&buf).unwrap();
                near.read_exact(&mut buf).unwrap();
            });
        }
    });
    let took = begun.elapsed();
    println!("{FLOWS} flows in {took:?}");
    assert!(took < Duration::from_secs(10), "took {took:?}");
}
