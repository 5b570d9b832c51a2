//! The witness of a job: `docs/PROTOCOL.md`, section "The witness".
//!
//! Two processes that cannot reach each other any more both want to go on without the other. Only one of them may. Each accuses the other
//! at the witness. The witness waits a moment for the accusations of others, and then decides: the one that more processes cannot reach is
//! *lost*, for good, so that one bad host does not cost all others. The witness tells it, and a lost process fences itself: it does no more for
//! the job. The other one learns of that, and goes on once it is *settled*.
//!
//! [`Witness`] has no sockets and no clock. Its owner hands in datagrams and the time, and sends what [`poll_datagram`] returns.
//!
//! [`poll_datagram`]: Witness::poll_datagram

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::auth::{JobKey, code_with_job, seal_with_job, verify_with_job};
use crate::ids::{EndpointId, Time};
use crate::meeting::Meeting;
use crate::wire::{self, Accuse, Lost, Message, Ruling};

/// Begins what a cookie is derived from.
const LABEL: &[u8] = b"slim witness cookie";
/// How long a cookie counts at least, in microseconds, and half of how long it counts at most: a recorded accusation is worth nothing later.
const COOKIE_AGE: u64 = 10_000_000;
/// A lost process that does not answer is taken for fenced this long after the accusation. Until then it has found out by itself:
/// it cannot reach its peer, and hears nothing from the witness.
pub const SETTLED: Duration = Duration::from_secs(20);
/// How long the witness waits for other accusations: the processes that have lost each other use up their attempts at about the same time.
pub const COLLECTED: Duration = Duration::from_millis(500);
/// An accusation counts only as long as it is repeated. It is repeated every 0.2 s, and one may get lost.
const FRESH: Duration = Duration::from_millis(450);
/// The first wait before LOST is repeated to a process that has not confirmed it; doubles each time.
const AGAIN: Duration = Duration::from_millis(200);
const AGAIN_MAX: Duration = Duration::from_secs(10);
/// How many accusers of one process are told at once when it is fenced. Others hear it when they repeat the accusation.
const ACCUSERS: usize = 64;

/// Makes sure that an accuser hears the answers to its accusations, and that a recorded accusation is worth nothing later.
pub(crate) struct Cookies {
    /// Cookies are derived from it.
    secret: [u8; 32],
}

impl Cookies {
    pub(crate) fn new(secret: [u8; 32]) -> Self {
        Cookies { secret }
    }

    /// The answer to an accusation that does not bring back what it has to.
    pub(crate) fn ask_back(&self, now: Time, accuse: &Accuse) -> Option<Lost> {
        let age = now.0 / COOKIE_AGE;
        let cookie = |age| self.cookie(&accuse.accuser, &accuse.accused, age);
        let fresh = [cookie(age), cookie(age.saturating_sub(1))].contains(&accuse.cookie);
        (!fresh).then(|| Lost {
            to: accuse.accuser,
            lost: accuse.accused,
            ruling: Ruling::Heard,
            cookie: cookie(age),
        })
    }

    /// What an accusation has to bring back in this age and the next. Never 0, which stands for none.
    fn cookie(&self, accuser: &EndpointId, accused: &EndpointId, age: u64) -> u64 {
        let secret = JobKey::new(&self.secret);
        let names = [accuser, accused].map(|id| {
            let (pid, incarnation) = (id.pid.to_be_bytes(), id.incarnation.to_be_bytes());
            [&id.host[..], &pid, &incarnation].concat()
        });
        let code = code_with_job(
            secret.as_ref(),
            LABEL,
            &[&names[0], &names[1], &age.to_be_bytes()],
        );
        u64::from_be_bytes(*code.first_chunk().expect("32 bytes")).max(1)
    }
}

/// Decides which of two processes is lost. A verdict never changes.
pub struct Witness {
    key: JobKey,
    cookies: Cookies,
    /// Accusations that are not decided, by accuser and accused.
    open: BTreeMap<(EndpointId, EndpointId), Accusation>,
    lost: BTreeMap<EndpointId, Convict>,
    out: VecDeque<(SocketAddr, Vec<u8>)>,
    meeting: Meeting,
}

