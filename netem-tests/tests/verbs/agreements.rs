//! Two ports agree on queue pairs by datagrams.

use std::time::{Duration, Instant};

use slim_rdma::{
    Datagrams, PortLocator, QpNumber, QueuePair, Verbs,
    agreement::{ASK_LIMIT, AnswerLimits, AskFailure, PairAttempt, PairExchange, PairOutcome},
    ibverbs::{VerbsAdapter, VerbsDatagrams},
};

use super::{readable, rxe, sizes, transfer, wait};

type Exchange = PairExchange<VerbsAdapter, VerbsDatagrams>;
type Held = (QueuePair, VerbsAdapter);

fn exchange(adapter: &VerbsAdapter) -> Exchange {
    PairExchange::new(
        adapter.clone(),
        adapter.datagrams().unwrap(),
        sizes(4096, 16),
        AnswerLimits::default(),
        [7; 32],
        Instant::now(),
    )
}

/// What has become of the attempts of the first side.
#[derive(Default)]
struct Outcomes {
    connected: Vec<(PairAttempt, Held)>,
    failed: Vec<(PairAttempt, AskFailure)>,
    accepted: Vec<(PairAttempt, Held)>,
}

impl Outcomes {
    fn poll(&mut self, exchanges: &mut [Exchange; 2]) {
        for exchange in exchanges {
            while let Some(agreed) = exchange.poll(Instant::now()) {
                match agreed {
                    PairOutcome::Connected {
                        attempt,
                        pair,
                        verbs,
                    } => self.connected.push((attempt, (pair, verbs))),
                    PairOutcome::Failed { attempt, why } => self.failed.push((attempt, why)),
                    PairOutcome::Accepted { key, pair, verbs } => {
                        self.accepted.push((key.attempt, (pair, verbs)));
                    }
                }
            }
        }
    }

    /// Both ends of an attempt.
    fn both(&mut self, attempt: PairAttempt) -> Option<[Held; 2]> {
        let at = |ends: &[(PairAttempt, Held)]| ends.iter().position(|(of, _)| *of == attempt);
        let (near, far) = (at(&self.connected)?, at(&self.accepted)?);
        Some([self.connected.remove(near).1, self.accepted.remove(far).1])
    }
}

/// Bytes flow both ways; then both ends are given back.
fn flow([near, far]: [Held; 2], total: u64) {
    let (mut pairs, mut adapters) = ([near.0, far.0], [near.1, far.1]);
    transfer(&mut adapters, &mut pairs, total, 1000);
    super::release(pairs, &mut adapters);
}

