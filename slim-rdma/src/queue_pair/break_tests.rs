//! How queue pairs break, and who learns of it.

use super::tests::{bytes, sizes, two};
use super::*;
use crate::in_memory::Step;

#[test]
fn a_lost_completion_of_a_receive_is_noticed_before_wrong_bytes_are_read() {
    let mut two = two(sizes(4096, 64));
    two.send(&bytes(0, 10));
    two.settle();
    two.send(&bytes(10, 10));
    two.fabric.take(Step::Arrive(two.near.number()));
    two.fabric.take(Step::Place);
    two.fabric.take(Step::LoseCompletion(two.far.number()));
    two.send(&bytes(20, 10));
    two.fabric.run();
    assert_eq!(two.recv(100).unwrap(), bytes(0, 10));
    let wrong = Break::WrongCompletion;
    assert_eq!(two.recv(100), Err(PairError::Broken(wrong)));
    assert_eq!((two.far.received(), two.far.broken()), (10, Some(wrong)));
    // Nothing that comes later counts.
    two.send(&bytes(30, 10));
    two.fabric.run();
    assert_eq!(two.far.suspend(&mut two.there), 10);
}

#[test]
fn a_lost_completion_that_no_message_follows_is_noticed_after_a_ping() {
    let mut two = two(sizes(4096, 64));
    two.send(&bytes(0, 10));
    two.fabric.take(Step::Arrive(two.near.number()));
    two.fabric.take(Step::Place);
    two.fabric.take(Step::LoseCompletion(two.far.number()));
    two.settle();
    assert_eq!(two.recv(100), Err(PairError::WouldBlock));
    two.near.ping(&mut two.here);
    two.fabric.run();
    let wrong = Break::WrongCompletion;
    assert_eq!(two.recv(100), Err(PairError::Broken(wrong)));
    assert_eq!(two.far.suspend(&mut two.there), 0);
}

#[test]
fn data_that_arrived_counts_although_the_sender_was_told_that_it_failed() {
    let mut two = two(sizes(4096, 64));
    two.send(&bytes(0, 10));
    two.fabric.take(Step::Arrive(two.near.number()));
    two.fabric.take(Step::Fail(two.near.number()));
    two.fabric.run();
    two.near.progress(&mut two.here);
    let failed = Break::Work(WorkError::RetryExceeded);
    assert_eq!(two.near.broken(), Some(failed));
    assert_eq!(
        two.near.send(&mut two.here, &[1]),
        Err(PairError::Broken(failed))
    );
    // The peer does not notice.
    assert_eq!(two.recv(100).unwrap(), bytes(0, 10));
    assert_eq!(two.recv(100), Err(PairError::WouldBlock));
    assert_eq!(two.far.suspend(&mut two.there), 10);
    two.release();
}

#[test]
fn an_idle_side_learns_of_a_dead_path_by_a_ping_only() {
    let mut two = two(sizes(64, 4));
    // The side that fails has something to send; the other one has not.
    two.fabric.take(Step::Fail(two.far.number()));
    two.settle();
    assert_eq!(two.near.broken(), None);
    two.near.ping(&mut two.here);
    two.near.ping(&mut two.here);
    two.settle();
    let failed = Some(Break::Work(WorkError::RetryExceeded));
    assert_eq!(two.near.broken(), failed);
    // On a path that works nobody notices it, and it takes no slot.
    let mut two = self::two(sizes(64, 4));
    for _ in 0..100 {
        two.near.ping(&mut two.here);
        two.fabric.run();
        assert!(!two.far.progress(&mut two.there));
        two.near.progress(&mut two.here);
    }
    assert_eq!(two.near.broken(), None);
    two.send(&[1, 2, 3]);
}

#[test]
fn events_break_the_pair_that_they_concern() {
    let mut two = two(sizes(64, 4));
    two.near
        .handle_event(AdapterEvent::PairFailed(two.far.number()));
    two.near.handle_event(AdapterEvent::PortUp);
    assert_eq!(two.near.broken(), None);
    two.far
        .handle_event(AdapterEvent::PairFailed(two.far.number()));
    two.fabric.report(0, AdapterEvent::Removed);
    assert_eq!(two.there.event(), None);
    let event = two.here.event().unwrap();
    two.near.handle_event(event);
    assert_eq!(two.near.broken(), Some(Break::Event(AdapterEvent::Removed)));
    assert!(matches!(two.far.broken(), Some(Break::Event(_))));
}

#[test]
fn a_write_outside_of_the_ring_is_refused_and_reported_to_both() {
    let mut two = two(sizes(64, 4));
    two.near.peer.addr += 60;
    two.send(&bytes(0, 20));
    two.fabric.run();
    two.near.progress(&mut two.here);
    assert_eq!(
        two.near.broken(),
        Some(Break::Work(WorkError::RemoteAccess))
    );
    let event = two.there.event().unwrap();
    assert_eq!(
        (event, two.here.event()),
        (AdapterEvent::PairFailed(two.far.number()), None)
    );
    two.far.handle_event(event);
    assert_eq!(two.far.broken(), Some(Break::Event(event)));
    assert_eq!(two.far.suspend(&mut two.there), 0);
}

/// The peer's program is wrong, or somebody has guessed a key.
#[test]
fn impossible_messages_break_the_pair_and_change_no_counter() {
    let said = Immediate::default();
    for (immediate, len, violation) in [
        (
            Immediate {
                recorded: 11,
                ..said
            },
            0,
            Violation::Recorded,
        ),
        (
            Immediate {
                recorded: 1 << 20,
                ..said
            },
            0,
            Violation::Recorded,
        ),
        (Immediate { freed: 1, ..said }, 0, Violation::Freed),
        (
            Immediate {
                recorded: 10,
                freed: 11,
                ..said
            },
            0,
            Violation::Freed,
        ),
        (Immediate { slots: 2, ..said }, 0, Violation::Slots),
        (said, 65, Violation::Overflow),
    ] {
        let mut two = two(PairSizes {
            inline: 64,
            ..sizes(64, 4)
        });
        two.send(&bytes(0, 10));
        let far = two.far.number();
        let ring = two.near.regions.ring;
        let to = two.here.remote_key(ring);
        // Longer than the ring, the second half at its start.
        let all = vec![5; len];
        for (n, piece) in all
            .chunks(64)
            .chain((len == 0).then_some(&[][..]))
            .enumerate()
        {
            let work = WriteWork {
                id: n as u64,
                payload: Payload::Inline(piece),
                to,
                immediate: Some(immediate.pack()),
                signaled: false,
            };
            two.there.post_write(far, &work).unwrap();
        }
        two.fabric.run();
        two.near.progress(&mut two.here);
        assert_eq!(
            two.near.broken(),
            Some(Break::Violation(violation)),
            "{immediate:?}"
        );
        assert_eq!(two.near.recorded_by_peer(), 0);
        // Nothing that comes later counts.
        let later = WriteWork {
            id: 9,
            payload: Payload::Inline(&[7]),
            to,
            immediate: Some(said.pack()),
            signaled: false,
        };
        two.there.post_write(far, &later).unwrap();
        two.fabric.run();
        assert_eq!(two.near.suspend(&mut two.here), len as u64 / 64 * 64);
    }
}
