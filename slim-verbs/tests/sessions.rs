//! Flows of two sessions that begin on TCP, move to queue pairs in memory, fall back, and come back: what fails, and when.

#[path = "sessions/carried.rs"]
mod carried;
#[path = "../../slim/tests/common/mod.rs"]
mod common;
#[path = "../../slim/tests/common/streams.rs"]
mod streams;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use carried::{VerbsSessions, pass, small, wait_for};
use common::*;
use slim::{Flow, TransferError};
use slim_verbs::VerbsSettings;
use streams::{exchange, receive, send};

fn sessions() -> VerbsSessions {
    VerbsSessions::open(&options(&[]), small())
}

/// Whose queue pairs fail: those of one side, of the other, or all.
const PICKS: [fn(usize) -> bool; 3] = [|host| host == 0, |host| host == 1, |_| true];

/// Queue pairs fail at one end or at both; what is on its way then arrives all the same, or not.
#[test]
fn bytes_survive_queue_pairs_that_fail() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let before = near.stats().resumes;
    let fails = AtomicUsize::new(0);
    exchange(&near, &far, 4 << 20, |n| {
        fails.fetch_add(1, Ordering::Relaxed);
        sessions.net.fail_pairs(n % 2 == 0, PICKS[n / 2 % 3]);
    });
    let resumes = near.stats().resumes - before;
    println!(
        "{} fails, {resumes} resumes, {:?}",
        fails.into_inner(),
        sessions.net.fabric.tallies()
    );
    assert!(resumes >= 3);
    wait_for(&near, &far, true);
    near.finish().unwrap();
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    far.send_all(b"still", LIMIT).unwrap();
    near.recv_exact(&mut [0; 5], LIMIT).unwrap();
    far.finish().unwrap();
    assert_eq!(near.recv(&mut [0], LIMIT), Ok(0));
    assert_eq!(sessions.net.fabric.tallies().not_ready, 0);
}

/// Adapters lose completions. Each loss that the next completion shows breaks the queue pair; one that nothing follows is a stall.
#[test]
fn bytes_survive_completions_that_are_lost() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let before = near.stats().resumes;
    sessions.net.fabric.lose_completions(NonZeroU64::new(97));
    exchange(&near, &far, 2 << 20, |_| ());
    sessions.net.fabric.lose_completions(None);
    let resumes = near.stats().resumes - before;
    println!("{resumes} resumes");
    assert!(resumes > 0);
    pass(&near, &far);
}

/// Bytes that a side does not read do not keep its peer from receiving, although a ring holds fewer than are unread.
#[test]
fn a_side_receives_while_its_peer_does_not_read() {
    for settings in [small(), VerbsSettings::default()] {
        let sessions = VerbsSessions::open(&options(&[]), settings);
        sessions.net.set_refusing(true);
        let (near, far) = sessions.pair();
        let sent: Vec<u8> = (0..1_000_000u32).map(|n| ((n * 7) >> 5) as u8).collect();
        near.send_all(&sent, LIMIT).unwrap();
        sessions.net.set_refusing(false);
        let begun = Instant::now();
        while !(near.is_carried() && far.is_carried()) {
            assert!(begun.elapsed() < LIMIT.unwrap(), "the flow does not return");
            thread::sleep(Duration::from_millis(1));
        }
        for n in 0..6 {
            far.send_all(&[n], LIMIT).unwrap();
            let mut got = [0];
            near.recv_exact(&mut got, LIMIT).unwrap();
            assert_eq!(got, [n]);
            sessions.net.fail_pairs(n % 2 == 0, PICKS[n as usize % 3]);
        }
        let mut got = vec![0; sent.len()];
        far.recv_exact(&mut got, LIMIT).unwrap();
        assert!(got == sent);
        pass(&near, &far);
    }
}

