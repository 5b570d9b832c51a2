//! Sessions that cannot be opened for lack of descriptors leave none behind. Each test is alone in its process, whose limit it changes.

mod common;

use std::fs::File;
use std::time::Duration;

use common::*;
use rustix::process::{Resource, Rlimit, setrlimit};
use slim::{AgentThread, Session, SessionError};

/// Highest number of descriptors that a session takes.
const MOST: usize = 100;

/// Lowers the hard limit, too: else the library makes descriptors above the soft limit.
fn limit_descriptors() {
    let limit = Rlimit {
        current: Some(256),
        maximum: Some(256),
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Opens a session with room for 0, 1, 2, ... more descriptors, until it opens.
fn opens_at_last(thread: AgentThread) {
    let before = descriptors();
    for room in 0..MOST {
        let taken = take_all(room);
        let mut options = options(&[]);
        options.agent_thread = thread;
        let opened = Session::open(options);
        drop(taken);
        let error = match opened {
            Ok(session) => {
                session.close(Duration::from_secs(10)).unwrap();
                assert_eq!(descriptors(), before, "after the close");
                assert!(room > 2, "{room}");
                return;
            }
            Err(error) => error,
        };
        assert!(matches!(error, SessionError::Agent(_)), "{error}");
        assert_eq!(error.errno(), Some(libc::EMFILE), "room {room}: {error}");
        assert_eq!(descriptors(), before, "room {room}: {error}");
        assert_eq!(agent_threads(), 0, "room {room}");
    }
    panic!("no session opens");
}

/// Takes all free descriptors but so many.
fn take_all(but: usize) -> Vec<File> {
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    taken.truncate(taken.len() - but);
    taken
}

#[test]
fn a_session_that_is_not_opened_leaves_no_descriptor() {
    if !runs_alone_elsewhere("a_session_that_is_not_opened_leaves_no_descriptor") {
        limit_descriptors();
        opens_at_last(AgentThread::Own);
    }
}

#[test]
fn a_session_without_a_thread_that_is_not_opened_leaves_no_descriptor() {
    if !runs_alone_elsewhere("a_session_without_a_thread_that_is_not_opened_leaves_no_descriptor") {
        limit_descriptors();
        opens_at_last(AgentThread::None);
    }
}

/// The session that is open keeps working, and what it has reserved.
#[test]
fn a_second_agent_that_is_not_started_takes_nothing_from_the_first() {
    if !runs_alone_elsewhere("a_second_agent_that_is_not_started_takes_nothing_from_the_first") {
        limit_descriptors();
        let session = session();
        let endpoint = listen(&session);
        let (near, far) = pair(&session, &endpoint);
        let before = descriptors();
        let taken = take_all(0);
        let second = Session::open(options(&[("SLIM_ATTEMPTS", "2")]));
        assert_eq!(second.err().unwrap().errno(), Some(libc::EMFILE));
        drop(taken);
        assert_eq!(descriptors(), before);
        for how in kills() {
            let resumes = near.stats().resumes;
            assert!(kill(&near, how));
            near.send_all(b"bytes", LIMIT).unwrap();
            far.recv_exact(&mut [0; 5], LIMIT).unwrap();
            wait_resumed(&session, &near, resumes);
        }
    }
}
