//! A flow of two sessions of the library, which goes from TCP to queue pairs of soft RoCE, falls back, and comes back.

use std::{
    thread,
    time::{Duration, Instant},
};

use slim::Flow;
use slim_verbs::VerbsPort;

use super::{
    checked::{exchange, receive, send},
    common::rxe::shell,
    rxe,
    two_sessions::{LIMIT, TwoSessions, of_port, wait_for},
    usage::used,
};

/// Of 8 bytes, between two threads that sleep.
pub(super) fn round_trip(near: &Flow, far: &Flow) -> Duration {
    let rounds = 1000;
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                far.recv_exact(&mut [0; 8], LIMIT).unwrap();
                far.send_all(&[1; 8], LIMIT).unwrap();
            }
        });
        for _ in 0..rounds {
            near.send_all(&[1; 8], LIMIT).unwrap();
            near.recv_exact(&mut [0; 8], LIMIT).unwrap();
        }
    });
    begun.elapsed() / rounds
}

#[test]
fn flows_of_sessions_go_to_soft_roce_and_back() {
    let Some(rxe) = rxe("sessions::flows_of_sessions_go_to_soft_roce_and_back") else {
        return;
    };
    shell("ip link set lo up");
    let two = TwoSessions::open(
        rxe.open()
            .map(|adapter| of_port(VerbsPort::new(adapter).unwrap())),
    );
    let (near, far) = two.pair();
    exchange(&near, &far, 2 << 20, |_| ());
    assert!(near.connection().is_none() && far.connection().is_none());

    println!("{:?} a round trip", round_trip(&near, &far));

    // Idle, and not read.
    near.send_all(&[1; 1000], LIMIT).unwrap();
    thread::sleep(Duration::from_secs(1));
    let before = used();
    let idle = Duration::from_secs(3);
    thread::sleep(idle);
    let (time, sleeps) = (used().0 - before.0, used().1 - before.1);
    println!("idle for {idle:?}: {time:?} of processor time, {sleeps} wake-ups");
    // Time for which the guest itself had to wait counts as used, too.
    assert!(sleeps < 100 && time < idle / 2);
    far.recv_exact(&mut [0; 1000], LIMIT).unwrap();

    // Nothing is on its way, so a ping finds out.
    rxe.line("loss 100%");
    let silent = two.wait_for_tcp(&near, &far);
    println!(
        "{:?} a round trip over TCP, within the host",
        round_trip(&near, &far)
    );
    exchange(&near, &far, 1 << 20, |_| ());
    rxe.plain();
    let back = wait_for(&near, &far, true);
    println!("silent: on TCP after {silent:?}, back after {back:?}");
    assert!(silent < Duration::from_secs(5), "{silent:?}");

    for side in [0, 1] {
        exchange(&near, &far, 1 << 20, |n| {
            if n == 2 {
                rxe.down(side);
            }
        });
        let fell = wait_for(&near, &far, false);
        rxe.up(side);
        let back = wait_for(&near, &far, true);
        println!("link {side}: on TCP after {fell:?}, back after {back:?}");
        exchange(&near, &far, 1 << 20, |_| ());
    }

    send(&near, 9, 20_000);
    near.close();
    receive(&far, 9, 20_000, |_| ());
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
}