/// No queue pair can be made meanwhile, and TCP connections are killed while flows are on them.
#[test]
fn flows_fall_back_to_tcp_and_return_while_both_kinds_fail() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    let mut took = Vec::new();
    for (round, picked) in PICKS.into_iter().enumerate() {
        sessions.net.set_refusing(true);
        exchange(&near, &far, 1 << 20, |n| match n {
            1 => sessions.net.fail_pairs(round == 0, picked),
            n if n % 3 == 2 => drop(kill(&near, Kill::Fin)),
            _ => {}
        });
        wait_for(&near, &far, false);
        exchange(&near, &far, 1 << 20, |_| {
            kill(&far, Kill::Fin);
        });
        sessions.net.set_refusing(false);
        took.push(wait_for(&near, &far, true));
        exchange(&near, &far, 1 << 20, |_| ());
    }
    println!("back on queue pairs after {took:?}");
}

/// The port of either side loses its link, in the middle of a stream or while nothing is on its way, and gets it back.
#[test]
fn flows_leave_a_port_without_link_and_come_back() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    for host in [0, 1] {
        exchange(&near, &far, 1 << 20, |n| {
            if n == 2 {
                sessions.net.fabric.set_link(host, false);
            }
        });
        let fell = wait_for(&near, &far, false);
        exchange(&near, &far, 1 << 20, |_| ());
        sessions.net.fabric.set_link(host, true);
        let came = wait_for(&near, &far, true);
        println!("port {host}: on TCP after {fell:?}, back after {came:?}");
        // Nobody sends or waits.
        sessions.net.fabric.set_link(host, false);
        sessions.wait_looking(&near, &far, false);
        sessions.net.fabric.set_link(host, true);
        wait_for(&near, &far, true);
    }
}

/// A second port takes over.
#[test]
fn flows_go_to_another_port() {
    let sessions = VerbsSessions::with_hosts(&options(&[]), small(), [&[0, 2], &[1, 3]]);
    let (near, far) = sessions.carried_pair();
    for (host, up) in [(0, false), (1, false), (0, true), (2, false)] {
        exchange(&near, &far, 1 << 20, |n| {
            if n == 3 {
                sessions.net.fabric.set_link(host, up);
            }
        });
        wait_for(&near, &far, true);
    }
}

#[test]
fn flows_spread_over_the_ports_of_a_host() {
    let sessions = VerbsSessions::with_hosts(&options(&[]), small(), [&[0, 2, 4], &[1]]);
    // A queue pair that was asked for and is not needed any more, or that its flow has left, goes a little later.
    let wait_for_pairs = |wanted: [usize; 4]| {
        let begun = Instant::now();
        let at_hosts = || {
            let used = sessions.net.fabric.pairs();
            [0, 2, 4, 1].map(|host| used.iter().filter(|(at, _)| *at == host).count())
        };
        while at_hosts() != wanted {
            assert!(begun.elapsed() < LIMIT.unwrap(), "{:?}", at_hosts());
            thread::sleep(Duration::from_millis(1));
        }
    };
    let mut flows = Vec::new();
    for n in 0..6 {
        flows.push(sessions.carried_pair());
        let mut wanted = [0, 0, 0, n + 1];
        (0..=n).for_each(|flow| wanted[flow % 3] += 1);
        wait_for_pairs(wanted);
    }
    // Those of a port without a link go to the others.
    sessions.net.fabric.set_link(2, false);
    for (near, far) in &flows {
        exchange(near, far, 1 << 18, |_| ());
        wait_for(near, far, true);
    }
    wait_for_pairs([3, 0, 3, 6]);
}

