//! Three hosts that ask each other for queue pairs, and one that forges datagrams.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::super::mistakes::{Mistake, Mistakes};
use super::super::{
    ASK_LIMIT, AgreementMessage, AnswerLimits, AskFailure, AttemptKey, PairAttempt, PairCookie,
    PairExchange, PairOutcome, PairRequest,
};
use crate::in_memory::{Fabric, MemoryAdapter, MemoryDatagrams, Step};
use crate::{
    DatagramSource, Datagrams, PairAddress, PairSizes, PathMtu, QpNumber, QueuePair, RemoteKey,
    RingShape,
};

/// Hosts that keep to the rules. The next one forges.
const HOSTS: usize = 3;

/// What has happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub connected: u64,
    pub accepted: u64,
    pub timed_out: u64,
    pub refused: u64,
    pub cancelled: u64,
    /// Queue pairs of answering sides.
    pub made: u64,
    pub expired: u64,
    /// Only the asking side was connected.
    pub one_sided: u64,
    pub lost: u64,
    pub doubled: u64,
    pub forged: u64,
    /// Datagrams that came after the end of their attempt.
    pub late: u64,
    /// Moments at which an answering side had no place.
    pub full: u64,
}

impl Stats {
    fn all(&mut self) -> [&mut u64; 13] {
        [
            &mut self.connected,
            &mut self.accepted,
            &mut self.timed_out,
            &mut self.refused,
            &mut self.cancelled,
            &mut self.made,
            &mut self.expired,
            &mut self.one_sided,
            &mut self.lost,
            &mut self.doubled,
            &mut self.forged,
            &mut self.late,
            &mut self.full,
        ]
    }

    pub fn add(&mut self, mut other: Stats) {
        for (total, one) in self.all().into_iter().zip(other.all()) {
            *total += *one;
        }
    }
}

type Held = (QueuePair, MemoryAdapter);

/// An attempt of a host.
struct Attempt {
    to: usize,
    deadline: Instant,
    ended: bool,
}

pub struct World {
    random: fastrand::Rng,
    fabric: Fabric,
    now: Instant,
    begun: Instant,
    exchanges: Vec<PairExchange<MemoryAdapter, MemoryDatagrams>>,
    /// The queue of the host that forges, and the cookies that it was given.
    forger: Option<MemoryDatagrams>,
    cookies: Vec<PairCookie>,
    attempts: BTreeMap<AttemptKey, Attempt>,
    connected: BTreeMap<AttemptKey, Held>,
    accepted: BTreeMap<AttemptKey, Held>,
    made: BTreeSet<AttemptKey>,
    seen: Vec<usize>,
    limits: AnswerLimits,
    stats: Stats,
}

