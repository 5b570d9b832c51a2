//! The side that is asked for queue pairs.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::cookie::{COOKIE_LIFE, CookieJar};
use super::message::{
    AgreementMessage, PairAttempt, PairCookie, PairRefusal, PairRequest, REQUEST_LEN,
};
use super::mistakes::{Mistake, Mistakes};
use crate::address::PairAddress;
use crate::datagrams::DatagramSource;
use crate::locator::PortLocator;

/// How much an answering side keeps for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerLimits {
    /// Most queue pairs of which the other side has not proved that it is connected. Each has a ring.
    pub unproved: usize,
    /// How long one of them lives. More than [`ASK_LIMIT`](super::ASK_LIMIT).
    pub life: Duration,
    /// Most attempts that are remembered after their end, until no cookie of theirs counts any more.
    pub ended: usize,
}

impl Default for AnswerLimits {
    fn default() -> Self {
        AnswerLimits {
            unproved: 64,
            life: Duration::from_secs(5),
            ended: 4096,
        }
    }
}

/// An attempt, and who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptKey {
    /// Where the asking side receives datagrams.
    pub peer: PortLocator,
    /// Its number.
    pub attempt: PairAttempt,
}

/// What is to be done about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerStep {
    /// Nothing.
    Nothing,
    /// This is to be sent to `peer`.
    Send(PortLocator, AgreementMessage),
    /// A queue pair is to be made and connected to this one; then [`PairAnswering::made`] has the answer.
    Make(AttemptKey, PairAddress),
}

/// An attempt for which there is a queue pair that the asking side has not proved to be connected to.
#[derive(Debug)]
struct UnprovedAttempt {
    /// The asking side's queue pair.
    peer: PairAddress,
    /// The own one. `None`: it is being made.
    own: Option<PairAddress>,
    until: Instant,
}

/// Answers requests.
///
/// Each attempt gets one queue pair at most, however often its request comes. While the queue pair is unproved, each repetition gets the same
/// answer; after that, none, or the same refusal. A request without a valid cookie leaves nothing behind.
#[derive(Debug)]
pub struct PairAnswering {
    limits: AnswerLimits,
    jar: CookieJar,
    unproved: BTreeMap<AttemptKey, UnprovedAttempt>,
    /// Attempts that have ended, and what their repetitions are told.
    ended: BTreeMap<AttemptKey, Option<PairRefusal>>,
    /// When each of them is forgotten, in order.
    forget: VecDeque<(Instant, AttemptKey)>,
    /// Queue pairs that are proved, and still count as if they were not.
    held: usize,
    pub(super) mistakes: Mistakes,
}

impl PairAnswering {
    /// Answers from now on. `secret` is random; cookies of another secret are worth nothing.
    pub fn new(limits: AnswerLimits, secret: [u8; 32], now: Instant) -> Self {
        PairAnswering {
            limits,
            jar: CookieJar::new(secret, now),
            unproved: BTreeMap::new(),
            ended: BTreeMap::new(),
            forget: VecDeque::new(),
            held: 0,
            mistakes: Mistakes::default(),
        }
    }

    /// A request has come. [`expire`](Self::expire) comes first, if something was due by now.
    pub fn handle(
        &mut self,
        now: Instant,
        from: &DatagramSource,
        request: &PairRequest,
        cookie: Option<&PairCookie>,
    ) -> AnswerStep {
        let peer = request.locator();
        let attempt = request.attempt;
        let key = AttemptKey { peer, attempt };
        if !from.may_be(&peer) {
            return AnswerStep::Nothing;
        }
        if let Some(live) = self.unproved.get(&key)
            && !self.mistakes.has(Mistake::ForgetLive)
        {
            let answer = live.own.filter(|_| live.peer == request.pair);
            return match answer {
                Some(own) => AnswerStep::Send(peer, AgreementMessage::Answer(attempt, own)),
                None => AnswerStep::Nothing,
            };
        }
        if let Some(told) = self.ended.get(&key)
            && !self.mistakes.has(Mistake::ForgetEnded)
        {
            return match told {
                Some(why) => AnswerStep::Send(peer, AgreementMessage::Refusal(attempt, *why)),
                None => AnswerStep::Nothing,
            };
        }
        if !self.is_proof(now, request, cookie) {
            let cookie = self.jar.issue(now, &self.covered(request));
            return AnswerStep::Send(peer, AgreementMessage::Cookie(attempt, cookie));
        }
        // The asking side asks again: perhaps there is room by then.
        if self.unproved.len() + self.held >= self.limits.unproved
            || self.ended.len() >= self.limits.ended
        {
            return AnswerStep::Nothing;
        }
        let live = UnprovedAttempt {
            peer: request.pair,
            own: None,
            until: now + self.limits.life,
        };
        self.unproved.insert(key, live);
        AnswerStep::Make(key, request.pair)
    }