/// Nothing reports that the path of a port is dead: its link is up, here or at the peer. The other port is used, as soon as the flow has been on TCP or at once.
#[test]
fn flows_avoid_a_port_whose_path_is_dead() {
    let sessions = VerbsSessions::with_hosts(&options(&[]), small(), [&[0, 2], &[1, 3]]);
    let (near, far) = sessions.carried_pair();
    let silent: [fn(usize) -> bool; 4] = [
        |host| host == 0,
        |host| host == 1,
        |host| host == 2,
        |host| host == 3,
    ];
    for (n, is_silent) in silent.into_iter().enumerate() {
        let begun = Instant::now();
        sessions.net.fabric.silence(is_silent);
        exchange(&near, &far, 1 << 20, |_| ());
        wait_for(&near, &far, true);
        println!(
            "host {n} silent: on a queue pair after {:?}",
            begun.elapsed()
        );
        let used = sessions.net.fabric.pairs();
        assert!(used.iter().all(|(host, _)| *host != n), "{used:?}");
    }
}

/// Packets vanish, and nothing is on its way: the next ping finds out.
#[test]
fn a_side_with_nothing_on_its_way_learns_of_a_silent_path() {
    let settings = VerbsSettings {
        ping_every: Duration::from_millis(200),
        ..small()
    };
    let sessions = VerbsSessions::open(&options(&[]), settings);
    let (near, far) = sessions.carried_pair();
    thread::sleep(Duration::from_millis(50));
    sessions.net.set_silent(true);
    let begun = Instant::now();
    sessions.wait_looking(&near, &far, false);
    let took = begun.elapsed();
    println!("on TCP after {took:?}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    exchange(&near, &far, 1 << 20, |_| ());
    sessions.net.set_silent(false);
    wait_for(&near, &far, true);
}

#[test]
fn a_close_delivers_the_last_bytes_although_the_queue_pair_fails() {
    let sessions = sessions();
    for n in 0..9 {
        let (near, far) = sessions.carried_pair();
        let outstanding = 10_000;
        send(&near, n, outstanding);
        near.close();
        sessions.net.fail_pairs(n % 2 == 0, PICKS[n as usize % 3]);
        receive(&far, n, outstanding, |_| ());
        assert_eq!(far.recv(&mut [0], LIMIT), Ok(0), "{n}");
    }
}

/// A closed flow is kept until the peer has recorded its last bytes, whether or not its program reads them.
#[test]
fn a_close_does_not_wait_for_the_reader() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    send(&near, 5, 10_000);
    near.close();
    wait_until("given up by the closing side", || {
        sessions.net.fabric.pairs().len() <= 1
    });
    receive(&far, 5, 10_000, |_| ());
    assert_eq!(far.recv(&mut [0], LIMIT), Ok(0));
    far.close();
    wait_until("no queue pair", || sessions.net.fabric.pairs().is_empty());
}

/// A new queue pair carries bytes that the flow had on TCP, and no message follows that tells how many have come. The flow is closed at once.
#[test]
fn a_close_right_after_a_return_does_not_wait() {
    let sessions = sessions();
    let mut took = Vec::new();
    for n in 0..12 {
        let (near, far) = sessions.pair();
        let (from, to) = match n % 2 {
            0 => (near, far),
            _ => (far, near),
        };
        send(&from, n, 10_000);
        while !(from.is_carried() && to.is_carried()) {
            thread::sleep(Duration::from_micros(100));
        }
        let begun = Instant::now();
        receive(&to, n, 10_000, |_| ());
        match n / 2 % 2 {
            0 => [from, to].map(Flow::close),
            _ => [to, from].map(Flow::close),
        };
        wait_until("no queue pair", || sessions.net.fabric.pairs().is_empty());
        took.push(begun.elapsed());
    }
    // On a busy machine one may take long. A ping would come after a second.
    took.sort();
    println!("{took:?}");
    assert!(took[took.len() / 2] < Duration::from_millis(500));
}

#[test]
fn a_reset_is_an_error_at_the_peer() {
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    near.reset();
    let got = far.recv(&mut [0], LIMIT);
    assert_eq!(got, Err(TransferError::Lost(libc::ECONNRESET)));
}

