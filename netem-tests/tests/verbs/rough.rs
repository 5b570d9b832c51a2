//! Rough treatment of flows of two sessions on queue pairs of soft RoCE.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use slim_rdma::{
    Datagrams, PortLocator, RingShape,
    agreement::{AgreementMessage, PairAttempt, PairCookie, PairRequest},
    ibverbs::{PortSettings, VerbsAdapter},
};
use slim_verbs::VerbsPort;

use super::{
    checked::exchange,
    common::rxe::shell,
    rxe,
    two_sessions::{TwoSessions, of_port, wait_for},
};

/// Two sessions, and where their ports agree on queue pairs.
fn two(adapters: [VerbsAdapter; 2]) -> (TwoSessions, [PortLocator; 2]) {
    let ports = adapters.map(|adapter| VerbsPort::new(adapter).unwrap());
    let locators = ports.each_ref().map(|port| port.mail.locator());
    (TwoSessions::open(ports.map(of_port)), locators)
}

fn request(from: PortLocator, attempt: u64, number: u32) -> PairRequest {
    PairRequest {
        attempt: PairAttempt(attempt),
        number: from.number,
        queue_key: from.queue_key,
        pair: slim_rdma::PairAddress {
            gid: from.gid,
            lid: 0,
            partition: from.partition,
            mtu: slim_rdma::PathMtu::Mtu4096,
            number: slim_rdma::QpNumber(number),
            psn: 7,
            shape: RingShape::new(4096, 16).unwrap(),
            ring: slim_rdma::RemoteKey {
                addr: 0x1000_0000,
                key: 1,
            },
        },
    }
}

/// Another process that knows the locators floods them with all it can, while flows go back and forth.
#[test]
fn floods_do_not_stop_flows() {
    let Some(rxe) = rxe("rough::floods_do_not_stop_flows") else {
        return;
    };
    shell("ip link set lo up");
    let (sessions, locators) = two(rxe.open());
    let (near, far) = sessions.pair();
    let begun = Instant::now();
    exchange(&near, &far, 2 << 20, |_| ());
    let alone = begun.elapsed();
    let done = AtomicBool::new(false);
    let sent = AtomicU64::new(0);
    thread::scope(|scope| {
        let attacker = VerbsAdapter::open(&rxe.settings(0)).unwrap();
        let (done, sent) = (&done, &sent);
        scope.spawn(move || {
            let mut mail = attacker.datagrams().unwrap();
            let own = mail.locator();
            let mut rng = fastrand::Rng::with_seed(1);
            let mut cookies: Vec<(u64, PairCookie)> = Vec::new();
            let mut n = 0;
            while !done.load(Ordering::Relaxed) {
                let to = locators[1];
                n += 1;
                let bytes = match rng.u8(..6) {
                    0 => (0..rng.usize(1..=128)).map(|_| rng.u8(..)).collect(),
                    1 => {
                        let mut b = AgreementMessage::Ask(request(own, n, 77), None).encode();
                        let at = rng.usize(..b.len());
                        b[at] ^= 1 << rng.u8(..8);
                        b
                    }
                    2 => {
                        AgreementMessage::Answer(PairAttempt(n), request(own, n, 77).pair).encode()
                    }
                    3 if !cookies.is_empty() => {
                        let at = rng.usize(..cookies.len());
                        let (attempt, cookie) = cookies[at];
                        AgreementMessage::Ask(request(own, attempt, 77), Some(cookie)).encode()
                    }
                    _ => AgreementMessage::Ask(request(own, n, 77), None).encode(),
                };
                if mail.send(&to, &bytes).is_ok() {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                while let Some(got) = mail.receive() {
                    if let Some(AgreementMessage::Cookie(attempt, cookie)) =
                        AgreementMessage::decode(&got.bytes)
                    {
                        cookies.push((attempt.0, cookie));
                        if cookies.len() > 1000 {
                            cookies.remove(0);
                        }
                    }
                }
                thread::yield_now();
            }
        });
        struct Done<'a>(&'a AtomicBool);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _done = Done(done);
        for round in 0..3 {
            let begun = Instant::now();
            exchange(&near, &far, 2 << 20, |_| ());
            let flooded = begun.elapsed();
            rxe.line("loss 100%");
            let fell = wait_for(&near, &far, false);
            rxe.plain();
            println!(
                "{round}: alone {alone:?}, flooded {flooded:?}; fell after {fell:?}; {} sent",
                sent.load(Ordering::Relaxed)
            );
        }
    });
    println!("back after {:?}", wait_for(&near, &far, true));
    exchange(&near, &far, 2 << 20, |_| ());
}

/// GIDs of IPv6, and links that go down: the addresses go, too.
#[test]
fn flows_use_gids_of_ipv6() {
    let Some(rxe) = rxe("rough::flows_use_gids_of_ipv6") else {
        return;
    };
    shell("ip link set lo up");
    shell("ip -6 addr add fd00::1/64 dev v1 nodad");
    thread::sleep(Duration::from_millis(1000));
    // This kernel routes by rules for IPv4 only, so both ends are at one adapter.
    let adapters = [0, 1].map(|_| {
        let all = slim_rdma::ibverbs::devices().unwrap();
        let port = &all.iter().find(|d| d.name == "rx1").unwrap().ports[0];
        println!("{:?}", port.gids);
        let want: std::net::Ipv6Addr = "fd00::1".parse().unwrap();
        let gid = port.gids.iter().find(|gid| gid.gid == want.octets());
        VerbsAdapter::open(&PortSettings {
            gid_index: Some(gid.unwrap().index as u8),
            ..rxe.settings(0)
        })
        .unwrap()
    });
    let (sessions, locators) = two(adapters);
    let (near, far) = sessions.pair();
    exchange(&near, &far, 2 << 20, |_| ());
    println!("on queue pairs by {:?}", locators[0]);
    for keep in [1, 0] {
        shell(&format!(
            "echo {keep} > /proc/sys/net/ipv6/conf/v1/keep_addr_on_down"
        ));
        rxe.down(0);
        let fell = wait_for(&near, &far, false);
        shell("ip link set v1 up; ip -6 addr replace fd00::1/64 dev v1 nodad");
        let back = wait_for(&near, &far, true);
        println!("fell after {fell:?}, back after {back:?}");
    }
}

/// A child of a fork goes on for a while, and ends by `exit`; its parent's flows do not notice.
#[test]
fn children_that_exit_do_not_disturb_flows() {
    let Some(rxe) = rxe("rough::children_that_exit_do_not_disturb_flows") else {
        return;
    };
    shell("ip link set lo up");
    let (sessions, _) = two(rxe.open());
    let (near, far) = sessions.pair();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..15 {
                // SAFETY: the child only sleeps and ends.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    // SAFETY: the exit handlers of this program are part of the test.
                    unsafe {
                        libc::usleep(20_000);
                        libc::exit(0)
                    };
                }
                let mut status = 0;
                // SAFETY: the status is ours.
                unsafe { libc::waitpid(pid, &raw mut status, 0) };
                assert_eq!(status, 0);
                std::process::Command::new("true").status().unwrap();
            }
        });
        exchange(&near, &far, 6 << 20, |_| ());
    });
    println!("{:?} {:?}", near.stats(), far.stats());
    assert_eq!(near.connection(), None);
    assert!(near.stats().resumes <= 1);
}
