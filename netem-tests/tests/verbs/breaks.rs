//! How both sides learn of a break.

use std::time::Instant;

use slim_rdma::{AdapterEvent, Break, QueuePair, Verbs, WorkError, ibverbs::VerbsAdapter};

use super::{DETECTION, connect, release, rxe, sizes, wait};

fn broken(pair: &mut QueuePair, adapter: &mut VerbsAdapter) -> Option<Break> {
    pair.progress(adapter);
    pair.broken()
}

const NO_ANSWER: Break = Break::Work(WorkError::RetryExceeded);

#[test]
fn breaks_are_noticed() {
    let Some(rxe) = rxe("breaks::breaks_are_noticed") else {
        return;
    };
    let mut adapters = rxe.open();

    // The peer's queue pair is in its error state. It knows, and the other side learns it by a ping.
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    let [here, there] = &mut adapters;
    let [near, far] = &mut pairs;
    there.fail(far.number());
    let flushed = wait("own failure", DETECTION, || broken(far, there));
    assert_eq!(flushed, Break::Work(WorkError::Flushed));
    assert_eq!(broken(near, here), None);
    let begin = Instant::now();
    near.ping(here);
    assert_eq!(
        wait("peer failed", DETECTION, || broken(near, here)),
        NO_ANSWER
    );
    println!("a ping to a failed queue pair: {:.0?}", begin.elapsed());
    release(pairs, &mut adapters);

    // The peer's process has gone.
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    let [here, there] = &mut adapters;
    let [near, far] = &mut pairs;
    there.destroy(far.number());
    let begin = Instant::now();
    near.send(here, &[1; 1000]).unwrap();
    near.ping(here);
    assert_eq!(
        wait("peer gone", DETECTION, || broken(near, here)),
        NO_ANSWER
    );
    println!(
        "a write to a queue pair that is gone: {:.0?}",
        begin.elapsed()
    );
    release(pairs, &mut adapters);

    // The line drops everything. The side without a write on its way learns nothing.
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    let [here, there] = &mut adapters;
    let [near, far] = &mut pairs;
    rxe.line("loss 100%");
    let begin = Instant::now();
    near.ping(here);
    assert_eq!(
        wait("black hole", DETECTION, || broken(near, here)),
        NO_ANSWER
    );
    println!("a ping into a black hole: {:.0?}", begin.elapsed());
    assert_eq!(broken(far, there), None);
    far.ping(there);
    assert_eq!(
        wait("black hole", DETECTION, || broken(far, there)),
        NO_ANSWER
    );
    rxe.plain();
    release(pairs, &mut adapters);
    for adapter in &mut adapters {
        while let Some(event) = adapter.event() {
            println!("an event: {event:?}");
            assert!(matches!(event, AdapterEvent::PairFailed(_)));
        }
    }

    // The port loses its link.
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    let [here, _] = &mut adapters;
    let [near, _] = &mut pairs;
    near.send(here, &[1; 100]).unwrap();
    let begin = Instant::now();
    rxe.down(0);
    let event = wait("no link", DETECTION, || here.event());
    println!("no link: {event:?} after {:.0?}", begin.elapsed());
    assert_eq!((event, here.is_up()), (AdapterEvent::PortDown, false));
    near.handle_event(event);
    assert_eq!(near.broken(), Some(Break::Event(event)));
    let other = wait("no link there", DETECTION, || adapters[1].event());
    assert_eq!(other, AdapterEvent::PortDown);
    release(pairs, &mut adapters);
    rxe.up(0);
    for adapter in &mut adapters {
        wait("link", DETECTION, || {
            (adapter.event() == Some(AdapterEvent::PortUp)).then_some(())
        });
        wait("address", DETECTION, || adapter.is_up().then_some(()));
    }
    // It works again.
    let mut pairs = connect(&mut adapters, [sizes(4096, 16); 2]);
    super::transfer(&mut adapters, &mut pairs, 10_000, 1000);
    release(pairs, &mut adapters);
}
