//! A flow goes from TCP to pipes in memory and back.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::Pattern;
use common::any_flow::{exchange, lose_some, resumed};
use common::memory::{PipeNet, Pipes};
use common::two_kinds::{KindsSeen, TwoKinds, wait_for, wait_until_offered};
use slim_core::transport::TransportKind;

fn start() -> (Arc<PipeNet>, TwoKinds) {
    let net = Arc::<PipeNet>::default();
    let pipes = |side| Box::new(Pipes::new(&net, side, TransportKind::TEST)) as Box<_>;
    let agents = TwoKinds::start(pipes);
    (net, agents)
}

#[test]
fn a_flow_goes_from_tcp_to_pipes_and_back() {
    let (net, agents) = start();
    let flow = agents.pair();
    wait_for(&flow, TransportKind::TCP);
    wait_until_offered(&flow, &net.made);
    wait_for(&flow, TransportKind::TEST);
    let (near, far) = &flow;
    let before = (near.resumed(), far.resumed());
    for round in 0..6 {
        let kind = match round % 2 {
            0 => TransportKind::TCP,
            _ => TransportKind::TEST,
        };
        net.down
            .store(kind == TransportKind::TCP, Ordering::Relaxed);
        lose_some(&flow);
        wait_for(&flow, kind);
    }
    let resumed = (near.resumed() - before.0, far.resumed() - before.1);
    assert!(resumed.0 >= 6 && resumed.1 >= 6, "{resumed:?}");
}

#[test]
fn flows_stay_byte_exact_while_kinds_come_and_go() {
    let (net, agents) = start();
    let pairs: Vec<_> = (0..6).map(|_| agents.pair()).collect();
    let (mut seen, mut cuts) = (KindsSeen::default(), 0u32);
    exchange(&pairs, 1500, &mut Pattern::new(7), |_| {
        if cuts < 40 {
            net.down.store(cuts & 1 == 1, Ordering::Relaxed);
            for (near, _) in &pairs {
                seen.look(near);
                near.shut_down();
            }
            cuts += 1;
        }
    });
    let resumed = resumed(&pairs);
    println!("cut on pipes and on TCP: {seen:?}; {resumed} resumes");
    assert!(resumed >= 6 && seen.both(), "{seen:?}");
}