#[test]
fn datagrams_arrive_with_their_senders_address() {
    let Some(rxe) = rxe("agreements::datagrams_arrive_with_their_senders_address") else {
        return;
    };
    let mut adapters = rxe.open();
    let mut mail = adapters.each_ref().map(|a| a.datagrams().unwrap());
    let [a, b] = mail.each_ref().map(Datagrams::locator);
    for (locator, adapter) in [a, b].iter().zip(&adapters) {
        assert_eq!(PortLocator::decode(&locator.encode()), Some(*locator));
        assert_eq!(locator.gid, adapter.gid());
    }
    mail[1].arm().unwrap();
    assert_eq!(mail[1].receive(), None);
    assert!(!readable(adapters[1].completion_descriptor(), 5));
    for len in [1, 62, 128] {
        mail[0].send(&b, &vec![len; len.into()]).unwrap();
        let got = wait("a datagram", Duration::from_secs(1), || mail[1].receive());
        assert_eq!(got.bytes, vec![len; len.into()]);
        assert!(got.from.may_be(&a) && !got.from.may_be(&b), "{got:?}");
        assert_eq!(got.from.gid, Some(a.gid));
    }
    // It was asked for one report.
    assert!(readable(adapters[1].completion_descriptor(), 1000));
    let reported = (adapters[1].reported(), adapters[1].reported());
    assert_eq!(reported, (Some(b.number), None));
    // With another key, or for another number, none arrives. A port that nobody has is no failure of this queue.
    let other_key = PortLocator {
        queue_key: b.queue_key ^ 1,
        ..b
    };
    let other_number = PortLocator {
        number: QpNumber(b.number.0 + 1000),
        ..b
    };
    for to in [other_key, other_number] {
        mail[0].send(&to, b"nobody").unwrap();
    }
    assert!(mail[0].send(&b, &[0; 129]).is_err());
    let other_partition = PortLocator { partition: 1, ..b };
    assert!(mail[0].send(&other_partition, b"nobody").is_err());
    // More than there are places for, one after the other.
    for n in 0..1000_u32 {
        mail[0].send(&b, &n.to_be_bytes()).unwrap();
        let got = wait("a datagram", Duration::from_secs(1), || mail[1].receive());
        assert_eq!(got.bytes, n.to_be_bytes());
    }
    // A receiver that does not look loses some, and goes on.
    let mut sent = 0;
    for n in 0..400_u32 {
        sent += u32::from(mail[0].send(&b, &n.to_be_bytes()).is_ok());
    }
    std::thread::sleep(Duration::from_millis(50));
    let found = std::iter::from_fn(|| mail[1].receive()).count();
    println!("{sent} sent, {found} received");
    assert!((1..=sent as usize).contains(&found));
    mail[0].send(&b, b"more").unwrap();
    let got = wait("a datagram", Duration::from_secs(1), || mail[1].receive());
    assert_eq!(got.bytes, b"more");
    assert!(mail.iter().all(|mail| !mail.is_broken()));
    // A queue that is gone takes none, and that is no failure either.
    let [mut near, far] = mail;
    drop(far);
    near.send(&b, b"nobody").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((near.receive(), near.is_broken()), (None, false));
}

#[test]
fn queue_pairs_are_agreed_on() {
    let Some(rxe) = rxe("agreements::queue_pairs_are_agreed_on") else {
        return;
    };
    let adapters = rxe.open();
    let mut exchanges = adapters.each_ref().map(exchange);
    let to = exchanges[1].locator();
    let mut times = Vec::new();
    for n in 0..50 {
        let mut outcomes = Outcomes::default();
        let begin = Instant::now();
        exchanges[0]
            .ask(PairAttempt(n), to, begin, ASK_LIMIT)
            .unwrap();
        let ends = wait("an agreement", Duration::from_secs(2), || {
            outcomes.poll(&mut exchanges);
            outcomes.both(PairAttempt(n))
        });
        times.push(begin.elapsed());
        flow(ends, 5000);
    }
    times.sort();
    println!(
        "agreed, median of 50: {:.2?}, longest {:.2?}",
        times[25], times[49]
    );
    // Nobody answers: it ends in time.
    let nobody = PortLocator {
        queue_key: to.queue_key ^ 1,
        ..to
    };
    let limit = Duration::from_millis(300);
    let begin = Instant::now();
    exchanges[0]
        .ask(PairAttempt(100), nobody, begin, limit)
        .unwrap();
    let mut outcomes = Outcomes::default();
    let why = wait("the end", Duration::from_secs(1), || {
        outcomes.poll(&mut exchanges);
        outcomes.failed.pop()
    });
    assert_eq!(why, (PairAttempt(100), AskFailure::TimedOut));
    assert!(begin.elapsed() >= limit);
    assert_eq!(exchanges.each_ref().map(PairExchange::unproved), [0, 0]);
    assert!(adapters.iter().all(VerbsAdapter::is_empty));
}

