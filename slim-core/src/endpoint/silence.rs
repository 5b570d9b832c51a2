//! Is the path of a live flow silent? `docs/PROTOCOL.md`, section "Silent paths".
//!
//! A path that drops everything reports nothing, and the kernel takes a fifth of a second or more until it sends an unacknowledged
//! segment again. So the driver reports a flow that waits for an acknowledgement longer than its round trips explain
//! ([`Endpoint::quiet`]). The peer process is then asked by QUERY, over the flow's own path and over all others at the same time, about
//! once every 4 ms:
//!
//! * If the first or second question over the own path is answered, the path works. The peer's kernel delays its
//!   acknowledgement, or a segment was lost; the kernel takes care of both.
//! * If a later one is answered first, the earlier ones were lost: the path was silent and works again. The flow gets a new connection at
//!   once, because its kernel may wait long before it sends again.
//! * If the own path answers, and the acknowledgement is missing all the same, something on the path drops only this connection, or only
//!   long packets: a firewall that has lost its state, for example. After 0.3 s the flow gets a new connection, over another path if there
//!   is one. If that does not help, the next one has small segments, which pass where long packets do not.
//! * If two are answered over another path and none over the own one, the own path is silent. The flow moves to the other path.
//!
//! A peer process that is only busy answers over all paths late, but the first question first. A firewall may drop all QUERYs of a path that
//! carries TCP. So a path counts as silent only if it has answered within the last minute. Once every 20 s that is asked for, as long as
//! the flow is in use.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::Endpoint;
use super::flow::State;
use super::negotiate::plain;
use super::outage::Outage;
use super::timer::TimerOwner;
use crate::auth::Fresh;
use crate::ids::{Cause, EndpointId, FlowToken, Nonce, Time};
use crate::wire::{Message, Query};

/// Interval between the first [`FAST`] rounds of questions.
const EVERY: Duration = Duration::from_millis(4);
const FAST: u32 = 4;
/// Interval between the rounds after these, at least [`PER_PATH`] times the number of paths that are asked.
const LATER: Duration = Duration::from_millis(15);
const PER_PATH: Duration = Duration::from_millis(1);
/// As many questions without an answer mean that the path is silent. A single one may get lost at any time.
const LOST: u32 = 2;
/// For so long, and twice the time of its last answer, the own path may take to answer.
const SETTLE: Duration = Duration::from_millis(3);
/// A flow that has not been reported for so long waits no more.
const FRESH: Duration = Duration::from_millis(120);
/// After an answer over the own path, it is not asked for so long.
const REST: Duration = Duration::from_millis(25);
/// A flow whose acknowledgement is overdue for so long gets a new connection although the path answers, if it has answered even some
/// time after the acknowledgement was due.
const DEAF: Duration = Duration::from_millis(300);
const ANSWERING: Duration = Duration::from_millis(100);
/// Flows of one path get such connections at about the same time, and then not for some time, because these may not help.
const TOGETHER: Duration = Duration::from_millis(100);
const AGAIN: Duration = Duration::from_secs(1);
/// If that was so lately for a flow, its next connection has small segments.
const LATELY: Duration = Duration::from_secs(10);
/// How often a path in use is asked, and how long its answer counts.
const PROVE: Duration = Duration::from_secs(20);
const PROVEN: Duration = Duration::from_secs(60);
/// How long the answer to a single question is waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// Number of ways to a peer: its own path and others.
const WAYS: u32 = 4;

/// A peer process, and the local and the remote address of flows with it.
type PathEnds = (EndpointId, IpAddr, IpAddr);

/// The paths of live flows that are in use.
#[derive(Default)]
pub(super) struct Silences {
    paths: BTreeMap<PathEnds, PathWatch>,
    /// Flows whose transport has other addresses than the application's connection: the local and the remote one.
    pub(super) moved: BTreeMap<FlowToken, (IpAddr, IpAddr)>,
    /// Flows that got a new connection although their path answered, and when.
    pub(super) deaf: BTreeMap<FlowToken, Time>,
}

/// What is known of a path.
#[derive(Default)]
struct PathWatch {
    /// When it was last asked for the first time, and when it has last answered.
    asked: Option<Time>,
    proven: Option<Time>,
    /// How long it took to answer.
    trip: Duration,
    /// When a flow was last in use on it.
    used: Time,
    inquest: Option<Inquest>,
    /// When flows began to get new connections although it answers, and such with small segments.
    left: [Option<Time>; 2],
}

impl PathWatch {
    /// Whether flows may get new connections, with small segments or not, although the path answers.
    fn may_be_left(&mut self, now: Time, small_segments: bool) -> bool {
        let left = &mut self.left[usize::from(small_segments)];
        match left {
            Some(left) if now.since(*left) < TOGETHER => true,
            Some(left) if now.since(*left) < AGAIN => false,
            _ => {
                *left = Some(now);
                true
            }
        }
    }
}