/// An accusation that waits for others.
struct Accusation {
    since: Time,
    /// When it was repeated last.
    last: Time,
    /// Where the accuser is.
    from: SocketAddr,
    /// Where the accused is told.
    at: Vec<SocketAddr>,
}

/// A lost process.
struct Convict {
    /// Where it is told.
    at: Vec<SocketAddr>,
    /// Who waits for its end, and where.
    accusers: BTreeMap<EndpointId, SocketAddr>,
    since: Time,
    fenced: bool,
    /// When it is told again, and the wait after that.
    next: Time,
    pause: Duration,
}

impl Witness {
    /// The witness of the job that has this key. `secret` must be unpredictable.
    pub fn new(key: JobKey, secret: [u8; 32]) -> Self {
        Witness {
            key,
            cookies: Cookies::new(secret),
            open: BTreeMap::new(),
            lost: BTreeMap::new(),
            out: VecDeque::new(),
            meeting: Meeting::default(),
        }
    }

    /// A datagram has come. One that has not the job's key is dropped.
    pub fn handle_datagram(&mut self, now: Time, from: SocketAddr, data: &[u8]) {
        let Ok(parsed) = wire::parse(data) else {
            return;
        };
        if !verify_with_job(Some(&self.key), &parsed) {
            return;
        }
        match parsed.message {
            Message::Accuse(accuse) => self.on_accuse(now, from, &accuse),
            Message::Fenced(fenced) => {
                if let Some(convict) = self.lost.get_mut(&fenced.endpoint) {
                    convict.fenced = true;
                    // At once: the runtime reports the lost process as soon as it has ended, and its connections are to end before that.
                    for (accuser, at) in std::mem::take(&mut convict.accusers) {
                        self.tell(at, accuser, fenced.endpoint, Ruling::Settled);
                    }
                }
            }
            Message::Where(message) => {
                let mut answers = VecDeque::new();
                self.meeting.on_where(from, &message, &mut answers);
                for (to, here) in answers {
                    let data = seal_with_job(Some(&self.key), &Message::Here(here));
                    self.out.push_back((to, data));
                }
            }
            _ => {}
        }
    }

    fn on_accuse(&mut self, now: Time, from: SocketAddr, accuse: &Accuse) {
        let (accuser, accused) = (accuse.accuser, accuse.accused);
        // A lost process accuses nobody. It may not know yet that it is lost.
        if accuser == accused || self.lost.contains_key(&accuser) {
            return self.tell(from, accuser, accuser, Ruling::Settled);
        }
        // A process that does not hear the witness accuses nobody, either: it would fence itself in vain, and the others as well.
        let known = self.lost.contains_key(&accused);
        if !known && let Some(heard) = self.cookies.ask_back(now, accuse) {
            return self.say(from, heard);
        }
        if known {
            return self.answer(now, from, accuser, accused);
        }
        let at = |ip: &IpAddr| SocketAddr::new(*ip, accuse.control_port);
        let fresh = Accusation {
            since: now,
            last: now,
            from,
            at: accuse.addrs.iter().map(at).collect(),
        };
        match self.open.entry((accuser, accused)) {
            Entry::Occupied(mut open) if now.since(open.get().last) <= FRESH => {
                open.get_mut().last = now;
            }
            Entry::Occupied(mut old) => drop(old.insert(fresh)),
            Entry::Vacant(place) => drop(place.insert(fresh)),
        }
    }

    /// Tells an accuser what has become of a lost process.
    fn answer(&mut self, now: Time, from: SocketAddr, accuser: EndpointId, accused: EndpointId) {
        let Some(convict) = self.lost.get_mut(&accused) else {
            return;
        };
        let settled = convict.fenced || now.since(convict.since) >= SETTLED;
        if !settled && convict.accusers.len() < ACCUSERS {
            convict.accusers.insert(accuser, from);
        }
        let ruling = match settled {
            true => Ruling::Settled,
            false => Ruling::Fallen,
        };
        self.tell(from, accuser, accused, ruling);
    }

