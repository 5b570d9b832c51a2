//! What a program is told, and when: updates and events.

mod common;

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use slim::{FlowChange, Session, TransferError, Update};

fn writable(session: &Session, id: u64, limit: Duration) -> bool {
    let begun = Instant::now();
    let mut updates: Vec<Update> = Vec::new();
    while let Some(left) = limit.checked_sub(begun.elapsed()) {
        session.wait(&mut updates, Some(left));
        if updates.iter().any(|u| u.id == id && u.writable) {
            return true;
        }
    }
    false
}

#[test]
fn a_send_that_takes_less_than_offered_is_followed_by_an_update() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    // The flow is reported as writable once when it opens.
    assert!(writable(&session, near.id(), Duration::from_secs(5)));
    assert!(!writable(&session, near.id(), Duration::from_millis(50)));
    // A send that takes everything is not followed by an update.
    assert_eq!(near.try_send(b"all of it"), Ok(9));
    assert!(!writable(&session, near.id(), Duration::from_millis(50)));
    // A short one is, as with edge-triggered epoll, as soon as there is room.
    let block = vec![7; 64 << 20];
    for n in 0..20 {
        let sent = near.try_send(&block).unwrap();
        assert!(sent < block.len());
        if n == 0 {
            assert!(!writable(&session, near.id(), Duration::from_millis(50)));
        }
        let mut rest = sent + if n == 0 { 9 } else { 0 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut buf = vec![0; 1 << 20];
                while rest > 0 {
                    rest -= far.recv(&mut buf, LIMIT).unwrap();
                }
            });
            let told = writable(&session, near.id(), Duration::from_secs(5));
            assert!(told, "{n}: not told of new room");
        });
    }
    // A blocking send waits by itself, and leaves no update behind.
    std::thread::scope(|scope| {
        scope.spawn(|| far.recv_exact(&mut vec![0; block.len()], LIMIT).unwrap());
        near.send_all(&block, LIMIT).unwrap();
    });
    assert!(!writable(&session, near.id(), Duration::from_millis(50)));
}

#[test]
fn a_resume_reports_its_own_replayed_bytes() {
    if kills().len() == 1 {
        return println!("skip: only ss -K loses bytes for certain");
    }
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let block = vec![7; 8 << 20];
    for _ in 0..5 {
        let before = near.stats().resumes;
        let sent = near.try_send(&block).unwrap();
        wait_until("killed", || kill(&near, Kill::Destroy));
        std::thread::scope(|scope| {
            scope.spawn(|| far.recv_exact(&mut vec![0; sent], LIMIT).unwrap());
            wait_resumed(&session, &near, before);
        });
    }
    let resumes: Vec<u64> = session
        .events()
        .iter()
        .filter(|event| event.flow == near.id())
        .filter_map(|event| match event.change {
            FlowChange::Resumed { replayed, .. } => Some(replayed),
            _ => None,
        })
        .collect();
    let stats = near.stats();
    println!("{resumes:?}, {stats:?}");
    assert!(resumes.iter().filter(|n| **n > 0).count() >= 2);
    assert!(resumes.iter().sum::<u64>() <= stats.replayed);
}

#[test]
fn a_flow_survives_an_end_that_only_progress_has_seen() {
    let session = session();
    let endpoint = listen(&session);
    for n in 0..40 {
        let near = session.connect(endpoint.local_addr(), LIMIT).unwrap();
        // The connection breaks before the peers know each other.
        kill(&near, Kill::Fin);
        session.progress(&mut Vec::new());
        let far = endpoint.accept(LIMIT).unwrap();
        for _ in 0..n {
            session.progress(&mut Vec::new());
        }
        near.send_all(b"there", LIMIT).unwrap();
        let mut got = [0; 5];
        far.recv_exact(&mut got, LIMIT)
            .unwrap_or_else(|e| panic!("{n}: {e}, {near:?}, {far:?}"));
        far.send_all(b"here", LIMIT).unwrap();
        near.recv_exact(&mut got[..4], LIMIT).unwrap();
        assert_eq!(&got, b"heree");
    }
}

#[test]
fn a_failed_flow_releases_its_posts_although_nobody_makes_progress() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let owner = Arc::new(vec![7; 64 << 20]);
    struct Shared(Arc<Vec<u8>>);
    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    for _ in 0..2 {
        near.post(Bytes::from_owner(Shared(owner.clone()))).unwrap();
    }
    far.reset();
    let lost = near.recv(&mut [0], LIMIT).unwrap_err();
    assert!(matches!(lost, TransferError::Lost(_)), "{lost:?}");
    let begun = Instant::now();
    while Arc::strong_count(&owner) > 1 {
        assert!(begun.elapsed() < Duration::from_secs(2), "not released");
        std::thread::sleep(Duration::from_millis(1));
    }
    let refused = near.post(Bytes::from_static(b"x"));
    assert!(
        matches!(refused, Err(TransferError::Lost(_))),
        "{refused:?}"
    );
}

#[test]
fn wait_tells_only_of_updates_that_it_has_added() {
    let session = session();
    let mut updates = vec![Update::default()];
    assert!(!session.wait(&mut updates, Some(Duration::from_millis(10))));
    assert_eq!(updates.len(), 1);
}

#[test]
fn a_callback_that_panics_or_makes_progress_harms_nothing() {
    let session = Arc::new(session());
    let endpoint = listen(&session);
    let inner = Arc::downgrade(&session);
    session.on_event(move |event| {
        let session = inner.upgrade().unwrap();
        session.progress(&mut Vec::new());
        session.stats();
        assert!(event.change != FlowChange::Connected, "on purpose");
    });
    let near = session.connect(endpoint.local_addr(), LIMIT).unwrap();
    let far = endpoint.accept(LIMIT).unwrap();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| {
        if !info.to_string().contains("on purpose") {
            let _ = writeln!(std::io::stderr(), "{info}");
        }
    }));
    for _ in 0..2 {
        // One panic for each end.
        wait_until("panicked", || {
            let progress = || session.progress(&mut Vec::new());
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(progress)).is_err()
        });
    }
    std::panic::set_hook(hook);
    near.send_all(b"x", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
    session.progress(&mut Vec::new());
    assert!(session.events().is_empty());
}
