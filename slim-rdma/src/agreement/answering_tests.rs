use super::*;
use crate::{PathMtu, QpNumber, RemoteKey, RingShape};

const MS: Duration = Duration::from_millis(1);

fn pair(number: u32) -> PairAddress {
    PairAddress {
        gid: [0xfd; 16],
        lid: 0,
        partition: 0xffff,
        mtu: PathMtu::Mtu1024,
        number: QpNumber(number),
        psn: 5,
        shape: RingShape::new(64, 4).unwrap(),
        ring: RemoteKey { addr: 9, key: 9 },
    }
}

fn request(attempt: u64) -> PairRequest {
    PairRequest {
        attempt: PairAttempt(attempt),
        number: QpNumber(1000),
        queue_key: 77,
        pair: pair(20),
    }
}

struct Answers {
    answering: PairAnswering,
    begun: Instant,
}

impl Answers {
    fn new(unproved: usize) -> Self {
        let begun = Instant::now();
        let limits = AnswerLimits {
            unproved,
            ..AnswerLimits::default()
        };
        Answers {
            answering: PairAnswering::new(limits, [3; 32], begun),
            begun,
        }
    }

    fn handle(&mut self, at: u32, request: &PairRequest, cookie: Option<PairCookie>) -> AnswerStep {
        let from = DatagramSource {
            number: request.number,
            lid: 0,
            gid: Some([0xfd; 16]),
        };
        let now = self.begun + MS * at;
        self.answering.handle(now, &from, request, cookie.as_ref())
    }

    /// Asks without a cookie.
    fn cookie(&mut self, at: u32, request: &PairRequest) -> PairCookie {
        match self.handle(at, request, None) {
            AnswerStep::Send(to, AgreementMessage::Cookie(attempt, cookie)) => {
                assert_eq!((to, attempt), (request.locator(), request.attempt));
                cookie
            }
            step => panic!("{step:?}"),
        }
    }

    /// Asks twice, and gets this queue pair.
    fn make(&mut self, at: u32, request: &PairRequest, own: u32) -> (AttemptKey, PairCookie) {
        let cookie = self.cookie(at, request);
        let AnswerStep::Make(key, peer) = self.handle(at, request, Some(cookie)) else {
            panic!("nothing is made");
        };
        assert_eq!(peer, request.pair);
        assert_eq!(key.attempt, request.attempt);
        let now = self.begun + MS * at;
        let answer = self.answering.made(now, key, Ok(pair(own)));
        assert_eq!(answer, AgreementMessage::Answer(key.attempt, pair(own)));
        (key, cookie)
    }
}

#[test]
fn a_request_without_a_good_cookie_leaves_nothing() {
    let mut answers = Answers::new(8);
    let cookie = answers.cookie(10, &request(1));
    let others = [
        request(2),
        PairRequest {
            queue_key: 78,
            ..request(1)
        },
        PairRequest {
            number: QpNumber(1001),
            ..request(1)
        },
        PairRequest {
            pair: pair(21),
            ..request(1)
        },
    ];
    for other in others {
        let step = answers.handle(11, &other, Some(cookie));
        assert!(matches!(
            step,
            AnswerStep::Send(_, AgreementMessage::Cookie(..))
        ));
    }
    // Too old.
    let step = answers.handle(5011, &request(1), Some(cookie));
    assert!(matches!(
        step,
        AnswerStep::Send(_, AgreementMessage::Cookie(..))
    ));
    // From elsewhere.
    let from = DatagramSource {
        number: QpNumber(1000),
        lid: 0,
        gid: Some([0xfe; 16]),
    };
    let now = answers.begun + MS * 11;
    let step = answers
        .answering
        .handle(now, &from, &request(1), Some(&cookie));
    assert_eq!(step, AnswerStep::Nothing);
    assert_eq!(answers.answering.unproved(), 0);
    assert_eq!(answers.answering.timeout(), None);
}

