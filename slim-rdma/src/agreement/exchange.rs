//! Both roles of the agreement at one port, with its queue for datagrams.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::answering::{AnswerLimits, AnswerStep, AttemptKey, PairAnswering};
use super::asking::{AskFailure, PairAsking};
use super::message::{AgreementMessage, PairAttempt, PairRefusal};
use super::mistakes::{Mistake, Mistakes};
use crate::address::PairAddress;
use crate::datagrams::{Datagrams, ReceivedDatagram};
use crate::half_pair::HalfPair;
use crate::locator::PortLocator;
use crate::queue_pair::QueuePair;
use crate::sizes::PairSizes;
use crate::verbs::{Verbs, VerbsError};

/// Most datagrams that one call of [`PairExchange::poll`] takes, so that a flood does not keep its caller.
const BATCH: usize = 256;

/// ENOBUFS: there is no place for a datagram now.
const QUEUE_FULL: i32 = 105;

/// What has become of an attempt.
#[derive(Debug)]
pub enum PairOutcome<V> {
    /// An attempt of this side has its queue pair, which has sent its first message. `verbs` is the handle that has made it.
    Connected {
        /// The attempt.
        attempt: PairAttempt,
        /// The queue pair.
        pair: QueuePair,
        /// Its handle.
        verbs: V,
    },
    /// An attempt of this side has come to nothing.
    Failed {
        /// The attempt.
        attempt: PairAttempt,
        /// Why.
        why: AskFailure,
    },
    /// Another process has connected a queue pair to this one, and its first message has come.
    Accepted {
        /// Its attempt.
        key: AttemptKey,
        /// The queue pair.
        pair: QueuePair,
        /// Its handle.
        verbs: V,
    },
}

/// An attempt of this side, with its queue pair and the handle that has made it.
#[derive(Debug)]
struct OwnAttempt<V> {
    asking: PairAsking,
    half: HalfPair,
    verbs: V,
}

/// Makes queue pairs with other processes over one port, and answers others that ask for some.
///
/// Nothing happens between two calls. [`poll`](Self::poll) is to be called when the port [has reported](Verbs::reported) a completion, of whatever queue
/// pair, at the time of [`timeout`](Self::timeout), and after [`ask`](Self::ask). It waits for nothing but calls of the adapter. Each queue pair gets a handle of its own, a
/// clone of `verbs`, which is given out with it. Dropping the exchange gives everything back that was not given out.
#[derive(Debug)]
pub struct PairExchange<V: Verbs + Clone, D: Datagrams> {
    verbs: V,
    mail: D,
    sizes: PairSizes,
    asks: BTreeMap<PairAttempt, OwnAttempt<V>>,
    pub(super) answering: PairAnswering,
    unproved: BTreeMap<AttemptKey, (QueuePair, V)>,
    agreed: VecDeque<PairOutcome<V>>,
    /// Datagrams may be waiting that the call of this time has not taken.
    more: Option<Instant>,
    pub(super) mistakes: Mistakes,
    /// The attempts for which a queue pair was made, for the simulation.
    #[cfg(test)]
    pub(super) made: Vec<AttemptKey>,
}

impl<V: Verbs + Clone, D: Datagrams> PairExchange<V, D> {
    /// Answers and asks by `mail`, which is at the port of `verbs`. All queue pairs get these sizes. `secret` is random.
    pub fn new(
        verbs: V,
        mail: D,
        sizes: PairSizes,
        limits: AnswerLimits,
        secret: [u8; 32],
        now: Instant,
    ) -> Self {
        PairExchange {
            verbs,
            mail,
            sizes,
            asks: BTreeMap::new(),
            answering: PairAnswering::new(limits, secret, now),
            unproved: BTreeMap::new(),
            agreed: VecDeque::new(),
            more: Some(now),
            mistakes: Mistakes::default(),
            #[cfg(test)]
            made: Vec::new(),
        }
    }

    /// Where others ask.
    pub fn locator(&self) -> PortLocator {
        self.mail.locator()
    }

    /// Whether the queue for datagrams has failed: this exchange makes no more queue pairs.
    pub fn is_broken(&self) -> bool {
        self.mail.is_broken()
    }