    /// Decides the accusations that have waited long enough.
    fn decide(&mut self, now: Time) {
        let is_due = |open: &Accusation| now.since(open.since) >= COLLECTED;
        // In the order in which they came, and the order of names where that is the same.
        let mut due: Vec<_> = self.open.iter().filter(|(_, open)| is_due(open)).collect();
        due.sort_by_key(|(parties, open)| (open.since, **parties));
        let due: Vec<_> = due.into_iter().map(|(parties, _)| *parties).collect();
        for (accuser, accused) in due {
            let Some(open) = self.open.remove(&(accuser, accused)) else {
                continue;
            };
            if now.since(open.last) > FRESH || self.lost.contains_key(&accuser) {
                continue;
            }
            if !self.lost.contains_key(&accused) {
                let opponents =
                    [accuser, accused].map(|party| self.opponents(party, (accuser, accused)));
                let (lost, at) = match opponents[0] > opponents[1] {
                    true => (accuser, vec![open.from]),
                    false => (accused, open.at),
                };
                self.convict(now, lost, at);
            }
            if self.lost.contains_key(&accused) {
                self.answer(now, open.from, accuser, accused);
            }
        }
    }

    /// With how many processes that are not lost this one has an accusation, in either direction, besides the one that is decided now.
    fn opponents(&self, party: EndpointId, now: (EndpointId, EndpointId)) -> usize {
        let others = self
            .open
            .keys()
            .filter_map(|(accuser, accused)| match party {
                party if party == *accuser => Some(*accused),
                party if party == *accused => Some(*accuser),
                _ => None,
            });
        let counts = |other: &EndpointId| {
            let decided = *other == now.0 || *other == now.1;
            !decided && !self.lost.contains_key(other)
        };
        others.filter(counts).collect::<BTreeSet<_>>().len()
    }

    fn convict(&mut self, now: Time, lost: EndpointId, at: Vec<SocketAddr>) {
        let convict = Convict {
            at,
            accusers: BTreeMap::new(),
            since: now,
            fenced: false,
            next: now + AGAIN,
            pause: AGAIN,
        };
        self.lost.insert(lost, convict);
        self.tell_lost(lost);
    }

    /// Tells a lost process that it is lost, at all its addresses.
    fn tell_lost(&mut self, lost: EndpointId) {
        for to in self.lost[&lost].at.clone() {
            self.tell(to, lost, lost, Ruling::Settled);
        }
    }

    fn tell(&mut self, at: SocketAddr, to: EndpointId, lost: EndpointId, ruling: Ruling) {
        let cookie = 0;
        self.say(
            at,
            Lost {
                to,
                lost,
                ruling,
                cookie,
            },
        );
    }

    fn say(&mut self, at: SocketAddr, lost: Lost) {
        let message = Message::Lost(lost);
        self.out
            .push_back((at, seal_with_job(Some(&self.key), &message)));
    }

