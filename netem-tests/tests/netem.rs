//! Lines with netem: every option has its effect, and faults on one interface do not undo each other. On a kernel without netem the tests
//! run in a guest.

mod common;

use std::{
    collections::HashSet,
    io::{Read, Write},
    net::UdpSocket,
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use common::{connection, guest::here};
use slim_lab::{
    Lab, Netns, Node,
    faults::{
        lines::NetemLines,
        netem::{Chance, Delay, Distribution, Netem, Reorder, SendSlot},
    },
};

const MS: Duration = Duration::from_millis(1);
/// Bytes of a datagram.
const BYTES: usize = 1000;

fn lab(test: &str) -> Lab {
    common::lab(test, 2, 1).expect("root has been checked")
}

fn chance(percent: f64, correlation: f64) -> Option<Chance> {
    Some(Chance {
        percent,
        correlation,
    })
}

fn delay(mean: Duration) -> Delay {
    Delay {
        mean,
        ..Delay::default()
    }
}

fn delayed(mean: Duration) -> Netem {
    Netem {
        delay: Some(delay(mean)),
        ..Netem::default()
    }
}

fn lossy(percent: f64) -> Netem {
    Netem {
        loss: chance(percent, 0.0),
        ..Netem::default()
    }
}

/// The queueing disciplines of all interfaces of a namespace, in words.
fn disciplines(net: &Netns) -> String {
    net.exec("tc", &["qdisc", "show"]).unwrap()
}

/// Times of round trips on a connection from the first node to the second, in milliseconds.
fn round_trips(lab: &Lab, count: usize) -> Vec<f64> {
    let (mut from, mut to) = connection(lab.node(0), lab.node(1), 0);
    let echo = thread::spawn(move || {
        let mut byte = [0];
        while to.read(&mut byte).is_ok_and(|n| n == 1) {
            to.write_all(&byte).unwrap();
        }
    });
    let mut one = || {
        let begin = Instant::now();
        from.write_all(b"x").unwrap();
        from.read_exact(&mut [0]).unwrap();
        begin.elapsed().as_secs_f64() * 1000.0
    };
    let times = (0..count).map(|_| one()).collect();
    drop(from);
    echo.join().unwrap();
    times
}

fn least(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

fn deviation(times: &[f64]) -> f64 {
    let count = times.len() as f64;
    let mean = times.iter().sum::<f64>() / count;
    (times.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / count).sqrt()
}

/// A datagram as it arrived.
struct Arrival {
    number: u32,
    /// Since the first one was sent.
    at: Duration,
    intact: bool,
}

/// Sends numbered datagrams from the first node to the second, `gap` apart, and returns those that arrive, in the order of arrival.
/// They have no checksum, so that damaged ones arrive, too.
fn send(lab: &Lab, count: u32, gap: Duration) -> Vec<Arrival> {
    let bind = |node: &Node| {
        let address = (node.address(0), 0);
        let socket = node.net().run(|| UdpSocket::bind(address));
        socket.unwrap().unwrap()
    };
    let (sender, receiver) = (bind(lab.node(0)), bind(lab.node(1)));
    set(&sender, libc::SO_NO_CHECK, 1);
    // All may wait on the line, or for the receiver.
    set(&sender, libc::SO_SNDBUFFORCE, 4 << 20);
    set(&receiver, libc::SO_RCVBUFFORCE, 4 << 20);
    sender.connect(receiver.local_addr().unwrap()).unwrap();
    receiver.set_read_timeout(Some(300 * MS)).unwrap();
    let begin = Instant::now();
    let arrivals = thread::spawn(move || {
        let mut all = Vec::new();
        let mut buffer = [0; BYTES];
        while let Ok(length) = receiver.recv(&mut buffer) {
            let number = u32::from_le_bytes(buffer[..4].try_into().unwrap());
            let intact = length == BYTES && buffer[4..].iter().all(|byte| *byte == 0x55);
            let at = begin.elapsed();
            all.push(Arrival { number, at, intact });
        }
        all
    });
    let mut datagram = [0x55; BYTES];
    for number in 0..count {
        datagram[..4].copy_from_slice(&number.to_le_bytes());
        sender.send(&datagram).unwrap();
        if !gap.is_zero() {
            thread::sleep(gap);
        }
    }
    arrivals.join().unwrap()
}

fn set(socket: &UdpSocket, option: libc::c_int, value: libc::c_int) {
    // SAFETY: the descriptor is open, and the address and the size are those of a live integer.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    assert_eq!(status, 0, "socket option {option}");
}

/// The number of those that arrive before one that was sent earlier.
fn overtaking(all: &[Arrival]) -> usize {
    let mut least = u32::MAX;
    let later = all.iter().rev().filter(|one| {
        let overtakes = one.number > least;
        least = least.min(one.number);
        overtakes
    });
    later.count()
}

/// What becomes of datagrams on a line like this. The line is as before afterwards.
fn sent_under(lab: &Lab, netem: Netem, count: u32, gap: Duration) -> Vec<Arrival> {
    under(lab, netem, || send(lab, count, gap))
}

fn under<T>(lab: &Lab, netem: Netem, work: impl FnOnce() -> T) -> T {
    let net = lab.node(0).net();
    let before = disciplines(net);
    let guard = NetemLines::default().apply(net, &lab.node(0).interface(0), &netem);
    let guard = guard.unwrap_or_else(|e| panic!("{netem}: {e}"));
    let result = work();
    guard.lift().unwrap();
    assert_eq!(disciplines(net), before, "after {netem}");
    result
}

#[test]
fn delays_are_measured_by_round_trips() {
    let test = "delays_are_measured_by_round_trips";
    if !here(test) {
        return;
    }
    let lab = lab(test);
    let usual = least(&round_trips(&lab, 20));
    let times = |delay| {
        let netem = Netem {
            delay: Some(delay),
            ..Netem::default()
        };
        under(&lab, netem, || round_trips(&lab, 40))
    };
    let fixed = times(delay(20 * MS));
    let spread = |distribution| {
        let jitter = 8 * MS;
        times(Delay {
            jitter,
            distribution,
            ..delay(20 * MS)
        })
    };
    let uniform = spread(Distribution::Uniform);
    let all = [
        ("uniform", uniform),
        ("normal", spread(Distribution::Normal)),
        ("pareto", spread(Distribution::Pareto)),
        ("paretonormal", spread(Distribution::ParetoNormal)),
    ];
    let after = least(&round_trips(&lab, 20));
    println!(
        "round trips: {usual:.2} ms before, {:.2} under 20 ms, {after:.2} after",
        least(&fixed)
    );
    assert!(usual < 10.0 && after < 10.0, "{usual} {after}");
    assert!((20.0..30.0).contains(&least(&fixed)), "{fixed:?}");
    for (name, times) in &all {
        println!(
            "{name}: least {:.1} ms, deviation {:.1} ms",
            least(times),
            deviation(times)
        );
        assert!(
            deviation(times) > 2.5 && least(times) < 19.0,
            "{name}: {times:?}"
        );
    }
}

#[test]
fn packets_are_lost_doubled_damaged_and_reordered() {
    let test = "packets_are_lost_doubled_damaged_and_reordered";
    if !here(test) {
        return;
    }
    let lab = lab(test);
    const COUNT: u32 = 400;
    let sent = |netem| sent_under(&lab, netem, COUNT, Duration::ZERO);
    let share = |of: usize| of as f64 / f64::from(COUNT);
    let plain = send(&lab, COUNT, Duration::ZERO);

    assert!(
        plain.len() == COUNT as usize && overtaking(&plain) == 0 && plain.iter().all(|a| a.intact)
    );

    let lost = sent(lossy(30.0));
    println!("loss 30%: {:.0}% arrive", 100.0 * share(lost.len()));
    assert!((0.6..0.8).contains(&share(lost.len())), "{}", lost.len());

    // A correlated loss has fewer and longer gaps.
    let gaps = |all: &[Arrival]| {
        all.windows(2)
            .filter(|w| w[1].number > w[0].number + 1)
            .count()
    };
    let free = gaps(&sent(lossy(50.0)));
    let tied = gaps(&sent(Netem {
        loss: chance(50.0, 90.0),
        ..Netem::default()
    }));
    println!("loss 50%: {free} gaps, {tied} if correlated by 90%");
    assert!(tied * 10 < free * 8, "{free} {tied}");

    let doubled = sent(Netem {
        duplicate: chance(30.0, 0.0),
        ..Netem::default()
    });
    let different: HashSet<_> = doubled.iter().map(|a| a.number).collect();
    println!("duplicate 30%: {:.0}% arrive", 100.0 * share(doubled.len()));
    assert_eq!(different.len(), COUNT as usize);
    assert!(
        (1.2..1.4).contains(&share(doubled.len())),
        "{}",
        doubled.len()
    );

    // A wrong bit in the headers makes the datagram vanish.
    let damaged = sent(Netem {
        corrupt: chance(30.0, 0.0),
        ..Netem::default()
    });
    let wrong = damaged.iter().filter(|a| !a.intact).count();
    println!("corrupt 30%: {:.0}% are damaged", 100.0 * share(wrong));
    assert!((0.18..0.4).contains(&share(wrong)), "{wrong}");

    let reorder = |gap| Netem {
        reorder: Some(Reorder {
            chance: chance(30.0, 0.0).unwrap(),
            gap,
        }),
        ..delayed(20 * MS)
    };
    let overtaken = share(overtaking(&sent(reorder(None))));
    let with_gap = share(overtaking(&sent(reorder(Some(5)))));
    println!("reorder 30%: {overtaken} of all overtake; at most every fifth: {with_gap}");
    assert!((0.2..0.4).contains(&overtaken) && (0.06..0.19).contains(&with_gap));
}

#[test]
fn lines_are_slow_and_have_slots_and_a_limit() {
    let test = "lines_are_slow_and_have_slots_and_a_limit";
    if !here(test) {
        return;
    }
    let lab = lab(test);
    // 1042 bytes each on the line: 0.83 s at 1 Mbit/s.
    let slow = sent_under(
        &lab,
        Netem {
            rate: Some(1_000_000),
            ..Netem::default()
        },
        100,
        Duration::ZERO,
    );
    let took = slow.last().unwrap().at.as_secs_f64();
    println!("1 Mbit/s: 100 kB in {took:.2} s");
    assert_eq!(slow.len(), 100);
    assert!((0.75..1.5).contains(&took), "{took}");

    let slot = SendSlot {
        from: 50 * MS,
        to: 50 * MS,
        packets: Some(10),
        bytes: None,
    };
    let slots = sent_under(
        &lab,
        Netem {
            slot: Some(slot),
            ..Netem::default()
        },
        40,
        Duration::ZERO,
    );
    // Three slots after the first, as long as none is missed.
    let took = slots.last().unwrap().at;
    println!("slots of 50 ms with 10 packets: 40 packets in {took:.0?}");
    assert_eq!(slots.len(), 40);
    assert!((145 * MS..400 * MS).contains(&took), "{took:?}");

    let limited = Netem {
        limit: Some(10),
        ..delayed(100 * MS)
    };
    let few = sent_under(&lab, limited, 50, Duration::ZERO).len();
    println!("limit 10: {few} of 50 arrive");
    assert!((10..=12).contains(&few), "{few}");
}

/// Each fault ends alone, and the newest that says something of a property decides it.
#[test]
fn faults_of_one_interface_may_overlap() {
    let test = "faults_of_one_interface_may_overlap";
    if !here(test) {
        return;
    }
    let lab = lab(test);
    let net = lab.node(0).net();
    let interface = lab.node(0).interface(0);
    let before = disciplines(net);
    let lines = NetemLines::default();
    let apply = |netem| lines.apply(net, &interface, &netem).unwrap();
    let time = || least(&round_trips(&lab, 5));
    let short = apply(delayed(20 * MS));
    assert!((20.0..45.0).contains(&time()));
    let loss = apply(lossy(100.0));
    assert!(send(&lab, 10, Duration::ZERO).is_empty());
    loss.lift().unwrap();
    assert!((20.0..45.0).contains(&time()), "the first one is in force");
    let long = apply(delayed(50 * MS));
    assert!((50.0..90.0).contains(&time()), "the newest one decides");
    short.lift().unwrap();
    assert!(
        (50.0..90.0).contains(&time()),
        "the end of another one changes nothing"
    );
    drop(long);
    assert_eq!(disciplines(net), before);
    // A fault that cannot be made leaves the others as they are.
    let short = apply(delayed(20 * MS));
    assert!(lines.apply(net, &interface, &lossy(200.0)).is_err());
    assert!(lines.apply(net, "no-such-interface", &lossy(1.0)).is_err());
    assert!((20.0..45.0).contains(&time()));
    short.lift().unwrap();
    assert_eq!(disciplines(net), before);
}
