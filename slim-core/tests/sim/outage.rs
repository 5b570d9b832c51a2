//! Outages of hours, in which flows are held. Hosts change their addresses meanwhile.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use slim_core::auth::JobKey;
use slim_core::endpoint::HOLD_ROUNDS;
use slim_core::witness::Witness;
use slim_core::{FlowToken, Time};

use crate::dice::{Dice, mix};
use crate::event::{Ev, Harm};
use crate::front::{Front, Plan};
use crate::kinds::Kinds;
use crate::net::addr_at;
use crate::node::{Clock, Node, Owner};
use crate::world::{MS, SECOND, World, endpoint};

/// Where processes find each other: a host on the networks of path 0.
pub const MEETING: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 4000);
const KEY: &[u8] = b"the key of the job";
const HOUR: u64 = 3600 * SECOND;

/// What happens during the outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// Both hosts change all their addresses, and find each other at the meeting point.
    BothMove,
    /// One host changes its addresses, and there is no meeting point.
    OneMoves,
    /// Both hosts change their addresses, there is no meeting point, and one of them gets its old address back.
    OneReturns,
    /// One host changes its addresses many times.
    Flaps,
    /// The outage is longer than the user wants to hold on.
    TooLong,
    /// The process on one host ends.
    Dies,
}

/// What a process did while all its flows without transport rested.
struct Rest {
    since: u64,
    /// When a timer expired last, on its clock, other than for an end.
    last: Option<Time>,
    wakes: u64,
    /// Number of timers that expired soon after a round, because a flow was given up.
    ends: usize,
}

pub struct LongOutage {
    pub course: Course,
    from: u64,
    until: u64,
    witness: Option<Witness>,
    /// Of each process, since it has rested.
    rests: [Option<Rest>; 2],
}

impl World {
    /// A world with an outage of up to 72 hours, or of 72 hours.
    pub fn outage(seed: u64, course: Course, full: bool) -> World {
        let kinds = Kinds::agreed();
        let mut world = World::empty(seed, None, kinds.clone());
        let mut dice = Dice::new(mix(seed ^ 0x407d));
        let meets = matches!(course, Course::BothMove | Course::Flaps | Course::Dies);
        let hours = if full {
            72 * HOUR
        } else {
            dice.spread(HOUR / 2, 72 * HOUR)
        };
        let config = &mut world.config;
        config.hold = Some(match course {
            Course::TooLong => Duration::from_micros(dice.spread(60 * SECOND, hours / 3)),
            _ => Duration::from_secs(96 * 3600),
        });
        config.job_key = JobKey::new(KEY);
        if meets {
            config.meet = vec![MEETING];
        }
        if dice.chance(50) {
            config.attempt_timeouts = [1, 1, 2].map(Duration::from_secs).to_vec();
        }
        let config = world.config.clone();
        world.nodes = [0, 1].map(|n: usize| {
            let clock = Clock {
                offset: dice.spread(1, 1 << 50),
                rate: dice.pick(900, 1100),
            };
            let own = kinds.transports(n);
            Node::new(endpoint(config.clone(), own, seed, n, 1), clock)
        });
        // A kernel that has a minute, or a quarter of an hour, does not report its fault before all attempts have failed.
        world.user_timeout = dice.spread(SECOND, 1000 * SECOND);
        world.start_calmly();
        let from = dice.spread(SECOND / 100, 3 * SECOND);
        let until = from + hours;
        world.long = Some(LongOutage {
            course,
            from,
            until,
            witness: meets
                .then(|| Witness::new(JobKey::new(KEY).expect("long enough"), [seed as u8; 32])),
            rests: [None, None],
        });
        world.at(from, Ev::Fault(Harm::Dark { until }));
        world.moves(&mut dice, course, from, until);
        world.healthy = world.healthy.max(until);
        // Both may just have asked, and up to 40 of 100 datagrams get lost: so a round finds the peer with a probability of one in seven at worst.
        world.patience = 5000 * SECOND;
        if course == Course::OneReturns {
            world.patience += 600 * SECOND;
        }
        world
    }

