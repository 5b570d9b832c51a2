//! Flows of two agents go from TCP to queue pairs and back: real sessions, real resumes, queue pairs of adapters in memory.

#[path = "../../slim-agent/tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::Pattern;
use common::any_flow::{exchange, lose_some, resumed};
use common::two_kinds::{KindsSeen, TwoKinds, move_and_come_back, wait_for};
use slim_core::transport::TransportKind;
use slim_rdma::{PairSizes, RingShape};
use slim_verbs::VerbsSettings;
use slim_verbs::in_memory::MemoryNet;

/// Small sizes, so that credits and ends of rings matter.
fn settings() -> VerbsSettings {
    VerbsSettings {
        sizes: PairSizes {
            // A message of a resume has up to 512 bytes.
            shape: RingShape::new(16 << 10, 16).unwrap(),
            depth: 8,
            staging: 8 << 10,
            inline: 64,
            message: 4 << 10,
        },
        ..VerbsSettings::default()
    }
}

fn start() -> (Arc<MemoryNet>, TwoKinds) {
    let net = Arc::new(MemoryNet::start());
    let agents = TwoKinds::start(|side| Box::new(net.provider(&[side], settings())));
    (net, agents)
}

#[test]
fn a_flow_goes_from_tcp_to_queue_pairs_and_back() {
    let (net, agents) = start();
    let flow = agents.pair();
    // It begins on TCP, and moves soon.
    wait_for(&flow, TransportKind::VERBS);
    let (near, far) = &flow;
    let before = (near.resumed(), far.resumed());
    for round in 0..10 {
        // From one queue pair to the next, too.
        let kind = match round % 3 {
            0 => TransportKind::TCP,
            _ => TransportKind::VERBS,
        };
        net.set_refusing(kind == TransportKind::TCP);
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
            net.set_refusing(cuts % 4 == 3);
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

#[test]
fn flows_move_without_a_break_fall_back_and_come_back() {
    let (net, agents) = start();
    move_and_come_back(&agents, TransportKind::VERBS, |down| {
        net.set_refusing(down);
    });
}
