//! Neighbours of RoCE that the kernel does not know, and that do not answer.

use std::{
    thread,
    time::{Duration, Instant},
};

use slim::Flow;
use slim_verbs::VerbsPort;

use super::{
    checked::exchange,
    common::rxe::shell,
    rxe,
    two_sessions::{LIMIT, TwoSessions, of_port, wait_for},
};

const KILLS: usize = 25;

/// Kills the flow's connection; how long it takes until both ends have got a byte.
fn kill(near: &Flow, far: &Flow) -> Duration {
    shell("ss -KHtn src 127.0.0.1 >/dev/null || true");
    let begun = Instant::now();
    near.send_all(b"?", LIMIT).unwrap();
    far.recv_exact(&mut [0], LIMIT).unwrap();
    far.send_all(b"!", LIMIT).unwrap();
    near.recv_exact(&mut [0], LIMIT).unwrap();
    begun.elapsed()
}

/// Whoever looks for such a neighbour waits for a second or more. The agent must not: TCP works.
#[test]
fn silent_neighbours_do_not_keep_flows_on_tcp() {
    let Some(rxe) = rxe("neighbours::silent_neighbours_do_not_keep_flows_on_tcp") else {
        return;
    };
    shell("ip link set lo up");
    let two = TwoSessions::open(
        rxe.open()
            .map(|adapter| of_port(VerbsPort::new(adapter).unwrap())),
    );
    let (near, far) = two.pair();
    exchange(&near, &far, 1 << 20, |_| ());
    rxe.line("loss 100%");
    wait_for(&near, &far, false);
    shell("ip neigh del 10.1.0.2 dev v1; ip neigh del 10.1.0.1 dev v2");
    let mut took: Vec<_> = (0..KILLS)
        .map(|_| {
            let took = kill(&near, &far);
            thread::sleep(Duration::from_millis(200));
            took
        })
        .collect();
    took.sort();
    println!("resumed after {took:?}");
    exchange(&near, &far, 1 << 20, |_| ());
    rxe.plain();
    let back = wait_for(&near, &far, true);
    println!("back after {back:?}");
    // One wait for a neighbour takes longer.
    assert!(took[KILLS - 1] < Duration::from_secs(1), "{took:?}");
}