    /// Flows that are agreed on, in a network that works. Their applications are polite.
    fn start_calmly(&mut self) {
        (self.snipes, self.flows) = (0, 1 + self.dice.pick(0, 2) as usize);
        for flow in 0..self.flows {
            let conn = self.new_tcp(0);
            let token = FlowToken(flow as u64 + 1);
            for node in 0..2 {
                let (idle, most) = (self.dice.chance(30), self.dice.spread(1, 60_000));
                let plan = if idle { Plan::Idle } else { Plan::Orderly };
                let front = Front::new((conn, node), 0, plan, most);
                self.nodes[node].fronts.insert(token, front);
                self.owners[conn][node] = Owner::Flow(token);
            }
            self.agree(flow, token);
        }
    }

    fn moves(&mut self, dice: &mut Dice, course: Course, from: u64, until: u64) {
        let during = |dice: &mut Dice| dice.pick(from, until);
        match course {
            Course::BothMove => {
                for node in 0..2 {
                    let at = during(dice);
                    self.at(at, Ev::Move { node, place: 1 });
                }
            }
            Course::OneMoves => {
                let (at, node) = (during(dice), dice.pick(0, 1) as usize);
                self.at(at, Ev::Move { node, place: 1 });
            }
            Course::OneReturns => {
                for node in 0..2 {
                    let at = during(dice);
                    self.at(at, Ev::Move { node, place: 1 });
                }
                let (late, node) = (dice.pick(0, 600 * SECOND), dice.pick(0, 1) as usize);
                self.at(until + late, Ev::Move { node, place: 0 });
            }
            Course::Flaps => {
                let node = dice.pick(0, 1) as usize;
                let mut at = during(dice);
                for n in 1..=dice.pick(20, 100) {
                    let place = match dice.chance(30) {
                        true => 0,
                        false => n as u8,
                    };
                    at += dice.spread(MS, 300 * SECOND);
                    self.at(at.min(until), Ev::Move { node, place });
                }
                let at = during(dice);
                self.at(
                    at,
                    Ev::Move {
                        node: 1 - node,
                        place: 7,
                    },
                );
            }
            Course::TooLong => {}
            Course::Dies => {
                let (at, node) = (during(dice), dice.pick(0, 1) as usize);
                self.at(at, Ev::Fault(Harm::Die { node }));
            }
        }
    }

    /// The end of the outage, while it lasts.
    pub fn dark_until(&self) -> Option<u64> {
        let long = self.long.as_ref()?;
        (long.from..long.until)
            .contains(&self.now)
            .then_some(long.until)
    }

    /// The flows are not to outlive the outage.
    pub fn gives_up(&self) -> bool {
        self.long
            .as_ref()
            .is_some_and(|long| long.course == Course::TooLong)
    }

    /// The other side has closed the flow, or taken it for plain TCP, and its host is elsewhere now. So it does not look for this side, which does not
    /// find it without a meeting point.
    pub fn nobody_is_to_be_found(&self, other: usize, token: FlowToken) -> bool {
        let alone = self
            .long
            .as_ref()
            .is_some_and(|long| long.witness.is_none());
        let front = &self.nodes[other].fronts[&token];
        alone && self.places[other] != 0 && (front.gone || front.legacy)
    }

    pub fn is_dark(&self) -> bool {
        self.dark_until().is_some()
    }

    /// The host `node` has other addresses from now on, and no others.
    pub fn move_host(&mut self, node: usize, place: u8) {
        let before = [0, 1].map(|path| self.addr_now(node, path));
        self.places[node] = place;
        let addrs = [0, 1].map(|path| addr_at(node, path, place));
        if before == addrs || !self.nodes[node].alive {
            return;
        }
        let now = self.clock(node);
        let endpoint = &mut self.nodes[node].endpoint;
        for (token, front) in &mut self.nodes[node].fronts {
            front.trying |= !endpoint.is_held(*token);
        }
        endpoint.set_addrs(now, addrs.to_vec(), Vec::new());
        for gone in before {
            endpoint.address_gone(now, gone);
        }
    }

