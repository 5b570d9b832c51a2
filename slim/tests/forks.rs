//! A forked child drops its parent's session and opens its own. The file has one test, so that no other test thread holds a lock
//! at the fork.

mod common;

use std::panic::{self, AssertUnwindSafe};
use std::time::Duration;

use common::*;
use slim::{Endpoint, Flow, Session};

/// Runs in the child. Returns its exit code.
fn child(parents: (Flow, Flow, Endpoint, Session)) -> i32 {
    // A mistake of the program: the child must not drive the parent's agent, whose epoll instance it shares.
    parents.3.progress(&mut Vec::new());
    // This must neither close the parent's connections nor send anything on them.
    drop(parents);
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    near.send_all(b"child", LIMIT).unwrap();
    far.recv_exact(&mut [0; 5], LIMIT).unwrap();
    for how in kills() {
        kill(&near, how);
        near.send_all(b"again", LIMIT).unwrap();
        far.recv_exact(&mut [0; 5], LIMIT).unwrap();
    }
    drop((near, far, endpoint));
    match session.close(Duration::from_secs(10)) {
        Ok(()) if agent_threads() == 0 => 0,
        _ => 1,
    }
}

#[test]
fn a_child_may_drop_its_parents_session_and_open_its_own() {
    fork_beside(session());
    fork_beside(Session::open(options(&[]).without_thread()).unwrap());
}

fn fork_beside(session: Session) {
    let endpoint = listen(&session);
    endpoint.blob().unwrap();
    let (near, far) = pair(&session, &endpoint);
    // SAFETY: the child goes on with this thread alone. The others, the agent's and the test's main thread, which waits, hold no
    // lock that it needs.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let parents = (near, far, endpoint, session);
        let code = panic::catch_unwind(AssertUnwindSafe(|| child(parents)));
        let code = code.unwrap_or(2);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    near.send_all(b"parent", LIMIT).unwrap();
    far.recv_exact(&mut [0; 6], LIMIT).unwrap();
    let mut status = -1;
    // SAFETY: the status is written to a variable of ours.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child has failed");
    near.send_all(b"still!", LIMIT).unwrap();
    far.recv_exact(&mut [0; 6], LIMIT).unwrap();
    assert_eq!(near.stats().resumes + far.stats().resumes, 0);
    near.finish().unwrap();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    session.close(Duration::from_secs(10)).unwrap();
    assert_eq!(agent_threads(), 0);
}
