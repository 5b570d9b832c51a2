//! The side that asks for a queue pair.

use std::time::{Duration, Instant};

use super::message::{AgreementMessage, PairAttempt, PairCookie, PairRefusal, PairRequest};
use super::mistakes::{Mistake, Mistakes};
use crate::address::PairAddress;
use crate::datagrams::DatagramSource;
use crate::locator::PortLocator;
use crate::verbs::VerbsError;

/// Longest time of an attempt. An unproved queue pair of the answering side lives longer, so one of which the asking side hears in time is
/// still there when its first message comes.
pub const ASK_LIMIT: Duration = Duration::from_secs(3);

/// Pause before the first repetition, and the longest one.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(160)];

/// Why an attempt has come to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskFailure {
    /// No answer in time.
    TimedOut,
    /// The other side has said so.
    Refused(PairRefusal),
    /// The own adapter does not do it, or cannot connect to the other side's queue pair.
    Adapter(VerbsError),
}

/// One attempt to get a queue pair connected to one of another process.
///
/// Its driver calls [`poll_send`](Self::poll_send) at the time of [`timeout`](Self::timeout), or after [`handle`](Self::handle), and looks at the
/// [outcome](Self::outcome) afterwards. Dropping it cancels the attempt: what the other side has made by then ends by itself.
#[derive(Debug)]
pub struct PairAsking {
    request: PairRequest,
    to: PortLocator,
    cookie: Option<PairCookie>,
    /// When to ask again, and the pause after that.
    next: Instant,
    pause: Duration,
    deadline: Instant,
    outcome: Option<Result<PairAddress, AskFailure>>,
    pub(super) mistakes: Mistakes,
}

impl PairAsking {
    /// Asks the process at `to` for a queue pair to be connected to `own`. Its answers go to `from`, which must be at the port of `own`. `attempt` is random.
    /// `limit` is at most [`ASK_LIMIT`].
    pub fn new(
        attempt: PairAttempt,
        own: PairAddress,
        from: PortLocator,
        to: PortLocator,
        now: Instant,
        limit: Duration,
    ) -> Self {
        PairAsking {
            request: PairRequest {
                attempt,
                number: from.number,
                queue_key: from.queue_key,
                pair: own,
            },
            to,
            cookie: None,
            next: now,
            pause: PAUSES[0],
            deadline: now + limit.min(ASK_LIMIT),
            outcome: None,
            mistakes: Mistakes::default(),
        }
    }

    /// The attempt.
    pub fn attempt(&self) -> PairAttempt {
        self.request.attempt
    }

    /// Whom it asks.
    pub fn to(&self) -> PortLocator {
        self.to
    }

    /// How it has ended: the address of the queue pair that waits for a message of the own one.
    pub fn outcome(&self) -> Option<Result<PairAddress, AskFailure>> {
        self.outcome
    }

    /// When something is due. `None`: never, it has ended.
    pub fn timeout(&self) -> Option<Instant> {
        match self.outcome {
            None => Some(self.next.min(self.deadline)),
            Some(_) => None,
        }
    }

    /// What is to be sent now, if anything.
    pub fn poll_send(&mut self, now: Instant) -> Option<AgreementMessage> {
        if self.outcome.is_some() {
            return None;
        }
        if now >= self.deadline {
            self.outcome = Some(Err(AskFailure::TimedOut));
            return None;
        }
        if now < self.next {
            return None;
        }
        self.next = now + self.pause;
        self.pause = (self.pause * 2).min(PAUSES[1]);
        Some(AgreementMessage::Ask(self.request, self.cookie))
    }

    /// A datagram has come. Anything that does not belong to this attempt, or comes after its end, does nothing.
    pub fn handle(&mut self, now: Instant, from: &DatagramSource, message: &AgreementMessage) {
        if self.outcome.is_some() || now >= self.deadline || !from.may_be(&self.to) {
            return;
        }
        let any = self.mistakes.has(Mistake::AnyAttempt);
        let is_own = |of| any || of == self.request.attempt;
        match *message {
            AgreementMessage::Cookie(of, cookie) if is_own(of) => {
                let first = self.cookie.replace(cookie).is_none();
                // A repeated one goes with the next repetition: perhaps the first has become too old.
                if first {
                    self.next = now;
                    self.pause = PAUSES[0];
                }
            }
            AgreementMessage::Answer(of, pair) if is_own(of) && self.to.is_port_of(&pair) => {
                self.outcome = Some(Ok(pair));
            }
            AgreementMessage::Refusal(of, why) if is_own(of) => {
                self.outcome = Some(Err(AskFailure::Refused(why)));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
#[path = "asking_tests.rs"]
mod tests;
