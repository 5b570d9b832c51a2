//! No free descriptors. The test is alone in its process, whose limit it changes.

mod common;

use std::fs::File;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use slim::{AcceptError, Endpoint, Session};

fn limit_descriptors(to: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: Some(to),
        maximum,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

/// Takes all free descriptors.
fn take_all() -> Vec<File> {
    let mut taken = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        taken.push(file);
    }
    taken
}

/// How often a program that waits for updates is woken within a second.
fn wakes(session: &Session, endpoint: &Endpoint) -> u32 {
    let (begun, mut wakes) = (Instant::now(), 0);
    let mut updates = Vec::new();
    while let Some(left) = Duration::from_secs(1).checked_sub(begun.elapsed()) {
        updates.clear();
        session.wait(&mut updates, Some(left));
        if updates.iter().any(|update| update.acceptable) {
            let no = endpoint.try_accept().unwrap_err();
            assert_eq!(no, AcceptError::Kernel(libc::EMFILE));
        }
        wakes += 1;
    }
    wakes
}

#[test]
fn connections_wait_without_a_busy_loop_until_descriptors_are_free() {
    let session = session();
    let by_address = listen(&session);
    let by_blob = listen(&session);
    let blob = by_blob.blob().unwrap();
    let before = descriptors().len();
    for endpoint in [&by_address, &by_blob] {
        let to = match endpoint.id() == by_blob.id() {
            true => door(&blob),
            false => endpoint.local_addr(),
        };
        let waiting: Vec<_> = (0..3).map(|_| TcpStream::connect(to).unwrap()).collect();
        limit_descriptors(200);
        let taken = take_all();
        let wakes = wakes(&session, endpoint);
        // Without a connection that waits there is nothing to report.
        let other = match endpoint.id() == by_blob.id() {
            true => &by_address,
            false => &by_blob,
        };
        let none = other.try_accept().unwrap_err();
        drop(taken);
        limit_descriptors(1024);
        println!("{wakes} wakes");
        assert!((1..50).contains(&wakes), "{wakes} wakes in a second");
        assert_eq!(none, AcceptError::WouldBlock);
        // The endpoint accepts again, and the session tells so.
        let begun = Instant::now();
        let mut updates = Vec::new();
        let mut got = 0;
        while got < 3 {
            updates.clear();
            session.wait(&mut updates, LIMIT);
            assert!(begun.elapsed() < Duration::from_secs(2), "got {got}");
            if !updates
                .iter()
                .any(|u| u.id == endpoint.id() && u.acceptable)
            {
                continue;
            }
            if endpoint.id() == by_address.id() {
                while let Ok(flow) = endpoint.try_accept() {
                    drop(flow);
                    got += 1;
                }
            } else {
                assert_eq!(endpoint.try_accept().unwrap_err(), AcceptError::WouldBlock);
                // The door has accepted the silent connections.
                got = descriptors().len() - before - waiting.len();
            }
        }
    }
    let (near, far) = pair(&session, &by_address);
    near.send_all(b"x", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
}