    /// The next datagram to send, and where to.
    pub fn poll_datagram(&mut self) -> Option<(SocketAddr, Vec<u8>)> {
        self.out.pop_front()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Time> {
        let untold = self.lost.values().filter(|convict| !convict.fenced);
        let untold = untold.map(|convict| convict.next);
        let open = self.open.values().map(|open| open.since + COLLECTED);
        untold.chain(open).min()
    }

    /// The time that [`poll_timeout`](Self::poll_timeout) returned has come.
    pub fn handle_timeout(&mut self, now: Time) {
        self.decide(now);
        let mut due = Vec::new();
        for (id, convict) in &mut self.lost {
            if !convict.fenced && convict.next <= now {
                convict.pause = (convict.pause * 2).min(AGAIN_MAX);
                convict.next = now + convict.pause;
                due.push(*id);
            }
        }
        for id in due {
            self.tell_lost(id);
        }
    }

    /// The lost processes, and where their control sockets are.
    pub fn lost(&self) -> impl Iterator<Item = (EndpointId, &[SocketAddr])> {
        let all = self.lost.iter();
        all.map(|(id, convict)| (*id, &convict.at[..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{AddrList, Fenced};

    const KEY: &[u8] = b"the key of the job";
    const FROM: &str = "10.0.0.1:5";

    fn id(n: u8) -> EndpointId {
        EndpointId {
            host: [n; 16],
            pid: 1,
            incarnation: 2,
        }
    }

    fn accuse_with(by: u8, whom: u8, cookie: u64) -> Message {
        Message::Accuse(Accuse {
            accuser: id(by),
            accused: id(whom),
            control_port: 9,
            addrs: AddrList::new([[10, 0, 0, whom].into()]),
            cookie,
        })
    }

    /// By a process that hears the witness.
    fn accuse(by: u8, whom: u8) -> Message {
        accuse_with(by, whom, witness().cookies.cookie(&id(by), &id(whom), 0))
    }

    fn witness() -> Witness {
        Witness::new(job(), [5; 32])
    }

    fn job() -> JobKey {
        JobKey::new(KEY).unwrap()
    }

    /// Hands the message in. The answers: where to, and what.
    fn say(witness: &mut Witness, now: Time, message: &Message) -> Vec<(SocketAddr, Lost)> {
        let data = seal_with_job(Some(&job()), message);
        witness.handle_datagram(now, FROM.parse().unwrap(), &data);
        said(witness)
    }

    fn said(witness: &mut Witness) -> Vec<(SocketAddr, Lost)> {
        let all = std::iter::from_fn(|| witness.poll_datagram());
        all.map(|(to, data)| {
            let parsed = wire::parse(&data).unwrap();
            assert!(verify_with_job(Some(&job()), &parsed));
            match parsed.message {
                Message::Lost(lost) => (to, lost),
                other => panic!("{other:?}"),
            }
        })
        .collect()
    }

    fn lost(to: u8, lost: u8, settled: bool) -> Lost {
        Lost {
            to: id(to),
            lost: id(lost),
            ruling: if settled {
                Ruling::Settled
            } else {
                Ruling::Fallen
            },
            cookie: 0,
        }
    }

    fn at(n: u8) -> SocketAddr {
        SocketAddr::new([10, 0, 0, n].into(), 9)
    }

    fn from() -> SocketAddr {
        FROM.parse().unwrap()
    }

    /// These accusations come, and are repeated until they are decided.
    fn accused(all: &[(u8, u8)]) -> (Witness, Vec<(SocketAddr, Lost)>) {
        let mut witness = witness();
        for ms in [0, 200, 400] {
            for (by, whom) in all {
                assert_eq!(say(&mut witness, Time(ms * 1000), &accuse(*by, *whom)), []);
            }
        }
        let due = Time(0) + COLLECTED;
        assert_eq!(witness.poll_timeout(), Some(due));
        witness.handle_timeout(due);
        let said = said(&mut witness);
        (witness, said)
    }

    fn convicts(witness: &Witness) -> Vec<EndpointId> {
        witness.lost().map(|(id, _)| id).collect()
    }

    #[test]
    fn the_first_of_two_accusations_counts_and_is_settled_when_the_accused_is_fenced() {
        let (mut witness, first) = accused(&[(1, 2)]);
        let due = Time(0) + COLLECTED;
        assert_eq!(
            first,
            [(at(2), lost(2, 2, true)), (from(), lost(1, 2, false))]
        );
        let other = say(&mut witness, due, &accuse(2, 1));
        assert_eq!(other, [(from(), lost(2, 2, true))]);
        let third = say(&mut witness, due, &accuse(3, 2));
        assert_eq!(third, [(from(), lost(3, 2, false))]);
        let fenced = Message::Fenced(Fenced { endpoint: id(2) });
        let at_once = say(&mut witness, due, &fenced);
        assert_eq!(
            at_once,
            [(from(), lost(1, 2, true)), (from(), lost(3, 2, true))]
        );
        assert_eq!(say(&mut witness, due, &fenced), []);
        let again = say(&mut witness, due, &accuse(1, 2));
        assert_eq!(again, [(from(), lost(1, 2, true))]);
        assert_eq!(witness.poll_timeout(), None);
    }

    #[test]
    fn of_two_that_accuse_each_other_the_second_one_is_lost() {
        let (witness, said) = accused(&[(2, 1), (1, 2)]);
        // They came at the same moment, so the order of names counts.
        assert_eq!(convicts(&witness), [id(2)]);
        assert_eq!(said[0], (at(2), lost(2, 2, true)));
        assert_eq!(said[1], (from(), lost(1, 2, false)));
    }

    /// The first process has lost its network, but not the witness, and accuses all others first.
    #[test]
    fn the_one_that_more_processes_cannot_reach_is_lost() {
        for others in [&[][..], &[(2, 1)], &[(2, 1), (3, 1)]] {
            let (witness, said) = accused(&[&[(1, 2), (1, 3)], others].concat());
            assert_eq!(convicts(&witness), [id(1)], "{others:?}");
            assert_eq!(said[0], (from(), lost(1, 1, true)));
            // Who has accused it, too, learns of it.
            let told = said[1..].iter().map(|(_, lost)| (lost.to, lost.lost));
            let told: BTreeSet<_> = told.collect();
            let accusers = others.iter().map(|(by, _)| (id(*by), id(1)));
            assert_eq!(told, accusers.collect());
        }
    }

    #[test]
    fn of_two_halves_one_is_lost() {
        let (witness, _) = accused(&[
            (1, 3),
            (3, 1),
            (1, 4),
            (4, 1),
            (2, 3),
            (3, 2),
            (2, 4),
            (4, 2),
        ]);
        assert_eq!(convicts(&witness), [id(3), id(4)]);
    }

    #[test]
    fn an_accusation_that_is_not_repeated_does_not_count() {
        let mut witness = witness();
        say(&mut witness, Time(0), &accuse(1, 2));
        witness.handle_timeout(Time(0) + COLLECTED);
        assert_eq!((convicts(&witness), witness.poll_timeout()), (vec![], None));
        // It is a new one when it comes again.
        let later = Time(10_000_000);
        say(&mut witness, later, &accuse(1, 2));
        assert_eq!(witness.poll_timeout(), Some(later + COLLECTED));
    }

    #[test]
    fn a_lost_process_that_does_not_answer_is_told_again_and_then_taken_for_fenced() {
        let (mut witness, _) = accused(&[(1, 2)]);
        let since = Time(0) + COLLECTED;
        let mut told = 0;
        while let Some(at) = witness.poll_timeout().filter(|at| *at < since + SETTLED) {
            witness.handle_timeout(at);
            told += said(&mut witness).len();
        }
        assert_eq!(told, 6, "after 0.2, 0.6, 1.4, 3.0, 6.2 and 12.6 s");
        let late = say(&mut witness, since + SETTLED, &accuse(1, 2));
        assert_eq!(late, [(from(), lost(1, 2, true))]);
    }

    #[test]
    fn an_accuser_that_does_not_hear_the_witness_does_not_count() {
        let mut witness = witness();
        let answers = say(&mut witness, Time(0), &accuse_with(1, 2, 0));
        let [(_, answer)] = answers[..] else {
            panic!("{answers:?}");
        };
        assert_eq!((answer.ruling, answer.lost), (Ruling::Heard, id(2)));
        let mut counts = |at: u64, whom: u8| {
            let message = accuse_with(1, whom, answer.cookie);
            let asked = say(&mut witness, Time(at), &message);
            assert_eq!(asked.is_empty(), witness.poll_timeout().is_some());
            asked.is_empty()
        };
        assert!(!counts(1, 3), "it is the cookie for another one");
        assert!(!counts(2 * COOKIE_AGE, 2), "it is too old");
        assert!(counts(2 * COOKIE_AGE - 1, 2));
    }

    #[test]
    fn nobody_without_the_key_is_heard() {
        let mut witness = witness();
        for key in [None, JobKey::new(b"another")] {
            let data = seal_with_job(key.as_ref(), &accuse(1, 2));
            witness.handle_datagram(Time(0), FROM.parse().unwrap(), &data);
            assert_eq!(said(&mut witness), []);
        }
        assert_eq!(witness.lost().count(), 0);
    }
}