    /// Asks the process at `to` for a queue pair. `attempt` is random. At most after `limit`, or [`ASK_LIMIT`](super::ASK_LIMIT), [`poll`](Self::poll) says
    /// what has become of it.
    ///
    /// # Errors
    /// The adapter makes no queue pair, the exchange [is broken](Self::is_broken), or this side has such an attempt already.
    pub fn ask(
        &mut self,
        attempt: PairAttempt,
        to: PortLocator,
        now: Instant,
        limit: Duration,
    ) -> Result<(), VerbsError> {
        if self.asks.contains_key(&attempt) {
            // EEXIST
            return Err(VerbsError::new("attempt for a queue pair", 17));
        }
        if self.is_broken() {
            // EPIPE
            return Err(VerbsError::new("queue for datagrams", 32));
        }
        let mut verbs = self.verbs.clone();
        let half = HalfPair::open(&mut verbs, self.sizes)?;
        let from = self.mail.locator();
        let mut asking = PairAsking::new(attempt, half.address(), from, to, now, limit);
        asking.mistakes = self.mistakes;
        let own = OwnAttempt {
            asking,
            half,
            verbs,
        };
        self.asks.insert(attempt, own);
        Ok(())
    }

    /// Ends an attempt of this side. Nothing is said about it any more; a queue pair that [`poll`](Self::poll) has not given out yet is given back.
    pub fn cancel(&mut self, attempt: PairAttempt) {
        if let Some(mut own) = self.asks.remove(&attempt) {
            own.half.abandon(&mut own.verbs);
        }
        let is_of = |outcome: &PairOutcome<V>| match outcome {
            PairOutcome::Connected { attempt: of, .. }
            | PairOutcome::Failed { attempt: of, .. } => *of == attempt,
            PairOutcome::Accepted { .. } => false,
        };
        if let Some(at) = self.agreed.iter().position(is_of) {
            self.agreed.remove(at).into_iter().for_each(release);
        }
    }

    /// When [`poll`](Self::poll) is to be called at the latest. A time that is over: at once, it has left datagrams.
    pub fn timeout(&self) -> Option<Instant> {
        let asks = self.asks.values().filter_map(|own| own.asking.timeout());
        asks.chain(self.answering.timeout()).chain(self.more).min()
    }

    /// Queue pairs that the other side has not proved to be connected to.
    pub fn unproved(&self) -> usize {
        self.unproved.len()
    }

    /// So many queue pairs that were [accepted](PairOutcome::Accepted) are of no use yet, since nobody knows who is at their other ends. Until the
    /// next call they count as unproved ones, of which there are [only so many](AnswerLimits::unproved).
    pub fn hold(&mut self, held: usize) {
        self.answering.hold(held);
    }

    /// Takes what has come, sends what is due, and returns what has become of an attempt. To be called again until it returns nothing; then it has asked the
    /// port for reports.
    pub fn poll(&mut self, now: Instant) -> Option<PairOutcome<V>> {
        if self.agreed.is_empty() {
            self.expire(now);
            self.take_datagrams(now);
            self.look_for_messages(now);
            self.drive_asks(now);
        }
        self.agreed.pop_front()
    }

    fn expire(&mut self, now: Instant) {
        for key in self.answering.expire(now) {
            if let Some((pair, mut verbs)) = self.unproved.remove(&key) {
                pair.release(&mut verbs);
            }
        }
    }

    fn take_datagrams(&mut self, now: Instant) {
        self.more = None;
        let mut armed = false;
        for _ in 0..BATCH {
            match self.mail.receive() {
                Some(datagram) => self.handle(now, &datagram),
                None if armed => return,
                // What has come before causes no report, so one more look is needed. An adapter that does not report is broken.
                None => {
                    armed = true;
                    let _ = self.mail.arm();
                }
            }
        }
        self.more = Some(now);
    }

    fn handle(&mut self, now: Instant, datagram: &ReceivedDatagram) {
        let Some(message) = AgreementMessage::decode(&datagram.bytes) else {
            return;
        };
        let from = &datagram.from;
        let attempt = match &message {
            AgreementMessage::Ask(request, cookie) => {
                let step = self.answering.handle(now, from, request, cookie.as_ref());
                return self.answer(now, step);
            }
            AgreementMessage::Cookie(attempt, _)
            | AgreementMessage::Answer(attempt, _)
            | AgreementMessage::Refusal(attempt, _) => *attempt,
        };
        if self.mistakes.has(Mistake::AnyAttempt) {
            for own in self.asks.values_mut() {
                own.asking.handle(now, from, &message);
            }
        } else if let Some(own) = self.asks.get_mut(&attempt) {
            own.asking.handle(now, from, &message);
        }
    }

