use super::*;
use crate::QpNumber;
use crate::RingShape;
use crate::agreement::{ASK_LIMIT, PairCookie};
use crate::in_memory::{Fabric, MemoryAdapter, MemoryDatagrams, Step};

const MS: Duration = Duration::from_millis(1);

type Exchange = PairExchange<MemoryAdapter, MemoryDatagrams>;

fn exchanges(fabric: &Fabric, now: Instant) -> [Exchange; 2] {
    let sizes = PairSizes {
        shape: RingShape::new(64, 4).unwrap(),
        depth: 4,
        staging: 64,
        inline: 0,
        message: 64,
    };
    [0, 1].map(|host| {
        let adapter = fabric.adapter(host);
        let mail = adapter.datagrams();
        PairExchange::new(
            adapter,
            mail,
            sizes,
            AnswerLimits::default(),
            [host as u8; 32],
            now,
        )
    })
}

/// All that happens until nothing is on its way.
fn run(fabric: &Fabric, both: &mut [Exchange; 2], now: Instant) -> Vec<PairOutcome<MemoryAdapter>> {
    let mut all = Vec::new();
    for _ in 0..20 {
        for exchange in &mut *both {
            all.extend(std::iter::from_fn(|| exchange.poll(now)));
        }
        fabric.run();
    }
    all
}

#[test]
fn dropping_gives_everything_back_at_any_moment() {
    for moment in 0..12 {
        let (fabric, now) = (Fabric::new(1), Instant::now());
        let mut both = exchanges(&fabric, now);
        let to = both[1].locator();
        both[0].ask(PairAttempt(1), to, now, ASK_LIMIT).unwrap();
        for n in 0..moment {
            match n % 3 {
                0 => both[0].expire(now),
                1 => fabric.run(),
                _ => {
                    // What it has found stays inside.
                    for exchange in &mut both {
                        exchange.take_datagrams(now);
                        exchange.look_for_messages(now);
                        exchange.drive_asks(now);
                    }
                }
            }
        }
        drop(both);
        assert!(fabric.is_empty(), "moment {moment}");
    }
}

/// Until the other side has a queue pair, and its answer is on its way.
fn run_to_answer(fabric: &Fabric, both: &mut [Exchange; 2], now: Instant) {
    while both[1].unproved() == 0 {
        assert!(both[0].poll(now).is_none());
        fabric.run();
        assert!(both[1].poll(now).is_none());
    }
}

#[test]
fn a_queue_pair_that_fails_before_its_first_message_is_given_back() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let to = both[1].locator();
    both[0].ask(PairAttempt(1), to, now, ASK_LIMIT).unwrap();
    run_to_answer(&fabric, &mut both, now);
    let number = both[1].unproved.values().next().unwrap().0.number();
    fabric.take(Step::Fail(number));
    let all = run(&fabric, &mut both, now);
    let Some(PairOutcome::Connected {
        pair, mut verbs, ..
    }) = all.into_iter().next()
    else {
        panic!("not connected");
    };
    assert_eq!(both[1].unproved(), 0);
    pair.release(&mut verbs);
    drop(both);
    assert!(fabric.is_empty());
}

#[test]
fn requests_answers_and_first_messages_are_reported() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let locators = both.each_ref().map(PairExchange::locator);
    let mut adapters = [0, 1].map(|host| fabric.adapter(host));
    for exchange in &mut both {
        assert!(exchange.poll(now).is_none());
    }
    both[0]
        .ask(PairAttempt(1), locators[1], now, ASK_LIMIT)
        .unwrap();
    assert!(both[0].poll(now).is_none());
    // Cookie and answer make two reports on each side.
    for side in [1, 0, 1, 0] {
        fabric.run();
        let number = adapters[side].reported();
        assert_eq!(number, Some(locators[side].number));
        let outcome = both[side].poll(now);
        match outcome {
            Some(PairOutcome::Connected {
                pair, mut verbs, ..
            }) => {
                let number = both[1].unproved.values().next().unwrap().0.number();
                fabric.run();
                assert_eq!(adapters[1].reported(), Some(number));
                let accepted = both[1].poll(now);
                assert!(matches!(accepted, Some(PairOutcome::Accepted { .. })));
                pair.release(&mut verbs);
                return;
            }
            None => {}
            Some(outcome) => panic!("{outcome:?}"),
        }
    }
    panic!("not connected");
}

