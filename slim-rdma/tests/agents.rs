//! Flows of two agents go from TCP to queue pairs and back: real sessions, real resumes, queue pairs of adapters in memory.

#[path = "../../slim-agent/tests/common/mod.rs"]
mod common;
#[path = "agents/pairs.rs"]
mod pairs;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::Pattern;
use common::any_flow::{exchange, lose_some, resumed};
use common::two_kinds::{KindsSeen, TwoKinds, wait_for, wait_until_offered};
use pairs::{PairNet, PairProvider};
use slim_core::transport::TransportKind;

fn start() -> (Arc<PairNet>, TwoKinds) {
    let net = PairNet::start();
    let agents = TwoKinds::start(|side| Box::new(PairProvider::new(&net, side)));
    (net, agents)
}

#[test]
fn a_flow_goes_from_tcp_to_queue_pairs_and_back() {
    let (net, agents) = start();
    let flow = agents.pair();
    wait_for(&flow, TransportKind::TCP);
    wait_until_offered(&flow, &net.made);
    wait_for(&flow, TransportKind::VERBS);
    let (near, far) = &flow;
    let before = (near.resumed(), far.resumed());
    for round in 0..10 {
        // From one queue pair to the next, too.
        let kind = match round % 3 {
            0 => TransportKind::TCP,
            _ => TransportKind::VERBS,
        };
        net.down
            .store(kind == TransportKind::TCP, Ordering::Relaxed);
        lose_some(&flow);
        wait_for(&flow, kind);
    }
    let resumed = (near.resumed() - before.0, far.resumed() - before.1);
    assert!(resumed.0 >= 10 && resumed.1 >= 10, "{resumed:?}");
    assert_eq!(net.fabric.tallies().not_ready, 0);
}

#[test]
fn flows_stay_byte_exact_while_queue_pairs_fail_and_tcp_is_cut() {
    let (net, agents) = start();
    let pairs: Vec<_> = (0..4).map(|_| agents.pair()).collect();
    let (mut seen, mut cuts) = (KindsSeen::default(), 0u32);
    exchange(&pairs, 600, &mut Pattern::new(7), |random| {
        if cuts < 40 {
            net.down.store(cuts % 4 == 3, Ordering::Relaxed);
            for (near, far) in &pairs {
                seen.look(near);
                // Either end fails, and the other one learns of it by the resume.
                let one = if random.next() & 1 == 0 { near } else { far };
                one.shut_down();
            }
            cuts += 1;
        }
    });
    let (resumed, tallies) = (resumed(&pairs), net.fabric.tallies());
    println!("cut on queue pairs and on TCP: {seen:?}; {resumed} resumes, {tallies:?}");
    assert!(resumed >= 6 && seen.both(), "{seen:?}");
    assert_eq!(tallies.not_ready, 0);
}