/// Questions about a path, and the answers.
struct Inquest {
    /// The nonce of the question of round `r` by way `w` is `base + r * WAYS + w`.
    base: Nonce,
    rounds: u32,
    next: Time,
    begun: Time,
    /// Flows that wait for an acknowledgement, and when that was last reported.
    waiting: BTreeMap<FlowToken, Time>,
    /// The last round that another path has answered, how many it has answered, and to which address.
    elsewhere: Option<(u32, u32, IpAddr)>,
}

impl Silences {
    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }

    /// Forgets paths that are not in use any more.
    pub(super) fn expire(&mut self, now: Time) {
        let used = |path: &PathWatch| path.inquest.is_some() || now.since(path.used) < PROVEN;
        self.paths.retain(|_, path| used(path));
        self.deaf.retain(|_, at| now.since(*at) < LATELY);
    }

    /// Whether the flow has lately got a new connection although its path answered.
    pub(super) fn was_deaf(&self, now: Time, token: FlowToken) -> bool {
        let at = self.deaf.get(&token);
        at.is_some_and(|at| now.since(*at) < LATELY)
    }

    fn asked(&self) -> u32 {
        let open = self.paths.values();
        open.filter(|path| path.inquest.is_some()).count() as u32
    }
}

impl Inquest {
    /// The round and the way of the question with this nonce.
    fn which(&self, nonce: Nonce) -> Option<(u32, usize)> {
        let n = nonce.after(self.base)?;
        let round = n / WAYS;
        (round < self.rounds).then_some((round, (n % WAYS) as usize))
    }

    /// Over this other path the peer answers, and over the own one, where an answer takes `trip`, it should have answered by now.
    fn goes_elsewhere(&self, now: Time, trip: Duration) -> Option<IpAddr> {
        let (_, answers, ip) = self.elsewhere?;
        let settled = now.since(self.begun) >= EVERY + SETTLE + trip * 2;
        (answers >= LOST && self.rounds >= LOST && settled).then_some(ip)
    }
}

/// Calls of the driver.
impl Endpoint {
    /// The addresses of a connection that is about to be installed.
    pub fn moves(&mut self, token: FlowToken, local: SocketAddr, remote: SocketAddr) {
        let Some(flow) = self.flows.get(&token) else {
            return;
        };
        // What it waits for is sent again.
        let open = self.silences.paths.values_mut();
        for inquest in open.filter_map(|path| path.inquest.as_mut()) {
            inquest.waiting.remove(&token);
        }
        let now = [plain(local).ip(), plain(remote).ip()];
        match now == [flow.ends.local().ip(), flow.ends.remote().ip()] {
            true => self.silences.moved.remove(&token),
            false => self.silences.moved.insert(token, now.into()),
        };
    }

    /// This host no longer has the address. Live flows with a connection there get a new one: the peer cannot know another address of this
    /// host, and a flow that only waits would never notice.
    pub fn address_gone(&mut self, now: Time, ip: IpAddr) {
        let here = |token: &FlowToken| {
            self.watched(*token)
                .is_some_and(|(_, local, _)| local == ip)
        };
        let all: Vec<FlowToken> = self.flows.keys().copied().filter(here).collect();
        for token in all {
            self.suspect(now, token);
        }
    }

    /// The flow has sent bytes lately, and does not wait, unless [`quiet`](Self::quiet) is called next. Returns by how many paths its
    /// peer may be reached: 0 if a silent path is not looked for, because the flow is not live, or the peer is on this host.
    pub fn in_use(&mut self, now: Time, token: FlowToken) -> usize {
        let Some(ends) = self.watched(token) else {
            return 0;
        };
        let ways = self.ways(token).len();
        let path = self.silences.paths.entry(ends).or_default();
        path.used = now;
        if let Some(inquest) = &mut path.inquest {
            inquest.waiting.remove(&token);
        }
        let due = path.asked.is_none_or(|asked| now.since(asked) >= PROVE);
        if ways > 1 && due && path.inquest.is_none() {
            self.begin_inquest(now, ends, token);
        }
        ways
    }