#[test]
fn a_cancelled_attempt_leaves_nothing_and_is_not_heard_of() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let to = both[1].locator();
    both[0].ask(PairAttempt(1), to, now, ASK_LIMIT).unwrap();
    assert!(both[0].ask(PairAttempt(1), to, now, ASK_LIMIT).is_err());
    run_to_answer(&fabric, &mut both, now);
    both[0].cancel(PairAttempt(1));
    assert!(run(&fabric, &mut both, now).is_empty());
    assert_eq!(both[1].unproved(), 1);
    assert!(run(&fabric, &mut both, now + MS * 4999).is_empty());
    assert_eq!(
        (both[1].unproved(), both[1].timeout()),
        (1, Some(now + MS * 5000))
    );
    assert!(run(&fabric, &mut both, now + MS * 5000).is_empty());
    assert_eq!((both[1].unproved(), both[0].timeout()), (0, None));
}

#[test]
fn an_attempt_that_is_cancelled_before_its_outcome_is_taken_is_not_heard_of() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let to = both[1].locator();
    for attempt in [1, 2] {
        both[0]
            .ask(PairAttempt(attempt), to, now, ASK_LIMIT)
            .unwrap();
    }
    while both[0].agreed.len() < 2 {
        fabric.run();
        for exchange in &mut both {
            exchange.take_datagrams(now);
            exchange.drive_asks(now);
        }
    }
    both[0].cancel(PairAttempt(2));
    let Some(PairOutcome::Connected {
        attempt,
        pair,
        mut verbs,
    }) = both[0].poll(now)
    else {
        panic!("nothing");
    };
    assert_eq!(attempt, PairAttempt(1));
    assert!(both[0].poll(now).is_none());
    pair.release(&mut verbs);
    drop(both);
    assert!(fabric.is_empty());
}

#[test]
fn an_adapter_without_queue_pairs_refuses() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let to = both[1].locator();
    both[0].ask(PairAttempt(1), to, now, ASK_LIMIT).unwrap();
    fabric.limit_pairs(1);
    let all = run(&fabric, &mut both, now);
    let [PairOutcome::Failed { attempt, why }] = &all[..] else {
        panic!("{all:?}");
    };
    let refused = AskFailure::Refused(PairRefusal::NoPair);
    assert_eq!((*attempt, *why), (PairAttempt(1), refused));
    // The own adapter has none: that is said at once.
    fabric.limit_pairs(0);
    assert!(both[0].ask(PairAttempt(2), to, now, ASK_LIMIT).is_err());
}

#[test]
fn a_failed_queue_is_reported_and_attempts_end() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let to = both[1].locator();
    both[0].ask(PairAttempt(1), to, now, ASK_LIMIT).unwrap();
    both[0].mail.fail();
    assert!(both[0].is_broken());
    assert!(both[0].ask(PairAttempt(2), to, now, ASK_LIMIT).is_err());
    // At once: nothing can be asked any more.
    let all = run(&fabric, &mut both, now);
    let [PairOutcome::Failed { why, .. }] = &all[..] else {
        panic!("{all:?}");
    };
    assert!(matches!(why, AskFailure::Adapter(_)), "{why:?}");
    assert_eq!(both[0].asks.len(), 0);
}

