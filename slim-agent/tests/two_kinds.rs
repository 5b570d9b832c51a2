//! A flow goes from TCP to pipes in memory and back.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use common::any_flow::{exchange, lose_some, resumed};
use common::memory::{PORTS, PipeNet, PipePort, Pipes};
use common::two_kinds::{KindsSeen, TwoKinds, move_and_come_back, wait_for};
use common::{LIMIT, Pattern};
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
    // It begins on TCP, and moves soon.
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

#[test]
fn flows_move_without_a_break_fall_back_and_come_back() {
    let (net, agents) = start();
    move_and_come_back(&agents, TransportKind::TEST, |down| {
        net.down.store(down, Ordering::Relaxed);
    });
}

fn start_with_ports(net: &Arc<PipeNet>) -> TwoKinds {
    TwoKinds::start(|side| Box::new(Pipes::with_ports(net, side, TransportKind::TEST)) as Box<_>)
}

/// Number of pipes made to a port of either side.
fn made(net: &PipeNet, port: usize) -> u32 {
    let made = |side: &[PipePort; PORTS]| side[port].made.load(Ordering::Relaxed);
    net.ports.iter().map(made).sum()
}

/// The peer's ports are down when the flow begins, and one comes up while it is in use: that is announced, and the flow moves there.
#[test]
fn a_flow_moves_to_a_port_that_comes_up() {
    let net = Arc::<PipeNet>::default();
    net.ports[1].iter().for_each(|port| port.set_down(true));
    let agents = start_with_ports(&net);
    let flow = agents.pair();
    // Long enough for several trials.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(flow.0.kind(), Some(TransportKind::TCP));
    net.ports[1][1].set_down(false);
    wait_for(&flow, TransportKind::TEST);
    assert_eq!((made(&net, 0), made(&net, 1)), (0, 1));
    assert_eq!((flow.0.faults(), flow.1.faults()), (0, 0));
}

/// The own ports count, too: without one, a process does not try.
#[test]
fn a_flow_moves_when_the_own_port_comes_up() {
    let net = Arc::<PipeNet>::default();
    net.ports[0].iter().for_each(|port| port.set_down(true));
    let agents = start_with_ports(&net);
    let flow = agents.pair();
    thread::sleep(Duration::from_millis(300));
    assert_eq!((made(&net, 0), made(&net, 1)), (0, 0));
    net.ports[0][0].set_down(false);
    wait_for(&flow, TransportKind::TEST);
    assert_eq!((flow.0.faults(), flow.1.faults()), (0, 0));
}

#[test]
fn a_flow_goes_to_the_other_port_when_its_port_goes_down() {
    let net = Arc::<PipeNet>::default();
    let agents = start_with_ports(&net);
    let flow = agents.pair();
    wait_for(&flow, TransportKind::TEST);
    for round in 0..4 {
        let (goes, stays) = (round % 2, 1 - round % 2);
        let before = made(&net, stays);
        for side in &net.ports {
            side[stays].set_down(false);
            side[goes].set_down(true);
        }
        lose_some(&flow);
        let begun = Instant::now();
        while made(&net, stays) == before || flow.0.kind() != Some(TransportKind::TEST) {
            // The pause grows to 8 s, if the flow falls back to TCP each time.
            assert!(begun.elapsed() < LIMIT, "round {round}");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
