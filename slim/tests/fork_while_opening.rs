//! Forks while another thread opens and closes sessions. The file has one test, so that no other thread forks.

mod common;

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::*;

fn child() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    near.send_all(b"child", LIMIT).unwrap();
    far.recv_exact(&mut [0; 5], LIMIT).unwrap();
    session.close(Duration::from_secs(10)).unwrap();
}

#[test]
fn a_child_opens_a_session_although_a_thread_of_its_parent_was_opening_one() {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for n in 0..2 {
            let stop = &stop;
            scope.spawn(move || {
                let attempts = (n + 2).to_string();
                while !stop.load(Ordering::SeqCst) {
                    session_with(&[("SLIM_ATTEMPTS", &attempts)])
                        .close(Duration::from_secs(10))
                        .unwrap();
                }
            });
        }
        let mut failed = Vec::new();
        for n in 0..60 {
            thread::sleep(Duration::from_micros(1000 + 137 * n));
            // SAFETY: the child goes on with this thread alone, and ends without exit handlers.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let done = panic::catch_unwind(AssertUnwindSafe(child));
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(if done.is_ok() { 0 } else { 2 }) };
            }
            let status = wait_for_child(pid);
            if status != Some(0) {
                failed.push((n, status));
                if failed.len() == 3 {
                    break;
                }
            }
        }
        stop.store(true, Ordering::SeqCst);
        assert!(failed.is_empty(), "children and their statuses: {failed:?}");
    });
}