    fn answer(&mut self, now: Instant, step: AnswerStep) {
        let (to, message) = match step {
            AnswerStep::Nothing => return,
            AnswerStep::Send(to, message) => (to, message),
            AnswerStep::Make(key, peer) => {
                let made = self.make(key, &peer);
                (key.peer, self.answering.made(now, key, made))
            }
        };
        self.send(&to, &message);
    }

    fn make(&mut self, key: AttemptKey, peer: &PairAddress) -> Result<PairAddress, PairRefusal> {
        let mut verbs = self.verbs.clone();
        let half = HalfPair::open(&mut verbs, self.sizes).map_err(|_| PairRefusal::NoPair)?;
        let own = half.address();
        let pair = half.connect(&mut verbs, peer);
        let pair = pair.map_err(|_| PairRefusal::NoUse)?;
        #[cfg(test)]
        self.made.push(key);
        self.unproved.insert(key, (pair, verbs));
        Ok(own)
    }

    /// A datagram that is not sent is as good as lost: it is sent again, or its attempt ends.
    fn send(&mut self, to: &PortLocator, message: &AgreementMessage) {
        let _ = self.mail.send(to, &message.encode());
    }

    /// Looks which unproved queue pairs have got their first message. The others will report it. One that cannot is broken.
    fn look_for_messages(&mut self, now: Instant) {
        let ready = self.unproved.iter_mut().filter_map(|(key, (pair, verbs))| {
            while !pair.arm(verbs) {
                if pair.heard() > 0 || pair.broken().is_some() {
                    return Some(*key);
                }
            }
            None
        });
        for key in ready.collect::<Vec<_>>() {
            self.answering.end(now, key);
            let Some((pair, mut verbs)) = self.unproved.remove(&key) else {
                continue;
            };
            match pair.heard() > 0 {
                true => self
                    .agreed
                    .push_back(PairOutcome::Accepted { key, pair, verbs }),
                false => pair.release(&mut verbs),
            }
        }
    }

    fn drive_asks(&mut self, now: Instant) {
        let mut ended = Vec::new();
        for (attempt, own) in &mut self.asks {
            let message = own.asking.poll_send(now);
            let sent = message.map_or(Ok(()), |m| self.mail.send(&own.asking.to(), &m.encode()));
            match (own.asking.outcome(), sent) {
                (Some(outcome), _) => ended.push((*attempt, outcome)),
                // There is no way to that port: asking again would fail, too, and on RoCE may wait for a neighbour each time.
                (None, Err(e)) if e.errno != QUEUE_FULL => {
                    ended.push((*attempt, Err(AskFailure::Adapter(e))));
                }
                _ => {}
            }
        }
        for (attempt, outcome) in ended {
            let Some(own) = self.asks.remove(&attempt) else {
                continue;
            };
            let agreed = match outcome {
                Ok(peer) => Self::connect(attempt, own, &peer),
                Err(why) => {
                    self.give_up(own);
                    PairOutcome::Failed { attempt, why }
                }
            };
            self.agreed.push_back(agreed);
        }
    }

    fn give_up(&self, mut own: OwnAttempt<V>) {
        if !self.mistakes.has(Mistake::KeepHalf) {
            own.half.abandon(&mut own.verbs);
        }
    }

    fn connect(attempt: PairAttempt, mut own: OwnAttempt<V>, peer: &PairAddress) -> PairOutcome<V> {
        match own.half.connect(&mut own.verbs, peer) {
            Ok(mut pair) => {
                pair.greet(&mut own.verbs);
                PairOutcome::Connected {
                    attempt,
                    pair,
                    verbs: own.verbs,
                }
            }
            Err(e) => PairOutcome::Failed {
                attempt,
                why: AskFailure::Adapter(e),
            },
        }
    }
}

impl<V: Verbs + Clone, D: Datagrams> Drop for PairExchange<V, D> {
    fn drop(&mut self) {
        for (_, mut own) in std::mem::take(&mut self.asks) {
            own.half.abandon(&mut own.verbs);
        }
        for (_, (pair, mut verbs)) in std::mem::take(&mut self.unproved) {
            pair.release(&mut verbs);
        }
        std::mem::take(&mut self.agreed)
            .into_iter()
            .for_each(release);
    }
}

/// Gives a queue pair back that nobody has got.
fn release<V: Verbs>(outcome: PairOutcome<V>) {
    match outcome {
        PairOutcome::Connected {
            pair, mut verbs, ..
        }
        | PairOutcome::Accepted {
            pair, mut verbs, ..
        } => pair.release(&mut verbs),
        PairOutcome::Failed { .. } => {}
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
