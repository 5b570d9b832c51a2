use slim_rdma::in_memory::{Fabric, MemoryAdapter};
use slim_rdma::{HalfPair, Verbs};

use super::{LONGEST_PAUSE, MOST_QUIET, SharedPair};
use crate::settings::VerbsSettings;

/// Two queue pairs that are connected and armed, and whose counters are reset. Nothing takes their reports but the test.
fn connected(fabric: &Fabric) -> [SharedPair<MemoryAdapter>; 2] {
    let sizes = VerbsSettings::default().sizes;
    let halves = [0, 1].map(|host| {
        let mut adapter = fabric.adapter(host);
        let half = HalfPair::open(&mut adapter, sizes).unwrap();
        (half, adapter)
    });
    let peers = [1, 0].map(|n: usize| halves[n].0.address());
    let mut peers = peers.iter();
    halves.map(|(half, mut adapter)| {
        let pair = half.connect(&mut adapter, peers.next().unwrap()).unwrap();
        let pair = SharedPair::new(pair, adapter, Default::default());
        pair.make_event().unwrap();
        pair.with(|used| used.reset());
        pair
    })
}

fn is_signalled(pair: &SharedPair<MemoryAdapter>) -> bool {
    slim_sys::ready(pair.event().unwrap().raw(), libc::POLLIN) != 0
}

/// The credits of a stream in one direction do not wake the port's task one by one for ever.
#[test]
fn credits_cause_few_reports_until_the_next_turn() {
    let fabric = Fabric::new(1);
    let [near, far] = connected(&fabric);
    let mut taker = fabric.adapter(0);
    let mut credit = || {
        near.with(|used| used.pair.send(used.verbs, &[1; 8]))
            .unwrap();
        fabric.run();
        far.with(|used| {
            used.pair.recv(used.verbs, &mut [0; 8]).unwrap();
            used.pair.tell_count(used.verbs);
        });
        fabric.run();
        let reports = std::iter::from_fn(|| taker.reported());
        reports.map(|_| near.reported()).last()
    };
    for _ in 0..MOST_QUIET {
        assert_eq!(credit(), Some(false), "armed again, and nothing is due");
        assert!(!is_signalled(&near));
    }
    assert_eq!(credit(), Some(true), "the port is to look again");
    assert!(is_signalled(&near), "for no reason");
    for _ in 0..10 {
        assert_eq!(credit(), None, "not armed");
    }
    assert_eq!(near.turn(), None, "nothing is due");
    assert_eq!(credit(), Some(false));
}

/// A report that came before somebody reset the counter finds the queue pair armed all the same.
#[test]
fn a_report_that_comes_late_does_no_harm() {
    let fabric = Fabric::new(1);
    let [near, far] = connected(&fabric);
    let mut taker = fabric.adapter(0);
    far.with(|used| used.pair.send(used.verbs, b"one")).unwrap();
    fabric.run();
    // Somebody takes the message, and resets the counter, which arms the queue pair.
    near.with(|used| {
        used.pair.recv(used.verbs, &mut [0; 8]).unwrap();
        used.reset();
    });
    assert_eq!(
        taker.reported().map(|_| near.reported()),
        Some(true),
        "a count to tell"
    );
    assert!(!is_signalled(&near));
    far.with(|used| used.pair.send(used.verbs, b"two")).unwrap();
    fabric.run();
    assert!(taker.reported().is_some());
    near.reported();
    assert!(is_signalled(&near));
}

/// Calls that take messages as they come need neither reports nor looks, and their own messages tell the counts.
#[test]
fn a_polled_queue_pair_is_looked_at_less_and_less_often() {
    let fabric = Fabric::new(1);
    let [near, far] = connected(&fabric);
    let mut taker = fabric.adapter(0);
    let pass = |from: &SharedPair<MemoryAdapter>, to: &SharedPair<MemoryAdapter>| {
        from.with(|used| used.pair.send(used.verbs, &[1; 8]))
            .unwrap();
        fabric.run();
        let n = to.with(|used| used.pair.recv(used.verbs, &mut [0; 9]));
        assert_eq!(n, Ok(8));
    };
    let messages = || fabric.tallies().inline;
    // Nobody is there at first, so that it is signalled.
    far.with(|used| used.pair.send(used.verbs, &[1; 8]))
        .unwrap();
    fabric.run();
    assert_eq!(taker.reported().map(|_| near.reported()), Some(true));
    assert!(is_signalled(&near));
    near.with(|used| used.pair.recv(used.verbs, &mut [0; 8]))
        .unwrap();
    for pause in [2, 4, LONGEST_PAUSE, LONGEST_PAUSE] {
        let before = messages();
        for _ in 0..3 {
            pass(&near, &far);
            pass(&far, &near);
        }
        assert_eq!(near.turn(), Some(pause));
        assert_eq!(messages() - before, 6, "the count goes with the next one");
        assert_eq!(taker.reported(), None);
    }
    // Nothing comes any more.
    assert_eq!(near.turn(), None, "armed");
    fabric.run();
    far.with(|used| {
        used.pair.progress(used.verbs);
        assert_eq!(used.pair.recorded_by_peer(), used.pair.sent());
    });
    far.with(|used| used.pair.send(used.verbs, &[1; 8]))
        .unwrap();
    fabric.run();
    assert!(taker.reported().is_some());
}

/// A message that is taken and not answered is acknowledged at the next look.
#[test]
fn a_count_that_no_message_tells_is_told_at_the_next_look() {
    let fabric = Fabric::new(1);
    let [near, far] = connected(&fabric);
    near.with(|used| used.tell());
    for _ in 0..5 {
        far.with(|used| used.pair.send(used.verbs, &[1; 8]))
            .unwrap();
        fabric.run();
        near.with(|used| used.pair.recv(used.verbs, &mut [0; 8]))
            .unwrap();
        near.reported();
        near.turn();
        fabric.run();
        far.with(|used| {
            used.pair.progress(used.verbs);
            assert_eq!(used.pair.recorded_by_peer(), used.pair.sent());
        });
    }
}
