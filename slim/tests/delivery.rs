//! Calls for programs that spread bytes over several flows: limit of unsent bytes, delivery, suspicion.

mod common;

use std::time::{Duration, Instant};

use common::*;
use slim::{Flow, FlowChange, TransferError};

/// Sends until the kernel takes no more; returns the number of bytes.
fn fill(flow: &Flow) -> u64 {
    let bytes = vec![7; 64 << 10];
    let mut sent = 0;
    loop {
        match flow.try_send(&bytes) {
            Ok(n) => sent += n as u64,
            Err(TransferError::WouldBlock) => return sent,
            Err(e) => panic!("{e}"),
        }
    }
}

/// Fills the flow until neither kernel takes more: the receiver does not receive.
fn fill_both_kernels(flow: &Flow) -> u64 {
    let mut sent = 0;
    loop {
        let more = fill(flow);
        sent += more;
        std::thread::sleep(Duration::from_millis(20));
        if more == 0 {
            return sent;
        }
    }
}

fn receive(flow: &Flow, bytes: u64) {
    let mut buf = vec![0; bytes as usize];
    flow.recv_exact(&mut buf, LIMIT).unwrap();
    assert!(buf.iter().all(|b| *b == 7));
}

#[test]
fn the_limit_of_unsent_bytes_outlives_the_connection() {
    const UNSENT: u32 = 32 << 10;
    let session = session();
    let endpoint = listen(&session);
    let (free, far) = pair(&session, &endpoint);
    let (limited, limited_far) = pair(&session, &endpoint);
    limited.limit_unsent(UNSENT);
    // Bytes that the sending kernel holds. The receiver's kernel has no room for more.
    let unsent = |flow: &Flow| {
        let delivery = flow.delivery().unwrap();
        assert_eq!(delivery.sent, flow.stats().sent);
        delivery.sent - delivery.acknowledged
    };
    let all = fill_both_kernels(&free);
    let unlimited = unsent(&free);
    assert!(unlimited > 1 << 20, "{unlimited}");
    receive(&far, all);
    for resumes in 0..2 {
        let sent = fill_both_kernels(&limited);
        // The kernel takes the last piece as a whole; a few packets may be in flight.
        let most = u64::from(UNSENT) + (192 << 10);
        assert!(unsent(&limited) <= most, "{resumes}: {}", unsent(&limited));
        receive(&limited_far, sent);
        if resumes == 0 {
            assert!(kill(&limited, Kill::Fin));
            wait_resumed(&session, &limited, 0);
        }
    }
}

#[test]
fn delivery_counts_acknowledged_bytes_and_knows_the_round_trip_time() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    near.send_all(&[7; 1000], LIMIT).unwrap();
    receive(&far, 1000);
    wait_until("acknowledged", || {
        near.delivery().is_some_and(|d| d.acknowledged == 1000)
    });
    let delivery = near.delivery().unwrap();
    assert_eq!((delivery.sent, delivery.in_flight), (1000, 0));
    let trip = delivery.round_trip;
    assert!(
        trip > Duration::ZERO && trip < Duration::from_secs(1),
        "{trip:?}"
    );
}

#[test]
fn a_suspected_connection_is_replaced_and_stays_in_use_until_then() {
    let session = session();
    let endpoint = listen(&session);
    let (near, far) = pair(&session, &endpoint);
    let before = near.connection();
    near.suspect();
    // Many suspicions are one.
    near.suspect();
    let begun = Instant::now();
    let mut sent = 0;
    while near.stats().resumes == 0 {
        assert!(begun.elapsed() < LIMIT.unwrap(), "not replaced");
        // Sent and received by the old connection or the new one.
        near.send_all(&[7; 100], LIMIT).unwrap();
        receive(&far, 100);
        sent += 100;
    }
    assert_ne!(near.connection(), before);
    near.send_all(&[7; 100], LIMIT).unwrap();
    receive(&far, 100);
    assert_eq!(
        (near.stats().sent, far.stats().received),
        (sent + 100, sent + 100)
    );
    let events = session.events();
    assert!(
        events
            .iter()
            .all(|e| !matches!(e.change, FlowChange::Escalated { .. }))
    );
}
