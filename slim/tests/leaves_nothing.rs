//! A closed session leaves no thread and no descriptor. The test is alone in its process, so that all threads and descriptors
//! belong to it.

mod common;

use std::time::Duration;

use common::*;

#[test]
fn no_thread_and_no_descriptor_is_left() {
    let before = descriptors();
    assert_eq!(agent_threads(), 0);
    for round in 0..3 {
        let (one, other) = (session(), session_with(&[("SLIM_ATTEMPTS", "2")]));
        let same = session();
        assert_eq!(agent_threads(), 2, "sessions with equal settings share one");
        for session in [&one, &other, &same] {
            let endpoint = listen(session);
            let flows: Vec<_> = (0..4).map(|_| pair(session, &endpoint)).collect();
            for (n, (near, far)) in flows.iter().enumerate() {
                if n % 2 == round % 2 {
                    kills()
                        .into_iter()
                        .for_each(|how| assert!(kill(near, how) || near.connection().is_none()));
                }
                near.send_all(b"bytes", LIMIT).unwrap();
                far.recv_exact(&mut [0; 5], LIMIT).unwrap();
            }
        }
        let limit = Duration::from_secs(10);
        other.close(limit).unwrap();
        assert_eq!(agent_threads(), 1);
        drop(one);
        assert_eq!(agent_threads(), 1);
        same.close(limit).unwrap();
        assert_eq!(agent_threads(), 0);
        assert_eq!(descriptors(), before, "round {round}");
    }
}