/// Where there is no way to the port, each attempt to find one may wait for a second. So it is made once.
#[test]
fn an_attempt_without_a_way_ends_at_once() {
    // ENOBUFS, ETIMEDOUT, ENETUNREACH, EINVAL
    for (errno, ends) in [(105, false), (110, true), (101, true), (22, true)] {
        let (fabric, now) = (Fabric::new(1), Instant::now());
        let [near, far] = exchanges(&fabric, now);
        let (sizes, to) = (near.sizes, far.locator());
        let adapter = fabric.adapter(2);
        let mut mail = adapter.datagrams();
        mail.refuse_sends(errno);
        let limits = AnswerLimits::default();
        let mut exchange = PairExchange::new(adapter, mail, sizes, limits, [0; 32], now);
        exchange.ask(PairAttempt(1), to, now, ASK_LIMIT).unwrap();
        let outcome = exchange.poll(now);
        assert_eq!(outcome.is_some(), ends, "{errno}: {outcome:?}");
        for n in 1..100 {
            exchange.poll(now + MS * n);
        }
        assert_eq!(exchange.mail.refused() == 1, ends, "{errno}");
        assert!(ends == (exchange.asks.is_empty() && exchange.timeout().is_none()));
    }
}

#[test]
fn both_sides_may_ask_at_once_and_each_may_ask_itself() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let mut both = exchanges(&fabric, now);
    let locators = both.each_ref().map(PairExchange::locator);
    for (from, to) in [(0, 1), (1, 0), (0, 0)] {
        let attempt = PairAttempt(from as u64 * 2 + to as u64);
        both[from]
            .ask(attempt, locators[to], now, ASK_LIMIT)
            .unwrap();
    }
    let all = run(&fabric, &mut both, now);
    let connected = all
        .iter()
        .filter(|a| matches!(a, PairOutcome::Connected { .. }));
    let accepted = all
        .iter()
        .filter(|a| matches!(a, PairOutcome::Accepted { .. }));
    assert_eq!((connected.count(), accepted.count(), all.len()), (3, 3, 6));
    for agreed in all {
        if let PairOutcome::Connected {
            pair, mut verbs, ..
        }
        | PairOutcome::Accepted {
            pair, mut verbs, ..
        } = agreed
        {
            pair.release(&mut verbs);
        }
    }
    drop(both);
    assert!(fabric.is_empty());
}

/// Datagrams that never end: each call takes some of them, and asks to be called again.
#[derive(Debug)]
struct Flood(MemoryDatagrams);

impl Datagrams for Flood {
    fn locator(&self) -> PortLocator {
        self.0.locator()
    }

    fn send(&mut self, to: &PortLocator, bytes: &[u8]) -> Result<(), VerbsError> {
        self.0.send(to, bytes)
    }

    fn receive(&mut self) -> Option<ReceivedDatagram> {
        let from = crate::DatagramSource {
            number: QpNumber(7),
            lid: 0,
            gid: None,
        };
        let message = AgreementMessage::Cookie(PairAttempt(3), PairCookie([0; 16]));
        Some(ReceivedDatagram {
            from,
            bytes: message.encode(),
        })
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        self.0.arm()
    }

    fn is_broken(&self) -> bool {
        false
    }
}

#[test]
fn a_flood_keeps_neither_the_caller_nor_the_deadlines() {
    let (fabric, now) = (Fabric::new(1), Instant::now());
    let [near, far] = exchanges(&fabric, now);
    let (sizes, to) = (near.sizes, far.locator());
    let adapter = fabric.adapter(2);
    let flood = Flood(adapter.datagrams());
    let limits = AnswerLimits::default();
    let mut exchange = PairExchange::new(adapter, flood, sizes, limits, [0; 32], now);
    exchange.ask(PairAttempt(1), to, now, MS * 100).unwrap();
    assert!(exchange.poll(now).is_none());
    assert_eq!(exchange.timeout(), Some(now));
    let ended = exchange.poll(now + MS * 100);
    assert!(
        matches!(ended, Some(PairOutcome::Failed { .. })),
        "{ended:?}"
    );
}
