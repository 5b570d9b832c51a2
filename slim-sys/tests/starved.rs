//! A look at the threads of the process takes no descriptor number of the application.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slim_sys::{RunnableThreads, numbers};

#[test]
fn a_look_at_threads_takes_no_number_of_the_application() {
    numbers::begin();
    let open = || numbers::take(|| File::open("/dev/null").map(|file| file.as_raw_fd()));
    let lowest = open().unwrap();
    let (done, looks, mut others) = (AtomicBool::new(false), AtomicU32::new(0), 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                slim_sys::as_agent(RunnableThreads::now);
                looks.fetch_add(1, Ordering::Relaxed);
            }
        });
        let begun = Instant::now();
        while looks.load(Ordering::Relaxed) < 300 && begun.elapsed() < Duration::from_secs(20) {
            others += u32::from(open().unwrap() != lowest);
        }
        done.store(true, Ordering::Relaxed);
    });
    numbers::end();
    assert_eq!(others, 0, "{looks:?} looks");
}