/// A side that waits by the port's descriptor is woken by requests, answers, and first messages.
#[test]
fn both_sides_are_woken() {
    let Some(rxe) = rxe("agreements::both_sides_are_woken") else {
        return;
    };
    let mut adapters = rxe.open();
    let mut exchanges = adapters.each_ref().map(exchange);
    let to = exchanges[1].locator();
    let mut outcomes = Outcomes::default();
    outcomes.poll(&mut exchanges);
    let begin = Instant::now();
    exchanges[0]
        .ask(PairAttempt(1), to, begin, ASK_LIMIT)
        .unwrap();
    outcomes.poll(&mut exchanges);
    // Each is polled only when its port reports something: the line loses nothing, so no timer is needed.
    let ends = loop {
        assert!(begin.elapsed() < Duration::from_secs(2), "nobody was woken");
        let [one, other] = [0, 1].map(|side| {
            let woken = readable(adapters[side].completion_descriptor(), 5);
            while adapters[side].reported().is_some() {}
            woken
        });
        if one || other {
            outcomes.poll(&mut exchanges);
        }
        if let Some(ends) = outcomes.both(PairAttempt(1)) {
            break ends;
        }
    };
    flow(ends, 5000);
}

#[test]
fn queue_pairs_are_agreed_on_over_a_line_that_loses_a_third() {
    let Some(rxe) = rxe("agreements::queue_pairs_are_agreed_on_over_a_line_that_loses_a_third")
    else {
        return;
    };
    const ATTEMPTS: u64 = 20;
    let adapters = [0, 1].map(|side| {
        // With three retries a fifteenth of all writes would fail.
        let settings = slim_rdma::ibverbs::PortSettings {
            retries: 6,
            ..rxe.settings(side)
        };
        VerbsAdapter::open(&settings).unwrap()
    });
    let mut exchanges = adapters.each_ref().map(exchange);
    let to = exchanges[1].locator();
    rxe.line("loss 30%");
    let mut outcomes = Outcomes::default();
    let begin = Instant::now();
    for n in 0..ATTEMPTS {
        exchanges[0]
            .ask(PairAttempt(n), to, Instant::now(), ASK_LIMIT)
            .unwrap();
    }
    // Each attempt ends by its deadline.
    wait("the ends", ASK_LIMIT + Duration::from_secs(1), || {
        outcomes.poll(&mut exchanges);
        let ended = outcomes.connected.len() + outcomes.failed.len();
        (ended as u64 == ATTEMPTS).then_some(())
    });
    let asked = begin.elapsed();
    // And each unproved queue pair is accepted, or gone.
    wait("proofs", Duration::from_secs(7), || {
        outcomes.poll(&mut exchanges);
        (exchanges[1].unproved() == 0).then_some(())
    });
    println!(
        "{ATTEMPTS} attempts in {asked:.1?}: {} connected, {} accepted after {:.1?}, failed: {:?}",
        outcomes.connected.len(),
        outcomes.accepted.len(),
        begin.elapsed(),
        outcomes.failed,
    );
    let mut flows = 0;
    for n in 0..ATTEMPTS {
        if let Some([mut near, mut far]) = outcomes.both(PairAttempt(n)) {
            // A few bytes while packets are lost.
            let sent = near.0.send(&mut near.1, b"first");
            let mut buf = [0; 5];
            let got = (0..400).find_map(|_| {
                std::thread::sleep(Duration::from_millis(2));
                near.0.progress(&mut near.1);
                far.0.recv(&mut far.1, &mut buf).ok()
            });
            if sent == Ok(5) && got.is_some() {
                assert_eq!((got, &buf), (Some(5), b"first"));
                flows += 1;
            }
            near.0.release(&mut near.1);
            far.0.release(&mut far.1);
        }
    }
    println!("bytes flow on {flows}");
    assert!(flows >= ATTEMPTS / 2, "{flows} of {ATTEMPTS}");
    // An accepted one without its other end there would be wrong.
    assert!(outcomes.accepted.is_empty());
    for (_, (pair, mut adapter)) in outcomes.connected {
        pair.release(&mut adapter);
    }
    // The line is good again.
    rxe.plain();
    let mut outcomes = Outcomes::default();
    let now = Instant::now();
    exchanges[0]
        .ask(PairAttempt(99), to, now, ASK_LIMIT)
        .unwrap();
    let ends = wait("an agreement", Duration::from_secs(2), || {
        outcomes.poll(&mut exchanges);
        outcomes.both(PairAttempt(99))
    });
    flow(ends, 20_000);
}