#[test]
fn a_repetition_gets_the_same_answer_and_after_the_end_none() {
    let mut answers = Answers::new(8);
    let (key, cookie) = answers.make(0, &request(1), 30);
    let again = AnswerStep::Send(key.peer, AgreementMessage::Answer(PairAttempt(1), pair(30)));
    for cookie in [None, Some(cookie), Some(PairCookie([0; 16]))] {
        assert_eq!(answers.handle(100, &request(1), cookie), again);
    }
    // Not the same request.
    let other = PairRequest {
        pair: pair(21),
        ..request(1)
    };
    assert_eq!(answers.handle(100, &other, None), AnswerStep::Nothing);
    answers.answering.end(answers.begun + MS * 200, key);
    for at in [200, 1000, 5201] {
        assert_eq!(answers.answering.expire(answers.begun + MS * at), []);
        let step = answers.handle(at, &request(1), Some(cookie));
        assert_eq!(step, AnswerStep::Nothing, "after {at} ms");
    }
    // Forgotten, when no cookie counts any more.
    assert_eq!(answers.answering.expire(answers.begun + MS * 5202), []);
    assert_ne!(answers.cookie(5202, &request(1)), cookie);
    assert_eq!(answers.answering.timeout(), None);
}

#[test]
fn unproved_queue_pairs_are_limited_and_expire() {
    let mut answers = Answers::new(2);
    let (first, _) = answers.make(0, &request(1), 30);
    let (second, cookie) = answers.make(1000, &request(2), 31);
    let third = answers.cookie(1000, &request(3));
    let step = answers.handle(1000, &request(3), Some(third));
    assert_eq!(step, AnswerStep::Nothing);
    assert_eq!(answers.answering.timeout(), Some(answers.begun + MS * 5000));
    assert_eq!(answers.answering.expire(answers.begun + MS * 4999), []);
    assert_eq!(answers.answering.expire(answers.begun + MS * 5000), [first]);
    // There is room again.
    let step = answers.handle(5000, &request(3), Some(third));
    assert!(matches!(step, AnswerStep::Make(..)), "{step:?}");
    assert_eq!(
        answers.answering.expire(answers.begun + MS * 6000),
        [second]
    );
    let step = answers.handle(6000, &request(2), Some(cookie));
    assert_eq!(step, AnswerStep::Nothing);
}

#[test]
fn a_refusal_is_repeated() {
    let mut answers = Answers::new(2);
    let cookie = answers.cookie(0, &request(1));
    let AnswerStep::Make(key, _) = answers.handle(1, &request(1), Some(cookie)) else {
        panic!("nothing is made");
    };
    // While it is being made, there is no answer.
    let step = answers.handle(1, &request(1), Some(cookie));
    assert_eq!(step, AnswerStep::Nothing);
    let now = answers.begun + MS;
    let refusal = AgreementMessage::Refusal(PairAttempt(1), PairRefusal::NoPair);
    let told = answers.answering.made(now, key, Err(PairRefusal::NoPair));
    assert_eq!(told, refusal);
    assert_eq!(answers.answering.unproved(), 0);
    let step = answers.handle(300, &request(1), Some(cookie));
    assert_eq!(step, AnswerStep::Send(key.peer, refusal));
}

#[test]
fn attempts_that_have_ended_are_limited_too() {
    let mut answers = Answers::new(2);
    answers.answering.limits.ended = 2;
    for attempt in [1, 2] {
        let (key, _) = answers.make(0, &request(attempt), 30);
        answers.answering.end(answers.begun, key);
    }
    let cookie = answers.cookie(1, &request(3));
    let step = answers.handle(1, &request(3), Some(cookie));
    assert_eq!(step, AnswerStep::Nothing);
    answers.answering.expire(answers.begun + MS * 5002);
    let cookie = answers.cookie(5002, &request(3));
    let step = answers.handle(5002, &request(3), Some(cookie));
    assert!(matches!(step, AnswerStep::Make(..)), "{step:?}");
}