/// The peer gets a queue pair and never hears of it: it is given up, asked for again later, and the flow stays on TCP meanwhile.
#[test]
fn queue_pairs_that_are_not_used_end() {
    let settings = VerbsSettings {
        proof_within: Duration::from_millis(300),
        ..small()
    };
    let sessions = VerbsSessions::open(&options(&[]), settings);
    let at_server = || {
        let pairs = sessions.net.fabric.pairs();
        pairs.iter().filter(|(host, _)| *host == 1).count()
    };
    sessions.net.set_mute(true);
    let (near, far) = sessions.pair();
    let until = |what, f: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !f() {
            assert!(begun.elapsed() < LIMIT.unwrap(), "not {what}");
            pass(&near, &far);
        }
    };
    until("asked", &|| at_server() == 1);
    until("given up", &|| at_server() == 0);
    assert!(near.connection().is_some());
    sessions.net.set_mute(false);
    wait_for(&near, &far, true);
}

/// Sessions that are closed leave no queue pair, no memory and no descriptor, whatever their flows have gone through.
#[test]
fn closed_sessions_leave_nothing() {
    if runs_alone_elsewhere("closed_sessions_leave_nothing") {
        return;
    }
    let before = descriptors().len();
    let sessions = sessions();
    let pairs: Vec<_> = (0..4).map(|_| sessions.carried_pair()).collect();
    let first = descriptors().len();
    for n in 0..20 {
        sessions.net.fail_pairs(n % 2 == 0, PICKS[n % 3]);
        pairs.iter().for_each(|(near, far)| pass(near, far));
    }
    for (near, far) in &pairs {
        wait_for(near, far, true);
    }
    wait_until("one queue pair for each end", || {
        sessions.net.fabric.pairs().len() == 8
    });
    // A control socket more or less.
    let then = descriptors().len();
    assert!(then <= first + 2, "{first}, {then}: {:#?}", descriptors());
    // Some have bytes that nobody has read, and handles outlive their session.
    pairs[0].1.send_all(b"unread", LIMIT).unwrap();
    let VerbsSessions {
        net,
        client,
        server,
        endpoint,
    } = sessions;
    drop(endpoint);
    for session in [client, server] {
        session.close(Duration::from_secs(5)).unwrap();
    }
    wait_until("no queue pair and no region", || net.fabric.is_empty());
    drop(pairs);
    drop(net);
    wait_until("no descriptor", || descriptors().len() == before);
}

/// The child drops what it has of its parent's flows, which does not disturb the parent.
#[test]
fn a_child_does_not_touch_its_parents_queue_pairs() {
    if runs_alone_elsewhere("a_child_does_not_touch_its_parents_queue_pairs") {
        return;
    }
    let sessions = sessions();
    let (near, far) = sessions.carried_pair();
    // The count follows the move.
    wait_until("counted", || near.stats().resumes == 1);
    // The thread of the network is asleep.
    thread::sleep(Duration::from_millis(100));
    // SAFETY: the child only drops its copies and ends. No other thread holds a lock that it needs.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop((near, far, sessions));
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    assert_eq!(wait_for_child(pid), Some(0));
    for _ in 0..10 {
        pass(&near, &far);
    }
    assert_eq!(near.stats().resumes, 1);
    assert!(near.connection().is_none());
}

/// A write to a peer that has closed its end of a flow fails, although nothing is wrong with the path.
#[test]
fn a_flow_that_is_closed_says_nothing_about_its_port() {
    let settings = VerbsSettings {
        ping_every: Duration::from_millis(100),
        ..small()
    };
    let sessions = VerbsSessions::with_hosts(&options(&[]), settings, [&[0, 2], &[1, 3]]);
    for who in [0, 1, 0, 1] {
        let (near, far) = sessions.carried_pair();
        let used = sessions.net.fabric.pairs();
        assert!(used.iter().all(|(host, _)| *host < 2), "{who}: {used:?}");
        exchange(&near, &far, 1 << 16, |_| ());
        let (first, last) = if who == 1 { (near, far) } else { (far, near) };
        first.close();
        thread::sleep(Duration::from_millis(700));
        last.close();
        thread::sleep(Duration::from_millis(300));
    }
}
