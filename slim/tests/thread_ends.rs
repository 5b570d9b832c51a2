//! Sessions without an agent thread, in threads that cannot run the agent's event loop themselves: threads that end, and tasks of a
//! program's own runtime.

mod common;

use std::cell::RefCell;
use std::fs;
use std::thread;
use std::time::Duration;

use common::*;
use slim::{Flow, Session};

thread_local! {
    /// Registered before the variables of the runtime, so destroyed after them.
    static HELD: RefCell<Option<(Session, Flow)>> = const { RefCell::new(None) };
}

#[test]
fn a_session_in_a_thread_local_variable_is_closed_when_the_thread_ends() {
    let test = "a_session_in_a_thread_local_variable_is_closed_when_the_thread_ends";
    if runs_alone_elsewhere(test) {
        return;
    }
    let before = descriptors();
    for how in kills() {
        let far = thread::spawn(move || {
            HELD.with_borrow_mut(|held| {
                let session = Session::open(options(&[]).without_thread()).unwrap();
                let endpoint = listen(&session);
                let (near, far) = pair(&session, &endpoint);
                near.send_all(b"bytes", LIMIT).unwrap();
                assert!(kill(&near, how));
                *held = Some((session, near));
                far
            })
        });
        // The session's end closes this flow, too.
        drop(far.join().unwrap());
    }
    assert_eq!(descriptors(), before);
}

/// Number of bytes of address space that this process uses.
fn address_space() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

/// Limits the address space of this process.
fn limit_address_space(bytes: u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the structure is valid.
    unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    limit.rlim_cur = bytes;
    // SAFETY: as above.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    assert_eq!(set, 0);
}

#[test]
fn a_task_goes_on_where_no_thread_can_be_started() {
    if runs_alone_elsewhere("a_task_goes_on_where_no_thread_can_be_started") {
        return;
    }
    let session = Session::open(options(&[]).without_thread()).unwrap();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        // Less than the stack of a thread.
        limit_address_space(address_space() + (1 << 20));
        assert!(thread::Builder::new().spawn(|| ()).is_err());
        near.send_all(b"bytes", LIMIT).unwrap();
        assert!(kill(&near, Kill::Fin));
        let mut got = [0; 5];
        for _ in 0..50 {
            session.wait(&mut Vec::new(), Some(Duration::from_millis(1)));
        }
        let opened = Session::open(options(&[("SLIM_LINGER", "73")]).without_thread());
        println!("{}", opened.expect_err("it needs a thread"));
        limit_address_space(libc::RLIM_INFINITY);
        far.recv_exact(&mut got, LIMIT).unwrap();
        assert_eq!(&got, b"bytes");
        wait_resumed(&session, &near, 0);
    });
    drop((near, far, endpoint));
    session.close(LIMIT.unwrap()).unwrap();
}