    pub fn send_to_meeting(&mut self, node: usize, data: Vec<u8>) {
        if self.passes(0, node) && !self.dice.chance(self.udp_loss) {
            let from = SocketAddr::new(self.addr_now(node, 0), crate::net::CONTROL);
            let pause = self.latency;
            self.later(pause, 2 * pause, Ev::Meeting { from, data });
        }
    }

    pub fn meet(&mut self, from: SocketAddr, data: &[u8]) {
        let mut said = Vec::new();
        if let Some(witness) = self.long.as_mut().and_then(|long| long.witness.as_mut()) {
            witness.handle_datagram(Time(self.now), from, data);
            said.extend(std::iter::from_fn(|| witness.poll_datagram()));
        }
        for (to, data) in said {
            let there = self
                .host_at(&to)
                .filter(|(node, path)| self.passes(*path, *node));
            if let Some((node, _)) = there.filter(|_| !self.dice.chance(self.udp_loss)) {
                let (from, pause) = (MEETING, self.latency);
                let event = Ev::Datagram {
                    node,
                    from,
                    to,
                    data,
                };
                self.later(pause, 2 * pause, event);
            }
        }
    }

    /// Carries out `Look`.
    pub fn look_at_held(&mut self, node: usize, token: FlowToken) {
        let Some((tcp, side)) = self.front(node, token).tcp else {
            return;
        };
        let acked = self.tcps[tcp].acked(side);
        let before = self.front(node, token).looked.replace(acked);
        if before.is_some_and(|before| before != acked) {
            self.front(node, token).looked = None;
            let now = self.clock(node);
            self.nodes[node].endpoint.moves_on(now, token);
        }
    }

    /// A timer of the process expires. While all flows that lack their transport rest, that happens once a minute at most, or four times
    /// in a short hold, and once more at the end of each hold.
    pub fn expires(&mut self, node: usize) -> Result<(), String> {
        let clock = self.clock(node);
        let (world_now, dark) = (self.now, self.is_dark());
        let at = &self.nodes[node];
        let due = at.endpoint.poll_timeout().is_some_and(|at| at <= clock);
        let held = |token: &FlowToken| at.endpoint.is_held(*token);
        let rests = at.fronts.keys().any(held)
            && at
                .fronts
                .iter()
                .all(|(token, front)| !front.trying || held(token));
        let Some(long) = &mut self.long else {
            return Ok(());
        };
        if !rests || !dark {
            if let Some(rest) = long.rests[node].take() {
                self.stats.rested += (world_now - rest.since) / SECOND;
                self.stats.wakes += rest.wakes;
            }
            return Ok(());
        }
        if !due {
            return Ok(());
        }
        if self.trace {
            println!(
                "{world_now:>10} {node} expires at {clock:?}, hold timer {:?}",
                self.nodes[node].endpoint.hold_timer()
            );
        }
        // The first timer to expire may be one from before.
        let Some(rest) = &mut long.rests[node] else {
            long.rests[node] = Some(Rest {
                since: world_now,
                last: None,
                wakes: 0,
                ends: 0,
            });
            return Ok(());
        };
        rest.wakes += 1;
        let hold = self.config.hold.expect("an outage has a hold");
        // The clock has whole microseconds.
        let least = HOLD_ROUNDS.min(hold / 4) - Duration::from_micros(1);
        let soon = rest.last.is_some_and(|last| clock.since(last) < least);
        match soon {
            true => rest.ends += 1,
            false => rest.last = Some(clock),
        }
        // The other holds are longer than the outage.
        let ends = match long.course {
            Course::TooLong => self.flows,
            _ => 0,
        };
        match rest.ends > ends {
            true => Err(format!(
                "side {node} wakes within {least:?} more often than holds end"
            )),
            false => Ok(()),
        }
    }
}