    /// So many queue pairs that were proved are still of no use to anybody. They count as unproved ones.
    pub fn hold(&mut self, held: usize) {
        self.held = held;
    }

    fn is_proof(&self, now: Instant, request: &PairRequest, cookie: Option<&PairCookie>) -> bool {
        let oldest = match self.mistakes.has(Mistake::OldCookies) {
            true => Duration::MAX,
            false => COOKIE_LIFE,
        };
        let covered = self.covered(request);
        let is_valid = |cookie| self.jar.is_valid(now, &covered, cookie, oldest);
        self.mistakes.has(Mistake::NoCookies) || cookie.is_some_and(is_valid)
    }

    /// What a cookie covers: all that the request says.
    fn covered(&self, request: &PairRequest) -> [u8; REQUEST_LEN] {
        match self.mistakes.has(Mistake::AnybodysCookies) {
            true => [0; REQUEST_LEN],
            false => request.bytes(),
        }
    }

    /// What has become of a queue pair that was [to be made](AnswerStep::Make). Returns what is to be sent.
    pub fn made(
        &mut self,
        now: Instant,
        key: AttemptKey,
        made: Result<PairAddress, PairRefusal>,
    ) -> AgreementMessage {
        match made {
            Ok(own) => {
                if let Some(live) = self.unproved.get_mut(&key) {
                    live.own = Some(own);
                }
                AgreementMessage::Answer(key.attempt, own)
            }
            Err(why) => {
                self.finish(now, key, Some(why));
                AgreementMessage::Refusal(key.attempt, why)
            }
        }
    }

    /// An unproved queue pair has got its first message, or has failed. It is its driver's now.
    pub fn end(&mut self, now: Instant, key: AttemptKey) {
        self.finish(now, key, None);
    }

    /// The attempts whose queue pairs are to be given up.
    pub fn expire(&mut self, now: Instant) -> Vec<AttemptKey> {
        while let Some((_, key)) = self.forget.front().filter(|(at, _)| *at <= now) {
            self.ended.remove(key);
            self.forget.pop_front();
        }
        if self.mistakes.has(Mistake::NoExpiry) {
            return Vec::new();
        }
        let late = self.unproved.iter().filter(|(_, live)| live.until <= now);
        let late: Vec<_> = late.map(|(key, _)| *key).collect();
        for key in &late {
            self.finish(now, *key, None);
        }
        late
    }

    /// When [`expire`](Self::expire) has something to do.
    pub fn timeout(&self) -> Option<Instant> {
        let live = self.unproved.values().map(|live| live.until);
        let forget = self.forget.front().map(|(at, _)| *at);
        live.chain(forget).min()
    }

    /// Attempts whose queue pairs are unproved.
    pub fn unproved(&self) -> usize {
        self.unproved.len()
    }

    fn finish(&mut self, now: Instant, key: AttemptKey, told: Option<PairRefusal>) {
        if self.unproved.remove(&key).is_some() {
            self.ended.insert(key, told);
            // All cookies of the attempt are older than this. They are told in whole milliseconds.
            let forget = now + COOKIE_LIFE + Duration::from_millis(2);
            self.forget.push_back((forget, key));
        }
    }
}

#[cfg(test)]
#[path = "answering_tests.rs"]
mod tests;