    /// The flow waits for an acknowledgement for longer than its round trips explain, by the time `overdue`.
    pub fn quiet(&mut self, now: Time, token: FlowToken, overdue: Duration) {
        let Some(ends) = self.watched(token) else {
            return;
        };
        let small_segments = self.silences.was_deaf(now, token);
        let path = self.silences.paths.entry(ends).or_default();
        path.used = now;
        let answers = |proven: Time| now.since(proven) + ANSWERING <= overdue;
        let deaf = overdue >= DEAF && path.proven.is_some_and(answers);
        if deaf && path.may_be_left(now, small_segments) {
            self.silences.deaf.insert(token, now);
            return self.suspect_path(now, token, small_segments);
        }
        if let Some(inquest) = &mut path.inquest {
            inquest.waiting.insert(token, now);
            let next = inquest.next.min(now + EVERY);
            inquest.next = next;
            return self.judge_at(next);
        }
        if path.proven.is_some_and(|proven| now.since(proven) < REST) {
            return;
        }
        self.begin_inquest(now, ends, token);
        if let Some(inquest) = self.inquest(ends) {
            inquest.waiting.insert(token, now);
        }
    }
}

impl Endpoint {
    /// The path of a live flow whose transport may be silent.
    fn watched(&self, token: FlowToken) -> Option<PathEnds> {
        let flow = self.flows.get(&token)?;
        let peer = flow.peer_id()?;
        let live = flow.state() == State::Live && flow.outage.is_none();
        let (local, remote) = self.path_of(token)?;
        let far = peer.host != self.id.host && !remote.is_loopback();
        let tcp = flow.change.pump.is_none() && !self.is_relayed(token);
        (live && far && tcp && !self.has_peer_closed(token)).then_some((peer, local, remote))
    }

    /// The addresses of the flow's present connection.
    fn path_of(&self, token: FlowToken) -> Option<(IpAddr, IpAddr)> {
        let ends = || {
            let ends = &self.flows.get(&token)?.ends;
            Some((ends.local().ip(), ends.remote().ip()))
        };
        self.silences.moved.get(&token).copied().or_else(ends)
    }

    /// The peer's control port at its addresses: the one that the flow's connection leads to first.
    fn ways(&self, token: FlowToken) -> Vec<SocketAddr> {
        let (flow, path) = (self.flows.get(&token), self.path_of(token));
        let (Some(flow), Some((_, first))) = (flow, path) else {
            return Vec::new();
        };
        let Some(peer) = &flow.peer else {
            return Vec::new();
        };
        let home = flow.ends.remote().ip();
        let others = std::iter::once(home).chain(peer.process.addrs.iter().copied());
        let usable =
            |ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified() && !self.own.addrs.contains(ip);
        let mut ips = vec![first];
        for ip in others.filter(usable) {
            if ips.len() < WAYS as usize && !ips.contains(&ip) {
                ips.push(ip);
            }
        }
        let port = peer.process.control_port;
        ips.into_iter().map(|ip| flow.peer_at(ip, port)).collect()
    }

    fn inquest(&mut self, ends: PathEnds) -> Option<&mut Inquest> {
        self.silences.paths.get_mut(&ends)?.inquest.as_mut()
    }

    fn begin_inquest(&mut self, now: Time, ends: PathEnds, token: FlowToken) {
        let base = self.rng.nonce();
        let Some(path) = self.silences.paths.get_mut(&ends) else {
            return;
        };
        path.asked = Some(now);
        path.inquest = Some(Inquest {
            base,
            rounds: 0,
            next: now,
            begun: now,
            waiting: BTreeMap::new(),
            elsewhere: None,
        });
        self.ask_all_ways(now, ends, token);
    }

    /// The next round of questions.
    fn ask_all_ways(&mut self, now: Time, ends: PathEnds, token: FlowToken) {
        let asked = self.silences.asked();
        let spread = self.rng.up_to(EVERY.as_micros() as u64 / 4);
        let Some(inquest) = self.inquest(ends) else {
            return;
        };
        let first = inquest.rounds * WAYS;
        let base = inquest.base;
        inquest.rounds += 1;
        let every = match inquest.rounds < FAST {
            true => EVERY,
            false => LATER.max(PER_PATH * asked),
        };
        // A random interval, so that processes that lost the same path together do not ask together.
        let next = now + every + Duration::from_micros(spread);
        inquest.next = next;
        for (way, to) in self.ways(token).into_iter().enumerate() {
            let message = Message::Query(Query {
                flow: self.flows[&token].name(),
                nonce: base.plus(first + way as u32),
            });
            let data = self.seal(token, Fresh::None, &message);
            let from = match way {
                0 if self.silences.moved.contains_key(&token) => {
                    Some(SocketAddr::new(ends.1, self.own.control_port))
                }
                _ => self.own_end(token, to),
            };
            self.out.datagram(to, from, data);
        }
        self.judge_at(next);
    }

    fn judge_at(&mut self, next: Time) {
        let due = self.timers.get(TimerOwner::Silences);
        if due.is_none_or(|due| due > next) {
            self.timers.set(TimerOwner::Silences, next);
        }
    }

