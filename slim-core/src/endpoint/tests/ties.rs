//! Two processes without a witness that cannot keep a connection.

use super::pair::*;
use crate::auth::{JobKey, seal_with_job};
use crate::config::{Config, WhenLost};
use crate::endpoint::{Action, State};
use crate::event::{EscalateReason, Event};
use crate::ids::Cause;
use crate::wire::{Accuse, AddrList, Fenced, Kind, Lost, Message, Ruling};

fn key() -> JobKey {
    JobKey::new(b"the key of this job").unwrap()
}

/// A flow whose ends can make no connection. The first one has the higher name.
fn parted(udp: Net) -> (Pair, usize, usize) {
    let mut pair = Pair::live_with(Config {
        job_key: Some(key()),
        when_lost: Some(WhenLost::Error),
        ..Config::default()
    });
    pair.tcp = [Net::Silent; 2];
    pair.udp = [udp; 2];
    match id(A) > id(B) {
        true => (pair, A, B),
        false => (pair, B, A),
    }
}

fn fenced(pair: &Pair, n: usize) -> usize {
    pair.count(n, |action| matches!(action, Action::Fence { .. }))
}

fn reason(pair: &Pair, n: usize) -> Option<EscalateReason> {
    pair.events[n].iter().find_map(|event| match event {
        Event::Escalate { reason, .. } => Some(*reason),
        _ => None,
    })
}

/// What the fenced process says last of all comes to the other one.
fn say_fenced(pair: &mut Pair, from: usize, to: usize) {
    let message = Message::Fenced(Fenced { endpoint: id(from) });
    let data = seal_with_job(Some(&key()), &message);
    pair.ends[to].handle_datagram(pair.now, control(from), control(to), &data);
    pair.run();
}

fn both_fail(pair: &mut Pair) {
    for n in [A, B] {
        pair.ends[n].fault(pair.now, FLOW, Cause::Errno(110));
    }
    pair.run();
}

#[test]
fn the_one_with_the_lower_name_is_lost() {
    let (mut pair, high, low) = parted(Net::Works);
    both_fail(&mut pair);
    pair.wait(ms(59_900));
    assert_eq!((fenced(&pair, low), reason(&pair, high)), (0, None));
    pair.wait(ms(1_000));
    assert_eq!((fenced(&pair, low), fenced(&pair, high)), (1, 0));
    assert_eq!(reason(&pair, low), Some(EscalateReason::Fenced));
    assert_eq!(reason(&pair, high), None, "the lost process may still act");
    say_fenced(&mut pair, low, high);
    assert_eq!(reason(&pair, high), Some(EscalateReason::PeerLost));
}

/// Only the one with the lower name has noticed anything.
#[test]
fn the_one_with_the_higher_name_decides_when_it_is_asked() {
    let (mut pair, high, low) = parted(Net::Works);
    pair.ends[low].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(61_000));
    assert_eq!((fenced(&pair, low), fenced(&pair, high)), (1, 0));
    say_fenced(&mut pair, low, high);
    assert_eq!(reason(&pair, high), Some(EscalateReason::PeerLost));
}

/// The other one waits for bytes, so its kernel has no reason to report a fault.
#[test]
fn the_one_with_the_lower_name_is_lost_even_if_it_has_noticed_nothing() {
    let (mut pair, high, low) = parted(Net::Works);
    pair.ends[high].fault(pair.now, FLOW, Cause::Errno(110));
    pair.wait(ms(60_500));
    assert_eq!((fenced(&pair, low), reason(&pair, high)), (0, None));
    pair.wait(ms(2_000));
    assert_eq!((fenced(&pair, low), fenced(&pair, high)), (1, 0));
    assert_eq!(reason(&pair, high), None, "the lost process may still act");
    say_fenced(&mut pair, low, high);
    assert_eq!(reason(&pair, high), Some(EscalateReason::PeerLost));
}

#[test]
fn without_messages_each_decides_for_itself_after_a_grace_period() {
    let (mut pair, high, low) = parted(Net::Silent);
    both_fail(&mut pair);
    pair.wait(ms(64_900));
    assert_eq!((reason(&pair, high), reason(&pair, low)), (None, None));
    pair.wait(ms(1_000));
    let attempts = Some(EscalateReason::Attempts);
    assert_eq!(
        (reason(&pair, high), reason(&pair, low)),
        (attempts, attempts)
    );
    assert_eq!((fenced(&pair, low), fenced(&pair, high)), (0, 0));
}

/// The recorded verdict on a flow that was resumed after all; and one from an address of nobody.
#[test]
fn a_process_whose_flows_are_well_is_not_lost() {
    let (mut pair, high, low) = parted(Net::Works);
    let verdict = Message::Lost(Lost {
        to: id(low),
        lost: id(low),
        ruling: Ruling::Settled,
        cookie: 0,
    });
    let data = seal_with_job(Some(&key()), &verdict);
    pair.ends[low].handle_datagram(pair.now, control(high), control(low), &data);
    pair.run();
    assert_eq!(
        (fenced(&pair, low), pair.state(low)),
        (0, Some(State::Live))
    );
    // Nor if it comes again and again: the flow gets another transport each time.
    pair.tcp = [Net::Works; 2];
    for _ in 0..20 {
        pair.ends[low].handle_datagram(pair.now, control(high), control(low), &data);
        pair.wait(ms(200));
    }
    assert_eq!(
        (fenced(&pair, low), pair.state(low)),
        (0, Some(State::Live))
    );
    pair.udp = [Net::Silent; 2];
    pair.tcp = [Net::Silent; 2];
    pair.ends[low].fault(pair.now, FLOW, Cause::Errno(110));
    let other = "10.9.9.9:4000".parse().unwrap();
    pair.ends[low].handle_datagram(pair.now, other, control(low), &data);
    assert_eq!(fenced(&pair, low), 0);
    pair.ends[low].handle_datagram(pair.now, control(high), control(low), &data);
    pair.run();
    assert_eq!(fenced(&pair, low), 1);
}

#[test]
fn only_a_process_with_a_flow_and_a_lower_name_can_ask() {
    let (mut pair, high, low) = parted(Net::Works);
    let asked = |pair: &mut Pair, at: usize, by: usize, key: &JobKey, cookie: u64| {
        let message = Message::Accuse(Accuse {
            accuser: id(by),
            accused: id(at),
            control_port: 9,
            addrs: AddrList::new([]),
            cookie,
        });
        let data = seal_with_job(Some(key), &message);
        let said = |pair: &Pair| {
            pair.count(at, |action| match action {
                Action::Datagram { data, .. } => crate::wire::kind_of(data) == Some(Kind::Lost),
                _ => false,
            })
        };
        let before = said(pair);
        pair.ends[at].handle_datagram(pair.now, control(by), control(at), &data);
        pair.run();
        said(pair) - before
    };
    assert_eq!(asked(&mut pair, high, low, &key(), 0), 1, "the cookie");
    assert_eq!(asked(&mut pair, low, high, &key(), 0), 0);
    let wrong = JobKey::new(b"the key of another job").unwrap();
    assert_eq!(asked(&mut pair, high, low, &wrong, 0), 0);
    // Without the cookie the answer is no verdict, and nothing has happened to the flow.
    assert_eq!(
        (fenced(&pair, low), pair.state(high)),
        (0, Some(State::Live))
    );
    pair.ends[high].gone(pair.now, FLOW);
    pair.run();
    assert_eq!(asked(&mut pair, high, low, &key(), 0), 0);
}