impl World {
    pub fn new(seed: u64, mistake: Option<Mistake>) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let fabric = Fabric::new(seed);
        let now = Instant::now();
        let sizes = PairSizes {
            shape: RingShape::new(64, 4).unwrap(),
            depth: 4,
            staging: 64,
            inline: 16,
            message: 64,
        };
        let limits = AnswerLimits {
            unproved: random.usize(1..5),
            ..AnswerLimits::default()
        };
        let exchanges = (0..HOSTS).map(|host| {
            let adapter = fabric.adapter(host);
            let mail = adapter.datagrams();
            let mut secret = [0; 32];
            random.fill(&mut secret);
            let mut exchange = PairExchange::new(adapter, mail, sizes, limits, secret, now);
            let mistakes = Mistakes { made: mistake };
            exchange.mistakes = mistakes;
            exchange.answering.mistakes = mistakes;
            exchange
        });
        let exchanges = exchanges.collect();
        World {
            forger: Some(fabric.adapter(HOSTS).datagrams()),
            random,
            fabric,
            now,
            begun: now,
            exchanges,
            cookies: Vec::new(),
            attempts: BTreeMap::new(),
            connected: BTreeMap::new(),
            accepted: BTreeMap::new(),
            made: BTreeSet::new(),
            seen: vec![0; HOSTS],
            limits,
            stats: Stats::default(),
        }
    }

    /// Carries the schedule out.
    pub fn run(mut self) -> (Result<(), String>, Stats) {
        let outcome = self.schedule().and_then(|()| self.end());
        (outcome, self.stats)
    }

    fn schedule(&mut self) -> Result<(), String> {
        // In some schedules nearly everything is lost, in some nothing.
        let losses = self.random.u32(0..12);
        // In some, the newest datagrams come first, mostly, and the others late.
        let hoards = self.random.u32(0..4) == 0;
        // Time passes at different speeds.
        let slow = [3, 20, 200][self.random.usize(0..3)];
        for _ in 0..self.random.u32(50..400) {
            match self.random.u32(0..80) {
                0..2 => self.ask(),
                2 if self.random.bool() => self.cancel(),
                3..5 => self.forge(),
                5 => {
                    let most = if self.random.bool() { 64 } else { 0 };
                    self.fabric.limit_pairs(most);
                }
                6..34 => self.datagram(losses, hoards),
                34..54 => self.poll()?,
                54..60 => self.message(),
                _ => {
                    let most = if self.random.u32(0..slow) == 0 {
                        2000
                    } else {
                        5
                    };
                    self.now += Duration::from_millis(self.random.u64(0..most));
                }
            }
        }
        self.fabric.limit_pairs(64);
        Ok(())
    }

    fn ask(&mut self) {
        let from = self.random.usize(0..HOSTS);
        let to = (from + self.random.usize(1..HOSTS)) % HOSTS;
        let attempt = PairAttempt(self.random.u64(..));
        let limit = Duration::from_millis(self.random.u64(1..4000));
        let to_locator = self.exchanges[to].locator();
        let peer = self.exchanges[from].locator();
        // The network may have no more queue pairs.
        if self.exchanges[from]
            .ask(attempt, to_locator, self.now, limit)
            .is_ok()
        {
            let ends = Attempt {
                to,
                deadline: self.now + limit.min(ASK_LIMIT),
                ended: false,
            };
            self.attempts.insert(AttemptKey { peer, attempt }, ends);
        }
    }

    fn cancel(&mut self) {
        let running = self.attempts.iter_mut().filter(|(_, a)| !a.ended);
        let running: Vec<_> = running.collect();
        if let Some((key, attempt)) = self.random.choice(running) {
            attempt.ended = true;
            let host = self.exchanges.iter_mut().find(|e| e.locator() == key.peer);
            host.unwrap().cancel(key.attempt);
            self.stats.cancelled += 1;
        }
    }

    /// Something happens to a datagram.
    fn datagram(&mut self, losses: u32, hoards: bool) {
        let on_way = self.fabric.datagrams_on_way();
        if on_way == 0 {
            return;
        }
        // The oldest one, mostly. So others become old.
        let at = match self.random.u32(0..3) {
            _ if hoards && self.random.u32(0..10) > 0 => on_way - 1,
            0 => self.random.usize(0..on_way),
            1 => on_way - 1,
            _ => 0,
        };
        let step = match self.random.u32(0..12) {
            n if n < losses => Step::LoseDatagram(at),
            _ if self.random.u32(0..4) == 0 => Step::DeliverTwice(at),
            _ => Step::Deliver(at),
        };
        match step {
            Step::LoseDatagram(_) => self.stats.lost += 1,
            Step::DeliverTwice(_) => self.stats.doubled += 1,
            _ => {}
        }
        self.fabric.take(step);
    }

    /// Something happens between queue pairs.
    fn message(&mut self) {
        let steps = self.fabric.steps();
        let steps: Vec<_> = steps
            .into_iter()
            .filter(|step| !matches!(step, Step::Deliver(_)))
            .collect();
        if let Some(step) = self.random.choice(steps) {
            self.fabric.take(step);
        }
    }

    /// A request in another's name, with some cookie; or one in the forger's own name, for a cookie that others could be asked with.
    fn forge(&mut self) {
        let Some(forger) = &mut self.forger else {
            return;
        };
        let own = forger.locator();
        while let Some(datagram) = forger.receive() {
            if let Some(AgreementMessage::Cookie(_, cookie)) =
                AgreementMessage::decode(&datagram.bytes)
            {
                self.cookies.push(cookie);
            }
        }
        let to = self.random.usize(0..HOSTS);
        let victim = (to + self.random.usize(1..HOSTS)) % HOSTS;
        let in_own_name = self.random.bool();
        let peer = match in_own_name {
            true => own,
            false => self.exchanges[victim].locator(),
        };
        let source = DatagramSource {
            number: peer.number,
            lid: 0,
            gid: Some(peer.gid),
        };
        let request = PairRequest {
            attempt: PairAttempt(self.random.u64(..)),
            number: peer.number,
            queue_key: peer.queue_key,
            pair: PairAddress {
                gid: peer.gid,
                ..self.some_pair()
            },
        };
        let cookie = match self.random.u32(0..3) {
            0 => None,
            1 => Some(PairCookie([self.random.u8(..); 16])),
            _ => self.random.choice(&self.cookies).copied(),
        };
        // The forger does not go on in its own name: that would be nothing but an attempt.
        let cookie = cookie.filter(|_| !in_own_name);
        let bytes = AgreementMessage::Ask(request, cookie).encode();
        let to = self.exchanges[to].locator();
        self.fabric.forge(source, &to, &bytes);
        self.stats.forged += 1;
    }

    fn some_pair(&mut self) -> PairAddress {
        PairAddress {
            gid: [0; 16],
            lid: 0,
            partition: u16::MAX,
            mtu: PathMtu::Mtu1024,
            number: QpNumber(self.random.u32(2..100)),
            psn: self.random.u32(0..1 << 24),
            shape: RingShape::new(64, 4).unwrap(),
            ring: RemoteKey { addr: 0, key: 1 },
        }
    }

    fn poll(&mut self) -> Result<(), String> {
        let host = self.random.usize(0..HOSTS);
        self.poll_host(host)
    }

    fn poll_host(&mut self, host: usize) -> Result<(), String> {
        let before = self.exchanges[host].unproved();
        while let Some(agreed) = self.exchanges[host].poll(self.now) {
            self.note(host, agreed)?;
        }
        let exchange = &self.exchanges[host];
        let own = exchange.locator();
        let at = self.now - self.begun;
        for key in &exchange.made[self.seen[host]..] {
            self.stats.made += 1;
            if self.attempts.get(key).is_none_or(|a| a.to != host) {
                return Err(format!(
                    "{at:?}: host {host} made one that nobody has asked for"
                ));
            }
            if !self.made.insert(*key) {
                return Err(format!(
                    "{at:?}: host {host} made a second queue pair: {key:?}"
                ));
            }
            self.stats.late += u64::from(self.attempts[key].ended);
        }
        self.seen[host] = exchange.made.len();
        let unproved = exchange.unproved();
        if unproved > self.limits.unproved || unproved != exchange.answering.unproved() {
            return Err(format!("{at:?}: {unproved} unproved queue pairs"));
        }
        self.stats.full += u64::from(unproved == self.limits.unproved && before < unproved);
        // No attempt outlives its deadline.
        let mut own = self.attempts.iter().filter(|(key, _)| key.peer == own);
        match own.find(|(_, a)| !a.ended && a.deadline <= self.now) {
            Some((key, _)) => Err(format!("{at:?}: no end of attempt {key:?}")),
            None => Ok(()),
        }
    }

    fn note(&mut self, host: usize, agreed: PairOutcome<MemoryAdapter>) -> Result<(), String> {
        let peer = self.exchanges[host].locator();
        let (attempt, pair) = match agreed {
            PairOutcome::Connected {
                attempt,
                pair,
                verbs,
            } => (attempt, Some((pair, verbs))),
            PairOutcome::Failed { attempt, why } => {
                match why {
                    AskFailure::TimedOut => self.stats.timed_out += 1,
                    AskFailure::Refused(_) => self.stats.refused += 1,
                    AskFailure::Adapter(e) => return Err(e.to_string()),
                }
                (attempt, None)
            }
            PairOutcome::Accepted { key, pair, verbs } => {
                self.stats.accepted += 1;
                return match self.accepted.insert(key, (pair, verbs)) {
                    Some(_) => Err(format!("attempt {key:?} was accepted twice")),
                    None => Ok(()),
                };
            }
        };
        let key = AttemptKey { peer, attempt };
        let known = self.attempts.get_mut(&key);
        match known {
            Some(attempt) if !attempt.ended => attempt.ended = true,
            _ => return Err(format!("attempt {key:?} has ended before")),
        }
        if let Some(held) = pair {
            self.stats.connected += 1;
            if !self.made.contains(&key) {
                return Err(format!("no queue pair was made for attempt {key:?}"));
            }
            self.connected.insert(key, held);
        }
        Ok(())
    }

    /// Time passes until nothing is due any more, and all messages arrive. Then both ends of each queue pair must belong together.
    fn end(&mut self) -> Result<(), String> {
        let expiry = ASK_LIMIT + self.limits.life + Duration::from_secs(1);
        let until = self.now + expiry;
        let lossy = self.random.bool();
        // In some schedules the first messages of queue pairs come only when all is over.
        let silent = self.random.u32(0..8) == 0;
        while self.now < until {
            for host in 0..HOSTS {
                self.poll_host(host)?;
            }
            while lossy && self.fabric.datagrams_on_way() > 0 {
                self.fabric.take(Step::LoseDatagram(0));
            }
            match silent {
                true => (0..self.fabric.datagrams_on_way())
                    .for_each(|_| self.fabric.take(Step::Deliver(0))),
                false => self.fabric.run(),
            }
            self.now += Duration::from_millis(self.random.u64(1..500));
        }
        for host in 0..HOSTS {
            self.poll_host(host)?;
            if self.exchanges[host].unproved() > 0 {
                return Err(format!("an unproved queue pair of host {host} is left"));
            }
        }
        let accepted = std::mem::take(&mut self.accepted);
        self.stats.expired += self.made.len() as u64 - accepted.len() as u64;
        for (key, mut far) in accepted {
            let Some(mut near) = self.connected.remove(&key) else {
                return Err(format!("only one side of attempt {key:?} is connected"));
            };
            self.exchange_bytes(&mut near, &mut far)
                .map_err(|e| format!("attempt {key:?}: {e}"))?;
            for (pair, mut adapter) in [near, far] {
                pair.release(&mut adapter);
            }
        }
        // The others were too late. They notice, at the latest by a ping: perhaps the message had come, and the other side has not looked in time.
        for (key, (mut pair, mut adapter)) in std::mem::take(&mut self.connected) {
            self.fabric.run();
            pair.progress(&mut adapter);
            pair.ping(&mut adapter);
            self.fabric.run();
            pair.progress(&mut adapter);
            if pair.broken().is_none() {
                return Err(format!("attempt {key:?} is connected to nothing"));
            }
            self.stats.one_sided += 1;
            pair.release(&mut adapter);
        }
        self.exchanges.clear();
        self.fabric.run();
        self.forger = None;
        match self.fabric.is_empty() {
            true => Ok(()),
            false => Err("a queue pair or a region is left".into()),
        }
    }

    /// Bytes flow both ways.
    fn exchange_bytes(&mut self, near: &mut Held, far: &mut Held) -> Result<(), String> {
        let sent = [self.random.u64(..), self.random.u64(..)].map(u64::to_be_bytes);
        for (end, bytes) in [&mut *near, &mut *far].into_iter().zip(sent) {
            let n = end.0.send(&mut end.1, &bytes);
            if n != Ok(bytes.len()) {
                return Err(format!("sent {n:?}"));
            }
        }
        self.fabric.run();
        for (end, want) in [far, near].into_iter().zip(sent) {
            let mut got = [0; 9];
            let n = end.0.recv(&mut end.1, &mut got);
            if n != Ok(want.len()) || got[..8] != want {
                return Err(format!("received {n:?}"));
            }
        }
        Ok(())
    }
}
