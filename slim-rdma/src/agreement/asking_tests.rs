use super::super::PairCookie;
use super::*;
use crate::{Datagrams, HalfPair, PairSizes, RingShape, Verbs, in_memory::Fabric};

const MS: Duration = Duration::from_millis(1);

struct Ask {
    asking: PairAsking,
    begun: Instant,
    /// The queue that is asked, and an address of a queue pair there.
    there: DatagramSource,
    pair: PairAddress,
}

fn ask(limit: Duration) -> Ask {
    let fabric = Fabric::new(1);
    let sizes = PairSizes {
        shape: RingShape::new(64, 4).unwrap(),
        depth: 4,
        staging: 64,
        inline: 0,
        message: 64,
    };
    let address = |host: usize| {
        let mut adapter = fabric.adapter(host);
        let half = HalfPair::open(&mut adapter, sizes).unwrap();
        assert_eq!(adapter.reported(), None);
        (half.address(), adapter.datagrams().locator())
    };
    let [(own, from), (pair, to)] = [address(0), address(1)];
    let begun = Instant::now();
    Ask {
        asking: PairAsking::new(PairAttempt(7), own, from, to, begun, limit),
        begun,
        there: DatagramSource {
            number: to.number,
            lid: to.lid,
            gid: Some(to.gid),
        },
        pair,
    }
}

impl Ask {
    /// Times in milliseconds at which it asks, until it has ended or this time comes.
    fn asks_until(&mut self, end: u64) -> Vec<u64> {
        let mut times = Vec::new();
        for at in 0..end {
            if self.asking.poll_send(self.begun + MS * at as u32).is_some() {
                times.push(at);
            }
        }
        times
    }

    fn handle(&mut self, at: u32, message: AgreementMessage) {
        let there = self.there;
        self.asking.handle(self.begun + MS * at, &there, &message);
    }
}

#[test]
fn repetitions_have_growing_pauses_and_end_at_the_deadline() {
    let mut ask = ask(Duration::from_secs(10));
    let times = ask.asks_until(4000);
    assert_eq!(times[..8], [0, 5, 15, 35, 75, 155, 315, 475]);
    // The limit is 3 s, whatever is wanted.
    assert_eq!(times.len(), 6 + 17);
    assert!(times.iter().all(|at| *at < 3000));
    assert_eq!(ask.asking.outcome(), Some(Err(AskFailure::TimedOut)));
    assert_eq!(ask.asking.timeout(), None);
}

#[test]
fn the_deadline_comes_before_the_next_repetition() {
    let mut ask = ask(MS * 40);
    assert_eq!(ask.asking.timeout(), Some(ask.begun));
    assert_eq!(ask.asks_until(40), [0, 5, 15, 35]);
    assert_eq!(ask.asking.timeout(), Some(ask.begun + MS * 40));
    assert_eq!(ask.asking.outcome(), None);
    // An answer at the deadline is too late.
    ask.handle(40, AgreementMessage::Answer(PairAttempt(7), ask.pair));
    assert_eq!(ask.asking.outcome(), None);
    assert_eq!(ask.asking.poll_send(ask.begun + MS * 40), None);
    assert_eq!(ask.asking.outcome(), Some(Err(AskFailure::TimedOut)));
}

#[test]
fn a_cookie_is_sent_back_at_once_and_another_one_with_the_next_repetition() {
    let mut ask = ask(ASK_LIMIT);
    let asked = ask.asking.poll_send(ask.begun).unwrap();
    let AgreementMessage::Ask(request, None) = asked else {
        panic!("{asked:?}");
    };
    let [first, second] = [PairCookie([1; 16]), PairCookie([2; 16])];
    ask.handle(3, AgreementMessage::Cookie(PairAttempt(7), first));
    assert_eq!(
        ask.asking.poll_send(ask.begun + MS * 3),
        Some(AgreementMessage::Ask(request, Some(first)))
    );
    ask.handle(4, AgreementMessage::Cookie(PairAttempt(7), second));
    assert_eq!(ask.asking.poll_send(ask.begun + MS * 4), None);
    assert_eq!(
        ask.asking.poll_send(ask.begun + MS * 8),
        Some(AgreementMessage::Ask(request, Some(second)))
    );
}

#[test]
fn only_the_answer_to_this_attempt_from_the_right_place_counts() {
    let mut ask = ask(ASK_LIMIT);
    let answer = AgreementMessage::Answer(PairAttempt(7), ask.pair);
    let there = ask.there;
    let elsewhere = DatagramSource {
        number: crate::QpNumber(3),
        ..there
    };
    ask.asking.handle(ask.begun, &elsewhere, &answer);
    let other_port = PairAddress {
        gid: [1; 16],
        ..ask.pair
    };
    let other_partition = PairAddress {
        partition: 0x8001,
        ..ask.pair
    };
    for message in [
        AgreementMessage::Answer(PairAttempt(8), ask.pair),
        AgreementMessage::Answer(PairAttempt(7), other_port),
        AgreementMessage::Answer(PairAttempt(7), other_partition),
        AgreementMessage::Refusal(PairAttempt(8), PairRefusal::NoPair),
    ] {
        ask.handle(1, message);
        assert_eq!(ask.asking.outcome(), None, "{message:?}");
    }
    ask.handle(1, answer);
    assert_eq!(ask.asking.outcome(), Some(Ok(ask.pair)));
    // What comes later changes nothing.
    ask.handle(
        2,
        AgreementMessage::Refusal(PairAttempt(7), PairRefusal::NoUse),
    );
    assert_eq!(ask.asking.outcome(), Some(Ok(ask.pair)));
    assert_eq!(ask.asking.poll_send(ask.begun + MS * 500), None);
}

#[test]
fn a_refusal_ends_the_attempt() {
    let mut ask = ask(ASK_LIMIT);
    ask.handle(
        1,
        AgreementMessage::Refusal(PairAttempt(7), PairRefusal::NoUse),
    );
    let refused = AskFailure::Refused(PairRefusal::NoUse);
    assert_eq!(ask.asking.outcome(), Some(Err(refused)));
}