    /// Judges the paths that are asked, and asks again.
    pub(super) fn on_silences_timer(&mut self, now: Time) {
        let due = |path: &PathWatch| path.inquest.as_ref().is_some_and(|i| i.next <= now);
        let paths = self.silences.paths.iter();
        let due: Vec<PathEnds> = paths
            .filter(|(_, p)| due(p))
            .map(|(ends, _)| *ends)
            .collect();
        for ends in due {
            self.on_inquest(now, ends);
        }
        let open = self.silences.paths.values();
        let next = open
            .filter_map(|path| Some(path.inquest.as_ref()?.next))
            .min();
        match next {
            Some(next) => self.timers.set(TimerOwner::Silences, next),
            None => self.timers.clear(TimerOwner::Silences),
        }
    }

    fn on_inquest(&mut self, now: Time, ends: PathEnds) {
        let Some(path) = self.silences.paths.get(&ends) else {
            return;
        };
        let proven = path.proven.is_some_and(|proven| now.since(proven) < PROVEN);
        let Some(inquest) = &path.inquest else {
            return;
        };
        let waits = |(token, at): (&FlowToken, &Time)| {
            let still = now.since(*at) < FRESH && self.watched(*token) == Some(ends);
            still.then_some(*token)
        };
        let waiting: Vec<FlowToken> = inquest.waiting.iter().filter_map(waits).collect();
        let Some(&token) = waiting.first() else {
            return self.await_proof(now, ends);
        };
        match inquest.goes_elsewhere(now, path.trip) {
            Some(via) if proven => self.path_failed(now, ends, waiting, via),
            _ => self.ask_all_ways(now, ends, token),
        }
    }

    /// No flow waits. An answer to the questions is waited for a little longer, because it proves that the path answers.
    fn await_proof(&mut self, now: Time, ends: PathEnds) {
        match self.inquest(ends) {
            Some(inquest) if now.since(inquest.begun) < PATIENCE => {
                inquest.next = inquest.begun + PATIENCE
            }
            _ => self.end_inquest(ends),
        }
    }

    fn end_inquest(&mut self, ends: PathEnds) {
        if let Some(path) = self.silences.paths.get_mut(&ends) {
            path.inquest = None;
        }
    }

    /// The flows get new connections, to the address `via` first. The old ones stay in use until these work.
    fn path_failed(&mut self, now: Time, ends: PathEnds, waiting: Vec<FlowToken>, via: IpAddr) {
        self.end_inquest(ends);
        for token in waiting {
            let mut outage = Outage::new(now, Cause::Stall);
            outage.via = Some(via);
            self.begin_outage(now, token, outage);
        }
    }

    /// The peer has sent an answer, which the caller has verified. True if it answers a question about a path.
    pub(super) fn path_answered(&mut self, now: Time, peer: EndpointId, nonce: Nonce) -> bool {
        let answers = |(ends, path): (&PathEnds, &PathWatch)| {
            let which = path.inquest.as_ref()?.which(nonce)?;
            (ends.0 == peer).then_some((*ends, which))
        };
        let Some((ends, (round, way))) = self.silences.paths.iter().find_map(answers) else {
            return false;
        };
        if way > 0 {
            self.answered_elsewhere(ends, round, way);
            return true;
        }
        let Some(path) = self.silences.paths.get_mut(&ends) else {
            return true;
        };
        path.proven = Some(now);
        let Some(inquest) = path.inquest.take() else {
            return true;
        };
        if round == 0 {
            path.trip = now.since(inquest.begun);
        }
        if round >= LOST {
            let waiting = inquest.waiting.into_iter();
            let fresh = waiting.filter(|(_, at)| now.since(*at) < FRESH);
            let waiting: Vec<_> = fresh
                .map(|(token, _)| token)
                .filter(|token| self.watched(*token) == Some(ends))
                .collect();
            self.path_failed(now, ends, waiting, ends.2);
        }
        true
    }

    fn answered_elsewhere(&mut self, ends: PathEnds, round: u32, way: usize) {
        let waiting = |inquest: &Inquest| inquest.waiting.keys().next().copied();
        let path = self.silences.paths.get(&ends);
        let Some(token) = path.and_then(|path| waiting(path.inquest.as_ref()?)) else {
            return;
        };
        let Some(ip) = self.ways(token).get(way).map(SocketAddr::ip) else {
            return;
        };
        if let Some(inquest) = self.inquest(ends) {
            inquest.elsewhere = match inquest.elsewhere {
                None => Some((round, 1, ip)),
                Some((last, n, _)) if round > last => Some((round, n + 1, ip)),
                known => known,
            };
        }
    }
}
